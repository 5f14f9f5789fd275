"""Teachers with weights: from a checkpoint of ours, published by a library, or from a file of weights.

A file is read as candidates (`weight_files`), of which one is the state of the model (`state_match`), as it is or after the
library's own conversion (`convert_state`). Where weights have more classes than the data, or another order, and a record of
their names, the classifier's rows of the data's classes are taken (`classes`). Where no method reads logits, a model of other
classes comes without its classifier, and gives its pooled features.
"""

import hashlib
import socket
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainables.config.models import HUB_SCHEMES, with_arguments
from trainables.errors import AmbiguousClassesError, CheckpointError, ModelError, OtherClassesError, first_three
from trainables.models.checkpoint_header import CheckpointHeader, is_safetensors, locate_checkpoint, read_checkpoint_header
from trainables.models.class_embeddings import CLASS_EMBEDDINGS, ClassEmbeddings, ZeroShot, read_class_embeddings
from trainables.models.classes import class_rows
from trainables.models.convert_state import TRAINED_WITH_CLASSES, converted, load_npz, mismatch
from trainables.models.foreign_files import is_npz
from trainables.models.forward import COSINES, has_classifier
from trainables.models.libraries import LIBRARIES
from trainables.models.libraries.interface import Library
from trainables.models.libraries.timm import architecture
from trainables.models.names import ModelName, check_model_name
from trainables.models.registry import check_forward, construct
from trainables.models.state_match import compare, describe, expected_tensors, find_matches, is_read, part_of
from trainables.models.tap_names import last_layer
from trainables.models.trained_input import TrainedInput, header_record, trained_input
from trainables.models.weight_files import Candidate, check_values, read_candidates, read_safetensors
from trainables.notices import notice
from trainables.user_code import file_of, option_key, read_source


class _Weights(NamedTuple):
    """What `weights` of a model are, before a tensor is read."""

    name: str
    found: ModelName
    weights: str
    path: Path | None
    """None: published."""
    header: CheckpointHeader | None
    """What a checkpoint of ours says of itself."""
    record: TrainedInput | None
    num_classes: int
    """Theirs; 0: they have no classifier."""
    rows: tuple[int, ...] | None
    """Which of their classes are the data's; None: all, in this order."""
    key: str | None
    other_classes: bool = False
    """They are not the data's."""
    embeddings: ClassEmbeddings | None = None
    """What makes logits of its output; None: its own classifier does."""

    @property
    def library(self) -> Library:
        return LIBRARIES[self.found.library]

    @property
    def built_classes(self) -> int:
        """How many the model's own classifier has: none where the file has an embedding of each class."""
        return 0 if self.header is not None and self.header.logit_scale else self.num_classes

    @property
    def rescales(self) -> bool:
        """Whether the model rescales its input with this file."""
        if self.header is not None:
            return self.header.transform_input
        return self.path is not None and self.library.rescales_input(self.found.name, self.path)

    def built_name(self) -> str:
        """The model's name, or that of the folder or repository of its weights if that says how it is built.

        Raises ModelError: another model is there.
        """
        if self.path is not None:
            source = self.library.name_for_file(self.found.name, self.path)
        else:
            source = self.weights if self.weights.startswith(HUB_SCHEMES) else self.found.name
        return with_arguments(self.name if source == self.found.name else source, self.found.kwargs)

    def digest(self, state: Mapping[str, Tensor], *, rescales: bool) -> str:
        digest = hashlib.sha256(b"transform_input\0" if rescales else b"")
        if self.rows is not None:
            digest.update(f"rows {self.rows}\0".encode())
        if self.embeddings is not None:
            digest.update(f"class embeddings {tuple(self.embeddings.rows_KD.shape)} {self.embeddings.scale}\0".encode())
            digest.update(self.embeddings.rows_KD.numpy().tobytes())
        if code := read_source(self.found.name):  # a model in a file may compute something else with the same tensors
            digest.update(f"{option_key(self.found.name)} {code.sha256}\0".encode())
        for key in sorted(key for key in state if is_read(key)):
            tensor = state[key].detach().contiguous()
            digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def load_teacher(
    name: str,
    weights: str,
    *,
    image_size: int,
    classes: Sequence[str],
    seed: int,
    logits: bool = True,
    sha256: str | None = None,
    weights_key: str | None = None,
    zero_shot: ZeroShot = None,
) -> nn.Module:
    """Model `name` with its `weights`, on the CPU in float32, frozen and in eval mode.

    `weights` is one of: a checkpoint of ours, or the directory of a run or stage that has one; a file of torch.save with a state
    dict in it, of safetensors, or numpy's .npz where timm converts it; a folder of timm or Hugging Face with such a file; a name
    of torchvision weights (`IMAGENET1K_V1`, `DEFAULT`), a timm pretrained tag, or `hf-hub:` with a repository of either.
    `weights_key` chooses an entry of a file, or a prefix of its names. What was taken, renamed, resampled or left out is one
    notice. `classes` are the data's, in label order: weights with a record of their classes may have others besides them, and
    another order. Only published weights are downloaded. `sha256`: the expected `teacher_sha256`; None: any.

    `logits`: whether its logits are read. Otherwise a model of other classes, or of none, is one without a classifier, see
    `has_classifier`; that is a notice too. `zero_shot`, a file and a scale, make logits of its output instead, which is
    features, or CLIP's projection of them: `ClassEmbeddings`.

    Raises:
        CheckpointError: the file is missing, damaged, of another model or without some of the classes, or has another hash; or
            several of its entries fit and `weights_key` chooses none.
        ModelError: no such model or weights, a failed download, or images of a wrong size.
    """
    source, model, state, rescales = _find_and_load(
        name, weights, classes, weights_key, image_size, seed, zero_shot, logits=logits
    )
    if sha256 is not None and source.digest(state, rescales=rescales) != sha256:  # of tensors in memory: a file is read once
        raise CheckpointError(
            f"{source.path or weights}: on {socket.gethostname()} it is not the {name} with which this job began: it was "
            "replaced since, or differs by node: put the same one on all nodes, then give the command again or resume it"
        )
    if source.rows is not None:
        _select_rows(model, source)
    if source.other_classes and source.built_classes and source.embeddings is None:
        model = _rebuilt_without_classifier(model, source, image_size, seed)
    check_forward(model, image_size, 0 if source.other_classes else len(classes), name=name)
    if source.embeddings is not None:
        source.embeddings.classify(model, image_size, name=name)
    return model.eval().requires_grad_(False)


