"""With how many workers an elastic stage begins."""

from pathlib import Path

import pytest

from service.cluster.resources import Cluster, Node
from service.runs.stages import elastic
from service.runs.stages.assignment import Assignment
from service.runs.stages.elastic import with_free_workers, world_sizes
from tests.run_log import LocalRecorder
from trainables.config import TrainConfig
from trainables.rules import RULES, first_problem


def config(folder: Path, **scale: object) -> TrainConfig:
    data = {"global_batch_size": 64}
    return TrainConfig.model_validate({"model": "mlp_small", "output_dir": str(folder), "data": data, "scale": scale})


def begun(folder: Path, monkeypatch: pytest.MonkeyPatch, num_free: int) -> tuple[int, int | None]:
    monkeypatch.setattr(elastic, "SETTLING_S", 0.0)
    free = tuple(Node(str(i), 2, 0) for i in range(num_free))
    monkeypatch.setattr(elastic, "living_nodes", lambda: Cluster((), free_nodes=free))
    found = with_free_workers(
        Assignment(config(folder, num_workers=[2, 8]), False, 1, folder).recorded_by(LocalRecorder(Path(folder)))
    ).config
    return found.scale.num_workers, found.next_num_workers


def test_a_stage_has_as_many_workers_as_divide_its_batch_and_find_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert world_sizes(config(tmp_path, num_workers=[2, 8])) == [2, 4, 8]
    assert begun(tmp_path, monkeypatch, 9) == (8, None)
    assert begun(tmp_path, monkeypatch, 7) == (4, 8)
    assert begun(tmp_path, monkeypatch, 3) == (2, 4)
    assert begun(tmp_path, monkeypatch, 1) == (2, 4)  # which waits


def test_pipeline_stages_stay_whole(tmp_path: Path) -> None:
    assert world_sizes(config(tmp_path, num_workers=[2, 8], pipeline_stages=2)) == [2, 4, 8]
    assert world_sizes(config(tmp_path, num_workers=[4, 8], pipeline_stages=4)) == [4, 8]


def test_a_timing_run_has_one_number_of_workers(tmp_path: Path) -> None:
    timed = config(tmp_path, num_workers=[2, 8])
    assert world_sizes(timed.model_copy(update={"train": timed.train.model_copy(update={"max_steps": 9})})) == [8]


def test_a_stage_of_fixed_size_is_left_as_it_is(tmp_path: Path) -> None:
    assignment = Assignment(config(tmp_path, num_workers=2), False, 1, tmp_path)
    assert with_free_workers(assignment) is assignment


def test_a_range_of_workers_is_two_numbers(tmp_path: Path) -> None:
    scale = config(tmp_path, num_workers=[2, 8]).scale
    assert (scale.min_workers, scale.num_workers) == (2, 8)
    assert "min_workers 8 is more than" in str(first_problem(config(tmp_path, num_workers=[8, 2]), RULES))
    for wrong in ([2], [2, 4, 8]):
        with pytest.raises(ValueError, match="num_workers"):
            config(tmp_path, num_workers=wrong)
