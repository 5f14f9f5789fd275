"""`submit`: any other command as a Ray job."""

import secrets
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import click
from click.core import ParameterSource

from service.cluster.jobs import Job
from service.cluster.jobs import submit as run_submit
from service.commands.path_types import JobFiles, JobText
from service.config.paths import absolute_or_new
from service.runs.run_directory import RUN_NAME
from service.runs.stored.stored_runs import uri_of
from trainables.errors import ExperimentError
from trainables.object_store.store import is_uri


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--follow", is_flag=True, help="Stream the job's log and exit with its exit code.")
@click.option(
    "--runs",
    "root",
    show_default="the cluster's RAYDISTILL_RUNS, or ~/runs",
    help="Root of all runs on the cluster, and of their MLflow store.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def submit(context: click.Context, follow: bool, root: str | None, command: tuple[str, ...]) -> None:
    """Run any other command as a Ray job: distill submit --follow train digits.

    Relative paths begin in this directory, also in an experiment file and in --set. The file itself and the files of methods
    travel with the job; the nodes have to see all else that is named. The job's name is also that of the run that it begins.
    """
    with tempfile.TemporaryDirectory(prefix="raydistill-") as folder:
        arguments, experiment = package(context.find_root(), command, Path(folder))
        if root is not None and "--runs" in arguments:
            raise click.UsageError(f"--runs: is given twice: give it to submit or to {arguments[0]}")
        if root is not None:
            root = root.rstrip("/") if is_uri(root) else str(Path(root).absolute())
        job = job_of(arguments, experiment, root)
        raise click.exceptions.Exit(run_submit(job, Path(folder), follow, click.echo))


def job_of(arguments: Sequence[str], experiment: str | None, root: str | None) -> Job:
    """The job of a packaged command, with a name that no other job has, and what is known of its run.

    `experiment`: the name of the one that it is given. `root`: the root of all runs; without it the job uses the cluster's own
    RAYDISTILL_RUNS, unless the command has one.
    """
    command = arguments[0]
    given = {option: arguments[arguments.index(option) + 1] for option in ("--out", "--runs") if option in arguments}
    title, env_vars = experiment or command, {} if root is None else {"RAYDISTILL_RUNS": root}
    name = f"{title}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    metadata = {"job_name": title, "command": command} | ({"experiment": experiment} if experiment else {})
    folder = arguments[1] if command == "resume" else given.get("--out")
    if folder is None and experiment is not None and command in ("train", "sweep"):
        metadata["run"] = env_vars[RUN_NAME] = name
        root = root or given.get("--runs")
        folder = root and f"{root}/{name}"
    if folder is not None:
        folder = folder.rstrip("/")
        metadata |= {"run": folder.rpartition("/")[2], "folder": folder, "page": f"{folder}/report.html"}
    return Job(name, tuple(arguments), metadata, env_vars)


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
    job = JobFiles(folder, context.params)
    arguments, options = [words[0]], list[str]()
    for parameter in command.params:
        if context.get_parameter_source(parameter.name or "") is not ParameterSource.COMMANDLINE:
            continue
        value, texts = context.params[parameter.name or ""], list[str]()
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Path):
                texts.append(uri_of(each) or absolute_or_new(str(each)))
            else:
                texts += parameter.type.in_job(each, job) if isinstance(parameter.type, JobText) else [str(each)]
        if isinstance(parameter, click.Argument):
            arguments += texts
        elif isinstance(parameter, click.Option) and parameter.is_flag:
            options += parameter.opts[:1]
        else:
            options += [word for text in texts for word in (parameter.opts[0], text)]
    return [*arguments, *options], next(iter(job.experiments), None)
