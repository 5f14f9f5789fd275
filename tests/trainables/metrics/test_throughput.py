"""Images per second over wall time, warm-up apart."""

import pytest

from trainables.metrics.throughput import Throughput


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_steady_speed_leaves_out_windows_that_began_before_the_warm_up_ended() -> None:
    clock = Clock()
    speed = Throughput(warmup_until=2, clock=clock)
    speed.begin(0)
    clock.now = 10.0
    assert speed.end(20, 2) == pytest.approx(2.0)
    clock.now = 11.0
    speed.end(50, 7)
    clock.now = 100.0  # an evaluation lies between the windows
    speed.begin(7)
    clock.now = 102.0
    speed.end(40, 11)
    summary = speed.summary()
    assert summary["images_per_s"] == pytest.approx(90 / 3)
    assert summary["step_s"] == pytest.approx(3 / 9)
    assert summary["warmup_s"] == pytest.approx(10.0)


def test_a_run_shorter_than_its_warm_up_still_has_a_speed() -> None:
    clock = Clock()
    speed = Throughput(warmup_until=5, clock=clock)
    speed.begin(0)
    clock.now = 2.0
    speed.end(10, 1)
    assert speed.summary() == {"images_per_s": 5.0, "step_s": 2.0, "steady_steps": 0.0, "warmup_s": 0.0}
    assert Throughput(warmup_until=0).summary() == {}
