"""The doctor on real runs with a fault in each: all named first, and the gain predicted that mending it measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.doctor.telling import HEALTHY, tell
from tests.faults.runs import Bench
from tests.faults.trials import CAUSES, carry_out, healthy
from trainables.rank_pool import Ranks


@pytest.mark.slow
def test_every_fault_is_named_first_with_the_gain_that_mending_it_brings(ranks: Ranks, tmp_path: Path) -> None:
    bench = Bench(ranks, tmp_path)
    for num_workers in (1, 2):
        bench.run(num_workers, 16)  # libraries are loaded, caches filled
    clean = healthy(bench)
    assert [tell([case])[0][: len(HEALTHY)] for case in clean.values()] == [HEALTHY, HEALTHY]
    verdicts = list(carry_out(bench, clean))
    assert [one.fault for one in verdicts] == list(CAUSES)
    assert not [one for one in verdicts if not one.named]
    assert not [one for one in verdicts if one.off_pct > 30]
