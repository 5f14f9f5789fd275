"""Build the student, its methods and the teacher from a job's configuration. Knows no Ray.

Shapes: M training samples.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from trainables.config import TrainConfig, init_epochs
from trainables.data.loader.loader import Loader
from trainables.device.tensor_format import teacher_autocast, tensor_format
from trainables.distributed.batch_norm import convert, use_batch_statistics
from trainables.distributed.group import Group
from trainables.errors import ExperimentError
from trainables.methods.contract import BuildContext
from trainables.methods.distillation_module import DistillationModule
from trainables.methods.features import TeacherNormOptions
from trainables.methods.select import SelectedMethod, for_teachers, select_methods, student_name, task_weight
from trainables.methods.tap_reader import TapReader
from trainables.methods.teacher_dropping import TeacherDropping
from trainables.models.gradient_checkpointing import use_gradient_checkpointing
from trainables.models.model_input import student_input, trained_model_input
from trainables.models.registry import build_model, check_forward
from trainables.models.reused_classifier import ReusedClassifier
from trainables.notices import notice
from trainables.rules import METHOD_RULES, first_problem_of_methods, labels_are_used
from trainables.teachers.cache.cached_teacher import CachedTeacher, CachedTeachers
from trainables.teachers.interface import TeacherInterface
from trainables.teachers.network import TeacherNetwork, by_key, load_networks, naming, teacher_readers
from trainables.teachers.rows import MethodReads
from trainables.teachers.service.client import ServiceTeacher
from trainables.teachers.service.protocol import TeacherConnection


def build_modules(
    config: TrainConfig,
    group: Group,
    student: nn.Module,
    classes: tuple[str, ...],
    loader: Loader,
    connections: Sequence[TeacherConnection] = (),
) -> tuple[DistillationModule, TeacherInterface | None]:
    """Build the student's methods, on the CPU, and the teacher if one is read: a network on the CPU, a cache or a service.

    `connections` lead to the actors of `teacher.service`.

    Raises:
        ExperimentError: methods and options do not fit together.
        ModelError: a model does not fit the images, or lacks a tap that a method reads.
        CheckpointError: the teacher's file is damaged, or has another model or other classes.
    """
    methods = methods_with_teacher(config)
    has_teacher = bool(methods) and any(each.weights is not None for each in config.all_teachers)
    rows_from = config.rows_from
    networks = load_networks(config, classes) if has_teacher and (rows_from is None or reads_features(methods)) else []
    module, readers = build_distillation_module(config, group, student, networks, len(classes), loader.labels_M)
    if not has_teacher:
        return module, None
    if rows_from == "teacher.cache":
        return module, _cached(config, group, classes, loader, methods, readers)
    if rows_from == "teacher.service":
        return module, ServiceTeacher(config, group, classes, loader, connections, method_reads(methods, readers))
    autocasts = [teacher_autocast(each, config, group.device) for each in config.all_teachers]
    return module, TeacherNetwork(networks, readers, config.shares, autocasts)


def build_cached_teachers(config: TrainConfig, group: Group, classes: tuple[str, ...], loader: Loader) -> CachedTeachers:
    """The teachers of `build_modules` where they are cached, without a student. Raises DistillError: see there."""
    methods = methods_with_teacher(config)
    readers = teacher_readers(config, load_networks(config, classes), methods) if reads_features(methods) else []
    return _cached(config, group, classes, loader, methods, readers)


def _cached(
    config: TrainConfig,
    group: Group,
    classes: tuple[str, ...],
    loader: Loader,
    methods: Sequence[SelectedMethod],
    readers: Sequence[TapReader],
) -> CachedTeachers:
    teachers = []
    for number, (key, _) in enumerate(by_key(config.all_teachers)):
        with naming(key):
            reads = method_reads(methods, readers, number)
            teachers.append(CachedTeacher(config.of_teacher(number), group, classes, loader, reads))
    return CachedTeachers(teachers, config.shares)


def reads_features(methods: Sequence[SelectedMethod]) -> bool:
    """Return whether rows of teacher outputs hold features, whose shapes only the network knows."""
    return any(method.teacher_taps for method in methods)


def method_reads(methods: Sequence[SelectedMethod], readers: Sequence[TapReader], number: int = 0) -> dict[str, MethodReads]:
    """What each method reads of a teacher, by its number. `readers`: of the networks; none: no method reads features."""
    return {
        m.key: MethodReads(m.requires.logits, readers[number].named_shapes(m.key) if readers else ())
        for m in methods
        if m.teacher in (None, number)
    }


def selected_methods(config: TrainConfig) -> tuple[SelectedMethod, ...]:
    """Return the methods of a job, including those of its init stage; none if the model learns only labels."""
    return select_methods(config.distill) if config.distill is not None else ()


def stage_methods(config: TrainConfig) -> tuple[SelectedMethod, ...]:
    """Return the methods with a loss in this stage. One that reads more than logits appears once per teacher."""
    methods = for_teachers(selected_methods(config), config.shares)
    return tuple(method for method in methods if (init_epochs(method.options) if config.init_stage else method.terms))


def methods_with_teacher(config: TrainConfig) -> tuple[SelectedMethod, ...]:
    """Return those of `stage_methods` that read a teacher."""
    return tuple(method for method in stage_methods(config) if method.requires.teacher)


def build_distillation_module(
    config: TrainConfig, group: Group, student: nn.Module, teachers: Sequence[nn.Module], num_classes: int, labels_M: Tensor
) -> tuple[DistillationModule, list[TapReader]]:
    """Build the distillation module of a job, and a reader for each network of `teachers`.

    `teachers` is empty if no method reads a teacher, or only logits that are cached or served. Only weights that the student
    takes over are read, so untrained networks will do for a check.

    Raises:
        ExperimentError: methods and options do not fit together, or do not fit these models.
        ModelError: a model lacks a tap that a method reads.
    """
    selected, active = selected_methods(config), stage_methods(config)
    weight = 0.0 if not num_classes else task_weight(config.distill, selected) if config.distill is not None else 1.0
    problem = first_problem_of_methods(lambda: selected, config, num_classes, METHOD_RULES) or labels_are_used(config, selected)
    if problem:
        raise ExperimentError(problem)
    if not active:
        return DistillationModule(student, task_weight=weight), []
    if num_classes == 2:
        _notice_idle_terms(active)
    size, with_teacher = config.data.image_size, methods_with_teacher(config)
    for teacher in teachers:
        _prepare_teacher(teacher, student, group, selected, size)
    readers = teacher_readers(config, teachers, with_teacher) if teachers else []
    student_taps = TapReader(
        student,
        {each.key: each.student_taps for each in active},
        name=config.model,
        image_size=size,
        without_logits=[each.key for each in active if not each.requires.logits],
    )
    methods = {}
    for method in active:
        own = readers if method.teacher is None else readers[method.teacher : method.teacher + 1]
        context = BuildContext(
            student=student_taps.spec(method.key),
            teacher=own[0].spec(method.key) if len(own) == 1 and method in with_teacher else None,
            num_classes=num_classes,
            labels_M=labels_M,
            input=student_input(config.data),
            global_batch_size=config.data.global_batch_size,
            seed=config.seed,
            epochs=config.optim.epochs,
            group=group,
            init_stage=config.init_stage,
        )
        methods[method.key] = method.build(context)
    numbers, dropping = {each.key: each.teacher for each in active if each.teacher is not None}, None
    if numbers and config.distill is not None and config.distill.teacher_dropping and not config.init_stage:
        dropping = TeacherDropping(config.distill.teacher_dropping, config.seed, numbers, config.shares)
    module = DistillationModule(
        student,
        methods,
        reader=student_taps,
        teachers=numbers,
        dropping=dropping,
        task_weight=weight,
        epochs=config.optim.epochs,
        init_stage=config.init_stage,
    )
    return module, readers


def _notice_idle_terms(methods: Sequence[SelectedMethod]) -> None:
    for method in methods:
        if idle := method.method_class.idle_with_two_classes:
            notice(f"distill.method: {method.key} with two classes: {idle}, so only its other term teaches the student")


def _prepare_teacher(
    teacher: nn.Module, student: nn.Module, group: Group, methods: Sequence[SelectedMethod], image_size: int
) -> None:
    """Give the student the teacher's classifier, and let the teacher use batch statistics, where a method requires this."""
    if isinstance(student, ReusedClassifier):
        student.reuse(teacher, image_size)
    for method in methods:
        if isinstance(method.options, TeacherNormOptions) and method.options.teacher_norm == "batch":
            use_batch_statistics(teacher, group, f"distill.options.{method.key}.teacher_norm")
            return


def build_student(config: TrainConfig, group: Group, num_classes: int) -> tuple[str, nn.Module]:
    """Build the student on its device. Return its full name and the student."""
    name = student_name(config.model, config.teacher, selected_methods(config))
    student = build_model(name, num_classes=num_classes, image_size=trained_model_input(config).image_size, seed=config.seed)
    for size in (each.image_size for each in config.train.progressive):
        fixed = "remove train.progressive, or for a timm transformer write student.args: {dynamic_img_size: true}"
        check_forward(student, size, num_classes, name=name, training=True, instead=fixed)
    if config.train.progressive and config.train.max_steps is not None:
        notice(f"train.progressive: a timing run trains at data.image_size {config.data.image_size}")
    if config.train.gradient_checkpointing:
        use_gradient_checkpointing(student, name)
    dtype, layout = tensor_format(config)
    student = student.to(group.device, dtype).to(memory_format=layout)
    return name, convert(student, group) if config.scale.sync_batch_norm else student
