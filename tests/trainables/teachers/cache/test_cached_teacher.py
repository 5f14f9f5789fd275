"""Training from cached logits: the same losses as with the network, the right teacher always, and what a kill leaves."""

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file

from service.config.experiment import load
from tests.trainables.data.decoders import DECODERS
from tests.trainables.jobs import (
    Recorded,
    config,
    equal,
    no_telemetry,
    relative_difference,
    train,
    write_able_teacher,
    write_teacher,
)
from tests.trainables.teachers.cache.test_key import folder
from tests.waiting import wait_until
from trainables.config import TrainConfig
from trainables.data import augment
from trainables.data.storage.free_space import format_bytes
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine import train as train_loop
from trainables.engine.train import build, run_job
from trainables.errors import CheckpointError, DataError, DistillError
from trainables.models.registry import build_model
from trainables.rundir import StageDir
from trainables.teachers.cache import cached_teacher, key
from trainables.teachers.cache.cached_teacher import CachedTeachers
from trainables.teachers.cache.store import RowStore
from trainables.teachers.interface import TeacherRequest
from trainables.teachers.service.protocol import TeacherConnection

AUGMENTED = {"image_size": 8, "augment": "pad_crop_flip", "device_augment": {"random_erasing": 0.5}}


def settings(folder: Path, name: str, *, epochs: int = 2, teacher: dict[str, Any] | None = None, **sections: Any) -> TrainConfig:
    """A job whose teacher's logits are cached in `folder`/cache."""
    weights = folder / "teacher.safetensors"
    if not weights.exists():
        write_teacher(weights)
    cached = {"weights": str(weights), "cache": str(folder / "cache"), **(teacher or {})}
    sections["data"] = {**AUGMENTED, **sections.get("data", {})}
    return config(folder / name, teacher=cached, optim={"epochs": epochs}, **sections)


@pytest.fixture(scope="module")
def filled_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filled")
    train(Group(), settings(folder, "first", epochs=1))
    return folder


@pytest.fixture
def filled(filled_once: Path, tmp_path: Path) -> Path:
    """A folder whose cache has an epoch of the logits of `settings`."""
    shutil.copytree(filled_once, tmp_path, dirs_exist_ok=True)
    return tmp_path


def losses_of(result: dict[str, Any]) -> list[float]:
    return [metrics["train/loss"] for kind, _, metrics in result["calls"] if kind == "step"]


def ran_for(result: dict[str, Any]) -> list[float]:
    """Of each epoch, the images for which the teacher ran."""
    return [metrics["epoch/train/teacher_images"] for kind, _, metrics in result["calls"] if kind == "epoch"]


def keys(folder: Path) -> set[str]:
    return {path.name for path in (folder / "cache").iterdir()}


def of_photos(folder: Path, name: str, images: Path | str, **sections: Any) -> TrainConfig:
    """A job on an image folder of `test_key.folder`; of its teacher `settings` knows only the weights."""
    weights = folder / "teacher.safetensors"
    if not weights.exists():
        save_file(build_model("mlp_large", num_classes=2, image_size=8, seed=11).state_dict(), weights)
    data = {"path": str(images), "global_batch_size": 3, **sections.pop("data", {})}
    return settings(folder, name, epochs=1, data=data, **sections)


def refusal(group: Group, each: Sequence[TrainConfig], connections: Sequence[TeacherConnection] = ()) -> str | None:
    """The line with which the build of this rank's job, on a node of its own, is refused."""
    try:
        build(each[group.rank], replace(group, local_rank=0), Recorded(), no_telemetry, connections=connections).close()
    except DistillError as error:
        return str(error)
    return None


def refusal_by_decoder(group: Group, each: Sequence[TrainConfig], decoders: Sequence[str]) -> str | None:
    """The same on nodes where different decoders are installed."""
    with patch.object(augment, "open_decoder", DECODERS[decoders[group.rank]]):
        return refusal(group, each)


def test_a_second_run_reads_what_the_first_wrote_and_learns_the_same(tmp_path: Path) -> None:
    live = train(Group(), settings(tmp_path, "live", teacher={"cache": None}))
    first, second = (train(Group(), settings(tmp_path, name)) for name in ("first", "second"))
    assert ran_for(first) == [1442, 1442]
    assert ran_for(second) == [0, 0]
    assert losses_of(second) == losses_of(first)
    assert equal(second["state"], first["state"])
    assert losses_of(second) == pytest.approx(losses_of(live), abs=1e-3)
    assert losses_of(second) != losses_of(live)
    assert relative_difference(second["state"], live["state"]) < 1e-2


