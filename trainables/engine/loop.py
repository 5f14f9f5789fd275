"""Epochs: train, evaluate, checkpoint, report. Knows neither Ray nor MLflow: `report` is a callable."""

import logging
from collections.abc import Callable, Generator, Sequence
from typing import NoReturn

from trainables.data.loader.loader import Batch
from trainables.device.device_batches import on_device
from trainables.distributed.group import gather_objects
from trainables.engine.checkpoint import join_shards
from trainables.engine.checks import check_finite, check_skipped, single_image_errors
from trainables.engine.evaluate import evaluate
from trainables.engine.job import Job
from trainables.engine.metrics_records import epoch_seconds, log_epoch, log_step, means, summarize, teacher_images, throughput
from trainables.engine.teacher_accuracy import measure_teachers
from trainables.errors import DataError, Interruption, StageInterruptedError
from trainables.rules import pipeline_micro_batches

log = logging.getLogger("raydistill")


def run(job: Job) -> dict[str, float]:
    """Train to the configured end, from where the job's checkpoint left off. Returns the summary, on every rank.

    Raises:
        TrainingError: a loss or a parameter that is not finite, or replicas that disagree.
        StageInterruptedError: on every rank, after a checkpoint: some rank requested it.
        DataError, CheckpointError: see their own modules.
    """
    config, progress = job.config, job.progress
    job.metrics.clock.begin()
    start: dict[str, float] = {
        "steps_per_epoch": job.epochs.steps_per_epoch,
        "samples_per_epoch": job.train_loader.samples_per_epoch,
        "epochs": job.epochs.num,
        "num_workers": job.group.world_size,
        "max_steps": config.train.warmup_steps + config.train.max_steps if config.train.max_steps else 0,
    }
    if config.scale.pipeline_stages > 1:
        start |= {"pipeline_stages": config.scale.pipeline_stages, "micro_batches": pipeline_micro_batches(config)}
    job.report("start", progress.step, progress.epoch, start)
    if progress.epoch_record:  # its checkpoint is complete: a death may have come before its record was written
        job.report("epoch", **progress.epoch_record)
    if config.train.max_steps is not None:
        return run_timing(job)
    job.teachers = measure_teachers(job)
    update = job.train_state.update
    if config.measures_noise and update.noise is None and job.group.is_main:
        reason = update.noise_obstacle or "one worker compares micro-batches, and optim.accumulate is 1"
        log.info("%s: no noise_scale: %s", config.stage, reason)
    while progress.epoch < job.epochs.num and not progress.reached and not is_time_up(job):
        if interruption := job.interruptions.exchange(progress.step).interruption:
            end_interrupted(job, interruption)  # at the last checkpoint, which is that of the epoch before
        with job.metrics.clock.part("train"):
            train_epoch(job)
        finish_epoch(job)
    wait_for_disk(job)
    if job.group.is_main and job.stage.best.exists():
        with job.metrics.clock.part("checkpoint"):
            join_shards(job.stage.best)
    return summarize(job)


def wait_for_disk(job: Job) -> None:
    """Wait until the checkpoints and records so far are on disk."""
    with job.metrics.clock.part("checkpoint"):
        job.disk.wait()


def end_interrupted(job: Job, interruption: Interruption) -> NoReturn:
    """End the stage on every rank, once its last checkpoint is on disk."""
    wait_for_disk(job)
    gather_objects(None, job.group)  # one rank writes: the first that raises ends the others within seconds
    raise StageInterruptedError(interruption)


def is_time_up(job: Job) -> bool:
    """Whether the time for the training is up before its last epoch; the same on every rank."""
    until_s = job.config.train.until_s
    # Each rank has a clock of its own: rank 0 decides.
    return until_s is not None and bool(gather_objects(job.metrics.clock.train_s >= until_s, job.group)[0])


def is_evaluated(job: Job, num_epochs: int) -> bool:
    """Whether a job is evaluated after so many epochs: after every `evaluate_every`, and after the last one.

    An init stage never is: it learns no label.
    """
    due = num_epochs % job.config.train.evaluate_every == 0 or num_epochs == job.epochs.num
    return not job.config.init_stage and (due or is_time_up(job))


