"""The driver's side of runs in an object store."""