MIXED: dict[str, Any] = {"device_augment": {"mixup": 0.4, "cutmix": 1.0}, "last_batch": "drop"}


def test_outputs_of_mixed_images_are_cached_for_every_even_batch_and_number_of_workers(tmp_path: Path, ranks: RankPool) -> None:
    live = train(Group(), settings(tmp_path, "live", teacher={"cache": None}, data=MIXED))
    first, second = (train(Group(), settings(tmp_path, name, data=MIXED)) for name in ("first", "second"))
    assert [ran_for(first), ran_for(second)] == [[1400, 1400], [0, 0]]
    assert losses_of(second) == losses_of(first) == pytest.approx(losses_of(live), abs=1e-3)
    assert equal(second["state"], first["state"])
    assert ran_for(ranks.run(2, train, settings(tmp_path, "two", data={**MIXED, "global_batch_size": 56}))[0]) == [0, 0]
    # an order of its own has other partners, and a folder of its own
    assert ran_for(train(Group(), settings(tmp_path, "stored", epochs=1, data={**MIXED, "shuffle": "none"}))) == [1400]


def test_a_row_of_another_partner_is_computed_again(tmp_path: Path) -> None:
    train(Group(), settings(tmp_path, "first", epochs=1, data=MIXED))
    odd = settings(tmp_path, "odd", epochs=1, data={**MIXED, "global_batch_size": 91})
    live = settings(tmp_path, "live", epochs=1, teacher={"cache": None}, data={**MIXED, "global_batch_size": 91})
    with patch.object(train_loop, "first_problem", lambda config, rules: None):  # odd batches part the pairs
        cached, network = train(Group(), odd), train(Group(), live)
    assert ran_for(cached) == [1365]
    assert losses_of(cached) == pytest.approx(losses_of(network), abs=1e-3)


def test_mixed_images_whose_augmentations_repeat_are_read_from_the_first_epochs(tmp_path: Path) -> None:
    assert ran_for(train(Group(), settings(tmp_path, "job", epochs=3, teacher={"cache_epochs": 1}, data=MIXED))) == [1400, 0, 0]


@pytest.mark.parametrize("method", ["kd", pytest.param("rkd", marks=pytest.mark.slow)])
def test_several_teachers_are_cached_each_in_a_folder_of_its_own(tmp_path: Path, method: str) -> None:
    for seed in (11, 12):
        write_able_teacher(tmp_path / f"{seed}.safetensors", seed=seed)

    def job(name: str, cache: Path | None) -> TrainConfig:
        each = [{"model": "mlp_large", "weights": f"{tmp_path}/{seed}.safetensors", "share": seed} for seed in (11, 12)]
        teachers = [{**teacher, "cache": cache and str(cache)} for teacher in each]
        return config(
            tmp_path / name,
            teacher=None,
            teachers=teachers,
            data=AUGMENTED,
            optim={"epochs": 2},
            distill={"method": [method], "options": {}},
            teacher_records=str(tmp_path),
        )

    live = train(Group(), job("live", None))
    first, second = (train(Group(), job(name, tmp_path / "cache")) for name in ("first", "second"))
    assert [ran_for(first), ran_for(second)] == [[1442, 1442], [0, 0]]
    assert losses_of(second) == losses_of(first) == pytest.approx(losses_of(live), abs=1e-3)
    assert equal(second["state"], first["state"])
    assert len(keys(tmp_path)) == 2


@pytest.mark.parametrize("top_k", [2, 10])
def test_with_a_few_logits_stored_the_first_run_learns_from_those_too(tmp_path: Path, top_k: int) -> None:
    first, second = (train(Group(), settings(tmp_path, name, teacher={"cache_top_k": top_k})) for name in ("first", "second"))
    assert ran_for(second) == [0, 0]
    assert losses_of(second) == losses_of(first)


def test_a_job_that_finds_half_of_an_epoch_trains_as_if_it_had_found_none(tmp_path: Path) -> None:
    whole = train(Group(), settings(tmp_path, "whole", epochs=1))
    (part,) = (tmp_path / "cache").rglob("*.arrow")
    every = settings(tmp_path, "half", epochs=1, train={"checkpoint_every": 4})
    part.unlink()
    assert train(Group(), every, die_after=4)["died"]
    again = train(Group(), every)
    assert 0 < ran_for(again)[0] < 1442
    assert equal(again["state"], whole["state"])


