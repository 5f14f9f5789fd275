"""Load teachers with weights from our own checkpoints, from a library's published weights, or from a file.

A file yields candidate state dicts (`weight_files`). `state_match` picks the one that fits the model, as it is or after the
library's own conversion (`convert_state`). If the weights record their class names, and have more classes than the data or
another order, the classifier's rows for the data's classes are selected (`classes`). If no method reads logits, a model with
other classes is loaded without its classifier and returns its pooled features.
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
from trainables.models.libraries.interface import WORDNET_ID, Library, TrainedInput
from trainables.models.libraries.timm import architecture
from trainables.models.model_input import trained_input
from trainables.models.names import ModelName, check_model_name
from trainables.models.registry import check_forward, construct
from trainables.models.state_match import compare, describe, expected_tensors, find_matches, is_read, part_of
from trainables.models.tap_names import last_layer
from trainables.models.weight_files import Candidate, check_values, read_candidates, read_safetensors, recorded_classes
from trainables.notices import notice
from trainables.user_code import file_of, option_key, read_source


class _Weights(NamedTuple):
    """The source of a model's weights, resolved before any tensor is read."""

    name: str
    found: ModelName
    weights: str
    path: Path | None
    """None for published weights."""
    header: CheckpointHeader | None
    """The header of a checkpoint of ours, otherwise None."""
    record: TrainedInput | None
    num_classes: int
    """Classes of the weights; 0 if they have no classifier."""
    rows: tuple[int, ...] | None
    """Classifier row of each of the data's classes; None if the weights have exactly these classes in this order."""
    key: str | None
    other_classes: bool = False
    """Whether the weights' classes differ from the data's."""
    embeddings: ClassEmbeddings | None = None
    """Turns the model's output into logits; None if its own classifier does."""

    @property
    def title(self) -> str:
        """What messages call them."""
        return f"{self.weights} of {self.name}" if self.path is None else str(self.path)

    @property
    def library(self) -> Library:
        return LIBRARIES[self.found.library]

    @property
    def built_classes(self) -> int:
        """Classes of the model's own classifier; 0 if the file stores class embeddings instead."""
        return 0 if self.header is not None and self.header.logit_scale else self.num_classes

    @property
    def rescales(self) -> bool:
        """Whether the model rescales its input when it uses these weights."""
        if self.header is not None:
            return self.header.transform_input
        return self.path is not None and self.library.rescales_input(self.found.name, self.path)

    def built_name(self) -> str:
        """The name to build the model by: its weights' folder or repository if that has a config, otherwise its own name.

        Raises ModelError: the folder or repository has another model.
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
        if code := read_source(self.found.name):  # changed model code may compute something else with the same tensors
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
    """Load model `name` with its `weights` on the CPU in float32, frozen and in eval mode.

    `weights` is one of: our own checkpoint, or the directory of a run or stage that has one; a torch.save file with a state
    dict, a safetensors file, or a numpy .npz that timm converts; a timm or Hugging Face folder with such a file; a torchvision
    weights name (`IMAGENET1K_V1`, `DEFAULT`), a timm pretrained tag, or `hf-hub:` with a timm or transformers repository. Only
    published weights are downloaded. `weights_key` selects an entry of a file or a prefix of its tensor names. One notice says
    what was selected, renamed, resampled or left out. `classes` are the data's, in label order; weights that record their class
    names may have more classes, in another order. `sha256` is the expected `teacher_sha256`; None accepts any.

    With `logits` False nothing reads the logits: a model with other classes or none is loaded without a classifier (see
    `has_classifier`), with a notice. `zero_shot`, a file and a scale, computes logits from the model's output, which is features
    or CLIP's projection of them (see `ClassEmbeddings`).

    Raises:
        CheckpointError: the file is missing or damaged, belongs to another model, lacks some of the classes or has another hash,
            or several of its entries fit and `weights_key` selects none.
        ModelError: the model or weights do not exist, a download failed, or the model does not accept the image size.
    """
    source, model, state, rescales = _find_and_load(
        name, weights, classes, weights_key, image_size, seed, zero_shot, logits=logits
    )
    if sha256 is not None and source.digest(state, rescales=rescales) != sha256:  # of tensors in memory: a file is read once
        raise CheckpointError(
            f"{source.path or weights}: on {socket.gethostname()} this is not the {name} that the job started with: the file was "
            "replaced, or differs between nodes: put the same file on all nodes, then run the command again or resume it"
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
    """Initialize `model`, named `name`, from `weights`; its classifier only if their classes are the data's.

    Raises as `load_teacher` does. Also ModelError: the weights' model rescales its input. CheckpointError: it was built with
    other arguments.
    """
    shape: dict[str, Any] = {"image_size": image_size, "seed": seed}
    loaded = load_teacher(name, weights, **shape, classes=classes, logits=False, weights_key=weights_key)
    if hasattr(loaded, COSINES):  # a cosine classifier, which trained models do not have
        delattr(loaded, COSINES)
    if getattr(loaded, "transform_input", False):
        raise ModelError(f"{weights} expect a {name} that rescales its input, which cannot be trained: choose other weights")
    own, state = {**model.state_dict(), **part_of(model, loaded)}, loaded.state_dict()
    whole = model if has_classifier(loaded) == has_classifier(model) else construct(name, num_classes=0, **shape)
    if different := list(chain.from_iterable(compare(state, expected_tensors(whole)))):
        raise CheckpointError(
            f"{weights} belong to a {name} with other arguments ({first_three(different)}): set those arguments in args"
        )
    with torch.no_grad():
        for key, tensor in state.items():
            if key in own:
                own[key].copy_(tensor)


def other_classes(
    name: str, weights: str, *, image_size: int, classes: Sequence[str], seed: int, weights_key: str | None
) -> OtherClassesError | None:
    """Return how the classes of `weights` differ from the data's, or None if they do not. Tensors are read only without a record.

    Raises as `load_teacher` does, and AmbiguousClassesError: the classes may be the same.
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
    """Hash a teacher's tensors with their names, types and shapes, independently of the file format. The hash includes input
    rescaling, the selected classes and class embeddings. Raises as `load_teacher` does."""
    source, _, state, rescales = _find_and_load(name, weights, classes, weights_key, image_size, seed, zero_shot, logits=logits)
    return source.digest(state, rescales=rescales)


