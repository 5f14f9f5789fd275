"""A sweep carried out: its trials in the hands of Ray Tune."""
