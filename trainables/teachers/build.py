"""The teacher of a job, from its configuration: a network on this rank, a cache of its logits, or a client of the service."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from trainables.config import TeacherConfig, TrainConfig
from trainables.data.loader import Loader
from trainables.device.model_input import tensor_format
from trainables.distributed.group import Group, gather_objects
from trainables.errors import DistillError
from trainables.methods.select import SelectedMethod
from trainables.methods.tap_reader import TapReader
from trainables.models.weights import load_teacher
from trainables.teachers.cache.cached_teacher import CachedTeacher, keeps, open_store
from trainables.teachers.cache.key import Images, agree_on_images, key_of, key_parts
from trainables.teachers.ensemble import MeanReader, SeveralTeachers, check_several
from trainables.teachers.network import Teacher
from trainables.teachers.service.client import ServiceTeacher
from trainables.teachers.service.protocol import Line

log = logging.getLogger("raydistill")


def load_network(
    given: TeacherConfig, classes: Sequence[str], image_size: int, seed: int, sha256: str | None = None
) -> nn.Module:
    """The teacher, or all of several, with their weights; frozen, on the CPU. `sha256`: of the first, see `load_teacher`.

    Raises:
        CheckpointError, ModelError: see `load_teacher`.
    """
    assert given.weights is not None
    named = [(given.model, given.weights, sha256), *((other.model, other.weights, None) for other in given.others)]
    models = [
        load_teacher(model, weights, num_classes=len(classes), image_size=image_size, classes=classes, seed=seed, sha256=known)
        for model, weights, known in named
    ]
    return SeveralTeachers(models).eval().requires_grad_(False) if given.others else models[0]


def teacher_reader(given: TeacherConfig, model: nn.Module, chosen: Sequence[SelectedMethod], image_size: int) -> TapReader:
    """What reads the answer of `load_network`'s model for each method.

    Raises:
        ExperimentError: see `check_several`.
        ModelError: the model has no such taps.
    """
    if not given.others:
        return TapReader(model, {c.key: c.teacher_taps for c in chosen}, name=given.model, image_size=image_size)
    check_several(given, chosen)
    return MeanReader(given.shares, {c.key: float(getattr(c.options, "temperature", 1.0)) for c in chosen})


def place(frozen: nn.Module, config: TrainConfig, group: Group) -> None:
    """Bring a network that is not trained to where it runs."""
    dtype, layout = tensor_format(config)
    frozen.to(group.device, dtype).to(memory_format=layout)
    if config.train.compile:
        frozen.compile()


def cached_teacher(
    config: TrainConfig, group: Group, classes: tuple[str, ...], loader: Loader, methods: Sequence[str]
) -> CachedTeacher:
    """The teacher whose logits are in `teacher.cache`; its network is built when one of them is missing.

    Raises:
        DistillError: see `open_store`.
    """
    assert config.teacher is not None
    name = config.teacher.model

    store, sha256 = open_store(config, group, loader, classes)

    def run() -> Teacher:
        log.info("%s: teacher.cache does not hold all of what is asked: %s runs", config.stage, name)
        return running_teacher(config.model_copy(update={"teacher_sha256": sha256}), group, classes, methods)

    return CachedTeacher(store, methods, run, device=group.device, dtype=tensor_format(config)[0], keeps=keeps(config))


def running_teacher(config: TrainConfig, group: Group, classes: Sequence[str], methods: Sequence[str]) -> Teacher:
    """The experiment's teacher as a network, for methods that read its logits.

    Raises:
        CheckpointError, ModelError: see `load_teacher`; it is not the one of `config.teacher_sha256`.
    """
    given, size = config.teacher, config.data.image_size
    assert given is not None
    network = load_network(given, classes, size, config.seed, config.teacher_sha256)
    place(network, config, group)
    return Teacher(network, TapReader(network, dict.fromkeys(methods, ()), name=given.model, image_size=size))


def service_teacher(
    config: TrainConfig, group: Group, loader: Loader, classes: Sequence[str], lines: Sequence[Line], methods: Sequence[str],
    dtype: torch.dtype,
) -> ServiceTeacher:  # fmt: skip
    """The teacher whom `lines` lead to. Every rank calls it.

    Raises:
        DistillError: the teacher or the data cannot be read, or the workers see different images.
    """
    images = agree_on_images(config.data.path, loader, group, "teacher.service")
    told = gather_objects(_key(config, images, classes) if group.is_main else None, group)[0]
    if isinstance(told, DistillError):
        raise told
    key, sha256 = told
    settings = config.model_copy(update={"teacher_sha256": sha256}).model_dump(mode="json")
    return ServiceTeacher(lines, key, settings, classes, images.num_samples, methods, device=group.device, dtype=dtype)


def _key(config: TrainConfig, images: Images, classes: Sequence[str]) -> tuple[str, str] | DistillError:
    """On rank 0: whose answers are asked for, and the teacher's hash.

    A timing run shares no answers, since it is to say what its own teacher costs.
    """
    try:
        parts = key_parts(config, images, classes, None)
    except DistillError as error:
        return error
    own = "" if config.train.max_steps is None else f"-{config.labels.get('trial', config.stage)}"
    return key_of(parts) + own, parts["teacher"]["sha256"]
