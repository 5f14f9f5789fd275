"""The functions that Ray Train runs in every worker: train a stage, several timing runs, fill a cache,
compute class means, evaluate."""

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.util.placement_group import placement_group

from trainables.config import EvaluateConfig, FillConfig, TrainConfig
from trainables.device.memory import release_device
from trainables.device.numa import run_near
from trainables.device.precision import set_matmul_precision, with_precision
from trainables.disk_writer import DiskWriter
from trainables.distributed.group import Group, gather_objects
from trainables.distributed.pipeline.layout import build_layout
from trainables.engine.class_means import write_class_means
from trainables.engine.evaluate import evaluate_checkpoint
from trainables.engine.features import embed_checkpoint, probe_checkpoint
from trainables.engine.job import Job
from trainables.engine.job_parts import open_loaders
from trainables.engine.modules import build_cached_teacher
from trainables.engine.train import build, run_job
from trainables.metrics.heartbeat import Heartbeat, watched
from trainables.metrics.metrics_file import Report
from trainables.object_store.run_copy import RunCopy
from trainables.object_store.stage_copy import fetch_inputs, stored_stage
from trainables.object_store.store import is_uri, object_at
from trainables.redact import redact_record
from trainables.rundir import StageDir, append_line, write_json
from trainables.stage_result import StageResult, write_stage_result
from trainables.teachers.cache.fill import fill, sequential
from trainables.worker.actor_connection import ActorConnection
from trainables.worker.interruption_requests import InterruptionRequests
from trainables.worker.node_telemetry import node_telemetry
from trainables.worker.process_group import current_group
from trainables.worker.ray_failures import failure_recorded
from trainables.worker.reporter import Reporter
from trainables.worker.reservation import worker_resources

log = logging.getLogger("raydistill")


def train_loop_per_worker(settings: dict[str, Any]) -> None:
    """Train one stage. `settings` is a `TrainConfig` as plain data. Raises DistillError: see `train_stage`."""
    fetch_inputs(settings)
    train_stage(TrainConfig.model_validate(settings), current_group())


def timing_loop_per_worker(settings: dict[str, Any]) -> None:
    """Carry out timing runs as long as the coordinator has another: `settings` has the first `config`, and the `reused` workers.

    Raises DistillError: see `train_stage`; the results of the stages before stay.
    """
    group, workers = current_group(), settings["reused"]

    def stop_early(steps_s: Sequence[float]) -> bool:
        return bool(ray.get(workers.coordinator.should_stop.remote(workers.group_id, list(steps_s))))

    config = settings["config"]
    while config is not None:
        fetch_inputs(config)
        result = train_stage(TrainConfig.model_validate(config), group, stop_early)
        chosen = ray.get(workers.coordinator.next_config.remote(workers.group_id, result)) if group.is_main else None
        config = gather_objects(chosen, group)[0]


def train_stage(config: TrainConfig, group: Group, stop_early: Callable[[Sequence[float]], bool] | None = None) -> StageResult:
    """Train one stage; returns what rank 0 writes to the stage's `stage.json`. `stop_early`: see `Job`.

    Raises DistillError: also written, as one line, to this rank's file in the stage's `errors/`, where the driver reads it.
    """
    stage = StageDir(Path(config.output_dir))
    with (
        stored(config, group) as publish,
        failure_recorded(stage, group, publish),
        watched(config.output_dir) as heartbeat,
    ):
        start_logging(stage, group)
        set_up_torch(config, group)
        job, summary = _train(config, group, stage, heartbeat, stop_early, publish)
        dist.barrier()  # the stage is complete once every rank has finished
        result = StageResult(
            stage=config.stage,
            model=config.model,
            decoder=job.train_loader.decoder,
            precision=job.config.precision,
            precision_reason=job.config.precision_reason,
            metrics=summary,
            steps_s=job.metrics.timer.past_warmup.steps_s() if config.train.max_steps is not None else [],
            teachers=[each for each in job.teachers if each is not None],
        )
        if group.is_main:
            write_stage_result(stage, result)
            publish(stage.result)
        return result


