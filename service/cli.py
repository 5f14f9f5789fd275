"""The `distill` command: parse, build, call, print. Heavy imports wait until a command needs them."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from service.cluster import ray_thread as work
from trainables.errors import DistillError, bounded
from trainables.rundir import expanded

if TYPE_CHECKING:
    from service.config.experiment import Resolved


def default_runs_root() -> Path:
    """`RAYDISTILL_RUNS`, else `runs/` here; inside a Ray job, whose working directory is thrown away, `~/runs`."""
    if named := os.environ.get("RAYDISTILL_RUNS"):
        return expanded(named).absolute()
    here = Path.cwd()
    return Path.home() / "runs" if "runtime_resources" in here.parts else here / "runs"


SET = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one value, such as data.global_batch_size=256."
)
OUT = click.option("--out", type=click.Path(path_type=Path), help="Run directory; default: ROOT/<name>-<time>.")
RUNS = click.option(
    "--runs", "root", type=click.Path(path_type=Path), default=default_runs_root, show_default="RAYDISTILL_RUNS or runs/",
    help="Root of all runs and of their MLflow store.",
)  # fmt: skip
RECIPE = click.argument("recipe_or_file")
DIR = click.argument("directory", type=click.Path(path_type=Path))

PROCESSES = click.option(
    "--processes", type=click.IntRange(min=1), help="Processes on this machine; default: one a core. The result is the same."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="raydistill")
def cli() -> None:
    """Find out how to run a knowledge-distillation job on the GPUs at hand, and run it."""


@cli.command()
@RECIPE
@SET
@OUT
@RUNS
def train(recipe_or_file: str, overrides: tuple[str, ...], out: Path | None, root: Path) -> None:
    """Train the teacher if it has no weights, then distil the student."""
    from service.config.experiment import load

    start("train", load(recipe_or_file, overrides), out, root)


@cli.command()
@RECIPE
@SET
@OUT
@RUNS
def sweep(recipe_or_file: str, overrides: tuple[str, ...], out: Path | None, root: Path) -> None:
    """Search over GPUs × batch × loader workers, or whatever sweep.space names."""
    from service.config.experiment import load

    start("sweep", load(recipe_or_file, overrides), out, root)


def start(kind: Any, resolved: Resolved, out: Path | None, root: Path) -> None:
    """Check, open a run directory and carry out."""
    from service.runs.preflight import check_train
    from service.runs.run_directory import begin, check_writable, new_run_dir
    from service.sweeps.preflight import check_sweep

    check_writable(root, out)
    (check_train if kind == "train" else check_sweep)(resolved)
    run_dir = new_run_dir(root, resolved.experiment.name, out)
    begin(resolved, kind, run_dir, root)
    carry_on(kind, resolved, run_dir, root)


def carry_on(kind: str, resolved: Resolved, run_dir: Any, root: Path) -> None:
    """Carry out, or continue, what a run directory describes; say where things are."""
    from service.cluster.local_ray import RayLostError
    from service.config.uris import without_password
    from service.report import reporter
    from service.runs.train import train as run_train
    from service.sweeps.sweep import sweep as run_sweep
    from service.tracking import compare_url
    from trainables.errors import ClusterError

    try:
        result = (run_train if kind == "train" else run_sweep)(resolved, run_dir, reporter)
    except KeyboardInterrupt:
        click.echo(f"interrupted; continue with: distill resume {run_dir.root}", err=True)
        raise
    except RayLostError as error:
        raise ClusterError(f"{error}; continue with `distill resume {run_dir.root}`") from error
    click.echo(f"result: {run_dir.result}")
    if run_dir.report.exists():
        click.echo(f"page: {run_dir.report}")
    if result.mlflow:
        click.echo(f"records: {without_password(result.mlflow.uri)}")
        click.echo(f"open them with: distill ui --runs {root}")
        keys = [f"trial/{row.id}" for row in result.rows if row.status == "ok"]
        if link := compare_url(run_dir, keys):
            click.echo(f"then compare the trials at: {link}")


@cli.command()
@DIR
def resume(directory: Path) -> None:
    """Continue an interrupted run or sweep: nothing is lost, nothing is run twice."""
    from service.runs.preflight import check_checkpoints, check_train
    from service.runs.run_directory import reopen
    from service.sweeps.preflight import check_sweep

    resolved, run_dir, result = reopen(directory, to_continue=True)
    if result.status == "complete":
        click.echo(f"{directory} is complete; its tables: distill report {directory}")
        return
    check_checkpoints(run_dir)
    (check_train if result.kind == "train" else check_sweep)(resolved)
    carry_on(result.kind, resolved, run_dir, Path(result.runs_root))


@cli.command()
@RECIPE
@SET
@RUNS
def cache(recipe_or_file: str, overrides: tuple[str, ...], root: Path) -> None:
    """Fill teacher.cache: the teacher's logits for all epochs of an experiment. Interrupted, the same command goes on."""
    from service.config.experiment import load
    from service.runs.teacher_cache import fill

    click.echo(fill(load(recipe_or_file, overrides), root))


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--data", "data_path", required=True, help="As data.path: digits, synthetic, a packed set, an image folder.")
@SET
@RUNS
def evaluate(checkpoint: Path, data_path: str, overrides: tuple[str, ...], root: Path) -> None:
    """Exact accuracy of a checkpoint on a validation split, distributed."""
    from service.runs.evaluate import evaluate as run_evaluate

    result = run_evaluate(checkpoint, data_path, list(overrides), root)
    click.echo(
        f"Acc@1 {result['top1_pct']:.3f}  Acc@5 {result['top5_pct']:.3f}  loss {result['loss']:.5f}  "
        f"({result['num_images']:.0f} images, {result['skipped_images']:.0f} unreadable)"
    )
    for image in sorted(result["skipped"]):
        click.echo(f"skipped {image}")


