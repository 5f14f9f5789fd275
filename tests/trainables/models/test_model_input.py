"""What a model makes of pixels, against the transforms of the libraries that trained it; and what student and teacher see."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainables.jobs import config, write_teacher
from trainables.config import DataConfig, StudentConfig, TeacherConfig
from trainables.distributed.group import Group
from trainables.engine import checkpoint
from trainables.engine.train import build, run_job
from trainables.models.model_input import ModelInput, input_warnings, teacher_input
from trainables.models.pixels import take_pixels
from trainables.models.registry import build_model

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
HALF = {"mean": [0.5] * 3, "std": [0.5] * 3}


class _Identity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return images_BCHW * self.scale


def seen_by(model_input: ModelInput, pixels_BCHW: Tensor) -> Tensor:
    model = _Identity().to(pixels_BCHW.dtype)
    take_pixels(model, model_input)
    result: Tensor = model(pixels_BCHW)
    return result.detach()


def input_of(model: str, weights: str, **data: Any) -> ModelInput:
    return teacher_input(TeacherConfig(model=model, weights=weights), DataConfig(image_size=300, **data))


@pytest.mark.parametrize("name", ["resnet50", "vit_b_16", "efficientnet_v2_s", "swin_t"])
def test_torchvision_models_see_what_their_own_transforms_make(name: str) -> None:
    from torchvision.models import get_model_weights

    weights = get_model_weights(name).DEFAULT
    pixels_BCHW = torch.rand(2, 3, 300, 300, generator=torch.Generator().manual_seed(1))
    (size,) = weights.transforms().crop_size
    made = TeacherConfig(model=name, weights="DEFAULT", image_size=size)
    seen = seen_by(teacher_input(made, DataConfig(image_size=300)), pixels_BCHW)
    torch.testing.assert_close(seen, weights.transforms(resize_size=size)(pixels_BCHW), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["vit_base_patch16_224.augreg2_in21k_ft_in1k", "tf_efficientnet_lite0.in1k", "resnet18.tv_in1k"])
def test_timm_models_see_what_their_own_transforms_make(name: str) -> None:
    timm = pytest.importorskip("timm")
    settings = timm.data.resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    transform = timm.data.create_transform(**{**settings, "crop_pct": 1.0})
    pixels_BCHW = torch.rand(2, 3, 300, 300, generator=torch.Generator().manual_seed(1))
    model, _, tag = name.partition(".")
    made = TeacherConfig(model=f"timm/{model}", weights=tag, image_size=settings["input_size"][-1])
    seen = seen_by(teacher_input(made, DataConfig(image_size=300)), pixels_BCHW)
    expected_BCHW = torch.stack([transform(pixels_CHW) for pixels_CHW in pixels_BCHW])
    torch.testing.assert_close(seen, expected_BCHW, rtol=0, atol=1e-6)


def test_a_teacher_sees_what_its_weights_record_whatever_the_students_data(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    vit = input_of("timm/vit_base_patch16_224", "augreg2_in21k_ft_in1k")
    assert str(vit) == "224 px, mean 0.5, std 0.5, bicubic"
    assert input_of("resnet34", "IMAGENET1K_V1", **HALF).mean == (0.485, 0.456, 0.406)
    ours = trained_on(tmp_path / "ours.safetensors", **HALF)
    assert str(input_of("convnet_large", ours)) == "300 px, mean 0.5, std 0.5, bilinear"
    silent = write_teacher(tmp_path / "silent.safetensors", "convnet_large")
    assert input_of("convnet_large", silent, **HALF).mean == (0.5, 0.5, 0.5)
    written = TeacherConfig(model="convnet_large", weights=ours, image_size=64, mean=(0.1, 0.2, 0.3))
    assert str(teacher_input(written, DataConfig(image_size=32))) == "64 px, mean [0.1, 0.2, 0.3], std 0.5, bilinear"


def test_surprising_teacher_inputs_are_warned_about(tmp_path: Path) -> None:
    silent = write_teacher(tmp_path / "silent.safetensors", "convnet_large")
    (line,) = input_warnings(TeacherConfig(model="convnet_large", weights=silent), DataConfig(image_size=8))
    assert "does not record its normalization" in line
    ours = trained_on(tmp_path / "ours.safetensors", **HALF)
    assert input_warnings(TeacherConfig(model="convnet_large", weights=ours, image_size=8), DataConfig(image_size=32)) == []
    (other_size,) = input_warnings(TeacherConfig(model="convnet_large", weights=ours), DataConfig(image_size=32))
    assert "set teacher.image_size to 8" in other_size
    larger = TeacherConfig(model="convnet_large", weights=ours, image_size=64)
    assert "enlarged to 64" in input_warnings(larger, DataConfig(image_size=32))[0]


def test_a_student_with_another_normalization_than_its_weights_is_warned_about(tmp_path: Path) -> None:
    silent = write_teacher(tmp_path / "silent.safetensors", "convnet_large")
    (line,) = input_warnings(StudentConfig(model="convnet_large", weights=silent), DataConfig(image_size=8))
    assert "does not record its normalization" in line
    assert line.endswith("set data.mean and data.std")
    student = StudentConfig(model="convnet_large", weights=trained_on(tmp_path / "ours.safetensors", **HALF))
    assert input_warnings(student, DataConfig(image_size=8, mean=(0.5,) * 3, std=(0.5,) * 3)) == []
    lines = input_warnings(student, DataConfig(image_size=32, mean=(0.1, 0.2, 0.3), std=(0.5,) * 3))
    assert "was trained with mean 0.5 and std 0.5, but gets mean [0.1, 0.2, 0.3] and std 0.5" in lines[0]
    assert "set data.image_size to 8" in lines[1]


def trained_on(path: Path, image_size: int = 8, **normalization: Any) -> str:
    write_teacher(path, "convnet_large", image_size=image_size)
    tensors, about = checkpoint.read(path)
    checkpoint.write_tensors(path, tensors, {**about, **normalization})
    return str(path)


def test_student_and_teacher_of_a_job_see_their_own_pixels_of_the_same_crops(tmp_path: Path) -> None:
    """A student at 56 px under ImageNet's mean, a teacher at 96 px under 0.5."""
    from torchvision.transforms.v2 import functional

    teacher = trained_on(tmp_path / "teacher.safetensors", **HALF)
    job_config = config(
        tmp_path / "run",
        model="convnet_small",
        data={
            "path": "synthetic",
            "image_size": 56,
            "synthetic_images": 8,
            "synthetic_classes": 10,
            "global_batch_size": 4,
            **IMAGENET,
        },
        teacher={"model": "convnet_large", "weights": teacher, "image_size": 96},
        train={"log_every": 1, "max_steps": None},
    )
    seen: dict[str, list[Tensor]] = {"student": [], "teacher": []}
    with contextlib.closing(build(job_config, Group(), lambda *_, **__: None, lambda whole=False: {})) as job:
        state: Any = job.train_state
        for name, model in (("student", state.distillation_module.student), ("teacher", state.teacher.networks[0])):
            first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
            first.register_forward_hook(lambda _, args, __, name=name: seen[name].append(args[0].detach().clone()))
        (first_batch, *_) = list(job.train_loader.epoch(0))
        pixels = first_batch.images_BCHW.double() / 255
        run_job(job)
    assert seen["teacher"][0].shape == (4, 3, 96, 96)
    mean, std = IMAGENET["mean"], IMAGENET["std"]
    torch.testing.assert_close(seen["student"][0], functional.normalize(pixels, mean, std), rtol=0, atol=1e-12)
    resized = functional.resize(pixels, [96, 96], antialias=True)
    torch.testing.assert_close(seen["teacher"][0], functional.normalize(resized, **HALF), rtol=0, atol=1e-12)


