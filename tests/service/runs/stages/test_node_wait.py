"""How long a stage waits for nodes, and what it says of that."""

import pytest

from service.cluster.resources import Cluster, Node, Reservation
from service.runs.display import Display
from service.runs.stages import node_wait, teacher_actors
from service.runs.stages.node_wait import NodeWait
from trainables.errors import ClusterError

TWO = Reservation(2, 2)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    found = [Node("0", 2, 0)]
    monkeypatch.setattr(node_wait, "living_nodes", lambda: Cluster(tuple(found)))
    return found


def test_a_wait_prints_its_reason_and_ends_when_the_time_is_up(nodes: list[Node]) -> None:
    now_s, lines = 0.0, list[str]()
    wait = NodeWait(lambda: now_s)
    assert wait.refusal(TWO, 100.0, lines.append) is None
    now_s = 60.0
    assert wait.refusal(TWO, 100.0, lines.append) is None
    now_s = 120.0
    assert str(wait.refusal(TWO, 100.0, lines.append)).startswith("2 workers of 2 CPUs each do not fit: 1 node with 2 CPUs")
    assert [line.partition("waiting for nodes, ")[2] for line in lines] == [
        "for at most 100 s more",
        "for at most 40 s more",
    ]


def test_the_time_begins_anew_once_there_were_enough_nodes(nodes: list[Node]) -> None:
    now_s, lines = 0.0, list[str]()
    wait = NodeWait(lambda: now_s)
    assert wait.refusal(TWO, 100.0, lines.append) is None
    assert wait.is_waiting
    nodes.append(Node("1", 2, 0))
    assert wait.refusal(TWO, 100.0, lines.append) is None
    assert not wait.is_waiting
    nodes.pop()
    now_s = 150.0
    assert wait.refusal(TWO, 100.0, lines.append) is None


def test_with_no_time_to_wait_it_ends_at_once(nodes: list[Node]) -> None:
    assert "scale.wait_for_nodes_s is 0" in str(NodeWait().refusal(TWO, 0.0, print))


def test_an_elastic_stage_waits_for_its_fewest_workers_alone(nodes: list[Node]) -> None:
    assert NodeWait().refusal(Reservation(2, 2, min_workers=1), 0.0, print) is None


def test_actors_that_no_node_can_hold_wait_only_so_long(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    class Unstarted:
        """An actor for which there is no room: what it is called for does not come."""

        class counts:
            remote = staticmethod(object)

    monkeypatch.setattr(ray, "wait", lambda pending, **_: ([], pending))
    monkeypatch.setattr(ray, "get", list)  # which would start a Ray
    with Display() as display, pytest.raises(ClusterError) as refused:
        teacher_actors.wait_until_started(display, {"a": Unstarted, "b": Unstarted}, Reservation(2, 2, unit="actors"), 0.0)
    assert str(refused.value).startswith("teacher.service: 2 actors of 2 CPUs each do not fit: 1 node with 2 CPUs")
