"""Run one training job on one rank: build it, train epoch by epoch, evaluate, save checkpoints, and report.

This module knows neither Ray nor MLflow: `report` is a plain callable. `job_parts` builds the parts of a `Job`.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from trainables.config import TrainConfig
from trainables.device.augment import build_train_inputs
from trainables.device.compilation import Compilation
from trainables.device.device_batches import DeviceBatch, on_device
from trainables.device.precision import with_precision
from trainables.device.tensor_format import autocast, pixels_of
from trainables.disk_writer import DiskWriter
from trainables.distributed.batch_norm import accepts_empty_batches
from trainables.distributed.gather import cpu_process_group
from trainables.distributed.group import GlobalCount, Group, broadcast_buffers, broadcast_result, gather_objects, seed_rank
from trainables.distributed.pipeline.layout import Layout, build_layout
from trainables.engine import checkpoint
from trainables.engine.backbone_evaluation import BackboneEvaluation, open_labeled
from trainables.engine.calibrate import calibrate
from trainables.engine.checkpoint import CheckpointState
from trainables.engine.checkpoint_writer import CheckpointWriter, Publish
from trainables.engine.checks import check_finite, check_skipped
from trainables.engine.evaluate import evaluate, evaluate_averaged, logits_of
from trainables.engine.interruptions import Decision, InterruptionRequest, Interruptions
from trainables.engine.job import Evaluator, Job, Logits, Snapshot, TrainStep
from trainables.engine.job_metrics import JobMetrics, build_metrics
from trainables.engine.job_parts import Models, build_checkpoint_state, build_models, open_loaders, restore
from trainables.engine.log_lines import log_step, write_log_line
from trainables.engine.loss_optimizers import LossOptimizer, build_optimizers, init_optimizer
from trainables.engine.losses import TaskLoss, num_labeled
from trainables.engine.modules import selected_methods
from trainables.engine.omitted_part import RepeatedTeacher, repeat_first
from trainables.engine.optim import clipping
from trainables.engine.passes import Epochs, TrainState, micro_batches, run_student, run_teacher, sum_names
from trainables.engine.pipeline.build import with_saved_cut
from trainables.engine.records import (
    epoch_numbers,
    epoch_seconds,
    log_epoch,
    log_why_no_noise_scale,
    means,
    start_numbers,
    summarize,
    teacher_images,
)
from trainables.engine.step_sums import StepSums
from trainables.engine.teacher_accuracy import measure_teachers
from trainables.engine.updates import ParameterUpdate, UpdateSettings, build_update
from trainables.errors import DataError, ExperimentError, Interruption, StageInterruptedError
from trainables.methods.init_stage import longest_init_stage
from trainables.metrics.heartbeat import Heartbeat
from trainables.metrics.phase_timer import PhaseTimer
from trainables.metrics.report import Report
from trainables.models.pixels import train_at
from trainables.rules import RULES, first_problem
from trainables.rundir import StageDir
from trainables.teachers.service.protocol import TeacherConnection

log = logging.getLogger("raydistill")


def build(
    config: TrainConfig,
    group: Group,
    report: Report,
    telemetry: Snapshot,
    *,
    stop_early: Callable[[Sequence[float]], bool] | None = None,
    connections: Sequence[TeacherConnection] = (),
    disk: DiskWriter | None = None,
    heartbeat: Heartbeat | None = None,
    interruption_request: InterruptionRequest = lambda: None,
    publish: Publish = lambda paths, step, epoch: None,
    check: Callable[[], None] = lambda: None,
    evaluator: Evaluator | None = None,
) -> Job:
    """Open the data, build and wrap the models, and resume from the stage's last checkpoint if it has one.

    `connections`: to the actors of `teacher.service`; `disk`: the one that `report` puts its records into, if any;
    `heartbeat`: says from now on where the job is; `interruption_request`: see `Interruptions`;
    `publish`, `check`: see `CheckpointWriter`; `evaluator`: on rank 0, with `eval.asynchronous`.

    Raises:
        DataError: the data cannot be read.
        ModelError: a model does not exist, or does not fit the images, the classes or the device's memory.
        CheckpointError: a checkpoint or weights file is damaged or belongs to something else.
        ExperimentError: some keys or methods do not work together.
    """
    if problem := first_problem(config, RULES):
        raise ExperimentError(problem)
    disk = disk or DiskWriter()
    config = with_precision(config, group)
    stage = StageDir(Path(config.output_dir))
    # Rank 0 decides for all ranks: a shared file system may show a new file to some nodes later than to others.
    resumes = gather_objects(stage.last.exists(), group)[0]
    if resumes and config.scale.pipeline_stages != 1:
        config = broadcast_result(lambda: with_saved_cut(config, stage.last), group)
    layout = build_layout(group, config.scale.pipeline_stages)
    with contextlib.ExitStack() as resources:  # closed here if the build fails
        resources.callback(disk.close)
        classes, (train_loader, val_loader) = open_loaders(config, layout)
        resources.callback(val_loader.close)
        resources.callback(train_loader.close)
        models = build_models(config, layout, classes, train_loader, connections)
        config = models.config
        resources.callback(models.teacher.close)
        backbone_evaluation = None
        if models.embedding is not None:
            methods = models.module.methods_by_name.values()
            if config.eval.best == "cosine" and not any(method.projects_embedding for method in methods):
                raise ExperimentError("eval.best: cosine needs embed or queue, which project the student's embedding: write cka")
            labeled = open_labeled(config, layout.replicas)
            for loader in labeled:
                resources.callback(loader.close)
            backbone_evaluation = BackboneEvaluation(config, models.embedding, labeled)
            if config.train.max_steps is None and not config.init_stage:  # fail now if the disk cannot hold the outputs
                models.teacher.for_validation(val_loader)
        optimizers: tuple[LossOptimizer, ...]
        if config.init_stage:
            optimizers = (init_optimizer(models.module, config.optim),)
        else:
            optimizers = build_optimizers(models.module.student, models.module.methods_by_name, config.optim)
        state = build_checkpoint_state(models, optimizers, layout, classes, (train_loader, val_loader))
        seed_rank(config.seed, group.rank)
        if resumes:
            restore(state, config, stage, group, train_loader.steps_per_epoch)
        elif config.init_checkpoint is not None:
            checkpoint.load_init_stage(Path(config.init_checkpoint), state, group)
        epochs = Epochs(
            config.optim.epochs,
            train_loader.steps_per_epoch,
            order_offset=longest_init_stage(selected_methods(config)) if config.init_checkpoint is not None else 0,
            step_offset=state.progress.step_offset,
        )
        metrics = build_metrics(config, group, epochs, heartbeat or Heartbeat(), state)
        train_state, step, logits = build_steps(config, layout, models, optimizers, epochs, state, metrics)
        return Job(
            config=config,
            group=group,
            stage=stage,
            train_loader=train_loader,
            val_loader=val_loader,
            train_state=train_state,
            train_step=step,
            logits=logits,
            checkpoint_state=state,
            metrics=metrics,
            report=report,
            disk=disk,
            checkpoints=CheckpointWriter(disk, group.device, publish, check),
            telemetry=telemetry,
            backbone_evaluation=backbone_evaluation,
            interruptions=Interruptions(
                group,
                config.train.checkpoint_every_s,
                interruption_request,
                evaluated=evaluator.is_done if evaluator is not None else lambda: False,
            ),
            evaluator=evaluator,
            stop_early=stop_early,
            writes_log_late=group.device.type == "cuda",
            resources=resources.pop_all(),
        )


def build_steps(
    config: TrainConfig,
    layout: Layout,
    models: Models,
    optimizers: tuple[LossOptimizer, ...],
    epochs: Epochs,
    state: CheckpointState,
    metrics: JobMetrics,
) -> tuple[TrainState, TrainStep, Logits]:
    """Build the train state, the train step and the evaluation forward, for a whole model or for this rank's pipeline stage."""
    group, module, device = layout.replicas, models.module, layout.replicas.device
    settings = UpdateSettings(
        state.scaler,
        group,
        clipping(config.optim, module.student),
        compiled=bool(config.train.compile),
        sync_grads=config.omitted != "allreduce",
    )
    if layout.has_stages:
        from trainables.engine.pipeline import step as pipeline  # importing torch's pipelining takes a second and 150 MB

        update: ParameterUpdate = pipeline.PipelineUpdate(
            module, optimizers[0], settings, layout.pipeline, config.optim.clip_grad_norm
        )
    else:
        update = build_update(
            module,
            optimizers,
            settings,
            measures_noise=config.measures_noise and not config.omitted and (group.world_size > 1 or config.optim.accumulate > 1),
            allreduce_wait=metrics.allreduce_wait,
        )
    names = sum_names(module, mixes_unlabeled=config.data.mixes_unlabeled)
    train_state = TrainState(
        distillation_module=module,
        teacher=RepeatedTeacher(models.teacher) if config.omitted == "teacher" else models.teacher,
        optimizers=optimizers,
        update=update,
        group=group,
        prepare=build_train_inputs(config, device),
        autocast=autocast(config.precision, device),
        epochs=epochs,
        num_dummy_images=0 if accepts_empty_batches(module.student) else 2,
        accumulate=config.optim.accumulate,
        compilation=Compilation.of(config),
        average=state.average,
        task_loss=TaskLoss.of(config.train),
        cpu_group=cpu_process_group(group) if module.methods else None,
        mixes_unlabeled=config.data.mixes_unlabeled,
        sums=StepSums(gather_objects(names, layout.pipeline)[-1], device),
    )
    if layout.has_stages:
        return train_state, *pipeline.pipeline_functions(config, layout, train_state)
    logits = logits_of(module.student, pixels_of(config), train_state.autocast, train_state.compilation)
    return train_state, partial(train_step, train_state), logits


