"""Local storage of a set while workers read it: a node's copy or cache, with shards fetched from a server as needed."""
