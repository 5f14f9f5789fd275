"""Runs in an object store: each file is one object, and each node has a local copy of what it needs."""
