"""One trial = one `TorchTrainer.fit`, begun again after a death, with an outcome that never is a stack trace."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from service.cluster.resources import Need, observe
from service.config.method_rules import needs_teacher
from trainables.config import TrainConfig
from trainables.errors import DistillError
from trainables.failures import RESTARTED, Failure, WorkersFailedError, first_cause, read_failure
from trainables.rundir import RunDir, StageDir, read_lines, write_json

if TYPE_CHECKING:
    from trainables.worker.entry_points import Visit

Status = Literal["ok", "oom", "failed", "infeasible", "stopped"]


@dataclass(frozen=True)
class Outcome:
    """How a stage ended. `metrics` is its summary where it is complete."""

    status: Status
    reason: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    restarts: int = 0
    steps_s: list[float] = field(default_factory=list)
    """Seconds of each measured step of a timing run."""
    seconds: float = 0.0
    """Wall time that it took, its workers' start included where it had one of its own."""
    start_s: float | None = None
    """That start; 0 where it shared another's, None where it is not known."""
    end_s: float | None = None
    """From the loop's last record to the outcome; None where it is not known."""
    ended_s: float = 0.0
    """Unix time."""
    measurements: list[dict[str, Any]] = field(default_factory=list)
    """Of a point that was measured several times: the outcome of each, in order; see `service.runs.measurements`."""


@dataclass(frozen=True)
class Assignment:
    """A stage and what it runs on."""

    config: TrainConfig
    use_gpu: bool
    loader_workers: int
    storage: Path
    """Ray's own files; ours are under `config.output_dir`."""


def carry_out(work: Assignment, callbacks: list[Any] | None = None, visit: Visit | None = None) -> Outcome:
    """Train a stage to its end, from its last checkpoint where there is one.

    With `visit` the same workers go on to what its guide has next; the outcome is that of the stage which they were at.

    A worker or node that dies is no reason to stop: the stage is begun again up to `scale.max_failures` times. What the
    training itself refuses (a loss that is not finite, unreadable data), an error in a model's code and memory that runs out
    come back the same way every time, and end it at once. Workers that others' jobs leave no room for wait; those that the
    cluster could no longer hold even if it were empty do not.
    """
    import ray

    from trainables.worker import entry_points as worker

    restarts = 0
    while True:
        stage, limit = StageDir(Path(work.config.output_dir)), work.config.scale.max_failures
        if done := finished(stage, restarts):
            return done
        stage.root.mkdir(parents=True, exist_ok=True)
        stage.error.unlink(missing_ok=True)
        for leftover in stage.last.parent.glob(".*.tmp"):  # of a checkpoint that a kill cut short
            leftover.unlink(missing_ok=True)
        name = f"{work.config.labels.get('trial', work.config.stage)}-{time.time_ns():x}"
        try:
            worker.fit(
                work.config,
                use_gpu=work.use_gpu,
                loader_workers=work.loader_workers,
                storage=work.storage,
                name=name,
                callbacks=callbacks,
                visit=visit,
            )
        except worker.NoRoomError:
            if refusal := wait_for_room(work):
                return Outcome("failed", refusal, restarts=restarts)
            tell(stage, "the cluster has no room for the workers yet: still waiting")
        except DistillError as error:
            return Outcome("failed", str(error), restarts=restarts)
        except WorkersFailedError as error:
            if not ray.is_initialized():  # the driver is ending: nobody waits for this trial any more
                raise
            if visit is not None:
                there = ray.get(visit.guide.current.remote(visit.name))
                if there is None:  # its last point was measured; the workers died on their way out
                    return Outcome("failed", "the workers died when they had nothing left to do")
                if there != work:
                    work, stage, restarts = there, StageDir(Path(there.config.output_dir)), 0
            cause = cause_of(stage, error)
            outcome = Outcome("oom" if cause.kind == "out_of_memory" else "failed", str(cause), restarts=restarts)
            if cause.kind not in RESTARTED or restarts == limit:
                return outcome
            if refusal := wait_for_room(work):
                return Outcome("failed", f"{outcome.reason}; and now {refusal}", restarts=restarts)
            restarts += 1
            tell(stage, f"{outcome.reason}: going on from the last checkpoint (restart {restarts} of at most {limit})")
        else:
            return finished(stage, restarts) or Outcome("failed", "the stage ended without a result", restarts=restarts)


