"""The default options of every method, and what its options refuse."""

import math
from typing import Any, NamedTuple

import pytest
from pydantic import ValidationError

from trainables.config import MethodOptions
from trainables.methods.registry import METHODS, load_method


class Defaults(NamedTuple):
    """The default options of a method."""

    source: str
    """Their source, as the options' docstring says."""
    taps: tuple[str, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it
    """Those that differ from the options of every method."""
    task_weight: float = 1.0


REPDISTILLER = "RepDistiller's defaults for CIFAR-100"
BOTH = "RepDistiller's and mdistiller's defaults for CIFAR-100"
LOGITS = {"standardize": False, "temperature": 4.0}
BY_DEFAULT = {
    "ab": Defaults(
        REPDISTILLER,
        ("stages.preact",),
        {"init_epochs": 30, "init_lr": None, "init_frozen": (), "margin": 1.0, "variant": "repdistiller"},
    ),
    "at": Defaults(BOTH, ("stages",), {"weight": 1000.0, "power": 2.0, "variant": "repdistiller"}),
    "cc": Defaults(
        "from the paper; the weights of Knowledge-Distillation-Zoo (100) and RepDistiller (0.02)",
        ("pooled",),
        {"weight": 100.0, "variant": "paper", "gamma": 0.4, "order": 2, "embedding": 128},
    ),
    "crd": Defaults(
        "The paper's defaults for CIFAR-100, which are RepDistiller's",
        ("pooled",),
        {"weight": 0.8, "negatives": 16384, "temperature": 0.07, "momentum": 0.5, "embedding": 128},
    ),
    "dist": Defaults("The paper's values: β = γ = 2; τ = 4 for CIFAR-100", (), {**LOGITS, "beta": 2.0, "gamma": 2.0}),
    "dkd": Defaults(
        "The authors' published defaults for CIFAR-100", (), {**LOGITS, "alpha": 1.0, "beta": 8.0, "warmup_epochs": 20.0}
    ),
    "dml": Defaults("The paper's values: T = 1", (), {"peer": None, "temperature": 1.0}),
    "embed": Defaults(
        "AM-RADIO's losses and heads",
        ("embedding", "map"),
        {
            "embedding": 1.0,
            "map": 1.0,
            "loss": "radio",
            "layers": 2,
            "hidden": None,
            "resize": "larger",
            "standardize": "none",
            "standardize_images": 10_000,
            "balance": False,
        },
        task_weight=0.0,
    ),
    "fitnet": Defaults(BOTH, ("stage2",), {"weight": 100.0}),
    "fsp": Defaults(REPDISTILLER, ("stem", "stages"), {"init_epochs": 30, "init_lr": None, "variant": "repdistiller"}),
    "ft": Defaults(
        REPDISTILLER,
        ("stage-1",),
        {"weight": 200.0, "init_epochs": 30, "init_lr": None, "rate": 0.5, "variant": "repdistiller"},
    ),
    "irg": Defaults(
        "The weights of Knowledge-Distillation-Zoo",
        ("stage2", "stage3", "pooled"),
        {"vertex": 0.1, "edge": 5.0, "transformation": 5.0},
    ),
    "kd": Defaults(REPDISTILLER, (), {**LOGITS, "weight": 0.9, "hard": False, "token": False}, task_weight=0.1),
    "kdsvd": Defaults(REPDISTILLER, ("stages",), {"vectors": 1}),
    "mlkd": Defaults(
        "The authors' values for CIFAR-100",
        (),
        {"weight": 0.9, "standardize": False, "temperatures": (2.0, 3.0, 4.0, 5.0, 6.0)},
        task_weight=0.1,
    ),
    "nkd": Defaults("The paper's values: λ = 1 and γ = 1.5", (), {"standardize": False, "temperature": 1.0, "gamma": 1.5}),
    "nst": Defaults(BOTH, ("stages",), {"weight": 50.0}),
    "ofd": Defaults("The authors' weight for CIFAR", ("stages.preact",), {"weight": 1e-3}),
    "pkt": Defaults("RepDistiller's weight", ("pooled",), {"weight": 30000.0, "variant": "repdistiller"}),
    "pskd": Defaults("The paper's α", (), {"alpha": 0.8}, task_weight=0.0),
    "queue": Defaults(
        "LightlyTrain's defaults: τ = 0.07, both weights 1",
        ("embedding", "map"),
        {"embedding": 1.0, "map": 1.0, "temperature": 0.07, "map_temperature": 0.07, "queue_size": None},
        task_weight=0.0,
    ),
    "reviewkd": Defaults(
        "The authors' weight and warm-up for resnet32x4→resnet8x4 and WRN pairs on CIFAR-100",
        (),
        {
            "weight": 5.0,
            "warmup_epochs": 20.0,
            "teacher_norm": "running",
            "student_taps": ("stages", "pooled"),
            "teacher_taps": ("stages.preact", "pooled"),
        },
    ),
    "rkd": Defaults(
        "The weights of the authors and of RepDistiller",
        ("pooled",),
        {"distance": 25.0, "angle": 50.0},
    ),
    "semckd": Defaults("The authors' values for CIFAR-100", ("stages",), {"weight": 400.0, "temperature": 1.0}),
    "simkd": Defaults(
        "The authors' setup: only this loss", (), {"student_taps": ("projector",), "teacher_taps": ("unpooled",)}, task_weight=0.0
    ),
    "sp": Defaults("The paper's and RepDistiller's weight", ("stage-1",), {"weight": 3000.0}),
    "srrl": Defaults(
        "as for ImageNet",
        (),
        {
            "student_taps": ("stage-1",),
            "teacher_taps": ("pooled",),
            "feature_weight": 1.0,
            "regression_weight": 1.0,
        },
    ),
    "ttm": Defaults(
        "The paper's values for vgg13 → vgg8 (table 8)",
        (),
        {"weight": 45.0, "standardize": False, "temperature": 10.0, "weighted": False},
    ),
    "vid": Defaults(REPDISTILLER, ("stages",), {"initial_variance": 5.0, "variant": "repdistiller"}),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_defaults_of_a_method_are_those_of_its_source(name: str) -> None:
    kind, expected = load_method(name), BY_DEFAULT[name]
    assert expected.source in str(kind.Options.__doc__)
    assert kind.Options().model_dump() == MethodOptions().model_dump() | expected.options
    assert (kind.taps, kind.task_weight) == (expected.taps, expected.task_weight)


def test_every_method_has_a_weight_of_1_no_schedule_and_its_own_taps_unless_it_says_otherwise() -> None:
    assert MethodOptions().model_dump() == {
        "weight": 1.0,
        "warmup_epochs": 0.0,
        "warmup_by": "step",
        "decay": "none",
        "student_taps": None,
        "teacher_taps": None,
    }


def numbers(options: type[Any]) -> list[str]:
    """The options that are fractional numbers."""
    return [name for name, field in options.model_fields.items() if field.annotation is float]


@pytest.mark.parametrize("name", METHODS)
def test_no_number_of_a_method_is_infinite_or_a_truth_value(name: str) -> None:
    options = load_method(name).Options
    assert "weight" in numbers(options)
    for option in numbers(options):
        for value in (math.nan, math.inf, True):
            with pytest.raises(ValidationError):
                options(**{option: value})


@pytest.mark.parametrize("name", METHODS)
def test_no_method_has_a_weight_below_zero(name: str) -> None:
    with pytest.raises(ValidationError):
        load_method(name).Options(weight=-1)
