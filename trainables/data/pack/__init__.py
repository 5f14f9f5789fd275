"""Create a packed set: read a source, convert its images if asked, write shards, and index them."""