@cli.command()
@click.argument("table")
@click.option("--pairs", help="Teacher–student pairs with commas between them; default: all.")
@click.option("--methods", help="Columns of the table; `student` is the students alone; default: all.")
@click.option("--seeds", default="0,1,2", show_default=True)
@click.option("--data", "data_path", help="As data.path; default: the recipe's.")
@click.option(
    "--teachers", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Folder of published checkpoints."
)
@SET
@OUT
@RUNS
@click.option("--dry-run", is_flag=True, help="Print the plan and what there is of it in --out.")
@click.option("--images-per-s", type=click.FloatRange(min=0, min_open=True), help="A training speed, for the plan's hours.")
def reproduce(
    table: str,
    pairs: str | None,
    methods: str | None,
    seeds: str,
    data_path: str | None,
    teachers: Path | None,
    overrides: tuple[str, ...],
    out: Path | None,
    root: Path,
    dry_run: bool,
    images_per_s: float | None,
) -> None:
    """Run a TABLE of published accuracies (cifar100, imagenet, or a file) and compare; given again with --out it goes on."""
    from service.cluster.local_ray import RayLostError
    from service.reproduce import plan
    from service.reproduce import run_table as carry
    from service.reproduce import terminal as telling
    from service.reproduce.table import read_table
    from service.runs.display import output
    from service.runs.run_directory import check_writable, new_run_dir
    from trainables.errors import ClusterError

    published = read_table(table)
    request = plan.Request.of(published, pairs, methods, seeds)
    changed = plan.changes(overrides)
    parts = plan.compose(published, request, overrides, data_path, teachers)
    check_writable(root, out)
    stem = f"reproduce-{Path(table).stem}"
    job = carry.Reproduction(published, request, parts, changed, (out or root / stem).absolute(), root)
    carry.check_same(job)
    console = output()
    console.print(telling.plan_grid(job))
    console.print(telling.plan_line(job, carry.seconds_left(job, images_per_s)), soft_wrap=True)
    failed = []
    if not dry_run:
        carry.prepare(job)
        out = new_run_dir(root, stem, out).root
    if out is not None:
        job = carry.Reproduction(published, request, parts, (*changed, *carry.size_differences(job)), out.absolute(), root)
    if not dry_run:
        try:
            failed = carry.carry_out(job, click.echo)
        except KeyboardInterrupt:
            click.echo(f"interrupted; the same command with --out {out} goes on", err=True)
            raise
        except RayLostError as error:
            raise ClusterError(f"{error}; the same command with --out {out} goes on") from error
        click.echo(f"result: {carry.write_result(job, table)}")
    if out is not None:
        found = carry.cells(job)
        console.print(telling.teachers_grid(published, carry.teachers(job)))
        console.print(telling.cells_grid(published, found, job.changed))
        console.print(telling.summary(found), soft_wrap=True)
    if failed:
        from trainables.errors import TrainingError

        raise TrainingError("\n".join(failed))


