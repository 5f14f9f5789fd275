"""CUDA graphs of a training step, and what memory they take."""

from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

import torch


class Capture(Protocol):
    """Captures steps, and knows what memory its graphs take."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture what a function launches, without running it; returns what launches it again."""

    @property
    def num_bytes(self) -> int:
        """The most memory of graphs so far, which torch's allocator counts as reserved, not as that of tensors."""

    def has_room(self, relative_batch: float) -> bool:
        """Whether there is memory beside the graphs for a step without one, of so many times the images of the largest."""


class CudaCapture:
    """Captures in this thread's stream; the graphs share their memory, since no two run at a time."""

    def __init__(self, device: torch.device) -> None:
        """Until its end this thread's work is in a stream of its own: the default one cannot be captured, and autograd's nodes
        of parameters stay in the stream in which they are made. Call it before there are any.
        """
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        torch.cuda.set_stream(self._stream)
        self._device = device
        self._pool_bytes = self._most_bytes = 0
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        if not self._graphs:  # torch cannot capture into a pool that all graphs have left while it still has a block
            self._pool, self._pool_bytes = torch.cuda.graph_pool_handle(), 0
        graph = torch.cuda.CUDAGraph()
        # Threads that load or decode may do meanwhile what a captured stream may not.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            reserved = torch.cuda.memory_reserved(self._device)
            run()
            self._pool_bytes += torch.cuda.memory_reserved(self._device) - reserved
        self._graphs.add(graph)
        self._most_bytes = max(self._most_bytes, self._pool_bytes)
        return graph.replay

    @property
    def num_bytes(self) -> int:
        return self._most_bytes

    def has_room(self, relative_batch: float) -> bool:
        free = torch.cuda.mem_get_info(self._device)[0]
        cached = torch.cuda.memory_reserved(self._device) - self._pool_bytes - torch.cuda.memory_allocated(self._device)
        return free + max(cached, 0) >= relative_batch * self._pool_bytes
