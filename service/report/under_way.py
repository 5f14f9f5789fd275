"""How far the stages are that have begun and not ended, as their `metrics.jsonl` say; each line is read once."""

from collections.abc import Iterator
from dataclasses import dataclass

from service.report.labels import number
from service.report.ranks import ago, rank_lines
from service.runs.result import RunResult, TrialRow
from service.runs.run_directory import stages_with
from trainables.rundir import RunDir, StageDir, lines_after


@dataclass
class Latest:
    """What a stage has recorded last."""

    offset: int = 0
    step: int = 0
    time_ms: float = 0.0
    images_per_s: float | None = None


class UnderWay:
    """The stages of one run that go on; where it is still carried out, `lines` may be called again and again."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._latest: dict[StageDir, Latest] = {}

    def lines(self, result: RunResult) -> list[str]:
        """A line for each stage, and under it one for each rank. `result`: how the run stands."""
        return [line for stage in unfinished(self._run_dir, result) for line in self._lines_of(stage)]

    def _lines_of(self, stage: StageDir) -> list[str]:
        latest = self._latest.setdefault(stage, Latest())
        for line in lines_after(stage.metrics, latest.offset):
            latest.offset, record = line.end, line.record
            if record is not None and record.keys() >= {"step", "time_ms", "metrics"}:
                latest.step, latest.time_ms = record["step"], record["time_ms"]
                latest.images_per_s = record["metrics"].get("train/images_per_s") or latest.images_per_s
        if not latest.time_ms:
            return []
        where, speed = stage.root.relative_to(self._run_dir.root), number(latest.images_per_s, 1)
        first = f"{where}: step {latest.step}, {speed} images/s, last record {ago(latest.time_ms)}"
        return [first, *rank_lines(stage)]


def unfinished(run_dir: RunDir, result: RunResult) -> Iterator[StageDir]:
    """The stages that have begun and not ended: a trial has a result however it ended, its stage only where it is complete."""
    ended = {run_dir.trial(row.id).measurement(number) for row in result.rows for number in range(num_measured(run_dir, row))}
    for stage in stages_with("metrics.jsonl", run_dir, result):
        if stage not in ended and not stage.result.exists():
            yield stage


def num_measured(run_dir: RunDir, row: TrialRow) -> int:
    """How many measurements of a trial have ended; its own result may be ahead of the sweep's."""
    return len(row.each_measurement) if row.status != "pending" else int(run_dir.trial(row.id).result.exists())
