"""12: `train.cuda_graphs`: as fast as it should be, and the same training as without it."""

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tests.gpu.check_ranks import on
from tests.gpu.check_speed import plain
from tests.gpu.contract import Check, Expected, Measured, Piece, Settings
from tests.gpu.timing import compare
from tests.gpu.work import (
    MANY_STEPS,
    R34_R18,
    R56_R20,
    Pair,
    Stepper,
    device_batch,
    first_device,
    folder_of,
    job_config,
    open_job,
    sized,
)
from tests.trainables.engine.graphed_jobs import CpuCapture, Trained, fuse_optimizers, settings, state_on_rank
from tests.trainables.jobs import relative_difference
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.graphed_step import GraphedStep
from trainables.engine.launch_bound import measure
from trainables.methods.registry import METHODS


def speed(of: Pair, batch_size: int, precision: str, setting: Settings, *, overlap_teacher: bool = True) -> Measured:
    """A job with graphs, the same without, and the plain loop, taking turns."""
    device, pair = first_device(setting), sized(of, setting)
    batch_size = 8 if setting.small else batch_size
    batch = device_batch(pair, batch_size, device)
    graphs = job_config(setting, pair, batch_size, precision, {"train": {"cuda_graphs": True}})
    with open_job(graphs, device) as job, open_job(job_config(setting, pair, batch_size, precision), device) as eager:
        # An epoch's first steps are not captured, and the few images of this job are an epoch of two steps.
        job.train_state.epochs = replace(job.train_state.epochs, steps_per_epoch=MANY_STEPS)
        train_step = job.functions.train_step
        if setting.small:
            fuse_optimizers(job)
            train_step = GraphedStep(job.train_state, CpuCapture())
        if isinstance(train_step, GraphedStep):
            train_step.overlap_teacher = overlap_teacher
        sides = {
            "ours": Stepper(job, batch, train_step),
            "eager": Stepper(eager, batch),
            "plain": plain(pair, batch, device, precision),
        }
        rounds, steps = (2, 2) if setting.small else (7, 50)
        found = compare(sides, device, batch=batch_size, rounds=rounds, steps=steps, warm_up=4 if setting.small else 10)
        phases = job.metrics.timer.summary()
        found |= {f"{phase}_ms": phases.get(f"phase/{phase}_ms", 0.0) for phase in ("teacher", "graph")}
        found["off"] = int(
            not isinstance(train_step, GraphedStep) or not any(shape.replays for shape in train_step._shapes.values())
        )
    return found


def overlap(of: Pair, batch_size: int, precision: str, setting: Settings) -> Measured:
    """Graphs whose teacher overlaps with the step before, and graphs one after the other: each against the plain loop."""
    overlapping, in_turn = (speed(of, batch_size, precision, setting, overlap_teacher=flag) for flag in (True, False))
    ratios = [figures["ours/plain"] for figures in (overlapping, in_turn)]
    off = int(overlapping["off"] or in_turn["off"])
    found: Measured = {"overlapping/in turn": float(ratios[0]) / float(ratios[1]), "off": off}
    return found | {"teacher_ms/overlapping": overlapping["teacher_ms"], "teacher_ms/in turn": in_turn["teacher_ms"]}


def choice(setting: Settings) -> Measured:
    """What `train.cuda_graphs: auto` measures and chooses for a small model and for a large batch of a larger one."""
    device, found = first_device(setting), Measured()
    for name, of, batch_size, precision in (("cifar", R56_R20, 64, "fp32"), ("256", R34_R18, 256, "bf16")):
        pair, num_images = sized(of, setting), 8 if setting.small else batch_size
        with open_job(job_config(setting, pair, num_images, precision), device) as job:
            times = measure(job.train_state, pair.image_size, num_images)
        found |= {f"launch_ms/{name}": 1e3 * times.launch_s, f"device_ms/{name}": 1e3 * times.device_s}
        found[f"graphs/{name}"] = int(times.is_launch_bound)
    return found


def same_training(setting: Settings) -> Measured:
    """resnet14 → resnet8 with KD, rate and weight changing with every step: parameters, momenta and sums of 50 steps."""
    device = first_device(setting)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    config, steps = settings("kd", folder_of(setting, "graphs-kd")), 12 if setting.small else 50
    eager, graphed = (Trained(config, graphed=graphed, group=Group(device=device), steps=steps) for graphed in (False, True))
    return {"difference": difference(eager, graphed), "replays": graphed.num_replays, "off": graphed.step.off or "no"}


