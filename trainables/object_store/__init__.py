"""Runs in an object store: each file is one object, and a folder on each node is a copy of the run."""
