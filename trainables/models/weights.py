"""Teachers with weights: from a checkpoint of ours, published by torchvision or timm, or from a file of weights.

A file is read as candidates (`weight_files`), of which one is the state of the model (`state_match`), as it is or after the
library's own conversion (`convert_state`).
"""

import hashlib
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from trainables.data.index import file_sha256
from trainables.errors import CheckpointError, ModelError
from trainables.models.checkpoint_header import CheckpointHeader, is_safetensors, locate_checkpoint, read_checkpoint_header
from trainables.models.convert_state import converted, load_npz, mismatch
from trainables.models.foreign_files import is_npz
from trainables.models.names import ModelName, check_model_name
from trainables.models.published import published_model, timm_name
from trainables.models.registry import check_forward, construct, timm_folder_of
from trainables.models.state_match import describe, find_matches, is_read
from trainables.models.weight_files import Candidate, check_values, read_candidates, read_safetensors
from trainables.notices import notice

RESCALING = ("googlenet", "inception_v3")
"""torchvision models that rescale their input with the published weights, and with no others; no tensor shows it."""


def load_teacher(
    name: str,
    weights: str,
    *,
    num_classes: int,
    image_size: int,
    classes: Sequence[str],
    seed: int,
    sha256: str | None = None,
    weights_key: str | None = None,
) -> nn.Module:
    """Model `name` with its `weights`, on the CPU in float32, frozen and in eval mode.

    `weights` is one of: a checkpoint of ours, or the directory of a run or stage that has one; a file of torch.save with a state
    dict in it, of safetensors, or numpy's .npz where timm converts it; a folder of timm or Hugging Face with such a file; a name
    of torchvision weights (`IMAGENET1K_V1`, `DEFAULT`), a timm pretrained tag, or `hf-hub:` with a repository of timm's.
    `weights_key` chooses an entry of a file, or a prefix of its names. What was taken, renamed, resampled or left out is one
    notice. `classes` are the data's, in label order; a checkpoint of ours must have been trained on the same. Only published
    weights are downloaded. `sha256`: the expected `teacher_sha256`; None: any.

    Raises:
        CheckpointError: the file is missing, damaged, of another model or of other classes, or has another hash; or several of
            its entries fit and `weights_key` chooses none.
        ModelError: no such model or weights, weights for another number of classes, a failed download, or images of a wrong size.
    """
    found = check_model_name(name)
    path = locate_checkpoint(weights)
    rescales = False
    if path is None:
        _refuse_key(weights, weights_key, "published weights have one model")
        with torch.random.fork_rng(devices=[]):  # a library initialises parameters before it overwrites them
            model = published_model(found, weights, num_classes, image_size)
        state: Mapping[str, Tensor] = model.state_dict()
        rescales = bool(getattr(model, "transform_input", False))
    else:
        built = _name_to_build(found, name, path)
        model = construct(built, num_classes=num_classes, image_size=image_size, seed=seed)
        if is_npz(path):
            _refuse_key(weights, weights_key, "an .npz file has one model")
            load_npz(model, path, name, num_classes)
            state = model.state_dict()
        else:
            state = _file_state(model, path, name, num_classes, image_size, classes, weights_key, weights)
            model.load_state_dict(state, strict=False)
        rescales = _rescales(found, path)
        if rescales:
            model.transform_input = True  # type: ignore[assignment]
    if sha256 is not None and _digest(state, rescales=rescales) != sha256:  # of the tensors in memory: the file is read once
        raise CheckpointError(
            f"{path or weights}: on {socket.gethostname()} it is not the {name} with which this job began: it was replaced "
            "since, or differs by node: put the same one on all nodes, then give the command again or resume it"
        )
    check_forward(model, image_size, num_classes, name=name)
    return model.eval().requires_grad_(False)


def teacher_sha256(
    name: str,
    weights: str,
    *,
    num_classes: int,
    image_size: int,
    classes: Sequence[str],
    seed: int,
    weights_key: str | None = None,
) -> str:
    """A hash of all tensors of a teacher, their names, types and shapes, independent of the file; rescaling is a part of it.

    No values are computed for a model that is read from a file. Raises as `load_teacher` does, except for a file that does not
    fit the model, which has a hash too.
    """
    path = locate_checkpoint(weights)
    fit = {"num_classes": num_classes, "image_size": image_size, "classes": classes}
    if path is None or is_npz(path):
        model = load_teacher(name, weights, **fit, seed=seed, weights_key=weights_key)  # type: ignore[arg-type]
        return _digest(model.state_dict(), rescales=bool(getattr(model, "transform_input", False)))
    found = check_model_name(name)
    model = _skeleton(_name_to_build(found, name, path), num_classes, image_size, seed)
    state = _file_state(model, path, name, num_classes, image_size, classes, weights_key, weights, must_fit=False)
    return _digest(state, rescales=_rescales(found, path))


