"""How long a pipeline's step takes: the passes of its schedule, event by event.

A stage runs its passes one after the other; a pass waits for the tensor of its neighbour. The bubble of p equal stages and m
micro-batches is (p - 1)/(m + p - 1) of a step (Huang et al. 2019, GPipe); 1F1B (Narayanan et al. 2019, PipeDream) has the same
and stores fewer activations.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"


class Pass(NamedTuple):
    """A micro-batch's pass through a stage."""

    kind: str
    micro_batch: int


def order(schedule: str, stage: int, num_stages: int, num_micro_batches: int) -> Iterator[Pass]:
    """The passes of a stage, in the order of torch's schedules `gpipe` and `1f1b`."""
    ahead = stored_micro_batches(schedule, stage, num_stages, num_micro_batches)
    for micro_batch in range(ahead):
        yield Pass(FORWARD, micro_batch)
    for micro_batch in range(num_micro_batches):
        yield Pass(BACKWARD, micro_batch)
        if ahead + micro_batch < num_micro_batches:
            yield Pass(FORWARD, ahead + micro_batch)


def stored_micro_batches(schedule: str, stage: int, num_stages: int, num_micro_batches: int) -> int:
    """Of how many micro-batches a stage stores activations at once. Torch's 1F1B refuses fewer than stages: they run as GPipe."""
    if schedule == "gpipe" or num_micro_batches < num_stages:
        return num_micro_batches
    return min(num_micro_batches, num_stages - stage)


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch in a stage."""

    forward_s: float
    backward_s: float
    send_s: float = 0.0
    """To or from the next stage."""
    teacher_s: float = 0.0
    """Of the whole batch, before the stage's first pass: while the first micro-batch is on its way."""

    def seconds(self, kind: str) -> float:
        return self.forward_s if kind == FORWARD else self.backward_s


def step_seconds(
    stages: Sequence[StageTimes], schedule: str, num_micro_batches: int, *, overlapped: bool = True
) -> tuple[float, ...]:
    """When each stage has ended its last pass.

    `overlapped`: a send runs beside the passes; otherwise it takes its time from those of both stages.
    """
    num_stages = len(stages)
    waiting = [deque(order(schedule, stage, num_stages, num_micro_batches)) for stage in range(num_stages)]
    free_s = [stage.teacher_s for stage in stages]
    sent = {(0, Pass(FORWARD, each)): (0.0, 0.0) for each in range(num_micro_batches)}
    """By stage and pass: when the tensor that it waits for was sent, and how long that is on its way."""
    while any(waiting):
        for index, passes in enumerate(waiting):
            while passes and (index, passes[0]) in sent:
                each = passes.popleft()
                sent_s, way_s = sent.pop((index, each))
                begin_s = max(sent_s + way_s, free_s[index]) if overlapped else max(sent_s, free_s[index]) + way_s
                end_s = begin_s + stages[index].seconds(each.kind)
                target, kind = _receiver(each.kind, index, num_stages)
                way_s = stages[min(index, target)].send_s if target != index else 0.0
                sent[target, Pass(kind, each.micro_batch)] = end_s, way_s
                free_s[index] = end_s if overlapped else end_s + way_s
    return tuple(free_s)


def _receiver(kind: str, stage: int, num_stages: int) -> tuple[int, str]:
    """The stage and the pass that a pass's output goes to. Of the passes that end at the model's end nothing is sent."""
    if kind == BACKWARD:
        return max(stage - 1, 0), BACKWARD
    return (stage + 1, FORWARD) if stage + 1 < num_stages else (stage, BACKWARD)
