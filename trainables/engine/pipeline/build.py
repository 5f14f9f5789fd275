"""Cut a job's student into pipeline stages: where, and what of it and of its methods a rank keeps."""

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from trainables.config import ScaleConfig, TrainConfig
from trainables.distributed.group import from_rank
from trainables.distributed.pipeline.cut_points import CutPoint, cut_points
from trainables.distributed.pipeline.layout import Layout
from trainables.distributed.pipeline.link import measure_link
from trainables.distributed.pipeline.plan import Planner
from trainables.distributed.pipeline.stage_module import StageModule, split
from trainables.engine import checkpoint
from trainables.engine.pipeline.planning import PlannedModels, measure, plan_stages, planner_of, sizes_of
from trainables.errors import ExperimentError, ModelError
from trainables.methods.distillation_module import DistillationModule
from trainables.models.reused_classifier import ReusedClassifier
from trainables.rules import first_problem

log = logging.getLogger("raydistill")


def possible_cuts(config: TrainConfig, module: DistillationModule) -> list[CutPoint]:
    """Where the student may be cut: before all that its methods read. With `scale.cut` those cuts.

    Raises:
        ExperimentError: it has methods that cannot be trained in stages.
        ModelError: it cannot be cut so.
    """
    stages, model = config.scale.num_stages, config.model
    for key, method in module.methods_by_name.items():
        if what := method.stages_conflict(method.options):
            raise ExperimentError(
                f"distill.method: {key} has {what}, which scale.pipeline_stages {stages} does not go with: take another method,"
                " or write scale.pipeline_stages 1"
            )
    if isinstance(module.student, ReusedClassifier):
        raise ExperimentError(
            f"scale.pipeline_stages {stages}: the student predicts with its teacher's classifier, and cannot be cut: take"
            " another distill.method, or write scale.pipeline_stages 1"
        )
    points = cut_points(module.student, config.data.image_size, module.tapped_modules)
    if config.scale.cut is not None:
        found = [_named(cut, points, module, model) for cut in config.scale.cut]
        if found != [point for point in points if point in found]:
            raise ModelError("scale.cut: give its modules in the order of the forward pass, each once")
        _check_trains(module.student, found)
        return found
    if len(points) < stages - 1:
        most = f"at most {len(points) + 1}" if points else "1"
        read = f", before {', '.join(sorted(module.tapped_modules))}, which methods read" if module.tapped_modules else ""
        raise ModelError(f"model {model} can be cut at {len(points)} points{read}: write scale.pipeline_stages {most}")
    return points


def _named(cut: str, points: Sequence[CutPoint], module: DistillationModule, model: str) -> CutPoint:
    found = next((point for point in points if cut == point.module or cut in point.aliases), None)
    if found is not None:
        return found
    names = ", ".join(point.module for point in points) or "none"
    read = f"; methods read {', '.join(sorted(module.tapped_modules))}" if module.tapped_modules else ""
    raise ModelError(f"scale.cut: model {model} cannot be cut before {cut}: choose among {names}{read}")


def _check_trains(student: nn.Module, points: Sequence[CutPoint]) -> None:
    """Whether each stage has something to train: an optimizer without parameters is refused by torch."""
    begins = ["the images", *(point.module for point in points)]
    for begin, stage in zip(begins, split(student, begins[1:]), strict=True):
        if not any(parameter.requires_grad for parameter in stage.parameters()):
            raise ModelError(f"scale.cut: the stage that begins with {begin} has no parameters to train: cut elsewhere")


class Cut(NamedTuple):
    """Where the stages of a job begin, and how they share a batch."""

    modules: tuple[str, ...]
    """With which the second and later stages begin."""
    micro_batches: int
    teacher_is_sharded: bool = False
    """Over the last stages of all replicas."""


def _choose_cut(config: TrainConfig, points: Sequence[CutPoint], models: PlannedModels, planner: Planner | None) -> Cut:
    """What `scale` gives, and the rest by a plan."""
    scale = config.scale
    if planner is not None:
        plan = plan_stages(config, points, planner)
        return Cut(plan.cuts, plan.num_micro_batches, models.teacher_is_sharded)
    assert isinstance(scale.micro_batches, int)
    return Cut(tuple(point.module for point in points), scale.micro_batches, models.teacher_is_sharded)


def with_saved_cut(config: TrainConfig, path: Path) -> TrainConfig:
    """With the cut and the micro-batches of a checkpoint of as many stages, where `scale` leaves them open; stages too.

    Another number of micro-batches would change what batch norms see in the middle of a run. Stages that do not go with another
    number of workers are chosen anew. Raises CheckpointError: the file is damaged.
    """
    saved = checkpoint.read_about(path).get("pipeline")
    scale = config.scale
    if saved is None or scale.pipeline_stages not in ("auto", saved["pipeline_stages"]):
        return config
    found: dict[str, Any] = {"pipeline_stages": saved["pipeline_stages"]}
    if scale.cut is None and saved["cut"] is not None:
        found["cut"] = tuple(saved["cut"])
    if scale.micro_batches == "auto":
        found["micro_batches"] = saved["micro_batches"]
    resumed = config.model_copy(update={"scale": scale.model_copy(update=found)})
    fits = scale.num_workers % saved["pipeline_stages"] == 0 and first_problem(resumed) is None
    return config if scale.pipeline_stages == "auto" and not fits else resumed


def cut_student(
    config: TrainConfig, layout: Layout, module: DistillationModule, models: PlannedModels
) -> tuple[StageModule, ScaleConfig]:
    """This rank's stage of `module`'s student, which is on the CPU, on its device; and `scale` without what it leaves open.

    Every rank calls it; the last stage's have the methods and the teacher. The memory of other stages is freed.

    Raises ExperimentError, ModelError: see `possible_cuts`; on every rank.
    """
    student, scale, job = module.student, config.scale, layout.job
    decider = scale.num_stages - 1  # the last stage of the first replica knows what methods read
    points = from_rank(lambda: possible_cuts(config, module), job, decider)
    planner = None
    if scale.cut is None or scale.micro_batches == "auto":
        assert layout.pipeline.process_group is not None
        link = measure_link(layout.pipeline.process_group, job.device)
        costs = measure(config, points, models, sizes_of(config), job, layout.replicas)
        planner = planner_of(config, job.device, link, costs, teacher_is_sharded=models.teacher_is_sharded)
    cut = from_rank(lambda: _choose_cut(config, points, models, planner), job, decider)
    stage = split(student, cut.modules)[layout.pipeline.rank]
    log.info(
        "%s: %s in %d stages, cut before %s; micro-batches: %d, %s",
        config.stage,
        config.model,
        scale.num_stages,
        ", ".join(cut.modules),
        cut.micro_batches,
        scale.schedule,
    )
    if cut.teacher_is_sharded:  # this rank may have no teacher, and the first one writes the log
        log.info("%s: the teacher is sharded over the last stages of %d replicas", config.stage, scale.num_replicas)
    _free(student, {id(tensor) for tensor in (*stage.parameters(), *stage.buffers())})
    return stage.to(layout.pipeline.device), scale.model_copy(update={"cut": cut.modules, "micro_batches": cut.micro_batches})


def _free(model: nn.Module, needed: Collection[int]) -> None:
    """Drop the memory of all parameters and buffers but those with these ids: methods and taps may refer to the modules."""
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in needed:
            tensor.data = tensor.data.new_empty(0)
