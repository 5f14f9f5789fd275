"""Clusters that do not exist: a step of data-parallel training, simulated, to search over without a GPU."""
