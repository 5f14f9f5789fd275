"""Trainings with a teacher service: the losses of a network on the worker, whatever dies, and no image computed twice."""

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainables.jobs import Recorded, equal, no_telemetry, relative_difference, train, write_teacher
from tests.trainables.teachers.cache.test_cached_teacher import losses_of, of_photos, ran_for, refusal
from tests.trainables.teachers.cache.test_cached_teacher import settings as cache_settings
from tests.trainables.teachers.cache.test_key import folder
from tests.trainables.teachers.service.local_service import LocalConnection, local_services
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.train import build, run_job
from trainables.errors import CheckpointError, ClusterError
from trainables.teachers.interface import TeacherRequest
from trainables.teachers.service import client as client_module
from trainables.teachers.service.client import PREFETCH_BATCHES, ServiceTeacher
from trainables.teachers.service.protocol import RowsRequest, RowsResponse, TeacherConnection

ROWS = 1442
ALONE = Group()


def settings(folder: Path, name: str, *, teacher: dict[str, Any] | None = None, **sections: Any) -> TrainConfig:
    """A job with a teacher service."""
    return cache_settings(folder, name, teacher={"cache": None, "service": 1, **(teacher or {})}, **sections)


def live(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    return train(Group(), settings(folder, name, teacher={"service": None}, **sections))


def served(config: TrainConfig, connections: Sequence[TeacherConnection], group: Group = ALONE) -> dict[str, Any]:
    report = Recorded()
    with contextlib.closing(build(config, group, report, no_telemetry, connections=connections)) as job:
        run_job(job)
        state = {name: tensor.detach().clone() for name, tensor in job.student.state_dict().items()}
    return {"calls": report.calls, "state": state}


@pytest.mark.parametrize(
    ("count", "precision", "within"),
    [(1, "fp32", 1e-5), (3, "fp64", 1e-12)],
)
def test_a_student_of_a_service_learns_what_it_learns_from_a_network(
    tmp_path: Path, precision: str, within: float, count: int
) -> None:
    peer = live(tmp_path, "live", precision=precision, train={"log_every": 1})
    with local_services(count) as connections:
        ours = served(settings(tmp_path, "ours", precision=precision, train={"log_every": 1}), connections)
    assert losses_of(ours) == pytest.approx(losses_of(peer), abs=within)
    assert relative_difference(ours["state"], peer["state"]) < 100 * within
    assert ran_for(ours) == [ROWS, ROWS]


def test_several_students_at_once_cause_one_computation_of_each_image(tmp_path: Path) -> None:
    reports = [Recorded() for _ in range(3)]
    configs = [settings(tmp_path, f"student{n}", data={"global_batch_size": 50 + 7 * n}, epochs=1) for n in range(3)]
    with local_services(2) as connections, contextlib.ExitStack() as jobs:
        built = [
            jobs.enter_context(contextlib.closing(build(config, Group(), report, no_telemetry, connections=connections)))
            for config, report in zip(configs, reports, strict=True)
        ]
        students = [threading.Thread(target=run_job, args=(job,)) for job in built]
        for student in students:
            student.start()
        for student in students:
            student.join()
        assert sum(connection.num_computed for connection in connections) == ROWS
    results = [{"calls": report.calls} for report in reports]
    assert [sum(counts) for counts in zip(*map(ran_for, results), strict=True)] == [ROWS]
    assert losses_of(results[1]) == pytest.approx(
        losses_of(live(tmp_path, "live", data={"global_batch_size": 57}, epochs=1)), abs=1e-12
    )


def with_its_own_service(group: Group, config: TrainConfig) -> dict[str, Any]:
    with local_services() as connections:
        return served(config, connections, group)


def test_two_ranks_request_their_own_parts(tmp_path: Path, ranks: RankPool) -> None:
    ours = ranks.run(2, with_its_own_service, settings(tmp_path, "ours"))[0]
    assert losses_of(ours) == pytest.approx(losses_of(live(tmp_path, "live")), abs=1e-12)
    assert ran_for(ours) == [ROWS, ROWS]


def test_without_augmentation_one_epoch_serves_all(tmp_path: Path) -> None:
    with local_services() as connections:
        plain = settings(tmp_path, "plain", epochs=3, data={"augment": "none", "device_augment": {}})
        assert ran_for(served(plain, connections)) == [ROWS, 0, 0]


def test_micro_batches_and_resumed_epochs_get_their_own_logits(tmp_path: Path) -> None:
    parts = {"optim": {"epochs": 2, "accumulate": 3}}
    config = settings(tmp_path, "ours")
    config = config.model_copy(update={"optim": config.optim.model_copy(update=parts["optim"])})
    alone = config.model_copy(update={"teacher": config.teacher and config.teacher.model_copy(update={"service": None})})
    peer = train(Group(), alone.model_copy(update={"output_dir": str(tmp_path / "peer")}))
    every = config.model_copy(update={"train": config.train.model_copy(update={"checkpoint_every": 3})})
    with local_services() as connections:
        report = Recorded(die_after=4)
        with (
            contextlib.closing(build(every, Group(), report, no_telemetry, connections=connections)) as job,
            pytest.raises(InterruptedError),
        ):
            run_job(job)
        ours = served(every, connections)
        assert sum(connection.num_computed for connection in connections) == 2 * ROWS
    assert relative_difference(ours["state"], peer["state"]) < 1e-10


def test_a_service_that_dies_and_comes_back_changes_nothing(tmp_path: Path) -> None:
    config = settings(tmp_path, "undisturbed", epochs=4)
    with local_services() as connections:
        undisturbed = served(config, connections)
    with local_services() as connections:
        over, computed = threading.Event(), list[int]()

        def disturb(connection: LocalConnection) -> None:
            while not over.wait(0.15 * 1.1 ** len(computed)):  # ever later: a slow machine must get on as well
                computed.append(connection.num_computed)
                connection.kill()
                time.sleep(0.05)
                connection.start()

        killer = threading.Thread(target=disturb, args=(connections[0],))
        killer.start()
        disturbed = served(config.model_copy(update={"output_dir": str(tmp_path / "disturbed")}), connections)
        over.set()
        killer.join()
    assert any(computed)  # at least one died that had responded before
    assert relative_difference(disturbed["state"], undisturbed["state"]) < 1e-12
    assert losses_of(disturbed) == pytest.approx(losses_of(undisturbed), abs=1e-12)


def test_a_service_that_stays_away_ends_the_training_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RESPONSE_TIMEOUT_S", 0.3)
    with (
        local_services() as connections,
        contextlib.closing(build(settings(tmp_path, "ours"), Group(), Recorded(), no_telemetry, connections=connections)) as job,
    ):
        connections[0].kill()
        with pytest.raises(ClusterError, match=r"teacher.service: no response for 0.3 s: check .* `distill resume`") as error:
            run_job(job)
    assert "\n" not in str(error.value)


def test_a_teacher_that_the_service_cannot_load_ends_the_training_in_its_line(tmp_path: Path) -> None:
    config = settings(tmp_path, "ours")
    with (
        local_services() as connections,
        contextlib.closing(build(config, Group(), Recorded(), no_telemetry, connections=connections)) as job,
    ):
        (tmp_path / "teacher.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"teacher.safetensors"):
            run_job(job)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_teacher_file_that_is_replaced_after_the_job_began_is_refused(tmp_path: Path, restarted: bool) -> None:
    config, weights = settings(tmp_path, "ours"), tmp_path / "teacher.safetensors"
    right = weights.read_bytes()
    with local_services() as connections:
        if restarted:
            served(settings(tmp_path, "before", epochs=1), connections)
        with contextlib.closing(build(config, Group(), Recorded(), no_telemetry, connections=connections)) as job:
            write_teacher(weights, seed=12)
            if restarted:
                connections[0].kill()
                connections[0].start()
            with pytest.raises(CheckpointError, match=r"teacher.safetensors: .* not the mlp_large that") as error:
                run_job(job)
        assert "\n" not in str(error.value)
        weights.write_bytes(right)
        assert ran_for(served(settings(tmp_path, "after", epochs=1), connections)) == [ROWS]


def refusal_with_a_service(group: Group, each: Sequence[TrainConfig]) -> str | None:
    with local_services() as connections:
        return refusal(group, each, connections)


def test_ranks_that_read_other_images_are_refused_in_one_line(tmp_path: Path, ranks: RankPool) -> None:
    each = [
        of_photos(tmp_path, "job", folder(tmp_path / name, seed), teacher={"cache": None, "service": 1})
        for name, seed in (("one", 0), ("other", 1))
    ]
    for line in ranks.run(2, refusal_with_a_service, each):
        assert re.match(r"teacher.service: \S+ has images of other names, sizes or contents on ", line)


def test_no_more_batches_are_requested_than_may_be_under_way(tmp_path: Path) -> None:
    class Silent(LocalConnection):
        async def __call__(self, request: RowsRequest) -> RowsResponse:
            return await asyncio.get_running_loop().create_future()

    with contextlib.closing(build(settings(tmp_path, "ours"), Group(), Recorded(), no_telemetry, connections=[Silent()])) as job:
        batches = job.train_state.teacher.prefetch(job.train_loader.epoch(0), 0)
        counts, images = list[int](), list[torch.Tensor]()
        for batch in batches:
            images.append(batch.images_BCHW)
            counts.append(len(job.train_state.teacher._pending))  # type: ignore[attr-defined]
        assert counts[0] == 2
        assert max(counts) == len(counts)  # nothing was taken: all of them are still to be
        assert [count - number for number, count in enumerate(counts)][:6] == [2, 3, 4, 5, 5, 5]
        assert PREFETCH_BATCHES + 1 == 5


def test_batches_that_wait_for_their_logits_keep_their_images(tmp_path: Path) -> None:
    config = settings(tmp_path, "ours", data={"global_batch_size": 20, "loader_workers": 2})
    peer = settings(tmp_path, "peer", teacher={"service": None}, data={"global_batch_size": 20, "loader_workers": 2})
    with (
        local_services() as connections,
        contextlib.closing(build(config, Group(), Recorded(), no_telemetry, connections=connections)) as ours,
        contextlib.closing(build(peer, Group(), Recorded(), no_telemetry)) as theirs,
    ):
        batches = ours.train_state.teacher.prefetch(ours.train_loader.epoch(0), 0)
        before = None
        for batch, other in zip(batches, theirs.train_loader.epoch(0), strict=True):
            time.sleep(0.001)  # the loader's threads overwrite what they may
            assert torch.equal(batch.images_BCHW, other.images_BCHW)
            if before is not None:
                assert np.array_equal(before[0], before[1])
            before = batch.images_BCHW.numpy(), batch.images_BCHW.clone().numpy()


def test_the_same_training_twice_computes_nothing_new_and_ends_equal(tmp_path: Path) -> None:
    with local_services() as connections:
        first, second = (served(settings(tmp_path, name), connections) for name in ("first", "second"))
    assert ran_for(second) == [0, 0]
    assert equal(first["state"], second["state"])


def test_a_batch_without_images_requests_nothing_and_the_next_one_has_its_own_rows(tmp_path: Path) -> None:
    """The evaluation leaves such a batch out; a step runs on it."""
    with (
        local_services() as connections,
        contextlib.closing(build(settings(tmp_path, "ours"), Group(), Recorded(), no_telemetry, connections=connections)) as job,
    ):
        teacher = job.train_state.teacher
        whole, *_ = job.train_loader.epoch(0)
        whole = whole._replace(
            images_BCHW=whole.images_BCHW.clone(), labels_B=whole.labels_B.clone(), views_B=whole.views_B.clone()
        )
        empty = whole._replace(images_BCHW=whole.images_BCHW[:0], labels_B=whole.labels_B[:0], views_B=whole.views_B[:0])
        batches = teacher.prefetch((batch for batch in (empty, whole)), 0)
        assert len(next(batches).labels_B) == 0
        assert len(teacher(empty.images_BCHW, 0, TeacherRequest(empty.indices_B, 0))["kd"].logits_BK) == 0
        batch = next(batches)
        taught = teacher(batch.images_BCHW, len(batch.labels_B), TeacherRequest(batch.indices_B, 0))["kd"].logits_BK
        assert taught.shape == (len(whole.labels_B), 10)


@pytest.mark.gpu
def test_on_a_gpu_a_step_takes_its_logits_without_waiting_for_the_device(tmp_path: Path) -> None:
    group = Group(device=torch.device("cuda"))
    with (
        local_services() as connections,
        contextlib.closing(build(settings(tmp_path, "ours"), group, Recorded(), no_telemetry, connections=connections)) as job,
    ):
        teacher = job.train_state.teacher
        assert isinstance(teacher, ServiceTeacher)
        batch = next(teacher.prefetch(job.train_loader.epoch(0), 0))
        until_s = time.monotonic() + 60
        while not teacher._pending[0].response.done() and time.monotonic() < until_s:
            time.sleep(0.01)
        torch.cuda.set_sync_debug_mode("error")
        try:
            taught = teacher(batch.images_BCHW, len(batch.labels_B), TeacherRequest(batch.indices_B, 0))["kd"].logits_BK
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert (taught.shape, taught.device.type) == ((100, 10), "cuda")
