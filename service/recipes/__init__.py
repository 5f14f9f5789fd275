"""Experiments that ship with raydistill."""
