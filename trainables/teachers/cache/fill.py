"""`distill cache`: run the teacher over the training split in each of its augmentations, and write its rows.

Shapes: B samples of this rank's part of a global batch.
"""

import contextlib

from trainables.config import FillConfig
from trainables.data.loader.loader import Loader
from trainables.device.augment import build_train_inputs
from trainables.device.device_batches import on_device
from trainables.device.tensor_format import autocast
from trainables.distributed.group import Group, gather_objects
from trainables.errors import DataError
from trainables.metrics.heartbeat import Heartbeat
from trainables.metrics.report import Report
from trainables.teachers.cache.cached_teacher import CachedTeacher, cached_epochs, without_augmentation
from trainables.teachers.interface import TeacherRequest


def sequential(config: FillConfig) -> FillConfig:
    """The job with every image of the training split in the order in which they are stored."""
    data = config.data.model_copy(update={"last_batch": "short", "shuffle": "none"})
    return config.model_copy(update={"data": data})


def fill(
    config: FillConfig,
    group: Group,
    teacher: CachedTeacher,
    loaders: tuple[Loader, Loader],
    report: Report,
    heartbeat: Heartbeat | None = None,
) -> dict[str, float]:
    """Write the rows that are missing, and close the teacher.

    Returns `images` (for which the teacher ran), `missing` (unreadable) and `rows`. `config` is of `sequential`, and `loaders`
    read its splits: each worker its part of a batch, and an epoch begins at the first image that is missing. Of the validation
    split are written those rows with which evaluations compare a student without classes. Raises DistillError: the teacher or
    data cannot be read, or the disk not be written.
    """
    heartbeat = heartbeat or Heartbeat()
    loader, val_loader = loaders
    num_steps, num_epochs = loader.steps_per_epoch, cached_epochs(config)
    sizes = {"steps_per_epoch": num_steps, "samples_per_epoch": loader.samples_per_epoch, "epochs": num_epochs}
    report("start", 0, 0.0, {**sizes, "num_workers": group.world_size, "max_steps": 0})
    passes = [(teacher, loader, epoch, build_train_inputs(config, group.device)) for epoch in range(num_epochs)]
    if not config.data.labels:
        inputs = build_train_inputs(without_augmentation(config), group.device)
        passes.append((teacher.for_validation(val_loader), val_loader, 0, inputs))
    num_images, num_missing, num_rows = 0, 0, 0
    precision = autocast(config.precision, group.device)
    heartbeat.enter("fill")
    with contextlib.closing(teacher):
        for number, (of_split, images, epoch, prepare) in enumerate(passes):
            missing_N = gather_objects(of_split.store.open(epoch).missing_N if group.is_main else None, group)[0]
            num_rows += len(missing_N)
            if missing_N.any():  # rank 0 decides: a shared file system may show a block to one node later than to another
                start = int(missing_N.argmax()) if images is loader else 0
                batches = heartbeat.over(images.epoch(epoch, start))
                first_step = number * num_steps + start // config.data.global_batch_size + 1
                with contextlib.closing(on_device(batches, group.device, images.augmentation_epoch(epoch))) as ready:
                    for step, batch in enumerate(ready, start=first_step):
                        batch.wait()
                        request = TeacherRequest(batch.host_indices_B, batch.epoch)
                        with precision():
                            of_split(prepare(batch).images_BCHW, len(batch.labels_B), request)
                        if images is loader and step % config.train.log_every == 0:
                            report("step", step, step / num_steps, {})
                            _check_written(of_split, group)
                num_images += sum(gather_objects(of_split.end_epoch(), group))
                _check_written(of_split, group)
                num_missing += int(of_split.store.open(epoch).missing_N.sum())
            if images is loader:
                report("step", (epoch + 1) * num_steps, epoch + 1.0, {})
    return {"images": float(num_images), "missing": float(num_missing), "rows": float(num_rows)}


def _check_written(teacher: CachedTeacher, group: Group) -> None:
    """End on every rank where the disk of one failed. Raises DataError."""
    error = teacher.writer.error if teacher.writer is not None else None
    for reason in filter(None, gather_objects(error and (error.strerror or str(error)), group)):
        raise DataError(
            f"teacher.cache: {teacher.store.folder} cannot be written ({reason}): free room or name another folder, and run it "
            "again: what is written stays"
        )
