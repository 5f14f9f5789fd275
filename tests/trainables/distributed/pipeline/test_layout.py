"""Process groups of replicas and stages are made once for all jobs of a process."""

from trainables.distributed.group import Group, gather_objects
from trainables.distributed.pipeline.layout import build_layout
from trainables.distributed.rank_pool import RankPool


def shared(group: Group) -> tuple[bool, list[int]]:
    first, second = build_layout(group, 2), build_layout(group, 2)
    return first is second, gather_objects(group.rank, second.cpu_group)


def test_jobs_of_a_process_share_their_groups_until_all_are_destroyed(ranks: RankPool) -> None:
    for _ in range(2):  # the pool joins anew for each run
        assert ranks.run(2, shared) == [(True, [0, 1])] * 2
