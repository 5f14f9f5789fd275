"""Checkpoints off the training thread: of the step at which they were taken, one at a time, errors and all."""

import contextlib
import errno
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.trainables.jobs import Recorded, config, equal, no_telemetry, train_on_record
from trainables.disk_writer import DiskWriter
from trainables.distributed.group import Group
from trainables.engine import checkpoint, checkpoint_writer, tensor_file
from trainables.engine.checkpoint import CheckpointState, Progress
from trainables.engine.checkpoint_writer import CheckpointWriter
from trainables.engine.tensor_file import DTYPES, HostBuffer, write_packed
from trainables.engine.train import build, run_job
from trainables.errors import CheckpointError
from trainables.failures import failure_of
from trainables.rundir import StageDir

CPU = torch.device("cpu")


def state_of(model: nn.Module) -> CheckpointState:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    about = {"model": "tiny", "num_classes": 4, "image_size": 1, "classes": list("abcd")}
    return CheckpointState(model, nn.ModuleDict(), [optimizer], torch.amp.GradScaler("cpu", enabled=False), Progress(), about)


def go_on(state: CheckpointState) -> None:
    """What a training changes: parameters, optimizer, progress, generators."""
    state.student(torch.randn(5, 3)).sum().backward()
    state.optimizers[0].step()
    state.progress.step += 1
    state.progress.history.append({"step": state.progress.step})


def wait_for(event: threading.Event) -> None:
    event.wait()


@contextlib.contextmanager
def stopped_disk(disk: DiskWriter) -> Iterator[None]:
    """Nothing is written inside the context."""
    may_write = threading.Event()
    disk.put(lambda: wait_for(may_write))
    try:
        yield
    finally:
        may_write.set()


