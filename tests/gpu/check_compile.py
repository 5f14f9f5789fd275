"""12: `train.compile`: what its modes bring, and the same training as without it."""

import contextlib
import math
import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from tests.gpu.check_ranks import on
from tests.gpu.check_speed import plain
from tests.gpu.contract import Check, Expected, Measured, Piece, Settings
from tests.gpu.timing import compare
from tests.gpu.work import R34_R18, R56_R20, Pair, Stepper, device_batch, first_device, folder_of, job_config, open_job, sized
from tests.trainables.engine.first_steps import compiled_without_kernels, settings, state_after
from tests.trainables.jobs import relative_difference
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.methods.registry import METHODS

MODES = (True, "reduce-overhead", "max-autotune")


def compiling(small: bool) -> contextlib.AbstractContextManager[None]:
    """As torch does; on a CPU, where a model takes a minute, without its kernels."""
    return compiled_without_kernels() if small else contextlib.nullcontext()


def speed(of: Pair, batch_size: int, precision: str, setting: Settings) -> Measured:
    """A job in each mode, the same eagerly, and the plain loop, taking turns; and what the first steps take in each mode."""
    device, pair = first_device(setting), sized(of, setting)
    batch_size, steps = (8, 2) if setting.small else (batch_size, 50)
    batch, found = device_batch(pair, batch_size, device), Measured()
    with contextlib.ExitStack() as opened:
        opened.enter_context(compiling(setting.small))
        sides: dict[str, Any] = {"plain": plain(pair, batch, device, precision)}
        for mode in (False, *MODES[: 1 if setting.small else None]):
            name = {False: "eager", True: "compiled"}.get(mode, str(mode))  # type: ignore[call-overload]
            config = job_config(setting, pair, batch_size, precision, {"train": {"compile": mode}})
            sides[name] = Stepper(opened.enter_context(open_job(config, device)), batch)
            began_s = time.perf_counter()
            for _ in range(3):
                sides[name]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found[f"first steps_s/{name}"] = time.perf_counter() - began_s
        rounds = 2 if setting.small else 7
        found |= compare(sides, device, batch=batch_size, rounds=rounds, steps=steps, warm_up=4 if setting.small else 10)
        plain_per_s = float(found["images_per_s/plain"])
        return found | {f"{name}/plain": float(found[f"images_per_s/{name}"]) / plain_per_s for name in sides}


def state_on(group: Group, device: str, config: TrainConfig, steps: int) -> dict[str, Tensor]:
    if device != "cpu":
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    torch.compiler.reset()
    with compiling(device == "cpu"):
        return state_after(config, on(group, device), steps)


def with_mode(config: TrainConfig, mode: bool | str) -> TrainConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"compile": mode})})


def of_method(setting: Settings, name: str) -> float | str:
    """The largest difference of any number between two epochs of a method with torch's CUDA graphs and eagerly, in float64; or
    what it failed of."""
    config = settings(name, folder_of(setting, f"compile-{name}"), "fp64")
    try:
        eager, compiled = (state_on(Group(), setting.device, with_mode(config, mode), 12) for mode in (False, "reduce-overhead"))
        return relative_difference(eager, compiled)
    except Exception as error:
        return f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def methods(setting: Settings) -> Measured:
    """Every method, several at a time: compiling takes most of it."""
    names = ["kd", "kdsvd"] if setting.small else list(METHODS)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    at_a_time = max(1, min(len(names), (os.cpu_count() or 1) // 2))
    with ProcessPoolExecutor(at_a_time, get_context("spawn")) as pool:
        found = dict(zip(names, pool.map(partial(of_method, setting), names), strict=True))
    differences = {name: value for name, value in found.items() if not isinstance(value, str)}
    worst = max(differences, key=lambda name: differences[name], default="none")
    failed = [value for value in found.values() if isinstance(value, str)]
    return {
        "difference": differences.get(worst, math.inf),
        "worst": worst,
        "failed": len(failed),
        "why": "; ".join(failed),
    }


def workers(setting: Settings) -> Measured:
    """Two ranks on the one GPU over Gloo, one of which has no images at the end: compiled beside eager, in float64."""
    folder = folder_of(setting, "compile-workers")
    config = settings("kd", folder, "fp64", data={"synthetic_images": 41})
    with contextlib.closing(RankPool(2)) as ranks:
        eager, compiled = (
            ranks.run(2, state_on, setting.device, with_mode(config, mode), 12)[0] for mode in (False, "reduce-overhead")
        )
    return {"difference": relative_difference(eager, compiled)}


SAME = Expected("difference", "the same numbers as eager ones, to 1e-9", high=1e-9, on_cpu=True)
CHECK = Check(
    12,
    "torch.compile",
    (
        Piece(
            "12-cifar",
            partial(speed, R56_R20, 64, "fp32"),
            (
                Expected("reduce-overhead/plain", "r56 → r20 at batch 64 ÷ plain loop ≥ 3", low=3.0, estimate=True),
                Expected("compiled/plain", "without CUDA graphs: recorded"),
                Expected("first steps_s/reduce-overhead", "seconds of the first three steps: recorded"),
            ),
            9,
        ),
        Piece(
            "12-bf16-32",
            partial(speed, R34_R18, 32, "bf16"),
            (Expected("reduce-overhead/plain", "r34 → r18 at batch 32 ÷ plain loop ≥ 1.3", low=1.3, estimate=True),),
            9,
        ),
        Piece("12-workers", workers, (SAME,), 5),
        Piece(
            "12-methods",
            methods,
            (SAME, Expected("failed", "all methods train", 0, 0, on_cpu=True), Expected("why", "or why not: recorded")),
            9,
        ),
    ),
)