def run_job(job: Job) -> dict[str, float]:
    """Train to the configured end, starting where the checkpoint left off. Return the summary on every rank.

    Raises:
        TrainingError: a loss or a parameter is not finite, or replicas disagree.
        StageInterruptedError: some rank requested an interruption; raised on every rank once a checkpoint is saved.
        DataError, CheckpointError: images cannot be read, a checkpoint cannot be written.
    """
    config, progress = job.config, job.progress
    job.metrics.clock.begin()
    log_why_no_noise_scale(job)
    job.report("start", progress.step, progress.epoch, start_numbers(job))
    if progress.evaluation_pending:  # its evaluator has ended with the earlier processes
        report_evaluation(job, *evaluate_epoch(job))
    elif progress.epoch_record:  # the job may have died between an epoch's checkpoint and its record
        job.report("epoch", **progress.epoch_record)
    if config.train.max_steps is not None:
        return run_timing(job)
    job.teachers = measure_teachers(job)
    calibrate(job)
    while progress.epoch < job.epochs.num and not progress.reached and not out_of_time(job):
        if interruption := job.interruptions.exchange(progress.step).interruption:
            end_interrupted(job, interruption)  # the previous epoch ended with a checkpoint
        with job.metrics.clock.part("train"):
            train_epoch(job)
        finish_epoch(job)
    wait_for_disk(job)
    if job.group.is_main and job.stage.best.exists():
        with job.metrics.clock.part("checkpoint"):
            checkpoint.join_shards(job.stage.best)
    return summarize(job)


