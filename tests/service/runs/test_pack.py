"""`distill pack`: the same bytes by any number of processes, nothing done twice after a kill, mistakes in one line."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from service.runs import pack as packing
from tests.service.commands import run
from tests.trainables.data.photos import photo
from tests.waiting import wait_until
from trainables.data import decode
from trainables.data.index import INDEX, UNFINISHED
from trainables.data.pack.modes import Mode
from trainables.data.sources.records import open_records
from trainables.errors import DataError
from trainables.locks import locked

SMALL_SHARDS = 4000


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """40 training photos and 11 for validation, of cats and dogs."""
    root = tmp_path / "images"
    for split, name, count in (("train", "cat", 20), ("train", "dog", 20), ("val", "dog", 3), ("val", "cat", 8)):
        folder = root / split / name
        folder.mkdir(parents=True)
        for number in range(count):
            photo(number).save(folder / f"{number:03}.jpg")
    return root


def pack(source: Path, dest: Path, mode: Mode | None = None, processes: int = 1, strict: bool = False) -> packing.Packing:
    return packing.pack(source, dest, mode or Mode(), check=False, strict=strict, processes=processes, shard_bytes=SMALL_SHARDS)


def refusal(source: Path, dest: Path, mode: Mode | None = None) -> str:
    with pytest.raises(DataError) as caught:
        pack(source, dest, mode)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def digest(dest: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(dest.rglob("*")) if path.is_file()}


def test_any_number_of_processes_writes_the_same_bytes(images: Path, tmp_path: Path) -> None:
    for processes in (1, 2, 5):
        packed = pack(images, tmp_path / f"by{processes}", processes=processes)
        assert packed.num_written == sum(len(split.shards) for split in packed.index.splits.values()) > 10
    assert digest(tmp_path / "by1") == digest(tmp_path / "by2") == digest(tmp_path / "by5")


@pytest.mark.processes
def test_a_killed_pack_goes_on_without_doing_finished_shards_again(images: Path, tmp_path: Path) -> None:
    dest = tmp_path / "packed"
    script = (
        "import sys, time; from pathlib import Path; from service.runs import pack as packing;"
        "from trainables.data.pack.modes import Mode; write = packing.write_shard;"
        "packing.write_shard = lambda job: (write(job), time.sleep(0.2))[0];"
        f"packing.pack(Path({str(images)!r}), Path({str(dest)!r}), Mode(), check=False, strict=False, processes=1, "
        f"shard_bytes={SMALL_SHARDS})"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        wait_until(lambda: process.poll() is not None or len(list(dest.glob(f"{UNFINISHED}/*-*.json"))) >= 3)
        process.kill()
    torn = dest / ".train-00009.arrow.123.tmp"
    torn.write_bytes(b"half a shard")
    finished = {path.stem for path in dest.glob(f"{UNFINISHED}/*-*.json")}
    stamps = {name: (dest / f"{name}.arrow").stat().st_mtime_ns for name in finished}
    assert 3 <= len(finished) < 10
    with pytest.raises(DataError, match="is only partly packed"):
        open_records(str(dest), "train")
    again = pack(images, dest)
    assert {name: (dest / f"{name}.arrow").stat().st_mtime_ns for name in finished} == stamps
    assert again.num_written == sum(len(split.shards) for split in again.index.splits.values()) - len(finished)
    assert not torn.exists()
    pack(images, tmp_path / "at once")
    assert digest(dest) == digest(tmp_path / "at once")


def unfinished(images: Path, dest: Path) -> None:
    """What a kill before the end leaves: all shards but two, and no index."""
    (images / "train" / "cat" / "bad.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match="leave out --strict"):
        pack(images, dest, strict=True)
    (dest / UNFINISHED / "train-00001.json").unlink()
    (dest / "train-00002.arrow").write_bytes(b"half a shard")


def test_a_shard_that_is_not_whole_is_written_again(images: Path, tmp_path: Path) -> None:
    unfinished(images, tmp_path / "packed")
    assert pack(images, tmp_path / "packed").num_written == 3  # and the one with the bad image, which may be fixed by now
    pack(images, tmp_path / "at once")
    assert digest(tmp_path / "packed") == digest(tmp_path / "at once")


def test_strict_goes_on_once_the_image_is_fixed(images: Path, tmp_path: Path) -> None:
    dest = tmp_path / "packed"
    bad = images / "train" / "cat" / "007.jpg"
    whole = bad.read_bytes()
    bad.write_bytes(b"x" * len(whole))
    for _ in range(2):
        with pytest.raises(DataError, match=rf"1 unreadable .* train/cat/007.jpg .* if you remove them, remove {dest}"):
            pack(images, dest, strict=True)
    bad.write_bytes(whole)
    packed = pack(images, dest, strict=True)
    assert (packed.num_written, packed.index.num_unreadable) == (1, 0)
    pack(images, tmp_path / "at once")
    assert digest(dest) == digest(tmp_path / "at once")
    assert pack(images, dest, strict=True).num_written == 0


def test_a_pack_with_other_arguments_leaves_the_folder_alone(images: Path, tmp_path: Path) -> None:
    dest = tmp_path / "packed"
    unfinished(images, dest)
    before = digest(dest)
    other = tmp_path / "other"
    shutil.copytree(images, other)
    (other / "train" / "cat" / "bad.jpg").unlink()
    for source, mode in ((images, Mode(raw=9)), (images, Mode(max_side=9)), (other, Mode())):
        assert f"{dest} holds an unfinished set from other images or in another mode" in refusal(source, dest, mode)
    assert digest(dest) == before
    pack(images, dest)
    before = digest(dest)
    for source, mode in ((images, Mode(raw=9)), (other, Mode())):
        assert f"{dest} holds a set packed from other images or in another mode" in refusal(source, dest, mode)
    assert digest(dest) == before


def test_a_second_pack_of_a_finished_set_only_verifies_it(images: Path, tmp_path: Path) -> None:
    dest = tmp_path / "packed"
    pack(images, dest)
    before = {path: path.stat().st_mtime_ns for path in dest.iterdir()}
    assert pack(images, dest).num_written == 0
    assert {path: path.stat().st_mtime_ns for path in dest.iterdir()} == before
    shard = dest / "train-00003.arrow"
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    assert f"{shard} does not match the checksum in its index: copy the set again, or remove it and pack it again" in refusal(
        images, dest
    )


def test_what_a_kill_after_the_index_leaves_is_removed(images: Path, tmp_path: Path) -> None:
    dest = tmp_path / "packed"
    pack(images, dest)
    before = digest(dest)
    (dest / UNFINISHED).mkdir()
    (dest / UNFINISHED / "train-00000.json").write_text("{}")
    assert pack(images, dest).num_written == 0
    assert digest(dest) == before
    assert not (dest / UNFINISHED).exists()


def test_a_folder_that_holds_other_things_is_not_touched(images: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "is a file; give a folder" in refusal(images, tmp_path / "file")
    assert "holds other things than a packed set" in refusal(images, images)
    assert "does not exist" in refusal(tmp_path / "none", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_one_pack_at_a_time_works_on_a_folder(images: Path, tmp_path: Path) -> None:
    dest = tmp_path / "packed"
    (dest / UNFINISHED).mkdir(parents=True)
    with locked(dest / UNFINISHED / "lock"):
        assert "another `distill pack` is working on it; wait until it ends" in refusal(images, dest)
    pack(images, dest)


def test_a_disk_that_is_too_small_is_reported_before_anything_is_written(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert "MiB are still to be written, and its disk has 0 MiB free" in refusal(images, tmp_path / "packed")


@pytest.mark.skipif(sys.platform != "linux", reason="the first page of /proc/self/mem is a disk that fails")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_disk_that_fails_drops_no_image(images: Path, tmp_path: Path, processes: int) -> None:
    dest = tmp_path / "packed"
    bad = images / "train" / "dog" / "015.jpg"
    content = bad.read_bytes()
    bad.unlink()
    bad.symlink_to("/proc/self/mem")
    with pytest.raises(DataError) as caught:
        pack(images, dest, processes=processes)
    assert str(caught.value) == f"{bad}: Input/output error; fix that, then repeat the command to continue"
    bad.unlink()
    bad.write_bytes(content)
    assert pack(images, dest).index.num_unreadable == 0
    pack(images, tmp_path / "at once")
    assert digest(dest) == digest(tmp_path / "at once")


def packing_where_each_image(does: str, source: Path, dest: Path) -> list[str]:
    """`distill pack` by two processes, in which an image's name is this expression, evaluated in the process that packs it."""
    script = (
        "import os, signal, sys, time; from service import cli; from trainables.data.pack import shard;"
        f"shard.printable = lambda _: {does};"
        "import trainables.data.pack.shard_plan as plan; plan.SHARD_ROWS = 5;"
        "cli.main(sys.argv[1:])"
    )
    return [sys.executable, "-c", script, "pack", str(source), str(dest), "--processes", "2"]


