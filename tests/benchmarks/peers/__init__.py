"""Loaders of other projects, each run by a Python that has it: scripts that know nothing of this project."""
