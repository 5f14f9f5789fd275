"""The functions that Ray Train runs in every worker: train a stage, measure several points, fill a cache,
compute class means, or evaluate."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch.distributed as dist
from ray.util.placement_group import placement_group

from trainables.config import EvaluateConfig, FillConfig, TrainConfig
from trainables.device.precision import set_matmul_precision, with_precision
from trainables.disk_writer import DiskWriter
from trainables.distributed.group import Group, gather_objects
from trainables.distributed.pipeline.layout import build_layout
from trainables.engine.checkpoint_writer import Publish
from trainables.engine.class_means import write_class_means
from trainables.engine.evaluate import evaluate_checkpoint
from trainables.engine.features import embed_checkpoint, probe_checkpoint, written_to
from trainables.engine.job_parts import open_loaders
from trainables.engine.modules import build_cached_teachers
from trainables.engine.train import build, run_job
from trainables.metrics.heartbeat import Heartbeat, watched
from trainables.metrics.report import Report
from trainables.object_store.checkpoints import StageCheckpoints, fetch_inputs
from trainables.redact import redact_record
from trainables.rundir import StageDir, write_json
from trainables.stage_result import StageResult
from trainables.teachers.cache.fill import fill, sequential
from trainables.worker.actor_connection import ActorConnection
from trainables.worker.evaluation_actor import RemoteEvaluator
from trainables.worker.interruption_requests import InterruptionRequests
from trainables.worker.node_telemetry import node_telemetry
from trainables.worker.process_group import current_group
from trainables.worker.ray_failures import failures_typed
from trainables.worker.recorder import RunRecorder
from trainables.worker.reporter import Reporter
from trainables.worker.reservation import worker_resources
from trainables.worker.torch_settings import set_up_cpus, set_up_torch

log = logging.getLogger("raydistill")


def train_loop_per_worker(settings: dict[str, Any]) -> None:
    """Train one stage. `settings["config"]` is a `TrainConfig` as plain data. Raises EndedError: see `stage_of`."""
    fetch_inputs(settings["config"])
    train_stage(TrainConfig.model_validate(settings["config"]), current_group(), settings["recorder"])


def points_loop_per_worker(settings: dict[str, Any]) -> None:
    """Measure points until the coordinator has no more. `settings` has the first `config` and the `reused` workers.

    Raises EndedError: see `stage_of`; earlier results are kept.
    """
    group, workers, config = current_group(), settings["reused"], settings["config"]

    def should_stop(steps_s: Sequence[float]) -> bool:
        return bool(ray.get(workers.coordinator.should_stop.remote(workers.group_id, list(steps_s))))

    stop_early = should_stop if workers.stops_early else None
    while config is not None:
        fetch_inputs(config)
        result = train_stage(TrainConfig.model_validate(config), group, settings["recorder"], stop_early)
        next_config = ray.get(workers.coordinator.next_config.remote(workers.group_id, result)) if group.is_main else None
        config = gather_objects(next_config, group)[0]


@contextlib.contextmanager
def stage_of(config: TrainConfig, group: Group, recorder: RunRecorder) -> Iterator[tuple[Heartbeat, DiskWriter, Reporter]]:
    """A context for a stage on this rank: its log, torch's settings, its heartbeat, and its records, which a disk writer sends.

    Raises EndedError in place of any exception, with its failure.
    """
    with failures_typed(group.rank), watched(config.output_dir) as heartbeat, DiskWriter() as disk:
        start_logging(config, group, recorder)
        set_up_torch(config, group)
        yield heartbeat, disk, Reporter(config, recorder, group, disk)


def train_stage(
    config: TrainConfig,
    group: Group,
    recorder: RunRecorder,
    stop_early: Callable[[Sequence[float]], bool] | None = None,
) -> StageResult:
    """Train one stage and return the summary that rank 0 records. See `Job` for `stop_early`.

    Raises EndedError in place of any exception, with its failure.
    """
    with stage_of(config, group, recorder) as (heartbeat, disk, reporter):
        publish, began_s = publisher(config, reporter), time.time()
        with contextlib.ExitStack() as stack:
            telemetry = stack.enter_context(node_telemetry(config.train.telemetry_every_s, group))
            evaluator = None
            if config.eval.asynchronous and group.is_main:
                evaluator = RemoteEvaluator(resources_of(config, group), heartbeat.beat)
                stack.callback(evaluator.close)
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
                check=partial(recorder.check_attempt, Path(config.output_dir)),
                evaluator=evaluator,
            )
            stack.callback(job.close)
            if group.is_main:
                found = [path.name for path in (job.stage.last, job.stage.best) if path.exists()]
                # A kill between writing and recording a checkpoint leaves it out of the log.
                if found and config.run_store is None:
                    disk.put(partial(reporter.saved, found, job.progress.step, float(job.progress.epoch)))
                log.info(
                    "%s: %s on %d x %s, ready after %.1f s; JPEG decoder %s, %.1f MiB of batches per worker",
                    config.stage,
                    config.model,
                    group.world_size,
                    group.device.type,
                    time.time() - began_s,
                    job.train_loader.decoder,
                    job.train_loader.batches_mib,
                )
            stack.enter_context(failures_typed(group.rank))  # type an out-of-memory error before closing frees the memory
            summary = run_job(job)
        dist.barrier()  # the stage is complete once every rank has finished
        return reporter.complete(
            job.config,
            summary,
            decoder=job.train_loader.decoder,
            steps_s=job.metrics.timer.past_warmup.steps_s() if config.train.max_steps is not None else [],
            teachers=[each for each in job.teachers if each is not None],
        )


def publisher(config: TrainConfig, reporter: Reporter) -> Publish:
    """Return the function that records written checkpoints. For a run in an object store it also uploads them, and the rank's
    folder is first set to the store's newest checkpoint.

    Raises StorageError: the store did not answer within the retry limit.
    """
    if config.run_store is None:
        return lambda paths, step, epoch: reporter.saved([path.name for path in paths], step, epoch)
    checkpoints = StageCheckpoints(config.run_store, Path(config.output_dir))
    checkpoints.begin()

    def publish(paths: Sequence[Path], step: int, epoch: float) -> None:
        reporter.saved(checkpoints.put(paths, step), step, epoch)
        checkpoints.remove_replaced()

    return publish


def interruption_requests(config: TrainConfig, group: Group) -> InterruptionRequests:
    """Return this rank's interruption requests; rank 0 reserves the resources that more workers would need."""
    if config.next_num_workers is None or not group.is_main:
        return InterruptionRequests()
    bundles = [resources_of(config, group)] * (config.next_num_workers - group.world_size)
    # Ray reserves them once there is room; until then an autoscaler sees the demand. The driver releases them.
    return InterruptionRequests(placement_group(bundles, name=ray.train.get_context().get_experiment_name()))