def begin_with(
    model: nn.Module, name: str, weights: str, *, image_size: int, classes: Sequence[str], seed: int, weights_key: str | None
) -> None:
    """Give `model`, of this name, the values of `weights`: but its classifier, where their classes are not the data's.

    Raises as `load_teacher` does; ModelError: the weights are of a model that rescales its input.
    CheckpointError: they are of one that was built with other arguments.
    """
    shape: dict[str, Any] = {"image_size": image_size, "seed": seed}
    loaded = load_teacher(name, weights, **shape, classes=classes, logits=False, weights_key=weights_key)
    if hasattr(loaded, COSINES):  # a classifier of another kind than a model that is trained has
        delattr(loaded, COSINES)
    if getattr(loaded, "transform_input", False):
        raise ModelError(f"{weights} are of a {name} that rescales its input, and cannot be trained on: give other weights")
    own, state = {**model.state_dict(), **part_of(model, loaded)}, loaded.state_dict()
    whole = model if has_classifier(loaded) == has_classifier(model) else construct(name, num_classes=0, **shape)
    if different := list(chain.from_iterable(compare(state, expected_tensors(whole)))):
        raise CheckpointError(f"{weights} are of a {name} with other arguments, by {first_three(different)}: write those in args")
    with torch.no_grad():
        for key, tensor in state.items():
            if key in own:
                own[key].copy_(tensor)


def other_classes(
    name: str, weights: str, *, image_size: int, classes: Sequence[str], seed: int, weights_key: str | None
) -> OtherClassesError | None:
    """In what the classes of `weights` are not the data's; None: they are. Tensors are read where nothing else tells.

    Raises as `load_teacher` does; AmbiguousClassesError: they may be the same.
    """
    source = _find(name, weights, len(classes), weights_key)
    try:
        _rows(source, classes)
        if source.record is None:
            _load(source, image_size, seed)
    except AmbiguousClassesError:
        raise
    except OtherClassesError as error:
        return error
    return None


def teacher_sha256(
    name: str,
    weights: str,
    *,
    image_size: int,
    classes: Sequence[str],
    seed: int,
    logits: bool = True,
    weights_key: str | None = None,
    zero_shot: ZeroShot = None,
) -> str:
    """A hash of all tensors of a teacher, their names, types and shapes, independent of the file; rescaling, a selection of
    classes and class embeddings are parts of it.

    Raises as `load_teacher` does.
    """
    source, _, state, rescales = _find_and_load(name, weights, classes, weights_key, image_size, seed, zero_shot, logits=logits)
    return source.digest(state, rescales=rescales)


