"""Activations that are computed again change no gradient, also of methods that read them."""

from pathlib import Path

import pytest
from torch.autograd.graph import saved_tensors_hooks

from tests.trainables.jobs import config, relative_difference, train
from trainables.distributed.group import Group
from trainables.errors import ModelError
from trainables.models.gradient_checkpointing import use_gradient_checkpointing
from trainables.models.registry import build_model

VIT = "timm/vit_tiny_patch16_224(depth=3, embed_dim=16, num_heads=2, patch_size=4)"


def test_a_training_with_taps_learns_the_same(tmp_path: Path) -> None:
    taps = {"student_taps": ["blocks.1"], "teacher_taps": ["blocks.1"]}
    distill = {"method": ["sp"], "options": {"sp": taps}}
    states = []
    for on in (False, True):
        sections = {"model": VIT, "teacher": {"model": VIT}, "distill": distill, "train": {"gradient_checkpointing": on}}
        states.append(train(Group(), config(tmp_path / str(on), **sections))["state"])
    assert relative_difference(*states) < 1e-9


def test_fewer_activations_are_stored() -> None:
    kept = []
    for on in (False, True):
        model = build_model(VIT, num_classes=3, image_size=8, seed=0).train()
        if on:
            use_gradient_checkpointing(model, VIT)
        sizes: list[int] = []
        with saved_tensors_hooks(lambda tensor, sizes=sizes: sizes.append(tensor.numel()) or tensor, lambda tensor: tensor):
            model(model.patch_embed.proj.weight.new_ones(2, 3, 8, 8))
        kept.append(sum(sizes))
    assert kept[1] < 0.5 * kept[0]


@pytest.mark.parametrize(
    ("name", "message"), [("resnet8", "resnet8 has batch norms"), ("mlp_small", "mlp_small does not support")]
)
def test_models_without_it_are_refused(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        use_gradient_checkpointing(build_model(name, num_classes=3, image_size=8, seed=0), name)
