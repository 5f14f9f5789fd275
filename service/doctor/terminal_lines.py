"""Formats findings as lines for a terminal."""

from collections import defaultdict
from collections.abc import Sequence

from service.doctor.causes import findings
from service.doctor.evidence import MIN_GAIN_PCT, Evidence
from service.doctor.read_run import Recording
from service.doctor.step_model import Finding
from service.report.labels import counted, shares_text
from trainables.metrics.phases import ALL_PHASES

HEALTHY = f"nothing to gain over {MIN_GAIN_PCT:g}%"


def case_lines(cases: Sequence[Recording]) -> list[str]:
    """Return lines about a run, or about a sweep's best trial and why others are slower. The main finding comes first."""
    e, text = cases[0].evidence, list[str]()
    found = findings(e)
    for number, finding in enumerate(found, start=1):
        prefix = f"{number}. " if len(found) > 1 else ""
        text += [f"{prefix}{finding_line(finding)}", f"   change: {finding.change}"]
    if not found:
        share_pct = 100 * e.compute_ms / e.step_ms if e.step_ms else 0.0
        text = [f"{HEALTHY}: compute-bound, the models' own work is {share_pct:.0f}% of a step"]
    return [*text, f"{cases[0].name}: {where_time_goes(e)}", *remarks(e), *others(e, cases[1:])]


def finding_line(finding: Finding) -> str:
    """Format a finding: cause, gain and sentence."""
    gain = f"{finding.gain_pct:.0f}% to gain"
    if finding.after is not None:
        return f"then {finding.cause}, both together {gain}: {finding.sentence}"
    together = " by both together, by one alone next to nothing" if len(finding.causes) > 1 else ""
    return f"{finding.cause}, {gain}{together}: {finding.sentence}"


def where_time_goes(e: Evidence) -> str:
    """Describe a step by its phases, longest first."""
    parts = shares_text({f"phase/{name}": ms for name, ms in vars(e.typical).items()})
    waits = f", of the backward {e.exposed_ms:.1f} ms waiting for the all-reduce" if e.exposed_ms else ""
    return f"a step of {e.step_ms:.1f} ms is {parts}{waits}"


def remarks(e: Evidence) -> list[str]:
    """Return remarks about things whose gain the records do not show."""
    clock, lines = e.clock, list[str]()
    if e.gpus and e.precision == "fp32":
        lines.append("not tried here: --set precision=bf16")
    if (teacher_pct := 100 * e.typical.teacher_ms / e.step_ms) > MIN_GAIN_PCT and e.teacher_actors is None:
        lines.append(f"the teacher costs {teacher_pct:.0f}% of a step: with teacher.cache its outputs are computed once")
    if clock.wall_s > 0:
        parts = {"steps": clock.train_s, "evaluation": clock.eval_s, "checkpoints": clock.checkpoint_s}
        parts["the rest"] = clock.other_s + clock.timing_s
        shares = ", ".join(f"{name} {100 * part_s / clock.wall_s:.0f}%" for name, part_s in parts.items())
        lines.append(f"of {clock.wall_s:.1f} s by the clock: {shares}")
    if e.swaps:
        lines.append(f"a node reads {e.swap_mib_per_s:.0f} MiB/s from swap space: its memory is full")
    if e.peak_memory_mib and e.gpu_memory_mib and e.peak_memory_mib < 0.5 * e.gpu_memory_mib:
        lines.append(f"{e.peak_memory_mib:,.0f} of {e.gpu_memory_mib:,.0f} MiB of a GPU's memory are used")
    return lines


def others(best: Evidence, cases: Sequence[Recording]) -> list[str]:
    """Explain why a sweep's other trials are slower than its best: a line per part of a step that takes most extra time."""
    slower: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for case in cases:
        best_ms, case_ms = per_image_ms(best), per_image_ms(case.evidence)
        extra_pct = 100 * (case_ms.pop("step") / best_ms["step"] - 1)
        slower[max(case_ms, key=lambda part: case_ms[part] - best_ms[part])].append((extra_pct, case.name))
    lines = []
    for part, trials in sorted(slower.items(), key=lambda item: -len(item[1])):
        extra_pct, worst = max(trials)
        more = f", most of the difference in {part}: up to {extra_pct:.0f}% more time per image ({worst})"
        even = f" with a typical step no slower than the best one's ({worst})"
        lines.append(counted(len(trials), "other trial") + (more if extra_pct >= 0.5 else even))
    return lines


def per_image_ms(e: Evidence) -> dict[str, float]:
    """Return the milliseconds per image of a typical step and its parts."""
    parts = {part: getattr(e.typical, f"{part}_ms") for part in (*ALL_PHASES, "step")} | {"the all-reduce": e.exposed_ms}
    parts["backward"] -= e.exposed_ms
    return {part: ms / e.global_batch for part, ms in parts.items()}
