"""The most GPU memory that training takes once it is warm."""

import torch

from trainables.distributed.group import Group, gather_objects

MIB = 2**20


class PeakMemory:
    """Peaks of torch's allocator from a step past the warm-up on, without those of an evaluation. On a CPU it does nothing."""

    def __init__(self, device: torch.device, first_step: int, *, in_graphs: bool = False) -> None:
        """Before the step `first_step` the peaks are reset; that step allocates again what is freed then. `in_graphs`: models
        run as CUDA graphs, whose memory torch does not count as that of tensors, but as reserved.
        """
        self._device, self._first_step, self._in_graphs = device, first_step, in_graphs
        self._training_peaks: tuple[int, int] | None = None

    def before_step(self, step: int) -> None:
        """Every step calls it."""
        if step == self._first_step:
            reset_peaks(self._device)

    def end_training(self, step: int) -> None:
        """An epoch's steps are over, `step` of the stage in all: its evaluation has shapes, and a peak, of its own."""
        if self._device.type == "cuda" and self._training_peaks is None and step > self._first_step:
            self._training_peaks = self._read()

    def tensors_bytes(self) -> int:
        """Peak of the memory in tensors on this rank's GPU; 0 on a CPU."""
        return (self._training_peaks or self._read())[0] if self._device.type == "cuda" else 0

    def _read(self) -> tuple[int, int]:
        tensors, reserved = read_peaks(self._device)
        return reserved if self._in_graphs else tensors, reserved

    def summary(self, group: Group) -> dict[str, float]:
        """MiB of the GPUs' memory; {} on a CPU. Every rank calls it.

        Of training past the warm-up, of the rank that had most: `peak_memory_mib` in tensors (with CUDA graphs all that is
        reserved), and `reserved_memory_mib` with what else torch's allocator had reserved. `free_memory_mib` is what nobody uses
        now, and `gpu_memory_mib` what a GPU has, each of the GPU with the least. With several ranks the first of each rank too,
        as `rank0/peak_memory_mib`: pipeline stages differ.
        """
        if self._device.type != "cuda":
            return {}
        sizes = (*(self._training_peaks or self._read()), *torch.cuda.mem_get_info(self._device))
        peaks, reserved, free, total = zip(*gather_objects(sizes, group), strict=True)
        by_rank = {f"rank{rank}/peak_memory_mib": peak / MIB for rank, peak in enumerate(peaks)} if len(peaks) > 1 else {}
        return by_rank | {
            "peak_memory_mib": max(peaks) / MIB,
            "reserved_memory_mib": max(reserved) / MIB,
            "free_memory_mib": min(free) / MIB,
            "gpu_memory_mib": min(total) / MIB,
        }


def reset_peaks(device: torch.device) -> None:
    """Forget the most memory so far: cuDNN's search for the fastest kernels took some that no later step does."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the search has left would count as reserved
        torch.cuda.reset_peak_memory_stats(device)


def read_peaks(device: torch.device) -> tuple[int, int]:
    """The most bytes in tensors, and the most that torch's allocator has reserved."""
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
