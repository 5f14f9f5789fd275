"""Distillation losses in float64 numpy, written from the papers' equations and never from `trainables.methods`.

They are slow and plain on purpose: a test compares the product's losses with them, and its gradients with their numerical
derivatives. A function returns (B,), each sample's share of a mean over the batch, or a float where samples are compared.
"""
