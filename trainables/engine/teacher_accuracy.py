"""Measure the accuracy of teachers with given weights before the first step that learns from them.

The loss alone would not reveal a teacher whose classes have another order, or whose images were normalized differently.

Shapes: B batch, K classes.
"""

import logging
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from scipy.special import bdtrc
from torch import Tensor, nn

from trainables.config import WeightedConfig
from trainables.device.device_batches import DeviceBatch
from trainables.device.tensor_format import pixels_of, teacher_autocast, teacher_precision
from trainables.distributed.group import all_reduce_sum, broadcast_result
from trainables.engine.evaluate import evaluate, logits_of
from trainables.engine.job import Job
from trainables.engine.modules import methods_with_teacher
from trainables.errors import DataError, TrainingError
from trainables.models.forward import has_classifier
from trainables.models.model_input import teacher_input
from trainables.models.weights import teacher_sha256
from trainables.object_store.store import ObjectStore, is_uri
from trainables.rundir import write_atomic
from trainables.stage_result import TeacherAccuracy
from trainables.teachers.cache.cached_teacher import CachedTeachers
from trainables.teachers.cache.key import cache_key
from trainables.teachers.interface import TeacherRequest
from trainables.teachers.network import TeacherNetwork, fit, load_networks, move
from trainables.teachers.rows import RowTeacher
from trainables.teachers.service.client import ServiceTeacher

log = logging.getLogger("raydistill")

MIN_IMAGES, MAX_P_VALUE = 256, 1e-3
"""Reject a teacher if its accuracy, on at least MIN_IMAGES images, is chance by a larger p-value."""


def measure_teachers(job: Job) -> list[TeacherAccuracy | None]:
    """Return the accuracy of each teacher with given weights, None for one that is not measured; [] if none is.

    Each is measured once per run or sweep, and then read from `config.teacher_records`. Training state does not change. Every
    rank must call this.

    Raises:
        TrainingError: a teacher is not better than chance.
        DataError: no validation image could be read.
    """
    config, reason = job.config, None
    if config.teacher_records is None or not config.all_teachers or not methods_with_teacher(config):
        return []
    if config.scale.pipeline_stages > 1:
        reason = "with pipeline stages, its rank gets no validation images"
    elif job.train_state.teacher.is_collective:
        reason = "it is sharded, and its workers may have different numbers of validation batches"
    found = list[TeacherAccuracy | None]()
    for number, each in enumerate(config.all_teachers):
        teacher, why = job.train_state.teacher, reason
        if isinstance(teacher, CachedTeachers):
            teacher = teacher.teachers[number]
        if reason is None and isinstance(teacher, TeacherNetwork) and not has_classifier(teacher.networks[number]):
            why = "only its features are used, and its classes differ from the data's"
        elif reason is None and isinstance(teacher, RowTeacher) and not teacher.row_format.has_logits:
            why = "only its features are cached or served"
        if why is not None and job.group.is_main:
            log.info("%s: not measuring the accuracy of the teacher %s: %s", config.stage, each.model, why)
        found.append(_measure_once(job, number, each) if why is None else None)
    return found


def check_above_chance(accuracy: TeacherAccuracy) -> None:
    """Raise a TrainingError if a teacher may not be better than chance, by a one-sided binomial test."""
    num_images = accuracy.num_images
    num_right = round(accuracy.top1_pct / 100 * num_images)
    p_value = float(bdtrc(num_right - 1, num_images, accuracy.chance_pct / 100))  # P(at least num_right)
    if num_images >= MIN_IMAGES and p_value > MAX_P_VALUE:
        raise TrainingError(
            f"{accuracy}: it is not above chance: its classes may have another order than the "
            f"data's, or it needs another normalization (teacher.mean, teacher.std) or image size (teacher.image_size): fix "
            f"that, or use other weights than {accuracy.weights}"
        )


def _measure_once(job: Job, number: int, teacher: WeightedConfig) -> TeacherAccuracy:
    folder, began_s = str(job.config.teacher_records), time.perf_counter()
    path, store = Path(folder), ObjectStore(folder) if is_uri(folder) else None
    name = broadcast_result(lambda: f"teacher-{_key(job, teacher)}.json", job.group)

    def read() -> bytes | None:
        return store.read(name) if store else (path / name).read_bytes() if (path / name).exists() else None

    record = broadcast_result(read, job.group)
    if record is not None:
        accuracy = TeacherAccuracy.model_validate_json(record)
    else:
        with job.metrics.clock.part("eval"):
            top1_pct, num_images, chance = _measure(job, number)
        accuracy = TeacherAccuracy(
            model=teacher.model, weights=str(teacher.weights), top1_pct=top1_pct, num_images=num_images, chance_pct=100 * chance
        )
        if job.group.is_main:
            log.info("%s (%.1f s)", accuracy, time.perf_counter() - began_s)
            content = accuracy.model_dump_json().encode()
            store.put(name, content) if store else write_atomic(path / name, content)
    check_above_chance(accuracy)
    return accuracy


def _measure(job: Job, number: int) -> tuple[float, int, float]:
    """Return teacher `number`'s top-1 in percent, the number of images, and the fraction that is right by chance."""
    config, group, state, teacher = job.config, job.group, job.train_state, job.train_state.teacher
    batches, network = job.val_loader.epoch(0), nn.Module()
    num_classes = job.checkpoint_state.metadata["num_classes"]
    predicted_K = torch.zeros(num_classes, dtype=torch.float64, device=group.device)
    if isinstance(teacher, ServiceTeacher):
        client = teacher.for_validation(job.val_loader)
        batches = client.prefetch(batches, None)
    else:
        if isinstance(teacher, TeacherNetwork):
            network = teacher.networks[number]
        else:  # its logits are cached
            network = move(load_networks(config, job.checkpoint_state.metadata["classes"])[number], config, group.device)
        precision = teacher_autocast(config.all_teachers[number], config, group.device)
        forward = logits_of(network, pixels_of(config), precision, job.train_state.compilation)

    def logits(batch: DeviceBatch) -> Tensor:
        if isinstance(teacher, ServiceTeacher):
            request = TeacherRequest(batch.host_indices_B, batch.epoch)
            outputs = client(batch.images_BCHW, len(batch.labels_B), request).values()
            logits_BK = next(each.logits_BK for each in outputs if each.logits is not None)
        else:
            logits_BK = forward(batch)
        predicted_K.add_(logits_BK.argmax(1).bincount(minlength=num_classes))
        return logits_BK

    result = evaluate(network, job.metrics.heartbeat.over(batches), logits, group, state.group)
    if not result["num_images"]:
        raise DataError(f"{config.data.path}: no validation image could be read")
    labels_K = np.bincount(job.val_loader.source.labels_N, minlength=num_classes)
    shares_K = all_reduce_sum(predicted_K, group).cpu().numpy() / result["num_images"]
    return result["top1_pct"], int(result["num_images"]), float(shares_K @ labels_K) / len(job.val_loader.source)


def _key(job: Job, teacher: WeightedConfig) -> str:
    """Hash everything that determines the accuracy: the teacher's tensors, the images, their preprocessing. Reads the weights."""
    images, data = job.checkpoint_state.data, job.config.data
    assert images is not None  # only timing runs have none, and they measure no teacher
    parts = {
        "teacher": [teacher.model, teacher_sha256(**fit(teacher, job.config, images.classes))],
        "images": images.val.model_dump(),
        "crops": data.model_dump(mode="json", include={"image_size", "val_resize", "fidelity"}),
        "input": asdict(teacher_input(teacher, data)),
        "precision": teacher_precision(teacher, job.config),
    }
    return cache_key(parts)
