"""What a network can save that is never trained: batch norms folded into convolutions, and weights in half precision once.

In eval mode a batch norm multiplies and adds what does not change: conv then norm is one convolution with other weights (Jacob et
al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", section 3.2). Under
autocast the weights of convolutions and linear layers are rounded in each forward pass: rounded once, outputs have the same bits.
"""

from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from trainables.distributed.pipeline.graph import mode_of, trace
from trainables.errors import ModelError

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def fold_batch_norms(network: nn.Module, tapped: Collection[str] = ()) -> int:
    """Fold what can be, in place: in float64, so that outputs differ by rounding alone. Returns how many batch norms that are.

    A batch norm is folded into a convolution whose output it alone reads. Both are torch's own, and run once. `tapped`: paths of
    modules that are read; what they give must not change, so nothing is folded across their borders.
    """
    try:
        with mode_of(network, training=False):
            graph = trace(network)
    except ModelError:  # its forward branches on values
        return 0
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    pairs = [pair for node in graph.nodes if (pair := _pair(node, network)) and all(calls[path] == 1 for path in pair)]
    foldable = [pair for pair in pairs if not any(_covers(path, pair[0]) != _covers(path, pair[1]) for path in tapped)]
    for conv_path, norm_path in foldable:
        conv: Any = network.get_submodule(conv_path)
        norm: Any = network.get_submodule(norm_path)
        dtype = conv.weight.dtype
        network.set_submodule(conv_path, fuse_conv_bn_eval(conv.double(), norm.double()).to(dtype))
        network.set_submodule(norm_path, nn.Identity())
    return len(foldable)


def round_weights(network: nn.Module, dtype: torch.dtype) -> None:
    """Give the layers that autocast runs in `dtype` their weights in it; from then on the network runs under autocast alone."""
    for module in network.modules():
        if type(module) in (*_CONVOLUTIONS, nn.Linear):
            module.to(dtype)


def _pair(node: fx.Node, network: nn.Module) -> tuple[str, str] | None:
    """The paths of a convolution and of the batch norm at this node, which alone reads it."""
    conv = node.args[0] if node.op == "call_module" and node.args else None
    if not isinstance(conv, fx.Node) or conv.op != "call_module" or len(conv.users) != 1:
        return None
    conv_module, norm = network.get_submodule(str(conv.target)), network.get_submodule(str(node.target))
    if type(conv_module) not in _CONVOLUTIONS or type(norm) not in _BATCH_NORMS or norm.running_var is None:
        return None
    return str(conv.target), str(node.target)


def _covers(path: str, other: str) -> bool:
    return not path or other == path or other.startswith(f"{path}.")
