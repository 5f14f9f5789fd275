import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.trainables.data.loader.loader_processes import loader_processes
from tests.trainables.data.loader.numbered_sources import LoggingSource, NumberedSource, SlowSource
from tests.trainables.data.photos import MakeFolder
from tests.waiting import wait_until
from trainables.config import DataConfig
from trainables.data.interface import Source
from trainables.data.loader.batch_memory import BatchMemory
from trainables.data.loader.loader import Loader
from trainables.data.loader.loader_process import ProcessReader, uses_process
from trainables.data.source import open_source
from trainables.errors import LoaderDiedError
from trainables.failures import RETRYABLE, kind_of

MEMORY = "/memfd:loader batches"

pytestmark = pytest.mark.processes


def _data(batch: int = 8, **changes: Any) -> DataConfig:
    return DataConfig(image_size=2, global_batch_size=batch, loader_workers=2, loader="process").model_copy(update=changes)


def _loader(source: Source, data: DataConfig) -> Loader:
    return Loader(source, data, split="train", seed=11, rank=0, world_size=1, loader_workers=2)


def _who_maps_batches() -> set[int]:
    found = set()
    for process in psutil.process_iter():
        try:
            if MEMORY in Path(f"/proc/{process.pid}/maps").read_text():
                found.add(process.pid)
        except OSError:  # it has ended
            continue
    return found


@pytest.fixture(autouse=True)
def _no_earlier_garbage() -> None:
    gc.collect()  # the traceback of an earlier test's exception may refer to its batches and loaders


@pytest.mark.parametrize(
    ("device", "changes", "expected"),
    [
        ("cpu", {"loader": "auto"}, False),
        ("cpu", {"loader": "process"}, True),
        ("cuda", {"loader": "auto"}, True),
        ("cuda", {"loader": "threads"}, False),
        ("cuda", {"loader": "auto", "decoder": "gpu", "augment": "crop_flip"}, False),
    ],
)
def test_auto_is_a_process_where_a_gpu_trains_and_does_not_decode(device: str, changes: dict[str, Any], expected: bool) -> None:
    assert uses_process(_data(**changes), torch.device(device)) == expected


def test_a_closed_loader_leaves_neither_its_process_nor_its_memory() -> None:
    loader = _loader(NumberedSource(64), _data(8))
    assert len(list(loader.epoch(0))) == 8
    (server,) = loader_processes()
    loader.close()
    assert not server.is_running()
    assert os.getpid() not in _who_maps_batches()


def test_a_loader_process_imports_no_torch_where_photos_are_decoded_fast(make_folder: MakeFolder) -> None:
    root = make_folder(train={"a": 16}, val={"a": 1})
    data = _data(8, path=str(root), image_size=16, augment="crop_flip")
    loader = _loader(open_source(data, "train"), data)
    batches = loader.epoch(0)
    next(batches)
    (server,) = loader_processes()
    assert "libtorch" not in Path(f"/proc/{server.pid}/maps").read_text()
    batches.close()
    loader.close()


def test_a_loader_process_that_is_killed_is_one_line_and_training_may_go_on() -> None:
    loader = _loader(SlowSource(4000), _data(8))
    batches = loader.epoch(0)
    next(batches)
    loader_processes()[0].send_signal(signal.SIGKILL)
    with pytest.raises(
        LoaderDiedError, match=r"^the loader process was killed by SIGKILL; if .* lower data.loader_workers"
    ) as caught:
        list(batches)
    assert "\n" not in str(caught.value)
    assert kind_of(caught.value) in RETRYABLE
    with pytest.raises(LoaderDiedError):
        list(loader.epoch(1))
    loader.close()


def test_an_error_of_the_process_itself_is_in_its_log_and_ends_it(capfd: pytest.CaptureFixture[str]) -> None:
    loader = _loader(SlowSource(4000), _data(8))
    assert isinstance(loader._reader, ProcessReader)
    batches = loader.epoch(0)
    next(batches)
    loader._reader._connection.send_bytes(b"no pickle")
    with pytest.raises(LoaderDiedError, match=r"exited with code 1; its error is in this worker's log, worker-\*\.err in"):
        list(batches)
    loader.close()
    assert "UnpicklingError" in capfd.readouterr().err


def _num_descriptors() -> int:
    """Of batches' memory, in this process."""
    return sum(MEMORY in os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())


def test_a_closed_loader_leaves_no_descriptor() -> None:
    before = _num_descriptors()
    unused, loader = (_loader(NumberedSource(64), _data(8)) for _ in range(2))
    assert len(list(loader.epoch(0))) == 8
    assert _num_descriptors() > before
    loader.close()
    unused.close()
    assert _num_descriptors() == before