def run_timing(job: Job) -> dict[str, float]:
    """Warm up, run `max_steps` steps or fewer if they are enough, and stop: throughput and phase times, no evaluation."""
    last_step = job.config.train.warmup_steps + (job.config.train.max_steps or 0)
    num_skipped, ended = 0, False
    while not ended:
        with job.metrics.clock.part("train"):
            ended = train_epoch(job, stop_at=last_step)
        num_skipped = max(num_skipped, len(check_skipped(job, job.train_loader, {})))
        job.progress.epoch += 1
        job.progress.position = 0
    return summarize(job, num_skipped)


def train_epoch(job: Job, stop_at: int | None = None) -> bool:
    """The rest of the current epoch. Of a timing run: up to the step `stop_at`, or to where that is enough; True there."""
    train_state, loader, progress = job.train_state, job.train_loader, job.progress
    train_state.distillation_module.begin_epoch(progress.epoch)
    train_state.update.begin_epoch()
    order = job.epochs.order_offset + progress.epoch
    augmentation = loader.augmentation_epoch(order)
    batches = train_state.teacher.prefetch(loader.epoch(order, progress.position), augmentation)
    return train_batches(job, batches, augmentation, stop_at)


def train_batches(job: Job, batches: Generator[Batch, None, None], augmentation: int, stop_at: int | None) -> bool:
    """Train on an epoch's batches, with log lines and checkpoints in between; see `train_epoch`. Closes `batches`."""
    config, progress, timer, loader = job.config, job.progress, job.metrics.timer, job.train_loader
    ready = on_device(batches, job.group.device, augmentation, loader.costs.add_copy)
    job.metrics.throughput.begin(progress.step)
    job.metrics.start_step(progress.step)
    try:
        for batch in ready:
            timer.mark(loader.wait_phase)
            job.disk.check()
            begin_step(job)
            with single_image_errors(job):
                job.functions.train_step(batch, progress.step, timer)
            job.metrics.stop_step()
            progress.step += 1
            if progress.step == job.metrics.throughput.warmup_until:
                loader.costs.clear()
            progress.position = batch.position
            step_in_epoch = -(-progress.position // config.data.global_batch_size)
            ended = progress.step == stop_at
            last = ended or step_in_epoch == job.epochs.steps_per_epoch
            logged = last or step_in_epoch % config.train.log_every == 0 or progress.step == config.train.warmup_steps
            if logged:
                log_step(job, step_in_epoch)
                ended = ended or (stop_at is not None and job.stop_early is not None and stops_early(job, job.stop_early))
            if last or ended:
                return ended
            if stop_at is None:
                decision = job.interruptions.after_step(progress.step)
                if decision.saves or step_in_epoch % config.train.checkpoint_every == 0:
                    if not logged:
                        log_step(job, step_in_epoch)  # the sums belong to the state: they are read before it is saved
                    save_inside_epoch(job)
                if decision.interruption is not None:
                    end_interrupted(job, decision.interruption)
            job.metrics.start_step(progress.step)
    finally:
        ready.close()
    return False


def begin_step(job: Job) -> None:
    """Before a step: set its learning rates, and let the peak of the memory begin anew where that is due."""
    progress, train_state = job.progress, job.train_state
    job.metrics.peak_memory.before_step(progress.step)
    for each in train_state.optimizers:
        each.set_learning_rate(
            progress.step - job.epochs.step_offset,
            steps_per_epoch=job.epochs.steps_per_epoch,
            global_batch_size=job.config.data.global_batch_size,
        )


def stops_early(job: Job, stop_early: Callable[[Sequence[float]], bool]) -> bool:
    """Whether a timing run may end before its last step: the main rank decides for all. Its wait is no part of a step."""
    with job.metrics.clock.part("other"):
        stops = gather_objects(job.group.is_main and stop_early(job.metrics.timer.steps_s()), job.group)[0]
    job.metrics.throughput.begin(job.progress.step)
    return bool(stops)


def save_inside_epoch(job: Job) -> None:
    """A checkpoint at a position inside the epoch, behind a log step; training goes on in the same loader."""
    progress = job.progress
    with job.metrics.clock.part("checkpoint"):
        check_finite(job)
        progress.skipped = check_skipped(job, job.train_loader, progress.skipped)
        job.checkpoints.save([job.stage.last], job.checkpoint_state, job.group)
    job.interruptions.saved()
    job.metrics.throughput.begin(progress.step)


def finish_epoch(job: Job) -> None:
    """Evaluate where it is due, check, save last and best, and report: the record is written after its checkpoint."""
    check_finite(job)
    trained, telemetry, num_skipped = end_training(job)
    val, best = {}, False
    if is_evaluated(job, job.progress.epoch):
        val = evaluate_epoch(job)
        num_skipped += len(check_skipped(job, job.val_loader, {}))
        best = take_accuracy(job, val["top1_pct"])
    row, record = add_epoch_record(job, val=val, trained=trained, telemetry=telemetry, num_skipped=num_skipped)
    with job.metrics.clock.part("checkpoint"):
        paths = [job.stage.best, job.stage.last] if best else [job.stage.last]
        job.checkpoints.save(paths, job.checkpoint_state, job.group)
    job.interruptions.saved()
    if job.group.is_main:
        log_epoch(job, val, best)
    for name, seconds in epoch_seconds(job).items():  # a checkpoint cannot hold how long it took itself
        row[name] += seconds
        record[name] += seconds
    job.report("epoch", **job.progress.epoch_record)


def end_training(job: Job) -> tuple[dict[str, float], dict[str, float], int]:
    """An epoch's steps are over. Returns their means, the nodes' telemetry, and how many images were skipped.

    Raises DataError: not one training image could be read.
    """
    progress = job.progress
    num_skipped = len(check_skipped(job, job.train_loader, progress.skipped))
    with job.metrics.clock.part("checkpoint"):  # a cache writes the epoch's logits to the disk
        num_computed = job.train_state.teacher.end_epoch()
    trained = means(job.train_state, progress.partial) | job.metrics.noise.end_epoch()
    trained |= teacher_images(num_computed, job.group)
    telemetry = job.telemetry()  # of the training alone: the evaluation loads a node otherwise
    if not progress.partial[0]:
        raise DataError(f"{job.config.data.path}: not one training image could be read")
    progress.epoch, progress.position = progress.epoch + 1, 0
    progress.partial, progress.skipped = [], {}
    job.metrics.peak_memory.end_training(progress.step)
    return trained, telemetry, num_skipped


def evaluate_epoch(job: Job) -> dict[str, float]:
    """See `evaluate`. Raises DataError: not one validation image could be read."""
    with job.metrics.clock.part("eval"):
        batches = job.metrics.heartbeat.over(job.val_loader.epoch(0))
        val = evaluate(job.student, batches, job.functions.logits, job.group, job.train_state.group)
    if not val["num_images"]:
        raise DataError(f"{job.config.data.path}: not one validation image could be read")
    return val


def take_accuracy(job: Job, top1_pct: float) -> bool:
    """Update what was best and whether the target is reached. Whether this epoch is the best one so far."""
    progress, target_pct = job.progress, job.config.train.until_top1_pct
    if target_pct is not None and top1_pct >= target_pct:
        progress.reached = {"time_to_accuracy_s": job.metrics.clock.train_s, "steps_to_accuracy": float(progress.step)}
    best = top1_pct > progress.best_top1_pct
    if best:
        progress.best_top1_pct, progress.best_epoch = top1_pct, progress.epoch
    return best


def add_epoch_record(
    job: Job, *, val: dict[str, float], trained: dict[str, float], telemetry: dict[str, float], num_skipped: int
) -> tuple[dict[str, float], dict[str, float]]:
    """An epoch's row of the history and its record, both put into the progress that the next checkpoint saves."""
    progress = job.progress
    learned = {f"val/{name}": value for name, value in val.items()}
    learned |= {f"epoch/train/{name}": value for name, value in trained.items()}
    learned |= {"epoch/skipped_images": float(num_skipped)}
    learned |= epoch_seconds(job)
    measured = {
        **throughput(job),
        **progress.reached,
        **telemetry,
    }
    row = {"epoch": progress.epoch, "step": progress.step, **learned}
    record = learned | {f"epoch/{name}": value for name, value in measured.items()}
    progress.history.append(row)
    progress.epoch_record = {"step": progress.step, "epoch": float(progress.epoch), "metrics": record}
    return row, record