def _skeleton(name: str, num_classes: int, image_size: int, seed: int) -> nn.Module:
    """The model without values, where its library can build one."""
    try:
        with torch.device("meta"):
            return construct(name, num_classes=num_classes, image_size=image_size, seed=seed)
    except (ModelError, NotImplementedError):  # some models compute with values when they are built
        return construct(name, num_classes=num_classes, image_size=image_size, seed=seed)


def _digest(state: Mapping[str, Tensor], *, rescales: bool) -> str:
    digest = hashlib.sha256(b"transform_input\0" if rescales else b"")
    for key in sorted(key for key in state if is_read(key)):
        tensor = state[key].detach().contiguous()
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _rescales(found: ModelName, path: Path) -> bool:
    """Whether the model rescales with this file, as our header says, or the SHA-256 in the URL of torchvision's weights."""
    if found.library != "torchvision" or found.name not in RESCALING:
        return False
    if is_safetensors(path):
        header = read_checkpoint_header(path)
        return header is not None and header.transform_input
    import torchvision

    published = torchvision.models.get_model_weights(found.name)
    return any(weights.url.endswith(f"-{file_sha256(path)[:8]}.pth") for weights in published)


def _refuse_key(weights: str, weights_key: str | None, reason: str) -> None:
    if weights_key is not None:
        raise CheckpointError(f"{weights}: weights_key {weights_key!r} chooses an entry of a file, and {reason}: leave it out")


def _name_to_build(found: ModelName, name: str, path: Path) -> str:
    """The model's name, or its folder's where timm saved there how it is built. Raises ModelError: another model is there."""
    folder = timm_folder_of(path) if found.library == "timm" else None
    return timm_name(found, folder) if folder else name


def _file_state(
    model: nn.Module,
    path: Path,
    name: str,
    num_classes: int,
    image_size: int,
    classes: Sequence[str],
    weights_key: str | None,
    weights: str,
    *,
    must_fit: bool = True,
) -> dict[str, Tensor]:
    """The tensors of the file `path` of `weights` by their names in the model, each of the model's shape if they `must_fit`."""
    header = read_checkpoint_header(path) if is_safetensors(path) else None
    if header is not None:
        _refuse_key(str(path), weights_key, "a checkpoint of ours has one model")
        _check_header(header, path, name, num_classes, classes)
        tensors = {
            key: value for file in (path, *map(path.with_name, header.shards)) for key, value in read_safetensors(file).items()
        }
        own = {key.removeprefix("model."): value for key, value in tensors.items() if key.startswith("model.")}
        candidates = [Candidate("", own, ())]
    else:
        own = {}
        candidates = read_candidates(path)
    matches = find_matches(candidates, model, weights_key, path)
    match = matches[0]
    taken = describe(match, path)
    state = match.state
    if any(match.rank):
        conversion, how = converted(model, match, image_size)
        if must_fit and not how:
            raise mismatch(match, model, path, name, num_classes)
        if how:
            state, taken = conversion, f"{taken or f'teacher weights {path}'}: {how}"
    if len(matches) > 1:
        addresses = [each.address or "the file itself" for each in matches]
        raise CheckpointError(
            f"{path} has {len(matches)} models that fit {name}, {' and '.join(addresses)}: choose one with weights_key, as "
            f"teacher.weights_key={matches[0].address or matches[1].address}"
        )
    for key, value in state.items():
        check_values(key, value, path)
    if not taken and header is None and path.name != Path(weights).name:
        taken = f"teacher weights {weights}: {path.name} in it"
    if taken:
        notice(taken)
    return {**own, **state}  # with the counts of its batch norms: a checkpoint of ours is its model bit for bit


def _check_header(header: CheckpointHeader, path: Path, name: str, num_classes: int, classes: Sequence[str]) -> None:
    if check_model_name(header.model) != check_model_name(name):
        raise CheckpointError(
            f"{path} is a {header.model}, not a {name}: write {header.model} as the model, or give another checkpoint"
        )
    if header.num_classes != num_classes:
        raise CheckpointError(
            f"{path} was trained on {header.num_classes} classes and the data has {num_classes}: give another checkpoint"
        )
    for label, (trained, expected) in enumerate(zip(header.classes, classes, strict=False)):
        if trained != expected:
            raise CheckpointError(
                f"{path} was trained on other classes: its class {label} is {trained!r}, the data's is {expected!r};"
                " give a checkpoint trained on these classes"
            )
