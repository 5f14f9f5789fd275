"""Bind a thread to its worker's GPU: a new thread's is the first that its process sees, also where the worker has another."""

import torch


def bind_thread(device: torch.device) -> None:
    """Make `device` the calling thread's, whatever it calls of CUDA afterwards; else that may open a context on GPU 0.

    A device without a number is each thread's own one.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
