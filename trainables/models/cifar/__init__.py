"""CIFAR models from the distillation literature."""
