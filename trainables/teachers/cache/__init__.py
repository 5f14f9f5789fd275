"""A teacher's logits on disk (`teacher.cache`): an augmentation is a function of (seed, epoch, sample), and so are its logits."""
