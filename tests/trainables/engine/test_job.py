"""A job's loaders, and its end. Its beginning is tested with what is built."""

import contextlib
import threading
from pathlib import Path

import psutil
import pytest
from PIL import Image

from tests.trainables.data.packed import pack_here
from tests.trainables.engine.first_steps import fuse_optimizers
from tests.trainables.jobs import Recorded, config, no_telemetry, save, write_teacher
from tests.waiting import wait_until
from trainables.data.storage.cleaner import remove_unused
from trainables.distributed.group import Group
from trainables.engine.train import build, run_job
from trainables.errors import CheckpointError
from trainables.rundir import StageDir


def _packed(root: Path) -> Path:
    for split in ("train", "val"):
        for number in range(16):
            file = root / "images" / split / "ab"[number % 2] / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (16 * number, 0, 0)).save(file)
    pack_here(root / "images", root / "set")
    return root / "set"


@pytest.mark.parametrize("uri", [False, True])
@pytest.mark.parametrize(
    ("die_after", "where"), [(None, "threads"), (3, "threads"), pytest.param(3, "process", marks=pytest.mark.processes)]
)
def test_a_job_that_ends_or_dies_leaves_no_thread_no_process_and_no_hold(
    tmp_path: Path, die_after: int | None, where: str, uri: bool
) -> None:
    packed, before = _packed(tmp_path), set(threading.enumerate())
    data = {"path": packed.as_uri() if uri else str(packed), "stage": str(tmp_path / "disk"), "global_batch_size": 4}
    data |= {"loader": where, "loader_workers": 1}
    settings = config(tmp_path / "out", teacher=None, data=data, train={"log_every": 1})
    job = build(settings, Group(), Recorded(die_after), no_telemetry)
    folders = list((tmp_path / "disk").glob("raydistill-*/*/"))
    assert len(folders) == 1
    with (
        pytest.raises(InterruptedError) if die_after else contextlib.nullcontext(),  # whose traceback holds all that there was
        contextlib.closing(job),
    ):
        run_job(job)
    wait_until(lambda: set(threading.enumerate()) <= before and remove_unused(str(folders[0])))
    assert not folders[0].exists()
    assert not [child for child in psutil.Process().children() if "loader_server" in " ".join(child.cmdline())]


def test_a_job_that_cannot_be_built_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    settings = config(tmp_path / "out", teacher=None)
    stage = StageDir(tmp_path / "out")
    stage.last.parent.mkdir(parents=True)
    stage.last.write_bytes(b"no checkpoint")
    with pytest.raises(CheckpointError, match="damaged"):
        build(settings, Group(), Recorded(), no_telemetry)
    wait_until(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_methods_convolutions_have_the_students_memory_format(tmp_path: Path, channels_last: bool) -> None:
    settings = config(
        tmp_path,
        model="convnet_small",
        teacher={"model": "convnet_large", "weights": write_teacher(tmp_path / "teacher.safetensors", "convnet_large")},
        distill={"method": ["fitnet"], "options": {}},
        train={"channels_last": channels_last},
    )
    with contextlib.closing(build(settings, Group(), Recorded(), no_telemetry)) as job:
        module = job.train_state.distillation_module
        kernels = [
            parameter for part in (module.student, module.methods) for parameter in part.parameters() if parameter.dim() == 4
        ]
    assert {parameter.dim() for parameter in module.methods.parameters()} >= {4}
    assert {kernel.stride(1) == 1 and kernel.stride(3) == kernel.shape[1] for kernel in kernels} == {channels_last}


def test_a_stage_of_a_gpu_is_resumed_with_the_updates_of_the_device_that_it_is_on_now(tmp_path: Path) -> None:
    settings = config(tmp_path, teacher=None)
    with contextlib.closing(build(settings, Group(), Recorded(), no_telemetry)) as job:
        fuse_optimizers(job)
        save(job.stage.last, job.checkpoint_state, Group())
    with contextlib.closing(build(settings, Group(), Recorded(), no_telemetry)) as job:
        groups = job.checkpoint_state.optimizers[0].param_groups
        assert {(group["fused"], group["foreach"], group["momentum"]) for group in groups} == {(None, None, 0.9)}
