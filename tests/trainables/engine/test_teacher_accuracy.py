"""A given teacher is measured once on the validation images, changes nothing by that, and is refused where it knows nothing."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainables.jobs import Recorded, config, equal, no_telemetry, train, write_able_teacher, write_teacher
from tests.trainables.teachers.service.local_service import local_services
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.teacher_accuracy import check_above_chance
from trainables.engine.train import build, run_job
from trainables.errors import TrainingError
from trainables.stage_result import TeacherAccuracy
from trainables.teachers.service.protocol import TeacherConnection

REVERSED = range(9, -1, -1)


def accuracy(num_right: int, num_images: int, chance_pct: float = 10.0) -> TeacherAccuracy:
    top1_pct = 100 * num_right / num_images
    return TeacherAccuracy(model="resnet34", weights="w.pth", top1_pct=top1_pct, num_images=num_images, chance_pct=chance_pct)


def settings(folder: Path, name: str, weights: str, **sections: Any) -> TrainConfig:
    teacher = {"weights": weights, **sections.pop("teacher", {})}
    return config(folder / name, teacher=teacher, teacher_records=str(folder / f"{name}-records"), **sections)


def with_another(settings: TrainConfig, model: str, weights: str, **own: Any) -> TrainConfig:
    """The job with a second teacher."""
    assert settings.teacher is not None
    first = settings.teacher.model_dump(include={"model", "weights"})
    several = {"teacher": None, "teachers": [first, {"model": model, "weights": weights, **own}]}
    return TrainConfig.model_validate({**settings.model_dump(), **several})


def measured(settings: TrainConfig, connections: Sequence[TeacherConnection] = ()) -> list[TeacherAccuracy | None]:
    with contextlib.closing(build(settings, Group(), Recorded(), no_telemetry, connections=connections)) as job:
        run_job(job)
        return job.teachers


@pytest.fixture(scope="module")
def able(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_able_teacher(tmp_path_factory.mktemp("teacher") / "able.safetensors")


def test_what_chance_may_reach_on_enough_images_is_refused_in_one_line() -> None:
    check_above_chance(accuracy(131, 1000))  # so many or more: p = 0.00097
    with pytest.raises(TrainingError) as refused:
        check_above_chance(accuracy(130, 1000))  # p = 0.0013
    says = str(refused.value)
    assert says.startswith(
        "teacher resnet34: 13.00% top-1 on 1,000 validation images, where chance is 10.00%: it is not above chance: "
    )
    assert all(cause in says for cause in ("order", "teacher.mean, teacher.std", "teacher.image_size", "w.pth"))
    check_above_chance(accuracy(0, 255))
    with pytest.raises(TrainingError):
        check_above_chance(accuracy(0, 256))
    with pytest.raises(TrainingError):  # it says the same class to every image
        check_above_chance(accuracy(900, 1000, 90.0))


def test_a_teacher_is_measured_once_and_the_student_ends_bit_for_bit_as_without(able: str, tmp_path: Path) -> None:
    given = settings(tmp_path, "given", able)
    plain = train(Group(), given.model_copy(update={"output_dir": str(tmp_path / "plain"), "teacher_records": None}))
    first = train(Group(), given)
    assert equal(first["state"], plain["state"])
    top1_pct = first["calls"][-1][2]["teacher_top1_pct"]
    assert top1_pct > 85
    assert "teacher_top1_pct" not in plain["calls"][-1][2]
    (record,) = Path(str(given.teacher_records)).glob("teacher-*.json")
    fields = json.loads(record.read_text())
    assert (fields["model"], fields["num_images"], fields["top1_pct"]) == ("mlp_large", 355, top1_pct)
    assert fields["chance_pct"] == pytest.approx(10, abs=0.5)
    record.write_text(json.dumps(fields | {"top1_pct": 77.0}))  # as another run's would be read
    again = given.model_copy(update={"output_dir": str(tmp_path / "again"), "seed": 4})
    assert train(Group(), again)["calls"][-1][2]["teacher_top1_pct"] == 77.0
    other = given.data.model_copy(update={"mean": (0.5, 0.5, 0.5)})
    assert train(Group(), again.model_copy(update={"data": other}))["calls"][-1][2]["teacher_top1_pct"] != 77.0


def test_a_teacher_of_another_class_order_ends_the_job_before_its_first_step(tmp_path: Path) -> None:
    wrong = settings(tmp_path, "wrong", write_able_teacher(tmp_path / "reversed.safetensors", REVERSED))
    report = Recorded()
    with (
        contextlib.closing(build(wrong, Group(), report, no_telemetry)) as job,
        pytest.raises(TrainingError, match="is not above chance"),
    ):
        run_job(job)
    assert [kind for kind, *_ in report.calls] == ["start"]


def test_each_of_several_teachers_and_one_behind_a_cache_or_a_service_has_its_accuracy(able: str, tmp_path: Path) -> None:
    (alone,) = measured(settings(tmp_path, "alone", able))
    other = write_able_teacher(tmp_path / "other.safetensors", seed=12)
    several = measured(with_another(settings(tmp_path, "several", able), "mlp_large", other))
    assert [each and each.weights for each in several] == [able, other]
    assert several[0] == alone
    assert several[1] != alone
    assert measured(settings(tmp_path, "cached", able, teacher={"cache": str(tmp_path / "logits")})) == [alone]
    with local_services(2) as connections:
        augmented = {"device_augment": {"random_erasing": 1.0}}  # the validation images are not
        assert measured(settings(tmp_path, "served", able, teacher={"service": 2}, data=augmented), connections) == [alone]


def test_the_entry_that_weights_key_chooses_is_the_one_that_is_measured(able: str, tmp_path: Path) -> None:
    (alone,) = measured(settings(tmp_path, "alone", able))
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(able).items()}
    file, teacher = str(tmp_path / "two.pth"), {"weights_key": "good"}
    torch.save({"good": tensors, "zeros": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}}, file)
    (chosen,) = measured(settings(tmp_path, "two", file, teacher=teacher))
    assert chosen
    assert alone
    assert chosen.top1_pct == alone.top1_pct
    several = with_another(settings(tmp_path, "several", able), "mlp_large", file, **teacher)
    assert [each and each.top1_pct for each in measured(several)] == [alone.top1_pct] * 2


def test_a_teacher_without_a_classifier_teaches_any_number_of_workers_by_its_class_embeddings(
    ranks: RankPool, able: str, tmp_path: Path
) -> None:
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(able).items()}
    weights, order = str(tmp_path / "headless.safetensors"), range(9, -1, -1)
    np.save(tmp_path / "text.npy", tensors.pop("head.weight").numpy()[order])
    (tmp_path / "text.txt").write_text("\n".join(map(str, order)))
    del tensors["head.bias"]
    save_file(tensors, weights)
    teacher: dict[str, Any] = {"classes": str(tmp_path / "text.npy")}
    distill = {"method": "kd", "task_weight": 0.0}
    one, two = (ranks.run(n, train, settings(tmp_path, f"w{n}", weights, teacher=teacher, distill=distill))[0] for n in (1, 2))
    for name, tensor in one["state"].items():
        torch.testing.assert_close(two["state"][name], tensor, rtol=1e-9, atol=1e-9)
    sharded = settings(tmp_path, "sharded", weights, teacher={**teacher, "placement": "sharded"}, distill=distill)
    assert equal(ranks.run(2, train, sharded)[0]["state"], two["state"])
    summary = one["calls"][-1][2]
    assert summary["teacher_top1_pct"] == two["calls"][-1][2]["teacher_top1_pct"] > 60
    assert one["progress"].history[-1]["val/top1_pct"] > 50  # it learned from nothing else
    cache = {**teacher, "cache": str(tmp_path / "logits")}
    (cached,) = measured(settings(tmp_path, "cached", weights, teacher=cache))
    with local_services(1) as connections:
        (served,) = measured(settings(tmp_path, "served", weights, teacher={**teacher, "service": 1}), connections)
    assert cached == served
    assert cached
    assert cached.top1_pct == summary["teacher_top1_pct"]


def test_of_unlike_teachers_those_with_the_classes_of_the_data_have_their_accuracy(able: str, tmp_path: Path) -> None:
    (alone,) = measured(settings(tmp_path, "alone", able))
    other = write_teacher(tmp_path / "other.safetensors", "convnet_large", num_classes=7)
    distill = {"method": ["rkd"], "options": {"rkd": {"teacher_taps": ["pooled"], "student_taps": ["pooled"]}}}
    several = with_another(
        settings(tmp_path, "several", other, teacher={"model": "convnet_large"}, distill=distill), "mlp_large", able
    )
    summary = train(Group(), several)["calls"][-1][2]
    assert alone
    assert summary["teacher2_top1_pct"] == alone.top1_pct
    assert "teacher_top1_pct" not in summary


def on_rank(group: Group, settings: TrainConfig) -> float | None:
    return train(group, settings)["calls"][-1][2].get("teacher_top1_pct")


def test_all_ranks_measure_one_accuracy_and_a_sharded_teacher_has_none(ranks: RankPool, able: str, tmp_path: Path) -> None:
    (alone,) = measured(settings(tmp_path, "alone", able))
    assert alone
    assert ranks.run(2, on_rank, settings(tmp_path, "two", able)) == [alone.top1_pct] * 2
    assert ranks.run(2, on_rank, settings(tmp_path, "sharded", able, teacher={"placement": "sharded"})) == [None] * 2
