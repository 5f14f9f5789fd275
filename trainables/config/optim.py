"""Configuration of the optimizer, the schedule and the length of training."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trainables.config.section import Count, LayerDecay, Natural, NonNegative, Positive, Section

Schedule = Literal["constant", "step", "cosine", "wsd"]


class LossOptimConfig(Section):
    """A separate optimizer for one loss; absent keys are those of the enclosing section."""

    name: str | None = Field(None, min_length=1, description="not dot; absent: optim.name")
    args: dict[str, Any] | None = Field(None, description="absent: optim.args")
    lr: Positive | None = Field(None, description="absent: optim.lr")
    schedule: Schedule | None = Field(None, description="absent: optim.schedule")
    milestones: tuple[Count, ...] | None = Field(None, description="absent: optim.milestones")
    gamma: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="absent: optim.gamma")
    warmup_epochs: NonNegative | Literal["auto"] | None = Field(None, description="absent: optim.warmup_epochs")
    warmup_steps: Natural | None = Field(None, description="absent: optim.warmup_steps")
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = Field(None, description="absent: optim.momentum")
    nesterov: bool | None = Field(None, description="absent: optim.nesterov")
    weight_decay: NonNegative | None = Field(None, description="absent: optim.weight_decay")


class OptimConfig(Section):
    """Optimizer, schedule and length of training."""

    name: str = Field(
        "sgd",
        min_length=1,
        description="sgd, adamw, dot (Distillation-Oriented Trainer), or one of timm.optim.list_optimizers(), such as lamb",
    )
    args: dict[str, Any] = Field({}, description="arguments for its constructor, such as betas: [0.9, 0.95]")
    losses: dict[str, LossOptimConfig] = Field(
        {}, description="`task`, a method or METHOD/TERM → an optimizer of its own: the keys that differ"
    )
    delta: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.075, description="dot: the momentum is `momentum` minus delta for the task, plus delta for the methods"
    )
    epochs: Count = Field(10, description="epochs of training")
    lr: Positive = Field(0.1, description="peak learning rate")
    lr_head: Positive | None = Field(None, description="peak learning rate of the classifier; absent: lr")
    layer_decay: LayerDecay | None = Field(
        None,
        description="timm models: each layer's learning rate is that of the next layer times this",
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="linear: multiply lr by global_batch_size / lr_base_batch; sqrt: by its square root"
    )
    lr_base_batch: Count = Field(256, description="global batch size that lr is meant for")
    schedule: Schedule = Field(
        "cosine",
        description="how the learning rate falls after the warm-up; wsd: constant, then linear decay at the end",
    )
    min_lr_factor: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="cosine and wsd: final learning rate as a fraction of lr"
    )
    cooldown_epochs: NonNegative = Field(
        0.0, description="cosine and wsd: final epochs in which the learning rate stays at min_lr_factor·lr"
    )
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = Field(0.2, description="wsd: share of the epochs in which it decays")
    milestones: tuple[Count, ...] = Field((30, 60, 90), description="step: epochs at which lr is multiplied by gamma")
    gamma: Annotated[float, Field(gt=0, le=1)] = Field(0.1, description="step: factor at each milestone")
    warmup_epochs: NonNegative | Literal["auto"] = Field(
        0.0, description="epochs over which the learning rate rises linearly to lr; auto: a tenth of epochs, at most 10"
    )
    warmup_steps: Natural = Field(0, description="the same in optimizer steps; unrelated to train.warmup_steps")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="momentum of sgd, dot, and timm optimizers with one")
    nesterov: bool = Field(False, description="sgd: use Nesterov momentum")
    weight_decay: NonNegative = Field(1e-4, description="weight decay: L2 for sgd and dot, decoupled for adamw")
    decay_norm_and_bias: bool = Field(True, description="false: no weight decay on norm layers and biases")
    accumulate: Count = Field(1, description="micro-batches of a worker per optimizer step; noise_scale needs 2 with one worker")
    clip_grad_norm: Positive | None = Field(
        None,
        description="largest L2 norm of the gradients in a step, per optimizer",
    )
    clip_grad_value: Positive | None = Field(None, description="largest absolute value of a gradient")
    clip_grad_agc: Positive | None = Field(
        None,
        description="adaptive clipping: largest ratio of a unit's gradient norm to its weight norm, except in the classifier",
    )
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="decay of an exponential moving average (EMA) of the weights, such as 0.9999, with warm-up; evaluations and "
        "checkpoints use the average",
    )

    @property
    def epochs_of_warmup(self) -> float:
        """The value of `warmup_epochs`, with `auto` resolved."""
        return min(self.epochs / 10, 10.0) if self.warmup_epochs == "auto" else self.warmup_epochs

    def for_loss(self, key: str) -> OptimConfig:
        """Return this section with the overrides for one loss."""
        own = self.losses[key].model_dump(exclude_none=True)
        return OptimConfig.model_validate({**self.model_dump(), **own, "losses": {}})