def test_an_assistants_logits_are_cached_for_all_trials_in_a_folder_of_their_own(tmp_path: Path) -> None:
    sets = [
        "teacher.model=mlp_large",
        "assistants=[{model: mlp_small}]",
        "student.model=mlp_small",
        "data.loader_workers=1",
        "optim.epochs=1",
        f"teacher.cache={tmp_path / 'cache'}",
    ]
    experiment = load("digits", sets).experiment
    weights = write_teacher(tmp_path / "teacher.safetensors")
    train(Group(), experiment.stage("assistant1", tmp_path / "assistant1", {}, weights))
    weights, students = str(StageDir(tmp_path / "assistant1").best), ("one trial", "another")
    stages = [experiment.stage("student", tmp_path / student, {}, weights) for student in students]
    assert [ran_for(train(Group(), stage)) for stage in stages] == [[1408], [0]]
    assert len(keys(tmp_path)) == 2


def test_where_every_row_is_there_the_network_is_never_built(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with contextlib.closing(build(settings(tmp_path, name), Group(), Recorded(), no_telemetry)) as job:
            run_job(job)
            assert isinstance(job.train_state.teacher, CachedTeachers)
            assert (job.train_state.teacher.teachers[0].network is None) == (name == "second")


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 4},
        {"data": {"augment": "none"}},
        {"data": {"device_augment": {"random_erasing": 0.25}}},
        {"data": {"mean": (0.5, 0.5, 0.5)}},
        {"data": {"fidelity": "exact"}},
        {"precision": "fp32"},
        {"teacher": {"cache_top_k": 3}},
        {"teacher": {"weights": "other"}},
    ],
    ids=str,
)
def test_what_decides_the_logits_is_part_of_the_key(filled: Path, change: dict[str, Any]) -> None:
    if change.get("teacher", {}).get("weights"):
        other = filled / "other.safetensors"
        write_teacher(other, seed=12)
        change = {"teacher": {"weights": str(other)}}
    assert ran_for(train(Group(), settings(filled, "second", epochs=1, **change))) == [1442]
    assert len(keys(filled)) == 2


