"""The `distill` command. Each command is in a module of `service.commands`, which is imported when the command is used."""

import functools
import importlib
import io
import logging
import os
import select
import signal
import sys
import tempfile
import traceback
from typing import NoReturn

import click

from service.cluster import local_ray
from trainables.errors import DistillError, ExperimentError, bounded
from trainables.notices import notices_to
from trainables.redact import redact, redact_record

COMMANDS = {
    "bench-model": ("export:bench_model", "Latency, throughput, parameters and MACs of a model on this machine's CPU."),
    "cache": ("runs:cache", "Fill teacher.cache: the teacher's outputs for all epochs of an experiment."),
    "check-method": ("methods:check_method", "Whether a method keeps the contract: NAME as in distill.method, or FILE.py:CLASS."),
    "clean": ("clean:clean", "Remove old runs and caches that nothing needs."),
    "compare": ("reports:compare", "Two sweeps or runs side by side."),
    "data": ("data:data", "The content of a packed set: counts, classes, sizes, shapes, pictures."),
    "doctor": ("reports:doctor", "Where a step's time goes and what to change."),
    "embed": ("evaluate:embed", "A model's features of every image of a data set, in one file."),
    "evaluate": ("evaluate:evaluate", "Exact accuracy of a checkpoint, of any teacher's weights, or of a probe of its features."),
    "export": ("export:export", "A trained student for other programs: ONNX, torch.export, timm, torchvision, safetensors."),
    "methods": ("methods:list_methods", "The ways to distil."),
    "pack": ("data:pack", "Put a data set into a few large files, for data.path."),
    "recipes": ("experiments:list_recipes", "The experiments that ship with raydistill."),
    "report": ("reports:report", "Tables of a finished or running run or sweep, and one HTML page with figures."),
    "reproduce": ("reproduce:reproduce", "Run a TABLE of published accuracies."),
    "resume": ("runs:resume", "Continue an interrupted run or sweep: nothing is lost, nothing is run twice."),
    "show": ("experiments:show", "The resolved experiment, each value with where it comes from; --keys: every key."),
    "split": ("split:split", "Where the student is best cut into pipeline stages, by timing its parts on this machine."),
    "submit": ("submit:submit", "Run any other command as a Ray job: distill submit --follow train digits."),
    "sweep": ("runs:sweep", "Search over GPUs × batch × loader workers, or whatever sweep.space names."),
    "sync": ("tracking:sync", "Send MLflow the records that it does not have yet."),
    "taps": ("methods:taps", "Points of a model that a distillation method can read: their names and shapes."),
    "train": ("runs:train", "Train the teacher if it has no weights, then distil the student."),
    "ui": ("tracking:ui", "MLflow's UI on the records under the runs' root."),
}
"""Name of a command → `module:function` in `service.commands`, and its line in `distill --help`."""


CLOSED_PIPE = 128 + signal.SIGPIPE


class LazyGroup(click.Group):
    """Imports a command when it is used; the list of all commands needs none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(f"service.commands.{module}"), function)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="raydistill")
def cli() -> None:
    """Find out how to run a knowledge-distillation job on the GPUs at hand, and run it."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point. Errors that a user can cause end in at most six lines and exit code 2; Ctrl-C and SIGTERM in 130; a closed
    output in 141, silently, as where SIGPIPE ends a program.

    Any other error is a bug: exit code 1, and its stack trace in a file.
    """
    prepare_streams()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.register_at_fork(after_in_child=functools.partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))
    logging.getLogger("raydistill").addFilter(redact_record)
    try:
        check_current_folder()
        with notices_to(lambda line: print_error(f"note: {line}")):
            code = cli.main(arguments, standalone_mode=False) or 0
    except click.ClickException as error:
        text = io.StringIO()
        error.show(text)
        print_error(bounded(text.getvalue()).rstrip("\n"))
        code = 2
    except DistillError as error:
        lines = str(error).splitlines()[:6]
        print_error("\n".join(["error: " + lines[0], *lines[1:]]))
        code = 2
    except (KeyboardInterrupt, click.exceptions.Abort):
        code = 130
    except SystemExit as leave:  # of no command of ours: they end with click's Exit
        if is_output_unread():  # click's own
            code = CLOSED_PIPE
        else:
            print_error(f"error: code that this command has loaded called sys.exit({leave.code!r})")
            code = 2
    except BrokenPipeError:  # whoever read the output has gone
        code = CLOSED_PIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        command = next(iter(sys.argv[1:] if arguments is None else arguments), "")
        then = "then run `distill resume`" if command in ("train", "sweep", "resume") else "then repeat the command"
        print_error(bounded(f"error: {where}{error.strerror or error}; fix that, {then}"))
        code = 2
    except Exception as error:
        print_error(f"error: unexpected {type(error).__name__}; its stack trace is in {write_trace(error)}")
        code = 1
    try:
        sys.stdout.flush()
    except OSError:  # the interpreter would report it once more, with a stack trace
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    local_ray.exit_process(code)


def prepare_streams() -> None:
    """Open standard streams that are closed, and let those of every encoding take all characters.

    What an encoding lacks becomes an escape such as `\\u4e2d`.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed: the next file that is opened would be in its place
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free, which is this one
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115 (closed with the process)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not one that a caller in this process has put there
            stream.reconfigure(errors="backslashreplace")


def is_output_unread() -> bool:
    """Whether the standard output is a pipe whose reader has gone, as in `distill show digits | head -1`."""
    output = select.poll()
    output.register(1, 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def check_current_folder() -> None:
    """Raise ExperimentError: the shell's folder has been removed, perhaps to be created again, which the shell does not see."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ExperimentError("the current folder has been removed: cd to one that exists, then repeat the command") from None


def print_error(text: str) -> None:
    print(redact(text), file=sys.stderr)


def write_trace(error: Exception) -> str:
    """The file that has the stack trace of an error that no check foresaw."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="raydistill-", suffix=".log", delete=False) as file:
        file.write(redact("".join(traceback.format_exception(error))))
    return file.name
