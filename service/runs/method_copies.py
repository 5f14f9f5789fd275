"""Copies a user's method and model files into the run, so that a resumed run uses the code that it began with.

`methods/index.json` maps each file, as the experiment names it, to its copy, STEM-HASH.py with the hash of its text.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from service.config.rules import method_names, model_names
from service.config.schema import Experiment
from trainables.errors import ExperimentError
from trainables.rundir import RunDir, write_atomic, write_json
from trainables.user_code import read_source, use_copies

HASH_DIGITS = 12


def copy_methods(experiment: Experiment, run_dir: RunDir) -> None:
    """Copy the files that an experiment or its sweep names, and load methods and models from the copies from now on.

    Raises:
        ExperimentError: a file cannot be read.
        OSError: the run directory cannot be written.
    """
    use_copies({})
    copies = {}
    for name in (*method_names(experiment), *model_names(experiment).values()):
        if (source := read_source(name)) is not None:
            copies[str(source.path)] = f"{source.path.stem}-{source.sha256[:HASH_DIGITS]}.py"
            write_atomic(run_dir.methods / copies[str(source.path)], source.text.encode(errors="surrogateescape"))
    if copies:
        write_json(run_dir.methods_index, copies)
    use_copies_of(run_dir)


def use_copies_of(run_dir: RunDir) -> None:
    """Load methods and models from a run's copies, if it has any, from now on.

    Raises ExperimentError: a copy is missing or was changed.
    """
    copies = _copies(run_dir)
    for path in copies.values():
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest()[:HASH_DIGITS] != path.stem[-HASH_DIGITS:]:
            raise ExperimentError(f"{path} was changed after the run began: restore its text, or start a new run")
    use_copies(copies)


def changed_methods(run_dir: RunDir) -> Iterator[str]:
    """Yield a line for each file that differs from the copy that the run uses."""
    for name, path in _copies(run_dir).items():
        exists = Path(name).is_file()
        if not exists or Path(name).read_bytes() != path.read_bytes():
            changed = "has changed since the run began" if exists else "no longer exists"
            yield f"{name} {changed}: the run continues with its copy {path}"


def _copies(run_dir: RunDir) -> dict[str, Path]:
    if not run_dir.methods_index.exists():
        return {}
    try:
        index = json.loads(run_dir.methods_index.read_bytes())
        return {str(name): run_dir.methods / file for name, file in index.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ExperimentError(
            f"{run_dir.methods_index} cannot be read ({error}): restore a copy, or start again from {run_dir.experiment}"
        ) from error
