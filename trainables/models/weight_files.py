"""Read a weight file as candidates: the dictionaries of named tensors in it. `state_match` picks the one for a model."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch import strided as torch_strided

from trainables.errors import CheckpointError, first_line
from trainables.models.checkpoint_header import INDEX_SUFFIX, is_safetensors
from trainables.models.foreign_files import SAVE_AGAIN, is_npz
from trainables.models.unpickle import IgnoredValue, load_torch_file

SHARD = re.compile(r"-\d{5}-of-\d{5}\.\w+$")
MAX_DEPTH = 4
"""Maximum search depth; training scripts nest a state dict once or twice."""
CLASS_KEYS = (
    "classes",
    "class_names",
    "class_to_idx",
    "idx_to_class",
    "categories",
    "names",
    "label_names",
    "labels",
    "id2label",
    "label2id",
)
"""Keys, in upper or lower case, under which training scripts store the names of the classes next to a state dict."""


class Candidate(NamedTuple):
    """A dictionary with tensors."""

    path: str
    """Its keys in the file, joined by dots, such as `state_dict`; empty for the file itself."""
    tensors: Mapping[str, Tensor]
    others: tuple[str, ...]
    """Other keys in it and in the dictionaries around it."""
    arch: str = ""
    """The model's name that the dictionary around it records, as timm's and PyTorch's training scripts do; empty without one."""


def read_candidates(path: Path) -> list[Candidate]:
    """Return all candidates of a file, outer ones first.

    Raises CheckpointError: it is damaged, another library's, one shard of several, or has no named tensor.
    """
    if path.name.endswith(INDEX_SUFFIX):
        content: Any = _read_shards(path)
    elif SHARD.search(path.name):
        raise CheckpointError(f"{path} is one shard of several: give the folder of all of them, or its {INDEX_SUFFIX} file")
    else:
        content = _read_file(path)
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"{path} has no state dict: {SAVE_AGAIN}")
    if candidates := list(_candidates(content, "", (), "")):
        return candidates
    if {"state", "param_groups"} <= set(content):
        raise CheckpointError(f"{path} is an optimizer's state, without a model: {SAVE_AGAIN}")
    key, value = next(iter(content.items()))
    kind = "an object of another library" if isinstance(value, IgnoredValue) else f"of type {type(value).__name__}"
    raise CheckpointError(f"{path} has no state dict: it has {key!r}, {kind}, where a tensor was expected: {SAVE_AGAIN}")


def recorded_classes(path: Path) -> list[tuple[str, ...]]:
    """Return the lists of class names in label order that a torch.save file has besides its tensors, such as ids and names.

    Each is a list or a mapping of names and labels under one of `CLASS_KEYS`, as long as a classifier in the file has rows. None
    are returned if their lengths differ.

    Raises CheckpointError: the file is damaged or another library's, or has the same names in two orders.
    """
    if is_safetensors(path) or is_npz(path) or path.name.endswith(INDEX_SUFFIX) or SHARD.search(path.name):
        return []
    found: dict[tuple[str, ...], str] = {}
    rows, visited = set[int](), set[int]()
    dictionaries = [("", load_torch_file(path, lazily=True))]
    for where, content in dictionaries:
        if not isinstance(content, Mapping) or id(content) in visited or where.count(".") > MAX_DEPTH:
            continue
        visited.add(id(content))
        weights = [value for name, value in content.items() if isinstance(value, Tensor) and str(name).endswith("weight")]
        rows |= {len(weight) for weight in weights[-1:] if weight.ndim}  # the classifier is a model's last layer
        for name, value in content.items():
            key = f"{where}.{name}".lstrip(".")
            if str(name).lower() in CLASS_KEYS and (names := _in_label_order(value)):
                found.setdefault(names, key)
            else:
                dictionaries.append((key, value))
    lists = {names: key for names, key in found.items() if len(names) in rows}
    for names, key in lists.items():
        if other := next((each for each in lists if each != names and {*each} == {*names}), None):
            raise CheckpointError(
                f"{path} has its classes in two orders, in {key} and {lists[other]}: remove the wrong one from the file"
            )
    return list(lists) if len({*map(len, lists)}) == 1 else []


def _in_label_order(value: Any) -> tuple[str, ...]:
    """Return the names in a list, or in a mapping from or to consecutive labels; () for anything else."""
    if isinstance(value, Mapping):
        pairs = [(label, name) if isinstance(name, str) else (name, label) for label, name in value.items()]
        label_of = {name: int(label) for label, name in pairs if re.fullmatch(r"\d+", str(label))}
        labels = sorted(label_of.values())
        is_consecutive = bool(labels) and labels == list(range(labels[0], labels[0] + len(value)))
        value = sorted(label_of, key=label_of.__getitem__) if is_consecutive else ()
    is_names = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    return tuple(value) if is_names and len(set(value)) == len(value) else ()


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file. Raises CheckpointError: it is damaged."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
        return tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({first_line(error)}): it is truncated or damaged; use another copy"
        ) from None


def check_values(key: str, tensor: Tensor, like: Tensor | None, path: Path) -> None:
    """Raise CheckpointError if a tensor is not dense, real and finite, or has integers for a model's floats (`like`)."""
    if tensor.layout is not torch_strided or tensor.is_meta or tensor.is_quantized or tensor.is_complex():
        kind = "without values" if tensor.is_meta else f"of {tensor.layout} and {tensor.dtype}"
        raise CheckpointError(f"{path} has {key!r}, a tensor {kind}, where a dense real one was expected: {SAVE_AGAIN}")
    if like is not None and like.is_floating_point() and not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(f"{path} has {key!r} quantized to {kind}: give the weights from which it was made")
    if tensor.is_floating_point() and not tensor.float().isfinite().all():
        raise CheckpointError(f"{path} has non-finite values in {key!r}: its training diverged; use another checkpoint")


def _read_file(path: Path) -> Any:
    return read_safetensors(path) if is_safetensors(path) else load_torch_file(path)


def _read_shards(index: Path) -> dict[str, Any]:
    """Read the tensors of all files listed in a Hugging Face index, from its folder."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [index.parent / Path(name).name for name in names]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{index} names no shards in a weight_map: give the index that was saved with them") from None
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{index}: its shard {file.name} is missing: fetch all {len(files)} shards")
    return {name: tensor for file in files for name, tensor in dict(_read_file(file)).items()}


def _candidates(content: Mapping[str, Any], path: str, around: tuple[str, ...], arch: str) -> Iterator[Candidate]:
    if isinstance(recorded := content.get("arch"), str):
        arch = recorded.partition(".")[0]  # timm may add a tag: resnet50.a1_in1k
    names = tuple(str(key) for key in content)
    tensors = {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, Tensor)}
    if tensors:
        yield Candidate(path, tensors, around + tuple(name for name in names if name not in tensors), arch)
    if path.count(".") < MAX_DEPTH - 1:
        for key, value in content.items():
            if isinstance(key, str) and isinstance(value, Mapping):
                others = around + tuple(name for name in names if name != key)
                yield from _candidates(value, f"{path}.{key}" if path else key, others, arch)
