"""The ranks of a job: collectives, global batch norm, and a pool of local processes."""
