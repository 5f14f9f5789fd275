"""The telemetry of a job's nodes, and which rank is on which."""

from dataclasses import replace

from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.worker.node_telemetry import node_telemetry


def sampled(group: Group, local_ranks: list[int]) -> tuple[dict[str, float], dict[str, float]]:
    """What a rank learns of all nodes, between and at the end."""
    with node_telemetry(1.0, replace(group, local_rank=local_ranks[group.rank])) as snapshot:
        return snapshot(), snapshot(whole=True)


def test_each_rank_has_its_own_node_also_where_nodes_have_unlike_numbers_of_ranks(ranks: RankPool) -> None:
    for between, whole in ranks.run(3, sampled, [0, 1, 0]):
        assert {name.partition("/")[0] for name in whole} == {"node0", "node1", "rank0", "rank1", "rank2"}
        assert [whole[f"rank{rank}/node"] for rank in range(3)] == [0, 0, 1]
        assert not any(name.startswith("rank") for name in between)
    [(_, alone)] = ranks.run(1, sampled, [0])
    assert not any(name.startswith("rank") for name in alone)
