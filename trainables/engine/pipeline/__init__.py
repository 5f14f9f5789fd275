"""The training of a model that is cut into pipeline stages: what differs from that of a whole one on each rank."""
