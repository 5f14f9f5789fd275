"""A step over memory of its own, with all that changes in tensors, is the eager step bit for bit; and it is the same operations
from step to step, so that a replay of them is too: rate and weight change with every step, and no Python runs that reads them."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainables.engine.graphed_jobs import CpuCapture, Trained, fuse_optimizers, graphs_of, settings, state_on_rank
from tests.trainables.jobs import Recorded, equal, no_telemetry
from trainables.config import TrainConfig
from trainables.device.device_batches import on_device
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine import graphed_step
from trainables.engine.graph_obstacle import obstacle
from trainables.engine.graphed_step import GraphedStep
from trainables.engine.job import Job, build
from trainables.engine.step import TrainingParts
from trainables.engine.step_recording import StepRecording
from trainables.engine.updates import UpdateSettings
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


OVERLAPPING = ["side", "wait", "side", "wait", "side", "teacher", "wait", "release", "gradients", "update"]
"""A replayed step: the copy, the augmentation and the teacher in the side stream, which goes on before the gradients."""


def replayed_steps(calls: list[str]) -> list[list[str]]:
    """The calls of each replayed step: those after the update or the release of the step before."""
    steps, begin = [], 0
    for end, call in enumerate(calls, start=1):
        if call == "update":
            steps.append(calls[begin:end])
        if call == "update" or calls[end - 1 : end + 1] == ["release", "side"]:
            begin = end
    return steps


@pytest.mark.parametrize("method", ["kd", "crd"])
def test_the_teacher_of_a_replayed_step_overlaps_with_the_step_before(
    trained: Callable[[str, bool], Trained], method: str
) -> None:
    steps = replayed_steps(trained(method, True).counts.calls)
    assert steps == [OVERLAPPING] * len(steps)
    assert len(steps) >= 4


def test_nothing_overlaps_with_a_step_that_is_not_replayed(trained: Callable[[str, bool], Trained]) -> None:
    calls = trained("kd", True).counts.calls
    first_replay = calls.index("teacher")
    assert calls[:first_replay].count("release") == 2 * 3  # of each of three: once its outputs are read, and at its end
    assert calls[: first_replay - 5][-1] == "release"


def test_a_teacher_that_no_method_reads_is_not_run(trained: Callable[[str, bool], Trained]) -> None:
    assert {"side", "teacher"}.isdisjoint(trained("pskd", True).counts.calls)


def test_a_teacher_that_normalises_by_the_batch_stays_in_the_students_graph(tmp_path: Path) -> None:
    config = settings("ofd", tmp_path / "job", distill={"options": {"ofd": {"teacher_norm": "batch"}}})
    eager, graphed = (Trained(config, graphed=graphed, steps=STEPS) for graphed in (False, True))
    assert graphed.num_replays >= 4
    assert {"side", "teacher"}.isdisjoint(graphed.counts.calls)
    assert_equal(eager, graphed)


def test_steps_of_too_many_shapes_are_taken_without_graphs_and_train_the_same(
    tmp_path: Path, trained: Callable[[str, bool], Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphed_step, "MAX_SHAPES", 1)  # an epoch's last batch has another one
    graphed = Trained(settings("kd", tmp_path / "job"), graphed=True, steps=STEPS)
    assert graphed.num_replays >= 4
    assert_equal(trained("kd", False), graphed)


class FailingCapture(CpuCapture):
    """Of a part of a step: teacher, gradients or update."""

    def __init__(self, part: int = 0) -> None:
        super().__init__()
        self._part = part

    def __call__(self, run: Callable[[], None], *, side: bool = False) -> Callable[[], None]:
        replay = super().__call__(run, side=side)
        self._part -= 1
        if self._part < 0:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return replay


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_failed_capture_leaves_the_steps_as_they_were(
    tmp_path: Path, trained: Callable[[str, bool], Trained], caplog: pytest.LogCaptureFixture, part: int
) -> None:
    config = settings("kd", tmp_path / "job")
    with caplog.at_level("INFO", "raydistill"):
        graphed = Trained(config, graphed=True, capture=FailingCapture(part), steps=STEPS)
    assert "one operation at a time: operation not permitted" in caplog.text
    assert_equal(trained("kd", False), graphed)


class FullMemory(CpuCapture):
    """Of a GPU with room for the graphs, or for a step as large as theirs."""

    def has_room(self, relative_batch: float) -> bool:
        return relative_batch < 1


def test_graphs_are_freed_and_recaptured_where_an_eager_step_would_not_fit_in_memory(
    tmp_path: Path, trained: Callable[[str, bool], Trained]
) -> None:
    graphed = Trained(settings("kd", tmp_path / "job"), graphed=True, capture=FullMemory(), steps=STEPS)
    assert graphed.num_captures == 2  # once more as the second epoch begins; not for the last, smaller batch of the first
    assert graphed.num_replays >= 4
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
    config = settings("kd", tmp_path / "job")
    with contextlib.closing(build(config, Group(), Recorded(), no_telemetry)) as job:
        fuse_optimizers(job)
        changed = TrainConfig.model_validate(merged(config.model_dump(mode="json"), section))
        found = obstacle_on_gpus(job, changed)
    assert found is None if reason is None else reason in (found or "")


def obstacle_on_gpus(job: Job, config: TrainConfig, num_workers: int = 1) -> str | None:
    group, state = Group(world_size=num_workers, device=torch.device("cuda")), job.train_state
    settings = UpdateSettings(job.checkpoint_state.scaler, group)
    parts = TrainingParts(state.distillation_module, state.teacher, state.optimizers, settings, state.epochs)
    return obstacle(config, group, parts)


def test_the_log_names_the_reason_why_a_cpu_has_no_graphs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = settings("kd", tmp_path / "job", train={"cuda_graphs": True})
    with caplog.at_level("INFO", "raydistill"), contextlib.closing(build(config, Group(), Recorded(), no_telemetry)) as job:
        assert not isinstance(job.functions.train_step, GraphedStep)
    assert "train.cuda_graphs: steps are launched one operation at a time: there are none on a CPU" in caplog.text


@pytest.mark.parametrize(
    ("optim", "name"), [({"name": "adamw"}, "AdamW"), ({"name": "sgd", "losses": {"kd": {"lr": 0.1}}}, "SGD")]
)
def test_an_optimizer_that_is_not_fused_is_known_before_the_first_step(tmp_path: Path, optim: dict[str, Any], name: str) -> None:
    config = settings("kd", tmp_path / "job", optim=optim)
    with contextlib.closing(build(config, Group(), Recorded(), no_telemetry)) as job:
        fuse_optimizers(job)
        assert obstacle_on_gpus(job, config) is None
        job.train_state.optimizers[-1].optimizer.param_groups[-1]["fused"] = None
        assert obstacle_on_gpus(job, config) == f"the optimizer {name} is not fused: its step reads numbers of the host"


LOCAL = {"scale": {"sync_batch_norm": False}}


@pytest.mark.parametrize(
    ("method", "sections", "reason"),
    [
        ("kd", LOCAL, None),
        ("kd", {}, "scale.sync_batch_norm: the workers exchange statistics"),
        ("rkd", LOCAL, "a method compares the samples of all workers"),
        ("kd", {**LOCAL, "optim": {"name": "sgd", "losses": {"kd": {"lr": 0.1}}}}, "losses have optimizers of their own"),
    ],
)
def test_what_several_workers_exchange_within_a_step_is_known_before_the_first_one(
    tmp_path: Path, method: str, sections: dict[str, Any], reason: str | None
) -> None:
    config = settings(method, tmp_path / "job", **sections)
    with contextlib.closing(build(config, Group(), Recorded(), no_telemetry)) as job:
        fuse_optimizers(job)
        assert obstacle_on_gpus(job, config) is None
        found = obstacle_on_gpus(job, config, num_workers=2)
    assert found is None if reason is None else reason in (found or "")


UNEVEN = {"synthetic_images": 41}
"""The sixth batch of an epoch has one image: the second rank has none."""


def trained_on_rank(group: Group, config: TrainConfig, graphed: bool, capture: CpuCapture | None = None) -> dict[str, Any]:
    """`capture`: of the second rank."""
    return state_on_rank(group, config, graphed, STEPS, capture if group.rank == 1 else None)


@pytest.mark.parametrize(
    ("data", "capture"),
    [({}, None), (UNEVEN, None), (UNEVEN, FailingCapture(0)), ({}, FailingCapture(2)), ({}, FullMemory())],
    ids=["even", "uneven", "a rank that cannot capture", "one that cannot capture the update", "one without memory"],
)
def test_workers_that_replay_their_steps_train_bit_for_bit_what_ddp_trains(
    ranks: RankPool, tmp_path: Path, data: dict[str, Any], capture: CpuCapture | None
) -> None:
    config = settings("kd", tmp_path / "job", data=data, scale={"sync_batch_norm": False})
    eager, graphed = (ranks.run(2, trained_on_rank, config, graphed, capture) for graphed in (False, True))
    for rank, (expected, found) in enumerate(zip(eager, graphed, strict=True)):
        if rank == 1 and isinstance(capture, FailingCapture):
            assert found["off"] == "rank 1: operation not permitted"
        else:
            assert found["off"] is None
            assert found["replays"] >= 4
        assert equal(found["state"], expected["state"])
        assert found["noise"] == pytest.approx(expected["noise"], rel=1e-5)


@pytest.mark.parametrize(("method", "scale"), [("rkd", {}), ("kd", {"sync_batch_norm": True})])
def test_a_step_in_which_workers_exchange_rows_is_not_captured(
    ranks: RankPool, tmp_path: Path, method: str, scale: dict[str, Any]
) -> None:
    config = settings(method, tmp_path / "job", scale=scale)
    eager, graphed = (ranks.run(2, trained_on_rank, config, graphed) for graphed in (False, True))
    for expected, found in zip(eager, graphed, strict=True):
        assert "the workers exchange tensors within it" in found["off"]
        assert equal(found["state"], expected["state"])


@pytest.mark.parametrize("baked", ["rates", "weights"])
def test_the_replays_of_these_tests_show_a_number_that_is_not_in_a_tensor(
    tmp_path: Path, trained: Callable[[str, bool], Trained], monkeypatch: pytest.MonkeyPatch, baked: str
) -> None:
    eager, config = trained("kd", False), settings("kd", tmp_path / "job")
    if baked == "rates":
        monkeypatch.setattr(GraphedStep, "_rates_in_tensors", contextlib.nullcontext)
    else:
        monkeypatch.setattr(graphed_step, "DeviceNumber", BakedNumber)
    monkeypatch.setattr(StepRecording, "difference", lambda *_: None)
    graphed = Trained(config, graphed=True, steps=STEPS)
    assert graphed.num_replays >= 4
    with pytest.raises(AssertionError):
        assert_equal(eager, graphed)


class BakedNumber:
    """What `DeviceNumber` must not be."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(())

    def set(self, value: float) -> None:
        self.tensor = torch.tensor(value)


