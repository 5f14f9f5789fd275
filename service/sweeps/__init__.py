"""Sweeps: trials of an experiment at the points of a space, run by Ray Tune."""
