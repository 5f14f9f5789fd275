"""How far the stages are that have begun and not ended, as the run's log says; each of its lines is read once."""

from dataclasses import dataclass

from service.report.labels import number
from service.report.ranks import ago, rank_lines
from service.runs.events import EventTail
from trainables.rundir import RunDir, StageDir


@dataclass
class Latest:
    """What a stage has recorded last."""

    step: int = 0
    time_ms: float = 0.0
    images_per_s: float | None = None


class UnderWay:
    """The stages of one run that go on; where it is still carried out, `lines` may be called again and again."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir, self._events = run_dir, EventTail(run_dir.events)
        self._latest: dict[str, Latest] = {}

    def lines(self) -> list[str]:
        """A line for each stage, and under it one for each rank."""
        for event in self._events.new():
            stage = event.get("stage", f"trials/{event.get('trial')}/")
            if event["kind"] in ("summary", "stage_ended", "discarded", "trial_ended"):
                self._latest = {name: latest for name, latest in self._latest.items() if not name.startswith(stage)}
            elif "metrics" in event:
                latest = self._latest.setdefault(stage, Latest())
                latest.step, latest.time_ms = event["step"], event["time_ms"]
                latest.images_per_s = event["metrics"].get("train/images_per_s") or latest.images_per_s
        return [line for stage, latest in self._latest.items() for line in self._lines_of(stage, latest)]

    def _lines_of(self, stage: str, latest: Latest) -> list[str]:
        speed = number(latest.images_per_s, 1)
        first = f"{stage}: step {latest.step}, {speed} images/s, last record {ago(latest.time_ms)}"
        return [first, *rank_lines(StageDir(self._run_dir.root / stage))]
