"""The init stage of methods that have one: a job before a stage's own, in which each trains its own part by its `init_loss`."""

from collections.abc import Iterable
from pathlib import Path

from trainables.config import TrainConfig
from trainables.errors import ExperimentError
from trainables.methods.select import SelectedMethod, select_methods
from trainables.rundir import StageDir


def with_init_stage(config: TrainConfig) -> list[TrainConfig]:
    """The jobs of a stage in their order: its init stage, where a method has one, and its own, which begins with what that left.

    The init stage has its folder next to the stage's. Steps that are timed have none before them.

    Raises ExperimentError: two methods have different learning rates for it.
    """
    methods = select_methods(config.distill) if config.distill is not None and config.train.max_steps is None else ()
    epochs = init_epochs(methods)
    if not epochs:
        return [config]
    stage, lr = StageDir(Path(config.output_dir)).init, _init_lr(methods)
    optim = {"epochs": epochs, "schedule": "constant", "warmup_epochs": 0.0, "losses": {}}
    optim |= {"lr": lr, "lr_scaling": "none"} if lr is not None else {}
    optim |= {"name": "sgd"} if config.optim.name == "dot" else {}
    train = {"until_top1_pct": None, "until_s": None, "noise_scale": False}
    init = config.model_copy(
        update={
            "stage": f"{config.stage}-init",
            "output_dir": str(stage.root),
            "init_stage": True,
            "optim": config.optim.model_copy(update=optim),
            "train": config.train.model_copy(update=train),
        }
    )
    return [init, config.model_copy(update={"init_checkpoint": str(stage.last)})]


def init_epochs(methods: Iterable[SelectedMethod]) -> int:
    """The length of the longest init stage; 0: there is none."""
    return max((method.init_epochs for method in methods), default=0)


def _init_lr(methods: Iterable[SelectedMethod]) -> float | None:
    """The learning rate of the init stage, which all methods share; None: the peak of `optim`."""
    rates = {method.key: getattr(method.options, "init_lr", None) for method in methods if method.init_epochs}
    first = next((key for key, rate in rates.items() if rate is not None), None)
    if first is None:
        return None
    for other, rate in rates.items():
        if rate != rates[first]:
            raise ExperimentError(
                f"distill.options.{first}.init_lr: {other} has an init stage too, at another rate, and there is one for both:"
                f" leave init_lr out, or {other}"
            )
    return rates[first]
