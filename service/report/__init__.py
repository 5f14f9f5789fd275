"""What a finished or running run has to say."""
