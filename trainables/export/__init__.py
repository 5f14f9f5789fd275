"""A trained student as other programs read it: one file a format, each loaded back by the library that reads it and compared.

Importing this costs no torch.
"""

EXPORTS = {
    "onnx": "onnx:FORMAT",
    "torch_export": "torch_export:FORMAT",
    "timm": "timm:FORMAT",
    "torchvision": "state_dict:TORCHVISION",
    "safetensors": "state_dict:SAFETENSORS",
}
"""Name of a format → `module:Format` in this package."""
