"""Independent pieces of work over the cores of this machine, or over the nodes of the Ray cluster that RAY_ADDRESS names."""

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
    """A progress bar on a terminal, nothing elsewhere; yields what advances it."""
    from rich.progress import MofNCompleteColumn, Progress, TextColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TextColumn(unit), *Progress.get_default_columns()[3:])
    # No thread of its own: the processes that do the work are forked while the bar is shown.
    with Progress(*columns, transient=True, auto_refresh=False, disable=not sys.stdout.isatty()) as shown:
        task = shown.add_task(title, total=total)
        yield lambda count: shown.update(task, advance=count, refresh=True)


def parallel_map(
    function: Callable[..., Result], arguments: Sequence[tuple[Any, ...]], processes: int, shared: Path
) -> Iterator[Result]:
    """`function` of each of the arguments, in their order, by `processes` processes here, or by the cluster's CPUs.

    Where `function` raises, so does this, and the other calls end; DistillError where a process or a node dies. `shared` is a
    folder that all nodes have to see.
    """
    if not is_local():
        yield from _over_cluster(function, arguments, shared)
    elif min(processes, len(arguments)) < 2:
        yield from (function(*each) for each in arguments)
    else:
        yield from _over_cores(function, arguments, min(processes, len(arguments)))


def _over_cores(function: Callable[..., Result], arguments: Sequence[tuple[Any, ...]], processes: int) -> Iterator[Result]:
    # Forked where that is safe: the pool forks all its processes before it starts a thread, and each begins at once instead of
    # after a second of imports.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_follow_parent)
    try:
        # Not `pool.map`: it cancels what waits as an exception passes, and Python 3.11's thread of a pool whose processes are
        # ended then dies with a stack trace of its own, where it sets the exception of a cancelled future.
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
    """Leave Ctrl-C to the parent, and end where it ends, even if it is killed."""
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
            except ray.exceptions.RayError as error:  # after Ray's own retries: a node died, or had no memory left
                cause = getattr(error, "cause", None)
                if isinstance(cause, DistillError | OSError):
                    raise cause from None
                if isinstance(error, ray.exceptions.RayTaskError):
                    raise
                raise DistillError(
                    f"a process or a node of the cluster was lost ({type(error).__name__}), probably out of memory; "
                    "repeat the command to continue"
                ) from None