def _find_and_load(
    name: str, weights: str, classes: Sequence[str], key: str | None, size: int, seed: int, zero_shot: ZeroShot, *, logits: bool
) -> tuple[_Weights, nn.Module, Mapping[str, Tensor], bool]:
    """Return the resolved weights and `_load`'s results. Other classes than the data's raise an error if `logits` are read."""
    embeddings = None if zero_shot is None else read_class_embeddings(*zero_shot, classes)
    width = len(classes) or 1 if embeddings is None else embeddings.rows_KD.shape[1]
    source = _find(name, weights, width, key)._replace(embeddings=embeddings, other_classes=embeddings is not None or not classes)
    try:
        if embeddings is None:
            source = _with_own_embeddings(source._replace(rows=_rows(source, classes)))
        else:
            _refuse_classifier(source, source.num_classes, width)
        loaded = _load(source, size, seed)
        has_names = source.record is not None and (source.record.categories or source.record.wordnet_ids)
        if logits and classes and embeddings is None and not has_names:
            notice(f"weights {source.title}: they record no usable class names; label 0 is taken for {classes[0]!r}, and so on")
        return source, *loaded
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
    """Add the class embeddings of a checkpoint of ours that has some, for the data's classes in label order."""
    if source.path is None or source.header is None or source.header.logit_scale is None:
        return source
    rows_KD = read_safetensors(source.path)[CLASS_EMBEDDINGS]
    rows_KD = rows_KD if source.rows is None else rows_KD[list(source.rows)]
    own = ClassEmbeddings(str(source.path), rows_KD, source.header.logit_scale)
    return source._replace(embeddings=own, rows=None, other_classes=True)


def _refuse_classifier(source: _Weights, num_classes: int, width: int) -> None:
    """Raise CheckpointError if the last layer is a classifier, not a projection to the embedding space (timm's CLIP has one)."""
    named = source.record is not None and (source.record.categories or source.record.wordnet_ids)
    if num_classes and (named or num_classes != width):
        raise CheckpointError(
            f"{source.weights} of {source.name} has its own classifier with {num_classes} classes, which teacher.classes would "
            "replace: leave out teacher.classes, or choose weights without a classifier"
        )


def _find(name: str, weights: str, num_classes: int, key: str | None) -> _Weights:
    """Resolve `weights`. Without a record of their classes, `num_classes` is assumed until the tensors are read.

    Raises CheckpointError or ModelError: the weights do not exist or belong to another model.
    """
    found, path = check_model_name(name), locate_checkpoint(weights)
    if path is None and weights.startswith(HUB_SCHEMES) and not LIBRARIES[found.library].has_hub:
        raise ModelError(f"{weights} is a timm model: write timm/{architecture(weights)} as the model")
    header = read_checkpoint_header(path) if path is not None and is_safetensors(path) else None
    if header is not None and not found.is_built_as(check_model_name(header.model)):
        raise CheckpointError(
            f"{path} is a {header.model}, not a {name}: write {header.model} as the model, or choose another checkpoint"
        )
    if key is not None and (path is None or header is not None or is_npz(path)):
        raise CheckpointError(f"{weights}: weights_key {key!r} selects an entry of a file, but these are one model: leave it out")
    if header is not None:  # it records how the model was built; a model file that the user names is run instead of its own
        built = check_model_name(header.model)
        name, found = (name, found._replace(arguments=built.arguments)) if file_of(name) else (header.model, built)
    record = header.trained_input if header is not None else _with_file_classes(trained_input(name, weights), path)
    return _Weights(name, found, weights, path, header, record, record.num_classes if record else num_classes, None, key)


