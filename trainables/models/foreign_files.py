"""Recognize files and folders that are not PyTorch state dicts, with a remedy for each.

Nothing is loaded: the decision uses file names, first bytes and the names in an archive. Importing this module does not import
torch.
"""

import re
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from trainables.errors import CheckpointError

SAVE_AGAIN = "in the program that wrote it, save only the parameters: torch.save(model.state_dict(), path)"
CONVERT = "load it in the program that wrote it, copy its values into the PyTorch model and torch.save(model.state_dict(), path)"
_HEAD_BYTES = 1024


class Facts(NamedTuple):
    """The properties of a file or folder that are visible without loading it."""

    name: str
    head: bytes
    """Its first bytes; empty for a folder."""
    members: frozenset[str]
    """The base names in a zip archive, or the names in a folder."""


class ForeignFile(NamedTuple):
    what: str
    recognize: Callable[[Facts], bool]
    instead: str


def _starts(*starts: bytes) -> Callable[[Facts], bool]:
    return lambda facts: facts.head.lstrip().lower().startswith(starts)


def _named(*suffixes: str) -> Callable[[Facts], bool]:
    return lambda facts: facts.name.lower().endswith(suffixes)


def _has(*members: str) -> Callable[[Facts], bool]:
    return lambda facts: any(member in facts.members for member in members)


FOREIGN: tuple[ForeignFile, ...] = (
    ForeignFile("a Git LFS pointer, not the file", _starts(b"version https://git-lfs"), "fetch it: git lfs pull"),
    ForeignFile("a web page", _starts(b"<!doctype html", b"<html"), "download the file that the page offers"),
    ForeignFile("a TorchScript archive", _has("constants.pkl"), f"give the state dict: {SAVE_AGAIN}"),
    ForeignFile("a program of torch.export", _has("archive_format", "serialized_exported_program.json"), SAVE_AGAIN),
    ForeignFile("a Keras model", _has("model.weights.h5"), CONVERT),
    ForeignFile("an HDF5 file, as Keras writes them", _starts(b"\x89hdf"), CONVERT),
    ForeignFile("a TensorFlow SavedModel", _has("saved_model.pb"), CONVERT),
    ForeignFile(
        "a TensorFlow checkpoint",
        lambda facts: bool(re.search(r"\.(ckpt[-\d]*\.)?(index|data-\d{5}-of-\d{5}|meta)$", facts.name)),
        CONVERT,
    ),
    ForeignFile("a TensorFlow Lite model", lambda facts: facts.head[4:8] == b"TFL3", CONVERT),
    ForeignFile("a JAX checkpoint of Orbax", _has("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"), CONVERT),
    ForeignFile("a checkpoint of Flax", _named(".msgpack"), CONVERT),
    ForeignFile(
        "an ONNX model",
        lambda facts: facts.name.endswith(".onnx") or (facts.head.startswith(b"\x08") and b"pytorch" in facts.head[:32]),
        f"give the state dict from which it was exported: {SAVE_AGAIN}",
    ),
    ForeignFile("a GGUF file of quantized weights", _starts(b"gguf"), f"give the weights from which it was made: {SAVE_AGAIN}"),
    ForeignFile("an adapter of PEFT", _has("adapter_config.json"), "merge it into its model (merge_and_unload()) and save that"),
    ForeignFile(
        "a distributed checkpoint",
        lambda facts: ".metadata" in facts.members or facts.name.endswith(".distcp"),
        "join it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pth, and give that file",
    ),
    ForeignFile("gzip-compressed", _starts(b"\x1f\x8b"), "unpack it and give the file of one model in it"),
)
"""Kinds of foreign files, tried in this order."""

FOREIGN_NAMES: tuple[tuple[str, re.Pattern[str], str], ...] = (
    (
        "the LoRA layers of an adapter",
        re.compile(r"\.lora_(A|B|down|up)\b|\.lora_[AB]\."),
        "merge them into the model (PEFT: merge_and_unload()) and save that",
    ),
    (
        "a model of Hugging Face transformers",
        re.compile(r"\b(embedder|embeddings)\.|\bencoder\.layer\.\d|\bencoder\.(stages|layers)\.\d.*\.(layers|self_attn)\."),
        "write model: local-dir:FOLDER, with the folder of its config.json",
    ),
    (
        "a model with weight_norm, spectral_norm or pruning",
        re.compile(r"\.parametrizations\.|\.weight_(g|v|u|orig|mask)$"),
        "merge each into its layer (parametrize.remove_parametrizations, remove_weight_norm or prune.remove) and save that",
    ),
    (
        "a quantized model",
        re.compile(r"\.zero_point$|\._packed_params\b"),
        "give the weights from which it was made",
    ),
)
"""State dicts of other libraries: description, pattern of a tensor name, remedy."""


def refuse_foreign(path: Path) -> None:
    """Raise CheckpointError if the file or folder is one of `FOREIGN`, or a tar or zip archive of files."""
    facts = _facts(path)
    for foreign in FOREIGN:
        if foreign.recognize(facts):
            raise CheckpointError(f"{path} is {foreign.what}: {foreign.instead}")
    if path.is_file() and facts.head and tarfile.is_tarfile(path):
        raise CheckpointError(f"{path} is a tar archive: unpack it and give the file of one model in it")
    if path.is_file() and facts.members and not _is_weights_zip(facts.members):
        raise CheckpointError(f"{path} is a zip archive: unpack it and give the file of one model in it")


def foreign_names(names: Iterable[str]) -> str | None:
    """Return a description and remedy for a state dict with these names; None if it is none of `FOREIGN_NAMES`."""
    for what, pattern, instead in FOREIGN_NAMES:
        if any(pattern.search(name) for name in names):
            return f"{what}: {instead}"
    return None


def is_npz(path: Path) -> bool:
    """Whether the file is an archive of numpy arrays."""
    return any(member.endswith(".npy") for member in _facts(path).members)


def _is_weights_zip(members: Iterable[str]) -> bool:
    return any(member.endswith((".npy", ".pkl")) for member in members)


def _facts(path: Path) -> Facts:
    if path.is_dir():
        return Facts(path.name, b"", frozenset(member.name for member in path.iterdir()))
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    members: frozenset[str] = frozenset()
    if head.startswith(b"PK"):
        try:
            with zipfile.ZipFile(path) as archive:
                members = frozenset(name.rpartition("/")[2] for name in archive.namelist())
        except zipfile.BadZipFile:  # truncated; the reader reports it
            return Facts(path.name, head, members)
    return Facts(path.name, head, members)
