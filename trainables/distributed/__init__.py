"""What the ranks of a job share."""
