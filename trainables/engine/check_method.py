"""`distill check-method`: whether a method fulfils its contract, by small real training jobs on one to three workers."""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainables.config import TrainConfig
from trainables.engine.check_method_jobs import BatchGradients, Case, batch_gradients, job_config, train_until
from trainables.errors import DistillError
from trainables.methods.distillation_module import describe_terms
from trainables.methods.init_stage import with_init_stage
from trainables.methods.registry import load_method

__all__ = ["Case", "CheckResult", "check"]

RunRanks = Callable[..., list[Any]]
"""`run(n, function, *args)`: the results of `function(group, *args)` on n ranks."""
TOLERANCE = 1e-9


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
    load_method(case.name).Options.model_validate(case.options)
    with tempfile.TemporaryDirectory(prefix="raydistill-") as folder:
        root = Path(folder)
        yield _finding("its terms are those that it declares, of samples or of the batch", lambda: _terms(case, root, run))
        yield _finding("gradients reach the student and all that the method trains", lambda: _reach(case, root, run))
        yield _finding(f"2 and 3 workers train what one trains, to {TOLERANCE:g}", lambda: _workers(case, root, run))
        yield _finding("a job that was cut off goes on exactly", lambda: _resumed(case, root, run))
        yield _finding("everything is finite in bf16", lambda: _finite(case, root, run))
        yield _finding("a student that equals its teacher has finite gradients", lambda: _equal(case, root, run))


def _finding(title: str, problem: Callable[[], str | None]) -> CheckResult:
    try:
        return CheckResult(title, problem())
    except DistillError as error:
        return CheckResult(title, str(error))
    except (Exception, SystemExit) as error:  # a user's method may fail in any way
        first_line = next(iter(str(error).strip().splitlines()), "")
        return CheckResult(title, f"{type(error).__name__}: {first_line}")


def _stages(config: TrainConfig) -> dict[str, TrainConfig]:
    """The prefix of problems → the job, of the training from its start and of the init stage of a method that has one."""
    *init, _ = with_init_stage(config)
    return dict(zip(("", "in the init stage "), (config, *init), strict=False))


def _terms(case: Case, root: Path, run: RunRanks) -> str | None:
    method_class = load_method(case.name)
    if method_class.init_terms and "init_epochs" not in method_class.Options.model_fields:
        return "it declares init_terms, and its Options have no init_epochs: its init stage has no length"
    for stage, config in _stages(job_config(case, root / "terms")).items():
        (found,) = run(1, batch_gradients, config)
        declared = method_class.init_terms if config.init_stage else method_class.terms
        if set(found.terms) != set(declared):
            return f"{stage}it {describe_terms(found.terms, declared)}"
        if found.gathers and not (method_class.requires.whole_batch or method_class.requires.all_gather):
            return (
                f"{stage}it calls batch.all_gather: declare requires = Requirements(whole_batch=True), so that"
                " optim.accumulate is refused with it"
            )
        wrong = [f"{name} {shape}" for name, shape in found.terms.items() if shape not in ((), (found.num_rows,))]
        if wrong:
            return f"{stage}neither ({found.num_rows},) nor a scalar: {', '.join(wrong)}"
    return None


def _reach(case: Case, root: Path, run: RunRanks) -> str | None:
    for stage, config in _stages(job_config(case, root / "reach")).items():
        (found,) = run(1, batch_gradients, config)
        missing = _without_gradient(found, config)
        if missing:
            problem = "it never changes" if found.several_optimizers else "several workers would wait for it for ever"
            hint = "init_stage_parameters names what stays as it is" if config.init_stage else problem
            return f"{stage}no loss reaches {', '.join(missing)}: {hint}"
        if found.terms and not found.from_method > 0:
            return f"{stage}its terms do not move {'what it trains' if config.init_stage else 'the student'}"
    return None


def _without_gradient(found: BatchGradients, config: TrainConfig) -> list[str]:
    """The trained parameters without a gradient. In an init stage only the method's: no rank waits for the student's."""
    missing = [name for name, largest in found.largest.items() if largest is None]
    return [name for name in missing if name.startswith("methods.")] if config.init_stage else missing


def _workers(case: Case, root: Path, run: RunRanks) -> str | None:
    (alone,) = run(1, train_until, job_config(case, root / "one"))
    for num_workers in (2, 3):
        states = run(num_workers, train_until, job_config(case, root / f"workers{num_workers}"))
        for rank, state in enumerate(states):
            name, difference = _largest_difference(alone, state)
            if not difference < TOLERANCE:
                return f"rank {rank} of {num_workers} has another {name}, by {difference:.1e} of its largest value"
    return None


def _resumed(case: Case, root: Path, run: RunRanks) -> str | None:
    whole = run(2, train_until, job_config(case, root / "whole"))[0]
    config = job_config(case, root / "killed")
    run(2, train_until, config, 2)  # in the init stage, where there is one
    run(2, train_until, config, 5)  # its last checkpoint is in the middle of an epoch, after step 4
    name, difference = _largest_difference(whole, run(2, train_until, config)[0])
    return f"{name} differs, by {difference:.1e} of its largest value" if difference else None


def _finite(case: Case, root: Path, run: RunRanks) -> str | None:
    if load_method(case.name).requires.teacher_gradient:
        return None  # such jobs are refused in half precision
    (state,) = run(1, train_until, job_config(case, root / "bf16", precision="bf16"))  # it stops at a loss that is not finite
    broken = [name for name, tensor in state.items() if not bool(torch.isfinite(tensor).all())]
    return f"not finite: {', '.join(broken)}" if broken else None


def _equal(case: Case, root: Path, run: RunRanks) -> str | None:
    for stage, config in _stages(job_config(case, root / "equal", same=True)).items():
        (found,) = run(1, batch_gradients, config, True)
        broken = [name for name, largest in found.largest.items() if largest is not None and not math.isfinite(largest)]
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
