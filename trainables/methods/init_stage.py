"""The init stage of methods that have one: a job before a stage's own, in which each trains its own part by its `init_loss`."""

from collections.abc import Iterable
from pathlib import Path

from trainables.config import InitStageOptions, TrainConfig, init_epochs
from trainables.errors import ExperimentError
from trainables.methods.select import SelectedMethod, select_methods
from trainables.rundir import StageDir


def with_init_stage(config: TrainConfig) -> list[TrainConfig]:
    """The jobs of a stage in their order: its init stage, where a method has one, and its own, which begins with what that left.

    The init stage has its folder next to the stage's. Steps that are timed have none before them.

    Raises ExperimentError: two methods have different learning rates for it.
    """
    methods = select_methods(config.distill) if config.distill is not None and config.train.max_steps is None else ()
    epochs = longest_init_stage(methods)
    if not epochs:
        return [config]
    stage, lr = StageDir(Path(config.output_dir)).init, _init_lr(methods)
    optim = {"epochs": epochs, "schedule": "constant", "warmup_epochs": 0.0, "warmup_steps": 0, "losses": {}, "ema_decay": None}
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


def longest_init_stage(methods: Iterable[SelectedMethod]) -> int:
    """The length of the init stage of all `methods`; 0: there is none."""
    return max((init_epochs(method.options) for method in methods), default=0)


def _init_lr(methods: Iterable[SelectedMethod]) -> float | None:
    """The learning rate of the init stage, which all methods share; None: the peak of `optim`."""
    options = {method.key: method.options for method in methods if init_epochs(method.options)}
    rates = {key: own.init_lr for key, own in options.items() if isinstance(own, InitStageOptions)}
    if len(set(rates.values())) > 1:
        raise ExperimentError(
            f"distill.options: {' and '.join(rates)} share one init stage, and have the init_lr"
            f" {' and '.join(f'{rate}' for rate in rates.values())}: write the same for each"
        )
    return next(iter(rates.values()), None)
