"""The workers' process group."""

import torch.distributed as dist

from trainables.worker.process_group import lower_debug_level


def test_the_debug_level_with_which_workers_crash_is_lowered_and_others_stay() -> None:
    before = dist.get_debug_level()
    try:
        for level, used in ((dist.DebugLevel.DETAIL, dist.DebugLevel.INFO), (dist.DebugLevel.OFF, dist.DebugLevel.OFF)):
            dist.set_debug_level(level)
            lower_debug_level()
            assert dist.get_debug_level() == used
    finally:
        dist.set_debug_level(before)