@cli.command()
@DIR
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Where the page goes; default: DIR/report.html.")
@click.option("--watch", is_flag=True, help="Follow a run: tables and page are renewed until it ends.")
def report(directory: Path, html: Path | None, watch: bool) -> None:
    """Tables of a finished or running run or sweep, and one HTML page with figures: DIR/report.html."""
    from service.report.page import write_page
    from service.report.tables import report_of
    from service.runs.display import output
    from service.runs.run_directory import reopen

    console = output()
    if watch:
        from service.report.watch import watch as follow

        run_dir, result = follow(directory, console, html)
    else:
        resolved, run_dir, result = reopen(directory)
        for key in resolved.unknown:
            click.echo(f"{run_dir.experiment}: {key}: no such key in this version, left out here")
    for part in report_of(result, run_dir):
        console.print(part, soft_wrap=isinstance(part, str))
    click.echo(f"page: {write_page(run_dir, result, html)}")


@cli.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Also write the comparison as a page here.")
def compare(a: Path, b: Path, html: Path | None) -> None:
    """Two sweeps or runs side by side: the best of each, speed at common points, what differs in the experiments."""
    from service.report.compare import compare as run_compare
    from service.report.comparison import said, write_comparison
    from service.report.run_records import open_records
    from service.runs.display import output

    comparison = run_compare(open_records(a), open_records(b))
    console = output()
    for part in said(comparison):
        console.print(part, soft_wrap=isinstance(part, str))
    if html:
        write_comparison(comparison, html)
        click.echo(f"page: {html}")


@cli.command()
@click.argument("directory_or_recipe", metavar="DIR_OR_RECIPE")
@SET
@RUNS
def doctor(directory_or_recipe: str, overrides: tuple[str, ...], root: Path) -> None:
    """Where a step's time goes and what to change: of a run or sweep by its records, of a recipe by a short timing run."""
    from service.config.experiment import load
    from service.doctor.read_run import read_run
    from service.doctor.terminal_lines import tell
    from service.runs.display import output

    if Path(directory_or_recipe).is_dir():
        from service.runs.run_directory import reopen

        if overrides:
            raise click.UsageError("--set: changes a recipe; what a directory's run was told stands in its experiment.yaml")
        cases = read_run(*reopen(Path(directory_or_recipe)))
    else:
        resolved = load(directory_or_recipe, overrides)
        from service.doctor.probe import probe

        cases = probe(resolved, root)
    console = output()
    for line in tell(cases):
        console.print(line, soft_wrap=True)


@cli.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--follow", is_flag=True, help="Stream the job's log and exit with its exit code.")
@RUNS
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def submit(follow: bool, root: Path, command: tuple[str, ...]) -> None:
    """Run any of the above as a Ray job: distill submit --follow train digits."""
    from service.cluster.jobs import submit as run_submit

    raise click.exceptions.Exit(run_submit(command, root, follow, click.echo))


@cli.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("dest", type=click.Path(path_type=Path))
@click.option("--max-side", type=click.IntRange(min=1), help="Make larger images smaller: JPEGs of so many pixels a side.")
@click.option("--quality", type=click.IntRange(1, 100), default=90, show_default=True, help="Of the JPEGs that --max-side makes.")
@click.option("--raw", type=click.IntRange(min=1), help="Store pixels, the shorter side at most so many.")
@click.option("--check", is_flag=True, help="Decode every image: also finds damage that neither header nor end show.")
@click.option("--strict", is_flag=True, help="Unreadable images are an error; otherwise they are left out and listed.")
@PROCESSES
def pack(
    source: Path,
    dest: Path,
    max_side: int | None,
    quality: int,
    raw: int | None,
    check: bool,
    strict: bool,
    processes: int | None,
) -> None:
    """Put a data set into a few large files, for data.path: an image folder, LMDB, tars, TFRecords, Parquet, CIFAR's binaries.

    A killed `pack` goes on where it was when it is called again. With RAY_ADDRESS set it spreads over the cluster.
    """
    from service.cluster.resources import real_cpus
    from service.runs.pack import pack as run_pack
    from service.runs.pack import said
    from trainables.data.pack.modes import Mode

    if max_side is not None and raw is not None:
        raise click.UsageError("--max-side and --raw: give one of them")
    mode = Mode(max_side, quality, raw)
    try:
        packing = run_pack(source, dest, mode, check=check, strict=strict, processes=processes or real_cpus())
    except KeyboardInterrupt:
        click.echo("interrupted; the same command goes on where it was", err=True)
        raise
    click.echo(said(dest, packing))


