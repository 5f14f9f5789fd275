"""`train`, `sweep`, `resume` and `cache`: what carries out an experiment."""

from pathlib import Path
from typing import Any

import click

from service.cluster.local_ray import RayLostError
from service.cluster.resources import is_local, local_capacity
from service.commands.options import DIR, OUT, RECIPE, RUNS, RUNS_OR_URI, SET, PathType, check_given, experiment_file, is_given
from service.config.experiment import Resolved, load
from service.config.files import recipes
from service.config.paths import absolute_or_new
from service.runs.dry_run import training_lengths
from service.runs.method_copies import changed_methods
from service.runs.plan import Plan
from service.runs.preflight import check_checkpoints, check_data_of_run, check_train
from service.runs.result import Kind, RunResult
from service.runs.run_directory import (
    begin_run,
    check_same,
    check_writable,
    has_begun,
    locked_run,
    new_run_dir,
    reopen,
    runs_root_of,
)
from service.runs.stored.stored_runs import NOT_PUT, display_name, fetch_records, shell_name, uri_of
from service.runs.stored.stored_session import stored_session
from service.runs.teacher_cache import fill_cache
from service.runs.train import train as run_train
from service.sweeps.preflight import check_sweep
from service.sweeps.trials import has_trials_to_retry, plan_trials
from service.tracking.stores import compare_urls, default_uri
from trainables.config import DataIdentity
from trainables.errors import ClusterError, ExperimentError, first_three
from trainables.notices import notices_to
from trainables.redact import redact
from trainables.rundir import RunDir

CONTINUE = click.option(
    "--continue", "continues", is_flag=True, help="Resume the run of --out if there is one: for schedulers that restart commands."
)
ACCEPT_NEW_DATA = click.option(
    "--accept-new-data", is_flag=True, help="Resume although the data has changed: repeat the unfinished epoch on the new data."
)


def begins(kind: Kind, help_text: str) -> click.Command:
    """The command that begins a run of this kind."""

    @click.command(kind, help=help_text)
    @RECIPE
    @SET
    @OUT
    @CONTINUE
    @ACCEPT_NEW_DATA
    @click.option("--dry-run", is_flag=True, help="Check data, models and settings, say what would run, and stop.")
    @RUNS_OR_URI
    def command(recipe_or_file: str, overrides: tuple[str, ...], dry_run: bool, **options: Any) -> None:
        check_given("--continue needs --out", "--accept-new-data needs --continue", "--dry-run excludes --continue")
        resolved = load(experiment_file(recipe_or_file), overrides)
        if dry_run:
            preview(kind, recipe_or_file, resolved, options["root"], options["out"])
        else:
            start_run(kind, resolved, **options)

    return command


train = begins("train", "Train the teacher if it has no weights, then distil the student.")
sweep = begins("sweep", "Search over GPUs × batch × loader workers, or whatever sweep.space names.")


@click.command()
@DIR
@ACCEPT_NEW_DATA
def resume(directory: Path, accept_new_data: bool) -> None:
    """Continue an interrupted run or sweep: nothing is lost, nothing is run twice."""
    resume_run(directory, accept_new_data=accept_new_data)


def resume_run(directory: Path, *, accept_new_data: bool) -> None:
    saved, run_dir, result = reopen(directory)
    if result.status == "complete" and not has_trials_to_retry(saved.experiment, result.rows):
        if (run_dir.root / NOT_PUT).exists():
            with locked_run(run_dir), stored_session(run_dir, click.echo):
                pass  # it puts what the driver could not
        click.echo(f"{display_name(directory)} is complete; its tables: distill report {shell_name(directory)}")
        return
    resolved, run_dir, result = reopen(directory, to_continue=True)
    for line in changed_methods(run_dir):
        click.echo(line)
    check_checkpoints(run_dir, result)
    # Whatever its MLflow says: a run that has begun keeps its own, and its records wait on disk.
    _, data = check_inputs(result.kind, resolved.override({"tracking.enabled": False}, "resume"))
    check_data_of_run(display_name(directory), resolved.experiment, result, data, accept_new=accept_new_data)
    run_to_the_end(result.kind, resolved, run_dir, runs_root_of(result), data)


@click.command()
@RECIPE
@SET
@RUNS
@click.option(
    "--publish",
    type=PathType(file_okay=False),
    help="Fill DIR in place of teacher.cache, and add what others need to read it: a reinforced data set.",
    metavar="DIR",
)
def cache(recipe_or_file: str, overrides: tuple[str, ...], root: Path, publish: Path | None) -> None:
    """Fill teacher.cache: the teacher's outputs for all epochs of an experiment. If interrupted, repeat the command."""
    resolved = load(recipe_or_file, overrides)
    if publish is not None:
        publish = Path(absolute_or_new(str(publish)))
        if not resolved.experiment.teachers:
            resolved = resolved.override({"teacher.cache": str(publish)}, "--publish")
    click.echo(fill_cache(resolved, root, publish))


