"""Shows progress while workers run: bars on a terminal, plain lines in a log file or a job.

It only reads the run's log and the stages' `logs/train.log`, so it never disturbs training.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from service.cluster import local_ray
from service.runs.events import Event, EventTail, Tail
from trainables.errors import printable
from trainables.rundir import StageDir

T = TypeVar("T")
SHOWN_WITH_BARS = (" teacher.cache: ", " eval.asynchronous: ", "% top-1 on ", " teacher's accuracy ")
"""Log lines with one of these are shown above the bars: disk use, where evaluations run, and the accuracy of a teacher."""
LINE_PAUSE_S = 5.0
"""Minimum time between two lines with the same number of finished trials."""


class OutputConsole(Console):
    """A console for standard output that raises BrokenPipeError instead of exiting."""

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError that rich calls this for


def output() -> Console:
    """Return a console for standard output without markup: class names and error messages may have brackets and colons.

    In a file or a job, tables are up to 160 characters wide, and bars are not drawn even if FORCE_COLOR is set.
    """
    is_tty = sys.stdout.isatty()
    options: dict[str, Any] = {} if is_tty else {"width": 160, "force_interactive": False}
    return OutputConsole(highlight=False, markup=False, emoji=False, **options)


def wait_for(work: Callable[[], T], display: Display, tick: Callable[[], None] = lambda: None) -> T:
    """Run `work` in a thread while updating the display. Ctrl-C reaches the caller at once, even while Ray blocks `work`.

    Raises what `work` raises, and RayLostError as soon as Ray is lost, even if `work` catches it.
    """
    future = Future[T]()

    def target() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised below, in the main thread
            future.set_exception(error)

    thread = local_ray.start_thread(target)
    while thread.is_alive():
        thread.join(0.25)
        local_ray.check_ray()
        display.tick()
        tick()
    return future.result()


@dataclass
class FollowedStage:
    """A stage that the display shows."""

    label: str
    log: Tail
    task: TaskID | None
    steps: int = 0

    def take_start(self, event: Event) -> None:
        """Set the number of steps from a `start` event. Other events change nothing."""
        if event["kind"] == "start":
            metrics = event["metrics"]
            self.steps = int(metrics["max_steps"] or metrics["steps_per_epoch"] * metrics["epochs"])


class Display:
    """Follows stages. The main thread calls `tick` a few times per second."""

    def __init__(self, console: Console | None = None):
        self.console = console or output()
        self._followed: dict[str, FollowedStage] = {}
        """By stage name in the log."""
        self._events: EventTail | None = None
        self._readers: list[Callable[[Event], None]] = []
        self._bars: Progress | None = None
        self._overall: TaskID | None = None
        self._shown, self._shown_s = (-1, 0, ""), 0.0

    def __enter__(self) -> Display:
        if self.console.is_interactive:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[info]}"),
                console=self.console,
                transient=True,
            )
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bars:
            self._bars.stop()

    def print(self, text: str) -> None:
        """Print one permanent line."""
        self.console.print(printable(text), markup=False, soft_wrap=True)

    def trials(self, done: int, total: int, note: str = "") -> None:
        """Show a sweep's progress: a bar, or a line whenever a trial ends, and otherwise at most every `LINE_PAUSE_S`."""
        if self._bars:
            if self._overall is None:
                self._overall = self._bars.add_task("trials", total=total, info="")
            self._bars.update(self._overall, completed=done, total=total, info=note)
            return
        shown, now_s = (done, total, note), time.monotonic()
        if shown == self._shown or not (note or done == total):
            return
        if done != self._shown[0] or now_s > self._shown_s + LINE_PAUSE_S:
            self._shown, self._shown_s = shown, now_s
            self.print(", ".join(filter(None, (f"{done} of {total} trials", note))))

    def watch(self, path: Path, offset: int = 0) -> None:
        """Read metrics of followed stages from a run's log, starting at this offset."""
        self._events = EventTail(path, offset)

    @contextlib.contextmanager
    def reading(self, reader: Callable[[Event], None]) -> Iterator[None]:
        """Call `reader`, after the readers added before it, with every new event of the watched log inside the context."""
        self._readers.append(reader)
        try:
            yield
        finally:
            self._readers.remove(reader)

    def follow(self, label: str, name: str, stage: StageDir, events: Iterable[Event] = ()) -> None:
        """Show a stage, called `name` in the log, without the lines that its `train.log` has already.

        `events` are the stage's events so far.
        """
        if name not in self._followed:
            task = self._bars.add_task(label, total=None, info="starting workers") if self._bars else None
            self._followed[name] = FollowedStage(label, Tail(stage.log, None), task)
            for event in events:
                self._followed[name].take_start(event)

    def unfollow(self, name: str) -> None:
        """Stop showing a stage, or all stages of a trial given by its folder (`trials/003`)."""
        for each in [each for each in self._followed if f"{each}/".startswith(f"{name}/")]:
            followed = self._followed.pop(each)
            self._show_lines(followed)
            if followed.task is not None and self._bars:
                self._bars.remove_task(followed.task)

    def tick(self) -> None:
        """Show new log lines and events."""
        for followed in self._followed.values():
            self._show_lines(followed)
        self.read_events()

    def read_events(self) -> None:
        """Pass new events of the log to the bars and readers. Raises what the readers raise."""
        for event in self._events.new() if self._events else ():
            if (found := self._followed.get(event.get("stage", ""))) is not None and "metrics" in event:
                self._update(found, event)
            for read in self._readers:
                read(event)

    def _show_lines(self, followed: FollowedStage) -> None:
        for each in followed.log.lines():
            line = each.raw.decode(errors="replace")
            if self._bars is None or any(part in line for part in SHOWN_WITH_BARS):
                self.print(f"[{followed.label}] {line}")

    def _update(self, followed: FollowedStage, event: Event) -> None:
        if self._bars is None or followed.task is None:
            return
        metrics = event["metrics"]
        followed.take_start(event)
        shown = (("train/images_per_s", "{:.0f} images/s"), ("train/loss", "loss {:.3f}"), ("val/top1_pct", "val {:.2f}%"))
        info = "  ".join(form.format(metrics[name]) for name, form in shown if name in metrics)
        step = None if event["kind"] == "epoch" else event["step"]  # its evaluation may have ended later
        self._bars.update(followed.task, total=followed.steps or None, completed=step, info=info)
