"""Faults in simulated trainings, one and two at once: what the doctor says first, and what fixing that brings."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from service.doctor.causes import findings
from service.doctor.evidence import MIN_GAIN_PCT
from service.doctor.step_model import Finding
from tests.faults.simulated import Pipeline, ms_per_image, run, seed_of, step_ms

TIMES = 1.8
"""What a fault adds to a step, in steps."""
TIE_PCT = 3.0
"""Of two causes whose fixing brings the same but for so many points either may come first."""
HEALTHY_BATCH = 64
CPU, GPU = Pipeline(), Pipeline(gpu=True, teacher_fixed_ms=2.0, student_fixed_ms=2.0, backward_fixed_ms=4.0)

Fault = Callable[[Pipeline, float], Pipeline]
"""Of a pipeline and the milliseconds that it adds to a step."""


def _to_an_image(name: str, per_thread: bool = False) -> Fault:
    def put(p: Pipeline, extra_ms: float) -> Pipeline:
        images = HEALTHY_BATCH / (CPU.threads if per_thread else 1)
        return replace(p, **{name: getattr(p, name) + extra_ms / images})

    return put


FAULTS: dict[str, tuple[str, Fault]] = {
    "throttled reader": ("storage-bound", _to_an_image("read_image_ms", per_thread=True)),
    "decoder burns CPU": ("decode-bound", _to_an_image("decode_image_ms", per_thread=True)),
    "loader threads share a lock": ("GIL-bound", _to_an_image("lock_image_ms", per_thread=True)),
    "no loader workers": ("no prefetch", lambda p, extra_ms: replace(p, threads=0)),
    "one slow rank": ("straggler", _to_an_image("slow_rank_image_ms")),
    "one slow loader": ("straggler", _to_an_image("slow_loader_image_ms", per_thread=True)),
    "slow all-reduce": ("all-reduce-bound", lambda p, extra_ms: replace(p, network_ms=p.network_ms + extra_ms)),
    "slow copy": ("copy-bound", _to_an_image("copy_image_ms")),
    "slow teacher": ("teacher-bound", _to_an_image("teacher_image_ms")),
    "tiny batch": ("launch-bound", lambda p, extra_ms: replace(p, batch=2)),
    "long evaluation": ("evaluation", lambda p, extra_ms: replace(p, evaluation_ms=p.evaluation_ms + p.steps * extra_ms / 2)),
    "another job from the middle on": ("slowdown", lambda p, extra_ms: replace(p, load=lambda epoch: 1.0 if epoch < 3 else 1.8)),
    "hot GPU": (
        "thermal drift",
        lambda p, extra_ms: replace(p, clock=lambda epoch: 1 - 0.4 * min(1.0, max(0.0, (epoch - 1) / 2))),
    ),
}
ON_GPU_ALONE = ("hot GPU",)
CONTRADICTORY = ({"loader threads share a lock", "no loader workers"},)  # without threads there is no lock to wait for
FIXED: dict[str, Callable[[Pipeline, int], Pipeline]] = {
    "storage-bound": lambda p, value: replace(p, read_image_ms=0.0),
    "decode-bound": lambda p, value: replace(p, decode_image_ms=0.0),
    "GIL-bound": lambda p, value: replace(p, lock_image_ms=0.0),
    "no prefetch": lambda p, value: replace(p, threads=value or 4),
    "straggler": lambda p, value: replace(p, slow_rank_image_ms=0.0, slow_loader_image_ms=0.0),
    "all-reduce-bound": lambda p, value: replace(p, network_ms=0.0),
    "copy-bound": lambda p, value: replace(p, copy_image_ms=0.0),
    "teacher-bound": lambda p, value: replace(p, teacher_image_ms=0.0, teacher_fixed_ms=0.0),
    "launch-bound": lambda p, value: replace(p, batch=value // p.workers or HEALTHY_BATCH),
    "evaluation": lambda p, value: replace(p, evaluate_every=value or 6),
    "slowdown": lambda p, value: replace(p, load=lambda epoch: 1.0),
    "thermal drift": lambda p, value: replace(p, clock=lambda epoch: 1.0),
}
"""A training without a cause: all of it gone, or changed to the value that the doctor proposes (0: to none)."""
OPTIONS = {
    "launch-bound": r"data\.global_batch_size",
    "no prefetch": r"data\.loader_workers",
    "evaluation": r"train\.evaluate_every",
}


@dataclass(frozen=True)
class Verdict:
    """What the doctor said of a training with one fault or two, and what the clock says of fixing each cause."""

    faults: tuple[str, ...]
    gpu: bool
    found: tuple[Finding, ...]
    gains_pct: Mapping[frozenset[str], float]
    """Of the faults' causes, of all of them together, and of what else was found."""

    @property
    def causes(self) -> tuple[str, ...]:
        return tuple(FAULTS[fault][0] for fault in self.faults)

    @property
    def right(self) -> bool:
        """Whether the first finding is what brings most alone; both together, where one alone brings next to nothing."""
        most = max(self.gains_pct[frozenset({cause})] for cause in self.causes)
        both = self.gains_pct[frozenset(self.causes)]
        if not self.found:
            return max(most, both if len(self.causes) > 1 else 0.0) < MIN_GAIN_PCT + TIE_PCT
        first = causes_of(self.found[0])
        if len(first) > 1:
            return first == frozenset(self.causes) and most < MIN_GAIN_PCT + TIE_PCT
        return self.gains_pct.get(first, 0.0) >= most - TIE_PCT

    @property
    def off_points(self) -> list[float]:
        """How far each gain is from what fixing brings, the first finding's first."""
        return [abs(one.gain_pct - self.gains_pct.get(causes_of(one), 0.0)) for one in self.found]

    @property
    def false_alarms(self) -> list[str]:
        """Causes whose fixing brings next to nothing."""
        return [one.cause for one in self.found if self.gains_pct.get(causes_of(one), 0.0) < MIN_GAIN_PCT / 2]


