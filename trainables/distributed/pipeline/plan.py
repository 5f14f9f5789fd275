"""Where to cut a model, and into how many micro-batches a batch is divided: the least predicted step over all cuts.

A step's time is that of its schedule, worked out event by event: a stage runs its passes one after the other, a pass waits for
the tensor of its neighbour. Dynamic programming over the blocks finds the cuts whose slowest stage is fastest; cuts next to
those are then compared by the whole step. The bubble of p equal stages and m micro-batches is (p - 1)/(m + p - 1) of a step
(Huang et al. 2019, GPipe); 1F1B (Narayanan et al. 2019, PipeDream) has the same and stores fewer activations.

S: samples of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from trainables.errors import ModelError

ALL_CUTS = 300
"""Up to so many, all cuts are compared."""


@dataclass(frozen=True)
class Line:
    """Seconds as a function of the samples of a micro-batch."""

    fixed_s: float
    per_sample_s: float

    def seconds(self, num_samples: int) -> float:
        return self.fixed_s + self.per_sample_s * num_samples


@dataclass(frozen=True)
class Block:
    """What lies between two neighbouring cut points."""

    begins_at: str
    """The module that names the cut before it; empty for the first block."""
    forward: Line
    backward: Line
    parameter_bytes: int
    activation_bytes: float
    """Of one sample, stored from the forward to the backward pass."""
    output_bytes: float
    """Of one sample: what crosses a cut after the block."""


@dataclass(frozen=True)
class Devices:
    """The stages' devices and what connects them."""

    num_stages: int
    num_replicas: int = 1
    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    """Of a message between neighbouring stages."""
    all_reduce_bytes_per_s: float = math.inf
    """Of a stage's gradients over the replicas."""
    memory_bytes: float = math.inf
    parameter_copies: float = 3.0
    """A parameter, its gradient and the optimizer's state, in copies of the parameter."""


@dataclass(frozen=True)
class Stage:
    """What the plan expects of one stage."""

    begins_at: str
    forward_s: float
    """Of one micro-batch."""
    backward_s: float
    memory_bytes: float


@dataclass(frozen=True)
class Plan:
    """Where to cut, and the step that is expected."""

    stages: tuple[Stage, ...]
    num_micro_batches: int
    step_s: float
    bubble: float
    """The share of a step in which the stages wait, in the mean."""

    @property
    def cuts(self) -> tuple[str, ...]:
        return tuple(stage.begins_at for stage in self.stages[1:])


@dataclass(frozen=True)
class Pass:
    """A micro-batch's forward or backward pass through a stage."""

    kind: str
    micro_batch: int


def order(schedule: str, stage: int, num_stages: int, num_micro_batches: int) -> Iterator[Pass]:
    """The passes of a stage, in the order of torch's schedules `gpipe` and `1f1b`."""
    ahead = num_micro_batches if schedule == "gpipe" else min(num_micro_batches, num_stages - stage)
    for micro_batch in range(ahead):
        yield Pass("forward", micro_batch)
    for micro_batch in range(num_micro_batches):
        yield Pass("backward", micro_batch)
        if ahead + micro_batch < num_micro_batches:
            yield Pass("forward", ahead + micro_batch)


def stored_micro_batches(schedule: str, stage: int, num_stages: int, num_micro_batches: int) -> int:
    """Of how many micro-batches a stage stores activations at once."""
    return num_micro_batches if schedule == "gpipe" else min(num_micro_batches, num_stages - stage)


def step_seconds(
    forward_s: Sequence[float], backward_s: Sequence[float], send_s: Sequence[float], schedule: str, num_micro_batches: int
) -> tuple[float, ...]:
    """When each stage has ended its last pass. Sends run beside the passes.

    `send_s`: of a micro-batch's tensor over each cut, in either direction.
    """
    num_stages = len(forward_s)
    waiting = [list(order(schedule, stage, num_stages, num_micro_batches)) for stage in range(num_stages)]
    position = [0] * num_stages
    free_s = [0.0] * num_stages
    arrived: dict[tuple[str, int, int], float] = {}
    for micro_batch in range(num_micro_batches):
        arrived["forward", 0, micro_batch] = 0.0
    moved = True
    while moved:
        moved = False
        for stage in range(num_stages):
            while position[stage] < len(waiting[stage]):
                each = waiting[stage][position[stage]]
                ready = arrived.get((each.kind, stage, each.micro_batch))
                if ready is None:
                    break
                duration = forward_s[stage] if each.kind == "forward" else backward_s[stage]
                end = max(ready, free_s[stage]) + duration
                free_s[stage] = end
                if each.kind == "forward" and stage + 1 < num_stages:
                    arrived["forward", stage + 1, each.micro_batch] = end + send_s[stage]
                elif each.kind == "forward":
                    arrived["backward", stage, each.micro_batch] = end
                elif stage:
                    arrived["backward", stage - 1, each.micro_batch] = end + send_s[stage - 1]
                position[stage] += 1
                moved = True
    return tuple(free_s)


