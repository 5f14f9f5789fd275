"""`python -m tests.faults storm`: faults at random moments, counted, and whether anything was lost."""
