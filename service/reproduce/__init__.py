"""`distill reproduce`: a table of published accuracies as sweeps, and ours next to it."""
