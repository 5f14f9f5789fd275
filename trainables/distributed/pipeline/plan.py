"""Where to cut a model, and into how many micro-batches a batch is divided: the least predicted step over all cuts.

Where the cuts are few, all are compared, those with the fastest slowest stage first: no step is shorter than that stage's
passes. Otherwise dynamic programming over the blocks finds the cuts whose slowest stage is fastest, and cuts next to those are
compared by the whole step, which `schedule_time` works out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from trainables.distributed.pipeline.costs import Array, Block, Devices, Plan, Stage, Sums
from trainables.distributed.pipeline.schedule_time import StageTimes, step_seconds, stored_micro_batches
from trainables.distributed.pipeline.starts import Starts, all_starts, balanced_starts, neighbours, stage_parts
from trainables.errors import ModelError

ALL_CUTS = 2000
"""Up to so many, all cuts are compared."""
NOT_NEAR = 1.1
"""A number of micro-batches whose balanced stages are slower than the best by this factor is not looked into."""


@dataclass(frozen=True)
class Planner:
    """Plans for one model on some devices, its teacher on the last one."""

    blocks: Sequence[Block]
    devices: Devices
    schedule: str
    teacher: Sequence[Block] = ()
    """Of a network that runs with the student; without backward passes."""
    teacher_share: float = 1.0
    """Of the teacher's parameters that the last device stores; the other replicas' last devices have the rest."""

    def plan(self, num_samples: int, starts: Starts | None = None, num_micro_batches: int | None = None) -> Plan:
        """The fastest plan for a replica's batch; `starts` and `num_micro_batches` where they are given.

        Raises ModelError: fewer cut points than stages need, or no plan fits the memory.
        """
        stages = self.devices.num_stages
        if len(self.blocks) < stages:
            raise ModelError(f"the model has {len(self.blocks) - 1} cut points, and {stages} stages need {stages - 1}")
        numbers = [num_micro_batches] if num_micro_batches is not None else self._numbers(num_samples)
        best: Plan | None = None
        for number in numbers:
            found = _Layout(self, num_samples, number).best(starts, math.inf if best is None else best.step_s)
            best = found or best
        if best is None:
            given = "this cut" if starts is not None else "no cut"
            memory = f"{self.devices.memory_bytes / 2**30:.1f} GiB a device"
            if stages == 1:
                raise ModelError(f"the whole model does not fit {memory}")
            raise ModelError(f"{given} into {stages} stages with parameters in each fits {memory}")
        return best

    def expect(self, starts: Starts, num_samples: int, num_micro_batches: int) -> Plan:
        """The expected step of stages that begin at these blocks."""
        return _Layout(self, num_samples, num_micro_batches).plan(starts)

    def _numbers(self, num_samples: int) -> list[int]:
        """Of micro-batches: those that divide a batch, and powers of two; none smaller than what was measured."""
        least = min(self.blocks[0].forward.num_samples[0], num_samples)
        sizes = {size for size in range(least, num_samples + 1) if num_samples % size == 0}
        sizes |= {size for power in range(num_samples.bit_length()) if (size := -(-num_samples // 2**power)) >= least}
        return sorted(-(-num_samples // size) for size in sizes)


class _Layout:
    """A number of micro-batches: the stages are to be found."""

    def __init__(self, planner: Planner, num_samples: int, num_micro_batches: int) -> None:
        self._planner, self._devices, self._number = planner, planner.devices, num_micro_batches
        self._size = -(-num_samples // num_micro_batches)
        self._student = Sums(planner.blocks, self._size)
        teacher = Sums(planner.teacher, self._size)
        self._teacher_s = num_micro_batches * teacher.forward_s(0, teacher.count)
        """Of the whole batch, on the last stage."""
        self._teacher_bytes = planner.teacher_share * teacher.parameter_bytes(0, teacher.count)
        """There, with what its passes need."""
        if planner.teacher:
            running = max(block.activation_bytes for block in planner.teacher)
            self._teacher_bytes += self._size * running + num_samples * planner.teacher[-1].output_bytes

    def best(self, given: Starts | None, limit_s: float) -> Plan | None:
        """The fastest plan; None: none fits the memory and is faster than `limit_s`."""
        candidates, all_of_them = self._candidates(given)
        best_s, best = self._fastest(candidates, math.inf)
        if best is None or best_s > NOT_NEAR * limit_s:
            return None
        while not all_of_them:
            step_s, found = self._fastest(self._neighbours(best), best_s)
            if found is None:
                break
            best_s, best = step_s, found
        return self.plan(best) if best_s < limit_s else None

    def _fastest(self, candidates: Iterable[Starts], limit_s: float) -> tuple[float, Starts | None]:
        """Of those that fit the memory and are faster than `limit_s`."""
        found = None
        for bound_s, starts in sorted((self._bound_s(starts), starts) for starts in candidates):
            if bound_s >= limit_s:
                break
            if self._fits(starts) and (step_s := self.step_s(starts)) < limit_s:
                limit_s, found = step_s, starts
        return limit_s, found

    def _candidates(self, given: Starts | None) -> tuple[list[Starts], bool]:
        """Stages to begin with, and whether they are all that there are."""
        num_stages = self._devices.num_stages
        if given is not None:
            return [given], True
        if math.comb(self._student.count - 1, num_stages - 1) <= ALL_CUTS:
            return list(all_starts(self._student.count, num_stages)), True
        found = {self._balanced(with_sends=with_sends) for with_sends in (False, True)}
        return sorted(starts for starts in found if starts is not None), False

    def _balanced(self, *, with_sends: bool) -> Starts | None:
        """The stages whose slowest is fastest, with the teacher's passes on the last one; None: none fits the memory."""
        sends_s = np.array([2 * self._send_s(cut) if with_sends else 0.0 for cut in range(self._student.count + 1)])
        loads_s = self._student.all_parts_s() + sends_s[:, None] + sends_s
        stages = range(self._devices.num_stages)
        return balanced_starts(
            [np.where(self._fitting(stage), loads_s + self._stage_teacher_s(stage) / self._number, math.inf) for stage in stages]
        )

    def _fitting(self, stage: int) -> Array:
        """By a part's first block and the block after its last, whether a stage can be that."""
        fitting = np.zeros((self._student.count + 1,) * 2)
        for first, end in combinations(range(self._student.count + 1), 2):
            fitting[first, end] = self._part_fits(stage, first, end)
        return fitting

    def _neighbours(self, starts: Starts) -> Iterator[Starts]:
        """Those with one or two cuts moved by a few blocks."""
        for moved in neighbours(starts, self._student.count):
            yield moved
            yield from neighbours(moved, self._student.count)

    def _send_s(self, cut: int) -> float:
        """Over the cut before a block."""
        return self._devices.link.seconds(self._student.sent_bytes(cut)) if 0 < cut < self._student.count else 0.0

    def _is_last(self, stage: int) -> bool:
        return stage == self._devices.num_stages - 1

    def _stage_teacher_s(self, stage: int) -> float:
        """Of the whole batch."""
        return self._teacher_s if self._is_last(stage) else 0.0

    def _part_fits(self, stage: int, first: int, end: int) -> bool:
        """A stage has parameters to train, and its device the memory."""
        has_parameters = self._student.parameter_bytes(first, end) > 0
        return has_parameters and self._memory_bytes(stage, first, end) <= self._devices.memory_bytes

    def _memory_bytes(self, stage: int, first: int, end: int) -> float:
        stored = self._size * stored_micro_batches(self._planner.schedule, stage, self._devices.num_stages, self._number)
        received = self._student.sent_bytes(first) / self._size if first else 0.0
        activations = stored * (received + self._student.activation_bytes(first, end))
        teacher_bytes = self._teacher_bytes if self._is_last(stage) else 0.0
        return self._devices.parameter_copies * self._student.parameter_bytes(first, end) + activations + teacher_bytes

    def _fits(self, starts: Starts) -> bool:
        return all(self._part_fits(*part) for part in stage_parts(starts, self._student.count))

    def _times(self, starts: Starts) -> list[StageTimes]:
        return [
            StageTimes(
                forward_s=self._student.forward_s(first, end),
                backward_s=self._student.backward_s(first, end),
                send_s=self._send_s(end),
                teacher_s=self._stage_teacher_s(stage),
            )
            for stage, first, end in stage_parts(starts, self._student.count)
        ]

    def _bound_s(self, starts: Starts) -> float:
        """What no step is shorter than: a stage's passes, what it waits for before them, and what waits for it after them."""
        bound_s = before_s = after_s = 0.0
        for stage in self._times(starts):
            passes_s = self._number * (stage.forward_s + stage.backward_s)
            bound_s = max(bound_s, passes_s + max(before_s, stage.teacher_s) + after_s)
            before_s += stage.forward_s + stage.send_s
            after_s += stage.backward_s + stage.send_s
        return bound_s

    def step_s(self, starts: Starts) -> float:
        """Of all passes, and of the all-reduce of each stage's gradients: after the passes, but beside DDP's backward pass.

        Gloo takes the processor from that.
        """
        times, overlapped = self._times(starts), self._devices.link.overlapped
        ended_s = step_seconds(times, self._planner.schedule, self._number, overlapped=overlapped)
        reduced_s = []
        for end_s, stage, (_, first, end) in zip(ended_s, times, stage_parts(starts, self._student.count), strict=True):
            all_reduce_s = self._devices.all_reduce_s(self._student.parameter_bytes(first, end))
            hidden_s = stage.backward_s if len(times) == 1 and overlapped else 0.0
            reduced_s.append(end_s + max(0.0, all_reduce_s - hidden_s))
        return max(reduced_s)

    def plan(self, starts: Starts) -> Plan:
        """What is expected of these stages."""
        times, step_s = self._times(starts), self.step_s(starts)
        busy_s = sum(stage.teacher_s + self._number * (stage.forward_s + stage.backward_s) for stage in times)
        stages = [
            Stage(
                begins_at=self._planner.blocks[first].begins_at,
                forward_s=times[stage].forward_s,
                backward_s=times[stage].backward_s,
                teacher_s=times[stage].teacher_s / self._number,
                parameter_bytes=self._student.parameter_bytes(first, end),
                memory_bytes=self._memory_bytes(stage, first, end),
                sent_bytes=self._student.sent_bytes(end),
            )
            for stage, first, end in stage_parts(starts, self._student.count)
        ]
        return Plan(tuple(stages), self._planner.schedule, self._number, step_s, bubble=1 - busy_s / (step_s * len(stages)))
