"""The workers' side of raydistill: everything that runs on a node that trains."""