def merged(tree: dict[str, Any], section: dict[str, Any]) -> dict[str, Any]:
    return {name: tree[name] | value if isinstance(value, dict) else value for name, value in {**tree, **section}.items()}


def phases_with_a_slow_rank(group: Group, config: TrainConfig) -> dict[str, float]:
    """This rank's mean phases of replayed steps, in which the second rank waits for its batch."""
    with graphs_of(CpuCapture()):
        job = build(config, group, Recorded(), no_telemetry)
    with contextlib.closing(job):
        fuse_optimizers(job)
        state, timer = job.train_state, job.metrics.timer
        state.epochs = dataclasses.replace(state.epochs, steps_per_epoch=1_000)
        state.begin_epoch(job.epochs.at(0))
        batch = next(iter(on_device(job.train_loader.epoch(0), group.device)))
        for step in range(14):
            if step == 6:
                timer.take()
            timer.start()
            time.sleep(LATE_S if group.rank == 1 and step >= 6 else 0)
            timer.mark("data")
            job.functions.train_step(batch, step, timer)
            timer.stop()
        return timer.take()


def orders_on_rank(group: Group, config: TrainConfig) -> list[list[tuple[int, ...]]]:
    """The position in a rank's heartbeat at each phase of its steps: three that are not replayed, then three that are."""
    with graphs_of(CpuCapture()):
        job = build(config, group, Recorded(), no_telemetry)
    with contextlib.closing(job):
        fuse_optimizers(job)
        state, timer, heartbeat = job.train_state, job.metrics.timer, job.metrics.heartbeat
        state.epochs = dataclasses.replace(state.epochs, steps_per_epoch=1_000)
        state.begin_epoch(job.epochs.at(0))
        heartbeat.enter("train")
        batch, found = next(iter(on_device(job.train_loader.epoch(0), group.device))), list[list[tuple[int, ...]]]()
        for name in ("mark", "begin_micro_batch"):
            call = getattr(timer, name)

            def recorded(*args: str, call: Callable[..., None] = call) -> None:
                call(*args)
                found[-1].append(heartbeat.position().order)

            setattr(timer, name, recorded)
        for step in range(6):
            heartbeat.begin_step(step)
            found.append([])
            timer.start()
            timer.mark("data")
            job.functions.train_step(batch, step, timer)
            timer.stop()
            heartbeat.end_step()
        return found


def test_a_ranks_heartbeat_never_goes_back_within_a_step(ranks: RankPool, tmp_path: Path) -> None:
    config = settings("kd", tmp_path / "job", train={"cuda_graphs": True}, **LOCAL)
    for orders_by_step in ranks.run(2, orders_on_rank, config):
        for orders in orders_by_step:
            in_step = orders[:-1]  # with the last phase the step is over
            assert in_step == sorted(in_step)
            assert len(in_step) >= 7


LATE_S = 0.08


def test_a_rank_that_waits_for_a_late_one_waits_in_its_backward_not_in_its_graph(ranks: RankPool, tmp_path: Path) -> None:
    config = settings("kd", tmp_path / "job", train={"cuda_graphs": True}, **LOCAL)
    punctual, late = ranks.run(2, phases_with_a_slow_rank, config)
    assert punctual["phase/backward_ms"] > 1e3 * LATE_S / 2
    assert punctual["phase/graph_ms"] < punctual["phase/backward_ms"]
    assert late["phase/graph_ms"] > 0
    assert late["phase/backward_ms"] < punctual["phase/backward_ms"] / 2
