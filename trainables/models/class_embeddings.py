"""Logits of a model without a classifier: scaled cosines between its output and an embedding of each class.

This is zero-shot classification as in CLIP: Radford et al. 2021, "Learning Transferable Visual Models From Natural Language
Supervision", section 3.1.2.

Shapes: B batch, D features, K classes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from trainables.errors import CheckpointError, ModelError, OtherClassesError, first_line, first_three
from trainables.models.classes import class_rows
from trainables.models.forward import COSINES, dry_forward, logits_and_aux
from trainables.models.libraries.interface import TrainedInput
from trainables.notices import notice

ZeroShot = tuple[str, float] | None
"""The file of a teacher's class embeddings, and the scale of its logits."""


CLASS_EMBEDDINGS = "class_embeddings"
"""The name of their tensor (K, D), in float64, in a checkpoint of ours that has them."""


class ClassEmbeddings(NamedTuple):
    """An embedding of each of the data's classes, in their order: as in the file, in float64."""

    file: str
    rows_KD: Tensor
    scale: float

    def classify(self, model: nn.Module, image_size: int, *, name: str) -> None:
        """From here on the output of `model`, features (B, D), are logits (B, K); its state dict stays as it is.

        Raises ModelError: D is another.
        """
        if (width := output_width(model, image_size)) != self.rows_KD.shape[1]:
            raise ModelError(
                f"teacher.classes: {self.file} has embeddings of {self.rows_KD.shape[1]} numbers, and the output of {name} has "
                f"{width}: write those of the text model that was trained with it"
            )
        model.add_module(COSINES, _Cosines(self.scale * normalize(self.rows_KD)))
        if type(model).forward is not nn.Sequential.forward:  # which calls it as its last part
            model.register_forward_hook(lambda model, args, output: model.get_submodule(COSINES)(logits_and_aux(output)[0]))


class _Cosines(nn.Module):
    """From features (B, D) to logits (B, K)."""

    def __init__(self, rows_KD: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows_KD", rows_KD, persistent=False)

    def forward(self, features_BD: Tensor) -> Tensor:
        """In float32 or wider, also under autocast, whose rounding the scale would enlarge."""
        dtype = torch.promote_types(features_BD.dtype, torch.float32)
        with torch.autocast("cpu" if features_BD.is_meta else features_BD.device.type, enabled=False):
            return linear(normalize(features_BD.to(dtype)), self.get_buffer("rows_KD").to(dtype))


def output_width(model: nn.Module, image_size: int) -> int:
    return logits_and_aux(dry_forward(model, image_size, training=False))[0].shape[-1]


def read_class_embeddings(file: str, scale: float, classes: Sequence[str]) -> ClassEmbeddings:
    """The rows of a .npy file for these classes, by the names next to it, or in their order. The latter is a notice.

    Raises CheckpointError: it cannot be read, is no (K, D) of finite floats, or has not these classes.
    """
    names_file, what = Path(file).with_suffix(".txt"), f"teacher.classes: {file}"
    try:
        rows_KD = np.asarray(np.load(file, allow_pickle=False))
        names = tuple(names_file.read_text(encoding="utf-8-sig").splitlines()) if names_file.exists() else None
    except (OSError, ValueError, EOFError) as error:
        problem = f"{what} or its names cannot be read ({first_line(error)})"
        raise CheckpointError(f"{problem}: write a (K, D) array with numpy.save") from None
    if rows_KD.ndim != 2 or rows_KD.dtype.kind != "f":
        raise CheckpointError(f"{what} is {rows_KD.dtype} {rows_KD.shape}, not floats (K, D): write an embedding of each class")
    bad = [f"row {row}" for row in np.flatnonzero(~(np.isfinite(rows_KD).all(1) & rows_KD.any(1)))]
    if bad:
        raise CheckpointError(f"{what} has numbers that are not finite, or only zeros, in {first_three(bad)}: write it again")
    if len(rows_KD) != len(classes if names is None else names):
        has = f"the data {len(classes)} classes" if names is None else f"{names_file} {len(names)} names"
        raise CheckpointError(f"{what} has {len(rows_KD)} rows and {has}: write one name a line into {names_file}, in order")
    rows = None
    if names is None:
        order = f"its rows are taken as {first_three(classes)} in the data's order"
        notice(f"{what}: there is no {names_file.name} with names: {order}")
    else:
        try:
            rows = class_rows(TrainedInput(0, (), (), len(names), categories=names), classes, file, ours=True)
        except OtherClassesError as error:
            raise CheckpointError(f"teacher.classes: {error.fact}: write each class of the data once into {names_file}") from None
    rows_KD = rows_KD.astype(np.float64)
    return ClassEmbeddings(file, torch.from_numpy(rows_KD if rows is None else rows_KD[list(rows)]), scale)
