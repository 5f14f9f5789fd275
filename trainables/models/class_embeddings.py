"""Compute logits of a model without a classifier as scaled cosines between its output and class embeddings.

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
"""The file of a teacher's class embeddings and the scale of its logits."""


CLASS_EMBEDDINGS = "class_embeddings"
"""The name of the float64 tensor (K, D) in our checkpoints."""


class ClassEmbeddings(NamedTuple):
    """An embedding for each of the data's classes, in label order, unnormalized and in float64."""

    file: str
    rows_KD: Tensor
    scale: float

    def classify(self, model: nn.Module, image_size: int, *, name: str) -> None:
        """Make `model` return logits (B, K) instead of features (B, D). Its state dict does not change.

        Raises ModelError: the embeddings have another D.
        """
        if (width := output_width(model, image_size)) != self.rows_KD.shape[1]:
            raise ModelError(
                f"teacher.classes: {self.file} has embeddings of width {self.rows_KD.shape[1]}, but the output of {name} has "
                f"width {width}: use embeddings from the text model that was trained with it"
            )
        model.add_module(COSINES, _Cosines(self.scale * normalize(self.rows_KD)))
        if type(model).forward is not nn.Sequential.forward:  # a Sequential calls the new module itself
            model.register_forward_hook(lambda model, args, output: model.get_submodule(COSINES)(logits_and_aux(output)[0]))


class _Cosines(nn.Module):
    """Maps features (B, D) to logits (B, K)."""

    def __init__(self, rows_KD: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows_KD", rows_KD, persistent=False)

    def forward(self, features_BD: Tensor) -> Tensor:
        """Compute in float32 or wider, even under autocast, as the scale would amplify its rounding."""
        dtype = torch.promote_types(features_BD.dtype, torch.float32)
        with torch.autocast("cpu" if features_BD.is_meta else features_BD.device.type, enabled=False):
            return linear(normalize(features_BD.to(dtype)), self.get_buffer("rows_KD").to(dtype))


def output_width(model: nn.Module, image_size: int) -> int:
    return logits_and_aux(dry_forward(model, image_size, training=False))[0].shape[-1]


def read_class_embeddings(file: str, scale: float, classes: Sequence[str]) -> ClassEmbeddings:
    """Read the rows of a .npy file for these classes, by the names in the .txt file next to it, or without one in file order,
    with a notice.

    Raises CheckpointError: it cannot be read, is not a (K, D) array of finite floats, or does not have these classes.
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
        raise CheckpointError(f"{what} has {len(rows_KD)} rows and {has}: write one name per line into {names_file}, in order")
    rows = None
    if names is None:
        order = f"its rows are used as {first_three(classes)} in the data's order"
        notice(f"{what}: there is no {names_file.name} with class names: {order}")
    else:
        try:
            rows = class_rows(TrainedInput(0, (), (), len(names), categories=names), classes, file, ours=True)
        except OtherClassesError as error:
            raise CheckpointError(f"teacher.classes: {error.fact}: write each class of the data once into {names_file}") from None
    rows_KD = rows_KD.astype(np.float64)
    return ClassEmbeddings(file, torch.from_numpy(rows_KD if rows is None else rows_KD[list(rows)]), scale)
