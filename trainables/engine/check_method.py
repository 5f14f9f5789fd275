"""`distill check-method`: whether a method fulfils its contract, by small real training jobs on one to three workers."""

import functools
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainables.config import TrainConfig
from trainables.engine.check_method_jobs import BatchGradients, Case, batch_gradients, job_config, train_until
from trainables.errors import DistillError, first_line
from trainables.methods.contract import Method
from trainables.methods.distillation_module import describe_terms
from trainables.methods.init_stage import with_init_stage
from trainables.methods.registry import load_method

__all__ = ["Case", "CheckResult", "check"]

RunRanks = Callable[..., list[Any]]
"""`run(n, function, *args)`: the results of `function(group, *args)` on n ranks."""
Batch = Callable[..., BatchGradients]
Trained = Callable[..., list[dict[str, Tensor]]]
TOLERANCE = 1e-9
TRAINING, INIT_STAGE = "", "in the init stage "
"""The stages of a job, as the beginning of a problem."""


class CheckResult(NamedTuple):
    title: str
    problem: str | None
    """None: the method passes."""


def check(case: Case, run: RunRanks) -> Iterator[CheckResult]:
    """Run the checks of a method, one after the other.

    Raises:
        ExperimentError: it cannot be loaded.
        pydantic.ValidationError: it does not have such options.
    """
    method = load_method(case.name)
    method.Options.model_validate(case.options)
    with tempfile.TemporaryDirectory(prefix="raydistill-") as folder:
        root = Path(folder)

        @functools.cache
        def batch(stage: str, same: bool = False) -> BatchGradients:
            config = job_config(case, root / f"batch{len(stage)}{same}", same=same)
            return run(1, batch_gradients, _stages(config)[stage], same)[0]  # type: ignore[no-any-return]

        @functools.cache
        def trained(num_workers: int, precision: str = "fp64", cut_off_at: tuple[int, ...] = ()) -> list[dict[str, Tensor]]:
            config = job_config(case, root / f"{num_workers}-{precision}-{len(cut_off_at)}", precision=precision)
            for step in cut_off_at:
                run(num_workers, train_until, config, step)
            return run(num_workers, train_until, config)

        stages = list(_stages(job_config(case, root / "stages")))
        yield _finding("its terms are those that it declares, of samples or of the batch", lambda: _terms(method, stages, batch))
        yield _finding("gradients reach the student and all that the method trains", lambda: _check_grad_flow(stages, batch))
        yield _finding(f"2 and 3 workers train what one trains, to {TOLERANCE:g}", lambda: _workers(trained))
        yield _finding("a job that was cut off goes on exactly", lambda: _resumed(trained))
        yield _finding("everything is finite in bf16", lambda: _finite(method, trained))
        yield _finding("a student that equals its teacher has finite gradients", lambda: _equal(stages, batch))


def _finding(title: str, problem: Callable[[], str | None]) -> CheckResult:
    try:
        return CheckResult(title, problem())
    except DistillError as error:
        return CheckResult(title, str(error))
    except (Exception, SystemExit) as error:  # a user's method may fail in any way
        return CheckResult(title, f"{type(error).__name__}: {first_line(error)}")


def _stages(config: TrainConfig) -> dict[str, TrainConfig]:
    """The job of the training from its start, and that of the init stage of a method that has one."""
    *init, _ = with_init_stage(config)
    return dict(zip((TRAINING, INIT_STAGE), (config, *init), strict=False))


def _terms(method: type[Method], stages: Sequence[str], batch: Batch) -> str | None:
    if method.init_terms and "init_epochs" not in method.Options.model_fields:
        return "it declares init_terms, and its Options have no init_epochs: its init stage has no length"
    for stage in stages:
        found = batch(stage)
        declared = method.init_terms if stage == INIT_STAGE else method.terms
        if set(found.terms) != set(declared):
            return f"{stage}it {describe_terms(found.terms, declared)}"
        if found.gathers and not (method.requires.whole_batch or method.requires.all_gather):
            return (
                f"{stage}it calls batch.all_gather: declare requires = Requirements(whole_batch=True), so that"
                " optim.accumulate is refused with it"
            )
        wrong = [f"{name} {shape}" for name, shape in found.terms.items() if shape not in ((), (found.num_rows,))]
        if wrong:
            return f"{stage}neither ({found.num_rows},) nor a scalar: {', '.join(wrong)}"
    return None


def _check_grad_flow(stages: Sequence[str], batch: Batch) -> str | None:
    for stage in stages:
        found = batch(stage)
        missing = [name for name, largest in found.largest.items() if largest is None]
        if stage == INIT_STAGE:  # in an init stage no rank waits for the student's
            missing = [name for name in missing if name.startswith("methods.")]
        if missing:
            problem = "it never changes" if found.several_optimizers else "several workers would wait for it for ever"
            hint = "init_stage_parameters names what stays as it is" if stage == INIT_STAGE else problem
            return f"{stage}no loss reaches {', '.join(missing)}: {hint}"
        if found.terms and not found.from_method > 0:
            return f"{stage}its terms do not move {'what it trains' if stage == INIT_STAGE else 'the student'}"
    return None


def _workers(trained: Trained) -> str | None:
    for num_workers in (2, 3):
        for rank, state in enumerate(trained(num_workers)):
            name, difference = _largest_difference(trained(1)[0], state)
            if not difference < TOLERANCE:
                return f"rank {rank} of {num_workers} has another {name}, by {difference:.1e} of its largest value"
    return None


def _resumed(trained: Trained) -> str | None:
    # It is cut off in the init stage, where there is one, and then inside an epoch, whose last checkpoint is after step 4.
    name, difference = _largest_difference(trained(2)[0], trained(2, cut_off_at=(2, 5))[0])
    return f"{name} differs, by {difference:.1e} of its largest value" if difference else None


def _finite(method: type[Method], trained: Trained) -> str | None:
    if method.requires.teacher_gradient:
        return None  # such jobs are refused in half precision
    (state,) = trained(1, "bf16")  # it stops at a loss that is not finite
    broken = [name for name, tensor in state.items() if not bool(torch.isfinite(tensor).all())]
    return f"not finite: {', '.join(broken)}" if broken else None


def _equal(stages: Sequence[str], batch: Batch) -> str | None:
    for stage in stages:
        broken = [name for name, value in batch(stage, True).largest.items() if value is not None and not math.isfinite(value)]
        if broken:
            return f"{stage}the gradient is not finite of {', '.join(broken)}"
    return None


def _largest_difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> tuple[str, float]:
    """The tensor that differs most, and the difference relative to its largest value."""

    def difference(name: str) -> float:
        value = float((a[name].double() - b[name].double()).abs().max() / a[name].double().abs().max().clamp(min=1e-300))
        return float("inf") if math.isnan(value) else value

    differences = {name: difference(name) for name in a if a[name].numel()}
    name = max(differences, key=differences.__getitem__)
    return name, differences[name]
