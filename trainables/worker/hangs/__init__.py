"""Workers that make no progress: noticed, explained, ended."""
