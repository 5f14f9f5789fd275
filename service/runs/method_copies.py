"""A run's copies of the files of methods and models that its experiment names: it goes on with the code with which it began.

`methods/index.json` holds for each file, as the experiment names it, the name of its copy and the SHA-256 of its text.
"""

import difflib
import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from service.config.messages import problems_of
from service.config.rules import method_names, model_names
from service.config.schema import Experiment
from trainables.errors import ExperimentError
from trainables.rundir import RunDir, write_atomic, write_json
from trainables.user_code import read_source, use_copies

VERSION = 1


class MethodCopy(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    """In `RunDir.methods`."""
    sha256: str


class CopiesIndex(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = VERSION
    copies: dict[str, MethodCopy]


def copy_methods(experiment: Experiment, run_dir: RunDir) -> None:
    """Copy the files that an experiment, or its sweep, names; from here on methods and models are loaded from the copies.

    Raises:
        ExperimentError: a file cannot be read.
        OSError: the run directory cannot be written.
    """
    use_copies({})
    copies = {}
    for name in (*method_names(experiment), *model_names(experiment).values()):
        if (source := read_source(name)) is None:
            continue
        path, text, sha256 = source
        copies[str(path)] = MethodCopy(file=f"{path.stem}-{sha256[:12]}.py", sha256=sha256)
        write_atomic(run_dir.methods / copies[str(path)].file, text.encode(errors="surrogateescape"))
    if copies:
        write_json(run_dir.methods_index, CopiesIndex(copies=copies).model_dump())
    use_copies_of(run_dir)


def use_copies_of(run_dir: RunDir) -> None:
    """Load methods and models from the copies of a run from here on, where it has some.

    Raises ExperimentError: a copy is missing or was changed.
    """
    found = {}
    for name, copy in _read_index(run_dir).items():
        path = run_dir.methods / copy.file
        source = read_source(f"{path}:Method")
        if source is None or source[2] != copy.sha256:
            raise ExperimentError(f"{path} was changed after the run began: put back its text, or begin a new run")
        found[name] = path
    use_copies(found)


def changed_methods(run_dir: RunDir) -> Iterator[str]:
    """One line for each file that differs from the copy with which the run goes on."""
    for name, copy in _read_index(run_dir).items():
        path = run_dir.methods / copy.file
        if not Path(name).is_file():
            yield f"{name} no longer exists: the run continues with its copy {path}"
            continue
        before, now = (file.read_text(errors="replace").splitlines() for file in (path, Path(name)))
        changes = [line[0] for line in difflib.unified_diff(before, now, n=0, lineterm="") if line[:3] not in ("---", "+++")]
        if before != now:
            yield (
                f"{name} has changed since the run began ({changes.count('+')} lines added, {changes.count('-')} removed): "
                f"the run goes on with its copy {path}"
            )


def _read_index(run_dir: RunDir) -> dict[str, MethodCopy]:
    path = run_dir.methods_index
    if not path.exists():
        return {}
    try:
        index = CopiesIndex.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        reason = f"{path} cannot be read: {error}"
        if isinstance(error, ValidationError):
            reason = problems_of(error, CopiesIndex).text(str(path))
        raise ExperimentError(f"{reason}; put back a copy, or begin again from {run_dir.experiment}") from error
    if index.version != VERSION:
        raise ExperimentError(
            f"{path} is of version {index.version}, and this is {VERSION}: resume with the version that wrote it"
        )
    return index.copies
