"""Export a trained student for other programs. Each file is read back by the library that loads the format, and compared.

Importing this module does not import torch.
"""

NAMES = ("onnx", "torch_export", "timm", "torchvision", "safetensors")
"""The names of the formats, see `formats`."""
