"""A failure's kind: from real exceptions where this machine can raise them, elsewhere from a library's own type and words."""

import errno
import functools
import gc
import json
import multiprocessing
import os
import pickle
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainables import failures
from trainables.errors import DataError, EvaluatorDiedError, ModelError, TeacherServiceLostError
from trainables.failures import (
    RETRYABLE,
    Failure,
    WorkersFailedError,
    failure_of,
    first_cause,
    is_single_value,
    kind_of,
)
from trainables.models.registry import build_model


@pytest.mark.parametrize(
    "error",
    [
        KeyError("stored_rows"),
        KeyError("peer_logits"),
        ValueError("cannot restore the socket's connection: timed out"),
        RuntimeError("gloo and nccl stay in the store"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        torch.linalg.LinAlgError(
            "cusolver error: CUSOLVER_STATUS_INVALID_VALUE, when calling `cusolverDnSsyevd(…)`. This error may appear if the "
            "input matrix contains NaN."
        ),
        DataError("s3://bucket/set: connection to its store timed out"),
        SystemExit(0),
        TimeoutError("the licence server did not answer"),  # of a user's own code
        ConnectionResetError(104, "Connection reset by peer"),
        BrokenPipeError(32, "Broken pipe"),
        RuntimeError("Can't allocate more than 8 slots"),
        RuntimeError("a layer of mine has failed"),
    ],
    ids=str,
)
def test_an_error_of_code_or_data_is_the_users_whatever_words_it_uses(error: BaseException) -> None:
    assert kind_of(error) == "user"


def of_cuda(code: int) -> torch.AcceleratorError:
    """What torch raises where a call of CUDA's runtime returns this code."""
    error = torch.AcceleratorError("CUDA error: …")
    error.error_code = code  # type: ignore[attr-defined]
    return error


ENGINE = "was unable to find an engine to execute this computation"
OF_GPU_LIBRARIES = [
    (
        "pytorch: torch/csrc/Exceptions.cpp",
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        "out_of_memory",
    ),
    ("pytorch: c10/cuda/CUDAException.cpp", of_cuda(2), "out_of_memory"),
    ("pytorch: c10/cuda/CUDAException.cpp", of_cuda(710), "user"),
    ("pytorch: c10/cuda/CUDAException.cpp", of_cuda(214), "device"),
    ("pytorch: c10/cuda/driver_api.h", RuntimeError("CUDA driver error: out of memory"), "out_of_memory"),
    ("pytorch: c10/cuda/driver_api.h", RuntimeError("CUDA driver error: unspecified launch failure"), "device"),
    ("pytorch: aten/src/ATen/native/cudnn/Conv_v8.cpp", RuntimeError(f"FIND {ENGINE}"), "out_of_memory"),
    ("pytorch: aten/src/ATen/native/cudnn/Conv_v8.cpp", RuntimeError(f"GET {ENGINE}"), "out_of_memory"),
    (
        "cuDNN: cudnn_graph.h; pytorch: aten/src/ATen/cuda/Exceptions.h",
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        "out_of_memory",
    ),
    (
        "cuDNN: cudnn_graph.h; pytorch: aten/src/ATen/cuda/Exceptions.h",
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
        "out_of_memory",
    ),
    ("pytorch: aten/src/ATen/cuda/Exceptions.h", RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "device"),
    (
        "pytorch: aten/src/ATen/cuda/Exceptions.h",
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        "out_of_memory",
    ),
    (
        "pytorch: aten/src/ATen/cuda/Exceptions.h",
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(…)`"),
        "device",
    ),
    (
        "pytorch: aten/src/ATen/cuda/Exceptions.h",
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`. If you keep seeing"),
        "out_of_memory",
    ),
    (
        "pytorch: aten/src/ATen/cuda/Exceptions.h",
        RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnSsyevd(…)`. If you keep seeing"),
        "device",
    ),
    (
        "nccl: src/include/checks.h; pytorch: torch/csrc/distributed/c10d/NCCLUtils.cpp",
        dist.DistBackendError(
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
        ),
        "out_of_memory",
    ),
    (
        "nccl: src/include/checks.h; pytorch: torch/csrc/distributed/c10d/NCCLUtils.cpp",
        dist.DistBackendError("ncclRemoteError: A call failed possibly due to a network error"),
        "lost_peer",
    ),
    (
        "nvImageCodec: python/error_handling.h",
        RuntimeError("CUDA Runtime failure: '#2' at /opt/src/python/image.cpp:176"),
        "out_of_memory",
    ),
    (
        "nvImageCodec: python/error_handling.h",
        RuntimeError("CUDA Runtime failure: '#214' at /opt/src/python/image.cpp:176"),
        "device",
    ),
]


def test_an_evaluator_that_dies_again_and_again_restarts_the_stage_with_its_reason() -> None:
    failure = failure_of(EvaluatorDiedError("eval.asynchronous: its worker has died 3 times in one evaluation"), 0)
    assert failure.kind in RETRYABLE
    assert str(failure) == "a worker died: eval.asynchronous: its worker has died 3 times in one evaluation"


@pytest.mark.parametrize(("source", "error", "kind"), OF_GPU_LIBRARIES, ids=str)
def test_an_error_of_a_gpu_library_is_known_by_its_type_or_by_the_words_of_its_source(
    source: str, error: Exception, kind: str
) -> None:
    assert kind_of(error) == kind
    assert kind_of(pickle.loads(pickle.dumps(error))) == kind


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA's runtime refuses nothing here")
def test_an_error_of_cudas_runtime_has_its_code_and_is_the_devices() -> None:
    with pytest.raises(torch.AcceleratorError) as raised:
        torch.cuda.Stream()
    assert isinstance(raised.value.error_code, int)  # type: ignore[attr-defined]
    assert kind_of(raised.value) == "device"


def test_a_library_without_a_handle_is_out_of_memory_on_a_full_gpu_and_a_device_that_fails_on_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> tuple[int, int]:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    error = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    outer = RuntimeError("in a method")
    outer.__cause__ = error
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for info, expected in ((lambda: (1, 1000), "out_of_memory"), (lambda: (600, 1000), "device"), (broken, "device")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", info)
        assert kind_of(error) == kind_of(outer) == expected


def test_memory_that_really_runs_out_is_out_of_memory_also_under_an_error_of_ours() -> None:
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory") as raised:
        torch.empty(1 << 60)
    assert kind_of(raised.value) == "out_of_memory"
    with pytest.raises(RuntimeError, match=r"^std::bad_alloc$") as raised:
        torch.empty(1).expand(1 << 50).unbind()  # a list of 2^50 tensors
    assert kind_of(raised.value) == "out_of_memory"
    with pytest.raises(MemoryError) as exhausted:
        bytearray(1 << 60)
    assert kind_of(exhausted.value) == kind_of(OSError(errno.ENOMEM, "Cannot allocate memory")) == "out_of_memory"
    with pytest.raises(ModelError) as refused:
        build_model("mlp_large", num_classes=10, image_size=1 << 20, seed=0)
    assert kind_of(refused.value) == "out_of_memory"


def test_a_full_disk_names_the_file_and_what_to_do(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    with pytest.raises(OSError, match="No space left") as raised:
        full.write_text("x")
    message = "No space left on device: free space, then run `distill resume`"
    assert failure_of(raised.value, 0) == Failure("disk", message, None, 0)
    with pytest.raises(FileNotFoundError) as missing:
        (tmp_path / "store").read_text()
    assert kind_of(missing.value) == "user"


def test_a_store_that_is_gone_or_does_not_answer_is_a_lost_peer() -> None:
    patience = timedelta(seconds=1)
    with pytest.raises(dist.DistNetworkError) as raised:
        dist.TCPStore("127.0.0.1", 1, 2, False, timeout=patience)
    assert kind_of(raised.value) == "lost_peer"
    store = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=patience)
    with pytest.raises(dist.DistStoreError) as raised:
        store.get("x")
    assert kind_of(raised.value) == "lost_peer"
    assert kind_of(TeacherServiceLostError("gone")) == "lost_peer"


def lose_a_peer(rank: int, folder: Path) -> None:
    """Rank 1 does not come to a collective, and is killed; rank 0 writes the kinds of what it meets then and afterwards."""
    dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=rank, world_size=2)
    impatient = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    dist.barrier()
    if rank == 1:
        while not (folder / "waited").exists():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    kinds, words = [], []
    for group in (impatient, impatient, None, None):
        try:
            dist.all_reduce(torch.ones(3), group=group)
        except Exception as error:
            kinds.append(kind_of(error))
            words.append(str(error))
        if len(kinds) == 2:
            (folder / "waited").touch()
    (folder / "kinds").write_text(json.dumps([kinds, words]))


@pytest.mark.processes
def test_gloo_says_that_a_peer_does_not_come_or_was_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=lose_a_peer, args=(rank, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    kinds, words = json.loads((tmp_path / "kinds").read_text())
    assert kinds == ["lost_peer"] * 4
    assert "/gloo/transport/" in words[0]
    assert "Application timeout caused pair closure" in words[1]


def test_gloo_says_that_a_peer_cannot_be_reached() -> None:
    """The store has the address of a rank that has ended, as where a worker dies between its registration and the first call."""
    second, errors = timedelta(seconds=1), list[RuntimeError]()
    for _ in range(5):  # another process, or this one, may have got the port of the one that has ended
        store = dist.PrefixStore("group", dist.HashStore())
        with ThreadPoolExecutor(2) as pool:
            ended = list(pool.map(functools.partial(_join, store, second), range(2)))
        del ended
        gc.collect()
        try:
            _join(store, second, 0)
        except RuntimeError as error:
            errors.append(error)
            break
    assert "Gloo connectFullMesh failed" in str(errors[0])
    assert kind_of(errors[0]) == "lost_peer"


def _join(store: dist.Store, timeout: timedelta, rank: int) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, 2, timeout)


def test_an_error_that_another_led_to_is_of_that_ones_kind() -> None:
    outer = RuntimeError("no answer to photo 3")
    outer.__cause__ = TeacherServiceLostError("ActorDiedError")
    assert kind_of(outer) == "lost_peer"
    judged = DataError("photo 3 cannot be read: see to the network")
    judged.__cause__ = TeacherServiceLostError("ActorDiedError")
    assert kind_of(judged) == "user"


def test_torch_refuses_a_single_value_of_a_channel_in_words_that_are_known() -> None:
    norm = torch.nn.BatchNorm2d(2)
    with pytest.raises(ValueError, match="Expected") as refused:
        norm(torch.ones(1, 2, 1, 1))
    assert is_single_value(refused.value)
    assert str(failure_of(refused.value, 0)).startswith("a worker got a batch of one image, which batch norm cannot normalize: ")
    with pytest.raises(ValueError, match="expected 4D") as refused:
        norm(torch.ones(1))
    assert not is_single_value(refused.value)


def test_of_several_workers_failures_the_cause_is_the_message() -> None:
    lost, died = Failure("lost_peer", "closed by peer", "RuntimeError", 0), Failure("worker_died", "The actor died", None, 2)
    memory = Failure("out_of_memory", "CUDA out of memory", "OutOfMemoryError", 1)
    assert first_cause([lost, died, memory]) is memory
    assert str(WorkersFailedError([lost, died])) == "a worker died: The actor died"


def test_words_that_do_not_name_memory_are_explained() -> None:
    no_engine = RuntimeError("FIND was unable to find an engine to execute this computation")
    line = "rank 1: FIND was unable to find an engine to execute this computation (its memory ran out)"
    assert str(failure_of(no_engine, 1)) == line
    assert str(failure_of(MemoryError(), 0)) == "rank 0: MemoryError"


def test_code_that_calls_exit_is_named() -> None:
    assert str(failure_of(SystemExit(0), 1)) == "the experiment's code called sys.exit(0)"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_that_is_full_is_out_of_memory_also_where_cudnn_searches() -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(1 << 50, device="cuda")
    assert kind_of(raised.value) == "out_of_memory"
    free, _ = torch.cuda.mem_get_info()
    filled = torch.empty(max(free - (64 << 20), 0), dtype=torch.uint8, device="cuda")
    torch.backends.cudnn.benchmark = True
    try:
        with pytest.raises(RuntimeError) as searched:
            torch.nn.functional.conv2d(torch.ones(256, 64, 224, 224, device="cuda"), torch.ones(64, 64, 3, 3, device="cuda"))
        assert kind_of(searched.value) == "out_of_memory"
        assert failures.is_gpu_full()
    finally:
        torch.backends.cudnn.benchmark = False
        del filled
        torch.cuda.empty_cache()
