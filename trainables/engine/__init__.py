"""A training job: built, stepped, evaluated, saved in checkpoints. Knows no Ray."""