def _find_and_load(
    name: str, weights: str, classes: Sequence[str], key: str | None, size: int, seed: int, zero_shot: ZeroShot, *, logits: bool
) -> tuple[_Weights, nn.Module, Mapping[str, Tensor], bool]:
    """The weights, and what `_load` returns of them; those of other classes are refused where `logits` are read."""
    embeddings = None if zero_shot is None else read_class_embeddings(*zero_shot, classes)
    width = len(classes) or 1 if embeddings is None else embeddings.rows_KD.shape[1]
    source = _find(name, weights, width, key)._replace(embeddings=embeddings, other_classes=embeddings is not None or not classes)
    try:
        if embeddings is None:
            source = _with_own_embeddings(source._replace(rows=_rows(source, classes)))
        else:
            _refuse_classifier(source, source.num_classes, width)
        return source, *_load(source, size, seed)
    except OtherClassesError as error:
        if embeddings is not None:
            _refuse_classifier(source, error.num_classes, width)
        elif logits:
            raise
        else:
            notice(f"weights {error.fact}: only its features are used")
        source = source._replace(num_classes=error.num_classes, other_classes=True)
    return source, *_load(source, size, seed)


def _with_own_embeddings(source: _Weights) -> _Weights:
    """The weights with the class embeddings of their file, if it has any, of the data's classes in their order."""
    if source.path is None or source.header is None or source.header.logit_scale is None:
        return source
    rows_KD = read_safetensors(source.path)[CLASS_EMBEDDINGS]
    rows_KD = rows_KD if source.rows is None else rows_KD[list(source.rows)]
    own = ClassEmbeddings(str(source.path), rows_KD, source.header.logit_scale)
    return source._replace(embeddings=own, rows=None, other_classes=True)


def _refuse_classifier(source: _Weights, num_classes: int, width: int) -> None:
    """Raises CheckpointError: the model's end is no projection to the space of the class embeddings, as CLIP's in timm is."""
    named = source.record is not None and (source.record.categories or source.record.wordnet_ids)
    if num_classes and (named or num_classes != width):
        raise CheckpointError(
            f"{source.weights} of {source.name} has a classifier of its own, of {num_classes} classes, in place of which "
            "teacher.classes would be read: leave out teacher.classes, or give weights without a classifier"
        )


def _find(name: str, weights: str, num_classes: int, key: str | None) -> _Weights:
    """Weights without a record of their classes are taken to have `num_classes`, until they are read.

    Raises CheckpointError or ModelError: there are no such weights, or they are of another model.
    """
    found, path = check_model_name(name), locate_checkpoint(weights)
    if path is None and weights.startswith(HUB_SCHEMES) and not LIBRARIES[found.library].has_hub:
        raise ModelError(f"{weights} is a model of timm's: write timm/{architecture(weights)} as the model")
    header = read_checkpoint_header(path) if path is not None and is_safetensors(path) else None
    if header is not None and not found.is_built_as(check_model_name(header.model)):
        raise CheckpointError(
            f"{path} is a {header.model}, not a {name}: write {header.model} as the model, or give another checkpoint"
        )
    if header is not None:  # which says how the model was built; a file that it names is not run where the user names one
        built = check_model_name(header.model)
        name, found = (name, found._replace(arguments=built.arguments)) if file_of(name) else (header.model, built)
    record = header_record(header) if header is not None else trained_input(name, weights)
    return _Weights(name, found, weights, path, header, record, record.num_classes if record else num_classes, None, key)


def _rows(source: _Weights, classes: Sequence[str]) -> tuple[int, ...] | None:
    """Which of the weights' classes are the data's, see `class_rows`. Raises OtherClassesError."""
    what = f"{source.weights} of {source.name}" if source.path is None else str(source.path)
    if source.record is None:
        return None
    if not source.num_classes or not classes:
        has = f"{source.num_classes} classes, of which none is needed" if source.num_classes else "no classifier"
        raise OtherClassesError.of(f"{what} has {has}", TRAINED_WITH_CLASSES, source.num_classes)
    return class_rows(source.record, classes, what, ours=source.header is not None)


