"""What MLflow shows of a run, computed from the run's log, `experiment.yaml` and the files that they name."""

import functools
import hashlib
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.config import strict_yaml
from service.config.dotted import flatten
from service.config.experiment import read_resolved
from service.config.schema import Experiment
from service.config.space import LOADER_WORKERS, short_names
from service.config.sweep import FRONT
from service.runs.event_log import check_version
from service.runs.events import Event, parsed
from service.runs.result import Kind
from service.runs.run_log import ResultFold, checkpoint_names
from service.runs.stored.stored_runs import local_checkpoint
from service.tracking.run_view import DESCRIPTION, Item, RunView, Status
from service.tracking.shown_metrics import of_epoch, of_summary
from service.tracking.views import saved_views
from trainables.config import DataIdentity
from trainables.rundir import Line, RunDir

log = logging.getLogger("raydistill")

_NOT_SHOWN = tuple(f'{{"kind": "{kind}"'.encode() for kind in ("step", "start", "resume", "attempt", "restart"))
WINNER = "raydistill.winner"
"""Tag of a sweep's best trial."""
_STATUS: dict[str, Status] = {"complete": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MlflowView:
    """The MLflow runs of one log: a run, and for a sweep a child run per trial. Implements `LogView`."""

    def __init__(self, run_dir: RunDir) -> None:
        self.runs: dict[str, RunView] = {}
        self._run_dir, self._fold, self._end = run_dir, ResultFold(), 0
        self._best_checkpoints: dict[str, str] = {}
        """File name of the newest one, by stage."""

    def take(self, line: Line) -> None:
        """See `LogView`. An event that makes no sense is logged and skipped.

        Raises ExperimentError: `experiment.yaml` is damaged, or the log has another version.
        """
        path = self._run_dir.events
        if not self._end:
            check_version(path, line.raw)
        self._end = line.end
        if line.raw.startswith(_NOT_SHOWN) or (event := parsed(line, path)) is None:
            return
        try:
            self._take(event)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            log.warning("tracking: %s: skipped the event that ends at byte %d: %r", path, line.end, error)

    @functools.cached_property
    def _experiment(self) -> Experiment:
        return read_resolved(self._run_dir.experiment, reading=True).experiment

    def _take(self, event: Event) -> None:
        self._fold.take(event)
        match event["kind"]:
            case "session_begun":
                self._begin_session(event)
            case "session_ended":
                self._end_session(event)
            case "result" if (run := self.runs.get(self._fold.fields["kind"])) is not None:
                if "data" in event["changes"]:
                    self._add_dataset(run)
                for row in event["changes"].get("trials") or ():
                    if row["status"] not in ("pending", "untested") and f"trial/{row['id']}" not in self.runs:
                        self._end_trial(row["id"], event)  # it cannot run, so no `trial_ended` follows
            case "stage_begun" if "trial" in event:
                self._run_of(event).status = "RUNNING"
            case "epoch":
                self._add_metrics(self._run_of(event), event, of_epoch(event["metrics"], _prefix(event["stage"])), event["step"])
            case "summary" if "/" not in event["stage"]:  # a trial's metrics combine its measurements
                shown = of_summary(event["metrics"], _prefix(event["stage"]), followed=True)
                self._add_metrics(self._run_of(event), event, shown, int(event["metrics"].get("steps", 0)))
            case "checkpoint" if best := checkpoint_names([event]).get("best"):
                self._best_checkpoints[event["stage"]] = best
            case "hang":
                self._run_of(event).tags["hang"] = event["message"]
            case "stage_ended" if event["stage"] == "student" and event["outcome"]["status"] == "ok":
                self._add_model("student")
            case "trial_ended":
                self._end_trial(event["trial"], event)

    def _begin_session(self, event: Event) -> None:
        kind = self._fold.fields["kind"]
        if (run := self.runs.get(kind)) is None:
            tree = self._experiment.model_dump(mode="json")
            run = self.runs[kind] = RunView(
                kind, self._run_dir.root.name, None, event["time_ms"], functools.partial(_as_params, tree)
            )
            self._add(run, "views", views_of(kind, self._experiment))
            self._add(run, "artifact", self._run_dir.experiment)
            self._add_dataset(run)
        run.tags |= {"raydistill.kind": kind, **event.get("tags", {})}
        if commit := run.tags.get("raydistill.commit"):
            run.tags["mlflow.source.git.commit"] = commit  # where MLflow's pages expect it
        run.status = "RUNNING"

    def _end_session(self, event: Event) -> None:
        run, status = self.runs[self._fold.fields["kind"]], _STATUS[event["status"]]
        for each in self.runs.values():
            if each.status == "RUNNING":  # the run, and trials that were interrupted
                each.status, each.ended_ms = status, event["time_ms"]
        if verdict := "\n\n".join(self._fold.fields.get("verdict", ())):
            run.tags[DESCRIPTION] = verdict
        if status == "FINISHED" and run.key == "sweep":
            self._mark_winner(run, verdict, event)
        self._add(run, "artifact", self._run_dir.result)
        self._add(run, "artifact", self._run_dir.report)

    def _mark_winner(self, sweep: RunView, verdict: str, ended: Event) -> None:
        """Tag and describe the best trial, untag the one of an earlier session, and copy the winner's metrics to the sweep."""
        best = self._fold.result(self._run_dir.events).best
        for each in self.runs.values():
            is_best = best is not None and each.key == f"trial/{best.id}"
            if is_best or WINNER in each.tags:
                each.tags |= {WINNER: str(is_best).lower(), DESCRIPTION: verdict if is_best else ""}
        if best is not None:
            # Always at step 0: MLflow shows the value of the highest step, and a later session's winner may have fewer steps.
            self._add_metrics(sweep, ended, of_summary(best.metrics, followed=False), 0)
            self._add_model(f"trials/{best.id}/student")

    def _run_of(self, event: Event) -> RunView:
        """Return the run that a stage's event belongs to. A trial's is created if needed."""
        parts = Path(event["stage"]).parts
        return self._trial_run(parts[1], event) if parts[0] == "trials" else self.runs[self._fold.fields["kind"]]

    def _trial_run(self, trial: str, event: Event) -> RunView:
        if (run := self.runs.get(f"trial/{trial}")) is None:
            row = self._fold.rows.get(trial, {"params": {}})
            names = short_names(row["params"])
            name = " ".join([trial, *(f"{names[key]}={value}" for key, value in row["params"].items())])
            params = functools.partial(self._trial_params, trial)
            run = self.runs[f"trial/{trial}"] = RunView(
                f"trial/{trial}", name, self._fold.fields["kind"], event["time_ms"], params
            )
            run.tags["raydistill.kind"] = "trial"
            if row.get("kind") == "accuracy" and event["kind"] == "stage_begun":
                # MLflow's page for comparing runs opens with the metric that was logged first.
                self._add_metrics(run, event, {self._experiment.sweep.figure: math.nan}, 0)
            self._add_dataset(run)
            if (experiment := self._run_dir.trial(trial).experiment).exists():
                self._add(run, "artifact", experiment)
        return run

    def _trial_params(self, trial: str) -> dict[str, str]:
        """Return a trial's parameters. An invalid point has no experiment, so only the values of the point."""
        row, path = self._fold.rows.get(trial, {}), self._run_dir.trial(trial).experiment
        tree = strict_yaml.parse(path.read_text(), str(path)) if path.exists() else {}
        workers = {key: value for key, value in row.get("scale", {}).items() if key == LOADER_WORKERS}
        return _as_params(tree | row.get("params", {}) | workers)

    def _end_trial(self, trial: str, event: Event) -> None:
        run, row = self._trial_run(trial, event), self._fold.rows[trial]
        run.status, run.ended_ms = "FINISHED" if row["status"] in ("ok", "stopped") else "FAILED", event["time_ms"]
        run.tags |= {"status": row["status"], "reason": row.get("reason", ""), "trial_kind": row.get("kind", "")}
        run.tags["oversubscribed"] = str(row.get("oversubscribed", False))
        run.tags["measurements"] = str(len(row.get("measurements", ())) or 1)
        has_epochs, metrics = row.get("kind") == "accuracy", row.get("metrics", {})  # a timing trial has no epochs
        shown = of_summary(metrics, followed=has_epochs, first=self._experiment.sweep.figure)
        self._add_metrics(run, event, shown, int(metrics.get("steps", 0)))

    def _add_dataset(self, run: RunView) -> None:
        """Add the run's training data for MLflow's dataset column, unless a sweep searches over `data.path`."""
        if (fields := self._fold.fields.get("data")) is None:
            return
        data, path = DataIdentity.model_validate_json(json.dumps(fields)), self._experiment.data.path
        counts = {"classes": len(data.classes), "train_images": data.train.num_images, "val_images": data.val.num_images}
        dataset = {
            "name": Path(path).name or path,
            "digest": hashlib.sha256(data.model_dump_json().encode()).hexdigest()[:16],
            "source_type": path.partition("://")[0] if "://" in path else "local",
            "source": json.dumps({"uri": path}),
            "profile": json.dumps(counts),
        }
        self._add(run, "dataset", dataset)

    def _add_model(self, stage: str) -> None:
        """Add the best weights of a stage as the run's model."""
        tracking = self._experiment.tracking
        if stage in self._best_checkpoints and tracking.log_model:
            best = self._run_dir.stage(stage).best.with_name(self._best_checkpoints[stage])
            self._add(
                self.runs[self._fold.fields["kind"]],
                "model",
                (functools.partial(local_checkpoint, best), tracking.register_model),
            )

    def _add_metrics(self, run: RunView, event: Event, shown: Mapping[str, float], step: int) -> None:
        for name, value in shown.items():
            self._add(run, "metrics", (name, float(value), event["time_ms"], step))

    def _add(self, run: RunView, kind: Any, value: Any) -> None:
        run.items.append(Item(self._end, kind, value))


def views_of(kind: Kind, experiment: Experiment) -> dict[str, str]:
    """Return MLflow's saved views that compare a sweep's trials, or a run with others of its MLflow experiment."""
    if kind == "train":
        has_accuracy = experiment.train.max_steps is None
        return saved_views(kind, {}, "top1_pct" if has_accuracy else "images_per_s", ascending=False, has_accuracy=has_accuracy)
    sweep = experiment.sweep
    has_accuracy = sweep.timing_steps is None or sweep.is_time_to_accuracy
    first, ascending = ("images_per_s", False) if sweep.metric == FRONT else (sweep.figure, sweep.mode == "min")
    return saved_views("trial", short_names(sweep.axes), first, ascending=ascending, has_accuracy=has_accuracy)


def _as_params(tree: Mapping[str, Any]) -> dict[str, str]:
    """Flatten nested mappings to dotted names. Values that are not strings become JSON."""
    return {name: value if isinstance(value, str) else json.dumps(value, default=str) for name, value in flatten(tree).items()}


def _prefix(stage: str) -> str:
    """Return the prefix of a stage's metrics, which is empty for the student and its repeated measurements."""
    name = Path(stage).name
    return "" if name == "student" or name.removeprefix("student-").isdecimal() else f"{name}/"
