"""Rows are what is stored or sent of a teacher's outputs for an image: in a cache's blocks, in a service's responses.

A `RowFormat` declares the columns of a row, and makes outputs of them; whoever stores or sends rows knows neither.

Shapes: B samples, K classes, k stored logits of each (K where all are), D features, h w positions of a map.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainables.config import TrainConfig
from trainables.data.interface import Source
from trainables.device.bind import bind_thread
from trainables.device.tensor_format import tensor_format
from trainables.errors import DataError
from trainables.methods.contract import ModelOutputs
from trainables.teachers.interface import TeacherInterface

Rows = NDArray[Any]
"""(B,), of the dtype `RowFormat.row`."""
Columns = dict[str, Tensor]
"""The numbers of rows by their names, (B, …)."""
NamedShapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Taps by their full names, each with the shape of a sample: (D,), (D, h, w) or another."""
_HALF_MAX = 65504.0
_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max
_SCALE = " scale"
_INT16_CLASSES = 2**15
PARTNER = "partner"
"""The column of mixed images: the dataset-wide index of the image with which this one is mixed."""


class MethodReads(NamedTuple):
    """What a method reads of a teacher."""

    logits: bool
    taps: NamedShapes = ()


@dataclass(frozen=True)
class RowFormat:
    """The columns of a row, and how outputs become columns and columns outputs.

    Logits z are in half precision: `top`, the largest, in single precision; `logits`, all minus `top`, in half. A softmax does
    not change with what is added to all logits, and where probability is, z - max z is small and half precision exact.

    With `top_k` the k largest are stored, and `rest`: the others get the one logit that has their sum,
    logsumexp(rest) - log(K - k). At T = 1 they so keep their probability together, which is spread evenly among them.
    `tests/trainables/teachers/test_rows.py` derives and checks by how much kd's loss may then be off.

    Features are in `float16`, or in `fp8` (e4m3), each image's divided by the largest of their magnitudes, which is stored too.
    """

    num_classes: int | None = None
    """K of the logits; None: there are none."""
    top_k: int | None = None
    exact_logits: str | None = None
    """A dtype in which all logits are as they are computed."""
    taps: NamedShapes = ()
    """Those of the features, in the order in which `encode` takes and `decode` returns them."""
    feature_dtype: str = "float16"
    mixed: bool = False
    """Whether the images are mixed, and rows have a `PARTNER`."""

    @property
    def has_logits(self) -> bool:
        return self.num_classes is not None

    @property
    def key(self) -> dict[str, Any]:
        """What of it decides a row's numbers, as a part of the cache's key."""
        key: dict[str, Any] = {}
        if self.has_logits:
            key["top_k"] = self.top_k
        if self.taps:
            key["taps"] = [tap for tap, _ in self.taps]
        if self.feature_dtype != "float16":
            key["feature_dtype"] = self.feature_dtype
        return key

    @property
    def columns(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name → dtype and shape."""
        columns: dict[str, tuple[str, tuple[int, ...]]] = {}
        if self.num_classes is not None and self.exact_logits is not None:
            columns["logits"] = self.exact_logits, (self.num_classes,)
        elif self.num_classes is not None:
            num_stored = self.top_k or self.num_classes
            columns |= {"top": ("float32", ()), "logits": ("float16", (num_stored,))}
            if self.top_k is not None:
                classes = "int16" if self.num_classes <= _INT16_CLASSES else "int32"
                columns |= {"classes": (classes, (num_stored,)), "rest": ("float16", ())}
        for tap, shape in self.taps:
            columns[f"feature {tap}"] = ("uint8" if self.feature_dtype == "fp8" else "float16", shape)
            if self.feature_dtype == "fp8":
                columns[f"feature {tap}{_SCALE}"] = ("float32", ())
        return columns

    def encode(self, outputs: ModelOutputs) -> Columns:
        """The columns of these outputs, on their device; nothing waits for it."""
        columns = self._encode_logits(outputs.logits_BK.detach()) if self.has_logits else {}
        for (tap, _), values in zip(self.taps, outputs.features, strict=True):
            name, values_BN = f"feature {tap}", values.detach().flatten(1)
            if self.feature_dtype == "fp8":
                scale_B = columns[name + _SCALE] = values_BN.abs().amax(1).float()
                values_BN = values_BN / scale_B.clamp(min=torch.finfo(torch.float32).tiny)[:, None] * _FP8_MAX
            stored_BN = values_BN.to(_FP8).view(torch.uint8) if self.feature_dtype == "fp8" else values_BN.half()
            columns[name] = stored_BN.view(values.shape)
        return columns

    def _encode_logits(self, logits_BK: Tensor) -> Columns:
        if self.exact_logits is not None:
            return {"logits": logits_BK}
        logits_BK = logits_BK.to(torch.promote_types(logits_BK.dtype, torch.float32))
        if self.top_k is None:
            top_B = logits_BK.amax(1)
            return {"top": top_B.float(), "logits": _half(logits_BK - top_B[:, None])}
        logits_Bk, classes_Bk = logits_BK.topk(self.top_k, dim=1)
        others_BK = logits_BK.scatter(1, classes_Bk, -math.inf)
        rest_B = others_BK.logsumexp(1) - math.log(logits_BK.shape[1] - self.top_k)
        top_B = logits_Bk[:, 0]
        return {
            "top": top_B.float(),
            "logits": _half(logits_Bk - top_B[:, None]),
            "classes": classes_Bk.to(getattr(torch, self.columns["classes"][0])),
            "rest": _half(rest_B - top_B),
        }

    def decode(self, columns: Columns, dtype: torch.dtype = torch.float32) -> ModelOutputs:
        """The outputs that columns stand for, in `dtype` and on their device."""
        features = []
        for tap, _ in self.taps:
            stored = columns[f"feature {tap}"]
            if self.feature_dtype == "fp8":
                scale_B = columns[f"feature {tap}{_SCALE}"].to(dtype) / _FP8_MAX
                features.append(stored.view(_FP8).to(dtype) * scale_B.view(-1, *[1] * (stored.ndim - 1)))
            else:
                features.append(stored.to(dtype))
        return ModelOutputs(self._decode_logits(columns, dtype), tuple(features))

    def _decode_logits(self, columns: Columns, dtype: torch.dtype) -> Tensor | None:
        if self.num_classes is None:
            return None
        if self.exact_logits is not None:
            return columns["logits"].to(dtype)
        top_B1, logits_Bk = columns["top"].to(dtype)[:, None], columns["logits"].to(dtype)
        if self.top_k is None:
            return logits_Bk + top_B1
        rest_BK = columns["rest"].to(dtype)[:, None].expand(-1, self.num_classes)
        return rest_BK.scatter(1, columns["classes"].long(), logits_Bk) + top_B1

    def describe_error(self, outputs: ModelOutputs) -> str:
        """How far the features of a batch are from what is stored of them; it waits for the device."""
        stored = self.decode(self.encode(outputs), torch.float64).features
        texts = []
        for (tap, _), values, read in zip(self.taps, outputs.features, stored, strict=True):
            x, y = values.double().flatten(), read.flatten()
            error_pct, cosine = 100 * (x - y).norm() / x.norm(), torch.cosine_similarity(x, y, dim=0)
            texts.append(f"{tap} by {error_pct:.2g}% (cosine {cosine:.5f})")
        return f"{self.feature_dtype} changes {', '.join(texts)}, as the norm of the differences over that of the features"

    def __str__(self) -> str:
        shapes = {name.removeprefix("feature "): shape for name, (_, shape) in self.columns.items() if shape}
        return " + ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in shapes.items())

    @cached_property
    def row(self) -> np.dtype[Any]:
        """A row: the dataset-wide index of its `sample`, then the columns."""
        partner = [(PARTNER, "int32")] if self.mixed else []
        return np.dtype([("sample", "int32"), *partner, *((name, *column) for name, column in self.columns.items())])

    def to_host(
        self, samples_B: NDArray[np.int64], columns: Columns, partners_B: NDArray[np.int64] | None = None
    ) -> Callable[[], Rows]:
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
            for name, values in {"sample": samples_B, **({PARTNER: partners_B} if self.mixed else {}), **copies}.items():
                rows_B[name] = values
            return rows_B

        return rows

    def to_device(self, rows_B: Rows, device: torch.device) -> Columns:
        """The columns of rows on a device, without waiting for it."""
        columns = {}
        for name, (dtype, shape) in self.columns.items():
            column = torch.empty((len(rows_B), *shape), dtype=getattr(torch, dtype), pin_memory=device.type == "cuda")
            column.numpy()[...] = rows_B[name]
            columns[name] = column.to(device, non_blocking=True)
        return columns


class RowTeacher(TeacherInterface):
    """A teacher whose outputs are made from rows."""

    def __init__(
        self,
        row_format: RowFormat,
        reads: Mapping[str, MethodReads],
        config: TrainConfig,
        device: torch.device,
        source: Source,
    ) -> None:
        """`reads`: what each method reads, by its key. `source`: of the images."""
        assert config.teacher is not None
        self.row_format, self._reads, self._device, self._source = row_format, reads, device, source
        self._dtype, self._name, self._key = tensor_format(config)[0], config.teacher.model, config.teacher.rows_from
        self._num_computed = 0

    def end_epoch(self) -> int:
        """See `TeacherInterface`."""
        num_computed, self._num_computed = self._num_computed, 0
        return num_computed

    def _check(self, rows_B: Rows) -> Rows:
        """The rows. Raises DataError: half precision does not hold a number that was computed for them."""
        for name, (dtype, _) in self.row_format.columns.items():
            is_scale = name.endswith(_SCALE)
            if (dtype == "float16" or is_scale) and not (finite := np.isfinite(rows_B[name])).all():
                sample = int(rows_B["sample"][finite.reshape(len(rows_B), -1).all(1).argmin()])
                limit = "" if is_scale else f", or above {_HALF_MAX:,.0f}, the most that float16 holds"
                raise DataError(
                    f"{self._key}: {self._name} gives {self._source.name(sample)} a value of its {name.removesuffix(_SCALE)} "
                    f"that is not a number{limit}: leave {self._key} out"
                )
        return rows_B

    def _outputs(self, columns: Columns) -> dict[str, ModelOutputs]:
        outputs = self.row_format.decode(columns, self._dtype)
        features = dict(zip(self.row_format.taps, outputs.features, strict=True))
        return {
            key: ModelOutputs(outputs.logits if each.logits else None, tuple(features[tap] for tap in each.taps))
            for key, each in self._reads.items()
        }

    def _outputs_of_rows(self, rows_B: Rows) -> dict[str, ModelOutputs]:
        return self._outputs(self.row_format.to_device(rows_B, self._device))

    def _dummy_outputs(self, num_rows: int) -> dict[str, ModelOutputs]:
        return self._outputs_of_rows(np.zeros(num_rows, self.row_format.row))


def _half(values: Tensor) -> Tensor:
    return values.clamp(min=-_HALF_MAX).half()


def format_of(reads: Mapping[str, MethodReads], stored: RowFormat) -> RowFormat:
    """The rows of what these methods read together, as they are `stored` or sent."""
    taps = tuple(sorted({tap for each in reads.values() for tap in each.taps}))
    if not taps:
        return replace(stored, feature_dtype="float16")
    reads_logits = any(each.logits for each in reads.values())
    return replace(stored, taps=taps, num_classes=stored.num_classes if reads_logits else None)
