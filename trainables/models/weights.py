"""Teachers with weights: from a checkpoint of ours, published by torchvision or timm, or from a state-dict file."""

import hashlib
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from trainables.data.index import file_sha256
from trainables.errors import CheckpointError, first_line
from trainables.models.checkpoint_header import CheckpointHeader, locate_checkpoint, read_checkpoint_header
from trainables.models.names import ModelName, check_model_name
from trainables.models.published import published_model
from trainables.models.registry import check_forward, construct
from trainables.models.unpickle import SAVE_AGAIN, load_torch_file

WRAPPERS = ("state_dict", "model")
"""Keys under which training scripts save the parameters in a checkpoint."""
NAME_PREFIXES = ("module.", "_orig_mod.", "student.")
"""Prefixes of all parameters' names, by DDP, torch.compile and mdistiller's training without a teacher."""
AUX_PREFIXES = ("AuxLogits.", "aux1.", "aux2.")
"""Heads that only training uses, and a teacher does not."""
RESCALING = ("googlenet", "inception_v3")
"""torchvision models that rescale their input with the published weights, and with no others; no tensor shows it."""


def load_teacher(
    name: str, weights: str, *, num_classes: int, image_size: int, classes: Sequence[str], seed: int, sha256: str | None = None
) -> nn.Module:
    """Model `name` with its `weights`, on the CPU in float32, frozen and in eval mode.

    `weights` is one of: a checkpoint of ours, or the directory of a run or stage that has one; a state-dict file
    (.pt, .pth, .safetensors); the name of torchvision weights (`IMAGENET1K_V1`, `DEFAULT`) or a timm pretrained tag.
    `classes` are the data's, in label order; a checkpoint of ours must have been trained on the same. Only published weights are
    downloaded. `sha256`: the expected `teacher_sha256`; None: any.

    Raises:
        CheckpointError: the file is missing, damaged, of another model or of other classes, or has another hash.
        ModelError: no such model or weights, weights for another number of classes, a failed download, or images of a wrong size.
    """
    found = check_model_name(name)
    path = locate_checkpoint(weights)
    if path is None:
        with torch.random.fork_rng(devices=[]):  # a library initialises parameters before it overwrites them
            model = published_model(found, weights, num_classes, image_size)
        state: Mapping[str, Tensor] = model.state_dict()
        rescales = bool(getattr(model, "transform_input", False))
    else:
        state, rescales = _read_state(path, name, num_classes, classes), _rescales(found, path)
        model = construct(name, num_classes=num_classes, image_size=image_size, seed=seed)
        _load_state(model, state, path, name, num_classes)
        if rescales:
            model.transform_input = True  # type: ignore[assignment]
    if sha256 is not None and _digest(state, rescales=rescales) != sha256:  # of the tensors in memory: the file is read once
        raise CheckpointError(
            f"{path or weights}: on {socket.gethostname()} it is not the {name} with which this job began: it was replaced "
            "since, or differs by node: put the same one on all nodes, then give the command again or resume it"
        )
    check_forward(model, image_size, num_classes, name=name)
    return model.eval().requires_grad_(False)


def teacher_sha256(name: str, weights: str, *, num_classes: int, image_size: int, classes: Sequence[str], seed: int) -> str:
    """A hash of all tensors of a teacher, their names, types and shapes, independent of the file; rescaling is a part of it.

    A file is read without building the model. Raises as `load_teacher` does.
    """
    path = locate_checkpoint(weights)
    if path is None:
        model = load_teacher(name, weights, num_classes=num_classes, image_size=image_size, classes=classes, seed=seed)
        return _digest(model.state_dict(), rescales=bool(getattr(model, "transform_input", False)))
    state = _read_state(path, name, num_classes, classes)
    return _digest(state, rescales=_rescales(check_model_name(name), path))


def _digest(state: Mapping[str, Tensor], *, rescales: bool) -> str:
    digest = hashlib.sha256(b"transform_input\0" if rescales else b"")
    for key in sorted(key for key in state if not key.startswith(AUX_PREFIXES)):
        tensor = state[key].detach().contiguous()
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _rescales(found: ModelName, path: Path) -> bool:
    """Whether the model rescales with this file, as our header says, or the SHA-256 in the URL of torchvision's weights."""
    if found.library != "torchvision" or found.name not in RESCALING:
        return False
    if path.suffix == ".safetensors":
        header = read_checkpoint_header(path)
        return header is not None and header.transform_input
    import torchvision

    published = torchvision.models.get_model_weights(found.name)
    return any(weights.url.endswith(f"-{file_sha256(path)[:8]}.pth") for weights in published)


