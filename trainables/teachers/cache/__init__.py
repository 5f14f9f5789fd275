"""What a teacher answered, kept on disk: an augmentation is a function of (seed, epoch, sample), and so is the answer to it."""
