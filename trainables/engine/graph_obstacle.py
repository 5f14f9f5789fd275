"""Why the steps of a job cannot be launched as CUDA graphs (`train.cuda_graphs`)."""

import logging
from collections.abc import Sequence

from trainables.config import TrainConfig
from trainables.distributed.batch_norm import has_global_batch_norm
from trainables.distributed.group import Group
from trainables.engine.loss_optimizers import LossOptimizer
from trainables.engine.step import TrainingParts
from trainables.teachers.network import TeacherNetwork

log = logging.getLogger("raydistill")


def obstacle(config: TrainConfig, group: Group, parts: TrainingParts) -> str | None:
    """Why no step of a job can be captured, as its configuration has it; None: nothing speaks against it. All ranks agree."""
    teacher, unfused = parts.teacher, _unfused_optimizer(parts.optimizers)
    reasons = {
        "there are none on a CPU": group.device.type != "cuda",
        "optim.accumulate: a step has several micro-batches": config.optim.accumulate > 1,
        "precision fp16: its loss scaler decides on the host whether to skip a step": config.precision == "fp16",
        "precision fp64: a captured learning rate has float32": config.precision == "fp64",
        "train.compile: compiled models are not captured": config.train.compile,
        f"the optimizer {unfused} is not fused: its step reads numbers of the host": unfused is not None,
        "the teacher's logits come from the host": not isinstance(teacher, TeacherNetwork | None),
        "teacher.placement: the teacher is sharded": teacher is not None and teacher.is_collective,
    }
    if group.world_size > 1:
        reasons |= {
            "scale.sync_batch_norm: the workers exchange statistics within a step": has_global_batch_norm(parts.module.student),
            "a method compares the samples of all workers within a step": parts.module.requires_whole_batch,
            "losses have optimizers of their own, and the workers average gradients between their steps": (
                len(parts.optimizers) > 1
            ),
            "the parameters have several dtypes, and the workers average gradients of one": (
                len({parameter.dtype for parameter in parts.optimizers[0].parameters}) > 1
            ),
        }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _unfused_optimizer(optimizers: Sequence[LossOptimizer]) -> str | None:
    """The optimizer that steps in Python, one operation after the other; None: there is none."""
    unfused = (each.optimizer for each in optimizers if not all(group.get("fused") for group in each.optimizer.param_groups))
    return next((type(one).__name__ for one in unfused), None)


def log_eager(stage: str, reason: str, level: int = logging.INFO) -> None:
    """Say why `train.cuda_graphs` has no effect."""
    log.log(level, "%s: train.cuda_graphs: steps are launched one operation at a time: %s", stage, reason)