def test_what_a_process_cannot_open_is_an_error_of_the_first_batch(tmp_path: Path) -> None:
    class NotInAModule(SlowSource):
        def __reduce__(self) -> tuple[Any, ...]:
            return open, (str(tmp_path / "missing"),)

    loader = _loader(NotInAModule(64), _data(8))
    with pytest.raises(FileNotFoundError, match="missing"):
        list(loader.epoch(0))
    loader.close()


def test_crops_for_the_device_to_decode_come_as_from_threads(make_folder: MakeFolder) -> None:
    root = make_folder(train={"a": 12}, val={"a": 1})
    found = []
    for where in ("threads", "process"):
        data = _data(6, path=str(root), image_size=16, augment="crop_flip", decoder="gpu", loader=where)
        loader = _loader(open_source(data, "train"), data)
        found.append([batch.encoded_rows.regions for batch in loader.epoch(0) if batch.encoded_rows])
        loader.close()
    assert len(found[0]) == 2
    assert found[0] == found[1]


def _is_mapped(address: int, num_bytes: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(begin <= address and address + num_bytes <= end for begin, end in ranges)


@pytest.mark.parametrize("shared", [False, True])
def test_blocks_that_a_gpu_copies_from_are_page_locked_for_as_long_as_they_are_mapped(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    locked = dict[int, int]()

    class Cuda:
        """Of torch's bindings, which are missing without a GPU, the two functions that are called."""

        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            assert _is_mapped(address, num_bytes)
            locked[address] = num_bytes
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            assert _is_mapped(address, locked.pop(address))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Cuda)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    memory = BatchMemory(64, 224, os.memfd_create("loader batches") if shared else -1, pinned=True)
    lent = [memory.lend(memory.allocate(), 64) for _ in range(3)]
    assert list(locked.values()) == 3 * [memory.block_bytes]
    memory.close()
    image_HWC = torch.from_numpy(lent.pop()[0])[-1]
    lent.clear()
    assert list(locked.values()) == [memory.block_bytes]
    del image_HWC
    assert not locked
    assert os.getpid() not in _who_maps_batches()


def test_batches_that_cannot_be_page_locked_are_read_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Cuda:
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            return 801  # not supported

    def check_error(code: int) -> None:
        error = torch.cuda.CudaError.__new__(torch.cuda.CudaError)  # whose constructor asks the library for the text
        error.args = (f"operation not supported ({code})",)
        raise error

    monkeypatch.setattr(torch.cuda, "cudart", Cuda)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    memory = BatchMemory(2, 8, pinned=True)
    assert len({memory.allocate() for _ in range(3)}) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "the loader's batches are not page-locked: operation not supported (801)"
    ]
    memory.close()


def _worker(where: str = "iterating") -> subprocess.Popen[str]:
    """A process with a loader of its own, which has begun to work."""
    return subprocess.Popen([sys.executable, "-c", _WORKER, where], stdout=subprocess.PIPE, text=True)


_WORKER = """
import os, sys, time
from tests.trainables.data.loader.numbered_sources import SlowSource
from tests.trainables.data.loader.test_loader_process import _data, _loader
loader = _loader(SlowSource(100_000), _data(8))
print("started", flush=True)
for step, batch in enumerate(loader.epoch(0)):
    if step == 3:
        fork = os.fork() if sys.argv[1] == "forked" else None  # which has the connection, too
        if fork == 0:
            time.sleep(1000)
        print(fork, flush=True)
"""


def test_a_loader_process_ends_with_its_worker_though_a_fork_of_that_lives_on() -> None:
    worker = _worker("forked")
    assert worker.stdout is not None
    _, fork = (worker.stdout.readline().strip() for _ in range(2))
    (server,) = loader_processes(worker.pid)
    worker.kill()
    worker.wait()
    try:
        wait_until(lambda: not server.is_running())
    finally:
        os.kill(int(fork), signal.SIGKILL)
    wait_until(lambda: not _who_maps_batches() & {int(fork), server.pid, worker.pid})


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "server"])
def test_no_process_and_no_memory_is_left_whenever_one_of_the_two_is_killed(victim: str) -> None:
    for moment in range(10):
        worker = _worker()
        assert worker.stdout is not None
        worker.stdout.readline()
        if moment >= 5:
            worker.stdout.readline()
        (server,) = wait_until(lambda worker=worker: loader_processes(worker.pid))  # type: ignore[misc]
        pids = {worker.pid, server.pid}
        try:
            wait_until(lambda server=server, busy_s=0.1 * moment: server.cpu_times().user > busy_s)  # type: ignore[misc]
        finally:
            os.kill(worker.pid if victim == "worker" else server.pid, signal.SIGKILL)
        assert worker.wait() != 0
        wait_until(lambda server=server: not server.is_running())  # type: ignore[misc]
        assert not _who_maps_batches() & pids


def test_what_the_process_logs_is_logged_by_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    loader = _loader(LoggingSource(8), _data(4))
    assert len(list(loader.epoch(0))) == 2
    loader.close()
    assert sorted(caplog.messages) == [f"sample {index}" for index in range(8)]
