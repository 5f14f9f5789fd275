"""A step over memory of its own, with all that changes in tensors, is the eager step bit for bit; and it is the same operations
from step to step, so that a replay of them is too: rate and weight change with every step, and no Python runs that reads them."""

import contextlib
import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainables.engine.graphed_jobs import Trained, fuse_optimizers, settings
from tests.trainables.jobs import Recorded, no_telemetry
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.engine import graphed_step
from trainables.engine.graphed_step import GraphedStep, obstacle
from trainables.engine.job import build
from trainables.engine.step_recording import StepRecording
from trainables.methods.registry import METHODS

QUICK = {"kd", "ab", "crd", "pskd"}
"""No terms, an epoch in the draws, an epoch in the loss; the others are slow together."""
STEPS = 8
"""Two epochs, of which each captures anew what changes with the epoch."""
SYNCHRONISING = {"kdsvd"}
"""Its singular values: their solver asks the host whether it has converged."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Trained]:
    """The training of a method as it is by default, graphed or not; each once."""

    @cache
    def train(method: str, graphed: bool) -> Trained:
        return Trained(settings(method, tmp_path_factory.mktemp("trained") / "job"), graphed=graphed, steps=STEPS)

    return train


def assert_equal(eager: Trained, graphed: Trained) -> None:
    expected, found = eager.state(), graphed.state()
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in sorted(METHODS.keys() - SYNCHRONISING)],
)
def test_a_methods_step_in_memory_of_its_own_is_the_eager_step_bit_for_bit(
    trained: Callable[[str, bool], Trained], method: str
) -> None:
    eager, graphed = trained(method, False), trained(method, True)
    assert graphed.step.off is None
    assert graphed.num_replays >= 4
    assert_equal(eager, graphed)


@pytest.mark.parametrize("method", sorted(SYNCHRONISING))
def test_a_method_that_waits_for_the_device_is_not_captured(tmp_path: Path, method: str) -> None:
    config = settings(method, tmp_path / "job")
    eager, graphed = (Trained(config, graphed=graphed, steps=6) for graphed in (False, True))
    assert graphed.step.off is not None
    assert "waits for the device" in graphed.step.off
    assert graphed.num_replays == 0
    assert_equal(eager, graphed)


@pytest.mark.parametrize(
    "optim",
    [
        {"name": "adamw"},
        {"name": "dot", "delta": 0.05},
        {"name": "sgd", "nesterov": True, "losses": {"kd": {"lr": 0.005}}},
        {"schedule": "step", "milestones": [1, 2], "clip_grad_norm": None},
    ],
    ids=["adamw", "dot", "an optimizer for each loss", "steps"],
)
def test_an_optimizers_step_in_memory_of_its_own_is_the_eager_step_bit_for_bit(tmp_path: Path, optim: dict[str, Any]) -> None:
    config = settings("kd", tmp_path / "job", optim=optim)
    eager, graphed = (Trained(config, graphed=graphed, steps=STEPS) for graphed in (False, True))
    assert graphed.step.off is None
    assert graphed.num_replays >= 4
    assert_equal(eager, graphed)


OWN = """
import torch
from trainables.methods.contract import Method, MethodBatch, ModelOutputs, Requirements


class Own(Method):
    terms = ("mean",)
    requires = Requirements(teacher=False)

    def __init__(self, options, context):
        super().__init__(options, context)
        self.count = 0
        self.register_buffer("last", torch.zeros(()))

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch):
        logits_BK = student.logits_BK
        {line}
        return {{"mean": logits_BK.square().mean(1)}}
