"""Build, train, evaluate and checkpoint a training job. Knows no Ray."""