def test_the_decoder_in_use_is_part_of_the_key(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(augment, "open_decoder", DECODERS["pil"])
    assert ran_for(train(Group(), settings(filled, "second", epochs=1))) == [1442]
    assert len(keys(filled)) == 2


def test_images_preprocessed_anew_are_computed_anew_though_their_sizes_are_equal(tmp_path: Path) -> None:
    images = folder(tmp_path / "images", 0)
    assert [ran_for(train(Group(), of_photos(tmp_path, name, images))) for name in ("first", "same")] == [[6], [0]]
    folder(images, 1)
    assert ran_for(train(Group(), of_photos(tmp_path, "anew", images))) == [6]
    folder(images, 0)
    assert ran_for(train(Group(), of_photos(tmp_path, "back", images))) == [0]
    assert len(keys(tmp_path)) == 2


def test_a_teacher_file_that_is_replaced_after_the_job_began_is_refused(tmp_path: Path) -> None:
    job_config, weights = settings(tmp_path, "first", epochs=1), tmp_path / "teacher.safetensors"
    right = shutil.copy(weights, tmp_path / "right.safetensors")
    with contextlib.closing(build(job_config, Group(), Recorded(), no_telemetry)) as job:
        write_teacher(weights, seed=12)
        with pytest.raises(CheckpointError, match=r"teacher.safetensors: .* not the mlp_large that the job") as error:
            run_job(job)
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache").rglob("*.arrow"))
    shutil.copy(right, weights)
    assert ran_for(train(Group(), settings(tmp_path, "second", epochs=1))) == [1442]


def teacher_error(group: Group, each: Sequence[TrainConfig]) -> str | None:
    """The teacher's exception for the first batch on this rank; the rest of its step, a collective, is left out."""
    with contextlib.closing(build(each[group.rank], group, Recorded(), no_telemetry)) as job:
        batch = next(job.train_loader.epoch(0))
        try:
            images = torch.zeros(len(batch.labels_B), 3, 8, 8, dtype=torch.float64)
            job.train_state.teacher(images, len(images), TeacherRequest(batch.indices_B, 0))
        except CheckpointError as error:
            return str(error)
    return None


def test_a_rank_that_finds_another_teacher_is_refused(tmp_path: Path, ranks: RankPool) -> None:
    other = write_teacher(tmp_path / "other.safetensors", seed=12)
    each = [settings(tmp_path, "job"), settings(tmp_path, "job", teacher={"weights": other})]
    first, second = ranks.run(2, teacher_error, each)
    assert first is None
    assert second.startswith(other)


def test_ranks_that_read_other_images_are_refused_in_one_line(tmp_path: Path, ranks: RankPool) -> None:
    each = [of_photos(tmp_path, "job", folder(tmp_path / name, seed)) for name, seed in (("one", 0), ("other", 1))]
    for line in ranks.run(2, refusal, each):
        assert re.fullmatch(r"teacher.cache: \S+ has images of other .* \(rank 1\) than on \S+ \(rank 0\): copy .*", line)
    each = [of_photos(tmp_path, "job", tmp_path / "one")] * 2
    for line in ranks.run(2, refusal_by_decoder, each, ("pil", "turbojpeg")):
        assert line.startswith("teacher.cache: the workers decode JPEG by pil and turbojpeg, which differ in a rounding: ")


def test_batch_size_workers_and_optimizer_are_not_part_of_the_key(tmp_path: Path, ranks: RankPool) -> None:
    train(Group(), settings(tmp_path, "first", epochs=1))
    other = {"data": {"global_batch_size": 64, "loader_workers": 0}, "model": "mlp_large"}
    assert ran_for(train(Group(), settings(tmp_path, "second", epochs=1, **other))) == [0]
    answers = ranks.run(2, train, settings(tmp_path, "third", epochs=1))
    assert ran_for(answers[0]) == [0]
    assert len(keys(tmp_path)) == 1


def test_without_augmentation_one_epoch_serves_all_and_every_seed(tmp_path: Path) -> None:
    plain = {"augment": "none", "device_augment": {}}
    assert ran_for(train(Group(), settings(tmp_path, "first", epochs=2, data=plain))) == [1442, 0]
    assert ran_for(train(Group(), settings(tmp_path, "second", epochs=1, data=plain, seed=9))) == [0]


def test_cache_epochs_repeats_augmentations_and_not_the_order(tmp_path: Path) -> None:
    job_config = settings(tmp_path, "first", epochs=3, teacher={"cache_epochs": 2})
    with contextlib.closing(build(job_config, Group(), Recorded(), no_telemetry)) as job:
        epochs = []
        for epoch in (0, 1, 2):
            batches = [(b.indices_B.clone(), b.images_BCHW.clone()) for b in job.train_loader.epoch(epoch)]
            indices, images = (torch.cat(part) for part in zip(*batches, strict=True))
            epochs.append((indices, images[indices.argsort()]))
    assert not torch.equal(epochs[0][0], epochs[2][0])
    assert torch.equal(epochs[0][1], epochs[2][1])
    assert not torch.equal(epochs[0][1], epochs[1][1])
    assert ran_for(train(Group(), job_config)) == [1442, 1442, 0]


def test_two_ranks_fill_and_one_reads(tmp_path: Path, ranks: RankPool) -> None:
    first = ranks.run(2, train, settings(tmp_path, "first"))
    assert ran_for(first[0]) == [1442, 1442]
    second = train(Group(), settings(tmp_path, "second"))
    assert ran_for(second) == [0, 0]
    assert losses_of(second) == pytest.approx(losses_of(first[0]), abs=1e-3)


def test_a_batch_with_one_row_missing_is_computed_and_completed(filled: Path) -> None:
    (part,) = (filled / "cache").rglob("*.arrow")
    part.write_bytes(part.read_bytes()[:-1])
    assert ran_for(train(Group(), settings(filled, "second", epochs=1))) == [1442]
    assert ran_for(train(Group(), settings(filled, "third", epochs=1))) == [0]


def test_micro_batches_read_their_own_samples(filled: Path) -> None:
    live = train(Group(), settings(filled, "live", epochs=1, teacher={"cache": None}))
    parted = settings(filled, "second", epochs=1)
    parted = parted.model_copy(update={"optim": parted.optim.model_copy(update={"accumulate": 3})})
    second = train(Group(), parted)
    assert ran_for(second) == [0]
    assert losses_of(second) == pytest.approx(losses_of(live), abs=1e-3)


def test_a_timing_run_reads_and_writes_nothing(tmp_path: Path) -> None:
    timing = {"train": {"max_steps": 3, "warmup_steps": 1}}
    train(Group(), settings(tmp_path, "first", **timing))
    assert not (tmp_path / "cache").exists()


@pytest.mark.processes
def test_a_killed_job_leaves_whole_blocks_and_the_next_one_goes_on(tmp_path: Path) -> None:
    job_config = settings(tmp_path, "first", epochs=40)
    (tmp_path / "job.json").write_text(job_config.model_dump_json())
    process = subprocess.Popen([sys.executable, "-m", "tests.trainables.teachers.cache.long_job", str(tmp_path / "job.json")])
    wait_until(lambda: process.poll() is not None or len(list((tmp_path / "cache").rglob("*.arrow"))) >= 2)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    whole = len(list((tmp_path / "cache").rglob("*.arrow")))
    epochs = min(whole, 3)
    after = train(Group(), settings(tmp_path, "second", epochs=epochs + 1))
    assert ran_for(after)[:epochs] == [0] * epochs
    live = train(Group(), settings(tmp_path, "live", epochs=epochs + 1, teacher={"cache": None}))
    assert losses_of(after) == pytest.approx(losses_of(live), abs=1e-3)


def test_the_key_is_written_in_full_next_to_the_logits(filled: Path) -> None:
    (key,) = keys(filled)
    parts = json.loads((filled / "cache" / key / "key.json").read_text())
    assert parts["teacher"]["model"] == "mlp_large"
    assert parts["images"]["augment"] == "pad_crop_flip"
    assert parts["images"]["seed"] == 3


def test_a_full_cache_on_a_disk_that_cannot_be_written_is_read(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(cached_teacher, "write_json", refuse)
    monkeypatch.setattr(RowStore, "write", refuse)
    assert ran_for(train(Group(), settings(filled, "second", epochs=1))) == [0]
    with pytest.raises(DataError, match=r"teacher.cache: .* cannot be written \(Permission denied\): name another folder"):
        train(Group(), settings(filled, "third", epochs=2))


def test_a_cache_of_another_format_is_computed_again(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key, "FORMAT", key.FORMAT + 1)
    assert ran_for(train(Group(), settings(filled, "second", epochs=1))) == [1442]


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"teacher.cache: .* do not fit .* set teacher.cache_top_k or teacher.cache_epochs"):
        train(Group(), settings(tmp_path, "first", epochs=2**30))


class Listening(logging.Handler):
    """The log lines about a cache, and how many bytes of blocks were there at each."""

    def __init__(self, cache: Path) -> None:
        super().__init__()
        self.cache, self.records = cache, list[tuple[str, int]]()

    def there(self) -> int:
        return sum(path.stat().st_size for path in self.cache.rglob("*.arrow"))

    def emit(self, record: logging.LogRecord) -> None:
        if " rows: " in record.getMessage():
            self.records.append((record.getMessage(), self.there()))


def test_the_size_of_the_cache_is_logged_before_anything_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listening, log = Listening(tmp_path / "cache"), logging.getLogger("raydistill")
    log.addHandler(listening)
    try:
        with caplog.at_level(logging.INFO, "raydistill"):
            for epochs in (1, 2):
                train(Group(), settings(tmp_path, str(epochs), epochs=epochs))
    finally:
        log.removeHandler(listening)
    (key,) = keys(tmp_path)
    prefix = f"teacher.cache: {tmp_path / 'cache' / key} holds"
    (first, nothing), (second, half) = listening.records
    stored = "KiB for 1,442 images × {}: logits 10 in float16"
    assert (first, nothing) == (f"{prefix} 0 of 1,442 rows: 0 bytes of 39.4 {stored.format('1 epoch')}", 0)
    assert half == pytest.approx(39.4 * 1024, rel=0.2)  # each block says what it is
    assert second == f"{prefix} 1,442 of 2,884 rows: {format_bytes(half)} of 78.9 {stored.format('2 epochs')}"
    assert listening.there() == pytest.approx(78.9 * 1024, rel=0.2)  # each block says what it is


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [None, 3])
def test_on_a_gpu_nothing_waits_while_logits_are_read_or_written(tmp_path: Path, top_k: int | None) -> None:
    group, epochs = Group(device=torch.device("cuda")), []
    for name in ("first", "second"):
        job_config = settings(tmp_path, name, epochs=1, teacher={"cache_top_k": top_k}, precision="fp32")
        with contextlib.closing(build(job_config, group, Recorded(), no_telemetry)) as job:
            run_job(job)  # whatever is lazy is there
            images = torch.zeros(50, 3, 8, 8, device=group.device)
            torch.cuda.set_sync_debug_mode("error")
            try:
                taught = job.train_state.teacher(images, 50, TeacherRequest(torch.arange(50), 0))["kd"].logits_BK
            finally:
                torch.cuda.set_sync_debug_mode("default")
            epochs.append(taught.cpu())
    assert epochs[0].shape == (50, 10)
