"""Several losses, several optimizers, one forward: against the same calculated by hand, in float64, on 1 and 2 workers."""

import contextlib
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.trainables.jobs import Recorded, config, equal, no_telemetry, relative_difference, train, write_teacher
from tests.trainables.methods import own_methods
from tests.trainables.methods.calls import make
from tests.trainables.methods.references.basic import Array
from tests.trainables.methods.references.training import DotState, dot_update
from trainables.config import DistillConfig, LossOptimConfig, OptimConfig, TrainConfig
from trainables.device.device_batches import on_device
from trainables.distributed.group import GlobalCount, Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.loss_optimizers import LossOptimizer, build_optimizers
from trainables.engine.optim import learning_rate
from trainables.engine.train import build, run_job, train_step
from trainables.engine.updates import PerLossUpdate, UpdateSettings
from trainables.errors import ExperimentError
from trainables.methods.init_stage import with_init_stage

SECOND = f"{own_methods.__file__}:SecondHead"
HEADS = {"method": [SECOND], "task_weight": 0.7, "options": {"SecondHead": {"weight": 0.4}}}


def trained(group: Group, settings: TrainConfig) -> dict[str, Tensor]:
    """Parameters of student and methods after the job."""
    with contextlib.closing(build(settings, group, Recorded(), no_telemetry)) as job:
        run_job(job)
        return {name: tensor.detach().clone() for name, tensor in job.train_state.distillation_module.named_parameters()}


def per_loss_update(optimizers: tuple[LossOptimizer, ...]) -> PerLossUpdate:
    """An update whose module is never called."""
    return PerLossUpdate(nn.Identity(), optimizers, UpdateSettings(torch.amp.GradScaler("cpu", enabled=False), Group()))


