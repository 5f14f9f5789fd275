"""A training as a chain of events, with faults in it: what a run's records would be, and what its clock says.

Written without the doctor's formulas: loader threads take chunks of batches off a queue, ranks wait for each other's gradients, a
GPU copies beside the step. R ranks, K steps of an epoch.
"""

from __future__ import annotations

import heapq
import operator
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from service.config.experiment import load
from service.config.schema import Experiment
from service.doctor.read_run import Recording, evidence_of
from trainables.metrics.allreduce_wait import split_waits, standard_error
from trainables.metrics.phases import PHASES

CHUNKS = 4
"""Of a batch, for each loader thread."""
FULL_MHZ, LIMIT_MHZ = 1410.0, 1980.0


@dataclass(frozen=True)
class Pipeline:
    """What a training on R equal workers does. Milliseconds; `…_image_ms` of one image, `…_fixed_ms` of a step."""

    gpu: bool = False
    workers: int = 2
    batch: int = 64  # images of one worker
    threads: int = 2
    ahead: int = 2  # batches
    read_image_ms: float = 0.05
    decode_image_ms: float = 0.4
    lock_image_ms: float = 0.0
    image_sd: float = 0.3
    tail: float = 0.0  # part of the images that take 50 times as long to read
    copy_image_ms: float = 0.004
    augment_image_ms: float = 0.008
    teacher_image_ms: float = 0.12
    student_image_ms: float = 0.15
    backward_image_ms: float = 0.3
    teacher_fixed_ms: float = 0.3
    student_fixed_ms: float = 0.3
    backward_fixed_ms: float = 0.6
    optimizer_ms: float = 0.5
    rest_ms: float = 0.1
    network_ms: float = 0.5
    slow_rank_image_ms: float = 0.0  # of rank 1, a third of it forward
    slow_loader_image_ms: float = 0.0  # of rank 1, more to read
    noise: float = 0.02
    drift: float = 0.01  # by which epochs differ
    epochs: int = 6
    steps: int = 40
    evaluation_ms: float = 20.0  # for the images of an epoch of 64 a step, as all that lies between epochs
    checkpoint_ms: float = 5.0
    other_ms: float = 5.0
    evaluate_every: int = 1
    clock: Callable[[int], float] = field(default=lambda epoch: 1.0)  # part of the full clock, by epoch
    load: Callable[[int], float] = field(default=lambda epoch: 1.0)  # how much longer a kernel takes beside another job
    service: int | None = None
    accumulate: int = 1
    memory_mib: float = 20_000.0
    gpu_memory_mib: float = 81_920.0
    node_cpu_pct: float = 50.0
    swap_mib_per_s: float | None = None
    throttled_from_start: bool = False
    train_images: int = 1_000_000
    timing: bool = False  # without epochs' ends


class Loader:
    """One rank's loader: threads take chunks of submitted batches, in order."""

    def __init__(self, p: Pipeline, rng: np.random.Generator, began_ms: float) -> None:
        self._p, self._rng, self._submitted, self.took_ms = p, rng, 0, 0.0
        self._free = [began_ms] * max(1, p.threads)
        self._ready: list[float] = []

    def batch(self, number: int, requested_ms: float) -> float:
        """When a batch requested at this time is ready."""
        while self._submitted <= min(number + (self._p.ahead if self._p.threads else 0), self._p.steps - 1):
            self._submit(requested_ms)
        return self._ready[number]

    def _submit(self, at_ms: float) -> None:
        p, done = self._p, [at_ms]
        chunks = CHUNKS * max(1, p.threads)
        for rows in (len(part) for part in np.array_split(np.arange(p.batch), min(chunks, p.batch))):
            image_ms = p.read_image_ms + p.decode_image_ms + p.lock_image_ms
            took = image_ms * rows * max(0.2, 1 + self._rng.normal(0, p.image_sd / np.sqrt(rows)))
            took += 50 * p.read_image_ms * float(self._rng.binomial(rows, p.tail)) if p.tail else 0.0
            begin = max(at_ms, heapq.heappop(self._free))
            heapq.heappush(self._free, begin + took)
            done.append(begin + took)
            self.took_ms += took
        self._ready.append(max(done))
        self._submitted += 1


