"""CUDA graphs of a training step: the streams in which they run, and what memory they take."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol
from weakref import WeakSet

import torch


class Capture(Protocol):
    """Captures steps, and knows what memory its graphs take. Besides the stream of the step it has one that runs ahead of it."""

    def __call__(self, run: Callable[[], None], *, ahead: bool = False) -> Callable[[], None]:
        """Capture what a function launches, without running it; returns what launches it again.

        `ahead`: that is called within `ahead`, and has memory apart from the other graphs.
        """

    def ahead(self, *, overlap: bool) -> contextlib.AbstractContextManager[None]:
        """What is launched meanwhile runs in the stream ahead. It waits for all that the step's stream was given so far; with
        `overlap` for what it was given up to `release` alone, and so it may run beside the rest."""

    def join(self) -> None:
        """The step's stream waits for all that the stream ahead was given so far."""

    def release(self) -> None:
        """What the stream ahead has made was read: it may be overwritten once the step's stream has come as far as here."""

    @property
    def num_bytes(self) -> int:
        """The most memory of graphs so far, which torch's allocator counts as reserved, not as that of tensors."""

    def has_room(self, relative_batch: float) -> bool:
        """Whether there is memory beside the graphs for a step without one, of so many times the images of the largest."""


class CudaCapture:
    """Captures in this thread's stream, or in the one ahead."""

    def __init__(self, device: torch.device) -> None:
        """Until its end this thread's work is in a stream of its own: the default one cannot be captured, and autograd's nodes
        of parameters stay in the stream in which they are made. Call it before there are any.
        """
        self._stream, self._ahead = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        torch.cuda.set_stream(self._stream)
        self._device = device
        self._graphs, self._graphs_ahead = _Graphs(self._stream), _Graphs(self._ahead)
        self._released, self._joined = torch.cuda.Event(), torch.cuda.Event()
        self._most_bytes = 0

    def __call__(self, run: Callable[[], None], *, ahead: bool = False) -> Callable[[], None]:
        with self.ahead(overlap=False) if ahead else contextlib.nullcontext():
            graph = (self._graphs_ahead if ahead else self._graphs).capture(run)
        self._most_bytes = max(self._most_bytes, self._now_bytes)
        return graph.replay

    @contextlib.contextmanager
    def ahead(self, *, overlap: bool) -> Iterator[None]:
        if overlap:
            self._ahead.wait_event(self._released)
        else:
            self._ahead.wait_stream(self._stream)
        with torch.cuda.stream(self._ahead):
            yield

    def join(self) -> None:
        self._joined.record(self._ahead)  # one event for all: to create one costs more than to record it
        self._stream.wait_event(self._joined)

    def release(self) -> None:
        self._released.record(self._stream)

    @property
    def num_bytes(self) -> int:
        return self._most_bytes

    @property
    def _now_bytes(self) -> int:
        return self._graphs.num_bytes + self._graphs_ahead.num_bytes

    def has_room(self, relative_batch: float) -> bool:
        free = torch.cuda.mem_get_info(self._device)[0]
        cached = torch.cuda.memory_reserved(self._device) - self._now_bytes - torch.cuda.memory_allocated(self._device)
        return free + max(cached, 0) >= relative_batch * self._now_bytes


class _Graphs:
    """The graphs of a stream, which share their memory: no two of them run at a time."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self.num_bytes = 0
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()

    def capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        if not self._graphs:  # torch cannot capture into a pool that all graphs have left while it still has a block
            self._pool, self.num_bytes = torch.cuda.graph_pool_handle(), 0
        graph, device = torch.cuda.CUDAGraph(), self._stream.device
        # Threads that load or decode may do meanwhile what a captured stream may not.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            reserved = torch.cuda.memory_reserved(device)
            run()
            self.num_bytes += torch.cuda.memory_reserved(device) - reserved
        self._graphs.add(graph)
        return graph
