"""Runs a stage on the cluster: its assignment, reservation, waits, teacher actors and times."""
