"""Read the batches of a split for one worker, in order, with decode threads in the training process or a separate one."""
