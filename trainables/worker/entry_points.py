"""What runs in every Ray Train worker. The only module of this package that knows Ray.

The loop's numbers leave a worker three ways: rank 0 appends them to the stage's `metrics.jsonl` (the record that MLflow and
the progress display read), sets Ray's gauges (Prometheus, Grafana), and at epochs all ranks call `ray.train.report`.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train.v2._internal.exceptions import (
    RayTrainError,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.util.metrics import Gauge

from trainables.config import EvaluateConfig, FillConfig, TrainConfig
from trainables.device.cuda_check import check_usable
from trainables.distributed.group import Group, gather_objects
from trainables.engine import loop
from trainables.engine.evaluate import evaluate_checkpoint
from trainables.engine.job import build
from trainables.errors import ClusterError, DistillError
from trainables.failures import NODE_OUT_OF_MEMORY, Failure, Kind, WorkersFailedError, failure_of, write_failure
from trainables.metrics.metrics_file import MetricsFile
from trainables.metrics.telemetry import Telemetry
from trainables.rundir import StageDir, final_names, write_json
from trainables.teachers.cache.fill import fill
from trainables.teachers.service.protocol import TeacherServiceLostError

GAUGES = {
    "raydistill_images_per_s": "images trained on per second, over all workers, loader waits included",
    "raydistill_data_pct": "share of a step's time that waits for data, in percent",
    "raydistill_loss": "training loss",
    "raydistill_top1_pct": "validation accuracy, in percent",
}
CPU_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
"""glibc's allocator for workers that compute on a CPU: freed tensors are used again instead of given back to the kernel.

By default every step maps its activations anew, page fault by page fault: a tenth of its time. The thresholds are the largest
that mallopt(3) takes; they count in the main arena alone, and Ray Train runs the loop in a thread, which would have another.
"""
TEACHERS = "raydistill"
"""Ray's namespace of the actors of `teacher.service`."""
_GAUGE_OF = {"train/images_per_s": "raydistill_images_per_s", "train/data_pct": "raydistill_data_pct",
             "train/loss": "raydistill_loss", "val/top1_pct": "raydistill_top1_pct"}  # fmt: skip


@dataclass(frozen=True)
class Visit:
    """One group of workers that carries out several timing runs, one after the other, and so starts only once.

    `guide` is the handle of an actor that knows which is next. It has `enough(visit, steps_s) -> bool`: whether the run under
    way may end, and `following(visit, result) -> dict | None`: takes what the run's `stage.json` says, and answers with the
    next one's `TrainConfig` as plain data, or None where these workers have no more to do.
    """

    guide: Any
    name: str


def train_loop_per_worker(settings: dict[str, Any]) -> None:
    """Train one stage. `settings` is a `TrainConfig` as plain data.

    Raises:
        DistillError: see `train_stage`.
    """
    train_stage(TrainConfig.model_validate(settings), this_group())


def visit_loop_per_worker(settings: dict[str, Any]) -> None:
    """Train stages as long as the guide has another for these workers: `settings` holds the first `config`, and the `visit`.

    Raises:
        DistillError: see `train_stage`; the stages that ended before stand.
    """
    group, visit = this_group(), settings["visit"]

    def enough(steps_s: Sequence[float]) -> bool:
        return bool(ray.get(visit.guide.enough.remote(visit.name, list(steps_s))))

    following = settings["config"]
    while following is not None:
        result = train_stage(TrainConfig.model_validate(following), group, enough)
        mine = ray.get(visit.guide.following.remote(visit.name, result)) if group.is_main else None
        following = gather_objects(mine, group)[0]