def _load(source: _Weights, image_size: int, seed: int) -> tuple[nn.Module, Mapping[str, Tensor], bool]:
    """The model with all classes of its weights, its tensors as they are in the file, and whether it rescales its input."""
    path, name = source.path, source.name
    if path is None:
        _refuse_key(source, "published weights have one model")
        if source.found.arguments:  # a library's message of wrong ones is about the download
            construct(name, num_classes=source.num_classes, image_size=image_size, seed=seed)
        with torch.random.fork_rng(devices=[]):  # a library initialises parameters before it overwrites them
            model = source.library.published(source.found.name, source.weights, image_size, source.found.kwargs)
        return model, model.state_dict(), bool(getattr(model, "transform_input", False))
    model = construct(source.built_name(), num_classes=source.built_classes, image_size=image_size, seed=seed)
    if is_npz(path):
        _refuse_key(source, "an .npz file has one model")
        load_npz(model, path, name, source.num_classes)
        state: Mapping[str, Tensor] = model.state_dict()
    else:
        state = _file_state(model, source, path, image_size)
        model.load_state_dict(state, strict=False)
    if source.rescales:
        model.transform_input = True  # type: ignore[assignment]
    return model, state, source.rescales


def _rebuilt_without_classifier(model: nn.Module, source: _Weights, image_size: int, seed: int) -> nn.Module:
    """A model as its library builds it without a classifier, which may be of another class, with the tensors of `model`."""
    bare = construct(source.built_name(), num_classes=0, image_size=image_size, seed=seed)
    state = part_of(model, bare)
    bare.load_state_dict({name: state[name] for name in bare.state_dict()})
    if getattr(model, "transform_input", False):
        bare.transform_input = True  # type: ignore[assignment]
    return bare


def _refuse_key(source: _Weights, reason: str) -> None:
    if source.key is not None:
        raise CheckpointError(
            f"{source.weights}: weights_key {source.key!r} chooses an entry of a file, and {reason}: leave it out"
        )


def _file_state(model: nn.Module, source: _Weights, path: Path, image_size: int) -> dict[str, Tensor]:
    """The tensors of a file by their names in the model, each of the model's shape."""
    own: dict[str, Tensor] = {}
    name, header = source.name, source.header
    if header is not None:
        _refuse_key(source, "a checkpoint of ours has one model")
        for file in (path, *map(path.with_name, header.shards)):
            own |= {
                key.removeprefix("model."): tensor for key, tensor in read_safetensors(file).items() if key.startswith("model.")
            }
        candidates = [Candidate("", own, ())]
    else:
        candidates = [source.library.with_own_names(model, each) for each in read_candidates(path)]
    matches = find_matches(candidates, model, source.key, path)
    match = matches[0]
    taken = describe(match, path)
    state = match.state
    if any(match.rank):
        conversion, how = converted(model, match, image_size)
        if not how:
            num_classes = 0 if source.other_classes else source.num_classes
            raise mismatch(match, model, path, name, num_classes, image_size)
        state, taken = conversion, f"{taken or f'weights {path}'}: {how}"
    if len(matches) > 1:
        addresses = [each.address or "the file itself" for each in matches]
        raise CheckpointError(
            f"{path} has {len(matches)} models that fit {name}, {' and '.join(addresses)}: choose one with weights_key, as "
            f"teacher.weights_key={matches[0].address or matches[1].address}"
        )
    for key, value in state.items():
        check_values(key, value, path)
    if not taken and header is None and path.name != Path(source.weights).name:
        taken = f"weights {source.weights}: {path.name} in it"
    if taken:
        notice(taken)
    return {**own, **state}  # with the counts of its batch norms: a checkpoint of ours is its model bit for bit


def _select_rows(model: nn.Module, source: _Weights) -> None:
    """Leave of the final layer what the data's classes are computed with, in their order."""
    last = last_layer(model)
    if not isinstance(last, nn.Linear | nn.Conv2d) or len(last.weight) != source.num_classes:
        raise CheckpointError(
            f"{source.weights} of {source.name}: its last layer, a {type(last).__name__}, has not one row for each of its "
            f"{source.num_classes} classes, of which the data's cannot be selected: give a checkpoint trained on this data"
        )
    for parameter in last.parameters(recurse=False):
        parameter.data = parameter.data[list(source.rows or ())]
    setattr(last, "out_features" if isinstance(last, nn.Linear) else "out_channels", len(source.rows or ()))
