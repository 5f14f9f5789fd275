"""`data.global_batch_size: auto`: a batch that is decided once, when a training begins. See `service.sweeps.batch_size`."""

from service.config.schema import Experiment
from trainables.errors import ExperimentError

AUTO = "auto"
TIMED = "timed when the run began"
"""The source of a `data.global_batch_size` that was `auto`."""
SMALLEST = 8
"""Images of one replica in the smallest batch that is tried, unless its micro-batches need more."""


def smallest_batch(experiment: Experiment) -> int:
    """The smallest batch that is tried in place of `auto`: a power of two for each replica, with two images or more for each of
    its micro-batches, which a batch norm needs."""
    scale = experiment.scale
    in_pipeline = 1 if scale.pipeline_stages == 1 else scale.micro_batches or 4 * scale.pipeline_stages
    images = max(SMALLEST, 2 * in_pipeline * experiment.optim.accumulate)
    return max(1, scale.num_replicas) << (images - 1).bit_length()


def with_number(experiment: Experiment) -> Experiment:
    """The experiment with the smallest batch that is tried in place of `auto`, which is what can be checked of it so far."""
    data = experiment.data
    if data.global_batch_size != AUTO:
        return experiment
    return experiment.model_copy(update={"data": data.model_copy(update={"global_batch_size": smallest_batch(experiment)})})


def refuse_auto(experiment: Experiment, command: str, instead: str = "write a number") -> None:
    """Refuse `auto` where no training begins. Raises ExperimentError."""
    if experiment.data.global_batch_size == AUTO:
        raise ExperimentError(
            f"data.global_batch_size: auto is decided when `distill train` begins, not by `distill {command}`: {instead}"
        )