@dataclass(frozen=True)
class Planner:
    """Plans for one model on some devices."""

    blocks: Sequence[Block]
    devices: Devices
    schedule: str
    last_stage_s: Line = field(default_factory=lambda: Line(0.0, 0.0))
    """What the last stage does for each micro-batch besides its blocks: a whole teacher's forward pass, the loss."""

    def plan(self, num_samples: int) -> Plan:
        """The fastest plan for a replica's batch.

        Raises:
            ModelError: fewer cut points than stages need, or no plan fits the memory.
        """
        stages = self.devices.num_stages
        if len(self.blocks) < stages:
            raise ModelError(f"the model has {len(self.blocks) - 1} cut points, and {stages} stages need {stages - 1}")
        numbers = sorted({*(2**power for power in range(num_samples.bit_length()) if 2**power <= num_samples), num_samples})
        plans = [plan for number in numbers if (plan := self._best(num_samples, number)) is not None]
        if not plans:
            raise ModelError(f"no cut into {stages} stages fits {self.devices.memory_bytes / 2**30:.1f} GiB a device")
        return min(plans, key=lambda plan: plan.step_s)

    def _best(self, num_samples: int, num_micro_batches: int) -> Plan | None:
        candidates = self._candidates(num_samples, num_micro_batches)
        plans = {starts: self.expect(starts, num_samples, num_micro_batches) for starts in candidates}
        plans = {starts: plan for starts, plan in plans.items() if self._fits(plan)}
        if not plans:
            return None
        starts, best = min(plans.items(), key=lambda each: each[1].step_s)
        improved = True
        while improved:
            improved = False
            for neighbour in self._neighbours(starts):
                plan = self.expect(neighbour, num_samples, num_micro_batches)
                if plan.step_s < best.step_s and self._fits(plan):
                    starts, best, improved = neighbour, plan, True
        return best

    def _candidates(self, num_samples: int, num_micro_batches: int) -> list[tuple[int, ...]]:
        """All cuts where they are few; otherwise those of balanced stages, with and without what their cuts send."""
        num_cuts = self.devices.num_stages - 1
        if math.comb(len(self.blocks) - 1, num_cuts) <= ALL_CUTS:
            return [(0, *cuts) for cuts in combinations(range(1, len(self.blocks)), num_cuts)]
        found = [self._balanced(num_samples, num_micro_batches, with_sends=with_sends) for with_sends in (False, True)]
        return [starts for starts in found if starts is not None]

    def _fits(self, plan: Plan) -> bool:
        return all(stage.memory_bytes <= self.devices.memory_bytes for stage in plan.stages)

    def _neighbours(self, starts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Those with one cut moved by up to four blocks."""
        for index in range(1, len(starts)):
            for move in (-4, -3, -2, -1, 1, 2, 3, 4):
                moved = (*starts[:index], starts[index] + move, *starts[index + 1 :])
                bounds = (*moved, len(self.blocks))
                if all(first < end for first, end in pairwise(bounds)):
                    yield moved

    def _balanced(self, num_samples: int, num_micro_batches: int, *, with_sends: bool) -> tuple[int, ...] | None:
        """The first blocks of stages whose slowest is fastest; None: nothing fits the memory."""
        size, num_blocks = -(-num_samples // num_micro_batches), len(self.blocks)
        best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(0, 0): (0.0, ())}
        for stage in range(self.devices.num_stages):
            for end in range(stage + 1, num_blocks + 1):
                options = []
                for first in range(stage, end):
                    before = best.get((stage, first))
                    if before is None:
                        continue
                    estimate = self._stage(stage, first, end, size, num_micro_batches)
                    if estimate.memory_bytes <= self.devices.memory_bytes:
                        sends_s = 2 * self._send_s(end, size) if with_sends and end < num_blocks else 0.0
                        slowest = max(before[0], estimate.forward_s + estimate.backward_s + sends_s)
                        options.append((slowest, (*before[1], first)))
                if options:
                    best[stage + 1, end] = min(options)
        found = best.get((self.devices.num_stages, num_blocks))
        return None if found is None else found[1]

    def expect(self, starts: Sequence[int], num_samples: int, num_micro_batches: int) -> Plan:
        """The expected step of stages that begin at these blocks."""
        size = -(-num_samples // num_micro_batches)
        ends = (*starts[1:], len(self.blocks))
        stages = tuple(
            self._stage(index, first, end, size, num_micro_batches)
            for index, (first, end) in enumerate(zip(starts, ends, strict=True))
        )
        send_s = [self._send_s(end, size) for end in ends[:-1]]
        forward_s, backward_s = [stage.forward_s for stage in stages], [stage.backward_s for stage in stages]
        ended_s = step_seconds(forward_s, backward_s, send_s, self.schedule, num_micro_batches)
        step_s = max(end_s + self._all_reduce_s(first, end) for end_s, first, end in zip(ended_s, starts, ends, strict=True))
        busy_s = num_micro_batches * (sum(forward_s) + sum(backward_s))
        return Plan(stages, num_micro_batches, step_s, 1 - busy_s / (step_s * len(stages)))

    def _send_s(self, end: int, size: int) -> float:
        """Of a micro-batch over the cut before a block, in either direction."""
        return self.devices.latency_s + size * self.blocks[end - 1].output_bytes / self.devices.bytes_per_s

    def _all_reduce_s(self, first: int, end: int) -> float:
        """A ring's: each device sends and receives 2 (n - 1)/n of the gradients."""
        replicas = self.devices.num_replicas
        gradient_bytes = sum(block.parameter_bytes for block in self.blocks[first:end])
        return 2 * (replicas - 1) / replicas * gradient_bytes / self.devices.all_reduce_bytes_per_s

    def _stage(self, index: int, first: int, end: int, size: int, num_micro_batches: int) -> Stage:
        blocks = self.blocks[first:end]
        last = index == self.devices.num_stages - 1
        stored = stored_micro_batches(self.schedule, index, self.devices.num_stages, num_micro_batches) * size
        return Stage(
            begins_at=blocks[0].begins_at,
            forward_s=sum(block.forward.seconds(size) for block in blocks) + (self.last_stage_s.seconds(size) if last else 0.0),
            backward_s=sum(block.backward.seconds(size) for block in blocks),
            memory_bytes=self.devices.parameter_copies * sum(block.parameter_bytes for block in blocks)
            + stored * sum(block.activation_bytes for block in blocks),
        )
