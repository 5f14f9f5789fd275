"""The init stage: a separate job before a stage, in which methods that have one minimize their `init_loss`."""

from collections.abc import Iterable
from pathlib import Path

from trainables.config import InitStageOptions, TrainConfig, init_epochs
from trainables.errors import ExperimentError
from trainables.methods.select import SelectedMethod, select_methods
from trainables.rundir import StageDir


def with_init_stage(config: TrainConfig) -> list[TrainConfig]:
    """Return the jobs of a stage in order: its init stage, if a method has one, and its own, which continues from that.

    The init stage's folder is next to the stage's. Timing runs have no init stage.

    Raises ExperimentError: methods have different learning rates for the init stage.
    """
    methods = select_methods(config.distill) if config.distill is not None and config.train.max_steps is None else ()
    epochs = longest_init_stage(methods)
    if not epochs:
        return [config]
    stage, lr = StageDir(Path(config.output_dir)).init, _init_lr(methods)
    optim = {"epochs": epochs, "schedule": "constant", "warmup_epochs": 0.0, "warmup_steps": 0, "losses": {}, "ema_decay": None}
    optim |= {"min_lr_factor": 0.0, "cooldown_epochs": 0.0}
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
    """Return the number of epochs of the init stage of all `methods`; 0 if there is none."""
    return max((init_epochs(method.options) for method in methods), default=0)


def _init_lr(methods: Iterable[SelectedMethod]) -> float | None:
    """Return the learning rate of the shared init stage; None for the peak of `optim`."""
    options = {method.key: method.options for method in methods if init_epochs(method.options)}
    rates = {key: own.init_lr for key, own in options.items() if isinstance(own, InitStageOptions)}
    if len(set(rates.values())) > 1:
        raise ExperimentError(
            f"distill.options: {' and '.join(rates)} share one init stage, but have init_lr"
            f" {' and '.join(f'{rate}' for rate in rates.values())}: set the same value for each"
        )
    return next(iter(rates.values()), None)
