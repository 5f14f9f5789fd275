"""CUDA graphs of a training step, and what memory they take."""

from collections.abc import Callable
from typing import Protocol

import torch


class Capture(Protocol):
    """Captures steps, and knows what memory its graphs take."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture what a function launches, without running it; returns what launches it again."""

    def has_room(self, share: float) -> bool:
        """Whether there is memory for a step without a graph beside the graphs, of so large a share of their images."""

    def clear(self) -> None:
        """All graphs are gone."""


class CudaCapture:
    """Captures in this thread's stream; the graphs share their memory, since no two run at a time."""

    def __init__(self, device: torch.device) -> None:
        """Until its end this thread's work is in a stream of its own: the default one cannot be captured, and autograd's nodes
        of parameters stay in the stream in which they are made. Call it before there are any.
        """
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        torch.cuda.set_stream(self._stream)
        self._pool = torch.cuda.graph_pool_handle()
        self._device, self._pool_bytes = device, 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Threads that load or decode may do meanwhile what a captured stream may not.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            reserved = torch.cuda.memory_reserved(self._device)
            run()
            self._pool_bytes += torch.cuda.memory_reserved(self._device) - reserved
        return graph.replay

    def has_room(self, share: float) -> bool:
        free = torch.cuda.mem_get_info(self._device)[0]
        cached = torch.cuda.memory_reserved(self._device) - self._pool_bytes - torch.cuda.memory_allocated(self._device)
        return free + max(cached, 0) >= share * self._pool_bytes

    def clear(self) -> None:
        self._pool_bytes = 0  # torch takes the memory back where it needs some
