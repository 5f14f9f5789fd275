"""Training from a teacher's cached or served features: what the network teaches, but for their rounding to float16."""

import contextlib
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.trainables.engine.test_backbone_evaluation import backbone, epochs_of
from tests.trainables.jobs import Recorded, config, equal, no_telemetry, relative_difference, train, write_teacher
from tests.trainables.teachers.cache.test_cached_teacher import keys, losses_of, ran_for
from tests.trainables.teachers.cache.test_fill import fill_alone
from tests.trainables.teachers.service.local_service import local_services
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.train import build, run_job
from trainables.errors import DataError, DistillError, ExperimentError
from trainables.methods.contract import ModelOutputs
from trainables.methods.init_stage import with_init_stage
from trainables.models.checkpoint_header import read_checkpoint_header
from trainables.rundir import StageDir
from trainables.teachers.cache.cached_teacher import CachedTeachers
from trainables.teachers.interface import TeacherInterface, TeacherRequest
from trainables.teachers.service.protocol import TeacherConnection

IMAGES = 96
MAPS: dict[str, Any] = {"distill": {"method": ["embed"], "task_weight": None, "options": {"embed": {"map": 0.5}}}}
QUEUE: dict[str, Any] = {"distill": {"method": ["queue"], "task_weight": None, "options": {}}}
DATA: dict[str, Any] = {
    "path": "synthetic",
    "synthetic_images": IMAGES,
    "synthetic_classes": 10,
    "global_batch_size": 20,
    "augment": "pad_crop_flip",
    "device_augment": {"random_erasing": 0.5},
}


def settings(folder: Path, name: str, *, source: str | None = "cache", **sections: Any) -> TrainConfig:
    """A student of embedding and map, without labels, of a teacher of other classes: cached, served or its network."""
    job = backbone(folder, data=DATA, **{**MAPS, **sections})
    assert job.teacher is not None
    elsewhere = {"cache": {"cache": str(folder / "cache")}, "service": {"service": 1}, None: {}}[source]
    teacher = job.teacher.model_copy(update=elsewhere)
    return job.model_copy(update={"teacher": teacher, "output_dir": str(folder / name)})


def test_features_in_fp8_have_a_cache_of_their_own_and_its_error_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    half = settings(tmp_path, "half")
    assert half.teacher is not None
    with caplog.at_level(logging.INFO, "raydistill"):
        run(half)
        assert "fp8 changes" not in caplog.text
        small = half.model_copy(update={"teacher": half.teacher.model_copy(update={"cache_feature_dtype": "fp8"})})
        first, second = (run(small.model_copy(update={"output_dir": str(tmp_path / name)})) for name in ("first", "second"))
    assert [ran_for(each) for each in (first, second)] == [[IMAGES], [0]]
    assert equal(first["state"], second["state"])
    assert caplog.text.count("fp8 changes embedding by") == 1
    assert "in fp8" in caplog.text
    sizes = {}
    for folder in (tmp_path / "cache").iterdir():
        key = json.loads((folder / "key.json").read_text())
        if key["data"]["samples"] == IMAGES:
            sizes[key.get("feature_dtype")] = sum(block.stat().st_size for block in folder.rglob("*.arrow"))
    assert sizes["fp8"] < 0.6 * sizes[None]


class Rounded(TeacherInterface):
    """A network whose features are rounded to half precision by hand."""

    def __init__(self, network: TeacherInterface) -> None:
        self._network = network

    def __call__(self, images_BCHW: Tensor, num_rows: int, request: TeacherRequest | None = None) -> dict[str, ModelOutputs]:
        outputs = self._network(images_BCHW, num_rows, request)
        return {key: replace(each, features=tuple(x.half().to(x.dtype) for x in each.features)) for key, each in outputs.items()}


def run(job_config: TrainConfig, connections: Sequence[TeacherConnection] = (), *, rounds: bool = False) -> dict[str, Any]:
    report = Recorded()
    with contextlib.closing(build(job_config, Group(), report, no_telemetry, connections=connections)) as job:
        if rounds:
            job.train_state.teacher = Rounded(job.train_state.teacher)
        run_job(job)
        state = {name: tensor.detach().clone() for name, tensor in job.student.state_dict().items()}
    return {"calls": report.calls, "state": state}


