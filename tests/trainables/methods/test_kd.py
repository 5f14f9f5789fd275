"""kd: what is beside its formula, with which `test_logits_against_references.py` compares it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models.deit import VisionTransformerDistilled

from service.config.experiment import load
from tests.trainables.jobs import config, relative_difference, train, write_teacher
from tests.trainables.methods.split import draw
from trainables.distributed.gather import Gather
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.losses import compute_losses
from trainables.errors import ExperimentError
from trainables.methods.contract import MethodBatch, ModelOutputs
from trainables.methods.distillation_module import DistillationModule
from trainables.methods.kd import KD, KDOptions, soft_loss
from trainables.methods.tap_reader import TapReader
from trainables.models.registry import build_model
from trainables.notices import notices_to

DEIT = "timm/deit_tiny_distilled_patch16_224(depth=1, embed_dim=12, num_heads=2, patch_size=4)"
TOKEN = {"token": True, "hard": True, "weight": 0.5}


def test_equal_logits_lose_nothing_at_all() -> None:
    for logits in (draw(4, 9, seed=0), draw(4, 9, seed=0).float(), torch.zeros(4, 9), 1e4 * draw(4, 9, seed=1)):
        student = logits.clone().requires_grad_()
        loss = soft_loss(student, logits, 4.0)
        assert loss.count_nonzero() == 0
        loss.sum().backward()
        assert student.grad is not None
        assert student.grad.abs().max() < 1e-5


def test_a_teacher_that_is_sure_of_what_the_student_rules_out_has_an_exact_loss() -> None:
    """All of its mass lies where the student puts e^-20000 of its own."""
    opposite = soft_loss(torch.tensor([[1e4, -1e4, 0.0]]), torch.tensor([[-1e4, 1e4, 0.0]]), 1.0)
    torch.testing.assert_close(opposite, torch.tensor([2e4]))


def test_half_precision_logits_are_reduced_in_float32_under_autocast_too_and_float64_stays() -> None:
    student, teacher = draw(4, 9, seed=0), draw(4, 9, seed=1)
    for dtype in (torch.bfloat16, torch.float16):
        expected = soft_loss(student.to(dtype).double(), teacher.to(dtype).double(), 4.0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = soft_loss(student.to(dtype), teacher.to(dtype), 4.0)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert soft_loss(student, teacher, 4.0).dtype == soft_loss(student, teacher.float(), 4.0).dtype == torch.float64


def test_a_teacher_under_inference_mode_can_be_learned_from() -> None:
    student = draw(2, 3, seed=0).requires_grad_()
    with torch.inference_mode():
        teacher = draw(2, 3, seed=1) * 1
    soft_loss(student, teacher, 1.0).sum().backward()
    assert student.grad is not None


def test_with_a_distillation_token_one_head_learns_the_labels_and_the_other_the_teachers_as_with_timms_two_outputs() -> None:
    student = build_model(DEIT, num_classes=5, image_size=8, seed=1).double()
    images, labels, teacher_BK = draw(4, 3, 8, 8, seed=1), torch.tensor([0, 3, 2, 3]), draw(4, 5, seed=2)
    assert isinstance(student, VisionTransformerDistilled)
    student.set_distilled_training(True)
    student.train()
    class_BK, token_BK = student(images)
    loss = 0.5 * F.cross_entropy(class_BK, labels) + 0.5 * F.cross_entropy(token_BK, teacher_BK.argmax(1))
    expected = torch.autograd.grad(loss, list(student.parameters()))
    student.set_distilled_training(False)

    options: Any = KDOptions.model_validate(TOKEN)
    reader = TapReader(student, {"kd": options.student_taps}, name=DEIT, image_size=8)
    method = KD(options, None)  # type: ignore[arg-type]
    module = DistillationModule(student, {"kd": method}, reader=reader, task_weight=0.5)
    batch = MethodBatch(images, labels, labels, 0.0, Gather(4, Group()))
    outputs = module(images, batch, {"kd": ModelOutputs(teacher_BK)})
    total = compute_losses(outputs, labels, None, module.weights(0.0)).total(1 / 4)
    assert float(total.detach()) == pytest.approx(float(loss.detach()), rel=1e-12)
    for ours, theirs in zip(torch.autograd.grad(total, list(student.parameters())), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    module.eval()
    with torch.no_grad():
        torch.testing.assert_close(module(images, batch, {"kd": ModelOutputs(teacher_BK)}).logits_BK, (class_BK + token_BK) / 2)


def test_a_student_with_a_distillation_token_is_the_same_on_2_workers(ranks: RankPool, tmp_path: Path) -> None:
    teacher = {"weights": write_teacher(tmp_path / "teacher.safetensors")}
    settings = {"model": DEIT, "teacher": teacher, "distill": {"task_weight": 0.5, "options": {"kd": TOKEN}}}
    one, two = (
        ranks.run(n, train, config(tmp_path / str(n), **settings, data={"global_batch_size": 600}))[0]["state"] for n in (1, 2)
    )
    assert relative_difference(one, two) < 1e-9


def test_a_token_whose_other_head_would_learn_nothing_is_refused() -> None:
    with pytest.raises(
        ExperimentError, match=r"kd.token has a head that the labels alone train, .*: write distill.task_weight: 0.5"
    ):
        load("digits", ["distill.options.kd={token: true}", "distill.task_weight=0"])


def test_a_temperature_that_hard_labels_do_not_use_is_noted() -> None:
    lines: list[str] = []
    with notices_to(lines.append):
        KDOptions.model_validate({"hard": True, "temperature": 2.0})
    assert lines == ["distill.options.kd.temperature is not used, because hard is true"]
