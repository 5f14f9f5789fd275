"""Peak GPU memory of training past the warm-up."""

import torch

from trainables.distributed.group import Group, gather_objects

MIB = 2**20


class PeakMemory:
    """Peaks of torch's allocator from a given step on, excluding evaluation. On a CPU this does nothing."""

    def __init__(self, device: torch.device, first_step: int, *, in_graphs: bool = False) -> None:
        """Peaks are reset before step `first_step`, which then has to allocate freed memory again.

        `in_graphs`: models run as CUDA graphs, whose memory torch counts as reserved but not as tensors.
        """
        self._device, self._first_step, self._in_graphs = device, first_step, in_graphs
        self._training_peaks: tuple[int, int] | None = None

    def before_step(self, step: int) -> None:
        """Call this before every step."""
        if step == self._first_step:
            reset_peaks(self._device)

    def end_training(self, step: int) -> None:
        """Call this after an epoch's steps, `step` in total, since evaluation has other shapes and peaks."""
        if self._device.type == "cuda" and self._training_peaks is None and step > self._first_step:
            self._training_peaks = self._read()

    def tensors_bytes(self) -> int:
        """Return the peak bytes in tensors on this rank's GPU; 0 on a CPU."""
        return (self._training_peaks or self._read())[0] if self._device.type == "cuda" else 0

    def _read(self) -> tuple[int, int]:
        tensors, reserved = read_peaks(self._device)
        return reserved if self._in_graphs else tensors, reserved

    def summary(self, group: Group) -> dict[str, float]:
        """Return GPU memory in MiB; {} on a CPU. Every rank must call this.

        `peak_memory_mib` is the peak in tensors (with CUDA graphs, everything reserved) and `reserved_memory_mib` the peak that
        torch's allocator reserved, each the maximum over ranks, in training past the warm-up. `free_memory_mib` is what is free
        now and `gpu_memory_mib` the size, each the minimum over GPUs. With several ranks there is also `rank0/peak_memory_mib`,
        …, since pipeline stages differ.
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
    """Reset the peaks, as cuDNN's search for the fastest kernels needed memory that later steps do not."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # otherwise memory left by the search would count as reserved
        torch.cuda.reset_peak_memory_stats(device)


def read_peaks(device: torch.device) -> tuple[int, int]:
    """Return the peak bytes in tensors, and the peak bytes reserved by torch's allocator."""
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