def train_stage(config: TrainConfig, group: Group, enough: Callable[[Sequence[float]], bool] | None = None) -> dict[str, Any]:
    """Train one stage; what it returns lands in the stage's `stage.json`. `enough`: see `Job`.

    Raises:
        DistillError: also written, as one line, to the stage's `error.json`, where the driver reads it.
    """
    stage = StageDir(Path(config.output_dir))
    torch.set_num_threads(config.scale.cpus_per_worker)
    if config.train.compile:  # an earlier stage's kernels were compiled for other shapes, and would serve this one's too
        torch._dynamo.reset()
    if group.device.type == "cuda":  # what an earlier stage in this process has left is not this one's peak
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(group.device)
    torch.backends.cudnn.benchmark = True  # shapes do not change: the fastest convolution is worth a search
    began = time.time()
    try:
        start_logging(stage, group)
        with (
            Reporter(config, stage, group) as reporter,
            NodeTelemetry(config, group) as telemetry,
            contextlib.closing(
                build(
                    config,
                    group,
                    reporter.report,
                    telemetry.snapshot,
                    enough,
                    [ActorLine(name) for name in config.teachers],
                    reporter.flush,
                )
            ) as job,
        ):
            if group.is_main:
                loader = job.train_loader
                logging.getLogger("raydistill").info(
                    "%s: %s on %d x %s, ready after %.1f s; JPEG by %s, %.1f MiB of batches a worker",
                    config.stage, config.model, group.world_size, group.device.type, time.time() - began,
                    loader.decoder, loader.batches_mib,
                )  # fmt: skip
            try:
                summary = loop.run(job)
            except (Exception, SystemExit) as error:
                note_error(stage, group, error)  # before the loaders are closed, which may wait for a disk
                raise
        dist.barrier()  # every rank has finished before the stage counts as complete
        result = {
            "stage": config.stage,
            "model": config.model,
            "decoder": job.train_loader.decoder,
            "metrics": summary,
            "history": job.state.progress.history,
            "steps_s": job.timer.steps_s() if config.train.max_steps is not None else [],
        }
        if group.is_main:
            write_json(stage.result, result)
        return result
    except (Exception, SystemExit) as error:
        note_error(stage, group, error)
        raise


def fill_loop_per_worker(settings: dict[str, Any]) -> None:
    """Fill a teacher's cache; rank 0 writes the numbers to the stage's `stage.json`. `settings` is a `FillConfig` as plain data.

    Raises:
        DistillError: also written to the stage's `error.json`.
    """
    config, group = FillConfig.model_validate(settings), this_group()
    stage = StageDir(Path(config.output_dir))
    torch.set_num_threads(config.scale.cpus_per_worker)
    torch.backends.cudnn.benchmark = True
    try:
        start_logging(stage, group)
        with Reporter(config, stage, group) as reporter:
            metrics = fill(config, group, reporter.report)
        if group.is_main:
            write_json(stage.result, {"stage": config.stage, "model": config.model, "metrics": metrics})
    except (Exception, SystemExit) as error:
        note_error(stage, group, error)
        raise


def evaluate_loop_per_worker(settings: dict[str, Any]) -> None:
    """Evaluate a checkpoint on the validation split; rank 0 writes the result to `output`."""
    config = EvaluateConfig.model_validate(settings)
    group = this_group()
    torch.set_num_threads(config.scale.cpus_per_worker)
    result = evaluate_checkpoint(config, group)
    if group.is_main:
        write_json(Path(config.output), result)


