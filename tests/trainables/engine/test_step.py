"""The loss of a step against the formula in plain float64, its terms, and what it does with precision and bad numbers."""

import math
import re
from pathlib import Path

import pytest
import torch

from tests.trainables.device.test_augment import ALL
from tests.trainables.jobs import Recorded, config, equal, no_telemetry, train, write_teacher
from tests.trainables.methods import own_methods
from tests.trainables.methods.calls import make, terms
from trainables.device.device_batches import DeviceBatch, on_device
from trainables.device.policies import POLICIES
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.losses import compute_losses
from trainables.engine.passes import micro_batches
from trainables.engine.train import build, train_step
from trainables.errors import ExperimentError, TrainingError
from trainables.failures import failure_of
from trainables.methods.distillation_module import DistillationModule, DistillationOutputs
from trainables.methods.init_stage import with_init_stage
from trainables.models.registry import build_model


def softmax(row: list[float], temperature: float) -> list[float]:
    top = max(row)
    weights = [math.exp((x - top) / temperature) for x in row]
    return [w / sum(weights) for w in weights]


def reference(
    student: list[list[float]], teacher: list[list[float]], labels: list[int], r: float, a: float, t: float
) -> list[float]:
    """r·CE + a·T²·KL(teacher‖student) per sample, from the definitions."""
    out = []
    for s, q, y in zip(student, teacher, labels, strict=True):
        ce = -math.log(softmax(s, 1.0)[y])
        p, ps = softmax(q, t), softmax(s, t)
        kl = sum(pi * (math.log(pi) - math.log(si)) for pi, si in zip(p, ps, strict=True))
        out.append(r * ce + a * t * t * kl)
    return out


def draw(seed: int, *shape: int) -> torch.Tensor:
    return 3 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LABELS, ONE = torch.tensor([0, 1, 2, 3, 4, 0]), torch.ones((), dtype=torch.float64)


def test_the_loss_is_the_formula_per_sample() -> None:
    student, teacher = draw(1, 6, 5), draw(2, 6, 5)
    said = {"kd": terms(make("kd", temperature=2.5), student, teacher, LABELS)}
    loss = compute_losses(DistillationOutputs(student, (), said), LABELS, None, {"task": 0.4, "kd": 0.8})
    expected = reference(student.tolist(), teacher.tolist(), LABELS.tolist(), 0.4, 0.8, 2.5)
    assert loss.named["loss"].tolist() == pytest.approx(expected, rel=1e-12)
    assert float(loss.total(ONE / 6)) == pytest.approx(sum(expected) / 6, rel=1e-12)
    assert set(loss.named) == {"loss", "task_loss", "distill_loss", "kd/kl"}


def test_terms_of_samples_and_of_the_batch_are_weighed_and_named() -> None:
    said = {"a": {"x": draw(1, 6), "y": torch.tensor(7.0).double()}, "b": {"z": torch.tensor(2.0).double()}}
    student = draw(2, 6, 5)
    loss = compute_losses(DistillationOutputs(student, (), said), LABELS, None, {"task": 1.0, "a": 2.0, "b": 0.5})
    assert float(loss.total(ONE, frozenset({"a/x", "a/y"}))) == pytest.approx(2 * float(said["a"]["x"].sum()) + 14)
    assert float(loss.total(ONE, frozenset({"b/z"}))) == 1.0
    assert float(loss.total(ONE / 6)) == pytest.approx(float(loss.named["task_loss"].mean() + 2 * said["a"]["x"].mean()) + 15)
    assert torch.allclose(loss.named["distill_loss"], 2 * said["a"]["x"] + 15)
    assert {"a/x", "a/y", "b/z"} < set(loss.named)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_a_weights_schedule_is_in_the_loss_of_each_step(tmp_path: Path, decay: str) -> None:
    settings = config(
        tmp_path,
        teacher={"weights": write_teacher(tmp_path / "t.safetensors")},
        optim={"epochs": 2},
        train={"log_every": 1},
        distill={"options": {"kd": {"weight": 0.8, "warmup_epochs": 1, "decay": decay}}},
    )
    steps = [metrics for kind, _, metrics in train(Group(), settings)["calls"] if kind == "step"]
    assert len(steps) == 30
    for step, recorded in enumerate(steps):
        told = {name.removeprefix("train/"): value for name, value in recorded.items()}
        done = step / 30  # in the middle the weight has risen, and half of it is left
        left = 1 - done if decay == "linear" else math.cos(math.pi * done / 2) ** 2
        expected = 0.8 * min(2 * done, 1.0) * left * told["kd/kl"]
        assert told["distill_loss"] == pytest.approx(expected, rel=1e-9)
        assert told["loss"] == pytest.approx(0.3 * told["task_loss"] + expected, rel=1e-9)


def test_a_method_whose_weight_has_not_begun_to_rise_moves_nothing(tmp_path: Path) -> None:
    weights = write_teacher(tmp_path / "t.safetensors")
    one_step = {"data": {"path": "synthetic", "synthetic_images": 32, "global_batch_size": 32}, "optim": {"epochs": 1}}
    rising = {"task_weight": 1.0, "options": {"kd": {"weight": 0.8, "warmup_epochs": 1}}}
    alone = train(Group(), config(tmp_path / "alone", teacher=None, **one_step))["state"]
    begun = train(Group(), config(tmp_path / "kd", teacher={"weights": weights}, distill=rising, **one_step))["state"]
    assert equal(alone, begun)


