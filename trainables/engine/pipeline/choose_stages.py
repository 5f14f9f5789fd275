"""How many pipeline stages a job has where `scale.pipeline_stages` is `auto`: each number is planned, the fastest is taken."""

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from trainables.config import TrainConfig
from trainables.data.source import open_on_node
from trainables.device.model_input import tensor_format
from trainables.distributed.group import Group, from_rank
from trainables.distributed.pipeline.costs import Link, Plan
from trainables.distributed.pipeline.cut_points import CutPoint
from trainables.distributed.pipeline.link import measure_link
from trainables.engine.dry_run import untrained_modules
from trainables.engine.pipeline.build import possible_cuts
from trainables.engine.pipeline.planning import Costs, PlannedModels, measure, planned_batch, planner_of, sizes_of
from trainables.engine.teacher_placement import is_sharded
from trainables.errors import DistillError, ExperimentError, ModelError
from trainables.rules import first_problem

log = logging.getLogger("raydistill")


class StagesChoice(NamedTuple):
    """A number of pipeline stages, and what it was chosen among."""

    config: TrainConfig
    """The job with that number, its cut and its micro-batches."""
    predicted_s: dict[int, float]
    """A step by number of stages; of those that fit."""
    reasons: dict[int, str]
    """Why other numbers of stages are left out."""


def choose_stages(config: TrainConfig, group: Group) -> StagesChoice:
    """The number of stages whose step is predicted to be shortest, among those that divide the workers.

    Every rank calls it, and times untrained models on its device, which cost what trained ones do.

    Raises DistillError: on every rank: the data cannot be read, or no number of stages fits the device's memory.
    """
    if group.world_size == 1:
        return StagesChoice(_in_stages(config, 1), {}, {})
    assert dist.group.WORLD is not None
    link = measure_link(dist.group.WORLD, group.device)
    choice = _plan_each(config, group, link)
    predicted = ", ".join(f"{number}: {1e3 * step_s:.1f} ms" for number, step_s in choice.predicted_s.items())
    reasons = "".join(f"; {number} is left out: {reason}" for number, reason in choice.reasons.items())
    log.info(
        "%s: scale.pipeline_stages auto: %d%s%s",
        config.stage,
        choice.config.scale.num_stages,
        f", of the predicted steps {predicted}" if predicted else "",
        reasons,
    )
    return choice


def _in_stages(config: TrainConfig, number: int, plan: Plan | None = None) -> TrainConfig:
    scale = config.scale.model_copy(update={"pipeline_stages": number})
    if plan is not None and number > 1:
        scale = scale.model_copy(update={"cut": plan.cuts, "micro_batches": plan.num_micro_batches})
    return config.model_copy(update={"scale": scale})


def _plan_each(config: TrainConfig, group: Group, link: Link) -> StagesChoice:
    num_classes = from_rank(lambda: len(open_on_node(config.data, "train").classes), group)
    jobs, reasons = {1: _in_stages(config, 1)}, dict[int, str]()
    found: tuple[PlannedModels, list[CutPoint]] | None = None
    for number in range(2, config.scale.num_workers + 1):
        if config.scale.num_workers % number:
            continue
        job = _in_stages(config, number)
        try:
            found = _models_and_cuts(job, num_classes)  # the same for every number
            jobs[number] = job
        except DistillError as error:
            reasons[number] = str(error)
    if found is None:
        return StagesChoice(jobs[1], {}, reasons)
    models, points = found
    sizes = sorted({size for job in jobs.values() for size in sizes_of(job)})
    costs = measure(config, points, models, sizes, group, group)
    return from_rank(lambda: _fastest(config, jobs, reasons, lambda job: _plan(job, group.device, link, models, costs)), group)


def _fastest(
    config: TrainConfig, jobs: Mapping[int, TrainConfig], reasons: dict[int, str], plan: Callable[[TrainConfig], Plan]
) -> StagesChoice:
    """Of the numbers of stages that fit the device's memory."""
    plans = dict[int, Plan]()
    for number, job in jobs.items():
        try:
            plans[number] = plan(job)
        except ModelError as error:
            reasons[number] = str(error)
    if not plans:
        raise ModelError(f"scale.pipeline_stages auto: {'; '.join(f'{each}: {reason}' for each, reason in reasons.items())}")
    best = min(plans, key=lambda number: plans[number].step_s)
    predicted_s = {number: config.optim.accumulate * plan.step_s for number, plan in plans.items()}
    return StagesChoice(_in_stages(config, best, plans[best]), predicted_s, reasons)


def _models_and_cuts(config: TrainConfig, num_classes: int) -> tuple[PlannedModels, list[CutPoint]]:
    """Raises DistillError: the job cannot be trained in so many stages."""
    if problem := first_problem(config):
        raise ExperimentError(problem)
    module, network = untrained_modules(config, num_classes)
    if network is not None:
        network.to(tensor_format(config)[0])
    return PlannedModels(module.student, network), possible_cuts(config, module)


def _plan(config: TrainConfig, device: torch.device, link: Link, models: PlannedModels, costs: Costs) -> Plan:
    """Of a job's number of stages. Raises ModelError: it does not fit the device's memory."""
    scale = config.scale
    sharded = models.teacher is not None and is_sharded(config, scale.num_replicas, device, models.student, models.teacher)
    planner = planner_of(config, device, link, costs, teacher_is_sharded=sharded)
    number = 1 if scale.num_stages == 1 else None if scale.micro_batches == "auto" else scale.micro_batches
    return planner.plan(planned_batch(config), None, number)
