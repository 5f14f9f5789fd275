"""Where a set lies while workers read it: a node's copy, its cache, or shards that come from a server as they are needed."""
