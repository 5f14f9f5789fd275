"""Give back what a job has left on a worker's device and in its pinned memory, before the next job of the same process."""

import gc

import torch

from trainables.data.loader.batch_memory import free_pinned
from trainables.device.decode import region_decoder


def release_device(device: torch.device) -> None:
    """Free decoders, pinned batches and cached blocks that nothing refers to any more, and let the memory's peaks begin anew."""
    region_decoder.cache_clear()
    if device.type == "cuda":
        gc.collect()  # a job that failed stands in its exception's frames, which refer to each other
        free_pinned()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
