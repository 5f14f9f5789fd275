"""Runs in an object store, on the driver's side."""
