"""Models by name: our own for small images, torchvision's and timm's; teachers' weights; taps."""
