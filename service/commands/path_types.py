"""Types of arguments and options whose text names something on this machine, and how `submit` says it for another directory."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from click.types import StringParamType

from service.config import strict_yaml
from service.config.dotted import put
from service.config.experiment import load, parse_override
from service.config.files import recipes
from service.config.paths import absolute, absolute_or_new, absolute_paths, with_absolute_file
from service.runs.run_directory import has_begun
from service.runs.stored.stored_runs import root_folder, run_folder
from trainables.errors import ExperimentError
from trainables.notices import notice
from trainables.object_store.store import is_uri
from trainables.redact import redact_uris
from trainables.rundir import write_atomic
from trainables.user_code import file_of, option_key


class PathType(click.Path):
    """A file or folder on this machine, existing or not."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self.at_uri(value, param, ctx) if isinstance(value, str) and is_uri(value) else super().convert(value, param, ctx)

    def at_uri(self, uri: str, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The folder of this machine that has the copy of what is at a URI. Raises ExperimentError: none is taken here."""
        name = f"{param.get_error_hint(ctx).strip(chr(39))} " if param and ctx else ""
        command = f"`distill {ctx.info_name}`" if ctx else "this"
        raise ExperimentError(f"{name}{redact_uris(uri)}: {command} takes no URI here: give a path on this machine")


class RunsRoot(PathType):
    """A runs' root, also in an object store."""

    def at_uri(self, uri: str, *_: object) -> Path:
        return root_folder(uri)


class RunPath(PathType):
    """A run's folder, also in an object store."""

    def at_uri(self, uri: str, *_: object) -> Path:
        return run_folder(uri)


@dataclass(frozen=True)
class JobFiles:
    """A folder whose copy is a job's working directory, and the values of all parameters of its command."""

    folder: Path
    params: Mapping[str, Any]
    experiments: list[str] = field(default_factory=list)
    """Names of those that it is given, but for what lies in an object store."""

    def method(self, name: str) -> str:
        """A method's or model's name in the job; of `FILE.py:CLASS` the file travels along, unless it is on the cluster alone."""
        path = file_of(name)
        if path is None or not path.is_file():
            return with_absolute_file(name)
        content = path.read_bytes()
        # Below a folder, where its name hides no module, and apart from another file of the same name.
        copy = Path("methods") / f"{path.stem}-{hashlib.sha256(content).hexdigest()[:12]}.py"
        write_atomic(self.folder / copy, content)
        return f"{copy}:{option_key(name)}"


class JobText(StringParamType):
    """A text that may name files."""

    def in_job(self, text: str, job: JobFiles) -> list[str]:
        """The texts that say the same in the job's working directory: one, of an option that may be repeated also several."""
        return [job.method(text)]


class MethodName(JobText):
    """A method or a model: its name, or FILE.py:CLASS."""


class NameOrFile(JobText):
    """The name of something that ships with raydistill, or a file."""

    def in_job(self, text: str, job: JobFiles) -> list[str]:
        return [absolute_or_new(text) if os.path.isfile(text) else text]


class FileOrUri(JobText):
    """A file or folder, its URI in an object store, or another name: of a model, or of published weights."""

    def in_job(self, text: str, job: JobFiles) -> list[str]:
        return [text if is_uri(text) else job.method(text) if file_of(text) else absolute(text)]


class DataPath(FileOrUri):
    """As `data.path`: a folder, or a built-in source."""


class Override(JobText):
    """KEY=VALUE of an experiment."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        parse_override(str(value))  # before click wonders about the rest of a value that the shell has split at its spaces
        return super().convert(value, param, ctx)

    def in_job(self, text: str, job: JobFiles) -> list[str]:
        """The override, and right behind it, before any later one of the same key, its paths as absolute ones."""
        key, value = parse_override(text)
        tree: dict[str, object] = {}
        put(tree, key, value, f"--set {text}")
        return [text, *(f"{key}={json.dumps(path)}" for key, path in absolute_paths(tree, job.method).items())]


class RecipeOrFile(JobText):
    """An experiment, also a run's at a URI."""

    def in_job(self, text: str, job: JobFiles) -> list[str]:
        """A recipe; of an experiment file the name of its resolved copy in the job's folder, bases and all.

        A wrong experiment is refused here, not minutes later in a log; a method's file may be on the cluster alone.
        """
        if is_uri(text):
            return [text]
        experiment = load(text, job.params["overrides"], method_files="run if present").experiment
        job.experiments.append(experiment.name)
        if text in recipes():
            return [text]
        tree = experiment.model_dump(mode="json")
        for key, value in absolute_paths(tree, job.method).items():
            put(tree, key, value, text)
        name = f"{experiment.name}.yaml"
        (job.folder / name).write_text(strict_yaml.dump(tree), encoding="utf-8")
        return [name]


class RecipeOrKey(RecipeOrFile):
    """An experiment, or with --keys the beginning of a key."""

    def in_job(self, text: str, job: JobFiles) -> list[str]:
        return [text] if job.params["keys"] else super().in_job(text, job)


class RunOrRecipe(RecipeOrFile):
    """The directory of a run, which may be on the cluster alone if its path is absolute, or an experiment."""

    def in_job(self, text: str, job: JobFiles) -> list[str]:
        is_run = not is_uri(text) and (is_run_folder(text) or (os.path.isabs(text) and not os.path.exists(text)))
        return [absolute_or_new(text)] if is_run else super().in_job(text, job)


def is_run_folder(text: str) -> bool:
    """Whether the name of a run or an experiment is a folder's; that of a recipe is the recipe's.

    Raises ExperimentError: it is the name of a recipe and of a run's folder.
    """
    if text in recipes() and has_begun(Path(text)):
        raise ExperimentError(f"{text} is a recipe and the folder of a run: write ./{text} for the run, or rename it")
    if text in recipes() and Path(text).is_dir():
        notice(f"{text} is the recipe, not the folder {text}, which has no run: write ./{text} for the folder")
        return False
    return Path(text).is_dir()
