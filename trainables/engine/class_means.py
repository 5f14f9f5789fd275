"""`teacher.head: class_means`: build a classifier without training from the mean feature of each class.

The mean is over the L2-normalized features of a class's training images, each once and not augmented. Logits are scaled cosines
to these means, as with class embeddings: a nearest class mean classifier (Mensink, Verbeek, Perronnin and Csurka 2013,
"Distance-Based Image Classification: Generalizing to New Classes at Near-Zero Cost").

Shapes: B batch, D features, K classes.
"""

import contextlib
import logging
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from trainables.config import TrainConfig
from trainables.device.device_batches import on_device
from trainables.device.tensor_format import pixels_of, teacher_autocast, tensor_format
from trainables.distributed.group import Group, all_reduce_sum
from trainables.engine import checkpoint
from trainables.engine.features import all_skipped, val_loader
from trainables.engine.job_parts import describe_model
from trainables.errors import DataError, ModelError, first_three
from trainables.metrics.heartbeat import Heartbeat
from trainables.models.class_embeddings import CLASS_EMBEDDINGS, output_width
from trainables.models.forward import logits_and_aux
from trainables.models.model_input import trained_model_input
from trainables.models.pixels import take_pixels
from trainables.models.weights import load_teacher
from trainables.rundir import StageDir

log = logging.getLogger("raydistill")


def write_class_means(config: TrainConfig, group: Group, heartbeat: Heartbeat) -> tuple[Path, dict[str, float]]:
    """Write a checkpoint of `config.finetuned` with class means. Return its path and counts. Every rank must call this.

    Raises:
        DataError: images cannot be read, or a class has none.
        ModelError, CheckpointError: see `load_teacher`; or features are not finite.
    """
    teacher, model_input = config.finetuned, trained_model_input(config)
    assert teacher is not None
    model = load_teacher(
        config.model,
        str(config.weights),
        image_size=model_input.image_size,
        classes=(),
        seed=config.seed,
        logits=False,
        weights_key=config.weights_key,
    )
    tensors = {f"model.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    width, (dtype, layout) = output_width(model, model_input.image_size), tensor_format(config)
    take_pixels(model, model_input)
    model.to(group.device, dtype).to(memory_format=layout)  # type: ignore[call-overload]
    precision, pixels = teacher_autocast(teacher, config, group.device), pixels_of(config)
    heartbeat.enter("eval")
    with contextlib.closing(val_loader(config.data, "train", group)) as loader:
        classes = loader.source.classes
        sums_KD = torch.zeros(len(classes), width + 1, dtype=torch.float64, device=group.device)
        with torch.inference_mode():
            for batch in on_device(heartbeat.over(loader.epoch(0)), group.device):
                batch.wait()
                if len(batch.labels_B):
                    with precision():
                        features_BD, _ = logits_and_aux(model(pixels(batch.images_BCHW)))
                    sums_KD += _sums(features_BD, batch.labels_B, len(classes))
        skipped = all_skipped(loader, group)
    sums_KD, counts_K = all_reduce_sum(sums_KD, group).cpu().split([width, 1], dim=1)
    if empty := [name for name, count in zip(classes, counts_K.flatten().tolist(), strict=True) if not count]:
        raise DataError(
            f"data.path: {config.data.path} has no readable training image of {first_three(empty)}, but teacher.head: "
            "class_means needs one per class: fix the images, remove the class, or remove teacher.head"
        )
    if not sums_KD.isfinite().all():
        raise ModelError(f"teacher.head: the features of {config.model} are not finite: its weights are damaged, or need fp32")
    path, num_images = StageDir(Path(config.output_dir)).best, counts_K.sum().item()
    if group.is_main:
        metadata = describe_model(config, config.model, classes) | {"logit_scale": teacher.scale}
        metadata["transform_input"] = bool(getattr(model, "transform_input", False))
        checkpoint.write_tensors(path, {**tensors, CLASS_EMBEDDINGS: sums_KD / counts_K}, metadata)
        log.info("%s: %s: %d class means of %d images", config.stage, config.model, len(classes), num_images)
    return path, {"num_images": num_images, "skipped_images": float(len(skipped))}


def _sums(features_BD: Tensor, labels_B: Tensor, num_classes: int) -> Tensor:
    """Return each class's sum of normalized features and number of images: (K, D + 1), float64."""
    rows_BD = functional.pad(functional.normalize(features_BD.double()), (0, 1), value=1.0)
    return functional.one_hot(labels_B, num_classes).double().T @ rows_BD
