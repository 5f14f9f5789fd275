"""What a stage's workers bring from an object store and put there, while their folder is a copy of the run."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainables.object_store.run_copy import RunCopy, is_of_workers


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

    Yields what is to be called with each checkpoint that the rank has written: it waits until the store has it.

    Raises StorageError: the store did not answer for as long as it is waited for.
    """
    part = str(folder.relative_to(copy.folder))
    if is_main:
        copy.own(part, is_of_workers)
    barrier()  # rank 0 may have had to put what a kill had kept from the store
    if not is_main:
        copy.fetch(part, lambda name: name.endswith("/last.safetensors"))
    yield lambda path: copy.store.put(f"{part}/{path.relative_to(folder)}", path)