def test_auxiliary_heads_belong_to_the_task() -> None:
    student, aux = draw(1, 6, 5), draw(2, 6, 5)
    plain = compute_losses(DistillationOutputs(student, (), {}), LABELS, None, {"task": 1.0}).named["loss"]
    with_aux = compute_losses(DistillationOutputs(student, ((0.4, aux),), {}), LABELS, None, {"task": 1.0}).named["loss"]
    assert torch.allclose(with_aux - plain, 0.4 * torch.nn.functional.cross_entropy(aux, LABELS, reduction="none"))


def test_a_student_in_half_precision_is_answered_for_in_single_precision() -> None:
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    student = DistillationModule(build_model("mlp_small", num_classes=5, image_size=8, seed=0))
    with torch.autocast("cpu", torch.bfloat16):
        answer = student(images)
        half = student.student(images)
    assert half.dtype == torch.bfloat16
    assert answer.logits_BK.dtype == torch.float32
    assert torch.equal(answer.logits_BK, half.float())


def test_an_empty_batch_becomes_blanks_that_nothing_is_asked_about() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    (part,) = micro_batches(DeviceBatch(torch.zeros((0, 3, 8, 8)), none, none, none, epoch=0), 4)
    assert tuple(part.images_BCHW.shape) == (2, 3, 8, 8)
    assert len(part.labels_B) == len(part.indices_B) == 0


def test_a_batch_is_cut_into_no_more_parts_than_it_has_samples() -> None:
    three = torch.arange(3)
    parts = micro_batches(DeviceBatch(torch.zeros((3, 3, 8, 8)), three, three, three, epoch=0), 5)
    assert [part.labels_B.tolist() for part in parts] == [[0], [1], [2]]


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options", [{}, {"channels_last": True}, pytest.param({"compile": True}, marks=pytest.mark.slow)], ids=str
)
def test_precision_layout_and_compilation_work_with_ddp(
    ranks: RankPool, tmp_path: Path, precision: str, options: dict[str, bool]
) -> None:
    if options.get("compile") and precision == "fp16":
        pytest.skip("one compiled run is enough: compilation takes most of this file's time")
    weights = write_teacher(tmp_path / "t.safetensors", "convnet_large")
    settings = config(
        tmp_path,
        model="convnet_small",
        precision=precision,
        teacher={"model": "convnet_large", "weights": weights},
        data={"last_batch": "drop"},
        optim={"epochs": 2, "lr": 0.05},
        train=options,
    )
    result = ranks.run(2, train, settings)[0]
    losses_seen = [metrics["train/loss"] for kind, _, metrics in result["calls"] if kind == "step"]
    assert losses_seen[-1] < losses_seen[0]
    assert not any("_orig_mod" in name or "module" in name.split(".") for name in result["state"])


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(ranks: RankPool, tmp_path: Path) -> None:
    settings = config(
        tmp_path, precision="fp32", teacher=None, optim={"epochs": 3, "lr": 1e30, "momentum": 0.0, "nesterov": False}
    )
    with pytest.raises(
        TrainingError, match=r"not finite (at|after) step \d+: lower optim.lr \(now 1e\+30\).*no checkpoint"
    ) as caught:
        ranks.run(2, train, settings)
    assert "\n" not in str(caught.value)


def test_a_batch_that_batch_norm_cannot_normalize_is_said_in_one_line(ranks: RankPool, tmp_path: Path) -> None:
    settings = config(tmp_path, model="resnet18", precision="fp32", teacher=None, data={"global_batch_size": 1})
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
        ranks.run(1, train, settings)
    assert re.fullmatch(r"a worker got a batch of one image, .* set data\.last_batch=drop, .*", str(failure_of(caught.value, 0)))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("MissingTerm", "returns distance and declares distance, absent: make forward return exactly the names in terms"),
        (
            "UndeclaredScalar",
            "returns distance as a scalar, which is a loss of the global batch: declare requires ="
            " Requirements(whole_batch=True), or return one loss per image",
        ),
        ("WrongInitStage", "returns zzz and declares reconstruction: make init_loss return exactly the names in init_terms"),
    ],
)
def test_terms_that_a_method_does_not_declare_are_refused(ranks: RankPool, tmp_path: Path, name: str, says: str) -> None:
    weights = write_teacher(tmp_path / "teacher.safetensors")
    distill = {"method": [f"{own_methods.__file__}:{name}"], "options": {}}
    first, *_ = with_init_stage(config(tmp_path / "job", teacher={"weights": weights}, distill=distill))
    with pytest.raises(ExperimentError) as caught:
        ranks.run(1, train, first)
    assert str(caught.value) == f"distill.method: {name} {says}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "augment", [{}, ALL, *({"policy": {"name": name}} for name in POLICIES)], ids=["plain", "augmented", *POLICIES]
)
def test_a_step_does_not_wait_for_the_gpu(tmp_path: Path, augment: dict[str, object]) -> None:
    device = torch.device("cuda")
    weights = write_teacher(tmp_path / "t.safetensors", "convnet_large")
    settings = config(
        tmp_path,
        model="convnet_small",
        precision="fp32",
        teacher={"model": "convnet_large", "weights": weights},
        data={"last_batch": "drop", "device_augment": augment},
        optim={"accumulate": 2},
    )
    job = build(settings, Group(0, 1, 0, device), Recorded(), no_telemetry)
    batches = on_device(job.train_loader.epoch(0), device)
    for step in range(3):  # kernels are loaded and cuDNN chooses its algorithms in the first
        batch = next(batches)
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            train_step(job.train_state, batch, step, job.metrics.timer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    batches.close()
    job.close()
    assert int(job.train_state.sums.values_N[0]) == 300
