"""A teacher's outputs on disk (`teacher.cache`): an augmentation is a function of (seed, epoch, sample), and so are they."""