@pytest.mark.processes
def test_a_process_that_is_killed_ends_the_command_in_one_line(images: Path, tmp_path: Path) -> None:
    command = packing_where_each_image("os.kill(os.getpid(), signal.SIGKILL)", images, tmp_path / "packed")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "error: a process was killed, probably out of memory; repeat the command with fewer --processes to continue\n"
    )


@pytest.mark.processes
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_command(images: Path, tmp_path: Path, end: signal.Signals) -> None:
    command = packing_where_each_image("time.sleep(60)", images, tmp_path / "packed")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        family = psutil.Process(process.pid)
        wait_until(lambda: len(family.children()) >= 2)
        children = family.children()
        time.sleep(0.3)
        process.send_signal(end)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == (130 if end == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in errors
    psutil.wait_procs(children)


# What is in a source


def test_one_class_is_refused(images: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        shutil.rmtree(images / split / "dog")
    assert refusal(images, tmp_path / "packed") == f"{images} has one class only, cat; a classifier needs images of two or more"
    assert not (tmp_path / "packed").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems take no names that are not text")
def test_names_that_are_not_text_are_packed_and_read_again(images: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        folder = os.fsencode(images / split)
        os.rename(folder + b"/cat/007.jpg", folder + b"/cat/\xb0\xa1.jpg")  # GBK
        os.rename(folder + b"/cat", folder + b"/caf\xe9")  # Latin-1
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/d\xe9ta"))
    images.rename(root)
    dest = Path(f"{root}-packed")
    packed = pack(root, dest)
    assert packed.index.classes == ("caf\\xe9", "dog")
    source = open_records(str(dest), "train")
    assert "train/caf\\xe9/\\xb0\\xa1.jpg" in {source.name(index) for index in range(len(source))}
    packing.summary_line(dest, packed).encode()


def test_files_that_are_left_out_are_a_line_of_the_command(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (images / "train/cat/photo.jfif").write_bytes((images / "train/cat/000.jpg").read_bytes())
    code, _, err = run(capsys, "pack", images, tmp_path / "packed")
    assert (code, err) == (
        0,
        f"note: {images}/train: 1 file left out: 1 .jfif; convert images of other formats to PNG; "
        "rename JPEG files so that they end in .jpg\n",
    )


def test_a_jpeg_too_large_to_be_decoded_is_packed_smaller(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MAX_PIXELS", 10_000)
    for name in ("large.jpg", "large.png"):
        photo(1, 300, 200).save(images / "train/cat" / name)
    for mode, number in ((Mode(max_side=60), 1), (Mode(raw=40), 1), (Mode(), 2)):
        packed = packing.pack(images, tmp_path / str(mode), mode, check=True, strict=False, processes=1)
        assert packed.index.num_unreadable == number
        if mode.shrinks:
            source = open_records(str(tmp_path / str(mode)), "train")
            assert (source.widths_N.max(), source.heights_N.max()) == (60, 40)


# The commands


def test_the_command_says_what_it_made(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (images / "train" / "cat" / "bad.jpg").write_bytes(b"no image")
    dest = tmp_path / "packed"
    code, out, err = run(capsys, "pack", images, dest)
    assert (code, err) == (0, "")
    assert out.startswith(f"{dest}: 40 train, 11 val images of 2 classes in 2 shards (2 written now), 0 MiB, verified, ")
    assert out.endswith(f"1 unreadable images left out (1 not an image), listed in {dest}/unreadable.jsonl\n")
    code, out, err = run(capsys, "pack", images, dest, "--strict")
    assert (code, out) == (2, "")
    assert err == (
        f"error: {dest} is finished without 1 unreadable images, all in {dest}/unreadable.jsonl; "
        "fix or remove them and pack into another folder, or leave out --strict\n"
    )
    assert run(capsys, "pack", images, dest)[0] == 0


def test_mistakes_in_the_command_are_reported_in_one_line(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "pack", images, tmp_path / "packed", "--raw", "9", "--max-side", "9")
    assert code == 2
    assert "--max-side excludes --raw: give one of them" in err
    code, _, err = run(capsys, "pack", tmp_path / "none", tmp_path / "packed")
    assert code == 2
    assert err.startswith(f"error: {tmp_path / 'none'} does not exist; give one of these layouts: CIFAR")


def test_an_index_records_how_it_was_made(images: Path, tmp_path: Path) -> None:
    pack(images, tmp_path / "packed", Mode(max_side=20, quality=80))
    index = json.loads((tmp_path / "packed" / INDEX).read_bytes())
    assert index["mode"] == {"max_side": 20, "quality": 80}
    assert index["source"]["kind"] == "image folder"
    assert index["source"]["name"] == "images"
    assert str(tmp_path) not in json.dumps(index)
    assert os.listdir(tmp_path / "packed").count(UNFINISHED) == 0