def start_run(kind: Kind, resolved: Resolved, *, out: Path | None, root: Path, continues: bool, accept_new_data: bool) -> None:
    """Create the run directory of an experiment, and run it; `continues`: or resume the same run in `out`."""
    if out is not None:
        if uri_of(out):
            if is_given("root") and root != out.parent:
                raise ExperimentError(f"--runs: the root of {display_name(out)} is {display_name(out.parent)}: leave it out")
            root = out.parent
        fetch_records(out)
    if continues and out is not None and has_begun(out):
        check_same(kind, resolved, out)
        resume_run(out, accept_new_data=accept_new_data)
        return
    check_writable(root, out, begun_ok=continues)
    notices: list[str] = []
    with notices_to(notices.append):
        resolved, data = check_inputs(kind, resolved)
    run_dir = new_run_dir(root, resolved.experiment.name, out)
    begin_run(resolved, kind, run_dir, root, notices)
    run_to_the_end(kind, resolved, run_dir, root, data)


def preview(kind: Kind, recipe_or_file: str, resolved: Resolved, root: Path, out: Path | None) -> None:
    """Check an experiment as a run of it begins, and print what would run; nothing is written."""
    check_writable(root, out)
    resolved, data = check_inputs(kind, resolved)
    experiment = resolved.experiment
    if data is not None:
        classes = f", {len(data.classes)} classes: {first_three(data.classes)}" if data.classes else ""
        click.echo(f"data: {data.train.num_images:,} training and {data.val.num_images:,} validation images{classes}")
    if description := recipes().get(recipe_or_file):
        click.echo(f"recipe: {description}")
    if kind == "sweep":
        sweep, trials = experiment.sweep, plan_trials(resolved)
        epochs = sum(trial.resolved.experiment.optim.epochs for trial in trials if trial.resolved is not None)
        limits = [f"{epochs:,} epochs in all" if sweep.timing_steps is None else f"{sweep.timing_steps:,} timed steps each"]
        if sweep.policy == "guided" and sweep.budget_gpu_h is not None:
            limits.append(f"{sweep.budget_gpu_h:g} GPU-hours in all")
        at_most = "".join(f", at most {limit}" for limit in limits)
        click.echo(f"trials: {len(trials)} by {sweep.metric}, policy {sweep.policy}{at_most}")
    stages = [(name, experiment.stage(name, Path("/"), {}).model) for name in (*experiment.preparation, "student")]
    click.echo("stages: " + ", ".join(f"{name} ({model})" for name, model in stages))
    for line in training_lengths(experiment) if kind == "train" else ():
        click.echo(line)
    if is_local() and kind == "train":
        capacity = local_capacity()
        click.echo(f"on: {Plan.on(experiment, capacity).describe(capacity)}")
    click.echo("dry run: nothing was run or written")


def check_inputs(kind: Kind, resolved: Resolved) -> tuple[Resolved, DataIdentity | None]:
    """Refuse what can be refused before Ray starts.

    Returns the experiment with its `teacher.finetune`, and what the data is, unless a sweep searches over it.
    """
    return (check_train if kind == "train" else check_sweep)(resolved)


def run_to_the_end(kind: Kind, resolved: Resolved, run_dir: RunDir, root: Path, data: DataIdentity | None) -> None:
    """Run, or continue, the experiment of a run directory; print where its results are."""
    # They import plotly and scipy, which are not needed to refuse an experiment.
    from service.report import end_of_run
    from service.sweeps.batch_size import with_batch_size
    from service.sweeps.sweep import sweep as run_sweep

    try:
        if kind == "train":
            resolved = with_batch_size(resolved, run_dir, end_of_run, data)
        result = (run_train if kind == "train" else run_sweep)(resolved, run_dir, end_of_run, data)
    except KeyboardInterrupt:
        click.echo(f"interrupted; continue with: distill resume {shell_name(run_dir.root)}", err=True)
        raise
    except RayLostError as error:
        raise ClusterError(f"{error}; continue with `distill resume {shell_name(run_dir.root)}`") from error
    click.echo(f"result: {display_name(run_dir.result)}")
    if run_dir.report.exists():
        click.echo(f"page: {display_name(run_dir.report)}")
    for line in record_lines(run_dir, result, root):
        click.echo(line)


def record_lines(run_dir: RunDir, result: RunResult, root: Path) -> list[str]:
    """Where the records of a run are in MLflow, and how to look at them: a server shows its own."""
    if result.mlflow is None:
        return []
    uri = redact(result.mlflow.uri)
    lines = [f"records: {uri}"]
    if uri.startswith("databricks"):  # whose pages have addresses of their own
        return lines
    if uri.startswith("http"):
        links, then = compare_urls(run_dir, uri), ""
    else:
        is_ours = uri == default_uri(runs_root_of(result))
        command = f"distill ui --runs {shell_name(root)}" if is_ours else f"mlflow server --backend-store-uri {uri}"
        lines.append(f"open them with: {command}")
        links, then = compare_urls(run_dir), "then "
    what = "trials" if result.kind == "sweep" else "runs"
    return [
        *lines,
        *(f"{words}: {link}" for words, link in zip((f"{then}compare the {what} at", "their charts"), links, strict=False)),
    ]