class Sums:
    """What a rank's records add up: milliseconds of each phase, and each step's wait for the all-reduce."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = defaultdict(float)
        self.waits_ms: list[float] = []
        self.steps, self.busy_ms, self.took_ms = 0, 0.0, 0.0

    def add(self, other: Sums) -> None:
        for name, ms in other.ms.items():
            self.ms[name] += ms
        self.waits_ms += other.waits_ms
        self.steps, self.busy_ms, self.took_ms = (
            self.steps + other.steps,
            self.busy_ms + other.busy_ms,
            self.took_ms + other.took_ms,
        )

    def metrics(self, p: Pipeline) -> dict[str, float]:
        found = {f"{name}_ms": self.ms[name] / self.steps for name in (*PHASES, "step", "loader_wait")}
        found["loader_batch_ms"] = self.took_ms / self.steps / max(1, p.threads)
        if p.workers > 1:
            found |= {
                "allreduce_wait_ms": float(np.mean(self.waits_ms)),
                "allreduce_wait_error_ms": standard_error(self.waits_ms),
            }
        return found


def train(p: Pipeline, rng: np.random.Generator, epoch: int) -> tuple[list[Sums], float]:
    """An epoch's steps: what each rank records, and how long they take."""
    sums = [Sums() for _ in range(p.workers)]
    slow = replace(p, read_image_ms=p.read_image_ms + p.slow_loader_image_ms)
    loaders = [Loader(slow if r == 1 else p, rng, 0.0) for r in range(p.workers)]
    end, copied = [0.0] * p.workers, [[0.0] * 2 for _ in range(p.workers)]
    began: list[list[float]] = [[0.0, 0.0] for _ in range(p.workers)]
    slower = p.load(epoch) / p.clock(epoch) * max(0.5, 1 + rng.normal(0, p.drift))
    for step in range(p.steps):
        at, busy = list(end), [0.0] * p.workers
        phase: list[dict[str, float]] = [{} for _ in range(p.workers)]

        def work(
            rank: int,
            name: str,
            fixed_ms: float,
            kernel_ms: float,
            at: list[float] = at,
            busy: list[float] = busy,
            phase: list[dict[str, float]] = phase,
        ) -> None:
            """A GPU works while the host launches: the longer one counts. A CPU does one after the other."""
            kernel_ms *= slower * max(0.2, 1 + rng.normal(0, p.noise))
            took = max(fixed_ms, kernel_ms) if p.gpu else fixed_ms * slower + kernel_ms
            busy[rank] += min(kernel_ms, took) if p.gpu else 0.0
            phase[rank][name] = phase[rank].get(name, 0.0) + took
            at[rank] += took

        for r in range(p.workers):
            if p.gpu:  # the host is a step ahead: it hands batch k out once it has batch k + 1
                requested = began[r][-1]
                ready = loaders[r].batch(min(step + 1, p.steps - 1), requested)
                waited = max(0.0, ready - requested)
                handed = max(ready, end[r])
                if not step:
                    copied[r][0] = ready + p.copy_image_ms * p.batch
                arrived = max(handed, copied[r][0])
                copied[r][0] = max(ready, end[r], copied[r][0]) + p.copy_image_ms * p.batch  # of batch k + 1
                phase[r] |= {"data": handed - end[r], "h2d": arrived - handed}
                at[r] = arrived
            else:
                ready = loaders[r].batch(step, end[r])
                waited = max(0.0, ready - end[r])
                copy_ms = p.copy_image_ms * p.batch
                phase[r] |= {"data": waited, "h2d": copy_ms}
                at[r] = end[r] + waited + copy_ms
            sums[r].ms["loader_wait"] += waited if p.threads else 0.0
            began[r] = [began[r][-1], at[r]]
            work(r, "augment", 0.0, p.augment_image_ms * p.batch)
            if p.service is None:
                work(r, "teacher", p.accumulate * p.teacher_fixed_ms, p.teacher_image_ms * p.batch)
        forward = list(at)
        for r in range(p.workers):
            late = max(0.0, forward[0] - at[r])  # rank 0 gives all ranks its batch statistics
            at[r] += late
            phase[r]["student"] = late
            extra = p.slow_rank_image_ms * p.batch if r == 1 else 0.0
            work(r, "student", p.accumulate * p.student_fixed_ms, p.student_image_ms * p.batch + extra / 3)
            work(r, "backward", p.accumulate * p.backward_fixed_ms, p.backward_image_ms * p.batch + 2 * extra / 3)
        network = p.network_ms * max(0.3, 1 + rng.normal(0, 0.1)) if p.workers > 1 else 0.0
        reduced = max(at) + network
        for r in range(p.workers):
            wait = reduced - at[r] if p.workers > 1 else 0.0
            sums[r].waits_ms.append(wait)
            phase[r]["backward"] += wait
            at[r] += wait
            work(r, "optimizer", 0.0, p.optimizer_ms)
            at[r] += p.rest_ms
            for name, ms in phase[r].items():
                sums[r].ms[name] += ms
            sums[r].ms["step"] += at[r] - end[r]
            sums[r].busy_ms += busy[r] + (wait if p.gpu else 0.0)  # NCCL waits in a kernel
            sums[r].steps += 1
            end[r] = at[r]
    for r in range(p.workers):
        sums[r].took_ms = loaders[r].took_ms
    return sums, max(end)