def causes_of(finding: Finding) -> frozenset[str]:
    """All that has to be fixed for a finding's gain."""
    after = {finding.after} if finding.after else set[str]()
    return frozenset({cause.name for cause in finding.causes} | after)


def trial(faults: tuple[str, ...], gpu: bool) -> Verdict:
    """A training with these faults, and the same without each of them, and without whatever else is found."""
    healthy = GPU if gpu else CPU
    extra_ms, seed = TIMES * step_ms(healthy), seed_of(*faults, str(gpu))
    ill = healthy
    for fault in faults:
        ill = FAULTS[fault][1](ill, extra_ms)
    found = tuple(findings(run(ill, seed).evidence))
    causes = [FAULTS[fault][0] for fault in faults]
    fixed = {frozenset({cause}) for cause in causes} | {frozenset(causes)} | {causes_of(one) for one in found}
    before_ms, gains = ms_per_image(ill, seed), {}
    for these in fixed:
        if these <= FIXED.keys():
            p = ill
            for cause in these:
                p = FIXED[cause](p, _proposed(cause, found))
            gains[these] = 100 * (1 - ms_per_image(p, seed) / before_ms)
    return Verdict(faults, gpu, found, gains)


def _proposed(cause: str, found: Sequence[Finding]) -> int:
    """The value of the option that the doctor would change, 0 where it names none."""
    change = next((one.change for one in found if cause in {each.name for each in one.causes}), "")
    value = re.search(rf"{OPTIONS[cause]}=(\d+)", change) if cause in OPTIONS else None
    return int(value[1]) if value else 0


def trials(number: int) -> Iterator[Verdict]:
    """All combinations of so many faults, on CPUs and on GPUs."""
    for gpu in (False, True):
        for faults in combinations(FAULTS, number):
            if (gpu or not set(faults) & set(ON_GPU_ALONE)) and set(faults) not in CONTRADICTORY:
                yield trial(faults, gpu)


HEALTHY: dict[str, Pipeline] = {
    "one worker on a CPU": replace(CPU, workers=1),
    "two workers on a CPU": CPU,
    "digits in memory": replace(CPU, read_image_ms=0.0, decode_image_ms=0.002, steps=22, noise=0.1),
    "cached files": replace(CPU, read_image_ms=0.03, decode_image_ms=0.1),
    "a loader that just keeps up": replace(CPU, workers=1, decode_image_ms=0.85),
    "one GPU": replace(GPU, workers=1),
    "eight GPUs, noisy": replace(GPU, workers=8, noise=0.06, network_ms=1.0),
    "a timing run on four GPUs": replace(GPU, workers=4, timing=True, epochs=1, steps=60),
    "a GPU under a power cap at 95% of its memory": replace(GPU, workers=1, memory_mib=78_000.0),
    "a large batch in micro-batches": replace(GPU, batch=512, accumulate=2, decode_image_ms=0.3, threads=4),
    "epochs that differ by 3%": replace(GPU, drift=0.03, epochs=12),
    "a few longer checkpoints": replace(CPU, steps=60, evaluation_ms=100.0, checkpoint_ms=80.0),
}
"""Trainings of unlike kinds with nothing in them that gains 5%."""