def fit(
    config: TrainConfig | EvaluateConfig,
    *,
    use_gpu: bool,
    loader_workers: int,
    storage: Path,
    name: str,
    callbacks: list[Any] | None = None,
    visit: Visit | None = None,
) -> None:
    """Train one stage (with `visit` others after it), fill a cache, or evaluate, with `scale.num_workers` workers.

    Blocks until all workers have ended.
    Each worker reserves what it uses: its compute threads and its loader workers as CPUs, and one GPU.

    Raises:
        WorkersFailedError: a worker raised or died; its reason, where it had one, is in the stage's `error.json`.
        NoRoomError: the cluster had no room for the workers for a minute.
        ClusterError: the workers could not be started at all, which trying again would not change.
        DeviceError: torch cannot use a worker's GPU.
    """
    resources = {"CPU": float(config.scale.cpus_per_worker + loader_workers), **({"GPU": 1.0} if use_gpu else {})}
    settings = config.model_dump(mode="json")
    loop_per_worker = train_loop_per_worker if isinstance(config, TrainConfig) else evaluate_loop_per_worker
    if isinstance(config, FillConfig):
        loop_per_worker = fill_loop_per_worker
    if visit is not None:
        loop_per_worker, settings = visit_loop_per_worker, {"config": settings, "visit": visit}
    trainer = ray.train.torch.TorchTrainer(
        loop_per_worker,
        train_loop_config=settings,
        torch_config=ProcessGroup(backend="nccl" if use_gpu else "gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=config.scale.num_workers, use_gpu=use_gpu, resources_per_worker=resources
        ),
        run_config=ray.train.RunConfig(
            storage_path=str(storage), name=name, callbacks=callbacks or [],
            worker_runtime_env={} if use_gpu else {"env_vars": {k: v for k, v in CPU_MALLOC.items() if k not in os.environ}},
            # By default Ray Train waits for room for ever, without a word, also where a node's death has made that hopeless.
            failure_config=ray.train.FailureConfig(controller_failure_limit=0),
        ),
    )  # fmt: skip
    try:
        trainer.fit()
    except ray.train.ControllerError as error:
        failure = error.controller_failure
        if isinstance(failure, WorkerGroupStartupTimeoutError):
            raise NoRoomError from error
        if isinstance(failure, ray.exceptions.RayTaskError) and isinstance(failure.cause, DistillError):
            raise failure.cause from error
        # A worker died, or could do no more, before its training began or while Ray launched it.
        if isinstance(failure, ray.exceptions.RayError | WorkerGroupStartupFailedError):
            raise WorkersFailedError(failures_in(error)) from error
        raise ClusterError(f"Ray Train's controller failed: {str(error).splitlines()[-1]}") from error
    except (ray.train.TrainingFailedError, ray.exceptions.RayError) as error:
        raise WorkersFailedError(failures_in(error)) from error


class NoRoomError(Exception):
    """Ray Train found no room for the workers within its time (`RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S`, 60 s)."""

    def __init__(self) -> None:
        super().__init__("the cluster has no room for the workers: other jobs hold it")


@dataclass
class ProcessGroup(ray.train.torch.TorchConfig):  # type: ignore[misc]
    """Torch's process group, whose store listens on the address by which Ray knows rank 0's node: loopback for a local Ray.

    The store that torch opens by itself listens on every interface, without asking anyone for a token.
    """

    @property
    def backend_cls(self) -> type:
        return ProcessGroupBackend


class ProcessGroupBackend(ray.train.torch.TorchConfig().backend_cls):  # type: ignore[misc]
    """Ray's torch backend but for the way in which the workers find each other."""

    def on_start(self, worker_group: Any, backend_config: ProcessGroup) -> None:
        """Called by Ray Train on the controller, once the workers' processes stand."""
        try:
            if backend_config.backend == "nccl":
                worker_group.execute(check_gpu)
            address, port, handle = worker_group.execute_single(0, reserve_store)
            worker_group.execute(set_variables, address, port)
            world_size, timeout = len(worker_group), timedelta(seconds=backend_config.timeout_s)
            given = backend_config.backend, timeout, (address, port)
            ray.get([
                worker_group.execute_single_async(rank, join, *given, handle if rank == 0 else None, rank, world_size)
                for rank in range(world_size)
            ])  # fmt: skip
        except Exception:
            # A worker has died. Ray Train forgets a group that fails here, and with it what the group has reserved.
            worker_group.abort()
            raise


def check_gpu() -> None:
    """See `check_usable`; by itself NCCL says so after minutes, and without the versions."""
    check_usable(ray.train.torch.get_device(), f"{socket.gethostname()} ({ray.util.get_node_ip_address()})")


