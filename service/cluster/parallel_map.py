"""Runs independent tasks on the cores of this machine, or on the Ray cluster of RAY_ADDRESS."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

from service.cluster.connect import connect
from service.cluster.resources import is_local
from trainables.errors import DistillError

Result = TypeVar("Result")


@contextlib.contextmanager
def bar(title: str, unit: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal, and nothing elsewhere. Yields a function that advances it."""
    from rich.progress import MofNCompleteColumn, Progress, TextColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TextColumn(unit), *Progress.get_default_columns()[3:])
    # No refresh thread, since worker processes are forked while the bar is shown.
    with Progress(*columns, transient=True, auto_refresh=False, disable=not sys.stdout.isatty()) as shown:
        task = shown.add_task(title, total=total)
        yield lambda count: shown.update(task, advance=count, refresh=True)


def parallel_map(
    function: Callable[..., Result], arguments: Sequence[tuple[Any, ...]], processes: int, shared: Path
) -> Iterator[Result]:
    """Yield `function` of each of the arguments, in order, computed by local processes or on the cluster's CPUs.

    `shared` is a folder that all nodes must share. Raises what `function` raises, after ending the other calls, or
    DistillError if a process or node dies.
    """
    if not is_local():
        yield from _over_cluster(function, arguments, shared)
    elif min(processes, len(arguments)) < 2:
        yield from (function(*each) for each in arguments)
    else:
        yield from _over_cores(function, arguments, min(processes, len(arguments)))


def _over_cores(function: Callable[..., Result], arguments: Sequence[tuple[Any, ...]], processes: int) -> Iterator[Result]:
    # Fork where it is safe: the pool forks all processes before it starts a thread, and this saves each a second of imports.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_follow_parent)
    try:
        # Not `pool.map`, which cancels pending futures after an exception: when the processes are then killed, the pool's thread
        # in Python 3.11 sets the exception of a cancelled future, and dies with a stack trace.
        for future in [pool.submit(function, *each) for each in arguments]:
            yield future.result()
    except BrokenProcessPool:
        raise DistillError(
            "a process was killed, probably out of memory; repeat the command with fewer --processes to continue"
        ) from None
    except BaseException:
        for child in {*multiprocessing.active_children()} - {*others}:
            child.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _follow_parent() -> None:
    """Leave Ctrl-C to the parent, and end when the parent ends, even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _over_cluster(function: Callable[..., Result], arguments: Sequence[tuple[Any, ...]], shared: Path) -> Iterator[Result]:
    with connect(1, shared, instead="name a folder that all nodes share, or unset RAY_ADDRESS to use this machine"):
        import ray

        task = ray.remote(function).options(num_cpus=1, scheduling_strategy="SPREAD")
        for pending in [task.remote(*each) for each in arguments]:
            try:
                yield ray.get(pending)
            except ray.exceptions.RayError as error:  # after Ray's own retries
                cause = getattr(error, "cause", None)
                if isinstance(cause, DistillError | OSError):
                    raise cause from None
                if isinstance(error, ray.exceptions.RayTaskError):
                    raise
                raise DistillError(
                    f"a process or a node of the cluster was lost ({type(error).__name__}), probably out of memory; "
                    "repeat the command to continue"
                ) from None
