"""Findings as lines for a terminal."""

from collections import defaultdict
from collections.abc import Sequence

from service.doctor.causes import findings
from service.doctor.evidence import MIN_GAIN_PCT, Evidence
from service.doctor.read_run import Recording
from service.doctor.step_model import Finding
from service.report.phase_shares import shares_text
from trainables.metrics.phases import ALL_PHASES

HEALTHY = f"nothing to gain over {MIN_GAIN_PCT:g}%"


def case_lines(cases: Sequence[Recording]) -> list[str]:
    """Lines on a run, or on a sweep: its best trial, and why the others are slower.

    The first line is the main finding.
    """
    first = cases[0]
    found = findings(first.evidence)
    lines = [f"{number}. {line}" if len(found) > 1 else line for number, line in enumerate(map(finding_line, found), start=1)]
    text = [part for line, finding in zip(lines, found, strict=True) for part in (line, f"   change: {finding.change}")]
    text = text or [healthy(first.evidence)]
    text.append(f"{first.name}: {where_time_goes(first.evidence)}")
    text += remarks(first.evidence)
    return text + (others(first.evidence, cases[1:]) if len(cases) > 1 else [])


def finding_line(finding: Finding) -> str:
    """Cause, gain and sentence."""
    if finding.after is not None:
        return f"then {finding.cause}, both together {finding.gain_pct:.0f}% to gain: {finding.sentence}"
    if len(finding.causes) > 1:
        return (
            f"{finding.cause}, {finding.gain_pct:.0f}% to gain by both together, by one alone next to nothing: {finding.sentence}"
        )
    return f"{finding.cause}, {finding.gain_pct:.0f}% to gain: {finding.sentence}"


def healthy(e: Evidence) -> str:
    """The main line where no rule finds 5%."""
    share = 100 * e.compute_ms / e.typical.step_ms if e.typical.step_ms else 0.0
    return f"{HEALTHY}: compute-bound, the models' own work is {share:.0f}% of a step"


def where_time_goes(e: Evidence) -> str:
    """A step by its phases, the longest first."""
    parts = shares_text({f"phase/{name}": ms for name, ms in vars(e.typical).items()})
    waits = f", of the backward {e.exposed_ms:.1f} ms waiting for the all-reduce" if e.exposed_ms else ""
    return f"a step of {e.typical.step_ms:.1f} ms is {parts}{waits}"


def remarks(e: Evidence) -> list[str]:
    """What may be worth a try, or a thought, and whose gain is not recorded."""
    step, lines = e.typical, list[str]()
    if e.gpus and e.precision == "fp32":
        lines.append("not tried here: --set precision=bf16")
    if step.teacher_ms > 0.05 * step.step_ms and e.teacher_actors is None:
        share = 100 * step.teacher_ms / step.step_ms
        lines.append(f"the teacher costs {share:.0f}% of a step: with teacher.cache its outputs are computed once")
    if e.clock.wall_s > 0:
        parts = {
            "steps": e.clock.train_s,
            "evaluation": e.clock.eval_s,
            "checkpoints": e.clock.checkpoint_s,
            "the rest": e.clock.other_s + e.clock.timing_s,
        }
        shares = ", ".join(f"{name} {100 * part_s / e.clock.wall_s:.0f}%" for name, part_s in parts.items())
        lines.append(f"of {e.clock.wall_s:.1f} s by the clock: {shares}")
    elif e.eval_s and e.steps_per_epoch:
        share = 100 * e.eval_s / (e.eval_s + e.steps_per_epoch * step.step_ms / 1e3)
        if share > MIN_GAIN_PCT:
            lines.append(f"evaluations take {share:.0f}% of the time")
    waits_ms = {number: rank.waits_for_ranks_ms for number, rank in enumerate(e.ranks) if rank.waits_for_ranks_ms is not None}
    if waits_ms and max(waits_ms.values()) - min(waits_ms.values()) > MIN_GAIN_PCT / 100 * step.step_ms:
        late, early = (pick(waits_ms, key=waits_ms.__getitem__) for pick in (min, max))
        lines.append(
            f"ranks wait for each other: rank {early} longest, {waits_ms[early]:.1f} ms of a step (it is early), "
            f"rank {late} least, {waits_ms[late]:.1f} ms (others wait for it)"
        )
    if e.swaps:
        lines.append(f"a node reads {e.swap_mib_per_s:.0f} MiB/s back from swap space: its memory is full")
    if e.peak_memory_mib and e.gpu_memory_mib and e.peak_memory_mib < 0.5 * e.gpu_memory_mib:
        lines.append(f"{e.peak_memory_mib:,.0f} of {e.gpu_memory_mib:,.0f} MiB of a GPU's memory are used")
    return lines


def others(best: Evidence, cases: Sequence[Recording]) -> list[str]:
    """Why a sweep's other trials are slower than its best: a line for each part of a step that takes most of their extra time."""
    slower: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for case in cases:
        extra_pct, part = slower_by(best, case.evidence)
        slower[part].append((extra_pct, case.name))
    lines = []
    for part, trials in sorted(slower.items(), key=lambda item: -len(item[1])):
        most_pct, worst = max(trials)
        count = f"{len(trials)} other trial{'s' if len(trials) > 1 else ''}"
        lines.append(
            f"{count}, most of the difference in {part}: up to {most_pct:.0f}% more time an image ({worst})"
            if most_pct >= 0.5
            else f"{count} with a typical step no slower than the best one's ({worst})"
        )
    return lines


def slower_by(best: Evidence, other: Evidence) -> tuple[float, str]:
    """By how many percent more time an image takes than in the best trial, and the part of a step where most of that is."""

    def an_image(e: Evidence) -> dict[str, float]:
        step, waits_ms = e.typical, e.exposed_ms or 0.0
        parts = {phase: getattr(step, f"{phase}_ms") for phase in ALL_PHASES} | {"the all-reduce": waits_ms}
        parts["backward"] -= waits_ms
        return {part: ms / e.global_batch for part, ms in parts.items()}

    ours, theirs = an_image(best), an_image(other)
    ratio = (other.typical.step_ms / other.global_batch) / (best.typical.step_ms / best.global_batch)
    return 100 * (ratio - 1), max(theirs, key=lambda part: theirs[part] - ours[part])
