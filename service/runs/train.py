"""One run: the teacher (trained or loaded), its assistants, then the student; and the session that every run and sweep shares."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from service.cluster import resources as clusters
from service.config.dotted import flatten
from service.config.experiment import Experiment, Resolved
from service.config.method_rules import needs_teacher
from service.report.tables import phase_table, stage_table
from service.runs.display import Display, wait_for
from service.runs.plan import Plan, absolute
from service.runs.run_directory import locked
from service.runs.teacher_actors import serving
from service.runs.trial import Assignment, Outcome, accounted, carry_out
from service.tracking import Tracker, default_uri, sync_neighbours
from trainables.config import TrainConfig
from trainables.errors import TrainingError
from trainables.rundir import RunDir, StageDir, write_json

T = TypeVar("T")
FLUSH_S = 30.0
"""How long the end of a run waits for MLflow; what it did not take by then is sent later."""


@dataclass
class Session:
    """A run or sweep being carried out: where it is written, who watches, who records."""

    resolved: Resolved
    run_dir: RunDir
    display: Display
    tracker: Tracker | None
    result: dict[str, Any]
    """What `result.json` holds; `save` writes it."""
    key: str
    """The MLflow run of this run or sweep, as the tracker knows it."""
    sending: bool = False
    earlier_s: float = 0.0
    """What earlier sessions of this run took."""
    began_s: float = field(default_factory=time.perf_counter)

    @property
    def experiment(self) -> Experiment:
        return self.resolved.experiment

    def save(self, **changes: Any) -> None:
        """Update `result.json`, atomically, with the seconds so far: a session that is killed loses only those since."""
        self.result.update(changes, seconds=self.earlier_s + time.perf_counter() - self.began_s)
        write_json(self.run_dir.result, self.result)

    def wait_for(self, work: Callable[[], T], tick: Callable[[], None] = lambda: None) -> T:
        """See `service.runs.display.wait_for`."""
        return wait_for(work, self.display, tick)


@contextlib.contextmanager
def session(resolved: Resolved, run_dir: RunDir) -> Iterator[Session]:
    """Open the display and the records around a run; however it ends, `result.json` and MLflow say how."""
    with locked(run_dir):
        yield from _session(resolved, run_dir)


def _session(resolved: Resolved, run_dir: RunDir) -> Iterator[Session]:
    result = json.loads(run_dir.result.read_text())
    experiment, kind = resolved.experiment, result["kind"]
    began_s = time.perf_counter()
    tracker = None
    uri = experiment.tracking.uri or default_uri(Path(result["runs_root"]))
    if experiment.tracking.enabled:
        tracker = Tracker(run_dir, uri, experiment.tracking.experiment)
        tracker.start_run(kind, run_dir.root.name, params=flatten(experiment.model_dump(mode="json")), tags=describe(kind))
        tracker.artifact(kind, run_dir.experiment)
    with Display() as display:
        now = Session(resolved, run_dir, display, tracker, result, kind, earlier_s=result.get("seconds", 0.0), began_s=began_s)
        now.save(
            status="running", reason="", mlflow={"uri": uri, "experiment": experiment.tracking.experiment} if tracker else None
        )
        display.say(f"{kind} {experiment.name} in {run_dir.root}")
        try:
            yield now
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt | clusters.RayLostError)
            with contextlib.suppress(OSError):  # a full disk is the usual reason to be here: the error itself matters more
                now.save(status="interrupted" if interrupted else "failed", reason=str(error))
            _close(now, "KILLED" if interrupted else "FAILED", 5.0)
            raise
        now.save(status="complete", finished=datetime.now().isoformat(timespec="seconds"))
        _close(now, "FINISHED", FLUSH_S)


def _close(now: Session, status: Literal["FINISHED", "FAILED", "KILLED"], timeout_s: float) -> None:
    if now.tracker:  # first of all, so that a second Ctrl-C, while the page is made, leaves no run open
        for key, ended in now.tracker.runs().items():
            if ended is None and key != now.key:  # trials that were running when the sweep was interrupted
                now.tracker.end_run(key, status)
        now.tracker.artifact(now.key, now.run_dir.result)
        now.tracker.end_run(now.key, status)
    from service.report.page import leave_page  # imports scipy, which a run that is starting does not need

    leave_page(now.run_dir, now.result, now.display.say)
    if now.tracker is None:
        return
    if now.run_dir.report.exists():
        now.tracker.artifact(now.key, now.run_dir.report)
    start_tracking(now)
    delivery = now.tracker.close(timeout_s)
    now.display.say(delivery.message)
    if status == "FINISHED" and not delivery.num_pending:
        for folder in sync_neighbours(Path(now.result["runs_root"]), now.run_dir):
            now.display.say(f"MLflow was also sent what had waited in {folder}")


def start_tracking(now: Session) -> None:
    """Begin to send to MLflow, once: its import takes a core for seconds, which a run that is starting needs itself."""
    if now.tracker and not now.sending:
        now.sending = True
        now.tracker.start()


def describe(kind: str) -> dict[str, str]:
    """Tags that say what code ran."""
    tags = {"raydistill.kind": kind}
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no git, or none that answers: the tag is left out
        return tags
    if commit.returncode == 0:
        tags["git_commit"] = commit.stdout.strip()
    return tags


def prepare(now: Session, plan: Plan) -> str | None:
    """Where the weights are that the student learns from: the teacher's, or those of the last assistant.

    The teacher is trained unless the experiment names its weights, then each assistant by the one before it. A stage that is
    complete is not carried out again. None: there is no teacher, or no method that asks one.

    Raises:
        TrainingError: a training failed.
    """
    experiment = plan.experiment
    if experiment.teacher is None or not needs_teacher(experiment.distill, experiment.sweep.axes):
        return None
    weights = absolute(experiment.teacher.weights) if experiment.teacher.weights else None
    for name in experiment.preparation:
        if name == "teacher" and weights is not None:
            continue
        work = plan.assign(name, now.run_dir, {"run": now.run_dir.root.name}, weights)
        weights = str(StageDir(Path(run_stage(now, work).output_dir)).best)
    return weights


def run_stage(now: Session, work: Assignment) -> TrainConfig:
    """Carry a stage out, shown and recorded.

    Raises:
        TrainingError: it did not end well; one line.
    """
    stage = StageDir(Path(work.config.output_dir))
    if now.tracker:
        now.tracker.follow(now.key, stage.metrics, f"{work.config.stage}/")
    now.display.follow(work.config.stage, stage)
    began_s = time.time()
    try:
        outcome = now.wait_for(lambda: carry_out(work), tick=lambda: start_tracking(now) if stage.metrics.exists() else None)
    except BaseException:  # the session ends, and is saved: so is what it has done of this stage
        over_sessions(now, work.config.stage, accounted(Outcome("stopped"), stage, began_s))
        raise
    now.display.unfollow(work.config.stage)
    note_stage(now, work, accounted(outcome, stage, began_s))
    if work.config.stage != "student":  # which has plain names, see `record_student`
        record_numbers(now, now.key, stage, outcome.metrics, f"{work.config.stage}/")
    if outcome.status != "ok":
        raise TrainingError(outcome.reason)
    return work.config


def note_stage(now: Session, work: Assignment, outcome: Outcome) -> None:
    """Add a stage's end to `result.json`, in place of an earlier try's."""
    stages = {old["stage"]: old for old in now.result.get("stages", [])}
    before = stages.pop(work.config.stage, None)
    if before and before["status"] == outcome.status == "ok":  # it was complete: its times stand
        return
    stage = StageDir(Path(work.config.output_dir))
    outcome = over_sessions(now, work.config.stage, outcome)
    entry = {
        "stage": work.config.stage, "model": work.config.model, "status": outcome.status, "reason": outcome.reason,
        "restarts": outcome.restarts, "metrics": outcome.metrics, "checkpoint": str(stage.best) if stage.best.exists() else None,
        "seconds": outcome.seconds, "start_s": outcome.start_s, "end_s": outcome.end_s,
    }  # fmt: skip
    now.save(stages=[*stages.values(), entry])


def over_sessions(now: Session, stage: str, outcome: Outcome) -> Outcome:
    """The outcome with the times of this session and of the earlier ones that carried out the stage; for the next `save`."""
    times = now.result.setdefault("stage_times", {})
    before = times.get(stage, {"seconds": 0.0, "start_s": None})
    starts_s = [start_s for start_s in (before["start_s"], outcome.start_s) if start_s is not None]
    times[stage] = {"seconds": before["seconds"] + outcome.seconds, "start_s": sum(starts_s) if starts_s else None}
    return replace(outcome, **times[stage])


def record_numbers(now: Session, key: str, stage: StageDir, metrics: Mapping[str, float], prefix: str = "") -> None:
    """A stage's final numbers in MLflow."""
    if now.tracker and metrics:
        named = {f"{prefix}{name}": value for name, value in metrics.items()}
        now.tracker.metrics(key, int(metrics.get("steps", 0)), named, written_ms(stage.result))


