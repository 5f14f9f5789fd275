"""Images per second over wall time, warm-up apart."""

import pytest

from trainables.metrics.clock import Clock
from trainables.metrics.throughput import Throughput


class Hands(Clock):
    """A clock that shows what it is set to, in seconds."""

    time_s = 0.0

    def now(self) -> float:
        return self.time_s


def test_steady_speed_leaves_out_windows_that_began_before_the_warm_up_ended() -> None:
    clock = Hands()
    speed = Throughput(clock, 1, warmup_until=2)
    speed.begin(0)
    clock.time_s = 10.0
    assert speed.add(speed.end(2), 20) == pytest.approx(2.0)
    clock.time_s = 11.0
    speed.add(speed.end(7), 50)
    clock.time_s = 100.0  # an evaluation lies between the windows
    speed.begin(7)
    clock.time_s = 102.0
    speed.add(speed.end(11), 40)
    summary = speed.summary()
    assert summary["images_per_s"] == pytest.approx(90 / 3)
    assert summary["step_s"] == pytest.approx(3 / 9)
    assert summary["warmup_s"] == pytest.approx(10.0)


def test_a_window_may_be_added_after_the_next_one_has_begun() -> None:
    clock = Hands()
    speed = Throughput(clock, 1, warmup_until=0)
    speed.begin(0)
    clock.time_s = 1.0
    first = speed.end(4)
    clock.time_s = 3.0
    second = speed.end(8)
    assert (speed.add(first, 10), speed.add(second, 40)) == (10.0, 20.0)
    assert speed.summary()["images_per_s"] == pytest.approx(50 / 3)


def test_a_run_shorter_than_its_warm_up_still_has_a_speed() -> None:
    clock = Hands()
    speed = Throughput(clock, 1, warmup_until=5)
    assert speed.summary() == {}
    speed.begin(0)
    clock.time_s = 2.0
    speed.add(speed.end(1), 10)
    assert speed.summary() == {"images_per_s": 5.0, "step_s": 2.0, "steady_steps": 0.0, "warmup_s": 0.0}


def test_the_speed_is_that_of_the_workers_there_are_and_each_number_of_them_has_its_own() -> None:
    clock, saved = Hands(), None
    for world_size, images in ((2, 40), (3, 90), (2, 60)):
        speed = Throughput(clock, world_size, warmup_until=0, saved=saved)
        speed.begin(0)
        clock.time_s += 2.0
        speed.add(speed.end(4), images)
        saved = speed.state()
    assert speed.summary()["images_per_s"] == 25.0
