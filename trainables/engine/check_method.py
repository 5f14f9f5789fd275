"""`distill check-method`: check that a method fulfills its contract, by small training jobs on one to three workers.

Student and teacher are CIFAR ResNets with synchronized batch norms, trained on noise images in float64. An epoch's last batch has
one sample, so that all workers but one are without samples.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainables.config import InitStageOptions, TrainConfig
from trainables.device.device_batches import on_device
from trainables.distributed.gather import Gather
from trainables.distributed.group import Group
from trainables.engine import checkpoint
from trainables.engine.job import Job
from trainables.engine.losses import compute_losses
from trainables.engine.train import build, run_job
from trainables.errors import DistillError, first_line
from trainables.methods.contract import Method, MethodBatch
from trainables.methods.distillation_module import describe_terms
from trainables.methods.init_stage import with_init_stage
from trainables.methods.registry import load_method
from trainables.models.registry import build_model
from trainables.rules import trains_classifier
from trainables.user_code import option_key

SEED, NUM_CLASSES, NUM_IMAGES, GLOBAL_BATCH_SIZE = 3, 4, 17, 8
TOLERANCE = 1e-9

RunRanks = Callable[..., list[Any]]
"""`run(n, function, *args)` returns the results of `function(group, *args)` on n ranks."""
State = dict[str, Tensor]


class Case(NamedTuple):
    """A method with its options, and the models to test it with."""

    name: str
    options: Mapping[str, Any]
    student: str = "resnet8"
    teacher: str = "resnet14"
    image_size: int = 16


class CheckResult(NamedTuple):
    title: str
    problem: str | None
    """None if the method passes."""


def check(case: Case, run: RunRanks) -> Iterator[CheckResult]:
    """Run the checks of a method one by one.

    Raises:
        ExperimentError: the method cannot be loaded.
        pydantic.ValidationError: the options are invalid.
    """
    load_method(case.name).Options.model_validate(case.options)
    with tempfile.TemporaryDirectory(prefix="raydistill-") as folder:
        jobs = _Jobs(case, run, Path(folder))
        for title, find_problem in CHECKS.items():
            try:
                problem = find_problem(jobs)
            except (Exception, SystemExit) as error:  # user code may raise anything
                problem = str(error) if isinstance(error, DistillError) else f"{type(error).__name__}: {first_line(error)}"
            yield CheckResult(title, problem)


def job_config(case: Case, output: Path, *, precision: str = "fp64", same: bool = False) -> TrainConfig:
    """Configure a job of two epochs in `output`, and write its teacher next to that. `same`: the teacher equals the student."""
    teacher = case.student if same else case.teacher
    weights = output.parent / f"{output.name}-teacher.safetensors"
    output.mkdir(parents=True, exist_ok=True)
    model = build_model(teacher, num_classes=NUM_CLASSES, image_size=case.image_size, seed=SEED if same else SEED + 1)
    classes = [str(label) for label in range(NUM_CLASSES)]
    metadata = {"model": teacher, "num_classes": NUM_CLASSES, "image_size": case.image_size, "classes": classes}
    checkpoint.write_tensors(weights, {f"model.{key}": tensor for key, tensor in model.state_dict().items()}, metadata)
    method, options = load_method(case.name), dict(case.options)
    if issubclass(method.Options, InitStageOptions):
        options.setdefault("init_epochs", 1)
    return TrainConfig.model_validate(
        {
            "output_dir": str(output),
            "model": case.student,
            "precision": precision,
            "seed": SEED,
            "data": {
                "path": "synthetic",
                "synthetic_images": NUM_IMAGES,
                "synthetic_classes": NUM_CLASSES,
                "image_size": case.image_size,
                "global_batch_size": GLOBAL_BATCH_SIZE,
                "loader_workers": 1,
                "last_batch": "short",
            },
            "teacher": {"model": teacher, "weights": str(weights)},
            "distill": {
                "method": [case.name],
                "options": {option_key(case.name): options},
                "task_weight": None if method.task_weight or trains_classifier(method.requires) else 1.0,
            },
            "optim": {"epochs": 2, "lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-3},
            "scale": {"sync_batch_norm": True},
            "train": {"log_every": 1, "warmup_steps": 1, "checkpoint_every": 1},
        }
    )


class KilledError(Exception):
    """Raised to end a job as if it had been killed."""


def _train(group: Group, config: TrainConfig, kill_at: int | None = None) -> State:
    """Run the init stage, if any, and the job on this rank; in each, stop at step `kill_at`.

    Return the parameters of student and method, and the method's buffers.
    """

    def report(kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None:
        if kind == "step" and step == kill_at:
            raise KilledError

    state: State = {}
    with contextlib.suppress(KilledError):
        for each in with_init_stage(config):
            with contextlib.closing(build(each, group, report, _no_telemetry)) as job:
                run_job(job)
                module = job.train_state.distillation_module
                state |= {f"method.{name}": tensor for name, tensor in module.methods.state_dict().items()}
                state |= dict(module.student.named_parameters())
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def _no_telemetry(whole: bool = False) -> dict[str, float]:
    return {}


class _Jobs:
    """The jobs of one method: training runs on several ranks, each run once, and single batches in this process."""

    def __init__(self, case: Case, run: RunRanks, root: Path) -> None:
        self._case, self._run, self._root = case, run, root
        self.method = load_method(case.name)
        self.train = functools.cache(self._train)

    def _train(self, num_workers: int, precision: str = "fp64", kill_at_steps: tuple[int, ...] = ()) -> list[State]:
        """Return each rank's final state."""
        config = job_config(self._case, self._root / f"{num_workers}-{precision}-{len(kill_at_steps)}", precision=precision)
        for step in kill_at_steps:
            self._run(num_workers, _train, config, step)
        return self._run(num_workers, _train, config)

    def find_in_batches(self, problem_of: Callable[[_Batch], str | None], same: bool = False) -> str | None:
        """Check the first batch of training, then one of the method's init stage, if any. Return the first problem.

        With `same`, the student equals its teacher, and its batch norms are in eval mode too.
        """
        config = job_config(self._case, self._root / f"batches-{same}", same=same)
        *init, _ = with_init_stage(config)
        for each in (config, *init):
            with contextlib.closing(build(each, Group(), lambda *_: None, _no_telemetry)) as job:
                problem = problem_of(_Batch(job, student_in_eval_mode=same))
            if problem:
                return f"in the init stage {problem}" if each.init_stage else problem
        return None


