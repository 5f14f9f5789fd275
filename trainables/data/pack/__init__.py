"""How a packed set is made: read a source, change its images or not, write shards, join them under one index."""
