"""The driver's side of raydistill: an experiment goes in, records and a report come out."""
