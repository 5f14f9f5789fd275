"""A teacher's outputs in memory that stays where it is, for a CUDA graph that reads them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainables.methods.contract import ModelOutputs


class StaticOutputs:
    """Outputs by method; what several methods read, such as the logits, is there once."""

    def __init__(self, outputs: Mapping[str, ModelOutputs]) -> None:
        """With the values of `outputs`."""
        tensors = _tensors(outputs)
        copies = {key: tensor.clone() for key, tensor in tensors.items()}  # in the tensor's own strides
        self.outputs = {
            method: each.with_tensors([copies[id(tensor)] for tensor in each.tensors]) for method, each in outputs.items()
        }
        self._copies = list(copies.values())
        self._layout = _layout(outputs, tensors)

    def copy_from(self, outputs: Mapping[str, ModelOutputs]) -> bool:
        """Take the values of further outputs. False: their tensors are others, and nothing was copied."""
        tensors = _tensors(outputs)
        if _layout(outputs, tensors) != self._layout:
            return False
        if tensors:
            torch._foreach_copy_(self._copies, list(tensors.values()))
        return True


def _tensors(outputs: Mapping[str, ModelOutputs]) -> dict[int, Tensor]:
    """Each tensor once, by its id."""
    return {id(tensor): tensor for each in outputs.values() for tensor in each.tensors}


def _layout(outputs: Mapping[str, ModelOutputs], tensors: Mapping[int, Tensor]) -> Any:
    """Which method reads which tensors, and what these are."""
    index = {key: number for number, key in enumerate(tensors)}
    methods = [(method, [index[id(tensor)] for tensor in each.tensors]) for method, each in outputs.items()]
    return methods, [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors.values()]
