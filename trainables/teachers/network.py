"""The frozen teacher network: from its weights to a device, and its forward pass.

Shapes: B samples of this rank, C channels, H W pixels, K classes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainables.config import OtherTeacherConfig, TeacherConfig, TrainConfig
from trainables.device.compilation import compile_model
from trainables.device.tensor_format import tensor_format
from trainables.distributed.batch_norm import GlobalBatchNorm
from trainables.methods.contract import ModelOutputs
from trainables.methods.select import SelectedMethod, select_methods
from trainables.methods.tap_reader import TapReader
from trainables.models.model_input import ModelInput, student_input, teacher_input
from trainables.models.pixels import take_pixels
from trainables.models.registry import construct
from trainables.models.weights import load_teacher
from trainables.teachers.ensemble import EnsembleReader, TeacherEnsemble
from trainables.teachers.interface import TeacherInterface, TeacherRequest
from trainables.teachers.rows import RowFormat

ROWS = "rows"


class TeacherNetwork(TeacherInterface):
    """A frozen model in eval mode, but for batch norms that use the statistics of the batch."""

    def __init__(self, model: nn.Module, reader: TapReader):
        self.model = model
        self._reader = reader
        self._batch_norms = [module for module in model.modules() if isinstance(module, GlobalBatchNorm)]

    @property
    def networks(self) -> list[nn.Module]:
        """The models of an ensemble, else the one that there is."""
        return list(self.model.models) if isinstance(self.model, TeacherEnsemble) else [self.model]

    @property
    def tapped_modules(self) -> frozenset[str]:
        """The paths of the network's modules that methods read."""
        return self._reader.modules

    def skip(self, images_BCHW: Tensor, num_calls: int) -> None:
        """See `TeacherInterface`; a sharded network runs, so that other ranks get this rank's part of the parameters."""
        for _ in range(num_calls if self.is_collective else 0):
            self(images_BCHW[:1], 0)

    def __call__(self, images_BCHW: Tensor, num_rows: int, request: TeacherRequest | None = None) -> dict[str, ModelOutputs]:
        """See `TeacherInterface`; it runs for whatever images it gets."""
        for norm in self._batch_norms:  # dummy images form no batch, and one rank may run some alone
            norm.train(request is not None)
        if self._batch_norms:  # the dummy image of a rank without samples is no part of the batch
            images_BCHW = images_BCHW[:num_rows]
        # Not inference mode: a method's backward cannot use its tensors.
        with torch.no_grad(), self._reader.capture():
            return self._reader.pop(self.model(images_BCHW), num_rows)


def fit(teacher: TeacherConfig | OtherTeacherConfig, config: TrainConfig, classes: Sequence[str]) -> dict[str, Any]:
    """The arguments of `load_teacher` and `teacher_sha256` for one of a job's teachers."""
    return {
        "name": teacher.model,
        "weights": str(teacher.weights),
        "image_size": teacher_input(teacher, config.data).image_size,
        "classes": classes,
        "seed": config.seed,
        "logits": config.distill is None
        or any(each.requires.teacher and each.reads_classes for each in select_methods(config.distill)),
        "weights_key": teacher.weights_key,
    }


def load_network(config: TrainConfig, classes: Sequence[str]) -> nn.Module:
    """The teacher with its weights, or an ensemble of several; frozen, on the CPU.

    Raises CheckpointError, ModelError: see `load_teacher`; or the file is not the teacher of `config.teacher_sha256`.
    """
    assert config.teacher is not None
    return _frozen(config, lambda each: load_teacher(**fit(each, config, classes), sha256=config.teacher_sha256))


def untrained_network(config: TrainConfig, num_classes: int) -> nn.Module:
    """What `load_network` returns, without weights. Raises ModelError: a model does not take such images."""
    assert config.teacher is not None

    def build(each: TeacherConfig | OtherTeacherConfig) -> nn.Module:
        size = _input(each, config).image_size
        return construct(each.model, num_classes=num_classes, image_size=size, seed=config.seed)

    return _frozen(config, build)


def _frozen(config: TrainConfig, build: Callable[[TeacherConfig | OtherTeacherConfig], nn.Module]) -> nn.Module:
    """The teacher or an ensemble, each model in the job's dtype, and taking pixels."""
    assert config.teacher is not None
    models = []
    for each in config.teacher.with_others:
        model = build(each)
        take_pixels(model, _input(each, config))
        models.append(model.to(tensor_format(config)[0]))
    return (TeacherEnsemble(models) if len(models) > 1 else models[0]).eval().requires_grad_(False)


def _input(teacher: TeacherConfig | OtherTeacherConfig, config: TrainConfig) -> ModelInput:
    """The input of a teacher; of one that is still to be trained, that of the images that it will be trained on."""
    return student_input(config.data) if teacher.weights is None else teacher_input(teacher, config.data)


def teacher_reader(teacher: TeacherConfig, model: nn.Module, methods: Sequence[SelectedMethod], image_size: int) -> TapReader:
    """The reader of what each method needs of `load_network`'s model. Raises ModelError: the model has no such taps."""
    if not teacher.others:
        taps = {method.key: method.teacher_taps for method in methods}
        without_logits = [method.key for method in methods if not method.requires.logits]
        return TapReader(model, taps, name=teacher.model, image_size=image_size, without_logits=without_logits)
    return EnsembleReader(model, teacher.shares, [method.key for method in methods])


def move(network: nn.Module, config: TrainConfig, device: torch.device) -> nn.Module:
    """A network that is not trained, moved to a device in the job's tensor format; compiled where `train.compile` says so."""
    dtype, layout = tensor_format(config)
    network.to(device, dtype).to(memory_format=layout)  # type: ignore[call-overload]  # torch declares no memory_format alone
    compile_model(network, config.train.compile)
    return network


def row_network(config: TrainConfig, device: torch.device, classes: Sequence[str], row_format: RowFormat) -> TeacherNetwork:
    """The experiment's teacher as a network on a device, whose outputs for the key `ROWS` are what rows are made of.

    Raises CheckpointError, ModelError: see `load_network`; or the model has other taps.
    """
    assert config.teacher is not None
    network, taps = load_network(config, classes), {ROWS: [tap for tap, _ in row_format.taps]}
    without_logits = () if row_format.has_logits else (ROWS,)
    size = config.data.image_size
    reader = TapReader(network, taps, name=config.teacher.model, image_size=size, without_logits=without_logits)
    return TeacherNetwork(move(network, config, device), reader)
