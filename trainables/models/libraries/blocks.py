"""Where the blocks of the libraries end, for the pre-activations of their stages and the norms in front of these."""

from typing import NamedTuple


class BlockEnd(NamedTuple):
    """The last activation and norm of a block, as paths inside it."""

    preact: str
    """The input of the last activation, such as `relu:in`; empty for the block's output if it ends without an activation."""
    norm: str | None = None
    """The last norm on the main branch, or a module that ends with it; None if there is none."""


BLOCKS = {
    "trainables.models.cifar.resnet.BasicBlock": BlockEnd("relu2:in", "bn2"),
    "trainables.models.cifar.resnet.Bottleneck": BlockEnd("relu3:in", "bn3"),
    "trainables.models.cifar.mobilenetv2.InvertedResidual": BlockEnd("", "conv"),
    "trainables.models.cifar.shufflenet.UnitV1": BlockEnd("relu3:in", "bn3"),
    "trainables.models.cifar.shufflenet.UnitV2": BlockEnd("relu:in"),  # half of its input comes from no norm
    "torchvision.models.resnet.BasicBlock": BlockEnd("relu:in", "bn2"),
    "torchvision.models.resnet.Bottleneck": BlockEnd("relu:in", "bn3"),
    "torchvision.models.regnet.ResBottleneckBlock": BlockEnd("activation:in", "f"),
    "torchvision.models.mobilenetv2.InvertedResidual": BlockEnd("", "conv"),
    "torchvision.models.mobilenetv3.InvertedResidual": BlockEnd("", "block"),
    "torchvision.models.efficientnet.MBConv": BlockEnd("", "block"),
    "torchvision.models.efficientnet.FusedMBConv": BlockEnd("", "block"),
    "torchvision.models.mnasnet._InvertedResidual": BlockEnd("", "layers"),
    "torchvision.models.convnext.CNBlock": BlockEnd(""),
    "torchvision.models.swin_transformer.SwinTransformerBlock": BlockEnd(""),
    "torchvision.models.swin_transformer.SwinTransformerBlockV2": BlockEnd(""),
    "torchvision.models.maxvit.MaxVitBlock": BlockEnd(""),
    "timm.models.resnet.BasicBlock": BlockEnd("act2:in", "bn2"),
    "timm.models.resnet.Bottleneck": BlockEnd("act3:in", "bn3"),
    "timm.models._efficientnet_blocks.InvertedResidual": BlockEnd("", "bn3"),
    "timm.models._efficientnet_blocks.DepthwiseSeparableConv": BlockEnd("", "bn2"),
    "timm.models._efficientnet_blocks.EdgeResidual": BlockEnd("", "bn2"),
    "timm.models._efficientnet_blocks.ConvBnAct": BlockEnd("bn1.act:in", "bn1"),
    "timm.models.convnext.ConvNeXtStage": BlockEnd(""),
    "timm.models.swin_transformer.SwinTransformerStage": BlockEnd(""),
}
"""Qualified class name → the end of such a block. Other stages have a `preact` only if an activation ends them."""
