"""Copy tensors into one host buffer in the layout of a safetensors file, and write the file from there.

safetensors' own `save_file` converts each tensor to bytes while holding the GIL, which blocks the training thread. Here a single
write without the GIL stores all tensors, without another copy. The format is 8 bytes with the header's length (little-endian),
the header as JSON, and the tensors without gaps (https://huggingface.co/docs/safetensors).

Shapes: N bytes of all tensors.
"""

import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from trainables.errors import CheckpointError
from trainables.models.checkpoint_header import META_KEY
from trainables.rundir import replacing

DTYPES: dict[torch.dtype, str] = {dtype: name for name, dtype in safetensors.torch._TYPES.items()}
"""safetensors' names of the dtypes."""
ALIGNMENT = 8


class PackedTensors(NamedTuple):
    """Tensors packed one after the other."""

    bytes_N: Tensor
    """uint8, on the host."""
    entries: dict[str, dict[str, Any]]
    """Header entries by name: `dtype`, `shape`, and `data_offsets`, the first byte and the end (exclusive)."""
    copied: torch.cuda.Event | None = None
    """Recorded once `bytes_N` is complete; None if it already is."""


class HostBuffer:
    """Host memory for copies of tensors, reused while the size is the same; page-locked for a GPU's tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes_N = torch.empty(0, dtype=torch.uint8)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def pack(self, tensors: Mapping[str, Tensor]) -> PackedTensors:
        """Copy `tensors` as they are now. This invalidates the result of an earlier call.

        On a GPU the copies run on a separate stream. The host does not wait, but later kernels of the current stream do, since
        they may change the tensors. Raises CheckpointError: the format does not support a tensor's dtype.
        """
        entries = _entries(tensors)
        num_bytes = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if len(self._bytes_N) != num_bytes:
            self._bytes_N = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)
        if self._stream is None:
            self._copy(tensors, entries)
            return PackedTensors(self._bytes_N, entries)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        copied = torch.cuda.Event(blocking=True)  # the waiting thread sleeps, which frees its core for the loader
        with torch.cuda.stream(self._stream):
            self._copy(tensors, entries)
            copied.record()
        current.wait_event(copied)
        return PackedTensors(self._bytes_N, entries, copied)

    def _copy(self, tensors: Mapping[str, Tensor], entries: Mapping[str, Mapping[str, Any]]) -> None:
        for name, tensor in tensors.items():
            begin, end = entries[name]["data_offsets"]
            self._bytes_N[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach(), non_blocking=True)


def _entries(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Lay tensors out by descending element size, so that each is aligned to its own."""
    entries: dict[str, dict[str, Any]] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"a checkpoint cannot store {name}, which has the dtype {tensor.dtype}: use another dtype")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    return entries


def write_packed(path: Path, packed: PackedTensors, meta: str, check: Callable[[], None] = lambda: None) -> None:
    """Write the tensors to a temporary file with `meta`, JSON, in its header; fsync it and rename it to `path`.

    `check` is called in between: where it raises, the file that was there is still there.

    Raises CheckpointError: the disk is full or cannot be written; the file that was there is still there.
    """
    if packed.copied is not None:
        with torch.cuda.device(packed.copied.device):  # otherwise this thread would open a context on the first GPU
            packed.copied.synchronize()
    header = json.dumps({"__metadata__": {META_KEY: meta}, **packed.entries}).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    try:
        with replacing(path) as temporary, open(temporary, "wb", buffering=0) as file:
            for rest in (memoryview(len(header).to_bytes(8, "little") + header), packed.bytes_N.numpy().data):
                while rest:  # a write may be partial; on Linux it stops after 2 GiB
                    rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
            check()
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoint {path}: {error}; the previous one is intact: {_remedy(error)}, then run `distill resume`"
        ) from error


def _remedy(error: OSError) -> str:
    return "free space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make the folder writable"
