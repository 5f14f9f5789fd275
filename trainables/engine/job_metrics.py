"""The measurements of a job on one rank."""

from dataclasses import dataclass
from typing import Any

from trainables.config import TrainConfig
from trainables.device.compilation import Compilation
from trainables.distributed.group import Group
from trainables.engine.checkpoint import CheckpointState
from trainables.engine.passes import Epochs
from trainables.metrics.allreduce_wait import AllreduceWait
from trainables.metrics.clock import clock_of
from trainables.metrics.heartbeat import Heartbeat
from trainables.metrics.host_use import HostUse
from trainables.metrics.noise_scale import NoiseHistory
from trainables.metrics.peak_memory import PeakMemory
from trainables.metrics.phase_timer import PhaseTimer
from trainables.metrics.throughput import Throughput
from trainables.metrics.wall_clock import WallClock


@dataclass(kw_only=True)
class JobMetrics:
    """All meters of a job on this rank."""

    timer: PhaseTimer
    host: HostUse
    throughput: Throughput
    clock: WallClock
    noise: NoiseHistory
    allreduce_wait: AllreduceWait
    peak_memory: PeakMemory
    heartbeat: Heartbeat

    def start_step(self, step: int) -> None:
        """Begin the step with index `step`, which first waits for its batch."""
        self.peak_memory.before_step(step)
        self.heartbeat.begin_step(step)
        self.timer.start()
        self.host.start()

    def stop_step(self) -> None:
        self.timer.stop()
        self.host.stop()
        self.allreduce_wait.end_step()
        self.heartbeat.end_step()

    def collect(self) -> None:
        """Read the times of steps that the device has finished."""
        self.timer.collect()
        self.allreduce_wait.collect()

    def state(self) -> dict[str, Any]:
        """Return plain data from which a resumed job continues."""
        return {"throughput": self.throughput.state(), "clock": self.clock.state(), "noise": self.noise.state()}


def build_metrics(config: TrainConfig, group: Group, epochs: Epochs, heartbeat: Heartbeat, state: CheckpointState) -> JobMetrics:
    """Build the meters, which continue from the checkpoint in `state`, if any."""
    saved, progress = state.metrics, state.progress
    device = group.device
    # With several epochs, leave out the first one: it fills caches and reads from a cold disk.
    several_epochs = config.train.max_steps is None and epochs.num - progress.epoch > 1
    warmup_steps = max(config.train.warmup_steps, epochs.steps_per_epoch if several_epochs else 0)
    # The first step searches kernels, and a reset slows the step after it: so reset in the warm-up, but after the first step.
    first_memory_step = progress.step + (warmup_steps if several_epochs else max(warmup_steps - 1, 1))
    warmup_until, speed = progress.step + warmup_steps, saved.get("throughput")
    return JobMetrics(
        timer=PhaseTimer(device, warmup_steps=warmup_steps, heartbeat=heartbeat),
        host=HostUse(warmup_steps),
        throughput=Throughput(clock_of(device), group.world_size, warmup_until=warmup_until, saved=speed),
        clock=WallClock(saved.get("clock"), heartbeat=heartbeat),
        noise=NoiseHistory(saved.get("noise")),
        allreduce_wait=AllreduceWait(device, warmup_steps=warmup_steps),
        peak_memory=PeakMemory(device, first_memory_step, in_graphs=Compilation.of(config).uses_cuda_graphs),
        heartbeat=heartbeat,
    )
