"""The teacher's outputs for the first training images, for methods that take statistics of them before the first step."""

import contextlib
import itertools
import math

from trainables.device.device_batches import on_device
from trainables.distributed.group import broadcast_buffers
from trainables.engine.job import Job
from trainables.engine.modules import stage_methods
from trainables.engine.passes import micro_batches, run_teacher


def calibrate(job: Job) -> None:
    """Call `Method.calibrate` for the batches that the training begins with, augmented as there, and then `end_calibration`.

    All methods get as many as the one that wants most, an epoch at most. A job that goes on from a checkpoint has their buffers
    from there. Every rank calls it.
    """
    config, state, loader, epoch = job.config, job.train_state, job.train_loader, job.epochs.order_offset
    num_images = max((method.options.calibration_images for method in stage_methods(config)), default=0)
    if not num_images or job.progress.step:
        return
    methods = {key: each for key, each in state.distillation_module.methods_by_name.items() if each.options.calibration_images}
    augmentation_epoch = loader.augmentation_epoch(epoch)
    batches = on_device(state.teacher.prefetch(loader.epoch(epoch), augmentation_epoch), job.group.device, augmentation_epoch)
    with job.metrics.clock.part("other"), contextlib.closing(job.metrics.heartbeat.over(batches)) as beating:
        for batch in itertools.islice(beating, math.ceil(num_images / config.data.global_batch_size)):
            batch.wait()
            parts = micro_batches(state.prepare(batch), state.accumulate, state.num_dummy_images)
            state.teacher.skip(parts[0].images_BCHW, state.accumulate - len(parts))
            for part in parts:
                outputs = run_teacher(state, part)
                for key, method in methods.items():
                    method.calibrate(outputs[key])
    state.teacher.end_epoch()  # what a cache stores of them is there for the first step
    for method in methods.values():
        method.end_calibration()
        broadcast_buffers(method, state.group)
