"""What a stage's workers bring from an object store and put there, while their folder is a copy of the run."""

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainables.errors import StorageError
from trainables.object_store.run_copy import APPENDED, RunCopy, is_error, is_of_workers
from trainables.paced import Paced
from trainables.rundir import StageDir

PUT_EVERY_S = 10.0
"""Seconds between two puts of a file that grows, or more, see `Paced`."""
_LONGEST_WAIT_S = 60.0
_ENDING_S = 10.0
_log = logging.getLogger("raydistill")


def fetch_inputs(settings: Mapping[str, Any]) -> None:
    """Bring to this node what workers read of a run: copies of method files, checkpoints that it has trained.

    `settings`: a `TrainConfig` or an `EvaluateConfig` as plain data. Raises StorageError.
    """
    if (run_store := settings.get("run_store")) is None:
        return
    copy = RunCopy(run_store["uri"], Path(run_store["folder"]))
    copy.fetch_missing("methods")
    for weights in ((settings.get("teacher") or {}).get("weights"), settings.get("checkpoint"), settings.get("init_checkpoint")):
        if weights and Path(weights).is_relative_to(copy.folder):
            copy.fetch_checkpoint(str(Path(weights).relative_to(copy.folder)))


@contextlib.contextmanager
def stored_stage(
    copy: RunCopy, folder: Path, *, is_main: bool, barrier: Callable[[], object]
) -> Iterator[Callable[[Path], None]]:
    """Around a rank's work on the stage in `folder`: begin from what the store has, and put there what the rank writes.

    Yields `publish`, to be called with each file of `REPLACED` that the rank has written, and with one of `APPENDED` that is to
    be in the store now: it waits until the store has it, see `StageWriter.publish`.

    Raises StorageError: the store did not answer for as long as it is waited for.
    """
    shutil.rmtree(StageDir(folder).errors, ignore_errors=True)  # of an earlier attempt, which has ended on this node too
    part = str(folder.relative_to(copy.folder))
    if is_main:
        copy.own(part, _is_continued)
    barrier()  # rank 0 may have had to put what a kill had kept from the store
    if not is_main:
        copy.fetch(part, lambda name: name.endswith("/last.safetensors"))
    writer = StageWriter(copy, part, is_main=is_main)
    thread = threading.Thread(target=writer.run, name="object store", daemon=True)
    if is_main:
        thread.start()
    try:
        yield writer.publish
    finally:
        writer.end_soon()
        writer.ended.set()
        if is_main:
            thread.join()
            with contextlib.suppress(StorageError):  # the last lines of a log: all else is there
                writer.put_appended()


def _is_continued(name: str) -> bool:
    """Whether a new attempt goes on with the object; why the last one ended is nothing of its."""
    return is_of_workers(name) and not is_error(name)


class StageWriter:
    """Puts a stage's files as a worker writes them."""

    def __init__(self, copy: RunCopy, part: str, *, is_main: bool) -> None:
        self.ended = threading.Event()
        self._copy, self._part = copy, part
        self._appended = APPENDED if is_main else ()
        self._sizes: dict[str, int] = {}
        self._putting = threading.Lock()

    def run(self) -> None:
        """Put what is appended, until the stage ends."""
        put_appended = Paced(self.put_appended, pause_s=PUT_EVERY_S, most_s=_LONGEST_WAIT_S)
        while not self.ended.wait(put_appended.wait_s()):
            try:
                put_appended()
            except StorageError as error:
                _log.warning("%s; still trying", error)

    def publish(self, path: Path) -> None:
        """Put a file of the stage that was replaced, behind the records that were written before it; or these alone.

        Why the rank failed is put at once, and its exception reaches the driver also where the store does not take it.

        Raises StorageError: the store does not take another file.
        """
        name = str(path.relative_to(self._copy.folder / self._part))
        if is_error(f"{self._part}/{name}"):
            self.end_soon()
            try:
                self._copy.store.put(f"{self._part}/{name}", path)
            except StorageError as error:
                _log.warning("%s", error)
        else:
            self.put_appended()
            if name not in APPENDED:
                self._copy.store.put(f"{self._part}/{name}", path)

    def end_soon(self) -> None:
        """Wait less for the store from here on: the exception that ends the stage, or its result, matters more."""
        self._copy.store.retry_s = min(self._copy.store.retry_s, _ENDING_S)

    def put_appended(self) -> None:
        """Put the files that have grown. Raises StorageError."""
        with self._putting:
            for name in self._appended:
                path = self._copy.folder / self._part / name
                size = path.stat().st_size if path.exists() else 0
                if size != self._sizes.get(name, 0):
                    self._copy.store.put(f"{self._part}/{name}", path)
                    self._sizes[name] = size
