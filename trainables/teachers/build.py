"""The teacher of a job, from its configuration: a network on this rank, cached logits, or a client of the service."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trainables.config import TeacherConfig, TrainConfig
from trainables.data.loader.loader import Loader
from trainables.device.compilation import compile_model
from trainables.device.model_input import tensor_format
from trainables.distributed.group import Group, from_rank
from trainables.methods.select import SelectedMethod, check_ensemble
from trainables.methods.tap_reader import TapReader
from trainables.models.weights import load_teacher
from trainables.teachers.cache.cached_teacher import CachedTeacher
from trainables.teachers.cache.key import ImageSet, cache_key, check_same_data, key_parts
from trainables.teachers.cache.open_store import open_store, writes_cache
from trainables.teachers.ensemble import EnsembleReader, TeacherEnsemble
from trainables.teachers.network import TeacherNetwork
from trainables.teachers.service.client import ServiceTeacher
from trainables.teachers.service.protocol import LogitsRequest, TeacherConnection

log = logging.getLogger("raydistill")


def load_network(
    teacher: TeacherConfig, classes: Sequence[str], image_size: int, seed: int, sha256: str | None = None
) -> nn.Module:
    """The teacher with its weights, or an ensemble of several; frozen, on the CPU. `sha256`: of the first, see `load_teacher`.

    Raises CheckpointError, ModelError: see `load_teacher`.
    """
    assert teacher.weights is not None
    fit: dict[str, Any] = {"num_classes": len(classes), "image_size": image_size, "classes": classes, "seed": seed}
    models = [load_teacher(teacher.model, teacher.weights, **fit, weights_key=teacher.weights_key, sha256=sha256)]
    models += [load_teacher(other.model, other.weights, **fit, weights_key=other.weights_key) for other in teacher.others]
    return TeacherEnsemble(models).eval().requires_grad_(False) if teacher.others else models[0]


def teacher_reader(teacher: TeacherConfig, model: nn.Module, methods: Sequence[SelectedMethod], image_size: int) -> TapReader:
    """The reader of what each method needs of `load_network`'s model.

    Raises:
        ExperimentError: see `check_ensemble`.
        ModelError: the model has no such taps.
    """
    if not teacher.others:
        taps = {method.key: method.teacher_taps for method in methods}
        return TapReader(model, taps, name=teacher.model, image_size=image_size)
    check_ensemble(methods, teacher)
    return EnsembleReader(model, teacher.shares, [method.key for method in methods])


def on_device(network: nn.Module, config: TrainConfig, device: torch.device) -> nn.Module:
    """A network that is not trained, moved to a device in the job's tensor format; compiled where `train.compile` says so."""
    dtype, layout = tensor_format(config)
    network.to(device, dtype).to(memory_format=layout)  # type: ignore[call-overload]  # torch declares no memory_format alone
    compile_model(network, config.train.compile)
    return network


def logits_network(config: TrainConfig, device: torch.device, classes: Sequence[str], methods: Sequence[str]) -> TeacherNetwork:
    """The experiment's teacher as a network on a device, for methods (by key) that read its logits.

    Raises:
        CheckpointError: see `load_teacher`; or the file is not the teacher of `config.teacher_sha256`.
        ModelError: see `load_teacher`.
    """
    teacher, image_size = config.teacher, config.data.image_size
    assert teacher is not None
    network = on_device(load_network(teacher, classes, image_size, config.seed, config.teacher_sha256), config, device)
    return TeacherNetwork(network, TapReader(network, dict.fromkeys(methods, ()), name=teacher.model, image_size=image_size))


def cached_teacher(
    config: TrainConfig, group: Group, classes: tuple[str, ...], loader: Loader, methods: Sequence[str]
) -> CachedTeacher:
    """The teacher whose logits are in `teacher.cache`; its network is built once one of them is missing. Every rank calls it.

    Raises DistillError: see `open_store`.
    """
    assert config.teacher is not None
    model = config.teacher.model
    store, logits_format, sha256 = open_store(config, group, loader, classes)

    def build() -> TeacherNetwork:
        log.info("%s: teacher.cache does not hold all logits that are needed: %s runs", config.stage, model)
        return logits_network(config.model_copy(update={"teacher_sha256": sha256}), group.device, classes, methods)

    dtype, _ = tensor_format(config)
    return CachedTeacher(store, logits_format, methods, build, device=group.device, dtype=dtype, writes=writes_cache(config))


def service_teacher(
    config: TrainConfig,
    group: Group,
    classes: Sequence[str],
    loader: Loader,
    connections: Sequence[TeacherConnection],
    methods: Sequence[str],
) -> ServiceTeacher:
    """A client of the teacher service that `connections` lead to. Every rank calls it.

    Raises DistillError: the teacher or the data cannot be read, or the workers read different images.
    """
    images = check_same_data(config.data.path, loader, group, "teacher.service")
    key, sha256 = from_rank(lambda: _service_key(config, images, classes), group)
    dtype, _ = tensor_format(config)
    settings = config.model_copy(update={"teacher_sha256": sha256}).model_dump(mode="json")
    template = LogitsRequest(key, settings, tuple(classes))
    return ServiceTeacher(connections, template=template, methods=methods, device=group.device, dtype=dtype)


def _service_key(config: TrainConfig, images: ImageSet, classes: Sequence[str]) -> tuple[str, str]:
    """The key of the logits, and the hash of the teacher's tensors.

    A timing run shares no logits with other jobs, since it measures what its own teacher costs.
    """
    parts = key_parts(config, images, classes, None)
    suffix = "" if config.train.max_steps is None else f"-{config.labels.get('trial', config.stage)}"
    return cache_key(parts) + suffix, parts["teacher"]["sha256"]
