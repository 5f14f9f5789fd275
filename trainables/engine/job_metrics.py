"""What is measured of a job on one rank."""

from dataclasses import dataclass

from trainables.config import TrainConfig
from trainables.engine.checkpoint import Progress
from trainables.engine.step_functions import StepFunctions
from trainables.metrics.allreduce_wait import AllreduceWait
from trainables.metrics.heartbeat import Heartbeat
from trainables.metrics.host_use import HostUse
from trainables.metrics.noise_scale import NoiseHistory
from trainables.metrics.peak_memory import PeakMemory
from trainables.metrics.phase_timer import PhaseTimer
from trainables.metrics.throughput import Throughput
from trainables.metrics.wall_clock import WallClock


@dataclass(kw_only=True)
class JobMetrics:
    """What is measured of a job on this rank."""

    timer: PhaseTimer
    host: HostUse
    throughput: Throughput
    clock: WallClock
    noise: NoiseHistory
    allreduce_wait: AllreduceWait
    peak_memory: PeakMemory
    heartbeat: Heartbeat

    def start_step(self, step: int) -> None:
        """A step begins, after `step` others: it first waits for its batch."""
        self.heartbeat.begin_step(step)
        self.timer.start()
        self.host.start()

    def stop_step(self) -> None:
        self.timer.stop()
        self.host.stop()
        self.allreduce_wait.end_step()
        self.heartbeat.end_step()


def build_metrics(config: TrainConfig, functions: StepFunctions, progress: Progress, heartbeat: Heartbeat) -> JobMetrics:
    """What is measured of a job, continued from `progress`."""
    train_state = functions.train_state
    device = train_state.group.device
    # Where there are several epochs the first one is left out: it fills caches, and its disk reads are cold.
    several_epochs = config.train.max_steps is None and config.optim.epochs - progress.epoch > 1
    warmup_steps = max(config.train.warmup_steps, train_state.epochs.steps_per_epoch if several_epochs else 0)
    # Never before the first step, which searches; by default before the warm-up's last one, so that no step measured is slow.
    first_memory_step = progress.step + (warmup_steps if several_epochs else max(warmup_steps - 1, 1))
    return JobMetrics(
        timer=PhaseTimer(device, warmup_steps=warmup_steps, heartbeat=heartbeat),
        host=HostUse(warmup_steps),
        throughput=Throughput(progress.step + warmup_steps, warm=progress.warm, cold=progress.cold),
        clock=WallClock(progress.wall, progress.epoch_wall, heartbeat=heartbeat),
        noise=NoiseHistory(progress.noise),
        allreduce_wait=AllreduceWait(train_state.update.allreduce_clocks, device, warmup_steps=warmup_steps),
        peak_memory=PeakMemory(device, first_memory_step, in_graphs=train_state.compilation.uses_cuda_graphs),
        heartbeat=heartbeat,
    )