def test_a_teacher_that_is_fine_tuned_sees_what_its_weights_record_and_so_does_its_checkpoint(tmp_path: Path) -> None:
    given = TeacherConfig(model="convnet_large", weights=trained_on(tmp_path / "teacher.safetensors", **HALF), image_size=16)
    data = {"path": "digits", "image_size": 8, "val_resize": 9, "global_batch_size": 64}
    job_config = config(tmp_path / "run", model="convnet_large", data=data, train={"max_steps": None})
    job_config = job_config.model_copy(update={"weights": given.weights, "finetuned": given})
    seen: list[Tensor] = []
    with contextlib.closing(build(job_config, Group(), lambda *_, **__: None, lambda whole=False: {})) as job:
        student: nn.Module = job.train_state.distillation_module.student
        assert torch.equal(student.state_dict()["head.weight"], checkpoint.read(Path(str(given.weights)))[0]["model.head.weight"])
        first = next(module for module in student.modules() if isinstance(module, nn.Conv2d))
        first.register_forward_hook(lambda _, args, __: seen.append(args[0].detach().clone()))
        run_job(job)
    assert seen[0].shape[1:] == (3, 16, 16)
    assert seen[0].min() >= -1
    trained = given.model_copy(update={"weights": str(tmp_path / "run/checkpoints/best.safetensors")})
    assert teacher_input(trained, job_config.data) == teacher_input(given, job_config.data)
    about = checkpoint.read_metadata(Path(trained.weights))
    assert (about["image_size"], about["mean"], about.get("val_resize")) == (16, [0.5] * 3, None)


def test_the_filter_of_the_weights_stays_that_of_their_fine_tuned_checkpoint(tmp_path: Path) -> None:
    path = trained_on(tmp_path / "t.safetensors", interpolation="bicubic")
    assert input_of("convnet_large", path).interpolation == "bicubic"


def test_a_state_dict_has_nothing_of_the_preparation() -> None:
    model = build_model("convnet_small", num_classes=3, image_size=8, seed=0)
    before = set(model.state_dict())
    take_pixels(model, ModelInput(8, (0.5,) * 3, (0.5,) * 3))
    assert set(model.state_dict()) == before