"""


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("self.count += 1; logits_BK = logits_BK * (1 / self.count)", "changes from step to step"),
        ("logits_BK = logits_BK * batch.epoch", "changes from step to step"),
        ("logits_BK = logits_BK * float(logits_BK.detach().mean() > 9)", "_local_scalar_dense waits for the device"),
        ("logits_BK = logits_BK * logits_BK[logits_BK > 0].numel()", "by a mask waits for the device"),
        ("self.last = logits_BK.detach().mean()", "methods.Own.last is replaced by another tensor"),
        ("logits_BK = logits_BK * torch.tensor(0.5)", "a tensor is made of numbers of the host"),
        ("self.count += 1; logits_BK = logits_BK + 0 if self.count % 2 else logits_BK", "changes from step to step"),
    ],
)
def test_a_step_that_a_replay_would_get_wrong_is_found_before_it_is_captured(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "own.py").write_text(OWN.format(line=line))
    config = settings("kd", tmp_path / "job", distill={"method": [f"{tmp_path}/own.py:Own"], "options": {}}, teacher=None)
    graphed = Trained(config, graphed=True, steps=6)
    assert graphed.step.off is not None
    assert reason in graphed.step.off
    assert graphed.num_replays == 0


def test_a_number_that_changes_with_the_epoch_is_captured_anew(trained: Callable[[str, bool], Trained]) -> None:
    assert trained("pskd", True).num_captures == 2
    assert trained("kd", True).num_captures == 1


def test_a_failed_capture_leaves_the_steps_as_they_were(
    tmp_path: Path, trained: Callable[[str, bool], Trained], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(run: Any) -> Any:
        for parameter in run.func.__self__.train_state.distillation_module.parameters():
            parameter.grad = torch.ones_like(parameter)  # as far as it came
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    config = settings("kd", tmp_path / "job")
    with caplog.at_level("INFO", "raydistill"):
        graphed = Trained(config, graphed=True, capture=fail, steps=STEPS)
    assert "one operation at a time: operation not permitted" in caplog.text
    assert_equal(trained("kd", False), graphed)


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({}, None),
        ({"precision": "fp16"}, "precision fp16"),
        ({"precision": "fp64"}, "precision fp64"),
        ({"optim": {"accumulate": 2}}, "optim.accumulate"),
        ({"train": {"compile": True}}, "train.compile"),
    ],
)
def test_what_no_graph_can_hold_is_known_before_the_first_step(
    tmp_path: Path, section: dict[str, Any], reason: str | None
) -> None:
    config = settings("kd", tmp_path / "job", train={"cuda_graphs": True})
    with contextlib.closing(build(config, Group(), Recorded(), no_telemetry)) as job:
        state = job.train_state
        assert obstacle(config, state) == "there are none on a CPU"
        fuse_optimizers(job)
        on_gpu = dataclasses.replace(state, group=dataclasses.replace(state.group, device=torch.device("cuda")))
        changed = TrainConfig.model_validate(merged(config.model_dump(mode="json"), section))
        found = obstacle(changed, on_gpu)
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.parametrize(
    ("optim", "name"), [({"name": "adamw"}, "AdamW"), ({"name": "sgd", "losses": {"kd": {"lr": 0.1}}}, "SGD")]
)
def test_an_optimizer_that_is_not_fused_is_known_before_the_first_step(tmp_path: Path, optim: dict[str, Any], name: str) -> None:
    config = settings("kd", tmp_path / "job", optim=optim)
    with contextlib.closing(build(config, Group(), Recorded(), no_telemetry)) as job:
        state = job.train_state
        on_gpu = dataclasses.replace(state, group=dataclasses.replace(state.group, device=torch.device("cuda")))
        fuse_optimizers(job)
        assert obstacle(config, on_gpu) is None
        state.optimizers[-1].optimizer.param_groups[-1]["fused"] = None
        assert obstacle(config, on_gpu) == f"the optimizer {name} is not fused: its step reads numbers of the host"


def test_several_workers_are_known_before_the_first_step(tmp_path: Path) -> None:
    config = settings("kd", tmp_path / "job")
    with contextlib.closing(build(config, Group(), Recorded(), no_telemetry)) as job:
        group = dataclasses.replace(job.train_state.group, device=torch.device("cuda"), world_size=2)
        found = obstacle(config, dataclasses.replace(job.train_state, group=group))
    assert found == "scale.num_workers: 2 workers take part in one all-reduce, which is not captured yet: write 1"


@pytest.mark.parametrize("baked", ["rates", "weights"])
def test_the_replays_of_these_tests_show_a_number_that_is_not_in_a_tensor(
    tmp_path: Path, trained: Callable[[str, bool], Trained], monkeypatch: pytest.MonkeyPatch, baked: str
) -> None:
    eager, config = trained("kd", False), settings("kd", tmp_path / "job")
    if baked == "rates":
        monkeypatch.setattr(GraphedStep, "_rates_in_tensors", contextlib.nullcontext)
    else:
        monkeypatch.setattr(graphed_step, "_Number", BakedNumber)
    monkeypatch.setattr(StepRecording, "difference", lambda *_: None)
    graphed = Trained(config, graphed=True, steps=STEPS)
    assert graphed.num_replays >= 4
    with pytest.raises(AssertionError):
        assert_equal(eager, graphed)


class BakedNumber:
    """What `_Number` must not be."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(())

    def set(self, value: float) -> None:
        self.tensor = torch.tensor(value)


def merged(tree: dict[str, Any], section: dict[str, Any]) -> dict[str, Any]:
    return {name: tree[name] | value if isinstance(value, dict) else value for name, value in {**tree, **section}.items()}
