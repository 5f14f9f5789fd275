"""Where to cut a model, and into how many micro-batches a batch is divided: the least predicted step over all cuts.

Where the cuts are few, all are compared, those with the fastest slowest stage first: no step is shorter than that stage's
passes. Otherwise dynamic programming over the blocks finds the cuts whose slowest stage is fastest, and cuts next to those are
compared by the whole step, which `schedule_time` works out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

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
    """Plans for one model, and its teacher, on some devices."""

    blocks: Sequence[Block]
    devices: Devices
    schedule: str
    teacher: Sequence[Block] = ()
    """Of a network that runs with the student; without backward passes."""
    placements: Sequence[str] = ("last",)
    """Of the teacher, of those that `Plan.placement` names."""

    def plan(self, num_samples: int, starts: Starts | None = None, num_micro_batches: int | None = None) -> Plan:
        """The fastest plan for a replica's batch; `starts` and `num_micro_batches` where they are given.

        Raises:
            ModelError: fewer cut points than stages need, or no plan fits the memory.
        """
        stages = self.devices.num_stages
        if len(self.blocks) < stages:
            raise ModelError(f"the model has {len(self.blocks) - 1} cut points, and {stages} stages need {stages - 1}")
        numbers = [num_micro_batches] if num_micro_batches is not None else self._numbers(num_samples)
        best: Plan | None = None
        for layout in self._layouts(num_samples, numbers):
            found = layout.best(starts, math.inf if best is None else best.step_s)
            best = found or best
        if best is None:
            given = "this cut" if starts is not None else "no cut"
            memory = f"{self.devices.memory_bytes / 2**30:.1f} GiB a device"
            raise ModelError(f"{given} into {stages} stages with parameters in each fits {memory}")
        return best

    def expect(self, starts: Starts, num_samples: int, num_micro_batches: int) -> Plan:
        """The expected step of stages that begin at these blocks, the teacher placed as the first of `placements` says."""
        layout = next(self._layouts(num_samples, [num_micro_batches]))
        return layout.plan(starts, layout.whole_teacher)

    def _numbers(self, num_samples: int) -> list[int]:
        """Of micro-batches: those that divide a batch, and powers of two; none smaller than what was measured."""
        least = min(self.blocks[0].forward.num_samples[0], num_samples)
        sizes = {size for size in range(least, num_samples + 1) if num_samples % size == 0}
        sizes |= {size for power in range(num_samples.bit_length()) if (size := -(-num_samples // 2**power)) >= least}
        return sorted(-(-num_samples // size) for size in sizes)

    def _layouts(self, num_samples: int, numbers: Sequence[int]) -> Iterator[_Layout]:
        for number, placement in product(numbers, self.placements if self.teacher else ("none",)):
            if placement != "pipeline" or len(self.teacher) >= self.devices.num_stages:
                yield _Layout(self, num_samples, number, placement)


class _Layout:
    """A number of micro-batches and a placement of the teacher: the stages are to be found."""

    def __init__(self, planner: Planner, num_samples: int, num_micro_batches: int, placement: str) -> None:
        self._planner, self._devices, self._number = planner, planner.devices, num_micro_batches
        self._size, self._placement = -(-num_samples // num_micro_batches), placement
        self._student = Sums(planner.blocks, self._size)
        self._teacher = Sums(planner.teacher, self._size)
        self._ahead_s = [0.0] * self._devices.num_stages
        """Of a whole teacher, by stage."""
        if placement == "last":
            self._ahead_s[-1] = num_micro_batches * self._teacher.forward_s(0, self._teacher.count)
        elif placement == "worker":
            share = Sums(planner.teacher, -(-num_samples // self._devices.num_stages))
            self._ahead_s = [share.forward_s(0, share.count) for _ in self._ahead_s]
        self.whole_teacher = (0,) * self._devices.num_stages
        """Stands for the teacher's stages where it is not cut."""

    def best(self, given: Starts | None, limit_s: float) -> Plan | None:
        """The fastest plan; None: none fits the memory and is faster than `limit_s`."""
        candidates, all_of_them = self._candidates(given)
        best_s, best = self._fastest(candidates, math.inf)
        if best is None or best_s > NOT_NEAR * limit_s:
            return None
        while not all_of_them:
            step_s, found = self._fastest(self._neighbours(*best, student=given is None), best_s)
            if found is None:
                break
            best_s, best = step_s, found
        return self.plan(*best) if best_s < limit_s else None

    def _fastest(self, pairs: Iterable[tuple[Starts, Starts]], limit_s: float) -> tuple[float, tuple[Starts, Starts] | None]:
        """Of those that fit the memory and are faster than `limit_s`."""
        found = None
        for bound_s, *pair in sorted((self._bound_s(*pair), *pair) for pair in pairs):
            if bound_s >= limit_s:
                break
            if self._fits(*pair) and (step_s := self.step_s(*pair)) < limit_s:
                limit_s, found = step_s, (pair[0], pair[1])
        return limit_s, found

    def _candidates(self, given: Starts | None) -> tuple[list[tuple[Starts, Starts]], bool]:
        """Pairs of a student's and a teacher's stages to begin with, and whether they are all that there are."""
        num_stages, cut_teacher = self._devices.num_stages, self._placement == "pipeline"
        num_all = 1 if given is not None else math.comb(self._student.count - 1, num_stages - 1)
        num_all *= math.comb(self._teacher.count - 1, num_stages - 1) if cut_teacher else 1
        if num_all <= ALL_CUTS:
            students = [given] if given is not None else list(all_starts(self._student.count, num_stages))
            teachers = list(all_starts(self._teacher.count, num_stages)) if cut_teacher else [self.whole_teacher]
            return list(product(students, teachers)), True
        found = set()
        for with_sends in (False, True):
            teacher, teacher_s = self.whole_teacher, [ahead_s / self._number for ahead_s in self._ahead_s]
            for _ in range(2 if cut_teacher else 1):
                starts = given or self._balanced_student(teacher_s, with_sends=with_sends)
                if starts is None:
                    break
                if cut_teacher:
                    student = self._student.all_parts_s()
                    loads_s = self._teacher.all_parts_s()
                    parts = stage_parts(starts, self._student.count)
                    balanced = balanced_starts([loads_s + student[first, end] for _, first, end in parts])
                    assert balanced is not None
                    teacher = balanced
                    teacher_s = [
                        self._teacher.forward_s(first, end) for _, first, end in stage_parts(teacher, self._teacher.count)
                    ]
                found.add((starts, teacher))
        return sorted(found), False

    def _balanced_student(self, teacher_s: Sequence[float], *, with_sends: bool) -> Starts | None:
        """The stages whose slowest is fastest, beside the teacher's part in each; None: none fits the memory."""
        sends_s = np.array([2 * self._send_s(cut) if with_sends else 0.0 for cut in range(self._student.count + 1)])
        loads_s = self._student.all_parts_s() + sends_s[:, None] + sends_s
        stages = range(self._devices.num_stages)
        return balanced_starts([np.where(self._fitting(stage), loads_s + teacher_s[stage], math.inf) for stage in stages])

    def _fitting(self, stage: int) -> Array:
        """By a part's first block and the block after its last, whether a stage can be that."""
        fitting = np.zeros((self._student.count + 1,) * 2)
        for first, end in combinations(range(self._student.count + 1), 2):
            fitting[first, end] = self._part_fits(stage, first, end)
        return fitting

    def _neighbours(self, starts: Starts, teacher: Starts, *, student: bool) -> Iterator[tuple[Starts, Starts]]:
        """Those with one or two cuts moved by a few blocks."""
        students = [starts, *neighbours(starts, self._student.count)] if student else [starts]
        teachers = [teacher, *neighbours(teacher, self._teacher.count)] if self._placement == "pipeline" else [teacher]
        yield from product(students, teachers)
        if student:
            yield from ((again, teacher) for moved in students[1:] for again in neighbours(moved, self._student.count))

    def _send_s(self, cut: int) -> float:
        """Over the cut before a block."""
        return self._devices.link.seconds(self._student.sent_bytes(cut)) if 0 < cut < self._student.count else 0.0

    def _part_fits(self, stage: int, first: int, end: int, teacher_bytes: float = 0.0) -> bool:
        """A stage has parameters to train, and its device the memory."""
        has_parameters = self._student.parameter_bytes(first, end) > 0
        return has_parameters and self._memory_bytes(stage, first, end) + teacher_bytes <= self._devices.memory_bytes

    def _memory_bytes(self, stage: int, first: int, end: int) -> float:
        stored = self._size * stored_micro_batches(self._planner.schedule, stage, self._devices.num_stages, self._number)
        received = self._student.sent_bytes(first) / self._size if first else 0.0
        activations = stored * (received + self._student.activation_bytes(first, end))
        return self._devices.parameter_copies * self._student.parameter_bytes(first, end) + activations

    def _teacher_part(self, stage: int, teacher: Starts) -> tuple[int, int]:
        """The teacher's blocks that a stage's device has."""
        if self._placement == "pipeline":
            return stage_parts(teacher, self._teacher.count)[stage][1:]
        whole = self._placement == "worker" or (self._placement == "last" and stage == self._devices.num_stages - 1)
        return (0, self._teacher.count) if whole else (0, 0)

    def _fits(self, starts: Starts, teacher: Starts) -> bool:
        return all(
            self._part_fits(*part, self._teacher.parameter_bytes(*self._teacher_part(part[0], teacher)))
            for part in stage_parts(starts, self._student.count)
        )

    def _times(self, starts: Starts, teacher: Starts) -> list[StageTimes]:
        link, cut_teacher, times = self._devices.link, self._placement == "pipeline", []
        for stage, first, end in stage_parts(starts, self._student.count):
            part = self._teacher_part(stage, teacher)
            times.append(
                StageTimes(
                    forward_s=self._student.forward_s(first, end),
                    backward_s=self._student.backward_s(first, end),
                    send_s=self._send_s(end),
                    ahead_s=self._ahead_s[stage],
                    teacher_s=self._teacher.forward_s(*part) if cut_teacher else 0.0,
                    teacher_send_s=link.seconds(self._teacher.sent_bytes(part[1])) if cut_teacher else 0.0,
                )
            )
        return times

    def _bound_s(self, starts: Starts, teacher: Starts) -> float:
        """What no step is shorter than: a stage's passes, what it waits for before them, and what waits for it after them."""
        bound_s = before_s = after_s = 0.0
        cut_teacher = self._placement == "pipeline"
        for stage, first, end in stage_parts(starts, self._student.count):
            forward_s, backward_s = self._student.forward_s(first, end), self._student.backward_s(first, end)
            teacher_s = self._teacher.forward_s(*self._teacher_part(stage, teacher)) if cut_teacher else 0.0
            passes_s = self._number * (forward_s + backward_s + teacher_s)
            bound_s = max(bound_s, passes_s + max(before_s, self._ahead_s[stage]) + after_s)
            before_s += teacher_s if cut_teacher else forward_s + self._send_s(end)
            after_s += backward_s + self._send_s(end)
        return bound_s

    def step_s(self, starts: Starts, teacher: Starts) -> float:
        """Of all passes, and of the all-reduce of each stage's gradients: after the passes, but beside DDP's backward pass."""
        times = self._times(starts, teacher)
        ended_s = step_seconds(times, self._planner.schedule, self._number, overlapped=self._devices.link.overlapped)
        reduced_s = [
            end_s + max(0.0, self._all_reduce_s(first, end) - (stage.backward_s if len(times) == 1 else 0.0))
            for end_s, stage, (_, first, end) in zip(ended_s, times, stage_parts(starts, self._student.count), strict=True)
        ]
        return max(reduced_s)

    def _all_reduce_s(self, first: int, end: int) -> float:
        return self._devices.all_reduce_s(self._student.parameter_bytes(first, end))

    def plan(self, starts: Starts, teacher: Starts) -> Plan:
        """What is expected of these stages."""
        times, step_s = self._times(starts, teacher), self.step_s(starts, teacher)
        busy_s = sum(stage.ahead_s + self._number * (stage.forward_s + stage.backward_s + stage.teacher_s) for stage in times)
        stages = []
        for stage, first, end in stage_parts(starts, self._student.count):
            part = self._teacher_part(stage, teacher)
            stages.append(
                Stage(
                    begins_at=self._planner.blocks[first].begins_at,
                    forward_s=self._student.forward_s(first, end),
                    backward_s=self._student.backward_s(first, end),
                    teacher_s=times[stage].teacher_s + self._ahead_s[stage] / self._number,
                    parameter_bytes=self._student.parameter_bytes(first, end),
                    memory_bytes=self._memory_bytes(stage, first, end) + self._teacher.parameter_bytes(*part),
                    sent_bytes=self._student.sent_bytes(end),
                )
            )
        cuts = [self._planner.teacher[first].begins_at for first in teacher[1:]] if self._placement == "pipeline" else []
        bubble = 1 - busy_s / (step_s * len(stages))
        return Plan(tuple(stages), self._planner.schedule, self._number, self._placement, tuple(cuts), step_s, bubble)