def assert_same(ours: dict[str, Any], peer: dict[str, Any]) -> None:
    """The same training and the same evaluation, but for the rounding of float64."""
    assert losses_of(ours) == pytest.approx(losses_of(peer), rel=1e-9)
    assert relative_difference(ours["state"], peer["state"]) < 1e-9
    for found, expected in zip(epochs_of(ours["calls"]), epochs_of(peer["calls"]), strict=True):
        for name in ("val/loss", "val/cka"):
            assert found[name] == pytest.approx(expected[name], rel=1e-9)


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The training with the network's features rounded by hand."""
    folder = tmp_path_factory.mktemp("by_hand")
    rounded = run(settings(folder, "rounded", source=None), rounds=True)
    assert losses_of(rounded) != losses_of(run(settings(folder, "exact", source=None)))
    return rounded


def test_a_student_of_cached_features_learns_what_it_learns_of_features_that_are_rounded_by_hand(
    tmp_path: Path, by_hand: dict[str, Any]
) -> None:
    first = run(settings(tmp_path, "first"))
    assert_same(first, by_hand)
    assert ran_for(first) == [IMAGES]
    with contextlib.closing(build(settings(tmp_path, "second"), Group(), report := Recorded(), no_telemetry)) as job:
        run_job(job)
        assert isinstance(job.train_state.teacher, CachedTeachers)
        assert job.train_state.teacher.teachers[0].network is None  # the features of the validation images are cached as well
        assert equal(dict(job.student.state_dict()), first["state"])
    assert ran_for({"calls": report.calls}) == [0]
    assert losses_of({"calls": report.calls}) == losses_of(first)


def test_a_student_of_served_features_learns_what_it_learns_of_features_that_are_rounded_by_hand(
    tmp_path: Path, by_hand: dict[str, Any]
) -> None:
    with local_services(2) as connections:
        assert_same(run(settings(tmp_path, "served", source="service"), connections), by_hand)


def test_two_ranks_fill_a_cache_of_features_ahead_and_every_worker_count_learns_the_same(
    tmp_path: Path, ranks: RankPool, by_hand: dict[str, Any]
) -> None:
    filled, _ = ranks.run(2, fill_alone, settings(tmp_path, "fill"))[0]
    num_val = IMAGES // 5
    assert filled == {"images": IMAGES + num_val, "missing": 0, "rows": IMAGES + num_val}
    assert fill_alone(Group(), settings(tmp_path, "again"))[0]["images"] == 0
    two = ranks.run(2, train, settings(tmp_path, "two"))[0]
    assert ran_for(two) == [0]
    assert_same(two, by_hand)
    assert_same(run(settings(tmp_path, "one")), by_hand)


def test_a_job_that_died_goes_on_from_the_features_that_it_had_written(tmp_path: Path, by_hand: dict[str, Any]) -> None:
    job_config = settings(tmp_path, "parts", train={"log_every": 4, "checkpoint_every": 6})
    assert train(Group(), job_config, die_after=3)["died"]
    resumed = train(Group(), job_config)
    assert relative_difference(resumed["state"], by_hand["state"]) < 1e-9
    header = read_checkpoint_header(StageDir(tmp_path / "parts").best)
    assert header is not None


def test_methods_of_the_same_taps_share_a_cache_and_those_of_others_have_their_own(tmp_path: Path) -> None:
    run(settings(tmp_path, "embed"))
    assert ran_for(run(settings(tmp_path, "queue", **QUEUE))) == [0]
    folders = keys(tmp_path)
    embeddings = {"method": ["embed"], "task_weight": None, "options": {"embed": {"map": 0.0, "teacher_taps": ("embedding",)}}}
    embeddings["options"]["embed"]["student_taps"] = ("embedding",)  # type: ignore[index]
    assert ran_for(run(settings(tmp_path, "one", distill=embeddings))) == [IMAGES]
    taps = [json.loads((tmp_path / "cache" / key / "key.json").read_text())["taps"] for key in keys(tmp_path) - folders]
    assert taps == [["embedding"]] * 2  # of the training and of the validation images


def test_logits_and_features_are_stored_side_by_side(tmp_path: Path) -> None:
    weights = write_teacher(tmp_path / "teacher.safetensors", "convnet_large")
    teacher = {"model": "convnet_large", "weights": weights, "cache": str(tmp_path / "cache"), "cache_top_k": 5}
    both = {"method": ["kd", "at"], "task_weight": 0.3, "options": {"kd": {"temperature": 3.0}, "at": {}}}
    jobs = [
        config(tmp_path / name, model="convnet_small", teacher=teacher, distill=both, data=DATA) for name in ("first", "second")
    ]
    first, second = (train(Group(), job) for job in jobs)
    assert [ran_for(each) for each in (first, second)] == [[IMAGES], [0]]
    assert losses_of(second) == losses_of(first)
    assert equal(second["state"], first["state"])


