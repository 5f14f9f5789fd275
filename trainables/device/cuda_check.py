"""Whether torch can use the GPU that a worker was given, and if not, which versions do not fit each other."""

import pynvml
import torch

from trainables.errors import DeviceError, first_line
from trainables.failures import kind_of


def check_usable(device: torch.device, node: str) -> None:
    """Run a kernel on `device`, a worker's GPU on `node`. Where torch finds no GPU, `device` is the CPU.

    Raises DeviceError: it cannot; one line with torch's reason and both versions.
    """
    try:
        torch.ones(1, device=device if device.type == "cuda" else "cuda").add_(1).item()
    except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:  # of a torch without CUDA an AssertionError
        if kind_of(error) == "out_of_memory":
            raise
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise DeviceError(
            f"node {node}: Ray has a GPU there that torch cannot use: {first_line(error)} (torch {torch.__version__}, {built}; "
            f"{driver()}): install a driver and a torch that fit each other, or set scale.use_gpu=false"
        ) from error


def driver() -> str:
    """The NVIDIA driver of this node and the newest CUDA that it runs."""
    try:
        pynvml.nvmlInit()
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        return f"NVIDIA driver {pynvml.nvmlSystemGetDriverVersion()}, for CUDA up to {cuda // 1000}.{cuda % 1000 // 10}"
    except pynvml.NVMLError:
        return "no NVIDIA driver"
