"""Select an experiment's methods, with their options and requirements, for `trainables.rules`."""

from collections.abc import Sequence
from typing import NamedTuple

from trainables.config import DistillConfig, MethodOptions, TeacherConfig, init_epochs
from trainables.config.models import REUSE_SEPARATOR
from trainables.distributed.batch_norm import has_global_batch_norm
from trainables.errors import DistillError, ExperimentError
from trainables.methods.contract import BuildContext, Method, Requirements
from trainables.methods.logits import StandardizeOptions
from trainables.methods.registry import load_method
from trainables.models.forward import seeded


class SelectedMethod(NamedTuple):
    """One method of an experiment."""

    key: str
    """Its name in `distill.options` and in the records."""
    method_class: type[Method]
    options: MethodOptions
    teacher: int | None = None
    """The number of the one teacher that it reads; None for the only one, the ensemble, or none."""

    @property
    def requires(self) -> Requirements:
        return self.method_class.requires

    @property
    def terms(self) -> tuple[str, ...]:
        return self.method_class.terms

    @property
    def task_weight(self) -> float:
        return self.method_class.task_weight

    @property
    def student_taps(self) -> tuple[str, ...]:
        return self.method_class.taps if self.options.student_taps is None else self.options.student_taps

    @property
    def teacher_taps(self) -> tuple[str, ...]:
        return self.method_class.taps if self.options.teacher_taps is None else self.options.teacher_taps

    @property
    def beyond_logits(self) -> str | None:
        """What the method needs from a teacher besides logits, for messages; None if nothing."""
        if not self.requires.teacher:
            return None
        if self.teacher_taps:
            return f"features ({', '.join(self.teacher_taps)})"
        return "network" if self.requires.teacher_model or self.requires.reuses_classifier else None

    @property
    def standardizes(self) -> bool:
        """Whether it standardizes logits: subtracts their mean and divides by their standard deviation."""
        return isinstance(self.options, StandardizeOptions) and self.options.standardize

    @property
    def whole_student(self) -> str | None:
        """The feature of it that needs the whole student on each rank, so no pipeline stages; None if there is none."""
        if init_epochs(self.options):
            return "an init stage"
        return "its teacher's classifier in the student" if self.requires.reuses_classifier else None

    def build(self, context: BuildContext) -> Method:
        """Build the method on the CPU in float32. Its initial parameters depend only on its name and the seed.

        Raises DistillError: it does not fit the models, or has batch norms without declaring `whole_batch`.
        """
        with seeded(f"method/{self.key}:{context.seed}"):
            try:
                method = self.method_class(self.options, context)
            except DistillError:
                raise
            except (Exception, SystemExit) as error:  # a user's method may raise anything
                reason = next(iter(str(error).strip().splitlines()), "")
                raise ExperimentError.of_key(
                    "distill.method", f"{self.key} cannot be built for these models ({type(error).__name__}: {reason})"
                ) from error
        undeclared = has_global_batch_norm(method) and not self.requires.whole_batch
        if undeclared and not has_global_batch_norm(context.student.model):  # they may be the student's
            raise ExperimentError.of_key(
                "distill.method", f"{self.key} has its own batch norms: declare requires = Requirements(whole_batch=True)"
            )
        return method


def select_methods(distill: DistillConfig) -> tuple[SelectedMethod, ...]:
    """Load the methods of `distill` with their options, leaving out those of weight 0.

    Raises:
        ExperimentError: a method cannot be loaded.
        pydantic.ValidationError: a method does not accept its options.
    """
    found = []
    for key, name in distill.keys.items():
        method_class = load_method(name)
        found.append(SelectedMethod(key, method_class, method_class.Options.model_validate(distill.options.get(key, {}))))
    return tuple(method for method in found if method.options.weight)


def for_teachers(methods: Sequence[SelectedMethod], shares: Sequence[float]) -> tuple[SelectedMethod, ...]:
    """Split each method that reads more than logits into one per teacher, if there are several: `embed` becomes `embed1`,
    `embed2`, …. Each weight is the method's times the teacher's share; `shares` add up to 1.

    Raises ExperimentError: another method has the same key.
    """
    found = list[SelectedMethod]()
    for method in methods:
        if len(shares) == 1 or method.beyond_logits is None:
            found.append(method)
            continue
        for number, share in enumerate(shares):
            options = method.options.model_copy(update={"weight": share * method.options.weight})
            found.append(method._replace(key=f"{method.key}{number + 1}", options=options, teacher=number))
    keys = [method.key for method in found]
    if duplicate := next((key for key in keys if keys.count(key) > 1), None):
        raise ExperimentError.of_key(
            "distill.method", f"{duplicate} is also the name of another method's copy for a teacher: rename it"
        )
    return tuple(found)


def task_weight(distill: DistillConfig, selected: Sequence[SelectedMethod]) -> float:
    """Return the weight of the labels' cross-entropy: the user's, otherwise the methods' largest default."""
    if distill.task_weight is not None:
        return distill.task_weight
    return max((method.task_weight for method in selected), default=1.0)


def student_name(student: str, teacher: TeacherConfig | None, selected: Sequence[SelectedMethod]) -> str:
    """Return the name of the trained model: `student`, or STUDENT+TEACHER if a method reuses the teacher's classifier."""
    if teacher is None or not any(method.requires.reuses_classifier for method in selected):
        return student
    suffix = f"{REUSE_SEPARATOR}{teacher.model}"
    return student if student.endswith(suffix) else student + suffix
