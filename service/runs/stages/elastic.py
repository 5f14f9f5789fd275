"""Elastic stages: choose between `scale.min_workers` and `scale.num_workers` workers by the cluster's free resources.

Ray's own elasticity (`ScalingConfig(num_workers=(min, max))`) is not used. It accepts any number between the two, even if it
does not divide the global batch, and to resize it kills the workers without notice
(`TrainController._execute_resize_decision`), which loses the steps since the last checkpoint.
"""

from __future__ import annotations

import time
from dataclasses import replace

from service.cluster.resources import living_nodes
from service.runs.stages.assignment import Assignment
from trainables.config import TrainConfig
from trainables.rules import RULES, first_problem

SETTLING_S = 10.0
"""How long resources of workers that have just ended may take to become free."""


def with_num_workers(config: TrainConfig, num_workers: int, next_num_workers: int | None = None) -> TrainConfig:
    """Return the configuration with another world size. For `next_num_workers` see `TrainConfig`."""
    scale = config.scale.model_copy(update={"num_workers": num_workers})
    return config.model_copy(update={"scale": scale, "next_num_workers": next_num_workers})


def world_sizes(config: TrainConfig) -> list[int]:
    """Return the valid numbers of workers for a stage, ascending."""
    scale = config.scale
    if scale.min_workers is None or config.train.max_steps is not None:  # a timing run has a fixed number
        return [scale.num_workers]
    numbers = range(scale.min_workers, scale.num_workers + 1)
    divisible = [number for number in numbers if number % scale.pipeline_stages == 0]
    return [number for number in divisible if first_problem(with_num_workers(config, number), RULES) is None]


def with_free_workers(assignment: Assignment) -> Assignment:
    """Return the stage with as many workers as there is room for now, or with the minimum if there is less room."""
    config = assignment.config
    sizes = world_sizes(config)
    if len(sizes) == 1:
        return assignment
    room = _settled_room(assignment, sizes[-1])
    size = max([number for number in sizes if number <= room], default=sizes[0])
    larger = [number for number in sizes if number > size]
    if larger and size <= room:
        assignment.append_to_log(f"{size} of {sizes[-1]} workers, as the cluster has no room for more")
    return replace(assignment, config=with_num_workers(config, size, larger[0] if larger else None))


def _settled_room(assignment: Assignment, max_workers: int) -> int:
    """Return how many workers there is room for, waiting a little for up to `max_workers`."""
    # The actors of `teacher.service` have their resources already.
    reservation = replace(assignment.reservation, service=None)
    until_s = time.monotonic() + SETTLING_S
    while (room := living_nodes().free.max_workers(reservation)) < max_workers and time.monotonic() < until_s:
        time.sleep(0.5)
    return room