def too_large(folder: Path, name: str, source: str, scale: float = 1e6) -> TrainConfig:
    """A job whose teacher gives every image features beyond half precision."""
    job = settings(folder, name, source=source)
    assert job.teacher is not None
    path = folder / "large.safetensors"
    tensors = {name.removeprefix("model."): each for name, each in load_file(str(job.teacher.weights)).items()}
    save_file({name: scale * each if each.ndim == 1 else each for name, each in tensors.items()}, path)
    return job.model_copy(update={"teacher": job.teacher.model_copy(update={"weights": str(path)})})


def test_a_feature_that_is_not_a_number_is_not_stored_in_fp8_either(tmp_path: Path) -> None:
    job = too_large(tmp_path, "job", "cache", scale=1e38)
    assert job.teacher is not None
    small = job.model_copy(update={"teacher": job.teacher.model_copy(update={"cache_feature_dtype": "fp8"})})
    with pytest.raises(
        DataError, match=r"gives \S+/\d+ a value of its feature embedding that is not a number: leave teacher.cache"
    ):
        run(small)


@pytest.mark.parametrize("source", ["cache", "service"])
def test_a_feature_that_half_precision_does_not_hold_ends_the_training_in_one_line(tmp_path: Path, source: str) -> None:
    line = rf"teacher.{source}: convnet_large gives \S+/\d+ a value of its feature \w+ that is not a number, or above 65,504"
    with local_services() as connections, pytest.raises(DataError, match=line) as error:
        run(too_large(tmp_path, "job", source), connections)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("*.arrow"))


def test_what_depends_on_more_than_an_images_features_is_refused(tmp_path: Path) -> None:
    for options, line in (
        (
            {"method": ["srrl"], "options": {}},
            "distill.method: srrl needs the teacher's network with a linear classifier, which does not go with teacher.cache",
        ),
        (
            {"method": ["reviewkd"], "options": {"reviewkd": {"teacher_norm": "batch"}}},
            "distill.options.reviewkd.teacher_norm batch makes a teacher's outputs depend on the batch, which does not go with",
        ),
    ):
        teacher = {"model": "convnet_large", "weights": write_teacher(tmp_path / "t.safetensors", "convnet_large")}
        cached = {**teacher, "cache": str(tmp_path / "cache")}
        with pytest.raises(ExperimentError) as error:
            train(
                Group(), config(tmp_path / "out", model="convnet_small", teacher=cached, distill={"task_weight": 1.0, **options})
            )
        assert str(error.value).startswith(line)


def test_features_that_do_not_fit_on_the_disk_are_refused_before_any_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        DistillError, match=r"of embedding \d+ \+ map \d+×\d×\d do not fit into .* set teacher.cache_epochs or teacher.cache_f"
    ):
        run(settings(tmp_path, "first", optim={"epochs": 2**30}))
    assert not list((tmp_path / "cache").rglob("*.arrow"))


def test_the_accuracy_of_a_teacher_whose_features_alone_are_stored_is_not_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "raydistill"):
        run(settings(tmp_path, "first").model_copy(update={"teacher_records": str(tmp_path / "records")}))
    assert "only its features are cached or served" in caplog.text
    assert "cannot time the passes" not in caplog.text


@pytest.mark.parametrize("source", ["cache", "service"])
def test_methods_take_their_statistics_of_cached_and_served_features(tmp_path: Path, source: str) -> None:
    standardized = {"embed": {"standardize": "per_channel", "standardize_images": 40}}
    distill = {"method": ["embed"], "task_weight": None, "options": standardized}
    with local_services() as connections:
        ours = run(settings(tmp_path, "ours", source=source, distill=distill), connections)
    assert_same(ours, run(settings(tmp_path, "rounded", source=None, distill=distill), rounds=True))


def test_a_cache_that_is_filled_ahead_has_the_epochs_of_an_init_stage_too(tmp_path: Path) -> None:
    weights = write_teacher(tmp_path / "teacher.safetensors", "convnet_large")
    teacher = {"model": "convnet_large", "weights": weights, "cache": str(tmp_path / "cache")}
    distill = {"method": ["ft"], "task_weight": 1.0, "options": {"ft": {"init_epochs": 2}}}
    job = config(tmp_path / "out", model="convnet_small", teacher=teacher, distill=distill, data=DATA)
    assert fill_alone(Group(), job)[0]["images"] == 3 * IMAGES
    assert [ran_for(train(Group(), each)) for each in with_init_stage(job)] == [[0, 0], [0]]
