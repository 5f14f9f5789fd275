"""One model over several devices: where it can be cut, what its parts cost, and how micro-batches flow through them."""
