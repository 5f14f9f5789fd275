"""The methods that an experiment selects, with their options and what these need, for `trainables.rules`."""

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
    """A method of an experiment."""

    key: str
    """Its name in `distill.options` and in the records."""
    method_class: type[Method]
    options: MethodOptions
    teacher: int | None = None
    """The number of the one that it reads of several; None: it reads what there is."""

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
        """What the method needs of a teacher besides its logits; None: nothing."""
        if not self.requires.teacher:
            return None
        if self.teacher_taps:
            return f"features ({', '.join(self.teacher_taps)})"
        return "network" if self.requires.teacher_model or self.requires.reuses_classifier else None

    @property
    def standardizes(self) -> bool:
        """Whether it reads logits less their mean, by their deviation."""
        return isinstance(self.options, StandardizeOptions) and self.options.standardize

    @property
    def whole_student(self) -> str | None:
        """What of it needs the whole student on a rank, of which a pipeline stage has a part; None: nothing."""
        if init_epochs(self.options):
            return "an init stage"
        return "its teacher's classifier in the student" if self.requires.reuses_classifier else None

    def build(self, context: BuildContext) -> Method:
        """The method, on the CPU in float32. Its initial parameters depend on its name and the seed only.

        Raises DistillError: it does not fit the models, or has batch norms that it does not declare.
        """
        with seeded(f"method/{self.key}:{context.seed}"):
            try:
                method = self.method_class(self.options, context)
            except DistillError:
                raise
            except (Exception, SystemExit) as error:  # a user's method may fail in any way
                reason = next(iter(str(error).strip().splitlines()), "")
                raise ExperimentError.of_key(
                    "distill.method", f"{self.key} cannot be built for these models ({type(error).__name__}: {reason})"
                ) from error
        undeclared = has_global_batch_norm(method) and not self.requires.whole_batch
        if undeclared and not has_global_batch_norm(context.student.model):  # else it may have them as the student does
            raise ExperimentError.of_key(
                "distill.method", f"{self.key} has batch norms of its own: declare requires = Requirements(whole_batch=True)"
            )
        return method


def select_methods(distill: DistillConfig) -> tuple[SelectedMethod, ...]:
    """The methods of `distill` with their options, without those of weight 0.

    Raises:
        ExperimentError: a method cannot be loaded.
        pydantic.ValidationError: a method does not have such options.
    """
    found = []
    for key, name in distill.keys.items():
        method_class = load_method(name)
        found.append(SelectedMethod(key, method_class, method_class.Options.model_validate(distill.options.get(key, {}))))
    return tuple(method for method in found if method.options.weight)


def for_teachers(methods: Sequence[SelectedMethod], shares: Sequence[float]) -> tuple[SelectedMethod, ...]:
    """With several teachers, which have `shares` of 1, a method that reads more than logits becomes one for each teacher: `embed`
    becomes `embed1`, `embed2`, …, whose weights are the method's times the shares.

    Raises ExperimentError: another method has such a key.
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
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ExperimentError.of_key("distill.method", f"{twice} is a method's name, and another one with a teacher: rename it")
    return tuple(found)


def task_weight(distill: DistillConfig, selected: Sequence[SelectedMethod]) -> float:
    """The weight of the labels' cross-entropy: the user's, otherwise the largest default of the methods."""
    if distill.task_weight is not None:
        return distill.task_weight
    return max((method.task_weight for method in selected), default=1.0)


def student_name(student: str, teacher: TeacherConfig | None, selected: Sequence[SelectedMethod]) -> str:
    """The name of the model that is trained: `student`, or STUDENT+TEACHER where a method reuses the teacher's classifier."""
    if teacher is None or not any(method.requires.reuses_classifier for method in selected):
        return student
    suffix = f"{REUSE_SEPARATOR}{teacher.model}"
    return student if student.endswith(suffix) else student + suffix