def test_a_checkpoint_has_the_state_of_the_step_at_which_it_was_taken(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state, path = state_of(nn.Linear(3, 4)), tmp_path / "last.safetensors"
    weight, momentum = (
        state.student.weight.detach().clone(),
        state.optimizers[0].state_dict()["state"][0]["momentum_buffer"].clone(),
    )
    generator = torch.get_rng_state()
    with DiskWriter() as disk, stopped_disk(disk):
        CheckpointWriter(disk, CPU).save([path], state, Group())
        for _ in range(3):
            go_on(state)
        assert not path.exists()
    tensors, meta = checkpoint.read(path)
    assert torch.equal(tensors["model.weight"], weight)
    assert torch.equal(tensors["optim.0.model.weight.momentum_buffer"], momentum)
    assert torch.equal(tensors["rng.0.cpu"], generator)
    assert (meta["progress"]["step"], meta["progress"]["history"]) == (0, [])


def test_the_next_checkpoint_waits_for_the_one_before_and_uses_its_memory_again(tmp_path: Path) -> None:
    state = state_of(nn.Linear(3, 4))
    paths = [tmp_path / f"{number}.safetensors" for number in range(2)]
    with DiskWriter() as disk:
        writer = CheckpointWriter(disk, CPU)
        with stopped_disk(disk):
            writer.save(paths[:1], state, Group())
            memory = writer._buffer._bytes_N.data_ptr()
            first = state.student.weight.detach().clone()
            go_on(state)
            second = threading.Thread(target=writer.save, args=(paths[1:], state, Group()))
            second.start()
            second.join(0.2)
            assert second.is_alive()
        second.join()
        assert writer._buffer._bytes_N.data_ptr() == memory
    found = [checkpoint.read(path)[0]["model.weight"] for path in paths]
    assert torch.equal(found[0], first)
    assert torch.equal(found[1], state.student.weight)


def test_a_checkpoint_that_is_replaced_is_kept_under_another_name_and_both_are_announced(tmp_path: Path) -> None:
    state, last, best = state_of(nn.Linear(3, 4)), tmp_path / "last.safetensors", tmp_path / "best.safetensors"
    announced = []
    with DiskWriter() as disk:
        writer = CheckpointWriter(disk, CPU, lambda paths, step, epoch: announced.append((list(paths), step)))
        writer.save([last], state, Group())
        first = state.student.weight.detach().clone()
        go_on(state)
        writer.save([last], state, Group(), keep_as=best)
    assert announced == [([last], 0), ([last, best], 1)]
    assert torch.equal(checkpoint.read(best)[0]["model.weight"], first)
    assert torch.equal(checkpoint.read(last)[0]["model.weight"], state.student.weight)


def test_safetensors_reads_each_type_and_layout_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    tensors = {f"{name}{rank}": torch.ones([3] * rank).to(dtype) for dtype, name in DTYPES.items() for rank in (0, 1, 2)}
    tensors |= {"channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "empty": torch.empty(0, 3)}
    tensors |= {"parameter": nn.Parameter(torch.randn(2)), "part": torch.randn(4, 6)[1:3, ::2]}
    write_packed(path, HostBuffer(CPU).pack(tensors), json.dumps({"ä": 1}))
    with safe_open(path, framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        assert file.metadata() == {"raydistill": json.dumps({"ä": 1})}
    assert equal(found, tensors)
    assert {name: tensor.dtype for name, tensor in found.items()} == {name: tensor.dtype for name, tensor in tensors.items()}
    with open(path, "rb") as raw:
        assert int.from_bytes(raw.read(8), "little") % 8 == 0  # so that a memory map has every element at a multiple of its size


def test_a_type_that_the_format_does_not_have_is_refused_in_one_line() -> None:
    with pytest.raises(
        CheckpointError, match=r"^a checkpoint cannot store a, which has the dtype torch\.complex128: use another"
    ):
        HostBuffer(CPU).pack({"a": torch.zeros(1, dtype=torch.complex128)})


class SmallWrites:
    """A file whose writes end early, and that fills up at last."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def __enter__(self) -> "SmallWrites":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def fileno(self) -> int:
        return int(self._file.fileno())

    def write(self, data: memoryview) -> int:
        if self._room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._room -= 7
        return int(self._file.write(data[:7]))


def small_writes(room: int) -> Callable[..., SmallWrites]:
    return lambda *arguments, **options: SmallWrites(open(*arguments, **options), room)


def test_writes_that_end_early_are_gone_on_with(tmp_path: Path) -> None:
    path, tensors = tmp_path / "a.safetensors", {"a": torch.randn(100)}
    with patch.object(tensor_file, "open", small_writes(10_000), create=True):
        write_packed(path, HostBuffer(CPU).pack(tensors), "{}")
    assert equal(checkpoint.read(path)[0], tensors)


@pytest.mark.parametrize("every", [2, 1000])
def test_a_disk_that_fills_up_ends_the_training_with_the_checkpoint_before(tmp_path: Path, every: int) -> None:
    stage = StageDir(tmp_path)
    train_on_record(config(tmp_path, teacher=None, train={"log_every": 1}))
    before = stage.last.read_bytes()
    more = config(tmp_path, teacher=None, optim={"epochs": 3}, train={"log_every": 1, "checkpoint_every": every})
    full = patch.object(tensor_file, "open", small_writes(1000), create=True)
    with (
        full,
        pytest.raises(CheckpointError, match="the previous one is intact: free space, then run `distill resume`") as caught,
    ):
        train_on_record(more)
    assert failure_of(caught.value, 0).kind == "user"
    assert "\n" not in str(caught.value)
    assert stage.last.read_bytes() == before
    assert [path.name for path in stage.last.parent.iterdir() if path.name.endswith(".tmp")] == []


def test_training_goes_on_while_a_checkpoint_is_being_written(tmp_path: Path) -> None:
    """The disk stands still from the first checkpoint until the step before the next one."""
    may_write, report = threading.Event(), Recorded()
    settings = config(tmp_path, teacher=None, train={"log_every": 1, "checkpoint_every": 5})
    job = build(settings, Group(), report, no_telemetry)
    steps_at_writes: list[int] = []
    write, check = checkpoint_writer.write_packed, job.disk.check

    def wait_and_write(*arguments: Any) -> None:
        may_write.wait()
        steps_at_writes.append(job.progress.step)
        write(*arguments)

    def let_write() -> None:
        if job.progress.step == 9:
            may_write.set()
        check()

    patched = patch.object(checkpoint_writer, "write_packed", wait_and_write), patch.object(job.disk, "check", let_write)
    with contextlib.closing(job), patched[0], patched[1]:
        run_job(job)
    assert steps_at_writes[0] >= 9
    assert checkpoint.read(job.stage.last)[1]["progress"]["step"] == job.progress.step