def set_variables(address: str, port: int) -> None:
    """What torchrun, and Ray's own backend, set for a user's code and for libraries: who this worker is, where the store is."""
    context = ray.train.get_context()
    os.environ |= {
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "NODE_RANK": str(context.get_node_rank()),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def reserve_store() -> tuple[str, int, int]:
    """On rank 0: the node's address, and a port and a file descriptor of a socket that listens there."""
    address = ray.util.get_node_ip_address()
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    return address, listener.getsockname()[1], listener.detach()


def join(backend: str, timeout: timedelta, store: tuple[str, int], handle: int | None, rank: int, world_size: int) -> None:
    """On every rank: make the process group around rank 0's store, which rank 0 opens on the socket `handle`."""
    if interface := interface_of(ray.util.get_node_ip_address()):
        # By default gloo resolves the host's name, which many systems map to loopback: other nodes could not reach it.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    found = dist.TCPStore(  # type: ignore[attr-defined]
        *store, world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False, master_listen_fd=handle
    )
    arguments = group_arguments(backend, ray.train.torch.get_device())
    dist.init_process_group(store=found, rank=rank, world_size=world_size, timeout=timeout, **arguments)


def group_arguments(backend: str, device: torch.device) -> dict[str, Any]:
    """The backend of `init_process_group` and its device: NCCL without one takes that of the global rank's number."""
    return {"backend": backend, **({"device_id": device} if backend == "nccl" else {})}


def interface_of(address: str) -> str | None:
    """The name of the network interface that has `address`, or None."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, entries in interfaces if any(entry.address == address for entry in entries)), None)


def this_group() -> Group:
    """This worker among its peers, as Ray Train set them up."""
    context = ray.train.get_context()
    device = ray.train.torch.get_device()
    return Group(dist.get_rank(), dist.get_world_size(), context.get_local_rank(), device)


class ActorLine:
    """A `Line` to an actor of a teacher's service. Large arrays lie in Ray's object store, where both sides read them."""

    def __init__(self, name: str) -> None:
        """Raises ClusterError: there is no such actor any more."""
        try:
            self._actor = ray.get_actor(name, namespace=TEACHERS)
        except ValueError as error:
            raise ClusterError(f"teacher.service: its actor {name} has ended: `distill resume` starts another") from error

    def __call__(self, method: str, *arguments: Any) -> Callable[[float], Any]:
        """See `Line`."""
        try:
            reference = getattr(self._actor, method).remote(*arguments)
        except ray.exceptions.RayError as error:
            raise TeacherServiceLostError(str(error).splitlines()[0]) from error

        def result(timeout_s: float) -> Any:
            try:
                return ray.get(reference, timeout=timeout_s)
            except ray.exceptions.GetTimeoutError:
                raise
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, TimeoutError):  # it would read as an answer that is still to come
                    raise TeacherServiceLostError(str(error.cause)) from None
                raise error.cause from None
            except ray.exceptions.RayError as error:  # the actor's process or node has died, or what it had sent went with them
                raise TeacherServiceLostError(type(error).__name__) from error

        return result


def note_error(stage: StageDir, group: Group, error: BaseException) -> None:
    """Write down why this rank stops."""
    try:
        # An error of Ray's own tells of an actor that is gone, or of workers that did not come to the same report.
        write_failure(stage.error, ray_failure(error, group.rank, "lost_peer"))
    except OSError as problem:  # a full disk: the exception itself still reaches the driver
        print(f"cannot write {stage.error}: {problem}", file=sys.stderr)


def failures_in(error: Exception) -> list[Failure]:
    """What Ray Train says of a job's workers: of each that raised or died, or of what failed before they worked."""
    if isinstance(error, ray.train.ControllerError):
        return [ray_failure(error.controller_failure, None, "worker_died")]
    workers = getattr(error, "worker_failures", None) or {None: error}
    return [ray_failure(failure, rank, "worker_died") for rank, failure in workers.items()]


def ray_failure(error: BaseException, rank: int | None, own: Kind) -> Failure:
    """See `failure_of`; an error of Ray's own is of the kind `own`."""
    if isinstance(error, WorkerHealthCheckFailedError):
        error = error.health_check_failure
    if isinstance(error, ray.exceptions.RayTaskError):
        error = error.cause
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return Failure("out_of_memory", NODE_OUT_OF_MEMORY)
    if isinstance(error, ray.exceptions.RayError | RayTrainError):
        return Failure(own, next(iter(str(error).strip().splitlines()), type(error).__name__), type(error).__name__, rank)
    return failure_of(error, rank)


