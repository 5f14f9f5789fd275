"""Says which values of an experiment count for nothing: another key's value leaves them unread, or a sweep has others."""

from collections.abc import Collection

from service.config.dotted import flatten
from service.config.experiment import Resolved
from service.config.schema import Experiment
from trainables.notices import notice

NOT_STEP, NOT_WSD = ("constant", "cosine", "wsd"), ("constant", "step", "cosine")
NOT_CROP_FLIP = ("none", "pad_crop_flip")
UNREAD_WITH = {
    "data.fidelity": ("data.augment", NOT_CROP_FLIP),
    "data.min_crop_area": ("data.augment", NOT_CROP_FLIP),
    "optim.decay_ratio": ("optim.schedule", NOT_WSD),
    "optim.delta": ("optim.name", ("sgd", "adamw")),
    "optim.gamma": ("optim.schedule", NOT_STEP),
    "optim.lr_base_batch": ("optim.lr_scaling", ("none",)),
    "optim.milestones": ("optim.schedule", NOT_STEP),
    "optim.momentum": ("optim.name", ("adamw",)),
    "optim.nesterov": ("optim.name", ("adamw",)),
}
"""A key → another one, and the values of that with which nothing reads the first."""


def note_unread(resolved: Resolved, searched: Collection[str] = ()) -> None:
    """Name the values that nothing reads, and those of `--set` that a sweep over the keys `searched` replaces.

    A recipe's and a default are not named, and none with `optim.losses`, whose optimizers have schedules of their own.
    """
    values = flatten(resolved.experiment.model_dump(mode="json"))
    written = {key for key, source in resolved.sources.items() if not source.startswith("recipe ")}
    for key in sorted(written):
        if _is_in(key, searched):
            if resolved.sources[key] == "--set":
                notice(f"--set {key}: each trial has a value of the sweep's instead")
        elif key in UNREAD_WITH and not resolved.experiment.optim.losses:
            other, without = UNREAD_WITH[key]
            if values[other] in without and not _is_in(other, searched) and values[key] != _default_of(key):
                notice(f"{key} {values[key]}: nothing reads it with {other} {values[other]}")


def _is_in(key: str, searched: Collection[str]) -> bool:
    return any(f"{key}.".startswith(f"{each}.") for each in searched)


def _default_of(key: str) -> object:
    section, name = key.split(".")
    return Experiment.model_fields[section].annotation.model_fields[name].default  # type: ignore[union-attr]