def resources_of(config: TrainConfig, group: Group) -> dict[str, float]:
    """Return what each of the job's workers reserves."""
    assert isinstance(config.data.loader_workers, int)
    return worker_resources(config.scale, config.data.loader_workers, use_gpu=group.device.type == "cuda")


def fill_loop_per_worker(settings: dict[str, Any]) -> None:
    """Fill a teacher's cache; rank 0 records the metrics as the stage's summary. `settings["config"]` is a `FillConfig` as plain
    data. Raises EndedError: see `stage_of`."""
    config, group = sequential(FillConfig.model_validate(settings["config"])), current_group()
    with stage_of(config, group, settings["recorder"]) as (heartbeat, _, reporter):
        config = with_precision(config, group)
        classes, (loader, val_loader) = open_loaders(config, build_layout(group, 1))
        with contextlib.closing(loader), contextlib.closing(val_loader):
            teachers = build_cached_teachers(config, group, classes, loader)
            metrics = fill(config, group, teachers, (loader, val_loader), reporter.report, heartbeat)
        reporter.complete(config, metrics)


def class_means_loop_per_worker(settings: dict[str, Any]) -> None:
    """Write a teacher with its class means, see `write_class_means`. `settings["config"]` is a `TrainConfig` as plain data.

    Raises EndedError: see `stage_of`.
    """
    fetch_inputs(settings["config"])
    config, group = TrainConfig.model_validate(settings["config"]), current_group()
    with stage_of(config, group, settings["recorder"]) as (heartbeat, _, reporter):
        config = with_precision(config, group)
        publish = publisher(config, reporter)
        path, metrics = write_class_means(config, group, heartbeat)
        if group.is_main:
            publish([path], 0, 0.0)
        assert config.finetuned is not None
        own = config.finetuned.precision
        if own not in (None, config.precision):
            config = config.model_copy(update={"precision": own, "precision_reason": ""})
        reporter.complete(config, metrics)


def evaluate_loop_per_worker(settings: dict[str, Any]) -> None:
    """Evaluate a checkpoint or write its features; rank 0 writes the result to `config.output`.

    `settings["config"]` is an `EvaluateConfig` as plain data. Raises DistillError.
    """
    fetch_inputs(settings["config"])
    config, group = EvaluateConfig.model_validate(settings["config"]), current_group()
    set_up_cpus(config, group)
    set_matmul_precision()
    with watched() as heartbeat:
        if config.measure == "accuracy":
            result = evaluate_checkpoint(config, group, heartbeat)
        else:
            measure = embed_checkpoint if config.measure == "embed" else probe_checkpoint
            result = measure(config, group, heartbeat, progress(config, group, settings["recorder"]))
    if group.is_main:
        with written_to(config.output) as path:
            write_json(path, result)


def progress(config: EvaluateConfig, group: Group, recorder: RunRecorder) -> Report:
    """Return a `report` that sends the number of finished images to the driver's display, once a second."""
    stage, last_s = Path(recorder.root, "images"), 0.0

    def report(kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None:
        nonlocal last_s
        if group.is_main and kind == "start":  # of a split, which counts its steps from 0
            recorder.send("discarded", stage)
        if group.is_main and (kind == "start" or time.monotonic() > last_s + 1):
            recorder.send(kind, stage, step=step, epoch=epoch, metrics=metrics)
            last_s = time.monotonic()

    return report


class RecorderHandler(logging.Handler):
    """Sends log lines to the stage's `logs/train.log`."""

    def __init__(self, recorder: RunRecorder, path: Path) -> None:
        super().__init__()
        self._recorder, self._path = recorder, path

    def emit(self, record: logging.LogRecord) -> None:
        self._recorder.text(self._path, f"{self.format(record)}\n")


def start_logging(config: TrainConfig, group: Group, recorder: RunRecorder) -> None:
    """Send rank 0's log lines and every rank's warnings to the stage's log file."""
    log.setLevel(logging.INFO if group.is_main else logging.WARNING)
    handler = RecorderHandler(recorder, StageDir(Path(config.output_dir)).log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.handlers = [handler]
    log.addFilter(redact_record)
    log.propagate = False
