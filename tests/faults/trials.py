"""Real runs with a fault, or two at once: what the doctor says first, what it predicts, and what removing that gains."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

from service.doctor.causes import findings
from service.doctor.evidence import MIN_GAIN_PCT
from service.doctor.read_run import Recording
from service.doctor.step_model import Finding
from tests.faults.hot_gpu import hot_gpu
from tests.faults.runs import Bench, Training
from tests.faults.turns import Gain, compare

BATCH, TINY = 96, 2
TIMES = 1.8
"""What a fault adds to a step, in steps."""
TIE_PCT = 3.0
"""Of two causes whose fixing brings the same but for so many points either may come first."""
CAUSES = {
    "throttled reader": "storage-bound",
    "decoder burns CPU": "decode-bound",
    "no loader workers": "no prefetch",
    "one slow rank": "straggler",
    "slow all-reduce": "all-reduce-bound",
    "slow copy": "copy-bound",
    "slow teacher": "teacher-bound",
    "tiny batch": "launch-bound",
}
OF_RANKS = {"one slow rank", "slow all-reduce"}
OPTIONS = {"launch-bound": "data.global_batch_size", "no prefetch": "data.loader_workers"}
"""What fixes a cause: the value that the doctor proposes."""
MOST_TRIES = 3
"""How often a run takes turns with fixed ones, each time with the values that were proposed after the time before."""
REPLAYED = "hot GPU (replayed)"
OF_MACHINE = "busy cores"
"""What other programs cost while a trial runs: nothing that was put in, and there with and without the faults."""


def names_of(finding: Finding) -> frozenset[str]:
    return frozenset(cause.name for cause in finding.causes)


@dataclass(frozen=True)
class Verdict:
    """What came of one fault, or of two."""

    faults: tuple[str, ...]
    found: tuple[Finding, ...]
    gains: dict[frozenset[str], Gain]
    """By how much less time an image takes without each of the faults' causes, and without all of them."""
    remark: str = ""

    @property
    def causes(self) -> frozenset[str]:
        return frozenset().union(*self.gains)

    @property
    def first(self) -> str:
        return self.found[0].cause if self.found else "nothing"

    @property
    def first_causes(self) -> frozenset[str]:
        return names_of(self.found[0]) if self.found else frozenset()

    @property
    def predicted_pct(self) -> float:
        return self.found[0].gain_pct if self.found else 0.0

    @property
    def measured(self) -> Gain:
        """What removing the first finding gains; 0 where that was not put there."""
        return self.gains.get(self.first_causes, Gain(0.0))

    @property
    def most(self) -> tuple[str, float]:
        """The cause whose fixing gains most alone, and that gain."""
        alone = {cause: gain.pct for causes, gain in self.gains.items() if len(causes) == 1 for cause in causes}
        return max(alone.items(), key=lambda item: item[1])

    @property
    def named(self) -> bool:
        """Whether the first finding is what gains most alone, or both together where neither alone gains."""
        most_pct = self.most[1]
        if not self.found:
            return max(gain.pct for gain in self.gains.values()) < MIN_GAIN_PCT + TIE_PCT
        if len(self.first_causes) > 1:
            return self.first_causes == self.causes and most_pct < MIN_GAIN_PCT + TIE_PCT
        return self.first_causes <= self.causes and self.measured.pct >= most_pct - TIE_PCT

    @property
    def off_points(self) -> float:
        """How far the prediction is from what was measured."""
        return abs(self.predicted_pct - self.measured.pct)

    @property
    def others(self) -> list[str]:
        """Findings of what was not put in. They may be true: what a run without the faults could gain is not measured here."""
        return [f"{one.cause} {one.gain_pct:.1f}%" for one in self.found if not names_of(one) <= self.causes]


