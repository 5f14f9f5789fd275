"""The methods that an experiment selects, with their options, and whether its teacher gives what they require."""

from collections.abc import Sequence
from typing import NamedTuple

from trainables.config import DistillConfig, MethodOptions, TeacherConfig
from trainables.errors import DistillError, ExperimentError
from trainables.methods.contract import BuildContext, Method
from trainables.methods.method_file import option_key
from trainables.methods.registry import load_method
from trainables.models.forward import seeded
from trainables.models.names import REUSE_SEPARATOR
from trainables.notices import notice


class SelectedMethod(NamedTuple):
    """A method of an experiment."""

    key: str
    """Its name in `distill.options` and in the records."""
    method_class: type[Method]
    options: MethodOptions

    @property
    def student_taps(self) -> tuple[str, ...]:
        return self.method_class.taps if self.options.student_taps is None else self.options.student_taps

    @property
    def teacher_taps(self) -> tuple[str, ...]:
        return self.method_class.taps if self.options.teacher_taps is None else self.options.teacher_taps

    @property
    def init_epochs(self) -> int:
        """The length of its init stage; 0: it has none."""
        return int(getattr(self.options, "init_epochs", 0))

    @property
    def beyond_logits(self) -> str | None:
        """What the method needs of a teacher besides its logits; None: nothing."""
        requires = self.method_class.requires
        if not requires.teacher:
            return None
        if self.teacher_taps:
            return "features"
        if requires.teacher_gradient:
            return "gradients"
        return "network" if requires.teacher_model or requires.reuses_classifier else None

    def build(self, context: BuildContext) -> Method:
        """The method, on the CPU in float32. Its initial parameters depend on its name and the seed only.

        Raises DistillError: it does not fit the models.
        """
        with seeded(f"method/{self.key}:{context.seed}"):
            try:
                return self.method_class(self.options, context)
            except DistillError:
                raise
            except (Exception, SystemExit) as error:  # a user's method may fail in any way
                reason = next(iter(str(error).strip().splitlines()), "")
                raise ExperimentError.of_key(
                    "distill.method", f"{self.key} cannot be built for these models ({type(error).__name__}: {reason})"
                ) from error


def select_methods(distill: DistillConfig) -> tuple[SelectedMethod, ...]:
    """The methods of `distill` with their options, without those of weight 0.

    Raises:
        ExperimentError: a method cannot be loaded, or its weight has a schedule without an effect.
        pydantic.ValidationError: a method does not have such options.
    """
    selected = []
    for name in distill.method:
        key, method_class = option_key(name), load_method(name)
        options = method_class.Options.model_validate(distill.options.get(key, {}))
        selected.append(SelectedMethod(key, method_class, options))
    for method in selected:
        _check_weight_schedule(method)
    return tuple(method for method in selected if method.options.weight)


def _check_weight_schedule(method: SelectedMethod) -> None:
    """Refuse a schedule that changes nothing."""
    key, options = method.key, method.options
    if not method.method_class.terms:
        defaults = {"warmup_epochs": 0, "warmup_by": "step", "decay": "none"}
        for name, default in defaults.items():
            if getattr(options, name) != default:
                raise ExperimentError.of_key(
                    f"distill.options.{key}.{name}",
                    f"{key} works in its init stage only, in which its weight is constant: leave {name} out",
                )
    if options.warmup_by != "step" and not options.warmup_epochs:
        raise ExperimentError.of_key(
            f"distill.options.{key}.warmup_by",
            "without warmup_epochs the weight does not rise: set warmup_epochs too, or leave warmup_by out",
        )


def needs_whole_teacher(method: SelectedMethod) -> bool:
    """Whether it reads the parameters of the teacher, or differentiates it, which a sharded one does not go with."""
    requires = method.method_class.requires
    return requires.teacher_model or requires.teacher_gradient


