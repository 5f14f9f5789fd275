"""The teacher's network, from a job's configuration."""

from collections.abc import Sequence

import torch
from torch import nn

from trainables.config import TeacherConfig, TrainConfig
from trainables.device.compilation import compile_model
from trainables.device.model_input import tensor_format
from trainables.methods.select import SelectedMethod, check_ensemble
from trainables.methods.tap_reader import TapReader
from trainables.models.weights import load_teacher
from trainables.teachers.ensemble import EnsembleReader, TeacherEnsemble
from trainables.teachers.network import TeacherNetwork


def load_network(config: TrainConfig, classes: Sequence[str]) -> nn.Module:
    """The teacher with its weights, or an ensemble of several; frozen, on the CPU.

    Raises CheckpointError, ModelError: see `load_teacher`; or the file is not the teacher of `config.teacher_sha256`.
    """
    assert config.teacher is not None
    models = [
        load_teacher(
            teacher.model,
            str(teacher.weights),
            num_classes=len(classes),
            image_size=config.data.image_size,
            classes=classes,
            seed=config.seed,
            weights_key=teacher.weights_key,
            sha256=config.teacher_sha256,
        )
        for teacher in config.teacher.with_others
    ]
    return TeacherEnsemble(models).eval().requires_grad_(False) if len(models) > 1 else models[0]


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

    Raises CheckpointError, ModelError: see `load_network`.
    """
    assert config.teacher is not None
    network = on_device(load_network(config, classes), config, device)
    taps = dict.fromkeys(methods, ())
    return TeacherNetwork(network, TapReader(network, taps, name=config.teacher.model, image_size=config.data.image_size))
