"""3: what a step takes of the GPU's memory, at first and later, by its batch."""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.gpu.contract import Check, Expected, Measured, Piece, Settings
from tests.gpu.work import R34_R18, Stepper, device_batch, first_device, job_config, open_job, sized
from trainables.metrics.peak_memory import read_peaks, reset_peaks

MIB = 2**20
FITTED, PREDICTED = (32, 64, 128, 256, 512), 1024


class LiveBytes(TorchDispatchMode):
    """The most bytes that the results of operations had at a time, as torch's allocator on a GPU counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._known:
                self._known.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage.nbytes())
        return result

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes


def peaks_of(step: Callable[[], None], count: int, device: torch.device) -> tuple[float, float]:
    """MiB in tensors and reserved at the peak of so many steps."""
    if device.type == "cpu":
        with LiveBytes() as live:
            for _ in range(count):
                step()
        return live.peak / MIB, live.peak / MIB
    reset_peaks(device)
    for _ in range(count):
        step()
    torch.cuda.synchronize(device)
    allocated, reserved = read_peaks(device)
    return allocated / MIB, reserved / MIB


def by_batch(settings: Settings) -> Measured:
    """The first step's peak, and that of steps 10 to 20, at each batch; a line through the latter and what it predicts."""
    device, pair = first_device(settings), sized(R34_R18, settings)
    found: Measured = {}
    for batch in (*FITTED, PREDICTED):
        with open_job(job_config(settings, pair, batch, "bf16"), device) as job:
            step = Stepper(job, device_batch(pair, batch, device))
            first_mib, _ = peaks_of(step, 1, device)
            for _ in range(1 if settings.small else 9):
                step()
            steady_mib, reserved_mib = peaks_of(step, 1 if settings.small else 10, device)
        found |= {f"first_mib/{batch}": first_mib, f"steady_mib/{batch}": steady_mib, f"reserved_mib/{batch}": reserved_mib}
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            found[f"used_after_mib/{batch}"] = (total - free) / MIB
    per_image, constant = np.polyfit(FITTED, [float(found[f"steady_mib/{batch}"]) for batch in FITTED], 1)
    steady = float(found[f"steady_mib/{PREDICTED}"])
    return found | {
        "constant_gib": float(constant) / 1024,
        "per_image_mib": float(per_image),
        "error_pct": 100 * abs(constant + per_image * PREDICTED - steady) / steady,
        "search_mib": max(float(found[f"first_mib/{batch}"]) - float(found[f"steady_mib/{batch}"]) for batch in FITTED),
    }


CHECK = Check(
    3,
    "Peak memory",
    (
        Piece(
            "3-peaks",
            by_batch,
            (
                Expected("constant_gib", "0.2–0.6 GiB whatever the batch", 0.15, 0.6, estimate=True),
                Expected("per_image_mib", "12–16 MiB an image, 12.1 without cuDNN's", 12, 16, estimate=True),
                Expected("search_mib", "first step larger, by 0.1 to several GiB", low=100, estimate=True),
                Expected("error_pct", "batch 1024 predicted within 5 %", high=5, on_cpu=True),
            ),
            4,
        ),
    ),
)
