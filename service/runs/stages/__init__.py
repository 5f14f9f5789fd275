"""A stage of a run on the cluster: what it reserves, waits for and needs around it, and how it ends."""
