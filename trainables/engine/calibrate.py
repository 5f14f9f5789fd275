"""Show methods the teacher's outputs on the first training images, so that they can take statistics before the first step."""

import contextlib
import itertools
import math

from trainables.device.device_batches import on_device
from trainables.distributed.group import broadcast_buffers
from trainables.engine.job import Job
from trainables.engine.modules import stage_methods
from trainables.engine.passes import micro_batches, run_teacher


def calibrate(job: Job) -> None:
    """Call `Method.calibrate` for the first training batches, augmented as in training, then `end_calibration`.

    All methods get as many batches as the most demanding one needs, one epoch at most. A resumed job restores the methods'
    buffers instead. Every rank must call this.
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
    state.teacher.end_epoch()  # flushes the teacher cache before the first step
    for method in methods.values():
        method.end_calibration()
        broadcast_buffers(method, state.group)