def stored(config: TrainConfig, group: Group) -> contextlib.AbstractContextManager[Callable[[Path], None]]:
    """Around a stage: where its run is in an object store, see `stored_stage`."""
    if config.run_store is None:
        return contextlib.nullcontext(lambda path: None)
    copy = RunCopy(config.run_store.uri, Path(config.run_store.folder))
    barrier = partial(gather_objects, None, group)
    return stored_stage(copy, Path(config.output_dir), is_main=group.is_main, barrier=barrier)


def _train(
    config: TrainConfig,
    group: Group,
    stage: StageDir,
    heartbeat: Heartbeat,
    stop_early: Callable[[Sequence[float]], bool] | None,
    publish: Callable[[Path], None],
) -> tuple[Job, dict[str, float]]:
    """Build the job, train it to its end, and close it. Returns the closed job and its summary."""
    began_s = time.time()
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(DiskWriter())
        reporter = Reporter(config, stage, group, disk, publish)
        telemetry = stack.enter_context(node_telemetry(config.train.telemetry_every_s, group))
        job = build(
            config,
            group,
            reporter.report,
            telemetry,
            stop_early=stop_early,
            connections=[ActorConnection(name) for name in config.teacher_actors],
            disk=disk,
            heartbeat=heartbeat,
            interruption_request=interruption_requests(config, group),
            publish=publish,
        )
        stack.callback(job.close)
        if group.is_main:
            log.info(
                "%s: %s on %d x %s, ready after %.1f s; JPEG by %s, %.1f MiB of batches a worker",
                config.stage,
                config.model,
                group.world_size,
                group.device.type,
                time.time() - began_s,
                job.train_loader.decoder,
                job.train_loader.batches_mib,
            )
        # Written before the loaders are closed, which may wait for a disk.
        stack.enter_context(failure_recorded(stage, group, publish))
        return job, run_job(job)


def interruption_requests(config: TrainConfig, group: Group) -> InterruptionRequests:
    """Those of this rank; rank 0 reserves what more workers would need."""
    if config.next_num_workers is None or not group.is_main:
        return InterruptionRequests()
    assert isinstance(config.data.loader_workers, int)
    bundle = worker_resources(config.scale, config.data.loader_workers, use_gpu=group.device.type == "cuda")
    bundles = [bundle] * (config.next_num_workers - group.world_size)
    # Ray reserves it once there is room; until then an autoscaler sees the demand. It lasts until the driver ends or releases it.
    return InterruptionRequests(placement_group(bundles, name=ray.train.get_context().get_experiment_name()))


def set_up_torch(config: TrainConfig, group: Group) -> None:
    """CPUs, caches and memory statistics of this process, as if no stage had run in it before."""
    set_up_cpus(config, group)
    set_matmul_precision()
    # Few shapes come, again and again: the fastest convolution of each is worth a search, whose winner differs from run to run.
    torch.backends.cudnn.benchmark = not config.train.deterministic
    torch.use_deterministic_algorithms(config.train.deterministic)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses; its first call reads it
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a write of all memory
    if config.train.compile:  # an earlier stage's kernels were compiled for other shapes, and would be used here too
        torch.compiler.reset()
    release_device(group.device)  # an earlier stage's peak is not this one's, nor are its batches and decoders


def set_up_cpus(config: TrainConfig | EvaluateConfig, group: Group) -> None:
    """Near a GPU, as many CPUs as this worker reserves; and torch's threads."""
    assert isinstance(config.data.loader_workers, int)
    run_near(group.device, config.scale.cpus_per_worker + config.data.loader_workers)
    torch.set_num_threads(config.scale.cpus_per_worker)