def check_sharded(selected: Sequence[SelectedMethod]) -> None:
    """Refuse methods that a sharded teacher does not go with. Raises ExperimentError."""
    for method in filter(needs_whole_teacher, selected):
        raise ExperimentError.of_key(
            "teacher.placement",
            f"{method.key} reads the teacher's parameters, or differentiates it, and sharded has a part of them on each worker:"
            " write whole",
        )


def check_logits_only(selected: Sequence[SelectedMethod], teacher: TeacherConfig) -> None:
    """Refuse methods that need more of a teacher than its logits, where `teacher.cache` or `teacher.service` gives no more.

    Raises ExperimentError.
    """
    option = teacher.logits_only
    if option is None:
        return
    for method in selected:
        if method.beyond_logits is not None:
            raise ExperimentError.of_key(
                option,
                f"it gives a teacher's logits, and {method.key} needs its {method.beyond_logits}: set {option} to null,"
                " or distill.method to methods on logits, such as kd",
            )


def check_ensemble(selected: Sequence[SelectedMethod], teacher: TeacherConfig) -> None:
    """Refuse methods that need more than a teacher's logits, where there are several teachers. Raises ExperimentError."""
    for method in selected if teacher.others else ():
        if method.beyond_logits is not None:
            taps = f" ({', '.join(method.teacher_taps)})" if method.teacher_taps else ""
            raise ExperimentError.of_key(
                "distill.method",
                f"{method.key} reads the {method.beyond_logits}{taps} of a teacher, and of"
                f" {1 + len(teacher.others)} teachers there is only a mean of probabilities: leave out teacher.others, or take a"
                " method on logits, such as kd",
            )


def check_cache_top_k(selected: Sequence[SelectedMethod], teacher: TeacherConfig, num_classes: int) -> None:
    """Refuse methods that read logits which `teacher.cache_top_k` leaves out. Raises ExperimentError."""
    if teacher.cache_top_k is None or teacher.cache_top_k >= num_classes:
        return
    for method in selected:
        requires = method.method_class.requires
        standardizes = getattr(method.options, "standardize", False)
        if requires.teacher and (standardizes or requires.all_logits):
            reader = f"distill.options.{method.key}.standardize" if standardizes else method.key
            raise ExperimentError.of_key(
                "teacher.cache_top_k",
                f"it keeps {teacher.cache_top_k} of {num_classes} classes apart, and {reader} looks at each:"
                " leave it out, or set distill.method to kd, without standardize",
            )


_IDLE_WITH_TWO_CLASSES = {"dkd": "nckd is 0", "nkd": "others is 0", "dist": "inter has hardly a gradient"}
"""What a method's term is where a sample has one class besides its own."""


def check_two_classes(selected: Sequence[SelectedMethod]) -> None:
    """Tell which terms teach nothing of two classes. Raises ExperimentError: a method standardises their logits."""
    for method in selected:
        if getattr(method.options, "standardize", False):
            raise ExperimentError.of_key(
                f"distill.options.{method.key}.standardize",
                "the standardised logits of two classes are always 0.71 and -0.71, which teaches nothing: write false",
            )
        if idle := _IDLE_WITH_TWO_CLASSES.get(method.key):
            notice(f"distill.method: {method.key} with two classes: {idle}, and its other term alone teaches the student")


def task_weight(distill: DistillConfig, selected: Sequence[SelectedMethod]) -> float:
    """The weight of the labels' cross-entropy: the user's, otherwise the largest default of the methods."""
    if distill.task_weight is not None:
        return distill.task_weight
    return max((method.method_class.task_weight for method in selected), default=1.0)


def student_name(student: str, teacher: TeacherConfig | None, selected: Sequence[SelectedMethod]) -> str:
    """The name of the model that is trained: `student`, or STUDENT+TEACHER where a method reuses the teacher's classifier."""
    if teacher is None or not any(method.method_class.requires.reuses_classifier for method in selected):
        return student
    suffix = f"{REUSE_SEPARATOR}{teacher.model}"
    return student if student.endswith(suffix) else student + suffix