@cli.command()
@DIR
@click.option("--verify", is_flag=True, help="Read everything and compare every checksum.")
@click.option("--sheet", type=click.Path(path_type=Path, dir_okay=False), help="Write a PNG of pictures here.")
@PROCESSES
def data(directory: Path, verify: bool, sheet: Path | None, processes: int | None) -> None:
    """What a packed set holds: counts, classes, sizes, shapes, pictures."""
    from service.cluster.resources import real_cpus
    from service.report.contact_sheet import describe, write_sheet
    from service.runs.display import output
    from service.runs.pack import verify as run_verify
    from trainables.data.index import read_index

    directory = expanded(directory).resolve()
    index = read_index(directory)
    console = output()
    for part in describe(directory, index):
        console.print(part, soft_wrap=isinstance(part, str))
    if sheet:
        click.echo(f"{write_sheet(directory, sheet)} pictures: {sheet}")
    if verify:
        run_verify(directory, index, processes or real_cpus())
        click.echo(f"every checksum of {len(index.files())} files is right")


@cli.command()
@click.argument("model")
@click.option("--image-size", type=click.IntRange(1, 4096), help="Pixels a side; default: 32 for our models, 224 for the others.")
@click.option("--num-classes", type=click.IntRange(1, 10**7), default=10, show_default=True)
@click.option("--all", "every", is_flag=True, help="Every module's output too, not stages alone.")
def taps(model: str, image_size: int | None, num_classes: int, every: bool) -> None:
    """Points of a model that a distillation method can read: their names and shapes."""
    from service.report.tap_list import points_table
    from service.runs.display import output
    from trainables.models.names import check_model_name

    size = image_size or (32 if check_model_name(model).library == "ours" else 224)
    output().print(points_table(model, size, num_classes, every))


@cli.command("methods")
@click.argument("name", required=False)
def list_methods(name: str | None) -> None:
    """The ways to distil: what each adds to the loss, its default weights, where it reads the models.

    With NAME, as in distill.method or FILE.py:CLASS, all about this one, with its options.
    """
    from service.report.method_table import method_parts, method_table
    from service.runs.display import output

    console = output()
    for part in (method_table(),) if name is None else method_parts(name):
        console.print(part, soft_wrap=isinstance(part, str))


@cli.command("check-method")
@click.argument("name")
@click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help="One of the method's options; may be repeated.")
@click.option("--student", default="resnet8", show_default=True)
@click.option("--teacher", default="resnet14", show_default=True)
@click.option("--image-size", type=click.IntRange(1, 4096), default=16, show_default=True, help="Pixels a side.")
def check_method(name: str, options: tuple[str, ...], student: str, teacher: str, image_size: int) -> None:
    """Whether a method keeps the contract: NAME as in distill.method, or FILE.py:CLASS.

    \b
    Example:  distill check-method mine.py:Margin --option weight=2
    """
    from service.config.experiment import parse_override
    from service.config.method_rules import check_options
    from trainables.distributed.rank_pool import Ranks
    from trainables.engine.check_method import Case, check
    from trainables.errors import ExperimentError, ModelError
    from trainables.models.names import check_model_name

    given = dict(parse_override(option, "--option") for option in options)
    check_options(name, given, "--option", {}, missing="give --option {name}=…")
    for option, model in (("--student", student), ("--teacher", teacher)):
        try:
            check_model_name(model)
        except ModelError as error:
            raise ExperimentError(f"{option}: {error}") from error
    num_broken = 0
    with contextlib.closing(Ranks()) as ranks:
        for title, problem in check(Case(name, given, student, teacher, image_size), ranks.run):
            click.secho("failed" if problem else "    ok", fg="red" if problem else "green", nl=False)
            click.echo(f"  {title}" + (f": {problem}" if problem else ""))
            num_broken += bool(problem)
    if num_broken:
        raise ExperimentError(f"{name} does not keep the contract of a method in {num_broken} of the points above")


@cli.command("recipes")
def list_recipes() -> None:
    """The experiments that ship with raydistill."""
    from service.config.experiment import recipes

    width = max(map(len, recipes()))
    for name, text in recipes().items():
        click.echo(f"{name:{width}}  {text}")


