"""Mistakes that only a worker can meet: unreadable images, a loss that is no number, a disk that fills up. Real Ray, real files.

Each ends with exit code 2, at most six lines, no stack trace, nothing left running and what was good kept.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.integration.conftest import PATIENCE_S, records, result
from tests.trainables.data.photos import encoded, photo
from trainables.engine import checkpoint
from trainables.rundir import RunDir

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NO_TEACHER = ["teacher=null", "tracking.enabled=false", "data.loader_workers=1", "scale.max_failures=1", "optim.epochs=1"]


@dataclass
class Ended:
    """How a command ended. Nothing that it started is left."""

    code: int
    out: str
    err: str

    @property
    def refusal(self) -> str:
        """The lines that it was refused with; before them tracking may have said that it waits."""
        assert self.code == 2, self.out + self.err
        assert len(self.err.splitlines()) <= 6, self.err
        assert "Traceback" not in self.err + self.out
        lines = [line for line in self.err.splitlines() if not line.startswith("tracking: ")]
        assert lines, self.out
        assert lines[0].startswith("error: "), self.err
        return "\n".join(lines).removeprefix("error: ")


class Command:
    """A `distill` command in a process of its own, known again by the root of its runs."""

    def __init__(self, folder: Path, *arguments: str | Path, overrides: list[str] | None = None):
        self._runs, self._log, self._said = folder / "runs", folder / "err.txt", folder / "out.txt"
        sets = [word for override in overrides or [] for word in ("--set", override)]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RAYDISTILL_"))}
        with open(self._said, "wb") as out, open(self._log, "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "service", *map(str, arguments), *sets],
                stdout=out,
                stderr=err,
                cwd=folder,
                start_new_session=True,
                env={**clean, "RAYDISTILL_RUNS": str(self._runs)},
            )

    def end(self) -> Ended:
        try:
            code = self.process.wait(PATIENCE_S)
            deadline = time.monotonic() + 10
            while (left := self.family()) and time.monotonic() < deadline:
                time.sleep(0.2)
            assert not left, left
        finally:
            for process in self.family():
                with contextlib.suppress(psutil.Error):
                    process.kill()
        return Ended(code, self._said.read_text(errors="replace"), self._log.read_text(errors="replace"))

    def family(self) -> list[psutil.Process]:
        """Every process that has this command's environment, Ray's daemons too."""
        family = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_ours = process.environ().get("RAYDISTILL_RUNS") == str(self._runs)
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    family.append(process)
        return family


def write_photos(root: Path, num_train: int, num_val: int) -> Path:
    """Two classes of real JPEG files."""
    for split, count in (("train", num_train), ("val", num_val)):
        for label, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                (root / split / name / f"{number:02d}.jpg").write_bytes(encoded(photo(number * 2 + label), "JPEG", quality=90))
    return root


def truncate(path: Path) -> str:
    """Cut a JPEG file in the middle of its pixels, as a broken copy is; returns its name in the data set."""
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return "/".join(path.parts[-3:])


@pytest.mark.slow
def test_corrupt_images_are_named_counted_and_left_out_up_to_a_limit_that_is_an_error(tmp_path: Path) -> None:
    root = write_photos(tmp_path / "photos", num_train=12, num_val=4)
    bad = [truncate(root / name) for name in ("train/cat/03.jpg", "train/dog/07.jpg", "val/dog/02.jpg")]
    run = tmp_path / "run"
    overrides = [*NO_TEACHER, f"data.path={root}", "data.global_batch_size=8", "scale.num_workers=2"]

    ended = Command(tmp_path, "train", "digits", "--out", run, overrides=[*overrides, "data.max_bad=0.1"]).end()
    assert ended.code == 0, ended.out + ended.err
    stage = RunDir(run).stage("student")
    log = stage.log.read_text()
    for name in bad:
        assert f"skipped {name} (truncated or damaged: image file is truncated" in log
    assert result(run)["stages"][0]["metrics"]["skipped_images"] == 3
    epoch = records(run, "epoch")[0]["metrics"]
    assert (epoch["epoch/skipped_images"], epoch["val/num_images"]) == (3, 7)

    evaluated = Command(tmp_path, "evaluate", stage.best, "--data", root).end()
    assert evaluated.code == 0, evaluated.err
    assert "(7 images, 1 unreadable)" in evaluated.out
    assert "skipped val/dog/02.jpg (truncated or damaged: image file is truncated" in evaluated.out
    embedded = Command(
        tmp_path, "embed", stage.best, "--data", root, "--to", tmp_path / "x.npy", overrides=["data.max_bad=0.1"]
    ).end()
    assert embedded.code == 0, embedded.err
    assert "skipped train/cat/03.jpg (truncated or damaged: image file is truncated" in embedded.out
    assert len(np.load(tmp_path / "x.npy")) == len((tmp_path / "x.npy.txt").read_text().splitlines()) == 29
    assert not list(tmp_path.rglob(".evaluate"))

    strict = tmp_path / "strict"
    refused = Command(tmp_path, "train", "digits", "--out", strict, overrides=overrides).end().refusal
    assert "2 unreadable images in one epoch, more than the 1 of 24 that data.max_bad=0.001 allows: " in refused
    assert "fix or remove them, or raise the limit" in refused
    assert any(name in refused for name in bad)
    assert (result(strict)["status"], result(strict)["reason"]) == ("failed", refused)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_names_the_step_and_keeps_the_last_good_state(tmp_path: Path) -> None:
    run = tmp_path / "run"
    every = ["train.checkpoint_every=1", "train.log_every=1", "optim.lr=1e12"]
    refused = Command(tmp_path, "train", "digits", "--out", run, overrides=[*NO_TEACHER, *every]).end().refusal
    stage = RunDir(run).stage("student")
    tensors, about = checkpoint.read(stage.last)
    stopped = re.match(r"student: (.*) is not finite (?:at|after) step (\d+): lower optim\.lr \(now 1e\+12\)", refused)
    assert stopped, refused
    assert int(stopped[2]) == about["progress"]["step"] + 1
    assert refused.endswith(f"the last good state is {stage.last}")
    assert all(tensor.isfinite().all() for name, tensor in tensors.items() if name.startswith("model."))
    assert result(run)["status"] == "failed"
    assert result(run)["reason"] == refused


METHOD = """
import sys
import torch.distributed as dist
from trainables.methods.contract import Method, Requirements

