"""`distill cache`: run the teacher over the training split in each of its augmentations, and write its rows.

Shapes: B samples of this rank's part of a global batch.
"""

import contextlib

import numpy as np
from numpy.typing import NDArray

from trainables.config import FillConfig
from trainables.data.loader.loader import Loader
from trainables.device.augment import build_train_inputs
from trainables.device.device_batches import on_device
from trainables.device.tensor_format import autocast
from trainables.distributed.group import Group, gather_objects
from trainables.errors import DataError
from trainables.metrics.heartbeat import Heartbeat
from trainables.metrics.report import Report
from trainables.teachers.cache.cached_teacher import CachedTeachers, cached_epochs, without_augmentation
from trainables.teachers.cache.publish import publish
from trainables.teachers.interface import TeacherRequest


def sequential(config: FillConfig) -> FillConfig:
    """The job with every image of the training split in the order in which they are stored; mixed ones as training has them."""
    if config.data.device_augment.mixes:
        return config
    data = config.data.model_copy(update={"last_batch": "short", "shuffle": "none"})
    return config.model_copy(update={"data": data})


def fill(
    config: FillConfig,
    group: Group,
    teachers: CachedTeachers,
    loaders: tuple[Loader, Loader],
    report: Report,
    heartbeat: Heartbeat | None = None,
) -> dict[str, float]:
    """Write the rows that are missing, and close the teachers.

    Returns `images` (for which a teacher ran), `missing` (unreadable) and `rows`. `config` is of `sequential`, and `loaders`
    read its splits: each worker its part of a batch, and an epoch begins at the first image that is missing; of mixed images at
    the first of all. Of the validation split are written those rows with which evaluations compare a student without classes.
    Raises DistillError: a teacher or data cannot be read, or the disk not be written.
    """
    heartbeat = heartbeat or Heartbeat()
    loader, val_loader = loaders
    num_steps, num_epochs = loader.steps_per_epoch, cached_epochs(config)
    sizes = {"steps_per_epoch": num_steps, "samples_per_epoch": loader.samples_per_epoch, "epochs": num_epochs}
    report("start", 0, 0.0, {**sizes, "num_workers": group.world_size, "max_steps": 0})
    passes = [(teachers, loader, epoch, build_train_inputs(config, group.device)) for epoch in range(num_epochs)]
    if not config.data.labels:
        inputs = build_train_inputs(without_augmentation(config), group.device)
        passes.append((teachers.for_validation(val_loader), val_loader, 0, inputs))
    num_images, num_missing, num_rows = 0, 0, 0
    precision = autocast(config.precision, group.device)
    heartbeat.enter("fill")
    with contextlib.closing(teachers):
        for number, (of_split, images, epoch, prepare) in enumerate(passes):
            missing_N = gather_objects(_missing(of_split, epoch) if group.is_main else None, group)[0]
            num_rows += images.samples_per_epoch
            num_left_out = len(missing_N) - images.samples_per_epoch  # of a last batch that is dropped
            if missing_N.sum() > num_left_out:  # rank 0 decides: a shared file system may show a block to one node later
                start = int(missing_N.argmax()) if images is loader and not config.data.device_augment.mixes else 0
                batches = heartbeat.over(images.epoch(epoch, start))
                first_step = number * num_steps + start // config.data.global_batch_size + 1
                with contextlib.closing(on_device(batches, group.device, images.augmentation_epoch(epoch))) as ready:
                    for step, batch in enumerate(ready, start=first_step):
                        batch.wait()
                        prepared = prepare(batch)
                        partners_B = prepared.mix and prepared.mix.partners_B
                        request = TeacherRequest(batch.host_indices_B, batch.epoch, partners_B)
                        with precision():
                            of_split(prepared.images_BCHW, len(batch.labels_B), request)
                        if images is loader and step % config.train.log_every == 0:
                            report("step", step, step / num_steps, {})
                            _check_written(of_split, group)
                num_images += sum(gather_objects(of_split.end_epoch(), group))
                _check_written(of_split, group)
                num_missing += int(_missing(of_split, epoch).sum()) - num_left_out
            if images is loader:
                report("step", (epoch + 1) * num_steps, epoch + 1.0, {})
    if config.publish:
        try:
            publish(config, group, loader.source, teachers.stores, num_epochs, heartbeat)
        except OSError as error:
            raise DataError(f"--publish: {teachers.stores[0].folder} cannot be written: {error.strerror or error}") from None
    return {"images": float(num_images), "missing": float(num_missing), "rows": float(num_rows)}


def _missing(teachers: CachedTeachers, epoch: int) -> NDArray[np.bool_]:
    """Return a mask (N,) of the samples for which a teacher has no row."""
    missing_N: NDArray[np.bool_] = np.any([store.open(epoch).missing_N for store in teachers.stores], axis=0)
    return missing_N


def _check_written(teachers: CachedTeachers, group: Group) -> None:
    """End on every rank where the disk of one failed. Raises DataError."""
    errors = [each.writer.error for each in teachers.teachers if each.writer is not None and each.writer.error is not None]
    for reason in filter(None, gather_objects(errors and (errors[0].strerror or str(errors[0])), group)):
        raise DataError(
            f"teacher.cache: {teachers.stores[0].folder} cannot be written ({reason}): free room or name another folder, and run "
            "it again: what is written stays"
        )
