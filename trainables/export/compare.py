"""Compare an exported file, loaded by the code that is printed for its users, with the checkpoint on validation images.

Shapes: B batch, C=3 channels, H W pixels, K classes or features.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainables.config.data import DataConfig
from trainables.data.augment import default_val_resize
from trainables.data.decode import StoredImage, UnreadableImageError
from trainables.data.interface import Source
from trainables.data.source import open_on_node
from trainables.device.tensor_format import to_pixels
from trainables.distributed.group import Group
from trainables.engine.evaluate import correct_counts
from trainables.engine.features import all_skipped, val_loader
from trainables.errors import DataError, ExportError, first_line
from trainables.export.student import Student
from trainables.models.forward import logits_and_aux
from trainables.models.pixels import take_pixels
from trainables.notices import notice

BATCH = 8
PROBED_IMAGES = 64


def predictor(lines: Sequence[str], what: str) -> Callable[[NDArray[Any]], Tensor]:
    """Build the function from images to logits or features from a format's lines of code.

    Raises ExportError, as the function does: the library cannot read or run the file.
    """
    names: dict[str, Any] = {}

    def run(code: str) -> None:
        try:
            exec(code, names)
        except Exception as error:  # another library's, of any type
            problem = f"{type(error).__name__}: {first_line(error)}"
            raise ExportError(f"{what} cannot be read back ({problem}): choose another --to") from error

    def predict(images: NDArray[Any]) -> Tensor:
        names["images"] = images
        run(lines[-1])
        return torch.as_tensor(names["output"])

    run("\n".join(lines[:-1]))
    return predict


def resized_to(student: Student, data: DataConfig, source: Source) -> int:
    """Return the length of a validation image's shorter side before its center crop, as `validation_view` resizes it.

    The size of images in files is that of PROBED_IMAGES of them; a notice says if only some are evaluated as they are.
    """
    size = student.input.image_size
    if data.val_resize or source.size is not None:
        return data.val_resize or (size if source.size == size else default_val_resize(size))
    sizes = set()
    for index in range(0, len(source), -(-len(source) // PROBED_IMAGES)):
        with contextlib.suppress(UnreadableImageError):
            image = StoredImage(source.read(index))
            sizes.add((image.width, image.height))
    if sizes == {(size, size)}:
        return size
    if (size, size) in sizes:
        notice(f"{data.path}: images of {size} px are evaluated without the resize to {default_val_resize(size)} px")
    return default_val_resize(size)


@torch.no_grad()
def compare(
    student: Student, predict: Callable[[NDArray[Any]], Tensor], data: DataConfig, *, limit: int, preprocess: bool
) -> dict[str, Any]:
    """Return the largest absolute difference from the checkpoint's output, and the largest output, on about `limit` images.

    The images are short runs at equal distances in the split. For a classifier, the result also has the percentage of images with
    the same top-1 class, and both accuracies if the data has its classes.

    Raises:
        DataError: none of the images can be read.
        ExportError: see `predictor`.
    """
    reference = copy.deepcopy(student.module)
    take_pixels(reference, student.input)
    mean_C11, std_C11 = (np.array(values, np.float32).reshape(3, 1, 1) for values in (student.input.mean, student.input.std))
    with contextlib.closing(open_on_node(data, "val")) as source:
        num_val, has_labels = len(source), bool(student.classes) and source.classes == student.classes
    if student.classes and not has_labels:
        notice(f"{data.path} does not have the student's classes: the accuracy is not measured")
    part = Group(world_size=-(-num_val // limit))
    data = data.model_copy(update={"global_batch_size": BATCH * part.world_size})
    differences, largest, counts = [0.0], [0.0], torch.zeros(4, dtype=torch.int64)  # images, same top-1, hits: ours, theirs
    with contextlib.closing(val_loader(data, "val", part)) as loader:
        for batch in loader.epoch(0):
            # Split in two, as a file must accept batches of any size.
            parts = (each.split(BATCH - 1) for each in (batch.images_BCHW.contiguous(), batch.labels_B) if len(each))
            for images_BCHW, labels_B in zip(*parts, strict=True):
                pixels_BCHW = to_pixels(images_BCHW, torch.float32)
                expected_BK = logits_and_aux(reference(pixels_BCHW))[0]
                normalized = (pixels_BCHW.numpy() - mean_C11) / std_C11
                output_BK = predict(images_BCHW.numpy() if preprocess else normalized)
                differences.append((output_BK - expected_BK).abs().max().item())
                largest.append(expected_BK.abs().max().item())
                same = (output_BK.argmax(1) == expected_BK.argmax(1)).sum()
                hits = [correct_counts(each_BK, labels_B)[0] if has_labels else same * 0 for each_BK in (expected_BK, output_BK)]
                counts += torch.stack([torch.tensor(len(labels_B)), same, *hits])
        skipped = all_skipped(loader, Group())
    num_images, *shares = counts.tolist()
    if not num_images:
        raise DataError(f"{data.path}: no validation image could be read")
    same_pct, expected_pct, output_pct = (100 * share / num_images for share in shares)
    return {
        "num_images": num_images,
        "num_val_images": num_val,
        "skipped_images": len(skipped),
        "max_difference": float(np.max(differences)),
        "max_output": float(np.max(largest)),
        **({"same_top1_pct": same_pct} if student.classes else {}),
        **({"top1_pct": output_pct, "checkpoint_top1_pct": expected_pct} if has_labels else {}),
    }