def run_timing(job: Job) -> dict[str, float]:
    """Warm up, then measure throughput and phase times over at most `max_steps` steps, without evaluation."""
    last_step = job.config.train.warmup_steps + (job.config.train.max_steps or 0)
    num_skipped, ended = 0, False
    while not ended:
        with job.metrics.clock.part("train"):
            ended = train_epoch(job, stop_at=last_step)
        num_skipped = max(num_skipped, len(check_skipped(job, job.train_loader, {})))
        job.progress.end_epoch()
    return summarize(job, num_skipped)


def train_epoch(job: Job, stop_at: int | None = None) -> bool:
    """Train the rest of the current epoch. Return True once a timing run is over: at step `stop_at`, or at an early stop."""
    config, train_state, loader, progress, metrics = job.config, job.train_state, job.train_loader, job.progress, job.metrics
    train_state.distillation_module.begin_epoch(progress.epoch)
    train_state.update.begin_epoch()
    size = config.train_image_size(progress.epoch)
    train_at(train_state.distillation_module.student, size)
    if size and job.group.is_main:
        log.info("%s: epoch %d trains at %d px", config.stage, progress.epoch + 1, size)
    order_epoch = job.epochs.order_offset + progress.epoch
    augmentation_epoch = loader.augmentation_epoch(order_epoch)
    epoch = loader.epoch(order_epoch, progress.position)
    if config.omitted == "loading":
        epoch = repeat_first(epoch)
    batches = train_state.teacher.prefetch(epoch, augmentation_epoch)
    metrics.throughput.begin(progress.step)
    metrics.start_step(progress.step)
    stops = False
    with contextlib.closing(on_device(batches, job.group.device, augmentation_epoch, loader.costs.add_copy)) as device_batches:
        for batch in device_batches:
            metrics.timer.mark(loader.wait_phase)
            job.disk.check()
            set_learning_rates(job)
            job.train_step(batch, progress.step, metrics.timer)
            metrics.stop_step()
            progress.step, progress.position = progress.step + 1, batch.position
            if progress.step == metrics.throughput.warmup_until:
                loader.costs.clear()
            step_in_epoch = -(-progress.position // config.data.global_batch_size)
            stops = progress.step == stop_at
            is_last = stops or step_in_epoch == job.epochs.steps_per_epoch
            due = Decision() if is_last or stop_at is not None else job.interruptions.after_step(progress.step)
            saves = due.saves or (stop_at is None and not is_last and step_in_epoch % config.train.checkpoint_every == 0)
            if progress.evaluation_pending:  # until it has ended, `last` is what it evaluates
                saves = due.evaluated
            at_interval = step_in_epoch % config.train.log_every == 0 or progress.step == config.train.warmup_steps
            if at_interval or due.logs or saves or is_last:
                log_step(job, step_in_epoch)
                job.interruptions.logged()
                stops = stops or stops_early(job)
            if due.evaluated:
                take_evaluation(job)
            if saves:
                save_inside_epoch(job)
            if due.interruption is not None:
                end_interrupted(job, due.interruption)
            if is_last or stops:
                break
            metrics.start_step(progress.step)
    write_log_line(job)
    return stops


def set_learning_rates(job: Job) -> None:
    """Set the learning rates for the next step."""
    for each in job.train_state.optimizers:
        each.set_learning_rate(
            job.progress.step - job.epochs.step_offset,
            steps_per_epoch=job.epochs.steps_per_epoch,
            global_batch_size=job.config.data.global_batch_size,
        )


def train_step(train_state: TrainState, batch: DeviceBatch, step: int, timer: PhaseTimer) -> None:
    """Run forward, loss, backward and update, and add to `train_state.sums`. Nothing here waits for the GPU.

    Without a teacher this trains on labels alone. Pipeline stages use `pipeline_step` instead.
    """
    batch.wait()
    timer.mark("h2d")
    prepared = train_state.prepare(batch)
    timer.mark("augment")
    update, group, accumulate = train_state.update, train_state.group, train_state.accumulate
    num_images, epochs_passed = len(batch.labels_B), train_state.epochs.passed(step)
    labeled = num_labeled(prepared.labels_B, prepared.mix) if train_state.mixes_unlabeled else None
    count = GlobalCount(num_images, group, accumulate=accumulate, num_samples=batch.num_samples, num_labeled=labeled)
    parts = micro_batches(prepared, accumulate, train_state.num_dummy_images)
    train_state.compilation.begin_step()
    train_state.teacher.skip(parts[0].images_BCHW, accumulate - len(parts))
    for part in parts:
        timer.begin_micro_batch()
        compiled = train_state.compilation.batch(len(part.images_BCHW), eager=update.requires_eager_forward)
        with compiled, update.micro_batch(last=part is parts[-1]):
            teacher_outputs = run_teacher(train_state, part)
            timer.mark("teacher")
            outputs, losses = run_student(train_state, part.images_BCHW, part, teacher_outputs, epochs_passed)
            timer.mark("student")
            update.wait(count)
            if (scale := count.task_scale) is not None:
                losses = losses.with_task_scale(scale)
            train_state.sums.add(step, outputs.logits_BK, part.labels_B, losses.named)
            update.backward(losses, count, len(part.labels_B))
        if part is not parts[-1]:
            timer.mark("backward")
    update.end_backward(count)
    timer.mark("backward")  # includes the part of the all-reduce that did not overlap
    update.step()
    if train_state.average is not None:
        train_state.average.update(step)
    timer.mark("optimizer")


def stops_early(job: Job) -> bool:
    """Return whether a timing run may end early; rank 0 decides for all. The time this takes is not counted in any step."""
    if job.stop_early is None:
        return False
    with job.metrics.clock.part("other"):
        write_log_line(job)
        steps_s = job.metrics.timer.past_warmup.steps_s()
        stops = gather_objects(job.group.is_main and job.stop_early(steps_s), job.group)[0]
    job.metrics.throughput.begin(job.progress.step)
    return bool(stops)


def save_inside_epoch(job: Job) -> None:
    """Save a checkpoint in mid-epoch, after a log step. Training continues with the same loader."""
    progress = job.progress
    with job.metrics.clock.part("checkpoint"):
        write_log_line(job)  # the checkpoint includes its sums
        check_finite(job)
        progress.skipped = check_skipped(job, job.train_loader, progress.skipped)
        save(job, [job.stage.last])
    job.metrics.throughput.begin(progress.step)


def save(job: Job, paths: Sequence[Path]) -> None:
    """Save the current state to each of `paths`, see `CheckpointWriter.save`."""
    job.checkpoint_state.metrics = job.metrics.state()
    keep_as = job.stage.best if job.last_is_best and job.stage.best not in paths else None
    job.checkpoints.save(paths, job.checkpoint_state, job.group, keep_as=keep_as)
    job.last_is_best = False
    job.interruptions.saved()
    if job.progress.evaluation_pending and job.evaluator is not None:
        job.disk.put(partial(job.evaluator.begin, job.config, job.stage.last, job.progress.step))


def finish_epoch(job: Job) -> None:
    """Check, evaluate if due, save the last and best checkpoints, then report: an epoch's record follows its checkpoint.

    If the evaluator evaluates the checkpoint, `take_evaluation` reports the epoch later.
    """
    check_finite(job)
    progress = job.progress
    if progress.evaluation_pending:
        take_evaluation(job)
    trained, num_skipped = end_training(job)
    telemetry = job.telemetry()  # taken before the evaluation, whose load is different
    val, eval_s, best, is_due = dict[str, float](), None, False, is_evaluated(job)
    seconds = epoch_seconds(job)
    progress.record_epoch(*epoch_numbers(job, trained=trained, telemetry=telemetry, num_skipped=num_skipped, seconds=seconds))
    progress.evaluation_pending = is_due and hands_over(job)
    if is_due and not progress.evaluation_pending:
        val, eval_s = evaluate_epoch(job)
        best = add_evaluation(job, val)
    with job.metrics.clock.part("checkpoint"):
        save(job, [job.stage.best, job.stage.last] if best else [job.stage.last])
    progress.add_to_record(epoch_seconds(job))  # a checkpoint cannot hold how long it took itself
    if not progress.evaluation_pending:
        report_epoch(job, val, best, eval_s)


def hands_over(job: Job) -> bool:
    """Return whether the evaluator evaluates this epoch; rank 0 decides for all.

    The workers together evaluate the last epoch, for which they would have to wait.
    """
    if not job.config.eval.asynchronous or is_last_epoch(job):
        return False
    if takes := gather_objects(job.evaluator is not None and job.evaluator.start(), job.group)[0]:
        broadcast_buffers(job.student, job.train_state.group)  # as `evaluate` does
    return bool(takes)


def take_evaluation(job: Job) -> None:
    """Wait until the evaluator has evaluated the last complete epoch, and report the epoch. Every rank must call this.

    Raises what the evaluation raised.
    """
    with job.metrics.clock.part("eval"):
        job.disk.wait()  # it begins once its checkpoint is written
        while not gather_objects(job.evaluator is not None and job.evaluator.is_done(1.0), job.group)[0]:
            pass
        found = broadcast_result(lambda: job.evaluator.result() if job.evaluator is not None else None, job.group)
    assert found is not None
    job.val_loader.skipped = found.skipped
    report_evaluation(job, found.val)


def report_evaluation(job: Job, val: dict[str, float], eval_s: float | None = None) -> None:
    """Report the last complete epoch with its evaluation. If it is the best so far, the next save copies `last` to `best`."""
    job.last_is_best = add_evaluation(job, val)
    report_epoch(job, val, job.last_is_best, eval_s)


def report_epoch(job: Job, val: dict[str, float], best: bool, eval_s: float | None) -> None:
    """Log and report the last complete epoch. `eval_s`: see `log_epoch`."""
    if job.group.is_main:
        log_epoch(job, val, best, eval_s)
    job.report("epoch", **job.progress.epoch_record)


def add_evaluation(job: Job, val: dict[str, float]) -> bool:
    """Add the last epoch's evaluation to its record. Return whether it is the best so far.

    Raises DataError: no validation image could be read.
    """
    if not val["num_images"]:
        raise DataError(f"{job.config.data.path}: no validation image could be read")
    progress = job.progress
    loaders = [job.val_loader, *(job.backbone_evaluation.labeled if job.backbone_evaluation else ())]
    num_skipped = sum(len(check_skipped(job, loader, {})) for loader in loaders)
    until_pct, train_s = job.config.train.until_top1_pct, job.metrics.clock.train_s
    best = progress.update_best(score_of(job, val), val.get("top1_pct"), until_pct, train_s)
    reached = {f"epoch/{name}": value for name, value in progress.reached.items()}
    progress.add_to_record({f"val/{name}": value for name, value in val.items()} | reached)
    progress.add_to_record({"epoch/skipped_images": float(num_skipped)})
    progress.evaluation_pending = False
    return best


def score_of(job: Job, val: dict[str, float]) -> float | None:
    """Return the score that ranks checkpoints: `eval.best`, or else top-1 or CKA, or else the epoch, so that the latest wins.

    Higher is better. None if the metric is NaN, such as the CKA of features that are all equal.
    """
    names = [job.config.eval.best] if job.config.eval.best else ["top1_pct", "cka"]
    name = next((name for name in names if name in val), None)
    if name is None:
        return float(job.progress.epoch)
    return None if math.isnan(val[name]) else -val[name] if name == "loss" else val[name]


def end_training(job: Job) -> tuple[dict[str, float], int]:
    """Close an epoch's training. Return the means over its steps and the number of skipped images.

    Raises DataError: no training image could be read.
    """
    progress = job.progress
    num_skipped = len(check_skipped(job, job.train_loader, progress.skipped))
    with job.metrics.clock.part("checkpoint"):  # the teacher cache writes the epoch's logits to disk
        num_computed = job.train_state.teacher.end_epoch()
    trained = means(job.train_state, progress.partial) | job.metrics.noise.end_epoch()
    trained |= teacher_images(num_computed, job.group)
    if not progress.partial[0]:
        raise DataError(f"{job.config.data.path}: no training image could be read")
    progress.end_epoch()
    job.metrics.peak_memory.end_training(progress.step)
    return trained, num_skipped


def is_evaluated(job: Job) -> bool:
    """Return whether the job is evaluated after the last complete epoch: every `evaluate_every` epochs and at the end.

    An init stage is never evaluated, because it does not learn labels.
    """
    return not job.config.init_stage and (job.progress.epoch % job.config.train.evaluate_every == 0 or is_last_epoch(job))


def evaluate_epoch(job: Job) -> tuple[dict[str, float], float]:
    """Run `evaluate` or `BackboneEvaluation` on all workers, see `evaluate_averaged`; also return its seconds.

    The seconds are added to the epoch's record.
    """
    state, heartbeat, epoch = job.train_state, job.metrics.heartbeat, job.progress.epoch
    is_last = is_last_epoch(job)

    def measure() -> dict[str, float]:
        if job.backbone_evaluation is not None:
            return job.backbone_evaluation(state, job.val_loader, job.group, heartbeat, epoch=epoch, is_last=is_last)
        batches = heartbeat.over(job.val_loader.epoch(0))
        return evaluate(job.student, batches, job.logits, job.group, state.group)

    with job.metrics.clock.part("eval"):
        val = evaluate_averaged(measure, state.average)
    seconds = epoch_seconds(job)
    job.progress.add_to_record(seconds)
    return val, seconds["epoch/eval_s"]


def is_last_epoch(job: Job) -> bool:
    """Return whether training ends after the last complete epoch; the same on every rank."""
    return job.progress.epoch == job.epochs.num or out_of_time(job)


def out_of_time(job: Job) -> bool:
    """Return whether `train.until_s` has passed; the same on every rank."""
    until_s = job.config.train.until_s
    # Clocks differ by rank, so rank 0 decides.
    return until_s is not None and bool(gather_objects(job.metrics.clock.train_s >= until_s, job.group)[0])


def wait_for_disk(job: Job) -> None:
    """Wait until all checkpoints and records so far are on disk."""
    with job.metrics.clock.part("checkpoint"):
        job.disk.wait()


def end_interrupted(job: Job, interruption: Interruption) -> NoReturn:
    """End the stage on every rank, once its last checkpoint is on disk."""
    wait_for_disk(job)
    gather_objects(None, job.group)  # only one rank writes, and the first rank to raise ends the others within seconds
    raise StageInterruptedError(interruption)
