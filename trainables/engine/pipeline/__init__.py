"""Training of a model that is cut into pipeline stages, where it differs from training a whole model on each rank."""