@cli.command()
@RECIPE
@SET
def show(recipe_or_file: str, overrides: tuple[str, ...]) -> None:
    """The resolved experiment, each value with where it comes from."""
    import json

    from service.config.dotted import flatten
    from service.config.experiment import load

    resolved = load(recipe_or_file, overrides)
    flat = flatten(resolved.experiment.model_dump(mode="json"))
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat.items()}
    left, middle = max(map(len, texts)), min(60, max(map(len, texts.values())))
    for key, text in texts.items():
        parts = key.split(".")
        source = next((s for s in (resolved.sources.get(".".join(parts[:n])) for n in range(len(parts), 0, -1)) if s), "default")
        click.echo(f"{key:{left}}  {text:{middle}}  # {source}")


@cli.command()
@RUNS
@click.option("--host", default="127.0.0.1", show_default=True, help="Anything but loopback shows your records to the network.")
@click.option("--port", type=click.IntRange(1, 65535), default=5000, show_default=True)
def ui(root: Path, host: str, port: int) -> None:
    """MLflow's UI on the records under the runs' root."""
    from service.runs.run_directory import check_writable
    from service.tracking import NO_TELEMETRY, ui_command
    from trainables.errors import ClusterError

    check_writable(root, None)
    try:  # MLflow itself would try for ever, and its address show what another server has
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        # Of a host's name the reason is the resolver's own, and Python appends the address to it.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror).partition(" (while ")[0]
        raise ClusterError(f"{host}:{port} cannot be listened on ({reason}): give another --port, or --host") from error
    # MLflow 3.17 opens as a tool for language models unless the address says otherwise.
    click.echo(f"MLflow on {root}: http://{host}:{port}/#/experiments?workflowType=machine_learning (Ctrl-C ends it)")
    done = subprocess.run(ui_command(root, host, port), env={**os.environ, **NO_TELEMETRY}, check=False)
    raise click.exceptions.Exit(done.returncode)


@cli.command()
@DIR
def sync(directory: Path) -> None:
    """Send to MLflow what it has not taken yet."""
    from service.runs.run_directory import reopen
    from service.tracking import sync as run_sync

    _, run_dir, _ = reopen(directory)
    delivery = run_sync(run_dir)
    click.echo(delivery.message)
    if delivery.num_pending:
        raise click.exceptions.Exit(1)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point. Errors that a user can cause end in at most six lines and exit code 2; Ctrl-C and SIGTERM in 130.

    Any other error is a mistake of ours: exit code 1, and its stack trace in a file.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = cli.main(arguments, standalone_mode=False) or 0
    except click.ClickException as error:
        text = io.StringIO()
        error.show(text)
        print(bounded(text.getvalue()), end="", file=sys.stderr)
        code = 2
    except DistillError as error:
        lines = str(error).splitlines()[:6]
        print("\n".join(["error: " + lines[0], *lines[1:]]), file=sys.stderr)
        code = 2
    except (KeyboardInterrupt, click.exceptions.Abort):
        code = 130
    except SystemExit as leave:  # of no command of ours: they end with click's Exit
        if is_output_unread():  # click's own
            code = 1
        else:
            print(f"error: code that this command has loaded called sys.exit({leave.code!r})", file=sys.stderr)
            code = 2
    except BrokenPipeError:  # whoever read the output has gone
        code = 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        command = next(iter(sys.argv[1:] if arguments is None else arguments), "")
        then = "then `distill resume` goes on" if command in ("train", "sweep", "resume") else "then give the command again"
        print(bounded(f"error: {where}{error.strerror or error}; mend that, {then}"), file=sys.stderr)
        code = 2
    except Exception as error:
        print(f"error: unexpected {type(error).__name__}; its stack trace is in {keep_trace(error)}", file=sys.stderr)
        code = 1
    try:
        sys.stdout.flush()
    except OSError:  # the interpreter would say so once more, with a stack trace
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    work.leave(code)


def is_output_unread() -> bool:
    """Whether the standard output is a pipe whose reader has gone, as in `distill show digits | head -1`."""
    output = select.poll()
    output.register(1, 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def keep_trace(error: Exception) -> str:
    """The file that tells how an error came about which no check foresaw."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="raydistill-", suffix=".log", delete=False) as file:
        traceback.print_exception(error, file=file)
    return file.name