def ms_per_image(p: Pipeline, seed: int = 0) -> float:
    """What an image takes by the clock in the last third of the epochs, all that lies between them included."""
    rng, late = np.random.default_rng(seed), range(p.epochs - max(1, p.epochs // 3), p.epochs)
    took_ms = sum(train(p, rng, epoch)[1] for epoch in late)
    return took_ms / (len(late) * p.steps * p.batch * p.workers) + between_ms_per_image(p)


def between_ms_per_image(p: Pipeline) -> float:
    """Evaluations, checkpoints and the rest; a timing run has none. They are for the images of an epoch of 64 a worker's step."""
    each_ms = p.evaluation_ms / p.evaluate_every + p.checkpoint_ms + p.other_ms
    return 0.0 if p.timing else each_ms / (p.steps * 64 * p.workers)


def run(p: Pipeline, seed: int = 0) -> Recording:
    """The records of the whole training."""
    rng = np.random.default_rng(seed)
    whole = [Sums() for _ in range(p.workers)]
    lines: list[dict[str, Any]] = [
        {
            "kind": "start",
            "step": 0,
            "metrics": {"steps_per_epoch": p.steps, "epochs": p.epochs, "samples_per_epoch": p.train_images},
        }
    ]
    clock_s, telemetry = defaultdict[str, float](float), dict[str, float]()
    # An epoch of smaller batches is a part of one: it has its part of what lies between epochs.
    part = p.batch / 64
    between_ms = {
        "eval": part * p.evaluation_ms / p.evaluate_every,
        "checkpoint": part * p.checkpoint_ms,
        "other": part * p.other_ms,
    }
    for epoch in range(p.epochs):
        sums, epoch_ms = train(p, rng, epoch)
        for all_of_it, one in zip(whole, sums, strict=True):
            all_of_it.add(one)
        telemetry = _telemetry(p, epoch, sums)
        means = {name: float(np.mean([one.metrics(p)[f"{name}_ms"] for one in sums])) for name in (*PHASES, "step")}
        step = (epoch + 1) * p.steps
        lines.append({"kind": "step", "step": step, "metrics": {f"train/phase/{name}_ms": ms for name, ms in means.items()}})
        if not p.timing:
            ended = {f"epoch/{name}": value for name, value in telemetry.items()}
            ended |= {"epoch/eval_s": between_ms["eval"] / 1e3, "val/num_images": 1000.0}
            lines.append({"kind": "epoch", "step": step, "metrics": ended})
        for name, ms in ({"train": epoch_ms} | ({} if p.timing else between_ms)).items():
            clock_s[f"{name}_s"] += ms / 1e3
    summary = _summary(p, whole) | telemetry | ({} if p.timing else clock_s)
    return Recording("the student", evidence_of(_experiment(p), summary, lines, p.threads))


def _telemetry(p: Pipeline, epoch: int, sums: list[Sums]) -> dict[str, float]:
    found = {"node0/cpu_pct": p.node_cpu_pct, "node0/disk_read_mib_per_s": 20.0 if p.read_image_ms else 0.0}
    if p.swap_mib_per_s is not None:
        found["node0/swap_in_mib_per_s"] = p.swap_mib_per_s
    if p.gpu:
        for r, one in enumerate(sums):
            cold, throttled = p.clock(epoch), p.clock(epoch) < 0.995
            gpu = {
                "util_pct": 100 * min(1.0, one.busy_ms / one.ms["step"]),
                "temperature_c": 66.0 if not throttled else 82.0,
                "sm_clock_mhz": FULL_MHZ * cold,
                "sm_clock_limit_mhz": FULL_MHZ if p.throttled_from_start else LIMIT_MHZ,
                "throttle_reasons": 0x24 if throttled else 0x4,
                "throttled_pct": 100.0 if throttled else 0.0,
            }
            found |= {f"node0/gpu{r}/{name}": value for name, value in gpu.items()}
    return found


def _summary(p: Pipeline, whole: list[Sums]) -> dict[str, float]:
    ranks = [one.metrics(p) for one in whole]
    found = {
        f"phase/{name}": float(np.mean([rank[name] for rank in ranks])) for name in ranks[0] if not name.startswith("loader")
    }
    if p.workers > 1:
        found["phase/allreduce_ms"], for_ranks_ms = split_waits([dict(enumerate(one.waits_ms)) for one in whole])
        found |= {f"rank{r}/waits_for_ranks_ms": wait_ms for r, wait_ms in enumerate(for_ranks_ms)}
        found |= {f"rank{r}/{name}": value for r, rank in enumerate(ranks) for name, value in rank.items()}
    image_ms = sum(one.took_ms for one in whole) / sum(one.steps * p.batch for one in whole)
    read_ms = p.read_image_ms * (1 + 50 * p.tail) + p.slow_loader_image_ms / p.workers
    nominal_ms = read_ms + p.decode_image_ms + p.lock_image_ms
    scale = image_ms / nominal_ms if nominal_ms else 0.0
    costs = {
        "image": image_ms,
        "read_wait": scale * read_ms,
        "cpu": scale * p.decode_image_ms,
        "core_wait": 0.0,
    }
    found |= {f"loader/{name}_ms": ms for name, ms in costs.items()} | {"loader/threads": float(max(1, p.threads))}
    found |= {"loader/copy_ms": p.copy_image_ms * p.batch} if p.gpu else {}
    found |= {f"loader/{name}_ms": float(np.mean([rank[f"loader_{name}_ms"] for rank in ranks])) for name in ("batch", "wait")}
    slow = p.load(p.epochs - 1) / p.clock(p.epochs - 1)
    if p.gpu:
        found |= {"peak_memory_mib": p.memory_mib, "gpu_memory_mib": p.gpu_memory_mib}

    def passes_ms(num_images: int) -> float:
        together = max if p.gpu else operator.add
        parts = [(p.student_fixed_ms, p.student_image_ms), (p.backward_fixed_ms, p.backward_image_ms)]
        parts += [(p.teacher_fixed_ms, p.teacher_image_ms)] if p.service is None else []
        passes = sum(together(fixed_ms, num_images * image_ms) for fixed_ms, image_ms in parts)
        return slow * (passes + num_images * p.augment_image_ms)

    micro_batch = max(1, p.batch // p.accumulate)
    larger = {f"passes/{n}_images_ms": passes_ms(n) for n in (micro_batch * 2**power for power in range(7))}
    return found | {"one_image_ms": passes_ms(1)} | larger


def _experiment(p: Pipeline) -> Experiment:
    service = [f"teacher.service={p.service}"] if p.service else []
    return _loaded(p.workers, p.batch * p.workers, p.accumulate, p.threads, tuple(service))


@cache
def _loaded(workers: int, global_batch: int, accumulate: int, threads: int, more: tuple[str, ...]) -> Experiment:
    sets = [
        f"scale.num_workers={workers}",
        f"data.global_batch_size={global_batch}",
        f"optim.accumulate={accumulate}",
        f"data.loader_workers={threads}",
        *more,
    ]
    return load("digits", sets).experiment


def step_ms(p: Pipeline) -> float:
    """What a healthy step takes: what faults are measured in."""
    return ms_per_image(replace(p, timing=True)) * p.batch * p.workers


def seed_of(*names: str) -> int:
    """A number of its own for each case."""
    return zlib.crc32(" ".join(names).encode())
