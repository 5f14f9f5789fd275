"""CUDA graphs of a training step: the streams in which they run, and what memory they take."""

import contextlib
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

import torch


class Capture(Protocol):
    """Captures steps, and knows what memory its graphs take. Beside the stream of the step it has a side stream, in which work
    of the next step may overlap with this one's."""

    def __call__(self, run: Callable[[], None], *, side: bool = False) -> Callable[[], None]:
        """Capture what a function launches, without running it; returns what launches it again.

        `side`: that is called within `side_stream`, and has memory apart from the other graphs.
        """

    def side_stream(self) -> contextlib.AbstractContextManager[None]:
        """What is launched meanwhile runs in the side stream."""

    def wait_for_side_stream(self) -> None:
        """The step's stream waits for all that the side stream was given so far."""

    def release_side_stream(self) -> None:
        """What the side stream is given from now on begins when the step's stream has come as far as here: from then on what it
        has made before may be overwritten. Each step that has used it calls this once it has read all of that."""

    @property
    def num_bytes(self) -> int:
        """The most memory of graphs so far, which torch's allocator counts as reserved, not as that of tensors."""

    def has_room(self, relative_batch: float) -> bool:
        """Whether there is memory beside the graphs for a step without one, of so many times the images of the largest."""


class CudaCapture:
    """Captures in this thread's stream, or in the side stream."""

    def __init__(self, device: torch.device) -> None:
        """Until its end this thread's work is in a stream of its own: the default one cannot be captured, and autograd's nodes
        of parameters stay in the stream in which they are made. Call it before there are any.
        """
        self._stream, self._side_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
        for stream in (self._stream, self._side_stream):
            stream.wait_stream(torch.cuda.current_stream(device))
        torch.cuda.set_stream(self._stream)
        self._device = device
        self._graphs, self._side_graphs = _Graphs(self._stream), _Graphs(self._side_stream)
        self._event = torch.cuda.Event()  # one for all: to create one costs more than to record it
        self._most_bytes = 0

    def __call__(self, run: Callable[[], None], *, side: bool = False) -> Callable[[], None]:
        with self.side_stream() if side else contextlib.nullcontext():
            graph = (self._side_graphs if side else self._graphs).capture(run)
        self._most_bytes = max(self._most_bytes, self._now_bytes)
        return graph.replay

    def side_stream(self) -> contextlib.AbstractContextManager[None]:
        return torch.cuda.stream(self._side_stream)

    def wait_for_side_stream(self) -> None:
        self._event.record(self._side_stream)
        self._stream.wait_event(self._event)

    def release_side_stream(self) -> None:
        # At once, not when it is used next: whoever waits for the side stream may then free its memory, as the allocator does.
        self._event.record(self._stream)
        self._side_stream.wait_event(self._event)

    @property
    def num_bytes(self) -> int:
        return self._most_bytes

    @property
    def _now_bytes(self) -> int:
        return self._graphs.num_bytes + self._side_graphs.num_bytes

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
        # Threads that load or decode may do meanwhile what a captured stream may not, but wait for the whole device.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            before = _graph_bytes(device)
            run()
            self.num_bytes += _graph_bytes(device) - before
        self._graphs.add(graph)
        return graph


def _graph_bytes(device: torch.device) -> int:
    """Reserved, but not of tensors that live on, such as a graph's outputs."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