class Trials:
    """Each run with faults takes turns with the same without them."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    @cached_property
    def clean(self) -> dict[int, Recording]:
        """A run without a fault, by number of workers: the one of three that other processes disturbed least."""
        return {
            workers: min(
                (self._bench.run(Training(workers, BATCH)) for _ in range(3)), key=lambda case: case.evidence.typical.step_ms
            )
            for workers in (1, 2)
        }

    def training(self, workers: int, faults: frozenset[str], batch: int | None = None, sets: tuple[str, ...] = ()) -> Training:
        """One with these faults, and as many images a worker as they leave."""
        batch = batch or (TINY if "tiny batch" in faults else BATCH)
        threads = ("data.loader_workers=0",) if "no loader workers" in faults else ()
        clean = self.clean[workers].evidence.ranks[0]
        clean_s = clean.step_ms / 1e3
        put = {fault: TIMES * clean_s * (1 if fault == "slow all-reduce" else batch / BATCH) for fault in sorted(faults)}
        return Training(workers, batch, put, (*threads, *sets))

    def verdict(self, *faults: str) -> Verdict:
        """Of a run with these faults, and of those without one and without all of them."""
        if faults == (REPLAYED,):
            hot, cool = hot_gpu(throttled=True), hot_gpu(throttled=False)
            last_ms, cool_ms = (case.evidence.epochs[-1].step_ms for case in (hot, cool))
            gain = Gain(100 * (1 - cool_ms / last_ms))
            return Verdict(faults, tuple(findings(hot.evidence)), {frozenset({"thermal drift"}): gain})
        workers = 2 if OF_RANKS & set(faults) else 1
        ill = self.training(workers, frozenset(faults))
        # What the doctor proposes values for is fixed with them. A gain is predicted for the value that comes with it: where
        # another one is proposed after the turns, they begin again with that.
        proposes = {CAUSES[fault] for fault in faults} & OPTIONS.keys()
        every = findings(self._bench.run(ill).evidence) if proposes else []
        fixed_faults = list(dict.fromkeys([*(frozenset({fault}) for fault in faults), frozenset(faults)]))
        for _ in range(MOST_TRIES):
            before = every
            fixed = [self._fixed(workers, frozenset(faults) - these, these, before) for these in fixed_faults]
            case, gains = compare(self._bench, ill, fixed)
            every = findings(case.evidence)
            if not (changed := changed_proposals(before, every)):
                break
        remarks = [f"{one.cause} {one.gain_pct:.1f}%" for one in every if one.cause == OF_MACHINE] + changed
        by_causes = {frozenset(CAUSES[fault] for fault in these): gain for these, gain in zip(fixed_faults, gains, strict=True)}
        return Verdict(faults, without_machine(every), by_causes, "; ".join(remarks))

    def _fixed(self, workers: int, left: frozenset[str], fixed: frozenset[str], found: Sequence[Finding]) -> Training:
        """A run with the faults that are left; what the doctor proposes a value for has that."""
        batch, sets = None, tuple[str, ...]()
        if "tiny batch" in fixed and (value := proposed("data.global_batch_size", found)):
            batch = value // workers
        if "no loader workers" in fixed and (value := proposed("data.loader_workers", found)):
            sets = (f"data.loader_workers={value}",)
        return self.training(workers, left, batch, sets)

    def singles(self, faults: Sequence[str] = (*CAUSES, REPLAYED)) -> Iterator[Verdict]:
        """Each of these faults alone."""
        for fault in faults:
            yield self.verdict(fault)

    def pairs(self, faults: Sequence[str] = tuple(CAUSES)) -> Iterator[Verdict]:
        """Each two of these faults at once."""
        for two in combinations(faults, 2):
            yield self.verdict(*two)


def without_machine(found: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings but for what other programs cost."""
    return tuple(one for one in found if OF_MACHINE not in {*names_of(one), one.after})


def changed_proposals(before: Sequence[Finding], after: Sequence[Finding]) -> list[str]:
    """Of options for which another value is proposed after than before."""
    values = [(option, proposed(option, before), proposed(option, after)) for option in OPTIONS.values()]
    return [f"fixed with {option}={was}, proposed afterwards: {now}" for option, was, now in values if was != now]


def proposed(option: str, found: Sequence[Finding]) -> int | None:
    """The value that the doctor names for an option."""
    values = (re.search(re.escape(option) + r"=(\d+)", finding.change) for finding in found)
    return next((int(value[1]) for value in values if value), None)


SYNTHETIC = ("data.path=synthetic", "data.synthetic_images=1920", "data.synthetic_classes=4")
HEALTHY: dict[str, Training] = {
    "image files": Training(1, BATCH),
    "image files, two workers": Training(2, BATCH),
    "two loader threads": Training(1, BATCH, sets=("data.loader_workers=2",)),
    "a larger batch": Training(1, 2 * BATCH),
    "micro-batches": Training(1, BATCH, sets=("optim.accumulate=2",)),
    "digits in memory": Training(
        1,
        BATCH,
        sets=(
            "data.path=digits",
            "data.image_size=8",
            "data.augment=none",
            "student.model=resnet20",
            "teacher.weights={digits_teacher}",
        ),
    ),
    "synthetic images": Training(1, BATCH, sets=SYNTHETIC),
    "synthetic images, two workers": Training(2, BATCH, sets=SYNTHETIC),
    "a wider student": Training(1, BATCH, sets=("student.model=resnet20",)),
    "images as they are": Training(1, BATCH, sets=("data.augment=none",)),
    "epochs with evaluations": Training(1, BATCH, sets=("train.max_steps=null", "optim.epochs=3")),
}
"""Real trainings of unlike kinds with nothing in them that gains 5%."""


def healthy(bench: Bench) -> Iterator[tuple[str, list[str], bool]]:
    """Of each of them all that is found, and whether any of it is a false alarm."""
    for name, training in HEALTHY.items():
        checked = [check(bench, training, one) for one in without_machine(findings(bench.run(training).evidence))]
        yield name, [line for line, _ in checked], any(is_false for _, is_false in checked)


def check(bench: Bench, training: Training, finding: Finding) -> tuple[str, bool]:
    """A finding in a healthy training, in words, and whether it is a false alarm.

    Where the doctor proposes a value that is tried: it has to bring half of what makes a finding. Anything else is the machine's
    own disturbance, and no alarm, unless two more runs both have it.
    """
    line = f"{finding.cause} {finding.gain_pct:.1f}%: {finding.sentence}"
    option = OPTIONS.get(finding.cause, "")
    value = proposed(option, [finding]) if option else None
    if value is None:
        more = [{one.cause for one in findings(bench.run(training).evidence)} for _ in range(2)]
        count = sum(finding.cause in causes for causes in more)
        return f"{line} (in {1 + count} of 3 runs)", count == len(more)
    changed = replace(training, sets=(*training.sets, f"{option}={value}"))
    if finding.cause == "launch-bound":
        changed = replace(training, batch=value // training.num_workers)
    gain = compare(bench, training, [changed])[1][0]
    return f"{line} ({option}={value} brings {gain.pct:.1f} ± {gain.error_points:.1f}%)", gain.pct < MIN_GAIN_PCT / 2