def train(resolved: Resolved, run_dir: RunDir) -> dict[str, Any]:
    """Carry out, or continue, one run: teacher if needed, assistants, then student. Returns what `result.json` holds.

    Raises:
        DistillError: one line; `result.json` says the same.
        KeyboardInterrupt: after everything was put away.
    """
    experiment = resolved.experiment
    with session(resolved, run_dir) as now:
        wanted = Plan.on(experiment, clusters.local_capacity()).need().total_cpus if clusters.is_local() else 0
        with clusters.connect(wanted, run_dir.root, experiment.written_cache("train")) as cluster:
            plan = Plan.on(experiment, cluster)
            plan.check(cluster)
            now.save(use_gpu=plan.use_gpu, num_workers=experiment.scale.num_workers, loader_workers=plan.loader_workers)
            now.display.say(plan.describe(cluster))
            weights = prepare(now, plan)
            with serving(now.run_dir.root.name, now.display, plan, cluster, weights) as teachers:
                student = run_stage(now, plan.assign("student", run_dir, {"run": run_dir.root.name}, weights, teachers))
        record_student(now, now.key, StageDir(Path(student.output_dir)), now.result["stages"][-1]["metrics"])
        now.display.console.print(
            stage_table(now.result), phase_table(now.result["stages"][-1]["metrics"], "a step of the student")
        )
    return now.result


def written_ms(path: Path) -> int | None:
    """When a result was written, in unix ms: what a resumed driver says of it again is then the same record, and counts once."""
    return int(path.stat().st_mtime * 1000) if path.exists() else None


def record_student(now: Session, key: str, stage: StageDir, metrics: dict[str, float]) -> None:
    """The student's final numbers under plain names, and the student itself, in MLflow."""
    record_numbers(now, key, stage, metrics)
    if now.tracker and stage.best.exists() and now.experiment.tracking.log_model:
        now.tracker.model(key, stage.best)
