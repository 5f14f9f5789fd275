"""What a run loses its time to: one function a cause, from evidence to that cause with its effect, or none.

Gains follow the model of a step of `service/search/step_time.py`: step = max(supply, work), see `step_model.after_ms`. In
the rules' words T is the step, T' the step predicted, and the gain 100 · (1 - T'/T) percent.
"""

from itertools import combinations

from service.doctor import clocks, compute, growth, input_path, outside_steps, ranks, teacher_service
from service.doctor.evidence import LEAST_PCT, Evidence
from service.doctor.step_model import Cause, Finding, predicted_pct

RULES = (
    input_path.no_prefetch,
    input_path.storage_bound,
    input_path.decode_bound,
    input_path.gil_bound,
    input_path.swapping,
    input_path.late_batches,
    input_path.data_bound,
    input_path.copy_bound,
    ranks.straggler,
    ranks.uneven_ranks,
    ranks.all_reduce_bound,
    ranks.pipeline_bubble,
    ranks.uneven_pipeline_stages,
    compute.busy_cores,
    compute.launch_bound,
    compute.teacher_bound,
    teacher_service.service_bound,
    clocks.thermal_throttling,
    growth.slowdown,
    outside_steps.evaluation,
    outside_steps.checkpoints,
    outside_steps.between_epochs,
)


def findings(e: Evidence) -> list[Finding]:
    """All that is predicted to gain 5% or more, the most first, and after each what gains only together with it.

    A cause that the model of a step expects nothing of alone, since the step waits for another one anyway, is not named for
    itself: it comes after that one, with the gain of both. Where neither of two gains alone they are one finding.
    """
    e = growth.as_it_is_now(e)
    causes = [cause for rule in RULES if (cause := rule(e)) is not None]
    alone = {cause.name: predicted_pct(e, cause) for cause in causes}
    singles = sorted((cause for cause in causes if alone[cause.name] >= LEAST_PCT), key=lambda cause: -alone[cause.name])
    groups = {cause.name: [Finding((cause,), alone[cause.name])] for cause in singles}
    for gain, first, second in _pairs(e, causes, alone):
        if second.name in groups and alone[second.name] > alone[first.name]:
            first, second = second, first
        if first.name not in groups:
            both = Finding((first, second), gain)
            groups[both.cause] = [both]
        elif second.name not in groups:
            groups[first.name].append(Finding((second,), gain, after=first.name))
    return [finding for group in sorted(groups.values(), key=lambda group: -group[0].gain_pct) for finding in group]


def _pairs(e: Evidence, causes: list[Cause], alone: dict[str, float]) -> list[tuple[float, Cause, Cause]]:
    """Pairs that gain 5 points more than their members alone, the most first; a cause is in one of them at most."""
    gains = [(predicted_pct(e, *pair), *pair) for pair in combinations(causes, 2)]
    more = [one for one in gains if one[0] - alone[one[1].name] - alone[one[2].name] >= LEAST_PCT]
    found, used = list[tuple[float, Cause, Cause]](), set[str]()
    for one in sorted(more, key=lambda one: -one[0]):
        if not used & {one[1].name, one[2].name}:
            found.append(one)
            used |= {one[1].name, one[2].name}
    return found
