"""`distill cache`: the teacher runs over the training split in each of its augmentations, and its answers are kept.

Shapes: B samples of this rank's part of a global batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from trainables.config import FillConfig
from trainables.device.augment import TrainInputs
from trainables.device.device_batches import on_device
from trainables.device.model_input import autocast, normalizer
from trainables.distributed.group import Group, gather_objects
from trainables.engine.job import open_loaders
from trainables.engine.modules import cached_teacher, numbers
from trainables.errors import DataError
from trainables.teachers.cache.cached_teacher import CachedTeacher
from trainables.teachers.network import TeacherRequest


def fill(config: FillConfig, group: Group, report: Callable[[str, int, float, dict[str, float]], None]) -> dict[str, float]:
    """Keep what is not kept yet, and return `images` (for which the teacher ran) and `missing` (rows that could not be read).

    In the order in which images are stored, each worker its part of a batch; an epoch begins at the first image that is missing.

    Raises:
        DistillError: see `open_store`; unreadable data; a disk that cannot be written.
    """
    data = config.data.model_copy(update={"last_batch": "short", "shuffle": "none"})
    config = config.model_copy(update={"data": data})
    classes, (loader, val_loader) = open_loaders(config, group)
    dtype, layout = numbers(config)
    with contextlib.closing(loader), contextlib.closing(val_loader):
        normalize = normalizer(data.mean, data.std, group.device, dtype, layout)
        prepare = TrainInputs(data.device_augment, normalize, seed=config.seed, image_size=data.image_size, device=group.device)
        in_precision = autocast(config.precision, group.device)
        steps_per_epoch, epochs = loader.steps_per_epoch, config.kept_epochs
        about = {"steps_per_epoch": steps_per_epoch, "samples_per_epoch": loader.samples_per_epoch, "epochs": epochs}
        report("start", 0, 0.0, {**about, "num_workers": group.world_size, "max_steps": 0})
        images, missing = 0, 0
        with contextlib.closing(cached_teacher(config, group, classes, loader, ["cache"])) as teacher:
            for epoch in range(epochs):
                done = epoch * steps_per_epoch
                missing_N = gather_objects(teacher.store.open(epoch).missing_N if group.is_main else None, group)[0]
                if missing_N.any():  # rank 0 decides: a shared file system may show a part to one node later than to another
                    start = int(missing_N.argmax())
                    batches = on_device(loader.epoch(epoch, start), group.device, loader.seed_epoch(epoch))
                    for step, batch in enumerate(batches, start=done + start // data.global_batch_size + 1):
                        batch.wait()
                        rows = len(batch.labels_B)
                        with in_precision():
                            teacher(prepare(batch).images_BCHW, rows, TeacherRequest(batch.host_indices_B, batch.epoch))
                        if step % config.train.log_every == 0:
                            report("step", step, step / steps_per_epoch, {})
                            _check_written(teacher, group)
                    images += sum(gather_objects(teacher.end_epoch(), group))
                    _check_written(teacher, group)
                    missing += int(teacher.store.open(epoch).missing_N.sum())
                report("step", done + steps_per_epoch, epoch + 1.0, {})
        return {"images": float(images), "missing": float(missing), "rows": float(loader.num_samples * epochs)}


def _check_written(teacher: CachedTeacher, group: Group) -> None:
    """End on every rank where the disk has failed one. Raises DataError."""
    for reason in filter(None, gather_objects(teacher.unwritten(), group)):
        raise DataError(
            f"teacher.cache: {teacher.store.folder} cannot be written ({reason}): free room or name another folder, and run it "
            "again: what is written stays"
        )