def methods(setting: Settings) -> Measured:
    """Every method as it is and captured, 20 steps each: how many were captured, and the largest difference of any number."""
    device = first_device(setting)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    differences, reasons = {}, {}
    for name in ("kd", "kdsvd") if setting.small else METHODS:
        config = settings(name, folder_of(setting, f"graphs-{name}"))
        eager, graphed = (Trained(config, graphed=graphed, group=Group(device=device)) for graphed in (False, True))
        if graphed.num_replays and graphed.step.off is None:
            differences[name] = difference(eager, graphed)
        if graphed.step.off is not None:
            reasons[name] = graphed.step.off
    worst = max(differences, key=lambda name: differences[name])
    return {
        "captured": len(differences),
        "difference": differences[worst],
        "worst": worst,
        "not captured": "; ".join(f"{name}: {reason}" for name, reason in reasons.items()),
    }


def rank_on(group: Group, device: str, config: TrainConfig, graphed: bool, steps: int) -> dict[str, Any]:
    if device != "cpu":
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    return state_on_rank(on(group, device), config, graphed, steps)


def workers(setting: Settings) -> Measured:
    """Two ranks on the one GPU over Gloo, whose steps are replayed, beside the same two under DDP."""
    folder, steps = folder_of(setting, "graphs-workers"), 12 if setting.small else 50
    config = settings("kd", folder, data={"synthetic_images": 41}, scale={"sync_batch_norm": False})
    with contextlib.closing(RankPool(2)) as ranks:
        eager, graphed = (ranks.run(2, rank_on, setting.device, config, graphed, steps) for graphed in (False, True))
    pairs = list(zip(graphed, eager, strict=True))
    return {
        "difference": max(relative_difference(one["state"], other["state"]) for one, other in pairs),
        "noise": max(abs(one["noise"][0] / other["noise"][0] - 1) for one, other in pairs),
        "replays": min(one["replays"] for one in graphed),
        "off": graphed[0]["off"] or "no",
    }


def difference(one: Trained, other: Trained) -> float:
    """The largest of any number that the two trainings left."""
    states = ({name: tensor.double() for name, tensor in each.state().items()} for each in (one, other))
    return relative_difference(*states)


REPLAYED = Expected("off", "the steps are replayed", 0, 0, on_cpu=True)
CHECK = Check(
    12,
    "CUDA graphs",
    (
        Piece(
            "12-cifar",
            partial(speed, R56_R20, 64, "fp32"),
            (Expected("ours/plain", "r56 → r20 at batch 64 ÷ plain loop ≥ 3", low=3.0), REPLAYED),
            3,
        ),
        Piece(
            "12-bf16-32",
            partial(speed, R34_R18, 32, "bf16"),
            (Expected("ours/plain", "r34 → r18 at batch 32 ÷ plain loop ≥ 1.5", low=1.5), REPLAYED),
            3,
        ),
        Piece(
            "12-overlap",
            partial(overlap, R56_R20, 64, "fp32"),
            (
                Expected(
                    "overlapping/in turn", "r56 → r20: teacher overlaps with the step before: 1.3–1.9", 1.3, 1.9, estimate=True
                ),
                Expected("teacher_ms/overlapping", "what the student then waits for it: recorded"),
                REPLAYED,
            ),
            5,
        ),
        Piece(
            "12-overlap-32",
            partial(overlap, R34_R18, 32, "bf16"),
            (Expected("overlapping/in turn", "r34 → r18 at batch 32: 1.0–1.3", 1.0, 1.3, estimate=True), REPLAYED),
            5,
        ),
        Piece(
            "12-auto",
            choice,
            (
                Expected("graphs/cifar", "auto: graphs for r56 → r20 at batch 64", 1, 1),
                Expected("graphs/256", "auto: none for r34 → r18 at batch 256", 0, 0),
                Expected("device_ms/cifar", "time of the GPU's work, r56 → r20: recorded"),
                Expected("launch_ms/cifar", "time to launch it: recorded"),
            ),
            2,
        ),
        Piece(
            "12-same",
            same_training,
            (
                Expected("difference", "50 steps give what eager ones give, to 1e-5", high=1e-5, on_cpu=True),
                Expected("replays", "some are replayed", low=1, on_cpu=True),
            ),
            2,
        ),
        Piece(
            "12-workers",
            workers,
            (
                Expected("difference", "two workers learn what DDP learns, to 1e-5", high=1e-5, on_cpu=True),
                Expected("noise", "and see the same gradient noise, to 1e-3", high=1e-3, on_cpu=True),
                Expected("replays", "the steps of both are replayed", low=1, on_cpu=True),
            ),
            2,
        ),
        Piece(
            "12-methods",
            methods,
            (
                Expected("captured", "26 of 27 methods are captured", 26, 26),
                Expected("difference", "20 steps give what eager ones give, to 1e-3", high=1e-3, on_cpu=True),
                Expected("not captured", "and why the others are not: recorded"),
            ),
            6,
        ),
    ),
)
