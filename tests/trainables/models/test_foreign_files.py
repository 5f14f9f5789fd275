"""Files of other libraries are refused by what they are, in one line."""

import io
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.trainables.models.test_weights import refusal


def zipped(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, b"x" * 200)
    return buffer.getvalue()


def tarred() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.pth"))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.pth", b"version https://git-lfs.github.com/spec/v1\noid sha256:01\n", "is a Git LFS pointer, not the file: fetch it"),
        ("x.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:01\n", "is a Git LFS pointer"),
        ("x.pth", b"\n<!DOCTYPE html><title>Google Drive</title>", "is a web page: download the file"),
        ("x.h5", b"\x89HDF\r\n\x1a\n" + bytes(99), "is an HDF5 file, as Keras writes them"),
        ("x.keras", zipped("config.json", "model.weights.h5"), "is a Keras model"),
        ("x.pt2", zipped("e/archive_format", "e/models/model.json"), "is a program of torch.export"),
        ("x.ckpt-100.index", bytes(99), "is a TensorFlow checkpoint"),
        ("x.ckpt.data-00000-of-00001", bytes(99), "is a TensorFlow checkpoint"),
        ("x.tflite", bytes(4) + b"TFL3" + bytes(99), "is a TensorFlow Lite model"),
        ("flax.msgpack", b"\x82\xa6params", "is a checkpoint of Flax"),
        ("x.onnx", b"\x08\x07\x12\x07pytorch" + bytes(99), "is an ONNX model"),
        ("x.gguf", b"GGUF" + bytes(99), "is a GGUF file"),
        ("x.pth", b"\x1f\x8b" + bytes(99), "is gzip-compressed: unpack it"),
        ("x.tar", tarred(), "is a tar archive: unpack it"),
        ("x.zip", zipped("a.pth", "b.pth"), "is a zip archive: unpack it"),
        ("pytorch_model-00001-of-00003.bin", b"", "is one shard of several: give the folder"),
    ],
)
def test_a_file_of_another_kind_is_named(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert says in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("member", "says"),
    [
        ("saved_model.pb", "is a TensorFlow SavedModel"),
        ("_CHECKPOINT_METADATA", "is a JAX checkpoint of Orbax"),
        ("adapter_config.json", "is an adapter of PEFT: merge it"),
        (".metadata", "is a distributed checkpoint: join it"),
        ("zero_to_fp32.py", "is a checkpoint of DeepSpeed: join it: python FOLDER/zero_to_fp32.py"),
    ],
)
def test_a_folder_of_another_kind_is_named(member: str, says: str, tmp_path: Path) -> None:
    (tmp_path / member).write_bytes(b"x")
    assert says in refusal(tmp_path)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_whole_model_is_refused_with_the_line_to_run_where_it_was_made(tmp_path: Path) -> None:
    torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)).save(str(tmp_path / "script.pt"))  # type: ignore[no-untyped-call]
    assert "is a TorchScript archive: give the state dict" in refusal(tmp_path / "script.pt")
    for zipped_file in (True, False):
        torch.save({"model": nn.Linear(2, 2)}, tmp_path / "whole.pt", _use_new_zipfile_serialization=zipped_file)
        says = refusal(tmp_path / "whole.pt")
        assert "is a whole pickled model (torch.nn.modules.linear.Linear), and loading it would run code" in says
        assert "torch.save(model.state_dict(), path)" in says
