"""The models of the CIFAR literature on distillation."""
