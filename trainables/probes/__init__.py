"""What frozen features are worth: k-NN, a linear probe, and how alike two models' features are."""
