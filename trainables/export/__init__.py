"""Export a trained student for other programs. Each file is read back by the library that loads the format, and compared.

Importing this module does not import torch.
"""

EXPORTS = {
    "onnx": "onnx:FORMAT",
    "torch_export": "torch_export:FORMAT",
    "timm": "timm:FORMAT",
    "torchvision": "state_dict:TORCHVISION",
    "safetensors": "state_dict:SAFETENSORS",
}
"""Format name → `module:Format` in this package."""
