"""Elastic stages: with how many workers one begins (`scale.min_workers` to `scale.num_workers`), by what the cluster has free.

Ray's own elasticity (`ScalingConfig(num_workers=(min, max))`) is not used: its policy counts any number of workers between the
two as good, also one that does not divide the global batch; and to resize it ends the workers without a notice
(`TrainController._execute_resize_decision`), so that the steps since the last checkpoint would be lost.
"""

from __future__ import annotations

import time
from dataclasses import replace

from service.cluster.resources import living_nodes
from service.runs.stages.assignment import Assignment
from trainables.config import TrainConfig
from trainables.rules import RULES, first_problem

SETTLING_S = 10.0
"""What workers that have just ended had reserved is not free at once."""


def with_num_workers(config: TrainConfig, num_workers: int, next_num_workers: int | None = None) -> TrainConfig:
    """The configuration with another world size. `next_num_workers`: see `TrainConfig`."""
    scale = config.scale.model_copy(update={"num_workers": num_workers})
    return config.model_copy(update={"scale": scale, "next_num_workers": next_num_workers})


def world_sizes(config: TrainConfig) -> list[int]:
    """The numbers of workers that a stage may have, ascending: between the two, those that divide what has to be divided."""
    scale = config.scale
    if scale.min_workers is None or config.train.max_steps is not None:  # what is timed is one number of workers
        return [scale.num_workers]
    numbers = range(scale.min_workers, scale.num_workers + 1)
    divisible = [number for number in numbers if number % scale.pipeline_stages == 0]
    return [number for number in divisible if first_problem(with_num_workers(config, number), RULES) is None]


def with_free_workers(assignment: Assignment) -> Assignment:
    """The stage with as many workers as there is room for now; with the fewest where there is not even room for those."""
    config = assignment.config
    sizes = world_sizes(config)
    if len(sizes) == 1:
        return assignment
    room = _settled_room(assignment, sizes[-1])
    size = max([number for number in sizes if number <= room], default=sizes[0])
    larger = [number for number in sizes if number > size]
    if larger and size <= room:
        assignment.append_to_log(f"{size} of {sizes[-1]} workers, as many as there is room for")
    return replace(assignment, config=with_num_workers(config, size, larger[0] if larger else None))


def _settled_room(assignment: Assignment, most: int) -> int:
    """For how many workers there is room, once no more is becoming free. The actors of `teacher.service` have theirs already."""
    reservation = replace(assignment.reservation, service=None)
    until_s = time.monotonic() + SETTLING_S
    while (room := living_nodes().free.max_workers(reservation)) < most and time.monotonic() < until_s:
        time.sleep(0.5)
    return room
