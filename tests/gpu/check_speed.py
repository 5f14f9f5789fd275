"""4: speed with one batch repeated on the device, beside the best plain loop and those of published scripts."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.benchmarks.peers.device_loops import graphed, plain_step, repdistiller_step, torchdistill_step, torchvision_step
from tests.gpu.contract import Check, Expected, Measured, Piece, Settings
from tests.gpu.timing import compare, seconds_of
from tests.gpu.work import R34_R18, R56_R20, Pair, Stepper, device_batch, first_device, job_config, open_job, sized
from trainables.device.device_batches import DeviceBatch
from trainables.metrics.phase_timer import named
from trainables.models.registry import build_model

BATCHES = (256, 128, 64, 32)


def models(pair: Pair, device: torch.device, *, channels_last: bool) -> tuple[nn.Module, nn.Module]:
    """The teacher, frozen, and the student, on the device."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    teacher, student = (
        build_model(name, num_classes=pair.num_classes, image_size=pair.image_size, seed=0).to(device).to(memory_format=layout)
        for name in (pair.teacher, pair.student)
    )
    return teacher.eval().requires_grad_(False), student.train()


def plain(pair: Pair, batch: DeviceBatch, device: torch.device, precision: str) -> Callable[[], None]:
    teacher, student = models(pair, device, channels_last=pair.image_size >= 224)
    return plain_step(teacher, student, batch.images_BCHW, batch.labels_B, precision)


def beside_peers(of: Pair, batch_size: int, precision: str, settings: Settings) -> Measured:
    """Images/s, host and device time of a step: ours, the plain loop's and those of published scripts, taking turns."""
    device, pair = first_device(settings), sized(of, settings)
    batch_size = 8 if settings.small else batch_size
    batch = device_batch(pair, batch_size, device)
    rounds, steps = (2, 2) if settings.small else (7, 20)
    published = partial(models, pair, device, channels_last=False)
    with open_job(job_config(settings, pair, batch_size, precision), device) as job:
        sides: dict[str, Callable[[], None]] = {
            "ours": Stepper(job, batch),
            "plain": plain(pair, batch, device, precision),
            "torchvision": torchvision_step(*published(), batch.images_BCHW, batch.labels_B, precision),
        }
        if precision == "fp32":  # the only one of these scripts
            sides["torchdistill"] = torchdistill_step(*published(), batch.images_BCHW, batch.labels_B)
            sides["repdistiller"] = repdistiller_step(*published(), batch.images_BCHW, batch.labels_B)
        found = compare(sides, device, batch=batch_size, rounds=rounds, steps=steps, warm_up=2 if settings.small else 5)
        phases = named(job.metrics.timer.past_warmup.statistics())
        found["teacher_share"] = phases["phase/teacher_ms"] / phases["phase/step_ms"]
    return found


def teacher_ahead(settings: Settings) -> Measured:
    """The plain loop with the teacher one batch ahead, in a stream of its own, beside the plain loop."""
    device, pair = first_device(settings), sized(R34_R18, settings)
    found: Measured = {}
    for batch_size in (8,) if settings.small else (256, 32):
        batch = device_batch(pair, batch_size, device)
        teacher, student = models(pair, device, channels_last=True)
        sides = {
            "ours": plain_step(teacher, student, batch.images_BCHW, batch.labels_B, "bf16", teacher_ahead=True),
            "plain": plain(pair, batch, device, "bf16"),
        }
        rounds, steps = (2, 2) if settings.small else (7, 20)
        warm_up = 2 if settings.small else 5
        compared = compare(sides, device, batch=batch_size, rounds=rounds, steps=steps, warm_up=warm_up)
        found |= {f"ahead/plain at {256 if settings.small else batch_size}": compared["ours/plain"]}
    return found


def compiled(settings: Settings) -> Measured:
    """`train.compile` beside the same job without it."""
    device, pair = first_device(settings), sized(R34_R18, settings)
    batch_size = 8 if settings.small else 256
    batch = device_batch(pair, batch_size, device)
    compiling = job_config(settings, pair, batch_size, "bf16", {"train": {"compile": not settings.small}})
    with open_job(compiling, device) as job, open_job(job_config(settings, pair, batch_size, "bf16"), device) as eager:
        first, sides = Stepper(job, batch), {"ours": Stepper(job, batch), "eager": Stepper(eager, batch)}
        compile_s = seconds_of(first, 1, device)
        rounds, steps = (2, 2) if settings.small else (7, 20)
        found = compare(sides, device, batch=batch_size, rounds=rounds, steps=steps, warm_up=2 if settings.small else 5)
    return found | {"compile_s": compile_s}


def graphs(settings: Settings) -> Measured:
    """The plain loop of r56 → r20 at batch 64 as a CUDA graph, beside itself launched op by op, and beside ours."""
    device, pair = first_device(settings), sized(R56_R20, settings)
    batch_size = 8 if settings.small else 64
    batch = device_batch(pair, batch_size, device)
    capture = (lambda step: step) if settings.small else graphed
    with open_job(job_config(settings, pair, batch_size, "fp32"), device) as job:
        sides = {
            "ours": capture(plain(pair, batch, device, "fp32")),
            "plain": plain(pair, batch, device, "fp32"),
            "train_step": Stepper(job, batch),
        }
        rounds, steps = (2, 2) if settings.small else (7, 50)
        return compare(sides, device, batch=batch_size, rounds=rounds, steps=steps, warm_up=2 if settings.small else 5)