class _Batch:
    """The outputs and losses of one batch, without an update."""

    def __init__(self, job: Job, student_in_eval_mode: bool) -> None:
        state, self.is_init = job.train_state, job.config.init_stage
        self._module = state.distillation_module
        self._module.begin_epoch(0)
        self._module.student.train(not student_in_eval_mode)
        with contextlib.closing(on_device(job.train_loader.epoch(0), job.group.device)) as batches:
            batch = state.prepare(next(batches))
        self.gather = Gather(len(batch.labels_B), job.group)
        method_batch = MethodBatch(batch.images_BCHW, batch.labels_B, batch.views_B, 0.0, self.gather)
        outputs = self._module(batch.images_BCHW, method_batch, state.teacher(batch.images_BCHW, len(batch.labels_B)))
        self.terms: dict[str, Tensor] = next(iter(outputs.terms.values()), {})
        self._loss = compute_losses(outputs, batch.labels_B, None, self._module.weights(1.0))

    def gradients(self, *, with_task: bool = True) -> dict[str, Tensor | None]:
        """Return the gradient of each trained parameter, or None if no loss reaches it.

        `with_task=False` leaves out the task loss.
        """
        named = {name: parameter for name, parameter in self._module.named_parameters() if parameter.requires_grad}
        if self.is_init:
            trained = set(self._module.init_parameters)
            named = {name: parameter for name, parameter in named.items() if parameter in trained}
        keys = self._loss.weighted.keys() - ({"task"} if self.is_init or not with_task else set())
        if not keys:
            return dict.fromkeys(named)
        total = self._loss.total(torch.ones((), dtype=torch.float64), frozenset(keys))
        gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True, retain_graph=True)
        return dict(zip(named, gradients, strict=True))


