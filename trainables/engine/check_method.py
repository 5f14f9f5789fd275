"""Whether a method keeps its contract: small real training jobs on one to three workers, compared with each other.

Student and teacher are a CIFAR ResNet each, whose batch norms look at the global batch, on noise images in float64; the last
batch of an epoch has one sample, so that all workers but one have none.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainables.config import TrainConfig
from trainables.device.device_batches import on_device
from trainables.distributed.gather import Gather
from trainables.distributed.group import Group
from trainables.engine import checkpoint, loop
from trainables.engine.job import Job, build
from trainables.engine.step import Losses, losses
from trainables.errors import DistillError
from trainables.methods import load, option_key
from trainables.methods.contract import MethodBatch
from trainables.methods.distillation_module import describe_terms
from trainables.models.registry import build_model

RunRanks = Callable[..., list[Any]]
"""`run(n, function, *args)`: what `function(group, *args)` returns on each of n ranks."""
TOLERANCE = 1e-9
SEED, CLASSES, IMAGES, BATCH = 3, 4, 17, 8


class Finding(NamedTuple):
    """One thing that the contract asks for."""

    title: str
    problem: str | None
    """None: the method does it."""


class Case(NamedTuple):
    """What is checked."""

    name: str
    options: Mapping[str, Any]
    student: str = "resnet8"
    teacher: str = "resnet14"
    image_size: int = 16


def check(case: Case, run: RunRanks) -> Iterator[Finding]:
    """Check a method, one finding after the other.

    Raises:
        ExperimentError: it cannot be loaded.
        pydantic.ValidationError: it does not have such options.
    """
    kind = load(case.name)
    kind.Options.model_validate(case.options)
    with tempfile.TemporaryDirectory(prefix="raydistill-") as folder:
        root = Path(folder)
        yield _judged("its terms are those that it declares, of samples or of the batch", lambda: _terms(case, root, run))
        yield _judged("gradients reach the student and all that the method trains", lambda: _reach(case, root, run))
        yield _judged(f"2 and 3 workers train what one trains, to {TOLERANCE:g}", lambda: _workers(case, root, run))
        yield _judged("a job that was cut off goes on exactly", lambda: _resumed(case, root, run))
        yield _judged("everything is finite in bf16", lambda: _finite(case, root, run))
        yield _judged("a student that equals its teacher has finite gradients", lambda: _equal(case, root, run))


def _judged(title: str, work: Callable[[], str | None]) -> Finding:
    try:
        return Finding(title, work())
    except DistillError as error:
        return Finding(title, str(error))
    except Exception as error:  # a user's method may fail in any way
        return Finding(title, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")


def settings(case: Case, output: Path, *, precision: str = "fp64", same: bool = False) -> TrainConfig:
    """A job of two epochs; its teacher's checkpoint is written beside it. `same`: the teacher is the student as it begins."""
    teacher = case.student if same else case.teacher
    seed = SEED if same else SEED + 1
    model = build_model(teacher, num_classes=CLASSES, image_size=case.image_size, seed=seed)
    about = {
        "model": teacher,
        "num_classes": CLASSES,
        "image_size": case.image_size,
        "classes": [str(label) for label in range(CLASSES)],
    }
    weights = output.parent / f"{output.name}-teacher.safetensors"
    output.mkdir(parents=True, exist_ok=True)
    checkpoint.write_tensors(weights, {f"model.{name}": tensor for name, tensor in model.state_dict().items()}, about)
    kind, options = load(case.name), dict(case.options)
    if "init_epochs" in kind.Options.model_fields:
        options.setdefault("init_epochs", 1)
    return TrainConfig.model_validate(
        {
            "output_dir": str(output),
            "model": case.student,
            "precision": precision,
            "seed": SEED,
            "data": {
                "path": "synthetic",
                "synthetic_images": IMAGES,
                "synthetic_classes": CLASSES,
                "image_size": case.image_size,
                "global_batch_size": BATCH,
                "loader_workers": 1,
                "last_batch": "short",
            },
            "teacher": {"model": teacher, "weights": str(weights)},
            "distill": {"method": [case.name], "options": {option_key(case.name): options}},
            "optim": {"epochs": 2, "lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-3},
            "scale": {"sync_batch_norm": True},
            "train": {"log_every": 1, "warmup_steps": 1, "checkpoint_every": 1},
        }
    )


class CutOffError(Exception):
    """As if the job was killed."""


class _Silent:
    """A report that nobody reads; it may cut the job off at a step."""

    def __init__(self, cut_at: int | None = None):
        self._cut_at = cut_at

    def __call__(self, kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None:
        if kind == "step" and step == self._cut_at:
            raise CutOffError


def _no_telemetry(whole: bool = False) -> dict[str, float]:
    return {}


def _opened(config: TrainConfig, group: Group, cut_at: int | None = None) -> contextlib.closing[Job]:
    return contextlib.closing(build(config, group, _Silent(cut_at), _no_telemetry))


def train(group: Group, config: TrainConfig, cut_at: int | None = None) -> dict[str, Tensor]:
    """Run the job on this rank. Returns the student's and the method's parameters, and the method's memory."""
    with _opened(config, group, cut_at) as job:
        with contextlib.suppress(CutOffError):
            loop.run(job)
        distillation_module = job.train_state.distillation_module
        state = {f"method.{name}": tensor for name, tensor in distillation_module.methods.state_dict().items()}
        return {
            name: tensor.detach().clone()
            for name, tensor in (state | dict(distillation_module.student.named_parameters())).items()
        }


class Answered(NamedTuple):
    """What a method says to a batch, and whom it moves."""

    terms: dict[str, tuple[int, ...]]
    rows: int
    largest: dict[str, float | None]
    """Trainable parameter → its largest gradients from task and method, added, each where an optimizer that has the parameter
    lowers that loss; None where none arrives."""
    taught: float
    """Of the student, the same from the method alone, over all parameters; in an init stage of what that trains."""
    gathers: bool
    """Whether it asks for the rows of all workers."""
    several: bool
    """Whether there are several optimizers, and no DDP then."""


def answer(group: Group, config: TrainConfig, epoch: float = 0.0, as_taught: bool = False) -> Answered:
    """One batch through student, teacher and method, without an update, when so many epochs have passed.

    `as_taught`: the student's batch norms run as its teacher's.
    """
    with _opened(config, group) as job, contextlib.closing(on_device(job.train_loader.epoch(0), group.device)) as batches:
        train_state, batch = job.train_state, next(batches)
        distillation_module = train_state.distillation_module
        distillation_module.train()
        distillation_module.student.train(not as_taught)
        distillation_module.begin_stage(epoch)
        images, rows = train_state.prepare(batch).images_BCHW, len(batch.labels_B)
        taught = train_state.teacher(images, rows) if train_state.teacher is not None else None
        gather = Gather(rows, group)
        said = distillation_module(images, MethodBatch(images, batch.labels_B, batch.indices_B, epoch, gather), taught)
        loss = losses(said, batch.labels_B, None, distillation_module.weights(1.0 if epoch >= 0 else epoch))
        only, told = distillation_module.init_targets(epoch), frozenset(loss.weighted) - {"task"}
        lowered = [(told, only.parameters)] if only else [(each.losses, each.parameters) for each in train_state.optimizers]
        names = {p: name for name, p in distillation_module.named_parameters() if p.requires_grad}
        student, method = set(distillation_module.student.parameters()), 0.0
        largest: dict[str, float | None] = {names[p]: None for p in (only.parameters if only else names) if p in names}
        for keys, parameters in lowered:
            moved = [p for p in parameters if p in names]
            for part in (keys & told, keys - told):
                for p, found in zip(moved, _largest(loss, part, moved), strict=True):
                    if found is not None:
                        largest[names[p]] = (largest[names[p]] or 0.0) + found
                        method += found if part <= told and (only is not None or p in student) else 0.0
        (terms,) = said.terms.values() if said.terms else ({},)
        shapes = {name: tuple(term.shape) for name, term in terms.items()}
        return Answered(shapes, rows, largest, method, gather.used, len(train_state.optimizers) > 1)


def _largest(loss: Losses, keys: frozenset[str], parameters: Sequence[nn.Parameter]) -> list[float | None]:
    """The largest gradient of each parameter from some of the losses, None where none arrives."""
    if not keys & loss.weighted.keys():
        return [None] * len(parameters)
    total = loss.total(torch.ones((), dtype=torch.float64), keys)
    found = torch.autograd.grad(total, list(parameters), allow_unused=True, retain_graph=True)
    return [None if gradient is None else float(gradient.abs().max()) for gradient in found]


WARM_UP, TRAINING = -1.0, 0.0
"""Epochs of a job's two stages: the last one before training, and its first."""


def _stages(case: Case) -> dict[float, str]:
    """Epoch → how problems there begin, of each stage of a job that has the method."""
    if "init_epochs" not in load(case.name).Options.model_fields or case.options.get("init_epochs") == 0:
        return {TRAINING: ""}
    return {TRAINING: "", WARM_UP: "in the init stage "}


def _terms(case: Case, root: Path, run: RunRanks) -> str | None:
    kind = load(case.name)
    if kind.init_terms and "init_epochs" not in kind.Options.model_fields:
        return "it declares init_terms, and its Options have no init_epochs: its init stage has no length"
    for epoch, stage in _stages(case).items():
        (said,) = run(1, answer, settings(case, root / f"terms{epoch:g}"), epoch)
        declared = kind.terms if epoch >= 0 else kind.init_terms
        if set(said.terms) != set(declared):
            return f"{stage}it {describe_terms(said.terms, declared)}"
        if said.gathers and not (kind.requires.whole_batch or kind.requires.all_gather):
            return (
                f"{stage}it calls batch.all_gather: declare requires = Requirements(whole_batch=True),"
                " so that optim.accumulate is refused with it"
            )
        wrong = [f"{name} {shape}" for name, shape in said.terms.items() if shape not in ((), (said.rows,))]
        if wrong:
            return f"{stage}neither ({said.rows},) nor a scalar: {', '.join(wrong)}"
    return None


def _reach(case: Case, root: Path, run: RunRanks) -> str | None:
    for epoch, stage in _stages(case).items():
        (said,) = run(1, answer, settings(case, root / f"reach{epoch:g}"), epoch)
        missing = [name for name, largest in said.largest.items() if largest is None]
        if epoch < 0:  # a part of the student may lie behind what its stage looks at: nobody waits for it
            missing = [name for name in missing if name.startswith("methods.")]
        if missing:
            waits = "it never changes" if said.several else "several workers would wait for it for ever"
            after = waits if epoch >= 0 else "init_stage_parameters names what stays as it is"
            return f"{stage}no loss reaches {', '.join(missing)}: {after}"
        if said.terms and not said.taught > 0:
            return f"{stage}its terms do not move {'the student' if epoch >= 0 else 'what it trains'}"
    return None


def _workers(case: Case, root: Path, run: RunRanks) -> str | None:
    (one,) = run(1, train, settings(case, root / "one"))
    for n in (2, 3):
        for rank, state in enumerate(run(n, train, settings(case, root / f"workers{n}"))):
            name, difference = _differs_most(one, state)
            if not difference < TOLERANCE:
                return f"rank {rank} of {n} has another {name}, by {difference:.1e} of its largest value"
    return None


def _resumed(case: Case, root: Path, run: RunRanks) -> str | None:
    whole = run(2, train, settings(case, root / "whole"))[0]
    config = settings(case, root / "cut")
    run(2, train, config, 5)  # its last checkpoint stands in the middle of an epoch, after step 4
    name, difference = _differs_most(whole, run(2, train, config)[0])
    return f"{name} differs, by {difference:.1e} of its largest value" if difference else None


def _finite(case: Case, root: Path, run: RunRanks) -> str | None:
    if load(case.name).requires.teacher_gradient:
        return None  # such jobs are refused in half precision
    (state,) = run(1, train, settings(case, root / "bf16", precision="bf16"))  # stops at a loss that is not finite
    broken = [name for name, tensor in state.items() if not bool(torch.isfinite(tensor).all())]
    return f"not finite: {', '.join(broken)}" if broken else None


def _equal(case: Case, root: Path, run: RunRanks) -> str | None:
    for epoch, stage in _stages(case).items():
        (said,) = run(1, answer, settings(case, root / f"equal{epoch:g}", same=True), epoch, True)
        broken = [name for name, largest in said.largest.items() if largest is not None and not math.isfinite(largest)]
        if broken:
            return f"{stage}the gradient is not finite of {', '.join(broken)}"
    return None


def _differs_most(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> tuple[str, float]:
    """The tensor that differs most, and by what part of its largest value."""

    def difference(name: str) -> float:
        found = float((a[name].double() - b[name].double()).abs().max() / a[name].double().abs().max().clamp(min=1e-300))
        return found if found == found else float("inf")

    return max(((name, difference(name)) for name in a if a[name].numel()), key=lambda each: each[1])
