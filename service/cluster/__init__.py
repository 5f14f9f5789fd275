"""The Ray cluster: connected to, measured, and used from a thread of its own."""
