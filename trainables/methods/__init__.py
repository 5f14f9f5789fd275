"""The ways to distil, by name. Importing this costs no torch: a method's function is loaded when it is first called."""

from __future__ import annotations

import difflib

from trainables.config import DistillConfig
from trainables.errors import ExperimentError
from trainables.methods.contract import Method

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("kd"),
        Method("dkd", own_terms=("tckd", "nckd"), function="trainables.methods.dkd:dkd_terms", reads_labels=True),
    )
}


def check_method(distill: DistillConfig, mixes: bool = False) -> None:
    """Refuse a method that does not exist, or weights that ask a method for what it does not have, or leave it unused.

    `mixes`: images of several classes are mixed (MixUp, CutMix), so that a method that reads labels is refused too.

    Raises:
        ExperimentError: one line with what to write instead.
    """
    method = METHODS.get(distill.method)
    if method is None:
        near = difflib.get_close_matches(distill.method.lower(), METHODS, n=1)
        instead = f"did you mean {near[0]}?" if near else f"write one of {', '.join(sorted(METHODS))}"
        raise ExperimentError(f"distill.method: there is no method {distill.method!r}; {instead}")
    if distill.method_weight > 0 and not method.own_terms:
        raise ExperimentError(
            f"distill.method_weight is {distill.method_weight:g}, but {method.name} has no term of its own:"
            " set distill.method_weight to 0 and weigh it by distill.soft_weight"
        )
    if distill.method_weight == 0 and method.own_terms:
        raise ExperimentError(
            f"distill.method_weight is 0, so {method.name} would not be used:"
            f" set it to 1 (and distill.soft_weight to 0, as its paper does), or set distill.method to kd"
        )
    if mixes and method.reads_labels:
        raise ExperimentError(
            f"distill.method: {method.name} needs images of one class each: set data.device_augment.mixup and"
            " data.device_augment.cutmix to 0, or set distill.method to kd"
        )
