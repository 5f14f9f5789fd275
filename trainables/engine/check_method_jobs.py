"""The small training jobs with which `check_method` tests a method, and what it measures in them.

Student and teacher are a CIFAR ResNet each, with synchronised batch norms, on noise images in float64. The last batch of an epoch
has one sample, so that all workers but one have none.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainables.config import TrainConfig
from trainables.device.device_batches import on_device
from trainables.distributed.gather import Gather
from trainables.distributed.group import Group
from trainables.engine import checkpoint
from trainables.engine.job import Job
from trainables.engine.losses import Losses, compute_losses
from trainables.engine.train import build, run_job
from trainables.methods.contract import MethodBatch
from trainables.methods.init_stage import with_init_stage
from trainables.methods.method_file import option_key
from trainables.methods.registry import load_method
from trainables.models.registry import build_model

SEED, NUM_CLASSES, NUM_IMAGES, GLOBAL_BATCH_SIZE = 3, 4, 17, 8


class Case(NamedTuple):
    """A method with its options, and the models that it is tested with."""

    name: str
    options: Mapping[str, Any]
    student: str = "resnet8"
    teacher: str = "resnet14"
    image_size: int = 16


def job_config(case: Case, output: Path, *, precision: str = "fp64", same: bool = False) -> TrainConfig:
    """A job of two epochs in `output`, with the teacher's checkpoint next to that. `same`: the teacher is the initial student."""
    teacher = case.student if same else case.teacher
    weights = output.parent / f"{output.name}-teacher.safetensors"
    output.mkdir(parents=True, exist_ok=True)
    _write_teacher(weights, teacher, case.image_size, seed=SEED if same else SEED + 1)
    options = dict(case.options)
    if "init_epochs" in load_method(case.name).Options.model_fields:
        options.setdefault("init_epochs", 1)
    data = {
        "path": "synthetic",
        "synthetic_images": NUM_IMAGES,
        "synthetic_classes": NUM_CLASSES,
        "image_size": case.image_size,
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "loader_workers": 1,
        "last_batch": "short",
    }
    return TrainConfig.model_validate(
        {
            "output_dir": str(output),
            "model": case.student,
            "precision": precision,
            "seed": SEED,
            "data": data,
            "teacher": {"model": teacher, "weights": str(weights)},
            "distill": {"method": [case.name], "options": {option_key(case.name): options}},
            "optim": {"epochs": 2, "lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-3},
            "scale": {"sync_batch_norm": True},
            "train": {"log_every": 1, "warmup_steps": 1, "checkpoint_every": 1},
        }
    )


def _write_teacher(path: Path, name: str, image_size: int, seed: int) -> None:
    model = build_model(name, num_classes=NUM_CLASSES, image_size=image_size, seed=seed)
    classes = [str(label) for label in range(NUM_CLASSES)]
    header = {"model": name, "num_classes": NUM_CLASSES, "image_size": image_size, "classes": classes}
    checkpoint.write_tensors(path, {f"model.{key}": tensor for key, tensor in model.state_dict().items()}, header)


class KilledError(Exception):
    """Ends a job as if it had been killed."""


def _open(config: TrainConfig, group: Group, kill_at: int | None = None) -> contextlib.closing[Job]:
    """The job, which ends at the step `kill_at`; what it reports is dropped."""

    def report(kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None:
        if kind == "step" and step == kill_at:
            raise KilledError

    return contextlib.closing(build(config, group, report, lambda whole=False: {}))


def train_until(group: Group, config: TrainConfig, kill_at: int | None = None) -> dict[str, Tensor]:
    """Run the job on this rank, its init stage before it, until a step of either. Returns the parameters of student and method,
    and the method's buffers."""
    state: dict[str, Tensor] = {}
    with contextlib.suppress(KilledError):
        for each in with_init_stage(config):
            with _open(each, group, kill_at) as job:
                run_job(job)
                module = job.train_state.distillation_module
                state |= {f"method.{name}": tensor for name, tensor in module.methods.state_dict().items()}
                state |= dict(module.student.named_parameters())
    return {name: tensor.detach().clone() for name, tensor in state.items()}


class BatchGradients(NamedTuple):
    """The terms of a method for one batch, and the gradients of all losses."""

    terms: dict[str, tuple[int, ...]]
    """Term → its shape."""
    num_rows: int
    largest: dict[str, float | None]
    """Trained parameter → the sum of its largest gradients from task and method, each if an optimizer that has the parameter
    lowers that loss; None where there is no gradient."""
    from_method: float
    """The same from the method's loss, over all parameters of the student; in an init stage over what that trains."""
    gathers: bool
    """Whether the method gathered the rows of all workers."""
    several_optimizers: bool
    """Then the job runs without DDP."""


def batch_gradients(group: Group, config: TrainConfig, student_in_eval_mode: bool = False) -> BatchGradients:
    """One batch through student, teacher and method, without an update.

    `student_in_eval_mode`: its batch norms run as its teacher's.
    """
    with _open(config, group) as job, contextlib.closing(on_device(job.train_loader.epoch(0), group.device)) as batches:
        train_state, batch = job.train_state, next(batches)
        module = train_state.distillation_module
        module.begin_epoch(0)
        if student_in_eval_mode:
            module.student.eval()
        batch.wait()
        images, num_rows = train_state.prepare(batch).images_BCHW, len(batch.labels_B)
        gather = Gather(num_rows, group)
        method_batch = MethodBatch(images, batch.labels_B, batch.indices_B, 0.0, gather)
        outputs = module(images, method_batch, train_state.teacher(images, num_rows))
        loss = compute_losses(outputs, batch.labels_B, None, module.weights(1.0))
        terms: dict[str, Tensor] = next(iter(outputs.terms.values()), {})
        largest, from_method = _gradients(job, loss)
        return BatchGradients(
            terms={name: tuple(term.shape) for name, term in terms.items()},
            num_rows=num_rows,
            largest=largest,
            from_method=from_method,
            gathers=gather.used,
            several_optimizers=len(train_state.optimizers) > 1,
        )


def _gradients(job: Job, loss: Losses) -> tuple[dict[str, float | None], float]:
    """`BatchGradients.largest` and `.from_method`."""
    module, method_losses = job.train_state.distillation_module, frozenset(loss.weighted) - {"task"}
    names = {parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad}
    updates = [(update.losses, update.parameters) for update in job.train_state.optimizers]
    trained, counted = list(names), set(module.student.parameters())
    if job.config.init_stage:
        updates = [(method_losses, module.init_parameters)]
        trained, counted = module.init_parameters, set(module.init_parameters)
    largest: dict[str, float | None] = {names[parameter]: None for parameter in trained if parameter in names}
    from_method = 0.0
    for keys, parameters in updates:
        updated = [parameter for parameter in parameters if parameter in names]
        for part in (keys & method_losses, keys - method_losses):
            if not part & loss.weighted.keys():
                continue
            total = loss.total(torch.ones((), dtype=torch.float64), part)
            gradients = torch.autograd.grad(total, updated, allow_unused=True, retain_graph=True)
            for parameter, gradient in zip(updated, gradients, strict=True):
                if gradient is not None:
                    value = float(gradient.abs().max())
                    largest[names[parameter]] = (largest[names[parameter]] or 0.0) + value
                    from_method += value if part <= method_losses and parameter in counted else 0.0
    return largest, from_method
