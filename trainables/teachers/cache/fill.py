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
from trainables.teachers.cache.cached_teacher import CachedTeacher, cached_epochs
from trainables.teachers.interface import TeacherRequest


def sequential(config: FillConfig) -> FillConfig:
    """The job with every image of the training split in the order in which they are stored."""
    data = config.data.model_copy(update={"last_batch": "short", "shuffle": "none"})
    return config.model_copy(update={"data": data})


def fill(
    config: FillConfig,
    group: Group,
    teacher: CachedTeacher,
    loader: Loader,
    report: Report,
    heartbeat: Heartbeat | None = None,
) -> dict[str, float]:
    """Write the rows that are missing, and close the teacher.

    Returns `images` (for which the teacher ran), `missing` (unreadable) and `rows`. `config` is of `sequential`, and `loader`
    reads its training split: each worker its part of a batch, and an epoch begins at the first image that is missing. Raises
    DistillError: the teacher or data cannot be read, or the disk not be written.
    """
    heartbeat = heartbeat or Heartbeat()
    num_steps, num_epochs = loader.steps_per_epoch, cached_epochs(config)
    sizes = {"steps_per_epoch": num_steps, "samples_per_epoch": loader.samples_per_epoch, "epochs": num_epochs}
    report("start", 0, 0.0, {**sizes, "num_workers": group.world_size, "max_steps": 0})
    num_images, num_missing = 0, 0
    prepare, precision = build_train_inputs(config, group.device), autocast(config.precision, group.device)
    heartbeat.enter("fill")
    with contextlib.closing(teacher):
        for epoch in range(num_epochs):
            missing_N = gather_objects(teacher.store.open(epoch).missing_N if group.is_main else None, group)[0]
            if missing_N.any():  # rank 0 decides: a shared file system may show a block to one node later than to another
                start = int(missing_N.argmax())
                batches = heartbeat.over(loader.epoch(epoch, start))
                first_step = epoch * num_steps + start // config.data.global_batch_size + 1
                with contextlib.closing(on_device(batches, group.device, loader.augmentation_epoch(epoch))) as ready:
                    for step, batch in enumerate(ready, start=first_step):
                        batch.wait()
                        request = TeacherRequest(batch.host_indices_B, batch.epoch)
                        with precision():
                            teacher(prepare(batch).images_BCHW, len(batch.labels_B), request)
                        if step % config.train.log_every == 0:
                            report("step", step, step / num_steps, {})
                            _check_written(teacher, group)
                num_images += sum(gather_objects(teacher.end_epoch(), group))
                _check_written(teacher, group)
                num_missing += int(teacher.store.open(epoch).missing_N.sum())
            report("step", (epoch + 1) * num_steps, epoch + 1.0, {})
    return {"images": float(num_images), "missing": float(num_missing), "rows": float(len(loader.source) * num_epochs)}


def _check_written(teacher: CachedTeacher, group: Group) -> None:
    """End on every rank where the disk of one failed. Raises DataError."""
    error = teacher.writer.error if teacher.writer is not None else None
    for reason in filter(None, gather_objects(error and (error.strerror or str(error)), group)):
        raise DataError(
            f"teacher.cache: {teacher.store.folder} cannot be written ({reason}): free room or name another folder, and run it "
            "again: what is written stays"
        )