def _read_state(path: Path, name: str, num_classes: int, classes: Sequence[str]) -> dict[str, Tensor]:
    """Parameters and buffers by their names in the model."""
    if path.suffix != ".safetensors":
        return _plain_state(load_torch_file(path), path)
    header = read_checkpoint_header(path)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({first_line(error)}): it was cut off or damaged; use another copy"
        ) from None
    if header is None:
        return _plain_state(tensors, path)
    _check_header(header, path, name, num_classes, classes)
    return {key.removeprefix("model."): tensor for key, tensor in tensors.items() if key.startswith("model.")}


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


def _plain_state(loaded: Any, path: Path) -> dict[str, Tensor]:
    """A state dict without its wrappers and the prefixes of its names."""
    for wrapper in WRAPPERS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(wrapper), Mapping):
            loaded = loaded[wrapper]
            break
    if not isinstance(loaded, Mapping) or not loaded:
        raise CheckpointError(f"{path} has no state dict: {SAVE_AGAIN}")
    state = dict(loaded)
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path} has {key!r}, of type {type(value).__name__}, where a tensor was expected: {SAVE_AGAIN}"
            )
        _check_values(key, value, path)
    for prefix in NAME_PREFIXES:
        if all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    if any(key.startswith("student.") for key in state) and any(key.startswith("teacher.") for key in state):
        raise CheckpointError(
            f"{path} has a student with its teacher, as mdistiller saves them: give student_best or student_latest instead"
        )
    return state


def _load_state(model: nn.Module, state: Mapping[str, Tensor], path: Path, name: str, num_classes: int) -> None:
    """Copy `state` into `model`. Every name and shape must agree, except those of auxiliary heads.

    A model of ours with other names than the published ones maps these in `PUBLISHED_NAMES`, and takes either. The first
    published teachers were saved by torch before 0.4.1, which did not count a BatchNorm's batches; evaluation does not read it.
    """
    published_names: Mapping[str, str] = getattr(type(model), "PUBLISHED_NAMES", {})
    expected = {key: tensor for key, tensor in model.state_dict().items() if not key.startswith(AUX_PREFIXES)}
    loaded = {_renamed(key, published_names): tensor for key, tensor in state.items() if not key.startswith(AUX_PREFIXES)}
    missing = [key for key in expected if key not in loaded and not key.endswith(".num_batches_tracked")]
    unexpected = [key for key in loaded if key not in expected]
    misshapen = [key for key in expected if key in loaded and expected[key].shape != loaded[key].shape]
    if misshapen and not missing and not unexpected and all(_is_head(expected[k], loaded[k], num_classes) for k in misshapen):
        raise CheckpointError(
            f"{path} has {len(loaded[misshapen[0]])} classes and the data has {num_classes}: give weights trained on this data"
        )
    if missing or unexpected or misshapen:
        shapes = [f"{key} {tuple(loaded[key].shape)} for {tuple(expected[key].shape)}" for key in misshapen]
        parts = (("misses", missing), ("has unknown", unexpected), ("has another shape of", shapes))
        differences = "; ".join(f"{verb} {_first(keys)}" for verb, keys in parts if keys)
        raise CheckpointError(
            f"{path} does not fit {name}: it {differences}; write the model that it was saved from, or give another file"
        )
    model.load_state_dict(loaded, strict=False)


def _check_values(key: str, tensor: Tensor, path: Path) -> None:
    """Refuse a tensor that is not dense numbers in memory, or not finite."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_complex():
        kind = "without values" if tensor.is_meta else f"of {tensor.layout} and {tensor.dtype}"
        raise CheckpointError(f"{path} has {key!r}, a tensor {kind}, where a dense real one was expected: {SAVE_AGAIN}")
    if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
        raise CheckpointError(f"{path} has values in {key!r} that are not finite: its training diverged; use another checkpoint")


def _is_head(expected: Tensor, loaded: Tensor, num_classes: int) -> bool:
    return expected.shape[:1] == (num_classes,) and expected.shape[1:] == loaded.shape[1:]


def _first(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more"


def _renamed(key: str, published_names: Mapping[str, str]) -> str:
    for published, name in published_names.items():
        key = key.replace(published, name)
    return key
