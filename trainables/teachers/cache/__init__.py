"""A teacher's outputs on disk (`teacher.cache`): an augmentation is a function of (seed, epoch, sample), and so are they."""

IMAGES = "images.txt"
"""In the folder of a key: it was published, see `publish`."""
CARD_TITLE = "# Reinforced data set"
"""How the README.md around published folders begins."""