def _with_file_classes(record: TrainedInput | None, path: Path | None) -> TrainedInput | None:
    """Add the class names that the weight file itself records, if `record` has none."""
    if path is None or (record is not None and record.categories) or not (lists := recorded_classes(path)):
        return record
    ids = next((names for names in lists if all(map(WORDNET_ID.fullmatch, names))), ())
    names = tuple(", ".join(synonyms) for synonyms in zip(*lists, strict=True))
    record = record or TrainedInput(0, (), (), 0)  # only the classes of a record are read in this module
    return record._replace(num_classes=len(names), categories=names, wordnet_ids=ids)


def _rows(source: _Weights, classes: Sequence[str]) -> tuple[int, ...] | None:
    """Return the classifier rows of the data's classes (see `class_rows`). Raises OtherClassesError."""
    what = source.title
    if source.record is None:
        return None
    if not source.num_classes or not classes:
        has = f"{source.num_classes} classes, none of which is needed" if source.num_classes else "no classifier"
        raise OtherClassesError.of(f"{what} has {has}", TRAINED_WITH_CLASSES, source.num_classes)
    return class_rows(source.record, classes, what, ours=source.header is not None)


def _load(source: _Weights, image_size: int, seed: int) -> tuple[nn.Module, Mapping[str, Tensor], bool]:
    """Return the model with all classes of its weights, its tensors as stored, and whether it rescales its input."""
    path, name = source.path, source.name
    if path is None:
        if source.found.arguments:  # check them first: the library would blame the download
            construct(name, num_classes=source.num_classes, image_size=image_size, seed=seed)
        with torch.random.fork_rng(devices=[]):  # libraries initialize parameters before they overwrite them
            model = source.library.published(source.found.name, source.weights, image_size, source.found.kwargs)
        return model, model.state_dict(), bool(getattr(model, "transform_input", False))
    model = construct(source.built_name(), num_classes=source.built_classes, image_size=image_size, seed=seed)
    if is_npz(path):
        load_npz(model, path, name, source.num_classes)
        state: Mapping[str, Tensor] = model.state_dict()
    else:
        state = _file_state(model, source, path, image_size)
        model.load_state_dict(state, strict=False)
    if source.rescales:
        model.transform_input = True  # type: ignore[assignment]
    return model, state, source.rescales


def _rebuilt_without_classifier(model: nn.Module, source: _Weights, image_size: int, seed: int) -> nn.Module:
    """Rebuild `model` as its library builds it without a classifier (maybe another class), with the same tensors."""
    bare = construct(source.built_name(), num_classes=0, image_size=image_size, seed=seed)
    state = part_of(model, bare)
    bare.load_state_dict({name: state[name] for name in bare.state_dict()})
    if getattr(model, "transform_input", False):
        bare.transform_input = True  # type: ignore[assignment]
    return bare


def _refuse_other_arch(source: _Weights, arch: str) -> None:
    """Raise CheckpointError if the file records another model of the library, which may have equal tensors but compute
    something else, as tf_efficientnet_b0 and efficientnet_b0 do."""
    own = source.found.name
    if arch != own and arch in (known := source.library.names()) and own in known:
        named = source.name.partition("(")[0]
        raise CheckpointError(
            f"{source.path} is a {arch} by its entry arch, not a {own}: write {named[: -len(own)]}{arch} as the model, or remove "
            f"that entry"
        )


def _file_state(model: nn.Module, source: _Weights, path: Path, image_size: int) -> dict[str, Tensor]:
    """Read a file's tensors by their names in the model, in the model's shapes."""
    own: dict[str, Tensor] = {}
    name, header = source.name, source.header
    if header is not None:
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
    if not any(match.rank):
        _refuse_other_arch(source, match.candidate.arch)
    else:
        conversion, how = converted(model, match, image_size)
        if not how:
            num_classes = 0 if source.other_classes else source.num_classes
            raise mismatch(match, model, path, name, num_classes, image_size)
        state, taken = conversion, f"{taken or f'weights {path}'}: {how}"
    if len(matches) > 1:
        addresses = [each.address or "the file itself" for each in matches]
        raise CheckpointError(
            f"{path} has {len(matches)} models that fit {name}, {' and '.join(addresses)}: choose one with weights_key, for "
            f"example teacher.weights_key={matches[0].address or matches[1].address}"
        )
    expected = expected_tensors(model)
    for key, value in state.items():
        check_values(key, value, expected.get(key), path)
    if not taken and header is None and path.name != Path(source.weights).name:
        taken = f"weights {source.weights}: {path.name} in it"
    if taken:
        notice(taken)
    return {**own, **state}  # `own` adds num_batches_tracked: our checkpoints restore the model bit for bit


def _select_rows(model: nn.Module, source: _Weights) -> None:
    """Reduce the final layer to the rows of the data's classes, in label order."""
    last = last_layer(model)
    if not isinstance(last, nn.Linear | nn.Conv2d) or len(last.weight) != source.num_classes:
        raise CheckpointError(
            f"{source.weights} of {source.name}: its last layer, a {type(last).__name__}, does not have one row for each of its "
            f"{source.num_classes} classes, so the data's cannot be selected: choose a checkpoint trained on this data"
        )
    for parameter in last.parameters(recurse=False):
        parameter.data = parameter.data[list(source.rows or ())]
    setattr(last, "out_features" if isinstance(last, nn.Linear) else "out_channels", len(source.rows or ()))
