"""Configuration of distillation: which methods are used, and how their weights change over time."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, field_serializer, field_validator

from trainables.config.section import Natural, NonNegative, Positive, Probability, Section


class MethodOptions(Section):
    """Options of every distillation method; each method adds its own and sets the defaults of its paper."""

    weight: NonNegative = Field(1.0, description="weight of the method's loss")
    warmup_epochs: NonNegative = Field(0.0, description="epochs over which the weight rises linearly from 0")
    warmup_by: Literal["step", "epoch_from_0", "epoch_from_1"] = Field(
        "step", description="raise the weight at every step, or once per epoch to (epoch number)/warmup_epochs"
    )
    decay: Literal["none", "linear", "cosine"] = Field(
        "none", description="how the weight falls to 0 by the end of the last epoch"
    )
    student_taps: tuple[str, ...] | None = Field(None, description="taps of the student; absent: the method's defaults")
    teacher_taps: tuple[str, ...] | None = Field(None, description="taps of the teacher; absent: the method's defaults")

    @property
    def calibration_images(self) -> int:
        """How many training images' teacher outputs the method's `calibrate` gets before the first step; 0 for none."""
        return 0

    def weight_at(self, epoch: float, epochs: int) -> float:
        """Return the weight after `epoch` of `epochs` epochs."""
        counted = {"step": epoch, "epoch_from_0": math.floor(epoch), "epoch_from_1": math.floor(epoch) + 1}[self.warmup_by]
        risen = min(counted / self.warmup_epochs, 1.0) if self.warmup_epochs else 1.0
        done = min(epoch / epochs, 1.0)
        left = {"none": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[self.decay]
        return self.weight * max(risen, 0.0) * left


class InitStageOptions(MethodOptions):
    """Options of a method that has an init stage."""

    init_epochs: Natural = Field(30, description="epochs before training that optimize the method's `init_terms`; 0: none")
    init_lr: Positive | None = Field(None, description="learning rate of these epochs; absent: optim's peak learning rate")


def init_epochs(options: MethodOptions) -> int:
    """Return the number of epochs of a method's init stage; 0 if it has none."""
    return options.init_epochs if isinstance(options, InitStageOptions) else 0


class DistillConfig(Section):
    """The student's loss: task_weight·CE + Σ over methods of weight·(its terms)."""

    method: tuple[str, ...] = Field(
        ("kd",), description="a method, a list of methods, or your own FILE.py:CLASS; none: train on labels only"
    )
    task_weight: NonNegative | None = Field(
        None, description="weight of the loss on the labels; absent: the largest default of the methods"
    )
    teacher_dropping: Probability = Field(
        0.0, description="several teachers: probability that an image skips a teacher whose loss is not its largest"
    )
    options: dict[str, dict[str, Any]] = Field({}, description="method → its options; those of unused methods are ignored")

    @property
    def keys(self) -> dict[str, str]:
        """Map each method's key in `options` and in the log to its name; FILE.py:CLASS has the key CLASS."""
        return {name.rpartition(":")[2]: name for name in self.method}

    @property
    def weighted(self) -> list[str]:
        """The keys of the methods with a nonzero weight."""
        return [key for key in self.keys if self.options.get(key, {}).get("weight") != 0]

    @field_serializer("method")
    def _serialize_method(self, method: tuple[str, ...]) -> tuple[str, ...] | str:
        return method or "none"

    @field_validator("method", mode="before")
    @classmethod
    def _parse_method(cls, method: Any) -> Any:
        if isinstance(method, list | tuple) and not method:
            raise ValueError("names no method: write one, such as kd, or none")
        if not isinstance(method, str | list | tuple):
            raise ValueError(f"must be a method or a list of methods, such as kd, not {method!r}")
        return () if method == "none" else (method,) if isinstance(method, str) else method

    @field_validator("method")
    @classmethod
    def _check_unique(cls, method: tuple[str, ...]) -> tuple[str, ...]:
        keys = [name.rpartition(":")[2] for name in method]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise ValueError(f"names {twice} twice: set its weight in distill.options.{twice}.weight instead")
        return method
