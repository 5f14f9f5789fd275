"""Search over an experiment's values."""
