"""Evaluate frozen features: k-NN, a linear probe, and the similarity of two models' features."""