def _check_terms(method: type[Method], batch: _Batch) -> str | None:
    declared = method.init_terms if batch.is_init else method.terms
    if set(batch.terms) != set(declared):
        return f"it {describe_terms(batch.terms, declared)}"
    if batch.gather.used and not (method.requires.whole_batch or method.requires.all_gather):
        return "it calls batch.all_gather: declare requires = Requirements(whole_batch=True), which rules out optim.accumulate"
    return None


def _check_grad_flow(batch: _Batch) -> str | None:
    missing = [name for name, gradient in batch.gradients().items() if gradient is None]
    what, remedy = "the student", "use it in a loss or remove it: several workers would wait for its gradient"
    if batch.is_init:  # no worker waits for the student's gradients
        missing = [name for name in missing if name.startswith("methods.")]
        what, remedy = "what it trains", "init_stage_parameters names what stays as it is"
    if missing:
        return f"no loss reaches {', '.join(missing)}: {remedy}"
    changed = [
        name for name, gradient in batch.gradients(with_task=False).items() if gradient is not None and gradient.abs().max() > 0
    ]
    if batch.terms and not any(batch.is_init or name.startswith("student.") for name in changed):
        return f"its terms do not train {what}"
    return None


def _check_finite_grads(batch: _Batch) -> str | None:
    broken = [name for name, gradient in batch.gradients().items() if gradient is not None and not gradient.isfinite().all()]
    return f"gradients are not finite: {', '.join(broken)}" if broken else None


def _check_workers(jobs: _Jobs) -> str | None:
    for num_workers in (2, 3):
        for rank, state in enumerate(jobs.train(num_workers)):
            name, difference = _largest_difference(jobs.train(1)[0], state)
            if not difference < TOLERANCE:
                return f"rank {rank} of {num_workers} differs in {name}, by {difference:.1e} of its largest value"
    return None


def _check_resume(jobs: _Jobs) -> str | None:
    # Kill it in the init stage, if any, then within an epoch after the checkpoint of step 4.
    name, difference = _largest_difference(jobs.train(2)[0], jobs.train(2, kill_at_steps=(2, 5))[0])
    return f"{name} differs, by {difference:.1e} of its largest value" if difference else None


def _check_bf16(jobs: _Jobs) -> str | None:
    (state,) = jobs.train(1, "bf16")  # training itself raises if a loss is not finite
    broken = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    return f"not finite: {', '.join(broken)}" if broken else None


def _largest_difference(a: State, b: State) -> tuple[str, float]:
    """Return the tensor that differs most, and its difference relative to its largest value. NaN counts as the largest."""
    names = [name for name in a if a[name].numel()]
    both = [(a[name].double(), b[name].double()) for name in names]
    differences = torch.stack([(x - y).abs().max() / x.abs().max().clamp(min=1e-300) for x, y in both])
    return names[int(differences.argmax())], float(differences.max())


CHECKS: dict[str, Callable[[_Jobs], str | None]] = {
    "it returns the terms that it declares, per sample or per batch": lambda jobs: jobs.find_in_batches(
        partial(_check_terms, jobs.method)
    ),
    "gradients reach the student and everything that the method trains": lambda jobs: jobs.find_in_batches(_check_grad_flow),
    f"2 and 3 workers give the same result as one, to {TOLERANCE:g}": _check_workers,
    "an interrupted job resumes exactly": _check_resume,
    "everything is finite in bf16": _check_bf16,
    "a student that equals its teacher has finite gradients": lambda jobs: jobs.find_in_batches(_check_finite_grads, same=True),
}
"""Title → a function that returns the problem, or None if the method passes."""
