"""A training job: built, stepped, evaluated, kept in checkpoints. Knows no Ray."""
