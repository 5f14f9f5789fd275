"""Models by name: our own for small images, torchvision's and timm's, and the weights that a teacher starts from."""