def start_logging(stage: StageDir, group: Group) -> None:
    """Rank 0's plain lines go to the stage's log file; warnings of every rank too."""
    logger = logging.getLogger("raydistill")
    logger.setLevel(logging.INFO if group.is_main else logging.WARNING)
    stage.log.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(stage.log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    for before in logger.handlers:  # of an earlier stage in this process
        before.close()
    logger.handlers = [handler]
    logger.propagate = False


class Reporter:
    """The loop's `report`: a durable line, gauges, and Ray Train's own report at epochs."""

    def __init__(self, config: TrainConfig, stage: StageDir, group: Group):
        self._config, self._group = config, group
        self._file = MetricsFile(stage.metrics, config.stage) if group.is_main else None
        self._epochs = None if config.report_each_epoch else EpochReports(group)
        self._gauges: dict[str, Gauge] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Reporter:
        if self._file:
            tags = {"stage": self._config.stage, **self._config.labels}
            for name, text in GAUGES.items():
                gauge = Gauge(name, description=text, tag_keys=tuple(tags))
                gauge.set_default_tags(tags)
                self._gauges[name] = gauge
            self._open.enter_context(self._file)
        if self._epochs:
            self._open.enter_context(self._epochs)
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def report(self, kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None:
        """See `build.Report`; every rank calls it for the kind `epoch`.

        Raises:
            Exception: an earlier line could not be written, or an earlier report did not reach Ray, and why.
        """
        if self._file:
            self._file.add(kind, step, epoch, metrics)
            for name, gauge in _GAUGE_OF.items():
                if name in metrics:
                    self._gauges[gauge].set(metrics[name])
        if kind != "epoch":
            return
        numbers = {"epoch": epoch, "step": step, **final_names(metrics)}
        if self._epochs:
            self._epochs.put(numbers)
        else:
            ray.train.report(numbers)

    def flush(self) -> None:
        """See `MetricsFile.flush`; on every rank, of which one has records."""
        if self._file:
            self._file.flush()


class EpochReports:
    """Epochs on their way to Ray Train. Its report waits for all ranks and for the controller's next poll: a thread does so.

    An epoch that ends while an earlier one's report is still under way waits for no one: the next one takes its place. The
    last one always arrives: leaving the context waits for it, unless an error ends the job.
    """

    def __init__(self, group: Group):
        self._group = group
        self._reports: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._report, name="epoch reports", daemon=True)
        self._latest: dict[str, Any] | None = None
        """An epoch that has not been reported, nor will be if another one comes."""
        self._failure: BaseException | None = None

    def __enter__(self) -> EpochReports:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # other ranks may never get to the report that this one's thread is in
            return
        if self._latest is not None:
            self._reports.put(self._latest)
        self._reports.put(None)
        self._thread.join()
        self._check()

    def put(self, metrics: dict[str, Any]) -> None:
        """Report an epoch; every rank calls it."""
        self._check()
        # All ranks report the same epochs, or none would get past the first one that another leaves out.
        if not all(gather_objects(self._idle.is_set(), self._group)):
            self._latest = metrics
            return
        self._latest = None
        self._idle.clear()
        self._reports.put(metrics)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _report(self) -> None:
        while (metrics := self._reports.get()) is not None:
            try:
                ray.train.report(metrics)
            except BaseException as error:  # of any kind: the training thread raises it
                self._failure = error
            self._idle.set()


class NodeTelemetry:
    """One sampler a node (in its first worker); `snapshot` gathers all nodes' numbers, so every rank has to call it."""

    def __init__(self, config: TrainConfig, group: Group):
        self._group = group
        self._sampler = Telemetry(config.train.telemetry_every_s) if group.local_rank == 0 else None

    def __enter__(self) -> NodeTelemetry:
        if self._sampler:
            self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._sampler:
            self._sampler.stop()

    def snapshot(self, whole: bool = False) -> dict[str, float]:
        """`node0/cpu_pct`, `node1/gpu0/util_pct`, …: nodes numbered in the order of their first rank."""
        mine = self._sampler.snapshot(whole) if self._sampler else None
        nodes = [part for part in gather_objects(mine, self._group) if part is not None]
        return {f"node{number}/{name}": value for number, part in enumerate(nodes) for name, value in part.items()}
