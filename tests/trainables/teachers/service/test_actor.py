"""The actor without a training: each row computed once for all clients, and what a full memory and failures do."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.trainables.teachers.service.local_service import LocalConnection, LocalImages, local_services
from tests.trainables.teachers.service.test_client import settings
from tests.waiting import wait_until
from trainables.errors import CheckpointError, TeacherServiceLostError
from trainables.teachers.rows import RowFormat, Rows
from trainables.teachers.service.actor import TeacherActor
from trainables.teachers.service.protocol import RowsRequest, RowsResponse, ServedModel

ROW = np.dtype([("sample", "int32"), ("pixel", "uint8"), ("epoch", "int32")])
ROW_BYTES = ROW.itemsize + 350  # with a row's entry


def expected(samples: NDArray[np.int64], epoch: int = 0) -> Rows:
    rows = np.empty(len(samples), ROW)
    rows["sample"], rows["pixel"], rows["epoch"] = samples, samples % 251, epoch
    return rows


class Numbered:
    """A network whose row of an image is its sample, its only pixel and the epoch; counts what it runs for."""

    def __init__(self) -> None:
        self.ran: list[tuple[int, int]] = []
        self.fails = False
        self.may_run = threading.Event()
        self.may_run.set()

    def __call__(
        self, images_nHWC: NDArray[np.uint8], samples_n: NDArray[np.int64], epoch: int | None
    ) -> Callable[[], NDArray[Any]]:
        assert epoch is not None
        pixels_n = images_nHWC[:, 0, 0, 0]
        self.may_run.wait()
        if self.fails:
            raise ArithmeticError("the teacher cannot")
        self.ran += [(epoch, int(sample)) for sample in samples_n]
        rows_n = expected(samples_n, epoch)
        rows_n["pixel"] = pixels_n
        return lambda: rows_n


class Served:
    """An actor that runs a `Numbered`."""

    def __init__(self, connection: LocalConnection, network: Numbered) -> None:
        self.connection, self.network = connection, network

    def request(self, samples: NDArray[np.int64], epoch: int = 0, key: str = "key") -> "tuple[Future[RowsResponse], LocalImages]":
        """Begin a request."""
        images = LocalImages((samples % 251).astype(np.uint8)[:, None, None, None].repeat(3, axis=3))
        return self.begin(samples, images, epoch, key), images

    def begin(self, samples: NDArray[np.int64], images: LocalImages, epoch: int = 0, key: str = "key") -> "Future[RowsResponse]":
        return self.connection.begin("rows", RowsRequest(ServedModel(key, {"of": key}, (), None), epoch, samples, images))

    def fetch(self, samples: NDArray[np.int64], epoch: int = 0, key: str = "key") -> RowsResponse:
        return self.request(samples, epoch, key)[0].result(5)


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    network = Numbered()
    with local_services(build=lambda model: network, **getattr(request, "param", {})) as (connection,):
        yield Served(connection, network)


def is_right(response: RowsResponse, samples: NDArray[np.int64], epoch: int = 0) -> bool:
    return np.array_equal(response.rows_B, expected(samples, epoch))


def test_many_clients_that_request_the_same_at_once_cause_one_computation(served: Served) -> None:
    order = np.random.default_rng(0).permutation(1000)

    def student(number: int) -> int:
        computed = 0
        for epoch in range(2):
            for part in np.array_split(order, 20):
                samples = np.random.default_rng(number).permutation(part)
                response = served.fetch(samples, epoch)
                assert is_right(response, samples, epoch)
                computed += response.num_computed
        return computed

    with ThreadPoolExecutor(8) as students:
        computed = sum(students.map(student, range(8)))
    assert sorted(served.network.ran) == [(epoch, sample) for epoch in range(2) for sample in range(1000)]
    assert computed == 2000
    assert served.connection.begin("counts").result(5) == {"computed": 2000, "returned": 16000}


def test_batches_that_overlap_compute_each_image_once(served: Served) -> None:
    def student(size: int) -> None:
        for start in range(0, 1000, size):
            samples = np.arange(start, min(start + size, 1000))
            assert is_right(served.fetch(samples), samples)

    with ThreadPoolExecutor(4) as students:
        list(students.map(student, (30, 41, 64, 100)))
    assert sorted(served.network.ran) == [(0, sample) for sample in range(1000)]


def test_images_are_fetched_only_where_a_row_is_neither_computed_nor_under_way(served: Served) -> None:
    served.network.may_run.clear()
    requests = [served.request(samples) for samples in (np.arange(10), np.arange(10)[::-1], np.arange(5, 15))]
    assert served.connection.begin("counts").result(5)["computed"] == 0  # by now all of them wait
    served.network.may_run.set()
    assert [future.result(5).num_computed for future, _ in requests] == [10, 0, 5]
    again = served.request(np.arange(15))
    assert again[0].result(5).num_computed == 0
    assert [images.num_fetches for _, images in (*requests, again)] == [1, 0, 1, 0]


def test_where_a_client_dies_with_its_images_those_of_another_are_computed(served: Served) -> None:
    lost, images = LocalImages(np.zeros((10, 1, 1, 3), np.uint8)), np.arange(10)
    lost.may_arrive.clear()
    dying, other = served.begin(images, lost), served.request(np.arange(5, 12))[0]
    assert served.connection.begin("counts").result(5)["computed"] == 0
    lost.are_lost = True
    lost.may_arrive.set()
    assert is_right(other.result(5), np.arange(5, 12))
    with pytest.raises(TeacherServiceLostError, match="its images are lost: ConnectionError"):
        dying.result(5)
    assert is_right(served.fetch(np.arange(12)), np.arange(12))


def test_a_request_that_is_cancelled_harms_no_other_that_waits_for_the_same_rows(served: Served) -> None:
    served.fetch(np.array([99]))
    served.network.may_run.clear()
    requests = [served.request(np.arange(size))[0] for size in (10, 5, 10)]
    assert served.connection.begin("counts").result(5)["computed"] == 1  # by now all of them wait
    for cancelled in requests[:2]:
        cancelled.cancel()
    served.network.may_run.set()
    assert is_right(requests[2].result(5), np.arange(10))


@pytest.mark.parametrize("served", [{"memory_bytes": 100 * ROW_BYTES}], indirect=True)
def test_the_oldest_logits_make_room_and_are_computed_again(served: Served) -> None:
    for start in (0, 50, 100):
        served.fetch(np.arange(start, start + 50))
    assert served.fetch(np.arange(50, 150)).num_computed == 0
    assert served.fetch(np.arange(50)).num_computed == 50
    assert is_right(served.fetch(np.arange(150)), np.arange(150))


@pytest.mark.parametrize("served", [{"memory_bytes": 7 * ROW_BYTES}], indirect=True)
def test_a_batch_larger_than_the_memory_gets_its_logits_all_the_same(served: Served) -> None:
    for epoch in range(3):
        assert is_right(served.fetch(np.arange(40), epoch), np.arange(40), epoch)
    assert is_right(served.fetch(np.arange(20, 60), 2), np.arange(20, 60), 2)


def test_runs_with_a_key_of_their_own_share_the_network_and_no_logits(served: Served) -> None:
    assert [served.fetch(np.arange(10), key=key).num_computed for key in ("key", "key-trial", "key-trial")] == [10, 10, 0]


def test_a_network_that_fails_fails_all_requests_that_wait_and_is_tried_again(served: Served) -> None:
    served.network.fails = True
    served.network.may_run.clear()
    samples = np.arange(8)
    waiting = [served.request(each)[0] for each in (samples, samples[::-1].copy())]
    assert served.connection.begin("counts").result(5)["returned"] == 0
    served.network.may_run.set()
    for future in waiting:
        with pytest.raises(ArithmeticError, match="the teacher cannot"):
            future.result(5)
    served.network.fails = False
    assert is_right(served.fetch(samples), samples)


def test_a_teacher_that_cannot_be_loaded_raises_why_each_time() -> None:
    tries = list[int]()

    def build(model: ServedModel) -> Numbered:
        tries.append(1)
        raise FileNotFoundError("no such teacher")

    with local_services(build=build) as (connection,):
        for number in (1, 2):
            with pytest.raises(FileNotFoundError, match="no such teacher"):
                Served(connection, Numbered()).fetch(np.arange(10))
            assert len(tries) == number


def test_a_network_without_requests_is_gone_before_another_is_built_and_is_loaded_again() -> None:
    alive, loaded = weakref.WeakSet[Numbered](), list[str]()

    def build(model: ServedModel) -> Numbered:
        wait_until(lambda: gc.collect() >= 0 and not alive)  # a thread that has computed may still be about to let go of it
        loaded.append(model.settings["of"])
        network = Numbered()
        alive.add(network)
        return network

    with local_services(build=build, idle_timeout_s=0.0) as (connection,):
        served = Served(connection, Numbered())
        gc.freeze()  # a collection then looks at what this test makes, not at all that is imported
        try:
            computed = [served.fetch(np.arange(10), key=key).num_computed for key in ("one", "two", "one")]
        finally:
            gc.unfreeze()
    assert loaded == ["one", "two", "one"]
    assert computed == [10, 10, 0]  # logits stay right without their network


def test_it_has_full_products_also_where_its_container_allows_tf32() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        TeacherActor("cpu", 1)
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_teacher_that_does_not_exist_is_named(tmp_path: Path) -> None:
    plain = settings(tmp_path, "ours").model_dump(mode="json")
    (tmp_path / "teacher.safetensors").unlink()
    images, model = (
        LocalImages(np.zeros((3, 8, 8, 3), np.uint8)),
        ServedModel("key", plain, ("0", "1"), RowFormat(2, exact_logits="float64")),
    )
    with local_services() as (connection,), pytest.raises(CheckpointError, match=r"teacher.safetensors"):
        connection.begin("rows", RowsRequest(model, 0, np.arange(3), images)).result(30)
