"""Micro-batches through stages on several ranks, against one process that has the whole model and batch, in float64."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainables.distributed.group import Group
from trainables.distributed.pipeline.graph import split
from trainables.distributed.pipeline.runner import PipelineRunner
from trainables.distributed.rank_pool import RankPool
from trainables.models.registry import build_model

CUTS = {2: ["layer2"], 3: ["layer2", "layer3"]}


def _model() -> nn.Module:
    """A small residual network whose norms do not see the batch."""
    model = build_model("resnet8", num_classes=5, image_size=32, seed=1)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, nn.GroupNorm(4, child.num_features))
    return model.double()


def _batch(num_samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_samples)
    images_BCHW = torch.randn(num_samples, 3, 32, 32, dtype=torch.float64, generator=generator)
    return images_BCHW, torch.randint(5, (num_samples,), generator=generator)


def _runner(model: nn.Module, group: Group, schedule: str) -> tuple[nn.Module, PipelineRunner]:
    stage = split(model, CUTS[group.world_size])[group.rank]
    stages = dataclasses.replace(group, process_group=dist.group.WORLD)
    return stage, PipelineRunner(stage, torch.empty(2, 3, 32, 32, dtype=torch.float64), stages, schedule)


def logits(group: Group, batches: list[tuple[int, int]]) -> list[Tensor | None]:
    _, runner = _runner(_model(), group, "1f1b")
    return [runner.run(_batch(num_samples)[0], number, training=False) for num_samples, number in batches]


def held_by_inference(group: Group) -> int:
    """Activations that the runner still refers to."""
    _, runner = _runner(_model(), group, "1f1b")
    runner.run(_batch(8)[0], 4, training=False)
    return sum(len(built._forward_chunk_states) + len(built.output_chunks) for built, _ in runner._built.values())


def gradients(group: Group, schedule: str, batches: list[tuple[int, int]]) -> list[dict[str, Tensor]]:
    """Those of this rank's stage for each (samples, micro-batches)."""
    model = _model()
    stage, runner = _runner(model, group, schedule)
    found = []
    for num_samples, num_micro_batches in batches:
        images_BCHW, labels_B = _batch(num_samples)

        positions = iter(torch.arange(num_samples).tensor_split(min(num_samples, num_micro_batches)))

        def loss(received: Tensor, labels_B: Tensor = labels_B, positions: Iterator[Tensor] = positions) -> Tensor:
            return F.cross_entropy(stage(received), labels_B[next(positions)], reduction="sum") / len(labels_B)

        stage.zero_grad()
        runner.run(images_BCHW, num_micro_batches, loss=loss if runner.is_last else None)
        found.append({name: parameter.grad.clone() for name, parameter in stage.named_parameters() if parameter.grad is not None})
    return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_gradients_are_those_of_one_process_also_of_uneven_batches(ranks: RankPool, num_stages: int, schedule: str) -> None:
    batches = [(8, 4), (7, 3), (8, 4), (5, 1), (1, 4)]
    stages = ranks.run(num_stages, gradients, schedule, batches)
    for index, (num_samples, _) in enumerate(batches):
        model = _model()
        images_BCHW, labels_B = _batch(num_samples)
        F.cross_entropy(model(images_BCHW), labels_B).backward()
        found = {name: gradient for stage in stages for name, gradient in stage[index].items()}
        assert found.keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_logits_have_the_bits_of_one_process(ranks: RankPool, num_stages: int) -> None:
    batches = [(8, 4), (7, 3), (1, 4)]
    *others, last = ranks.run(num_stages, logits, batches)
    assert all(found is None for rank in others for found in rank)
    model = _model()
    with torch.no_grad():
        for (num_samples, number), found in zip(batches, last, strict=True):
            parts = _batch(num_samples)[0].tensor_split(min(num_samples, number))
            assert torch.equal(found, torch.cat([model(part) for part in parts]))


def test_inference_keeps_no_activations(ranks: RankPool) -> None:
    assert ranks.run(2, held_by_inference) == [0, 0]


def runs_of_schedules(group: Group) -> int:
    """For a batch whose micro-batches are of two sizes."""
    _, runner = _runner(_model(), group, "1f1b")
    runner.run(_batch(7)[0], 3, training=False)
    return len(runner._built)


def test_micro_batches_of_two_sizes_drain_the_pipeline_once(ranks: RankPool) -> None:
    assert ranks.run(2, runs_of_schedules) == [1, 1]


def sizes_of_passes(group: Group) -> list[int]:
    """What a stage's modules get of uneven micro-batches."""
    stage, runner = _runner(_model(), group, "1f1b")
    sizes = []
    stage.register_forward_pre_hook(lambda module, received: sizes.append(len(received[0])))
    runner.run(_batch(7)[0], 3, training=False)
    return sizes


def test_no_module_gets_rows_that_are_no_samples(ranks: RankPool) -> None:
    assert ranks.run(2, sizes_of_passes) == [[3, 2, 2], [3, 2, 2]]
