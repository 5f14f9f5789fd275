"""Batches on their way to the device: the same, in order, and never overwritten by what comes after."""

from collections.abc import Generator

import pytest
import torch

from trainables.data.loader.loader import Batch
from trainables.device.device_batches import on_device

NUM_BATCHES = 40


class ThriftyLoader:
    """Fills the memory of batch k again as soon as batch k+2 is taken, whoever still refers to it: earlier than any loader."""

    def __init__(self, shape: tuple[int, int, int, int], pin_memory: bool) -> None:
        self._buffers = [torch.empty(shape, dtype=torch.uint8, pin_memory=pin_memory) for _ in range(2)]
        self._pin_memory = pin_memory
        self.given = 0
        self.closed = False

    def batches(self) -> Generator[Batch, None, None]:
        try:
            for number in range(NUM_BATCHES):
                images = self._buffers[number % 2].fill_(number).permute(0, 3, 1, 2)
                labels = torch.full((len(images),), number)
                self.given += 1
                yield Batch(images, labels.pin_memory() if self._pin_memory else labels, labels + 1, 64 * (number + 1))
        finally:
            self.closed = True


def test_on_the_cpu_batches_pass_through_as_they_are_and_one_at_a_time() -> None:
    loader = ThriftyLoader((4, 2, 2, 3), pin_memory=False)
    for number, batch in enumerate(on_device(loader.batches(), torch.device("cpu"), epoch=7)):
        batch.wait()
        assert loader.given == number + 1
        assert batch.images_BCHW.data_ptr() == loader._buffers[number % 2].data_ptr()
        assert (batch.epoch, batch.position, batch.copied) == (7, 64 * (number + 1), None)
        assert batch.indices_B.tolist() == [number + 1] * 4
    assert loader.closed


def test_closing_early_closes_the_loader() -> None:
    loader = ThriftyLoader((4, 2, 2, 3), pin_memory=False)
    batches = on_device(loader.batches(), torch.device("cpu"))
    next(batches)
    batches.close()
    assert loader.closed


def test_an_error_of_the_loader_comes_through() -> None:
    def broken() -> Generator[Batch, None, None]:
        raise OSError("the disk is gone")
        yield

    with pytest.raises(OSError, match="the disk is gone"):
        next(on_device(broken(), torch.device("cpu")))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("pin_memory", [True, False])
def test_every_step_sees_its_own_batch_however_far_the_thread_is_ahead(pin_memory: bool) -> None:
    device = torch.device("cuda")
    loader = ThriftyLoader((256, 128, 128, 3), pin_memory)
    visited, taken, positions = [], [], []
    for batch in on_device(loader.batches(), device):
        batch.wait()
        torch.cuda._sleep(3_000_000)  # a slow step: the thread runs ahead of it
        visited.append(torch.stack([f(batch.images_BCHW.flatten()) for f in (torch.amin, torch.amax)]))
        visited.append(torch.stack([batch.labels_B[0], batch.indices_B[-1] - 1]))
        assert batch.images_BCHW.is_contiguous(memory_format=torch.channels_last)
        taken.append(loader.given)
        positions.append(batch.position)
        scratch = [torch.randint(255, batch.images_BCHW.shape, dtype=torch.uint8, device=device) for _ in range(3)]
        del scratch  # memory that the next copies may be given
    expected = [[number] * 2 for number in range(NUM_BATCHES) for _ in range(2)]
    assert torch.stack([pair.long() for pair in visited]).tolist() == expected
    assert positions == [64 * (number + 1) for number in range(NUM_BATCHES)]
    assert taken == [min(number + 2, NUM_BATCHES) for number in range(NUM_BATCHES)]  # one batch ahead
    assert loader.closed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_seconds_of_each_copy_are_reported_without_the_wait_for_the_step_before() -> None:
    seconds: list[float] = []
    for batch in on_device(ThriftyLoader((256, 128, 128, 3), True).batches(), torch.device("cuda"), on_copied=seconds.append):
        batch.wait()
        torch.cuda._sleep(30_000_000)  # a step of more than 10 ms
    assert len(seconds) == NUM_BATCHES - 1  # the last one is waited for on the device alone
    assert all(0 < took < 0.01 for took in seconds[1:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_step_that_takes_longer_than_a_copy_does_not_wait_for_it() -> None:
    device = torch.device("cuda")
    loader = ThriftyLoader((256, 224, 224, 3), pin_memory=True)
    events = []
    for batch in on_device(loader.batches(), device):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        batch.wait()
        after.record()
        torch.cuda._sleep(40_000_000)  # about 20 ms
        events.append((before, after))
    torch.cuda.synchronize()
    waits_ms = sorted(before.elapsed_time(after) for before, after in events[1:])
    assert waits_ms[len(waits_ms) // 2] < 0.1
    assert waits_ms[-1] < 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_on_the_device_is_that_of_three_batches() -> None:
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loader = ThriftyLoader((64, 128, 128, 3), pin_memory=True)
    for batch in on_device(loader.batches(), device):
        batch.wait()
    assert torch.cuda.max_memory_allocated() - before < 3.1 * 64 * 128 * 128 * 3
