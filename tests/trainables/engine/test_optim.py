"""Schedules at the points where they are defined, scaling, and which parameters decay."""

import itertools
import math

import pytest
import torch
from torch import nn

from trainables.config import OptimConfig
from trainables.engine.loss_optimizers import build_optimizers
from trainables.engine.optim import (
    build_optimizer,
    learning_rate,
    learning_rate_scales,
    parameter_copies,
    parameter_groups,
    peak_learning_rate,
)
from trainables.errors import ModelError
from trainables.models.registry import build_model
from trainables.models.tap_names import classifier


@pytest.mark.parametrize(("name", "momentum"), [("sgd", 0.9), ("sgd", 0.0), ("adamw", 0.9), ("dot", 0.9)])
def test_the_memory_of_a_parameter_is_that_of_its_gradients_and_states(name: str, momentum: float) -> None:
    model, optim = nn.Linear(50, 50, bias=False), OptimConfig(name=name, momentum=momentum, nesterov=False)
    num_optimizers = 2 if name == "dot" else 1
    num_tensors = 1
    for _ in range(num_optimizers):
        optimizer = build_optimizer(model.parameters(), optim.model_copy(update={"name": "sgd"} if name == "dot" else {}), {})
        model(torch.ones(1, 50)).sum().backward()
        optimizer.step()
        states = [state for of_one in optimizer.state.values() for state in of_one.values()]
        num_tensors += 1 + sum(isinstance(state, torch.Tensor) and state.numel() == 2500 for state in states)
    assert parameter_copies(optim) == num_tensors


def test_cosine_falls_from_the_peak_to_zero() -> None:
    optim = OptimConfig(epochs=10, schedule="cosine")
    rates = [learning_rate(step, 100, optim, 0.4) for step in (0, 500, 999)]
    assert rates == pytest.approx([0.4, 0.2, 0.2 * (1 - math.cos(math.pi / 1000))], rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "at"),
    [
        # epochs 0 and 1 warm up; 18 and 19 are at the end
        ("cosine", {2: 1.0, 10: 0.1 + 0.9 / 2, 18: 0.1, 19.99: 0.1}),
        ("wsd", {2: 1.0, 12: 1.0, 15: 0.1 + 0.9 / 2, 18: 0.1, 19.99: 0.1}),  # falls in 30 % of 20 epochs: from 12 on
    ],
)
def test_cosine_and_wsd_end_at_the_factor_where_the_cool_down_begins(schedule: str, at: dict[float, float]) -> None:
    ends = {"min_lr_factor": 0.1, "cooldown_epochs": 2, "decay_ratio": 0.3, "warmup_epochs": 2}
    optim = OptimConfig(epochs=20, schedule=schedule, **ends)  # type: ignore[arg-type]
    rates = {epoch: learning_rate(round(epoch * 100), 100, optim, 2.0) for epoch in at}
    assert rates == pytest.approx({epoch: 2 * share for epoch, share in at.items()})


def test_step_multiplies_at_each_milestone() -> None:
    optim = OptimConfig(epochs=100, schedule="step", milestones=(30, 60, 90), gamma=0.1)
    rates = [learning_rate(epoch * 5, 5, optim, 1.0) for epoch in (0, 29, 30, 59, 60, 90, 99)]
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.001, 0.001])


