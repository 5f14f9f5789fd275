"""What MLflow shows of a run, computed from the run's log, `experiment.yaml` and the files that they name."""

import functools
import hashlib
import json
import logging
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.config import strict_yaml
from service.config.experiment import read_resolved
from service.config.schema import Experiment
from service.config.space import LOADER_WORKERS, short_names
from service.config.sweep import FRONT
from service.runs.event_log import check_version
from service.runs.events import Event, parsed
from service.runs.outcome import Outcome
from service.runs.result import Kind
from service.runs.run_log import ResultFold, checkpoint_names
from service.runs.stored.stored_runs import local_checkpoint
from service.tracking.run_view import DESCRIPTION, Item, RunView, Status, flat
from service.tracking.shown_metrics import of_epoch, of_summary
from service.tracking.views import saved_views
from trainables.config import DataIdentity
from trainables.errors import CheckpointError
from trainables.rundir import RunDir, lines_after

log = logging.getLogger("raydistill")

CHUNK_BYTES = 1 << 16
"""Bytes of a log that are read and sent at a time. At most this much is sent again after a kill."""
LINE_BYTES = 1 << 12
_NOT_SHOWN = tuple(f'{{"kind": "{kind}"'.encode() for kind in ("step", "start", "resume", "attempt", "restart"))
WINNER = "raydistill.winner"
"""Tag of a sweep's best trial."""
_STATUS: dict[str, Status] = {"complete": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MlflowView:
    """The MLflow runs of one log: a run, and for a sweep a child run per trial. Implements `LogView`."""

    def __init__(self, run_dir: RunDir) -> None:
        self.id, self.end = "", 0
        self.runs: dict[str, RunView] = {}
        self._run_dir, self._fold = run_dir, ResultFold()
        self._best_checkpoints: dict[str, str] = {}
        """File name of the newest one, by stage."""
        self._winner: str | None = None
        self._mark = ""
        """Offset and checksum of the current line."""

    @property
    def registered_model(self) -> str | None:
        return self._experiment.tracking.register_model

    def read(self) -> bool:
        """Read the next part of the log. Returns whether there was one. After an error the view must not be used again.

        Raises:
            ExperimentError: `experiment.yaml` is damaged, or the log has another version.
            OSError: the log cannot be read.
        """
        path = self._run_dir.events
        lines = lines_after(path, self.end, CHUNK_BYTES)
        if lines and not self.end:
            check_version(path, lines[0].raw)
        for line in lines:
            begin, self.end = self.end, line.end
            if not line.raw.startswith(_NOT_SHOWN) and (event := parsed(line, path)) is not None:
                self._mark = f"{begin}:{zlib.crc32(line.raw):08x}"
                try:
                    self._take(event)
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    log.warning("tracking: %s: skipped the event that ends at byte %d: %r", path, line.end, error)
        return bool(lines)

    def offset_of(self, mark: str) -> int:
        """See `LogView`."""
        begin, _, checksum = mark.partition(":")
        line = next(iter(lines_after(self._run_dir.events, int(begin), LINE_BYTES)), None) if begin.isdecimal() else None
        return line.end if line is not None and f"{zlib.crc32(line.raw):08x}" == checksum else 0

    def checkpoint(self, path: Path) -> Path:
        """See `LogView`."""
        try:
            return local_checkpoint(path)
        except CheckpointError:  # it was removed; the error comes when it is read
            return path

    @functools.cached_property
    def _experiment(self) -> Experiment:
        return read_resolved(self._run_dir.experiment, reading=True).experiment

    @property
    def _kind(self) -> Kind:
        """Kind of the run, which is also the key of its MLflow run."""
        kind: Kind = self._fold.fields["kind"]
        return kind

    def _take(self, event: Event) -> None:
        self._fold.take(event)
        match event["kind"]:
            case "log":
                self.id = event["id"]
            case "session_begun":
                self._begin_session(event)
            case "session_ended":
                self._end_session(event)
            case "result" if (run := self.runs.get(self._kind)) is not None:
                if "data" in event["changes"]:
                    self._add_dataset(run)
                for row in event["changes"].get("trials") or ():
                    if row["status"] not in ("pending", "untested") and f"trial/{row['id']}" not in self.runs:
                        self._end_trial(row["id"], event)  # it cannot run, so no `trial_ended` follows
            case "stage_begun" if "trial" in event:
                self._trial_run(event["trial"], event)
            case "epoch":
                prefix = _prefix(event["stage"])
                self._add_metrics(self._run_of(event), event, of_epoch(event["metrics"], prefix), event["step"])
            case "summary" if "/" not in event["stage"]:  # a trial's metrics combine its measurements
                shown = of_summary(event["metrics"], _prefix(event["stage"]), followed=True)
                self._add_metrics(self.runs[self._kind], event, shown, int(event["metrics"].get("steps", 0)))
            case "checkpoint" if best := checkpoint_names([event]).get("best"):
                self._best_checkpoints[event["stage"]] = best
            case "hang":
                self._set_tags(self._run_of(event), {"hang": event["message"]})
            case "stage_ended" if event["stage"] == "student" and event["outcome"]["status"] == "ok":
                self._add_model("student")
            case "trial_ended":
                self._end_trial(event["trial"], event)

    def _begin_session(self, event: Event) -> None:
        kind = self._kind
        if (run := self.runs.get(kind)) is None:
            tree = self._experiment.model_dump(mode="json")
            run = self.runs[kind] = RunView(kind, self._run_dir.root.name, None, event["time_ms"], lambda: flat(tree))
            self._add(run, "views", views_of(kind, self._experiment))
            self._add(run, "artifact", self._run_dir.experiment)
            self._add_dataset(run)
        self._set_tags(run, {"raydistill.kind": kind, **flat(event.get("tags", {}))})
        run.status = "RUNNING"

    def _end_session(self, event: Event) -> None:
        status, run = _STATUS[event["status"]], self.runs[self._kind]
        for each in self.runs.values():
            if each.status == "RUNNING":  # the run, and trials that were interrupted
                self._set_status(each, status, event)
        verdict = "\n\n".join(self._fold.fields.get("verdict", ()))
        if verdict:
            self._set_tags(run, {DESCRIPTION: verdict})
        if status == "FINISHED" and self._kind == "sweep":
            self._mark_winner(run, verdict, event)
        self._add(run, "artifact", self._run_dir.result)
        self._add(run, "artifact", self._run_dir.report)

    def _mark_winner(self, sweep: RunView, verdict: str, ended: Event) -> None:
        """Tag and describe the best trial, untag the one of an earlier session, and copy the winner's metrics to the sweep."""
        best = self._fold.result(self._run_dir.events).best
        winner = best.id if best else None
        if self._winner != winner and (before := self.runs.get(f"trial/{self._winner}")) is not None:
            self._set_tags(before, {WINNER: "false", DESCRIPTION: ""})
        self._winner = winner
        if best is None or (trial := self.runs.get(f"trial/{winner}")) is None:
            return
        self._set_tags(trial, {WINNER: "true", DESCRIPTION: verdict})
        # Always at step 0: MLflow shows the value of the highest step, and a later session's winner may have fewer steps.
        self._add_metrics(sweep, ended, of_summary(best.metrics, followed=False), 0)
        self._add_model(f"trials/{winner}/student")

    def _trial_run(self, trial: str, event: Event) -> RunView:
        """Return the run of a trial, creating it if needed, and set it to RUNNING."""
        row = self._fold.rows.get(trial, {"params": {}})
        if (run := self.runs.get(f"trial/{trial}")) is None:
            names = short_names(row["params"])
            name = " ".join([trial, *(f"{names[key]}={value}" for key, value in row["params"].items())])
            params = functools.partial(self._trial_params, trial)
            run = self.runs[f"trial/{trial}"] = RunView(f"trial/{trial}", name, self._kind, event["time_ms"], params)
            self._set_tags(run, {"raydistill.kind": "trial"})
            if row.get("kind") == "accuracy" and event["kind"] == "stage_begun":
                # MLflow's page for comparing runs opens with the metric that was logged first.
                self._add_metrics(run, event, {self._experiment.sweep.figure: math.nan}, 0)
            self._add_dataset(run)
        run.status = "RUNNING"
        return self._touch(run)

    def _trial_params(self, trial: str) -> dict[str, str]:
        """Return a trial's parameters. An invalid point has no experiment, so only the values of the point."""
        row, path = self._fold.rows.get(trial, {}), self._run_dir.trial(trial).experiment
        tree = strict_yaml.parse(path.read_text(), str(path)) if path.exists() else {}
        workers = {key: value for key, value in row.get("scale", {}).items() if key == LOADER_WORKERS}
        return flat(tree) | flat(row.get("params", {})) | flat(workers)

    def _end_trial(self, trial: str, event: Event) -> None:
        run, row = self._trial_run(trial, event), self._fold.rows.get(trial, {})
        outcome = self._fold.outcome_of(trial) or Outcome(status=row["status"], reason=row.get("reason", ""))
        self._set_status(run, "FINISHED" if outcome.status in ("ok", "stopped") else "FAILED", event)
        about = {"status": outcome.status, "reason": outcome.reason, "trial_kind": row.get("kind", "")}
        about |= {"oversubscribed": str(row.get("oversubscribed", False)), "measurements": str(len(outcome.each_measurement))}
        self._set_tags(run, about)
        has_epochs = row.get("kind") == "accuracy"  # a timing trial has none
        shown = of_summary(outcome.metrics, followed=has_epochs, first=self._experiment.sweep.figure)
        self._add_metrics(run, event, shown, int(outcome.metrics.get("steps", 0)))
        if (experiment := self._run_dir.trial(trial).experiment).exists():
            self._add(run, "artifact", experiment)

    def _run_of(self, event: Event) -> RunView:
        """The run that a stage's event belongs to."""
        parts = Path(event["stage"]).parts
        if parts[0] != "trials":
            return self.runs[self._kind]
        return self.runs.get(f"trial/{parts[1]}") or self._trial_run(parts[1], event)

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
        if stage in self._best_checkpoints and self._experiment.tracking.log_model:
            best = self._run_dir.stage(stage).best.with_name(self._best_checkpoints[stage])
            self._add(self.runs[self._kind], "model", best)

    def _add_metrics(self, run: RunView, event: Event, shown: Mapping[str, float], step: int) -> None:
        for name, value in shown.items():
            self._add(run, "metrics", (name, float(value), event["time_ms"], step))

    def _add(self, run: RunView, kind: Any, value: Any) -> None:
        self._touch(run).items.append(Item(self.end, kind, value))

    def _set_tags(self, run: RunView, tags: Mapping[str, str]) -> None:
        self._touch(run).tags |= tags

    def _set_status(self, run: RunView, status: Status, event: Event) -> None:
        self._touch(run).status, run.ended_ms = status, event["time_ms"]

    def _touch(self, run: RunView) -> RunView:
        run.changed, run.mark = self.end, self._mark
        return run


def views_of(kind: Kind, experiment: Experiment) -> dict[str, str]:
    """Return MLflow's saved views that compare a sweep's trials, or a run with others of its MLflow experiment."""
    if kind == "train":
        has_accuracy = experiment.train.max_steps is None
        return saved_views(kind, {}, "top1_pct" if has_accuracy else "images_per_s", ascending=False, has_accuracy=has_accuracy)
    sweep = experiment.sweep
    has_accuracy = sweep.timing_steps is None or sweep.is_time_to_accuracy
    first, ascending = ("images_per_s", False) if sweep.metric == FRONT else (sweep.figure, sweep.mode == "min")
    return saved_views("trial", short_names(sweep.axes), first, ascending=ascending, has_accuracy=has_accuracy)


def _prefix(stage: str) -> str:
    """Return the prefix of a stage's metrics, which is empty for the student and its repeated measurements."""
    name = Path(stage).name
    return "" if name == "student" or name.removeprefix("student-").isdecimal() else f"{name}/"
