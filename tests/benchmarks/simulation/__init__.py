"""Clusters that do not exist: a step of data-parallel training, played through by its parts, to search over without a GPU."""
