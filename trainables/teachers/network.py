"""The frozen teacher networks: from their weights to a device, and their forward passes.

Shapes: B samples of this rank, C channels, H W pixels, K classes.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from trainables.config import TeacherOfSeveralConfig, TrainConfig, WeightedConfig
from trainables.data.loader.loader import Loader
from trainables.device.compilation import compile_model
from trainables.device.tensor_format import teacher_autocast, tensor_format
from trainables.distributed.batch_norm import GlobalBatchNorm
from trainables.errors import DistillError
from trainables.methods.contract import ModelOutputs
from trainables.methods.select import SelectedMethod, select_methods
from trainables.methods.tap_reader import TapReader
from trainables.models.class_embeddings import ClassEmbeddings, output_width
from trainables.models.model_input import teacher_input, trained_input
from trainables.models.pixels import take_pixels
from trainables.models.registry import construct
from trainables.models.weights import load_teacher
from trainables.teachers.ensemble import combine
from trainables.teachers.interface import TeacherInterface, TeacherRequest
from trainables.teachers.rows import RowFormat

ROWS = "rows"


class TeacherNetwork(TeacherInterface):
    """Frozen models in eval mode, but for batch norms that use the statistics of the batch; they run in turn."""

    def __init__(
        self,
        networks: Sequence[nn.Module],
        readers: Sequence[TapReader],
        shares: Sequence[float] = (1.0,),
        autocasts: Sequence[Callable[[], contextlib.AbstractContextManager[None]]] = (),
    ):
        """A network, its reader, its part of 1 and the context of its precision (none: the caller's), for each teacher."""
        self.networks, self.readers, self._shares = list(networks), list(readers), shares
        self._autocasts = autocasts or [contextlib.nullcontext] * len(networks)
        self._batch_norms = [m for network in networks for m in network.modules() if isinstance(m, GlobalBatchNorm)]
        self._is_training = True

    def skip(self, images_BCHW: Tensor, num_calls: int) -> None:
        """See `TeacherInterface`; a sharded network runs, so that other ranks get this rank's part of the parameters."""
        for _ in range(num_calls if self.is_collective else 0):
            self(images_BCHW[:1], 0)

    def for_validation(self, loader: Loader) -> Self:
        """See `TeacherInterface`. Batch norms use their running statistics: ranks may have different numbers of batches."""
        teacher = copy.copy(self)
        teacher._is_training = False
        return teacher

    def __call__(self, images_BCHW: Tensor, num_rows: int, request: TeacherRequest | None = None) -> dict[str, ModelOutputs]:
        """See `TeacherInterface`; it runs for whatever images it gets."""
        for norm in self._batch_norms:  # dummy images form no batch, and one rank may run some alone
            norm.train(self._is_training and request is not None)
        if self._batch_norms:  # the dummy image of a rank without samples is no part of the batch
            images_BCHW = images_BCHW[:num_rows]
        found = []
        # Not inference mode, which saves no time here: a method's backward cannot use its tensors.
        with torch.no_grad():
            for network, reader, precision in zip(self.networks, self.readers, self._autocasts, strict=True):
                with precision(), reader.capture():
                    found.append(reader.pop(network(images_BCHW), num_rows))
            return combine(found, self._shares)


def by_key(teachers: Sequence[WeightedConfig]) -> Iterator[tuple[str, WeightedConfig]]:
    """The key of each teacher's section, and the section."""
    for number, each in enumerate(teachers):
        yield f"teachers[{number}]" if isinstance(each, TeacherOfSeveralConfig) else "teacher", each


@contextlib.contextmanager
def naming(key: str) -> Iterator[None]:
    """What is raised here says of which of several teachers it is."""
    try:
        yield
    except DistillError as error:
        if key != "teacher":
            error.args = (f"{key}: {error}",)
        raise


def reads_logits(config: TrainConfig) -> bool:
    """Whether a method reads what a teacher says of the classes; yes where no methods are named."""
    methods = select_methods(config.distill) if config.distill is not None else None
    return methods is None or any(each.requires.teacher and each.requires.reads_classes for each in methods)


def fit(teacher: WeightedConfig, config: TrainConfig, classes: Sequence[str]) -> dict[str, Any]:
    """The arguments of `load_teacher` and `teacher_sha256` for one of a job's teachers."""
    return {
        "name": teacher.model,
        "weights": str(teacher.weights),
        "image_size": teacher_input(teacher, config.data).image_size,
        "classes": classes,
        "seed": config.seed,
        "logits": reads_logits(config),
        "weights_key": teacher.weights_key,
        "zero_shot": teacher.zero_shot,
    }


def load_networks(config: TrainConfig, classes: Sequence[str]) -> list[nn.Module]:
    """The teachers with their weights; frozen, on the CPU.

    Raises CheckpointError, ModelError: see `load_teacher`; or the file is not the teacher of `config.teacher_sha256`.
    """
    return _frozen(config, lambda each: load_teacher(**fit(each, config, classes), sha256=config.teacher_sha256))


def untrained_networks(config: TrainConfig, num_classes: int) -> list[nn.Module]:
    """What `load_networks` returns, without weights. Raises ModelError: a model does not take such images."""

    def build(each: WeightedConfig) -> nn.Module:
        record = trained_input(each.model, each.weights) if each.weights is not None else None
        is_bare = record is not None and not record.num_classes and not reads_logits(config)
        size = teacher_input(each, config.data).image_size
        if not each.embeds_classes:
            return construct(each.model, num_classes=0 if is_bare else num_classes, image_size=size, seed=config.seed)
        model = construct(each.model, num_classes=0, image_size=size, seed=config.seed)
        ClassEmbeddings("", torch.ones(num_classes, output_width(model, size)), 1.0).classify(model, size, name=each.model)
        return model

    return _frozen(config, build)


def _frozen(config: TrainConfig, build: Callable[[WeightedConfig], nn.Module]) -> list[nn.Module]:
    """The teachers, each in the job's dtype, and taking pixels."""
    models = []
    for key, each in by_key(config.all_teachers):
        with naming(key):
            model = build(each)
            take_pixels(model, teacher_input(each, config.data))
        models.append(model.to(tensor_format(config)[0]).eval().requires_grad_(False))
    return models


def teacher_readers(config: TrainConfig, networks: Sequence[nn.Module], methods: Sequence[SelectedMethod]) -> list[TapReader]:
    """The reader of what methods need of each of `load_networks`. Raises ModelError: a model has no such taps."""
    without_logits, readers = [method.key for method in methods if not method.requires.logits], []
    for number, ((key, teacher), network) in enumerate(zip(by_key(config.all_teachers), networks, strict=True)):
        taps = {method.key: method.teacher_taps for method in methods if method.teacher in (None, number)}
        size = config.data.image_size
        with naming(key):
            readers.append(TapReader(network, taps, name=teacher.model, image_size=size, without_logits=without_logits))
    return readers


def move(network: nn.Module, config: TrainConfig, device: torch.device) -> nn.Module:
    """A network that is not trained, moved to a device in the job's tensor format; compiled where `train.compile` says so."""
    dtype, layout = tensor_format(config)
    network.to(device, dtype).to(memory_format=layout)  # type: ignore[call-overload]  # torch declares no memory_format alone
    compile_model(network, config.train.compile)
    return network


def row_network(config: TrainConfig, device: torch.device, classes: Sequence[str], row_format: RowFormat) -> TeacherNetwork:
    """The experiment's teacher as a network on a device, whose outputs for the key `ROWS` are what rows are made of.

    Raises CheckpointError, ModelError: see `load_networks`; or the model has other taps.
    """
    (network,) = load_networks(config, classes)
    taps, without_logits = {ROWS: [tap for tap, _ in row_format.taps]}, () if row_format.has_logits else (ROWS,)
    name, size = config.all_teachers[0].model, config.data.image_size
    reader = TapReader(network, taps, name=name, image_size=size, without_logits=without_logits)
    precision = teacher_autocast(config.all_teachers[0], config, device)
    return TeacherNetwork([move(network, config, device)], [reader], autocasts=[precision])
