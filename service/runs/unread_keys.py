"""Tells which values of an experiment have no effect: another key's value leaves them unread, or a sweep has others."""

import json
from collections.abc import Collection, Sequence

from service.config.dotted import flatten
from service.config.experiment import Resolved
from service.config.schema import Experiment
from trainables.notices import notice

NOT_STEP, NOT_WSD = ("constant", "cosine", "wsd"), ("constant", "step", "cosine")
NOT_CROP_FLIP = ("none", "pad_crop_flip")
UNREAD_WITH = (
    ("data.fidelity", "data.augment", NOT_CROP_FLIP),
    ("data.fidelity", "data.decoder", ("gpu",)),
    ("data.min_crop_area", "data.augment", NOT_CROP_FLIP),
    ("optim.decay_ratio", "optim.schedule", NOT_WSD),
    ("optim.delta", "optim.name", ("sgd", "adamw")),
    ("optim.gamma", "optim.schedule", NOT_STEP),
    ("optim.lr_base_batch", "optim.lr_scaling", ("none",)),
    ("optim.milestones", "optim.schedule", NOT_STEP),
    ("optim.momentum", "optim.name", ("adamw",)),
    ("optim.nesterov", "optim.name", ("adamw",)),
)
"""A key, another one, and the values of the latter with which nothing reads the former."""


def note_unread(resolved: Resolved, points: Sequence[Collection[str]] = ()) -> None:
    """Name values of UNREAD_WITH that nothing reads, and those of `--set` that a sweep replaces in every trial.

    `points` are the keys of a sweep's points. Defaults and a recipe's values are not named. With `optim.losses`, whose optimizers
    have schedules of their own, only those of `--set` are.
    """
    values = flatten(resolved.experiment.model_dump(mode="json"))
    written = {key for key, source in resolved.sources.items() if not source.startswith("recipe ")}
    for key in sorted(key for key, source in resolved.sources.items() if source == "--set"):
        if points and all(_is_in(key, point) for point in points):
            notice(f"--set {key}: each trial has a value of the sweep's instead")
    for key, other, without in UNREAD_WITH:
        is_searched = any(_is_in(each, point) for each in (key, other) for point in points)
        if key not in written or is_searched or resolved.experiment.optim.losses:
            continue
        if values[other] in without and values[key] != _default_of(key):
            notice(f"{key} {json.dumps(values[key])}: nothing reads it with {other} {values[other]}")


def _is_in(key: str, searched: Collection[str]) -> bool:
    return any(f"{key}.".startswith(f"{each}.") for each in searched)


def _default_of(key: str) -> object:
    section, name = key.split(".")
    return Experiment.model_fields[section].annotation.model_fields[name].default  # type: ignore[union-attr]
