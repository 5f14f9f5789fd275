"""Where a published number comes from code that differs from its paper: options that do as that code does.

Each is compared with a few lines of plain torch that follow the code: RepDistiller's helper/pretrain.py (`init`) for ab,
ReviewKD's CIFAR-100/train.py, whose teacher is never put into eval mode, for reviewkd.
"""

import contextlib
import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.transforms.v2.functional import normalize

from tests.trainables.jobs import Recorded, config, no_telemetry, relative_difference, train, write_teacher
from trainables.config import DataConfig, TrainConfig
from trainables.device.device_batches import on_device
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.check_method import Case, check
from trainables.engine.job import Job
from trainables.engine.pass_latency import pass_latency
from trainables.engine.train import build, train_epoch, train_step
from trainables.errors import ExperimentError
from trainables.methods.init_stage import with_init_stage
from trainables.models.registry import build_model
from trainables.teachers.interface import TeacherRequest

LR, MOMENTUM, DECAY = 0.02, 0.9, 1e-3


def job_config(folder: Path, student: str, teacher: str, method: str, **options: Any) -> TrainConfig:
    """Noise images in float64 with plain SGD, 5 steps an epoch; a teacher that nobody has trained."""
    optim = {"epochs": 1, "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY, "nesterov": False}
    return config(
        folder / "job",
        model=student,
        teacher={"model": teacher, "weights": write_teacher(folder / "t.safetensors", teacher)},
        distill={"method": [method], "task_weight": 1.0, "options": {method: options}},
        optim=optim,
        data={"path": "synthetic", "synthetic_images": 100, "synthetic_classes": 10, "global_batch_size": 20},
    )


def init_job(folder: Path, student: str, teacher: str, method: str, **options: Any) -> contextlib.closing[Job]:
    """The init stage of `job_config`."""
    settings, _ = with_init_stage(job_config(folder, student, teacher, method, **options))
    return contextlib.closing(build(settings, Group(), Recorded(), no_telemetry))


def normalized(pixels_BCHW: Tensor) -> Tensor:
    """As every model of these jobs does it itself."""
    data = DataConfig()
    return normalize(pixels_BCHW, list(data.mean), list(data.std))


def wrn_preacts(model: Any, images_BCHW: Tensor) -> list[Tensor]:
    """As RepDistiller's models/wrn.py with preact=True."""
    one = model.layer1(model.conv1(images_BCHW))
    two = model.layer2(one)
    return [model.layer2[0].bn1(one), model.layer3[0].bn1(two), model.bn1(model.layer3(two))]


def boundary_loss(student: list[Tensor], teacher: list[Tensor]) -> Tensor:
    """RepDistiller's distiller_zoo/AB.py with margin 1."""
    total = torch.zeros((), dtype=torch.float64)
    for weight, s, t in zip((0.25, 0.5, 1.0), student, teacher, strict=True):
        loss = (s + 1) ** 2 * ((s > -1) & (t <= 0)) + (s - 1) ** 2 * ((s <= 1) & (t > 0))
        total = total + weight * loss.sum() / len(s) / 1000 * 3
    return total


def test_ab_leaves_a_wrns_last_norm_out_of_its_init_stage_as_repdistiller_does(tmp_path: Path) -> None:
    with init_job(tmp_path, "wrn_16_1", "wrn_40_1", "ab", init_epochs=1, init_frozen=["bn1"]) as job:
        train_state = job.train_state
        student: Any = copy.deepcopy(train_state.distillation_module.student).eval()
        trained = nn.ModuleList([student.conv1, student.layer1, student.layer2, student.layer3]).train()
        sgd = torch.optim.SGD(trained.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
        train_state.distillation_module.begin_epoch(0)
        with contextlib.closing(on_device(job.train_loader.epoch(0), torch.device("cpu"))) as batches:
            for step in range(3):
                batch = next(batches)
                images = normalized(train_state.prepare(batch).images_BCHW)
                with torch.no_grad():
                    taught = wrn_preacts(train_state.teacher.networks[0], images)  # type: ignore[union-attr]
                loss = boundary_loss(wrn_preacts(student, images), taught)
                sgd.zero_grad()
                loss.backward()
                sgd.step()
                for each in train_state.optimizers:
                    each.set_learning_rate(step, steps_per_epoch=5, global_batch_size=20)
                train_step(train_state, batch, step, job.metrics.timer)
        ours = {name: p.detach() for name, p in train_state.distillation_module.student.named_parameters()}
        assert relative_difference({n: p.detach() for n, p in student.named_parameters()}, ours) < 1e-11
        norm = train_state.distillation_module.student.get_submodule("bn1")
        assert not norm.running_mean.any()  # type: ignore[operator, union-attr]


def test_what_the_init_stage_leaves_out_is_trained_after_it(tmp_path: Path) -> None:
    options = {"init_epochs": 1, "init_frozen": ["bn1"]}
    init, settings = with_init_stage(job_config(tmp_path, "wrn_16_1", "wrn_16_1", "ab", **options))
    frozen, trained = train(Group(), init)["state"], train(Group(), settings)["state"]
    assert not frozen["bn1.running_mean"].any()
    assert (frozen["bn1.weight"] == 1).all()
    assert trained["bn1.running_mean"].any()
    assert (trained["bn1.weight"] != 1).any()


def test_all_of_the_student_takes_part_where_nothing_is_left_out(tmp_path: Path) -> None:
    with init_job(tmp_path, "wrn_16_1", "wrn_16_1", "ab") as job:
        job.train_state.distillation_module.begin_epoch(0)
        evaluated = [name for name, module in job.train_state.distillation_module.student.named_modules() if not module.training]
        assert evaluated == ["fc"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["bn2"], "the student has no module 'bn2'; did you mean bn1?"),
        (["conv1", ""], "the student has no module ''; it has conv1, layer1, layer2, layer3, bn1, relu, avgpool, flatten, fc"),
        (["conv1", "layer1", "layer2", "layer3", "bn1"], "it freezes everything that ab would train: leave a module out"),
    ],
)
def test_what_the_init_stage_cannot_leave_out_is_refused(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        init_job(tmp_path, "wrn_16_1", "wrn_16_1", "ab", init_frozen=names)
    assert str(caught.value) == f"distill.options.ab.init_frozen: {message}"


def test_ft_trains_its_paraphraser_at_a_rate_of_its_own_as_repdistiller_does(tmp_path: Path) -> None:
    with init_job(tmp_path, "resnet8", "resnet14", "ft", init_epochs=1, init_lr=0.003) as job:
        train_state: Any = job.train_state
        method = train_state.distillation_module.methods_by_name["ft"]
        halves = copy.deepcopy(nn.ModuleList([method.paraphrasers[0], method.builders[0]])).requires_grad_()
        sgd = torch.optim.SGD(halves.parameters(), lr=0.003, momentum=MOMENTUM, weight_decay=DECAY)
        with contextlib.closing(on_device(job.train_loader.epoch(0), torch.device("cpu"))) as batches:
            for batch in batches:
                images = train_state.prepare(batch).images_BCHW
                t_BCHW = train_state.teacher(images, len(images))["ft"].features[0]
                sgd.zero_grad()
                nn.functional.mse_loss(halves[1](halves[0](t_BCHW)), t_BCHW).backward()
                sgd.step()
        train_epoch(job)
        found = nn.ModuleList([method.paraphrasers[0], method.builders[0]])
        assert relative_difference(halves.state_dict(), found.state_dict()) < 1e-11


def test_ft_reads_a_student_in_eval_mode_in_its_init_stage_as_repdistiller_does(tmp_path: Path) -> None:
    with init_job(tmp_path, "resnet8", "resnet14", "ft", init_epochs=1) as job:
        train_epoch(job)
        student = job.train_state.distillation_module.student
        assert not any(t.any() for name, t in student.named_buffers() if name.endswith(("running_mean", "tracked")))


def test_fsp_trains_the_student_in_training_mode_without_its_classifier_as_repdistiller_does(tmp_path: Path) -> None:
    with init_job(tmp_path, "resnet8", "resnet14", "fsp", init_epochs=1) as job:
        train_state: Any = job.train_state
        student: Any = copy.deepcopy(train_state.distillation_module.student).eval()
        trained = nn.ModuleList([student.conv1, student.bn1, student.layer1, student.layer2, student.layer3]).train()
        sgd = torch.optim.SGD(trained.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
        with contextlib.closing(on_device(job.train_loader.epoch(0), torch.device("cpu"))) as batches:
            for batch in batches:
                images = normalized(train_state.prepare(batch).images_BCHW)
                with torch.no_grad():
                    taught = flows(train_state.teacher.networks[0], images)
                loss = sum((s - t).square().mean() for s, t in zip(flows(student, images), taught, strict=True))
                sgd.zero_grad()
                loss.backward()  # type: ignore[union-attr]
                sgd.step()
        train_epoch(job)
        assert relative_difference(student.state_dict(), train_state.distillation_module.student.state_dict()) < 1e-10


def flows(model: Any, images_BCHW: Tensor) -> list[Tensor]:
    """RepDistiller's distiller_zoo/FSP.py, of the stem and each stage to the next."""
    maps = [model.bn1(model.conv1(images_BCHW)).relu()]
    for stage in (model.layer1, model.layer2, model.layer3):
        maps.append(stage(maps[-1]))
    found = []
    for bottom, top in itertools.pairwise(maps):
        pooled = nn.functional.adaptive_avg_pool2d(bottom, top.shape[2:])
        found.append(torch.einsum("bihw,bjhw->bij", pooled, top) / top[0, 0].numel())
    return found


def test_after_the_init_stage_the_rate_is_the_trainings(tmp_path: Path) -> None:
    settings = job_config(tmp_path, "resnet8", "resnet14", "ft", init_epochs=1, init_lr=0.003)
    settings = settings.model_copy(update={"optim": settings.optim.model_copy(update={"schedule": "constant"})})
    calls = [call for each in with_init_stage(settings) for call in train(Group(), each)["calls"]]
    rates = [metrics["train/lr"] for kind, _, metrics in calls if kind == "step"]
    assert [rate for rate, _ in itertools.groupby(rates)] == [0.003, LR]


def test_two_init_stages_at_unlike_rates_are_refused(tmp_path: Path) -> None:
    settings = job_config(tmp_path, "resnet8", "resnet14", "ft", init_lr=0.003)
    both = {"method": ["ft", "fsp"], "options": {**settings.distill.options, "fsp": {}}}  # type: ignore[union-attr]
    with pytest.raises(ExperimentError) as caught:
        with_init_stage(TrainConfig.model_validate({**settings.model_dump(), "distill": both}))
    assert str(caught.value) == (
        "distill.options: ft and fsp share one init stage, but have init_lr 0.003 and None: set the same value for each"
    )


def drawn(rows: int) -> Tensor:
    return torch.randn(rows, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("norm", ["running", "batch"])
def test_a_teacher_normalizes_by_the_batch_where_its_code_leaves_it_in_training_mode(tmp_path: Path, norm: str) -> None:
    settings = job_config(tmp_path, "wrn_16_1", "wrn_16_2", "reviewkd", teacher_norm=norm)
    plain: Any = build_model("wrn_16_2", num_classes=10, image_size=8, seed=11).double().train(norm == "batch")
    with contextlib.closing(build(settings, Group(), Recorded(), no_telemetry)) as job, torch.no_grad():
        teacher: Any = job.train_state.teacher
        found = teacher(drawn(16), 16, TeacherRequest(torch.arange(16), 0))["reviewkd"]
        for ours, theirs in zip(found.features[:3], wrn_preacts(plain, normalized(drawn(16))), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        assert not any(mean.any() for name, mean in teacher.networks[0].state_dict().items() if name.endswith("running_mean"))


def costs_on_the_main_rank_alone(group: Group, settings: TrainConfig) -> bool:
    with contextlib.closing(build(settings, group, Recorded(), no_telemetry)) as job:
        return (
            not group.is_main
            or pass_latency(job.train_state, 8, micro_batch=4, step_s=0.0, max_images=8)["passes/4_images_ms"] > 0
        )


def test_what_one_image_costs_is_measured_without_a_word_to_other_workers(ranks: RankPool, tmp_path: Path) -> None:
    settings = job_config(tmp_path, "convnet_small", "wrn_16_1", "reviewkd", teacher_norm="batch")
    assert ranks.run(2, costs_on_the_main_rank_alone, settings) == [True, True]


def answered(group: Group, settings: TrainConfig) -> Tensor:
    """The teacher's pooled features of 7 images, 7 of which rank 0 has: another rank runs blank ones, which count for nothing."""
    with contextlib.closing(build(settings, group, Recorded(), no_telemetry)) as job, torch.no_grad():
        teacher: Any = job.train_state.teacher
        images, rows = (drawn(7), 7) if group.is_main else (torch.zeros(2, 3, 8, 8, dtype=torch.float64), 0)
        (found,) = teacher(images, rows, TeacherRequest(torch.arange(rows), 0)).values()
        pooled: Tensor = found.features[-1]
        return pooled


def test_several_workers_normalize_the_teacher_by_the_whole_batch_and_by_no_blank_image(ranks: RankPool, tmp_path: Path) -> None:
    settings = job_config(tmp_path, "convnet_small", "wrn_16_1", "reviewkd", teacher_norm="batch")
    ((alone,), (first, second)) = ranks.run(1, answered, settings), ranks.run(2, answered, settings)
    torch.testing.assert_close(first, alone, rtol=1e-10, atol=1e-12)
    assert second.shape == (0, alone.shape[1])


@pytest.mark.slow
def test_with_a_teacher_that_normalizes_by_the_batch_2_and_3_workers_train_what_one_trains(ranks: RankPool) -> None:
    findings = {each.title: each.problem for each in check(Case("reviewkd", {"teacher_norm": "batch"}), ranks.run)}
    assert {title: problem for title, problem in findings.items() if problem} == {}
