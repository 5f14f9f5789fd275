"""Recognize files and folders that are not PyTorch state dicts, with a remedy for each.

Nothing is loaded: the decision uses file names, first bytes and the names in an archive. Importing this module does not import
torch.
"""

import re
import tarfile
import zipfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from trainables.errors import CheckpointError

SAVE_AGAIN = "in the program that wrote it, save only the parameters: torch.save(model.state_dict(), path)"
CONVERT = "load it in the program that wrote it, copy its values into the PyTorch model and torch.save(model.state_dict(), path)"
_HEAD_BYTES = 1024


class ForeignFile(NamedTuple):
    """A kind of file or folder, recognized by any of its marks."""

    what: str
    instead: str
    head: bytes | None = None
    """A pattern of a file's first bytes, in upper or lower case."""
    suffix: str | None = None
    """A pattern of the end of a name."""
    members: tuple[str, ...] = ()
    """Base names in a zip archive, or names in a folder."""

    def matches(self, name: str, head: bytes, members: Collection[str]) -> bool:
        return bool(
            (self.head and re.match(self.head, head, re.IGNORECASE | re.DOTALL))
            or (self.suffix and re.search(f"{self.suffix}$", name, re.IGNORECASE))
            or not {*self.members}.isdisjoint(members)
        )


FOREIGN: tuple[ForeignFile, ...] = (
    ForeignFile("a Git LFS pointer, not the file", "fetch it: git lfs pull", head=rb"version https://git-lfs"),
    ForeignFile("a web page", "download the file that the page offers", head=rb"\s*(<!doctype html|<html)"),
    ForeignFile("a TorchScript archive", f"give the state dict: {SAVE_AGAIN}", members=("constants.pkl",)),
    ForeignFile("a program of torch.export", SAVE_AGAIN, members=("archive_format", "serialized_exported_program.json")),
    ForeignFile("a Keras model", CONVERT, members=("model.weights.h5",)),
    ForeignFile("an HDF5 file, as Keras writes them", CONVERT, head=rb"\x89hdf"),
    ForeignFile("a TensorFlow SavedModel", CONVERT, members=("saved_model.pb",)),
    ForeignFile("a TensorFlow checkpoint", CONVERT, suffix=r"\.(ckpt[-\d]*\.)?(index|data-\d{5}-of-\d{5}|meta)"),
    ForeignFile("a TensorFlow Lite model", CONVERT, head=rb".{4}TFL3"),
    ForeignFile("a JAX checkpoint of Orbax", CONVERT, members=("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")),
    ForeignFile("a checkpoint of Flax", CONVERT, suffix=r"\.msgpack"),
    ForeignFile(
        "an ONNX model",
        f"give the state dict from which it was exported: {SAVE_AGAIN}",
        head=rb"\x08.{,24}pytorch",
        suffix=r"\.onnx",
    ),
    ForeignFile("a GGUF file of quantized weights", f"give the weights from which it was made: {SAVE_AGAIN}", head=rb"gguf"),
    ForeignFile(
        "an adapter of PEFT", "merge it into its model (merge_and_unload()) and save that", members=("adapter_config.json",)
    ),
    ForeignFile(
        "a distributed checkpoint",
        "join it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pth, and give that file",
        suffix=r"\.distcp",
        members=(".metadata",),
    ),
    ForeignFile(
        "a checkpoint of DeepSpeed",
        "join it: python FOLDER/zero_to_fp32.py FOLDER OUT, and give the file in OUT",
        members=("zero_to_fp32.py",),
    ),
    ForeignFile("gzip-compressed", "unpack it and give the file of one model in it", head=rb"\x1f\x8b"),
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
    head, members = _head(path), _members(path)
    for foreign in FOREIGN:
        if foreign.matches(path.name, head, members):
            raise CheckpointError(f"{path} is {foreign.what}: {foreign.instead}")
    if head and tarfile.is_tarfile(path):
        raise CheckpointError(f"{path} is a tar archive: unpack it and give the file of one model in it")
    if head and members and not any(member.endswith((".npy", ".pkl")) for member in members):
        raise CheckpointError(f"{path} is a zip archive: unpack it and give the file of one model in it")


def foreign_names(names: Iterable[str]) -> str | None:
    """Return a description and remedy for a state dict with these names; None if it is none of `FOREIGN_NAMES`."""
    for what, pattern, instead in FOREIGN_NAMES:
        if any(pattern.search(name) for name in names):
            return f"{what}: {instead}"
    return None


def is_npz(path: Path) -> bool:
    """Whether the file is an archive of numpy arrays."""
    return any(member.endswith(".npy") for member in _members(path))


def _head(path: Path) -> bytes:
    """A file's first bytes; empty for a folder."""
    if path.is_dir():
        return b""
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)


def _members(path: Path) -> set[str]:
    """The names in a folder, or the base names in a zip archive; empty for any other file, and for a truncated archive."""
    if path.is_dir():
        return {member.name for member in path.iterdir()}
    if not _head(path).startswith(b"PK"):
        return set()
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.rpartition("/")[2] for name in archive.namelist()}
    except zipfile.BadZipFile:
        return set()