def share_of_peak(settings: Settings) -> Measured:
    """Floating-point operations of a step at batch 256 in bfloat16 over its time, beside those of a large matrix product."""
    device, pair = first_device(settings), sized(R34_R18, settings)
    batch_size, size = (8, 64) if settings.small else (256, 8192)
    batch = device_batch(pair, batch_size, device)
    step = plain(pair, batch, device, "bf16")
    with FlopCounterMode(display=False) as counter:
        step()
    count = 2 if settings.small else 20
    with open_job(job_config(settings, pair, batch_size, "bf16"), device) as job:
        ours = Stepper(job, batch)
        seconds_of(ours, 2 if settings.small else 5, device)
        step_s = seconds_of(ours, count, device) / count
    matrix = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    product = partial(torch.mm, matrix, matrix)
    seconds_of(product, 3, device)
    product_s = seconds_of(product, count, device) / count
    step_tflops, product_tflops = counter.get_total_flops() / step_s / 1e12, 2 * size**3 / product_s / 1e12
    return {"step_tflops": step_tflops, "matmul_tflops": product_tflops, "share": step_tflops / product_tflops}


SCRIPTS = (
    Expected("ours/torchvision", "÷ torchvision's reference with a teacher: recorded"),
    Expected("ours/torchdistill", "÷ torchdistill's step ≥ 1.0", low=1.0),
    Expected("ours/repdistiller", "÷ RepDistiller's step ≥ 1.0", low=1.0),
)
EXPECTED: dict[tuple[str, int], tuple[Expected, ...]] = {
    ("bf16", 256): (
        Expected("images_per_s/ours", "4,500–6,500 images/s", 4500, 6500, estimate=True),
        Expected("ours/plain", "÷ plain loop ≥ 1.00", low=1.0),
        Expected("ours/torchvision", "÷ torchvision's reference with a teacher ≥ 1.5", low=1.5),
        Expected("teacher_share", "teacher's share of a step ≤ 0.30", high=0.30),
    ),
    ("fp32", 256): (
        Expected("images_per_s/ours", "2,300–3,000 images/s", 2300, 3000, estimate=True),
        Expected("ours/plain", "÷ plain loop ≥ 1.00", low=1.0),
        *SCRIPTS,
    ),
    ("bf16", 32): (
        Expected("ours/plain", "÷ plain loop: recorded, compiled see 12"),
        Expected("host_ms/ours", "host 6–8 ms a step", 6, 8, estimate=True),
        Expected("device_ms/ours", "GPU 5–6 ms a step", 5, 6, estimate=True),
    ),
}
RECORDED = (
    Expected("ours/plain", "÷ plain loop: recorded"),
    Expected("images_per_s/ours", "images/s: recorded"),
    Expected("host_ms/ours", "host time of a step: recorded"),
)
CIFAR = {
    "fp32": (
        Expected("images_per_s/ours", "12,000–14,000 images/s", 12_000, 14_000, estimate=True),
        Expected("ours/plain", "÷ plain loop ≥ 1.00", low=1.0),
        *SCRIPTS,
    ),
    "bf16": (Expected("images_per_s/ours", "no faster than fp32: recorded"),),
}


def speed_piece(name: str, pair: Pair, batch: int, precision: str, expected: tuple[Expected, ...]) -> Piece:
    return Piece(name, partial(beside_peers, pair, batch, precision), expected, 2)


PIECES = (
    *(
        speed_piece(f"4-{precision}-{batch}", R34_R18, batch, precision, EXPECTED.get((precision, batch), RECORDED))
        for precision in ("bf16", "fp32")
        for batch in BATCHES
    ),
    *(speed_piece(f"4-cifar-{precision}", R56_R20, 64, precision, expected) for precision, expected in CIFAR.items()),
    Piece("4-graphs", graphs, (Expected("ours/plain", "plain loop of r56 → r20 as a CUDA graph ÷ itself ≥ 3", low=3.0),), 2),
    Piece(
        "4-peak",
        share_of_peak,
        (
            Expected("share", "share of a large bf16 product's speed: recorded"),
            Expected("step_tflops", "TFLOP/s of a step: recorded"),
        ),
        2,
    ),
    Piece(
        "4-ahead",
        teacher_ahead,
        (
            Expected("ahead/plain at 256", "teacher a batch ahead in its own stream: 0.98–1.03", 0.98, 1.03, estimate=True),
            Expected("ahead/plain at 32", "the same at batch 32: recorded"),
        ),
        2,
    ),
    Piece("4-compiled", compiled, (Expected("ours/eager", "train.compile: 1.10–1.20", 1.10, 1.20, estimate=True),), 5),
)
CHECK = Check(4, "Speed with data on the device", PIECES)