class Broken(Method):
    terms = ("none",)
    requires = Requirements(teacher=False)

    def forward(self, student, teacher, batch):
        if dist.get_rank() == 1:
            ERROR
        return {"none": student.logits_BK.sum(1) * 0}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('raise KeyError("stored_rows")', "rank 1: KeyError: 'stored_rows'"),
        ("sys.exit(0)", "the experiment's code called sys.exit(0)"),
    ],
)
def test_an_error_in_a_methods_code_ends_the_run_at_once_with_its_own_line(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "broken.py").write_text(METHOD.replace("ERROR", line))
    run = tmp_path / "run"
    method = ["distill.method=broken.py:Broken", "distill.task_weight=1.0", "scale.num_workers=2", "scale.max_failures=3"]
    ended = Command(tmp_path, "train", "digits", "--out", run, overrides=[*NO_TEACHER, *method]).end()
    assert ended.refusal == reason
    assert "restart" not in ended.out
    assert (result(run)["status"], result(run)["reason"]) == ("failed", reason)


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory; the test is skipped where nobody may mount one."""
    folder.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run([mount, "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False)
    if not done or done.returncode:
        pytest.skip("only root may mount a file system of its own")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_read_only_file_system_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "ro,size=64k") as disk:
        for option in ("--out", "--runs"):
            refused = Command(tmp_path, "train", "digits", option, disk / "run").end().refusal
            assert refused == f"{option} {disk / 'run'} cannot be written: {disk} is read-only for you; choose another {option}"


def test_a_read_only_folder_for_logits_is_refused_before_the_teacher_is_trained(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "ro,size=64k") as disk:
        cache = [f"teacher.cache={disk / 'logits'}"]
        for more in ([], ["sweep.metric=top1_pct", "sweep.steps=null"]):
            refused = Command(tmp_path, "sweep" if more else "train", "digits", overrides=[*cache, *more]).end().refusal
            assert refused == (
                f"teacher.cache: {disk / 'logits'} cannot be written: {disk} is read-only for you; name another folder"
            )


@pytest.mark.slow
def test_a_disk_that_fills_up_stops_the_run_in_one_line_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=4m") as disk:
        stage = RunDir(disk / "run").stage("student")
        overrides = [*NO_TEACHER, "optim.epochs=100000", "train.checkpoint_every=5", "tracking.enabled=true"]
        command = Command(tmp_path, "train", "digits", "--out", disk / "run", overrides=overrides)
        deadline = time.monotonic() + PATIENCE_S
        while not stage.last.exists() and time.monotonic() < deadline and command.process.poll() is None:
            time.sleep(0.05)
        with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        refused = command.end().refusal
        assert "No space left on device" in refused
        assert "resume" in refused
        assert len(refused.splitlines()) == 1
        _, about = checkpoint.read(stage.last)
        assert about["progress"]["step"] > 0
        assert not list(stage.last.parent.glob(".*.tmp"))
