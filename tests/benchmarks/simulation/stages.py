"""What pipeline stages make of a GPU's passes: a student cut by whole layers, its teacher on the last stage, sends in between.

The step of a replica is worked out event by event (`schedule_time`), for the number of micro-batches that makes it shortest, as a
job finds it by timing. Nothing here knows the bubble's formula.
"""

import math
from dataclasses import dataclass

from tests.benchmarks.simulation.parts import BuildContext, Plant
from trainables.distributed.pipeline.schedule_time import StageTimes, step_seconds

BYTES_A_PIXEL = 4.0
"""Sent over a cut for each pixel and color of an image: the first layers have more values than images have pixels."""


@dataclass(frozen=True)
class Pipeline:
    """Mean seconds of a rank, but for the step."""

    num_micro_batches: int
    step_s: float
    """Forward and backward of a replica's batch, teacher and waits included."""
    student_s: float
    backward_s: float
    teacher_s: float
    launching_s: float
    """Of the slowest stage's step, on the CPU while the GPU waits."""


def pipeline(plant: Plant, setting: BuildContext) -> Pipeline:
    """The fastest step of a replica of `setting.stages` stages."""
    numbers = {1, setting.stages // 2, *(setting.stages * 2**power for power in range(4))}
    candidates = [_pipeline(plant, setting, number) for number in sorted(numbers) if number <= setting.batch]
    return min(candidates, key=lambda one: one.step_s)


def layers_of(plant: Plant, stages: int, teacher: float) -> list[int]:
    """Layers of each stage where the last one has the teacher too, which takes as long as `teacher` layers."""
    num_layers, front = plant.layers.count, stages - 1
    last = min(range(1, num_layers - front + 1), key=lambda last: max(math.ceil((num_layers - last) / front), last + teacher))
    each, more = divmod(num_layers - last, front)
    return [*(each + (stage < more) for stage in range(front)), last]


def peak_mib(plant: Plant, setting: BuildContext) -> float:
    """Of the worst stage: `1f1b` stores the activations of as many micro-batches as there are stages."""
    stages, layers, memory = setting.stages, plant.layers, plant.memory
    if stages == 1:
        return memory.peak_mib(setting.batch, setting.memory)
    stored = stages / max(stages, min(4 * stages, setting.batch)) * min(1.0, layers.first_activations / stages)
    fixed = layers.uncut + (1 - layers.uncut) / stages
    return memory.peak_mib(setting.batch, setting.memory * stored, fixed)


def _pipeline(plant: Plant, setting: BuildContext, number: int) -> Pipeline:
    gpu, p, size = plant.gpu, setting.stages, -(-setting.batch // number)
    arguments = (size, gpu.launch_s, gpu.multiprocessors, setting.speedup)
    slower = gpu.choice(size)
    (teacher_s, _), (student_s, launching_s), (backward_s, launching_backward_s) = (
        kernels.times(*arguments) for kernels in (gpu.teacher, gpu.student, gpu.backward)
    )
    teacher_s, student_s, backward_s = teacher_s * slower, student_s * slower, backward_s * slower
    num_layers = plant.layers.count
    layers = layers_of(plant, p, teacher_s / (student_s + backward_s) * num_layers)
    crosses = plant.gpus_per_node % p != 0
    network = plant.network
    speed, latency_s = (
        (network.between_nodes_bytes_per_s, network.between_latency_s)
        if crosses
        else (network.across_sockets_bytes_per_s, network.inside_latency_s)
    )
    send_s = latency_s + size * BYTES_A_PIXEL * plant.copying.image_bytes / speed
    times = [
        StageTimes(
            forward_s=student_s * count / num_layers,
            backward_s=backward_s * count / num_layers,
            send_s=send_s,
            teacher_s=number * teacher_s if stage == p - 1 else 0.0,
        )
        for stage, count in enumerate(layers)
    ]
    most = max(layers) / num_layers
    return Pipeline(
        num_micro_batches=number,
        step_s=max(step_seconds(times, "1f1b", number)),
        student_s=number * student_s / p,
        backward_s=number * backward_s / p,
        teacher_s=number * teacher_s / p,
        launching_s=number * most * (launching_s + launching_backward_s),
    )