class Heavy:
    """SGD with momentum and weight decay, written down."""

    def __init__(self, lr: float, momentum: float, weight_decay: float, steps: int, **more: Any):
        self.optim = OptimConfig(lr=lr, momentum=momentum, weight_decay=weight_decay, epochs=2, **more)
        self.steps, self.velocity = steps, dict[str, Tensor]()

    def change(self, step: int, values: dict[str, Tensor], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """What it adds to each parameter that its loss reaches."""
        lr = learning_rate(step, self.steps, self.optim, self.optim.lr)
        for name, gradient in gradients.items():
            d = gradient + self.optim.weight_decay * values[name]
            self.velocity[name] = self.optim.momentum * self.velocity[name] + d if name in self.velocity else d
        return {name: -lr * self.velocity[name] for name in gradients}


def by_hand(settings: TrainConfig, optimizers: dict[str, Heavy]) -> dict[str, Tensor]:
    """A forward for each loss, the gradients of all at the same parameters, the changes added up."""
    with contextlib.closing(build(settings, Group(), Recorded(), no_telemetry)) as job:
        values = {name: tensor.detach().clone() for name, tensor in job.train_state.distillation_module.named_parameters()}
        prepare, step = job.train_state.prepare, 0
        mean, std = (torch.tensor(each, dtype=torch.float64)[:, None, None] for each in (settings.data.mean, settings.data.std))
        for epoch in range(settings.optim.epochs):
            for batch in job.train_loader.epoch(epoch):
                images = (prepare(batch).images_BCHW - mean) / std  # type: ignore[arg-type]
                labels = batch.labels_B.clone()
                changes = []
                for key, optimizer in optimizers.items():
                    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
                    hidden = images.flatten(1) @ leaves["student.hidden.0.weight"].T + leaves["student.hidden.0.bias"]
                    if key == "task":
                        logits = hidden.relu() @ leaves["student.head.weight"].T + leaves["student.head.bias"]
                        loss = 0.7 * F.cross_entropy(logits, labels)
                    else:
                        head = "methods.SecondHead.head" if "methods.SecondHead.head.bias" in leaves else "methods.TwoTerms.head"
                        logits = hidden @ leaves[f"{head}.weight"].T + leaves[f"{head}.bias"]
                        loss = 0.4 * F.cross_entropy(logits, (labels + (2 if key == "second" else 1)) % 10)
                    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
                    gradients = {name: g for name, g in zip(leaves, found, strict=True) if g is not None}
                    changes.append(optimizer.change(step, values, gradients))
                values = {
                    name: value + sum((change[name] for change in changes if name in change), torch.zeros_like(value))
                    for name, value in values.items()
                }
                step += 1
        return values


def two_heads(output: Path, **optim: Any) -> TrainConfig:
    tuned = {"epochs": 2, "nesterov": False, "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, **optim}
    return config(output, teacher=None, distill=HEADS, optim=tuned)


def test_each_loss_has_its_own_optimizer_and_neither_leaks_into_the_other(ranks: RankPool, tmp_path: Path) -> None:
    own = {"SecondHead": {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.01}}
    expected = by_hand(
        two_heads(tmp_path / "hand", losses=own), {"task": Heavy(0.05, 0.9, 1e-3, 15), "next": Heavy(0.2, 0.5, 0.01, 15)}
    )
    for n in (1, 2):
        ours = ranks.run(n, trained, two_heads(tmp_path / str(n), losses=own))[0]
        assert relative_difference(expected, ours) < 1e-9


def test_the_terms_of_a_method_may_have_an_optimizer_each(ranks: RankPool, tmp_path: Path) -> None:
    own = {"TwoTerms/second": {"lr": 0.1, "weight_decay": 0.02}, "TwoTerms": {"lr": 0.2, "momentum": 0.5}}
    expected = by_hand(
        rivals(tmp_path / "hand", losses=own),
        {
            "task": Heavy(0.05, 0.9, 1e-3, 15),
            "next": Heavy(0.2, 0.5, 1e-3, 15),
            "second": Heavy(0.1, 0.9, 0.02, 15),
        },
    )
    for n in (1, 2):
        ours = ranks.run(n, trained, rivals(tmp_path / str(n), losses=own))[0]
        assert relative_difference(expected, ours) < 1e-9


def rivals(output: Path, **optim: Any) -> TrainConfig:
    distill = {"method": [f"{own_methods.__file__}:TwoTerms"], "options": {"TwoTerms": {"weight": 0.4}}}
    return two_heads(output, **optim).model_copy(update={"distill": DistillConfig(task_weight=0.7, **distill)})


def test_what_has_no_optimizer_of_its_own_shares_one() -> None:
    methods = {"m": make(f"{own_methods.__file__}:TwoTerms", student_shapes=((4,),)), "kd": make("kd")}

    def losses_of(**losses: LossOptimConfig) -> list[tuple[set[str], float]]:
        optimizers = build_optimizers(nn.Linear(2, 2), methods, OptimConfig(lr=0.5, losses=losses))
        return [(set(each.losses), each.optim.lr) for each in optimizers]

    own = LossOptimConfig(lr=0.25)
    assert losses_of() == [({"task", "kd/kl", "m/next", "m/second"}, 0.5)]
    assert losses_of(kd=own) == [({"kd/kl"}, 0.25), ({"task", "m/next", "m/second"}, 0.5)]
    assert losses_of(**{"m": own, "m/next": own}) == [({"m/second"}, 0.25), ({"m/next"}, 0.25), ({"task", "kd/kl"}, 0.5)]


def test_what_is_never_trained_has_no_optimizer(ranks: RankPool, tmp_path: Path) -> None:
    weights = write_teacher(tmp_path / "teacher.safetensors", "convnet_large")
    job = config(
        tmp_path,
        model="convnet_small",
        teacher={"model": "convnet_large", "weights": weights},
        train={"max_steps": 2},
        distill={"method": ["ft"], "options": {"ft": {"init_epochs": 0}}},
    )
    for optim in ({"losses": {"task": LossOptimConfig(momentum=0.8)}}, {"name": "dot", "nesterov": False}):
        (state,) = ranks.run(1, trained, job.model_copy(update={"optim": job.optim.model_copy(update=optim)}))
        assert all(bool(tensor.isfinite().all()) for tensor in state.values())


@pytest.mark.parametrize(
    ("others", "optim"),
    [
        (["PooledTwoTerms"], {"losses": {"PooledTwoTerms/next": {}}}),
        ([], {"name": "dot"}),
        ([], {"losses": {"task": {"momentum": 0.5}}}),
    ],
)
def test_an_init_stage_has_one_optimizer_whatever_the_training_has(
    tmp_path: Path, others: list[str], optim: dict[str, Any]
) -> None:
    weights, parts = write_teacher(tmp_path / "teacher.safetensors"), ["InitStage", *others]
    distill = {"method": [f"{own_methods.__file__}:{name}" for name in parts], "options": {"InitStage": {"init_epochs": 1}}}
    common = {"teacher": {"weights": weights}, "optim": {"nesterov": False}}
    alone, _ = with_init_stage(config(tmp_path / "alone", **common, distill={**distill, "method": distill["method"][:1]}))
    settings = config(tmp_path / "job", **{**common, "optim": {"nesterov": False, **optim}}, distill=distill)
    init, training = with_init_stage(settings)
    found = trained(Group(), init)
    assert equal(found, trained(Group(), alone))
    with contextlib.closing(build(training, Group(), Recorded(), no_telemetry)) as job:
        assert len(job.train_state.optimizers) > 1
        run_job(job)
        assert torch.equal(
            job.train_state.distillation_module.get_parameter("methods.InitStage.encoder.weight"),
            found["methods.InitStage.encoder.weight"],
        )


def test_dot_gives_the_task_and_the_methods_a_momentum_each(ranks: RankPool, tmp_path: Path) -> None:
    expected = by_hand(two_heads(tmp_path / "hand"), {"task": DotsTask(0.05, 15), "next": DotsOther(0.05, 15)})
    for n in (1, 2):
        ours = ranks.run(n, trained, two_heads(tmp_path / str(n), name="dot", delta=0.05))[0]
        assert relative_difference(expected, ours) < 1e-9


class DotsOne(Heavy):
    """A momentum of its own for what both losses reach; what one alone reaches goes as usual."""

    alone: str
    first_decay = 0.0

    def __init__(self, lr: float, momentum: float, weight_decay: float, steps: int):
        super().__init__(lr, momentum, weight_decay, steps)
        self.plain = Heavy(lr, 0.9, 1e-3, steps)

    def change(self, step: int, values: dict[str, Tensor], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        own = {name: g for name, g in gradients.items() if name.startswith(self.alone)}
        shared = {name: g for name, g in gradients.items() if name not in own}
        if not step:  # the methods' first step of what is theirs alone has no weight decay
            own = {name: g - self.first_decay * values[name] for name, g in own.items()}
        return super().change(step, values, shared) | self.plain.change(step, values, own)


class DotsTask(DotsOne):
    """Less momentum; SecondHead does not reach the classifier."""

    alone = "student.head."

    def __init__(self, lr: float, steps: int):
        super().__init__(lr, 0.85, 1e-3, steps)


class DotsOther(DotsOne):
    """More momentum, without weight decay; the methods' own parameters are theirs alone."""

    alone = "methods."
    first_decay = 1e-3

    def __init__(self, lr: float, steps: int):
        super().__init__(lr, 0.95, 0.0, steps)


@pytest.mark.parametrize("fused", [False, True])
def test_dot_changes_what_one_side_alone_reaches_as_sgd_would(fused: bool) -> None:
    optim = OptimConfig(name="dot", lr=0.5, momentum=0.5, delta=0.25, weight_decay=0.125)
    student, method = nn.Linear(2, 1).double(), make("kd")  # the task reaches the weight, and in the end the bias too
    optimizers = build_optimizers(student, {"kd": method}, optim)
    update = per_loss_update(optimizers)
    for each in optimizers:
        each.set_learning_rate(0, steps_per_epoch=10, global_batch_size=1)
        for group in each.optimizer.param_groups:
            group["fused"] = fused  # as on a GPU
    values = {name: p.detach().clone() for name, p in student.named_parameters()}
    velocity = dict.fromkeys(["task.weight", "task.bias", "kd.weight", "kd.bias"], 0.0)
    for step, both in enumerate((False, True, False)):
        update.backward(Slopes(student, both), GlobalCount(1, Group()), 1)
        update.step()
        for name, value in values.items():
            task, kd = name == "weight" or both, name == "bias" or both
            found = torch.zeros_like(value)
            for side, reaches, slope in (("task", task, 3.0), ("kd", kd, 5.0)):
                if reaches:
                    momentum = (0.25 if side == "task" else 0.75) if both else 0.5
                    decay = 0.0 if side == "kd" and (both or step == 0) else 0.125
                    key = f"{side}.{name}"
                    velocity[key] = momentum * velocity[key] + slope + decay * value  # type: ignore[assignment]
                    found = found - 0.5 * velocity[key]
            values[name] = value + found
        for name, p in student.named_parameters():
            torch.testing.assert_close(p.detach(), values[name], rtol=1e-12, atol=1e-12)


class Slopes:
    """Losses whose gradients are 3 of the task and 5 of `kd`: each by its own parameter, or by both."""

    def __init__(self, student: nn.Linear, both: bool):
        self._parts = {"task": [student.weight], "kd/kl": [student.bias]}
        if both:
            self._parts = {key: [student.weight, student.bias] for key in self._parts}

    def total(self, weight: Tensor, keys: frozenset[str] | None = None) -> Tensor:
        (key,) = keys or ()
        total = torch.stack([p.sum() for p in self._parts[key]]).sum()
        return total * (3.0 if key == "task" else 5.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("decay_norm_and_bias", [True, False])
def test_dot_is_the_references_whatever_each_side_reaches_in_a_step(decay_norm_and_bias: bool, fused: bool) -> None:
    optim = OptimConfig(
        name="dot", lr=0.3, epochs=2, momentum=0.8, delta=0.15, weight_decay=0.02, decay_norm_and_bias=decay_norm_and_bias
    )
    student = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    method = make("fitnet", student_shapes=((2, 3, 3),), teacher_shapes=((3, 3, 3),))
    optimizers = build_optimizers(student, {"fitnet": method}, optim)
    update = per_loss_update(optimizers)
    for group in (group for each in optimizers for group in each.optimizer.param_groups):
        group["fused"] = fused  # as on a GPU
    named = dict(student.named_parameters()) | {f"method.{name}": p for name, p in method.named_parameters()}
    expected = {name: DotState(p.detach().numpy().copy()) for name, p in named.items()}
    numbers, seen = np.random.default_rng(0), set[tuple[bool, bool]]()
    for step in range(12):
        reach = {side: [name for name in named if numbers.random() < 0.6] for side in ("task", "methods")}
        reach["task"] = [name for name in reach["task"] if not name.startswith("method.")]
        found = {side: {name: numbers.normal(size=named[name].shape) for name in names} for side, names in reach.items()}
        for each in optimizers:
            each.set_learning_rate(step, steps_per_epoch=6, global_batch_size=1)
        update.backward(Reaching(named, found), GlobalCount(1, Group()), 1)
        update.step()
        lr = learning_rate(step, 6, optim, optim.lr)
        for name, p in named.items():
            slopes = found["task"].get(name), found["methods"].get(name)
            decay = 0.02 if decay_norm_and_bias or p.ndim > 1 else 0.0
            expected[name] = dot_update(expected[name], *slopes, lr, 0.8, 0.15, decay)
            np.testing.assert_allclose(p.detach().numpy(), expected[name].parameter, rtol=1e-12, atol=1e-12, err_msg=name)
            seen.add((slopes[0] is not None, slopes[1] is not None))
    assert len(seen) == 4  # a parameter that both reach, one alone, the other alone, neither


class Reaching:
    """Losses of the task and of the methods, each with these gradients of some parameters, by name."""

    def __init__(self, named: dict[str, nn.Parameter], found: dict[str, dict[str, Array]]):
        self._named, self._found = named, found

    def total(self, weight: Tensor, keys: frozenset[str] | None = None) -> Tensor:
        found = self._found["task" if keys == {"task"} else "methods"]
        return torch.stack([(self._named[name] * torch.from_numpy(slope)).sum() for name, slope in found.items()]).sum()


def test_gradients_lie_in_memory_as_their_parameters_do() -> None:
    student = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 1)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizers = build_optimizers(student, {"kd": make("kd")}, OptimConfig(losses={"task": LossOptimConfig()}))
    update = per_loss_update(optimizers)
    seen = list[bool]()

    def watch(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            seen.extend(p.grad.stride() == p.stride() for p in group["params"] if p.grad is not None)

    for each in optimizers:
        each.optimizer.register_step_pre_hook(watch)

    class Sums:
        """Whose gradients are one number, in no memory order."""

        def total(self, weight: Tensor, keys: frozenset[str] | None = None) -> Tensor:
            return torch.stack([p.sum() for p in student.parameters()]).sum()

    update.backward(Sums(), GlobalCount(1, Group()), 1)
    update.step()
    assert seen == [True] * 8


def test_a_losss_gradients_are_gone_when_the_next_optimizer_begins() -> None:
    student = nn.Linear(2, 1).double()
    optim = OptimConfig(losses={"task": LossOptimConfig()})
    optimizers = build_optimizers(student, {"kd": make("kd")}, optim)
    update = per_loss_update(optimizers)
    held: list[weakref.ref[Tensor]] = []

    def begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        assert not [found for found in held if found() is not None]
        held.extend(weakref.ref(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None)

    for each in optimizers:
        each.optimizer.register_step_pre_hook(begins)
    update.backward(Slopes(student, True), GlobalCount(1, Group()), 1)
    update.step()
    assert len(held) == 4


@pytest.mark.parametrize(
    ("optim", "num_optimizers"),
    [
        ({"losses": {"SecondHead": {"lr": 0.2}}}, 2),
        ({"name": "dot"}, 2),
        ({"losses": {"TwoTerms/second": {}, "TwoTerms": {}}}, 3),
    ],
    ids=str,
)
def test_one_forward_of_the_student_gives_the_losses_of_all_optimizers(
    tmp_path: Path, optim: dict[str, Any], num_optimizers: int
) -> None:
    settings = (rivals if num_optimizers == 3 else two_heads)(tmp_path, **optim)
    forwards = list[int]()
    with contextlib.closing(build(settings, Group(), Recorded(), no_telemetry)) as job:
        assert len(job.train_state.optimizers) == num_optimizers
        job.student.register_forward_hook(lambda _, images, __: forwards.append(len(images[0])))
        with contextlib.closing(on_device(job.train_loader.epoch(0), job.train_state.group.device)) as batches:
            for step in range(2):
                train_step(job.train_state, next(batches), step, job.metrics.timer)
    assert forwards == [100, 100]


def test_accumulated_micro_batches_give_each_optimizer_the_gradient_of_the_whole(ranks: RankPool, tmp_path: Path) -> None:
    own = {"task": {"momentum": 0.5}}
    whole = ranks.run(1, trained, two_heads(tmp_path / "whole", losses=own))[0]
    for n in (1, 2):
        parts = ranks.run(n, trained, two_heads(tmp_path / f"parts{n}", losses=own, accumulate=3))[0]
        assert relative_difference(whole, parts) < 1e-9


def test_a_job_with_several_optimizers_resumes_exactly(ranks: RankPool, tmp_path: Path) -> None:
    own = {"task": {"momentum": 0.5}, "TwoTerms/next": {"name": "adamw", "lr": 0.01}}
    whole = ranks.run(2, train, rivals(tmp_path / "whole", losses=own))[0]
    settings = rivals(tmp_path / "cut", losses=own)
    assert ranks.run(2, train, settings, 6)[0]["died"]
    resumed = ranks.run(2, train, settings)[0]
    assert relative_difference(whole["state"], resumed["state"]) == 0.0


def test_an_optimizer_for_a_loss_that_there_is_not_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    settings = two_heads(tmp_path, losses={"kd": {"lr": 0.1}})
    with pytest.raises(ExperimentError, match=r"optim.losses: there is no loss 'kd' here: write one of SecondHead, task"):
        ranks.run(1, train, settings)


def test_an_init_stage_trains_its_own_part_and_leaves_the_rest_alone(ranks: RankPool, tmp_path: Path) -> None:
    weights = write_teacher(tmp_path / "teacher.safetensors")
    distill = {"method": [f"{own_methods.__file__}:InitStage", "kd"], "options": {}}
    states = {}
    for n in (1, 2):
        settings = config(tmp_path / str(n), teacher={"weights": weights}, distill=distill, optim={"epochs": 1, "lr": 0.02})
        states[n] = ranks.run(n, stages, settings)[0]
    before, warm, after = states[1]
    moved = {name for name in before if not torch.equal(before[name], warm[name])}
    assert moved == {f"methods.InitStage.{part}.{kind}" for part in ("encoder", "decoder") for kind in ("weight", "bias")}
    moved = {name for name in before if not torch.equal(warm[name], after[name])}
    assert moved == {name for name in before if "encoder" not in name and "decoder" not in name}
    assert relative_difference(after, states[2][2]) < 1e-9


def stages(group: Group, settings: TrainConfig) -> list[dict[str, Tensor]]:
    """Parameters before the init stage, after it, and at the end of the training; each has those of the methods in it."""
    found = []
    for each in with_init_stage(settings):
        with contextlib.closing(build(each, group, Recorded(), no_telemetry)) as job:
            for run in (lambda job: None, run_job):
                run(job)
                found.append(
                    {name: tensor.detach().clone() for name, tensor in job.train_state.distillation_module.named_parameters()}
                )
    before, warm, start, after = found
    assert equal(warm, start)
    return [before, warm, after]
