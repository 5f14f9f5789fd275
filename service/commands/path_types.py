"""Types of arguments and options whose text names something on this machine, and how `submit` says it for another directory."""

import hashlib
import json
from abc import ABC, abstractmethod
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
from service.runs.stored.stored_runs import root_folder, run_folder, uri_of
from trainables.errors import ExperimentError
from trainables.notices import notice
from trainables.object_store.store import is_uri
from trainables.redact import redact_uris
from trainables.rundir import write_atomic
from trainables.user_code import file_of, option_key


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


class NamesPath(ABC):
    """A type of parameter whose text may name a file or folder."""

    @abstractmethod
    def in_job(self, text: str, job: JobFiles) -> list[str]:
        """The texts that say the same in the job's working directory: one, of an option that may be repeated also several."""


class PathType(NamesPath, click.Path):
    """A file or folder, existing or not."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and is_uri(value):
            name = f"{param.get_error_hint(ctx).strip(chr(39))} " if param and ctx else ""
            command = f"`distill {ctx.info_name}`" if ctx else "this"
            raise ExperimentError(f"{name}{redact_uris(value)}: {command} takes no URI here: give a path on this machine")
        return super().convert(value, param, ctx)

    def in_job(self, text: str, job: JobFiles) -> list[str]:
        return [absolute_or_new(text)]


class RunsRoot(PathType):
    """A runs' root: a folder, or the URI of an object store, which becomes the folder of its copies."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return root_folder(value) if isinstance(value, str) and is_uri(value) else super().convert(value, param, ctx)

    def in_job(self, text: str, job: JobFiles) -> list[str]:
        return [uri_of(Path(text)) or absolute_or_new(text)]


class RunPath(RunsRoot):
    """A run's folder, or its URI, which becomes the folder that is its copy."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return run_folder(value) if isinstance(value, str) and is_uri(value) else super().convert(value, param, ctx)


class DataPath(NamesPath, StringParamType):
    """As `data.path`: a folder, or a built-in source."""

    def in_job(self, text: str, job: JobFiles) -> list[str]:
        return [absolute(text)]


class FileOrUri(NamesPath, StringParamType):
    """A file or folder, or its URI in an object store; with --model also the name of published weights."""

    def in_job(self, text: str, job: JobFiles) -> list[str]:
        if is_uri(text):
            return [text]
        if file_of(text):
            return [job.method(text)]
        return [absolute(text) if job.params.get("model") else absolute_or_new(text)]


class NameOrFile(NamesPath, StringParamType):
    """The name of something that ships with raydistill, or a file."""

    def in_job(self, text: str, job: JobFiles) -> list[str]:
        return [absolute_or_new(text) if Path(text).is_file() else text]


class MethodName(NamesPath, StringParamType):
    """A method or a model: its name, or FILE.py:CLASS."""

    def in_job(self, text: str, job: JobFiles) -> list[str]:
        return [job.method(text)]


class Override(NamesPath, StringParamType):
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


class RecipeOrFile(NamesPath, StringParamType):
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


class RunOrRecipe(RecipeOrFile):
    """The directory of a run, which may be on the cluster alone if its path is absolute, or an experiment."""

    def in_job(self, text: str, job: JobFiles) -> list[str]:
        path = Path(text)
        is_run = not is_uri(text) and (is_run_folder(text) or (path.is_absolute() and not path.exists()))
        return [absolute_or_new(text)] if is_run else super().in_job(text, job)
