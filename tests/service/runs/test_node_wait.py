"""How long a stage waits for nodes, and what it says of that."""

from pathlib import Path

import pytest

from service.cluster.resources import Cluster, Node
from service.runs import node_wait
from service.runs.assignment import Assignment
from service.runs.node_wait import NodeWait
from trainables.config import TrainConfig


def assignment(folder: Path, **scale: object) -> Assignment:
    tree = {"model": "mlp_small", "output_dir": str(folder), "data": {}, "scale": {"num_workers": 2, **scale}}
    return Assignment(TrainConfig.model_validate(tree), False, 1, folder)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    found = [Node("0", 2, 0)]
    monkeypatch.setattr(node_wait, "living_nodes", lambda: Cluster(tuple(found)))
    return found


def test_a_stage_says_what_it_waits_for_and_ends_when_the_time_is_up(tmp_path: Path, nodes: list[Node]) -> None:
    now_s, stage = 0.0, assignment(tmp_path, wait_for_nodes_s=100)
    wait = NodeWait(lambda: now_s)
    assert wait.refusal(stage) is None
    now_s = 60.0
    assert wait.refusal(stage) is None
    now_s = 120.0
    assert str(wait.refusal(stage)).startswith("2 workers of 2 CPUs each do not fit: 1 node with 2 CPUs")
    lines = stage.stage_dir.log.read_text().splitlines()
    assert [line.partition("waiting for nodes, ")[2] for line in lines] == [
        "for 100 s more at most",
        "for 40 s more at most",
    ]


def test_the_time_begins_anew_once_there_were_enough_nodes(tmp_path: Path, nodes: list[Node]) -> None:
    now_s, stage = 0.0, assignment(tmp_path, wait_for_nodes_s=100)
    wait = NodeWait(lambda: now_s)
    assert wait.refusal(stage) is None
    assert wait.is_waiting
    nodes.append(Node("1", 2, 0))
    assert wait.refusal(stage) is None
    assert not wait.is_waiting
    nodes.pop()
    now_s = 150.0
    assert wait.refusal(stage) is None


def test_with_no_time_to_wait_a_stage_ends_at_once(tmp_path: Path, nodes: list[Node]) -> None:
    assert "scale.wait_for_nodes_s is 0" in str(NodeWait().refusal(assignment(tmp_path, wait_for_nodes_s=0)))


def test_an_elastic_stage_waits_for_its_fewest_workers_alone(tmp_path: Path, nodes: list[Node]) -> None:
    assert NodeWait().refusal(assignment(tmp_path, min_workers=1, wait_for_nodes_s=0)) is None
