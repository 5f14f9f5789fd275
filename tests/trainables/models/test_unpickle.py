import argparse
import contextlib
import datetime
import importlib
import os
import sys
import tarfile
import warnings
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from trainables.errors import CheckpointError
from trainables.models.unpickle import IgnoredValue, load_torch_file

WEIGHTS = {"fc.weight": torch.arange(6.0).view(2, 3), "fc.bias": torch.ones(2)}


def saved(path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_torch_file(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_weights(content: Any) -> None:
    torch.testing.assert_close(dict(content), WEIGHTS, rtol=0, atol=0)


def test_tensors_and_plain_values_are_read_in_todays_and_in_the_old_format(tmp_path: Path) -> None:
    content = {"model": OrderedDict(WEIGHTS), "epoch": 240, "best_acc": torch.tensor([72.3]), "names": ["a"], "lr": 0.05}
    for zipped in (True, False):  # torch before 1.6 wrote no zip files
        read = load_torch_file(saved(tmp_path / "teacher.pth", content, _use_new_zipfile_serialization=zipped))
        assert_weights(read["model"])
        assert (read["epoch"], read["names"], read["lr"], read["best_acc"].item()) == (240, ["a"], 0.05, pytest.approx(72.3))


@pytest.mark.parametrize(
    "extra", [np.float64(72.3), np.float32(72.3), np.int64(3), np.bool_(True), argparse.Namespace(model="resnet56", lr=0.05)]
)
def test_what_training_scripts_save_besides_the_parameters_is_left_unread(extra: Any, tmp_path: Path) -> None:
    read = load_torch_file(saved(tmp_path / "teacher.pth", {"model": WEIGHTS, "opt": extra}))
    assert_weights(read["model"])
    assert type(read["opt"]) is IgnoredValue
    assert not vars(read["opt"])


def type_of(monkeypatch: pytest.MonkeyPatch, module: str, name: str, base: type = object) -> Any:
    """A class of a package that is not installed here."""
    made = type(name, (base,), {"__module__": module, "__qualname__": name})
    parent = ""
    for part in module.split("."):
        path = f"{parent}.{part}".lstrip(".")
        monkeypatch.setitem(sys.modules, path, sys.modules.get(path) or ModuleType(path))
        parent = path
    monkeypatch.setattr(sys.modules[module], name, made, raising=False)
    return made


def test_options_and_histories_of_common_packages_are_left_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = type_of(monkeypatch, "mmengine.logging.history_buffer", "HistoryBuffer")()
    history.values, history.smallest = np.arange(3.0), getattr  # as mmengine stores them, with functions
    hydra = type_of(monkeypatch, "omegaconf.dictconfig", "DictConfig")()
    hydra.content = {"lr": 0.1, "type": Any}
    options = type_of(monkeypatch, "yacs.config", "CfgNode", dict)(MODEL="swin")
    options.__dict__["__immutable__"] = True
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    extras = {
        "message_hub": {"loss": history},
        "hyper_parameters": hydra,
        "config": options,
        "curves": defaultdict(list, loss=[0.5]),
        "confusion": np.eye(3),
        "date": datetime.datetime(2024, 1, 1),
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
    }
    for zipped in (True, False):
        path = saved(tmp_path / "teacher.pth", {"model": WEIGHTS, **extras}, _use_new_zipfile_serialization=zipped)
        read = load_torch_file(path)
        assert_weights(read["model"])
        assert type(read["confusion"]) is type(read["scheduler"]) is type(read["message_hub"]["loss"]) is IgnoredValue
        assert (read["config"], read["curves"]) == ({"MODEL": "swin"}, {"loss": [0.5]})


def test_a_numpy_value_of_a_numpy_before_2_is_left_unread_too(tmp_path: Path) -> None:
    path = saved(tmp_path / "teacher.pth", {"model": WEIGHTS, "acc": np.float64(1)}, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes().replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    assert b"numpy.core.multiarray" in path.read_bytes()
    assert type(load_torch_file(path)["acc"]) is IgnoredValue


def test_numpy_itself_is_not_called(tmp_path: Path) -> None:
    class Forged:
        def __reduce__(self) -> tuple[Any, ...]:
            return np.dtype, ("no such dtype",)  # the real one would raise

    read = load_torch_file(saved(tmp_path / "teacher.pth", {"model": WEIGHTS, "acc": Forged()}))
    assert_weights(read["model"])
    assert type(read["acc"]) is IgnoredValue


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ((os.mkdir, ("exploded",)), "posix.mkdir"),
        ((eval, ("open('exploded', 'w')",)), "eval"),
        ((np.load, ("file.npy",)), "numpy.load"),
        ((importlib.import_module, ("antigravity",)), "importlib.import_module"),
    ],
)
def test_anything_else_is_refused_by_its_name_and_with_the_safe_way(
    call: tuple[Any, ...], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return call

    monkeypatch.chdir(tmp_path)
    says = refusal(saved(tmp_path / "bomb.pth", {"model": WEIGHTS, "opt": Bomb()}))
    assert f"(it has {name})" in says
    assert "torch.save(model.state_dict(), path)" in says
    assert not (tmp_path / "exploded").exists()


def test_no_class_is_trusted_once_a_file_has_been_read(tmp_path: Path) -> None:
    before = set(torch.serialization.get_safe_globals())
    load_torch_file(saved(tmp_path / "teacher.pth", {"model": WEIGHTS, "acc": np.float64(1)}))
    assert set(torch.serialization.get_safe_globals()) == before


def test_an_archive_of_several_teachers_is_to_be_unpacked(tmp_path: Path) -> None:
    """mdistiller's teachers come as cifar_teachers.tar, which torch takes for a format of its own."""
    saved(tmp_path / "ckpt_epoch_240.pth", {"model": WEIGHTS})
    with tarfile.open(tmp_path / "cifar_teachers.tar", "w") as archive:
        archive.add(tmp_path / "ckpt_epoch_240.pth", "cifar_teachers/resnet56_vanilla/ckpt_epoch_240.pth")
    assert "is a tar archive: unpack it" in refusal(tmp_path / "cifar_teachers.tar")


def test_bytes_of_any_kind_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "teacher.pth"
    path.write_bytes(b"hello world")
    assert refusal(path).endswith("(it is not a torch.save file): it is truncated or damaged; use another copy")
    content = {"model": WEIGHTS, "epoch": 240, "names": ["a"], "lr": 0.05}
    whole = saved(path, content, _use_new_zipfile_serialization=False).read_bytes()
    chance = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for position in chance.integers(0, len(whole), chance.integers(1, 9)):
            damaged[position] = chance.integers(0, 256)
        path.write_bytes(damaged)
        with warnings.catch_warnings(), contextlib.suppress(CheckpointError):
            warnings.simplefilter("error")
            load_torch_file(path)


def test_a_file_that_was_compressed_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    plain = saved(tmp_path / "plain.pth", {"fc.weight": torch.zeros(100_000)})
    packed = tmp_path / "packed.pth"
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.infolist():
            target.writestr(member.filename, source.read(member))
    assert f"is compressed, {packed.stat().st_size:,} bytes that become 400," in refusal(packed)