def fill_loop_per_worker(settings: dict[str, Any]) -> None:
    """Fill a teacher's cache; rank 0 writes the numbers to the stage's `stage.json`. `settings` is a `FillConfig` as plain data.

    Raises DistillError: also written to this rank's file in the stage's `errors/`.
    """
    config, group = sequential(FillConfig.model_validate(settings)), current_group()
    stage = StageDir(Path(config.output_dir))
    with failure_recorded(stage, group), watched(config.output_dir) as heartbeat:
        start_logging(stage, group)
        set_up_torch(config, group)
        config = with_precision(config, group)
        with DiskWriter() as disk:
            reporter = Reporter(config, stage, group, disk)
            classes, (loader, val_loader) = open_loaders(config, build_layout(group, 1))
            with contextlib.closing(loader), contextlib.closing(val_loader):
                teacher = build_cached_teacher(config, group, classes, loader)
                metrics = fill(config, group, teacher, (loader, val_loader), reporter.report, heartbeat)
        if group.is_main:
            result = StageResult(
                stage=config.stage,
                model=config.model,
                precision=config.precision,
                precision_reason=config.precision_reason,
                metrics=metrics,
            )
            write_stage_result(stage, result)


def class_means_loop_per_worker(settings: dict[str, Any]) -> None:
    """Write a teacher with its class means, see `write_class_means`. `settings` is a `TrainConfig` as plain data.

    Raises DistillError: also written to this rank's file in the stage's `errors/`.
    """
    fetch_inputs(settings)
    config, group = TrainConfig.model_validate(settings), current_group()
    stage = StageDir(Path(config.output_dir))
    with (
        stored(config, group) as publish,
        failure_recorded(stage, group, publish),
        watched(config.output_dir) as heartbeat,
    ):
        start_logging(stage, group)
        set_up_torch(config, group)
        config = with_precision(config, group)
        path, metrics = write_class_means(config, group, heartbeat)
        if group.is_main:
            publish(path)
            assert config.finetuned is not None
            own = config.finetuned.precision
            result = StageResult(
                stage=config.stage,
                model=config.model,
                precision=own or config.precision,
                precision_reason=config.precision_reason if own in (None, config.precision) else "",
                metrics=metrics,
            )
            write_stage_result(stage, result)
            publish(stage.result)


def evaluate_loop_per_worker(settings: dict[str, Any]) -> None:
    """Evaluate a checkpoint, or write its features; rank 0 writes the result to `output`.

    `settings` is an `EvaluateConfig` as plain data. Raises DistillError.
    """
    fetch_inputs(settings)
    config, group = EvaluateConfig.model_validate(settings), current_group()
    set_up_cpus(config, group)
    set_matmul_precision()
    with watched() as heartbeat:
        if config.measure == "accuracy":
            result = evaluate_checkpoint(config, group, heartbeat)
        else:
            of_features = embed_checkpoint if config.measure == "embed" else probe_checkpoint
            result = of_features(config, group, heartbeat, progress(config, group))
    if group.is_main and is_uri(config.output):
        store, name = object_at(config.output)
        store.put(name, json.dumps(result).encode())
    elif group.is_main:
        write_json(Path(config.output), result)


def progress(config: EvaluateConfig, group: Group) -> Report:
    """A `report` of how many images are done to where the driver's display looks, once a second; in an object store nowhere."""
    if is_uri(config.output) or not group.is_main:
        return lambda kind, step, epoch, metrics: None
    file, last_s = StageDir(Path(config.output).with_suffix("")).metrics, 0.0

    def report(kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None:
        nonlocal last_s
        if kind == "start" or time.monotonic() > last_s + 1:
            append_line(file, {"kind": kind, "step": step, "metrics": metrics})
            last_s = time.monotonic()

    return report


def start_logging(stage: StageDir, group: Group) -> None:
    """Send rank 0's log lines, and warnings of every rank, to the stage's log file."""
    log.setLevel(logging.INFO if group.is_main else logging.WARNING)
    stage.log.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(stage.log, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    for earlier in log.handlers:  # of an earlier stage in this process
        earlier.close()
    log.handlers = [handler]
    log.addFilter(redact_record)
    log.propagate = False
