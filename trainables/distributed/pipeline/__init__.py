"""Run one model over several devices: cut it, estimate the cost of its parts, and pipeline micro-batches through them."""
