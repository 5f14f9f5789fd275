"""The trials of a sweep: every point of its space, those that cannot run, and the trainings that follow some; resumable."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from service.cluster.resources import Cluster
from service.config.dotted import flatten
from service.config.experiment import Resolved, read_resolved
from service.config.space import SpaceError, points
from service.report.run_records import SCALE
from service.runs.plan import Plan
from service.runs.trial import Outcome
from trainables.errors import ExperimentError
from trainables.rundir import RunDir

PROBE_LOG_STEPS = 4


@dataclass
class Trial:
    """One point of the sweep. `outcome` is None until it has ended."""

    id: str
    params: dict[str, Any]
    resolved: Resolved | None
    outcome: Outcome | None = None
    oversubscribed: bool = False
    loader_workers: int | str = "auto"
    probe: str | None = None
    """Of a training to the target: the trial that had measured the point's speed."""

    def row(self, base: Resolved, timing: bool) -> dict[str, Any]:
        """The trial in `result.json`."""
        values = flatten(base.experiment.model_dump(mode="json")) | self.params | {"data.loader_workers": self.loader_workers}
        outcome = self.outcome or Outcome("stopped", "not finished")
        return {
            "id": self.id, "params": self.params, "kind": "timing" if timing and not self.probe else "accuracy",
            "status": outcome.status if self.outcome else "pending", "reason": outcome.reason if self.outcome else "",
            "oversubscribed": self.oversubscribed, "restarts": outcome.restarts, "scale": {key: values[key] for key in SCALE},
            "metrics": outcome.metrics, "steps_s": outcome.steps_s, "seconds": outcome.seconds, "start_s": outcome.start_s,
            "end_s": outcome.end_s, "ended_s": outcome.ended_s,
            **({"measurements": outcome.measurements} if outcome.measurements else {}),
            **({"probe": self.probe} if self.probe else {}),
        }  # fmt: skip

    @property
    def num_measurements(self) -> int:
        """How often the point was measured."""
        return 0 if self.outcome is None else len(self.outcome.measurements) or 1

    def judged(self, outcome: Outcome) -> Outcome:
        """A training that ended without the accuracy that it was to reach is no complete one."""
        target = self.resolved.experiment.train.until_top1_pct if self.resolved else None
        if target is None or outcome.status != "ok" or "time_to_accuracy_s" in outcome.metrics:
            return outcome
        m = outcome.metrics
        return replace(
            outcome, status="stopped", reason=f"top-1 {m['top1_pct']:.2f}% after {m['train_s']:.1f} s, not {target:g}%"
        )


def plan_trials(resolved: Resolved) -> list[Trial]:
    """Every point of the space, those that are wrong in themselves already `infeasible`.

    Raises:
        ExperimentError: nothing to search.
    """
    sweep = resolved.experiment.sweep
    try:
        found = list(sweep.points) or points(sweep.space, sweep.policy, sweep.num_samples, resolved.experiment.seed)
    except SpaceError as error:
        raise ExperimentError(f"sweep.space: {error}") from error
    timing: dict[str, Any] = {"train.max_steps": sweep.timing_steps} if sweep.timing_steps is not None else {}
    if sweep.target_pct is not None and not sweep.races:
        timing["train.until_top1_pct"] = sweep.target_pct
    if sweep.policy == "guided":  # a probe may end where it is logged
        timing["train.log_every"] = min(PROBE_LOG_STEPS, resolved.experiment.train.log_every)
    width = max(3, len(str(len(found) - 1)))
    trials = []
    for number, point in enumerate(found):
        trial = Trial(
            f"{number:0{width}d}",
            point,
            None,
            loader_workers=point.get("data.loader_workers", resolved.experiment.data.loader_workers),
        )
        try:
            trial.resolved = resolved.override({**point, **timing}, "trial")
        except ExperimentError as error:
            trial.outcome = Outcome("infeasible", str(error).splitlines()[0].removeprefix("trial: "))
        trials.append(trial)
    return trials


def refuse(trials: list[Trial], cluster: Cluster) -> None:
    """Mark as `infeasible` what the cluster can never hold, as `oversubscribed` what has fewer real cores than it reserves."""
    for trial in trials:
        if trial.resolved is None:
            continue
        plan = Plan.on(trial.resolved.experiment, cluster)
        trial.loader_workers = plan.loader_workers
        trial.oversubscribed = cluster.oversubscribed(plan.need())
        if trial.outcome is None and (refusal := plan.refusal(cluster)):
            trial.outcome = Outcome("infeasible", refusal)


def recall(trials: list[Trial], run_dir: RunDir) -> None:
    """Take up the outcomes that an earlier, interrupted sweep has left."""
    for trial in trials:
        path = run_dir.trial(trial.id).result
        if path.exists():
            trial.outcome = trial.judged(Outcome(**json.loads(path.read_text())))


def training_of(base: Resolved, probe: Trial, until_s: float | None) -> Trial:
    """The training to the target of a point whose speed is known."""
    goal = {"train.until_top1_pct": base.experiment.sweep.target_pct, "train.until_s": until_s}
    return following(probe, base.override({**probe.params, "data.loader_workers": probe.loader_workers, **goal}, "trial"))


def following(probe: Trial, resolved: Resolved) -> Trial:
    """The training of a probe's point, as `resolved` has it."""
    workers = resolved.experiment.data.loader_workers
    return Trial(trained_id(probe), probe.params, resolved, None, probe.oversubscribed, workers, probe.id)


def trained_id(probe: Trial) -> str:
    return f"{probe.id}-trained"


def finished_trainings(probes: list[Trial], run_dir: RunDir) -> list[Trial]:
    """The trainings to the target that an earlier, interrupted sweep has finished."""
    places = {probe.id: run_dir.trial(trained_id(probe)) for probe in probes}
    done = [probe for probe in probes if places[probe.id].result.exists()]
    found = [following(probe, read_resolved(places[probe.id].experiment)) for probe in done]
    recall(found, run_dir)
    return found
