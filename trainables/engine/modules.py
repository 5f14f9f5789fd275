"""The student with its methods, and the teacher that they read, from what a job is told. Knows no Ray.

Shapes: M training samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from trainables.config import TrainConfig
from trainables.data.loader import Loader
from trainables.device.model_input import AUTOCAST
from trainables.distributed.batch_norm import has_global_batch_norm, use_batch_statistics
from trainables.distributed.group import Group
from trainables.engine.loss_groups import group_losses
from trainables.errors import ExperimentError
from trainables.methods.build import build_methods
from trainables.methods.distillation_module import DistillationModule
from trainables.methods.features import TeacherNormOptions
from trainables.methods.select import SelectedMethod, check_cache_top_k, check_logits_only, select_methods, task_weight
from trainables.methods.tap_reader import TapReader
from trainables.models.reused_classifier import ReusedClassifier
from trainables.rules import first_problem_of_method, splits_no_batch
from trainables.teachers.build import cached_teacher, load_network, service_teacher, teacher_reader, to_device
from trainables.teachers.interface import TeacherInterface
from trainables.teachers.network import TeacherNetwork
from trainables.teachers.service.protocol import TeacherConnection


def build_modules(
    config: TrainConfig,
    group: Group,
    student: nn.Module,
    classes: tuple[str, ...],
    loader: Loader,
    connections: Sequence[TeacherConnection] = (),
) -> tuple[DistillationModule, TeacherInterface | None]:
    """The student with its methods, on the CPU, and the teacher where one of them reads it: a network, or what it answered.

    `connections` lead to the actors of `teacher.service`.

    Raises:
        ExperimentError, ModelError, CheckpointError: what the experiment asks for does not fit together.
    """
    given, size = config.teacher, config.data.image_size
    reading = readers_of(config)
    taught = given is not None and given.weights is not None and bool(reading)
    logits_only = given.logits_only if given is not None and taught else None
    model = load_network(given, classes, size, config.seed) if given is not None and taught and logits_only is None else None
    distillation_module, of_teacher = unite(config, group, student, model, len(classes), loader.labels_M)
    if model is not None and of_teacher is not None:
        to_device(model, config, group)
        return distillation_module, TeacherNetwork(
            model, of_teacher, gradient=any(method.method_class.requires.teacher_gradient for method in reading)
        )
    asking = [method.key for method in reading]
    if logits_only == "teacher.cache":
        return distillation_module, cached_teacher(config, group, classes, loader, asking)
    if logits_only == "teacher.service":
        return distillation_module, service_teacher(config, group, classes, loader, connections, asking)
    return distillation_module, None


def readers_of(config: TrainConfig) -> tuple[SelectedMethod, ...]:
    """The methods of a job that read a teacher."""
    return tuple(
        method for method in (select_methods(config.distill) if config.distill else ()) if method.method_class.requires.teacher
    )


def unite(
    config: TrainConfig, group: Group, student: nn.Module, model: nn.Module | None, num_classes: int, labels_M: Tensor
) -> tuple[DistillationModule, TapReader | None]:
    """The student with the methods of a job, and what reads the teacher `model` for them.

    `model` is None where no method reads a teacher, or only its logits are to be had. No weight of it is looked at, but for those
    that the student takes over: models that nobody has trained fit if the trained ones do.

    Raises:
        ExperimentError, ModelError: models, methods and options do not fit together.
    """
    given, size = config.teacher, config.data.image_size
    chosen = select_methods(config.distill) if config.distill is not None else ()
    if config.distill is None or not chosen:
        return DistillationModule(
            student, task_weight=task_weight(config.distill, ()) if config.distill is not None else 1.0
        ), None
    for method in chosen:
        if problem := first_problem_of_method(method.key, method.method_class.requires, config):
            raise ExperimentError(problem)
    reading = readers_of(config)
    if reading and given is not None and given.logits_only is not None:
        check_logits_only(chosen, given)
        check_cache_top_k(chosen, given, num_classes)
        if isinstance(student, ReusedClassifier):
            raise ExperimentError(
                f"{given.logits_only}: it answers with logits, and {config.model} takes in the teacher's classifier: leave it out"
            )
    differentiates = next((method.key for method in reading if method.method_class.requires.teacher_gradient), None)
    if differentiates and config.precision in AUTOCAST:
        raise ExperimentError(
            f"precision: {differentiates} differentiates the teacher, which {config.precision} cuts from its features: write fp32"
        )
    if model is not None and isinstance(student, ReusedClassifier):
        student.reuse(model, size)
    by_batch = (c.key for c in reading if isinstance(c.options, TeacherNormOptions) and c.options.teacher_norm == "batch")
    if model is not None and (key := next(by_batch, None)) is not None:
        use_batch_statistics(model, group, f"distill.options.{key}.teacher_norm")
    reader = TapReader(student, {c.key: c.student_taps for c in chosen}, name=config.model, image_size=size)
    of_teacher = teacher_reader(given, model, reading, size) if model is not None and given is not None else None
    methods = build_methods(
        chosen,
        student=student,
        teacher=model,
        student_reader=reader,
        teacher_reader=of_teacher,
        num_classes=num_classes,
        labels_M=labels_M,
        image_size=size,
        global_batch_size=config.data.global_batch_size,
        seed=config.seed,
        epochs=config.optim.epochs,
        group=group,
    )
    distillation_module = DistillationModule(
        student,
        methods,
        {c.key: c.options for c in chosen},
        reader=reader,
        task_weight=task_weight(config.distill, chosen),
        epochs=config.optim.epochs,
    )
    names = ", ".join(config.distill.method)
    if distillation_module.requires_whole_batch or has_global_batch_norm(student):
        what = f"distill.method: {names}" if distillation_module.requires_whole_batch else "scale.sync_batch_norm"
        if problem := splits_no_batch(what, config.optim.accumulate):
            raise ExperimentError(problem)
    group_losses(student, methods, config.optim)  # refuses losses and optimizers that do not go together
    others = [f"{key}, which brings its own" for key, method in methods.items() if method.optimizers]
    others += ["optim.losses"] if config.optim.losses else []
    others += ["optim.name: dot"] if config.optim.name == "dot" else []
    if distillation_module.init_epochs and others:
        warms = next(key for key, method in methods.items() if method.init_epochs)
        raise ExperimentError(
            f"distill.method: {warms} has an init stage, which has one optimizer: leave out {warms}, or {' and '.join(others)}"
        )
    return distillation_module, of_teacher