def test_warm_up_rises_linearly_and_meets_the_schedule_at_the_peak() -> None:
    optim = OptimConfig(epochs=10, schedule="constant", warmup_epochs=2)
    rates = [learning_rate(step, 50, optim, 1.0) for step in range(101)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(1 / 101)
    assert rates[100] == 1.0
    differences = {round(b - a, 12) for a, b in itertools.pairwise(rates)}
    assert len(differences) == 1


def test_a_warm_up_in_steps_is_that_of_as_many_epochs_and_no_longer_than_the_training() -> None:
    epochs, steps = OptimConfig(epochs=10, warmup_epochs=2.5), OptimConfig(epochs=10, warmup_steps=50)
    ours, theirs = ([learning_rate(step, 20, each, 1.0) for step in range(200)] for each in (steps, epochs))
    assert ours == pytest.approx(theirs, rel=1e-12)
    assert ours[50] == max(ours) == 1.0
    short = [learning_rate(step, 20, OptimConfig(epochs=10, warmup_steps=500), 1.0) for step in range(200)]
    assert short == pytest.approx([(step + 1) / 201 for step in range(200)])


def test_an_automatic_warm_up_is_a_tenth_of_the_training_and_at_most_ten_epochs() -> None:
    for epochs, warmup_epochs in ((1, 0.1), (30, 3), (300, 10)):
        auto, written = (OptimConfig(epochs=epochs, warmup_epochs=each) for each in ("auto", warmup_epochs))
        rates = [[learning_rate(step, 20, each, 1.0) for step in range(20 * epochs)] for each in (auto, written)]
        assert rates[0] == rates[1]


def test_scaling_multiplies_by_the_batch_over_the_base_batch_or_its_root() -> None:
    assert peak_learning_rate(OptimConfig(lr=0.1, lr_scaling="linear", lr_base_batch=256), 1024) == pytest.approx(0.4)
    assert peak_learning_rate(OptimConfig(lr=0.1, lr_scaling="sqrt", lr_base_batch=256), 1024) == pytest.approx(0.2)
    assert peak_learning_rate(OptimConfig(lr=0.1), 1024) == 0.1


def test_norms_and_biases_can_be_left_out_of_weight_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(4, 2))
    decayed, spared = parameter_groups(model.parameters(), OptimConfig(weight_decay=0.01, decay_norm_and_bias=False), {})
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.01, 0.0)
    assert {id(p) for p in decayed["params"]} == {id(model[0].weight), id(model[3].weight)}
    assert len(spared["params"]) == 4
    (everything,) = parameter_groups(model.parameters(), OptimConfig(weight_decay=0.01), {})
    assert len(everything["params"]) == 6


@pytest.mark.parametrize("fused", [False, True])
def test_a_first_step_that_overflows_leaves_nothing_behind(fused: bool) -> None:
    def trained(first: float | None) -> torch.Tensor:
        weight = nn.Parameter(torch.ones(8))
        optimizer = build_optimizer([weight], OptimConfig(lr=0.1, momentum=0.9), {})
        optimizer.param_groups[0]["fused"] = fused
        optimizer._step_supports_amp_scaling = fused  # type: ignore[attr-defined]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for slope in [first] * (first is not None) + [2.0, 3.0]:
            torch.full((512,), 7.0)  # memory that was somebody's
            optimizer.zero_grad()
            scaler.scale((weight * slope).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return weight.detach()

    assert torch.equal(trained(math.inf), trained(None))


def test_what_has_its_first_gradient_later_begins_then_on_a_gpu_too() -> None:
    early, late = (nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = build_optimizer([early, late], OptimConfig(lr=0.5, momentum=0.5, weight_decay=0.0), {})
    optimizer.param_groups[0]["fused"] = True
    for reached in ([early], [early, late]):
        optimizer.zero_grad()
        sum(weight.sum() for weight in reached).backward()  # type: ignore[union-attr]
        optimizer.step()
    assert early.tolist() == [1 - 0.5 - 0.75] * 4
    assert late.tolist() == [0.5] * 4


def test_the_classifier_has_a_learning_rate_of_its_own() -> None:
    model, optim = build_model("convnet_small", num_classes=3, image_size=8, seed=0), OptimConfig(lr=0.1, lr_head=1.0)
    optimizer = build_optimizers(model, {}, optim)[0]
    optimizer.set_learning_rate(0, steps_per_epoch=10, global_batch_size=8)
    rates = {id(p): group["lr"] for group in optimizer.optimizer.param_groups for p in group["params"]}
    assert {rates.pop(id(p)) for p in classifier(model).parameters()} == {1.0}
    assert {*rates.values()} == {0.1}
    assert sum(map(len, (group["params"] for group in optimizer.optimizer.param_groups))) == len(list(model.parameters()))


def test_layer_decay_is_timms() -> None:
    timm, of_optim = pytest.importorskip("timm"), pytest.importorskip("timm.optim")
    model, optim = timm.create_model("test_vit", num_classes=3), OptimConfig(layer_decay=0.5, decay_norm_and_bias=False)
    expected = {
        id(p): group["lr_scale"] for group in of_optim.param_groups_layer_decay(model, layer_decay=0.5) for p in group["params"]
    }
    assert {id(p): scale for p, scale in learning_rate_scales(model, optim).items()} == expected
    assert len({*expected.values()}) > 4
    with pytest.raises(ModelError, match=r"layer_decay: \w+ does not define its layers"):
        learning_rate_scales(build_model("convnet_small", num_classes=3, image_size=8, seed=0), optim)


def test_a_part_of_a_model_without_parameters_has_an_optimizer_that_does_nothing() -> None:
    build_optimizer(nn.ReLU().parameters(), OptimConfig(), {}).step()
