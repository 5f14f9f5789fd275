"""Rows are what is stored or sent of a teacher's outputs for an image: in a cache's blocks, in a service's responses.

A `RowFormat` declares the columns of a row, and makes outputs of them; whoever stores or sends rows knows neither.

Shapes: B samples, K classes, k stored logits of each (K where all are).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainables.device.bind import bind_thread
from trainables.methods.contract import ModelOutputs
from trainables.teachers.interface import TeacherInterface

Rows = NDArray[Any]
"""(B,), of the dtype `RowFormat.row`."""
Columns = dict[str, Tensor]
"""The numbers of rows by their names, (B, …)."""
_HALF_MIN = -65504.0
_INT16_CLASSES = 2**15


class RowFormat(ABC):
    """The columns of a row, and how outputs become columns and columns outputs."""

    @property
    @abstractmethod
    def columns(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Name → dtype and shape."""

    @abstractmethod
    def encode(self, outputs: ModelOutputs) -> Columns:
        """The columns of these outputs, on their device; nothing waits for it."""

    @abstractmethod
    def decode(self, columns: Columns, dtype: torch.dtype = torch.float32) -> ModelOutputs:
        """The outputs that columns stand for, in `dtype` and on their device."""

    @cached_property
    def row(self) -> np.dtype[Any]:
        """A row: the dataset-wide index of its `sample`, then the columns."""
        return np.dtype([("sample", "int32"), *((name, *column) for name, column in self.columns.items())])

    def to_host(self, samples_B: NDArray[np.int64], columns: Columns) -> Callable[[], Rows]:
        """Begin to copy columns to the host; the result, called in any thread, waits for the copy and returns the rows."""
        device, copied = next(iter(columns.values())).device, None
        copies = {name: column.to("cpu", non_blocking=True) for name, column in columns.items()}
        if device.type == "cuda":
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(device))  # type: ignore[no-untyped-call]

        def rows() -> Rows:
            if copied is not None:
                bind_thread(device)
                copied.synchronize()  # type: ignore[no-untyped-call]
            rows_B = np.empty(len(samples_B), self.row)
            for name, values in {"sample": samples_B, **copies}.items():
                rows_B[name] = values
            return rows_B

        return rows

    def to_device(self, rows_B: Rows, device: torch.device) -> Columns:
        """The columns of rows on a device, without waiting for it: all of them are copied at once."""
        bytes_BN = torch.from_numpy(rows_B.view(np.uint8).reshape(len(rows_B), self.row.itemsize))
        if device.type == "cuda":
            bytes_BN = bytes_BN.pin_memory().to(device, non_blocking=True)
        columns, start = {}, self.row["sample"].itemsize
        for name, (dtype, shape) in self.columns.items():
            end = start + self.row[name].itemsize
            column = bytes_BN[:, start:end].clone(memory_format=torch.contiguous_format)
            columns[name] = column.view(getattr(torch, dtype)).view(len(rows_B), *shape)
            start = end
        return columns


class RowTeacher(TeacherInterface):
    """A teacher whose outputs are made from rows."""

    def __init__(self, row_format: RowFormat, methods: Sequence[str], device: torch.device, dtype: torch.dtype) -> None:
        """`methods`: keys of those that read the outputs. `dtype`: of the outputs."""
        self.row_format, self._methods, self._device, self._dtype = row_format, tuple(methods), device, dtype
        self._num_computed = 0

    def end_epoch(self) -> int:
        """See `TeacherInterface`."""
        num_computed, self._num_computed = self._num_computed, 0
        return num_computed

    def _outputs(self, columns: Columns) -> dict[str, ModelOutputs]:
        return dict.fromkeys(self._methods, self.row_format.decode(columns, self._dtype))

    def _outputs_of_rows(self, rows_B: Rows) -> dict[str, ModelOutputs]:
        return self._outputs(self.row_format.to_device(rows_B, self._device))

    def _dummy_outputs(self, num_rows: int) -> dict[str, ModelOutputs]:
        return self._outputs_of_rows(np.zeros(num_rows, self.row_format.row))


@dataclass(frozen=True)
class ExactLogits(RowFormat):
    """All logits as they are computed, in `float32` or `float64`."""

    num_classes: int
    dtype: str

    @property
    def columns(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {"logits": (self.dtype, (self.num_classes,))}

    def encode(self, outputs: ModelOutputs) -> Columns:
        return {"logits": outputs.logits_BK.detach()}

    def decode(self, columns: Columns, dtype: torch.dtype = torch.float32) -> ModelOutputs:
        return ModelOutputs(columns["logits"].to(dtype))


@dataclass(frozen=True)
class HalfLogits(RowFormat):
    """The logits z in half precision: `top`, the largest, in single precision; `logits`, all minus `top`, in half.

    A softmax does not change with what is added to all logits, and where probability is, z - max z is small and half precision
    exact.

    With `top_k` the k largest are stored, and `rest`: the others get the one logit that has their sum,
    logsumexp(rest) - log(K - k). At T = 1 they so keep their probability together, which is spread evenly among them.

    `tests/trainables/teachers/test_rows.py` derives and checks by how much kd's loss may then be off.
    """

    num_classes: int
    top_k: int | None = None

    @property
    def columns(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        num_stored = self.num_classes if self.top_k is None else self.top_k
        dense: dict[str, tuple[str, tuple[int, ...]]] = {"top": ("float32", ()), "logits": ("float16", (num_stored,))}
        if self.top_k is None:
            return dense
        classes = "int16" if self.num_classes <= _INT16_CLASSES else "int32"
        return {**dense, "classes": (classes, (num_stored,)), "rest": ("float16", ())}

    def encode(self, outputs: ModelOutputs) -> Columns:
        logits_BK = outputs.logits_BK.detach()
        logits_BK = logits_BK.to(torch.promote_types(logits_BK.dtype, torch.float32))
        if self.top_k is None:
            top_B = logits_BK.amax(1)
            return {"top": top_B.float(), "logits": _half(logits_BK - top_B[:, None])}
        logits_Bk, classes_Bk = logits_BK.topk(self.top_k, dim=1)
        others_BK = logits_BK.scatter(1, classes_Bk, -math.inf)
        rest_B = others_BK.logsumexp(1) - math.log(self.num_classes - self.top_k)
        top_B = logits_Bk[:, 0]
        return {
            "top": top_B.float(),
            "logits": _half(logits_Bk - top_B[:, None]),
            "classes": classes_Bk.to(getattr(torch, self.columns["classes"][0])),
            "rest": _half(rest_B - top_B),
        }

    def decode(self, columns: Columns, dtype: torch.dtype = torch.float32) -> ModelOutputs:
        top_B1, logits_Bk = columns["top"].to(dtype)[:, None], columns["logits"].to(dtype)
        if self.top_k is None:
            return ModelOutputs(logits_Bk + top_B1)
        rest_BK = columns["rest"].to(dtype)[:, None].expand(-1, self.num_classes)
        return ModelOutputs(rest_BK.scatter(1, columns["classes"].long(), logits_Bk) + top_B1)


def _half(values: Tensor) -> Tensor:
    return values.clamp(min=_HALF_MIN).half()
