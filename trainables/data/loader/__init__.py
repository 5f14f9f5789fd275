"""Batches of a split for one worker, in order: decode threads, in the training process or in one of their own."""
