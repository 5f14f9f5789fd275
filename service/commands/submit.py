"""`submit`: any other command as a Ray job."""

import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from service.cluster.jobs import Job
from service.cluster.jobs import submit as run_submit
from service.commands.options import FileOrUri, NameOrFile, Override, RecipeOrFile, RunOrRecipe, is_run_folder
from service.config import strict_yaml
from service.config.dotted import put
from service.config.experiment import load, parse_override
from service.config.files import recipes
from service.config.paths import absolute, absolute_or_new, absolute_paths, with_absolute_file
from service.runs.run_directory import RUN_NAME
from service.runs.stored.stored_runs import uri_of
from trainables.errors import ExperimentError
from trainables.object_store.store import is_uri
from trainables.rundir import write_atomic
from trainables.user_code import file_of, option_key


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--follow", is_flag=True, help="Stream the job's log and exit with its exit code.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def submit(context: click.Context, follow: bool, command: tuple[str, ...]) -> None:
    """Run any other command as a Ray job: distill submit --follow train digits.

    Relative paths begin in this directory, also in an experiment file and in --set. The file itself and the files of methods
    travel with the job; the nodes have to see all else that is named. The job's name is also that of the run that it begins.
    Without --runs of its own, a command uses the cluster's RAYDISTILL_RUNS, or ~/runs there.
    """
    with tempfile.TemporaryDirectory(prefix="raydistill-") as folder:
        job = job_of(*package(context.find_root(), command, Path(folder)))
        raise click.exceptions.Exit(run_submit(job, Path(folder), follow, click.echo))


def job_of(arguments: Sequence[str], experiment: str | None) -> Job:
    """The job of a packaged command, with a name that no other job has, and what is known of its run.

    `experiment`: the name of the one that it is given.
    """
    command, title, env_vars = arguments[0], experiment or arguments[0], dict[str, str]()
    given = {option: arguments[arguments.index(option) + 1] for option in ("--out", "--runs") if option in arguments}
    name = f"{title}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    metadata = {"job_name": title, "command": command} | ({"experiment": experiment} if experiment else {})
    folder = arguments[1] if command == "resume" else given.get("--out")
    if folder is None and experiment is not None and command in ("train", "sweep"):
        metadata["run"] = env_vars[RUN_NAME] = name
        folder = f"{given['--runs']}/{name}" if "--runs" in given else None
    if folder is not None:
        folder = folder.rstrip("/")
        metadata |= {"run": folder.rpartition("/")[2], "folder": folder, "page": f"{folder}/report.html"}
    return Job(name, tuple(arguments), metadata, env_vars)


@dataclass
class Package:
    """A folder whose copy is a job's working directory, and the command that is run there."""

    folder: Path
    params: Mapping[str, Any]
    experiment: str | None = None
    """The name of the one that the command is given, but for what lies in an object store."""

    def texts(self, kind: click.ParamType[Any], value: Any) -> list[str]:
        """The texts that say the same in the job's working directory: one, of an override also several."""
        if isinstance(value, Path):
            return [uri_of(value) or absolute_or_new(str(value))]
        if not isinstance(value, str) or is_uri(value):
            return [str(value)]
        if isinstance(kind, Override):  # right behind it, before any later one of the same key, its paths as absolute ones
            key, parsed = parse_override(value)
            tree: dict[str, Any] = {}
            put(tree, {key: parsed}, f"--set {value}")
            return [value, *(f"{key}={json.dumps(path)}" for key, path in absolute_paths(tree, self.method).items())]
        if isinstance(kind, RunOrRecipe) and (is_run_folder(value) or (os.path.isabs(value) and not os.path.exists(value))):
            return [absolute_or_new(value)]
        if isinstance(kind, RecipeOrFile) and not self.params.get("keys"):
            return [self.experiment_file(value)]
        if file_of(value):
            return [self.method(value)]
        is_path = isinstance(kind, FileOrUri) or (isinstance(kind, NameOrFile) and os.path.isfile(value))
        return [absolute(value) if is_path else value]

    def experiment_file(self, text: str) -> str:
        """A recipe; of an experiment file the name of its resolved copy in the folder, bases and all.

        A wrong experiment is refused here, not minutes later in a log; a method's file may be on the cluster alone.
        """
        experiment = load(text, self.params["overrides"], method_files="run if present").experiment
        self.experiment = experiment.name
        if text in recipes():
            return text
        tree = experiment.model_dump(mode="json")
        put(tree, absolute_paths(tree, self.method), text)
        (self.folder / f"{experiment.name}.yaml").write_text(strict_yaml.dump(tree), encoding="utf-8")
        return f"{experiment.name}.yaml"

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


def package(distill: click.Context, words: Sequence[str], folder: Path) -> tuple[list[str], str | None]:
    """The words of a command as a job runs it, whose working directory is a copy of `folder`; an experiment file is put there.

    And the name of its experiment.

    Raises:
        ExperimentError: no command of `distill`, or an experiment that is wrong here already.
        click.UsageError: arguments that the command does not have.
    """
    assert isinstance(distill.command, click.Group)
    names = [name for name in distill.command.list_commands(distill) if name != "submit"]
    if not words or words[0] not in names:
        raise ExperimentError(
            f"submit: give one of {', '.join(names)} and its arguments, such as `distill submit -- train digits`"
        )
    command = distill.command.get_command(distill, words[0])
    assert command is not None
    context = command.make_context(words[0], list(words[1:]), parent=distill)
    job, arguments, options = Package(folder, context.params), [words[0]], list[str]()
    for parameter in command.params:
        name = parameter.name or ""
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        values = value if isinstance(value, tuple) else (value,)
        if isinstance(parameter, click.Option) and parameter.is_flag:
            options += (parameter.opts if value else parameter.secondary_opts)[:1]
            continue
        for text in (text for each in values for text in job.texts(parameter.type, each)):
            if isinstance(parameter, click.Argument):
                arguments.append(text)
            else:
                options += [parameter.opts[0], text]
    return [*arguments, *options], job.experiment
