"""The format of cached logits: half precision, all of them or the largest k, and what that costs a loss.

Shapes: B samples, K classes, k stored ones (K where all are).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_HALF_MIN = -65504.0
_INT16_CLASSES = 2**15


@dataclass(frozen=True)
class LogitsFormat:
    """The columns that store an image's logits z: `top`, the largest, in single precision; `logits`, all minus `top`, in half.

    A softmax does not change with what is added to all logits, and where probability is, z - max z is small and half precision
    exact.

    With `top_k` the k largest are stored, and `rest`: the others get the one logit that has their sum,
    logsumexp(rest) - log(K - k). At T = 1 they so keep their probability together, which is spread evenly among them.

    `tests/trainables/teachers/cache/test_logits_format.py` derives and checks by how much kd's loss may then be off.
    """

    num_classes: int
    top_k: int | None = None

    @property
    def num_stored(self) -> int:
        """k: how many logits of an image are stored."""
        return self.num_classes if self.top_k is None else self.top_k

    @property
    def columns(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """What is stored of an image, see `RowStore`."""
        dense: dict[str, tuple[str, tuple[int, ...]]] = {"top": ("float32", ()), "logits": ("float16", (self.num_stored,))}
        if self.top_k is None:
            return dense
        classes = "int16" if self.num_classes <= _INT16_CLASSES else "int32"
        return {**dense, "classes": (classes, (self.num_stored,)), "rest": ("float16", ())}

    def encode(self, logits_BK: Tensor) -> dict[str, Tensor]:
        """The columns (B,) or (B, k) of these logits, on their device; nothing waits for it."""
        logits_BK = logits_BK.detach().to(torch.promote_types(logits_BK.dtype, torch.float32))
        if self.top_k is None:
            top_B = logits_BK.amax(1)
            return {"top": top_B.float(), "logits": _half(logits_BK - top_B[:, None])}
        logits_Bk, classes_Bk = logits_BK.topk(self.top_k, dim=1)
        others_BK = logits_BK.scatter(1, classes_Bk, -math.inf)
        rest_B = others_BK.logsumexp(1) - math.log(self.num_classes - self.top_k)
        top_B = logits_Bk[:, 0]
        class_dtype: Any = getattr(torch, self.columns["classes"][0])
        return {
            "top": top_B.float(),
            "logits": _half(logits_Bk - top_B[:, None]),
            "classes": classes_Bk.to(class_dtype),
            "rest": _half(rest_B - top_B),
        }

    def decode(self, columns: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        """The logits (B, K) that the columns store, on their device."""
        top_B1 = columns["top"].to(dtype)[:, None]
        logits_Bk = columns["logits"].to(dtype)
        if self.top_k is None:
            return logits_Bk + top_B1
        rest_BK = columns["rest"].to(dtype)[:, None].expand(-1, self.num_classes)
        return rest_BK.scatter(1, columns["classes"].long(), logits_Bk) + top_B1


def _half(values: Tensor) -> Tensor:
    return values.clamp(min=_HALF_MIN).half()
