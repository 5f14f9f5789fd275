"""The doctor against runs that are slow for a reason that was put into them: `python -m tests.faults`."""