def tell(stage: StageDir, line: str) -> None:
    """A line in the stage's log, where whoever watches sees it."""
    stage.log.parent.mkdir(parents=True, exist_ok=True)
    with open(stage.log, "a") as file:
        file.write(f"{datetime.now():%H:%M:%S} {line}\n")


def finished(stage: StageDir, restarts: int = 0) -> Outcome | None:
    """The outcome of a complete stage, or None."""
    if not stage.result.exists():
        return None
    return complete(json.loads(stage.result.read_text()), restarts)


def complete(result: dict[str, Any], restarts: int = 0) -> Outcome:
    """The outcome of a stage, from what its `stage.json` holds."""
    return Outcome("ok", metrics=result["metrics"], restarts=restarts, steps_s=result.get("steps_s", []))


def accounted(outcome: Outcome, stage: StageDir, began_s: float, shares_start: bool = False) -> Outcome:
    """The outcome with the time it took since `began_s` (unix), and how much of that was its workers' start and end."""
    now_s = time.time()
    lines = [(line["kind"], line["time_ms"] / 1e3) for line in read_lines(stage.metrics) if line["time_ms"] / 1e3 >= began_s]
    own_s = next((at_s - began_s for kind, at_s in lines if kind in ("start", "resume")), None)
    end_s = next((now_s - at_s for kind, at_s in reversed(lines) if kind == "summary"), None)
    start_s = 0.0 if shares_start else own_s
    return replace(outcome, seconds=now_s - began_s, start_s=start_s, end_s=end_s, ended_s=now_s)


def cause_of(stage: StageDir, error: WorkersFailedError) -> Failure:
    """What a worker wrote down. Where that is the loss of another, or where none could write: the first cause that Ray knows."""
    noted = read_failure(stage.error)
    if noted is not None and noted.kind != "lost_peer":
        return noted
    return first_cause([*error.failures, *([noted] if noted is not None else [])])


def need(config: TrainConfig, loader_workers: int, use_gpu: bool) -> Need:
    """What a stage reserves, and beside it the actors that answer for its teacher."""
    asked = config.distill is not None and needs_teacher(config.distill, ())
    count = config.teacher.service if config.teacher is not None and asked else None
    actors = Need(count, config.scale.cpus_per_worker, int(use_gpu)) if count is not None else None
    return Need(config.scale.num_workers, config.scale.cpus_per_worker + loader_workers, int(use_gpu), actors)


def wait_for_room(work: Assignment, patience_s: float = 120.0) -> str | None:
    """After a node's death: wait until the cluster could hold the job again, since a new node may be on its way.

    Returns why it still cannot, or None: a trainer that asks for more than there is would wait for ever, silently.
    """
    wanted = need(work.config, work.loader_workers, work.use_gpu)
    until = time.monotonic() + patience_s
    while (refusal := observe().refusal(wanted)) and time.monotonic() < until:
        time.sleep(2)
    return refusal


def run_trial(settings: dict[str, Any], assignments: dict[str, Assignment], sweep_dir: str) -> None:
    """The function that Ray Tune calls: carry out one trial, leave its `result.json`, and report to Tune.

    A trial that is already complete is not run again.
    """
    from ray import tune
    from ray.tune.integration.ray_train import TuneReportCallback

    trial_id = settings["trial"]
    run_dir = RunDir(Path(sweep_dir)).trial(trial_id)
    if not run_dir.result.exists():
        began_s, work = time.time(), assignments[trial_id]
        outcome = carry_out(work, [TuneReportCallback()])
        write_json(run_dir.result, asdict(accounted(outcome, StageDir(Path(work.config.output_dir)), began_s)))
    outcome_metrics = json.loads(run_dir.result.read_text())["metrics"]
    tune.report({"done": True, **outcome_metrics})


def run_visit(settings: dict[str, Any], guide: Any) -> None:
    """The function that Ray Tune calls in a guided sweep: one start of workers, as many points as the guide has for them.

    `guide` is the actor that holds the sweep's `service.search.visits.Visits`, which also writes the points' results.
    """
    import ray
    from ray import tune

    from trainables.worker.entry_points import Visit

    visit = Visit(guide, settings["visit"])
    outcome = carry_out(ray.get(guide.enter.remote(visit.name)), visit=visit)
    ray.get(guide.leave.remote(visit.name, outcome))
    tune.report({"done": True})
