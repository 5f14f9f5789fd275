"""The table fault → first finding → predicted gain → measured gain, of all faults or of those named."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, as in the tests

import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from service.doctor.telling import tell
from tests.faults.runs import Bench
from tests.faults.trials import CAUSES, carry_out, healthy
from trainables.rank_pool import Ranks


def main() -> None:
    console, ranks = Console(width=130, highlight=False), Ranks(2)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(ranks, Path(folder))
        try:
            bench.run(1, 16), bench.run(2, 16)  # libraries are loaded, caches filled
            clean = healthy(bench)
            for workers, case in clean.items():
                said = "; ".join(tell([case]))
                console.print(f"healthy, {workers} worker{'s' if workers > 1 else ''}: {said}", soft_wrap=True)
            table = Table()
            for name in ("fault", "first finding", "predicted gain %", "measured gain %", "off by %", ""):
                table.add_column(name, justify="right" if "%" in name else "left")
            for one in carry_out(bench, clean, sys.argv[1:] or tuple(CAUSES)):
                good = one.named and one.off_pct <= 30
                numbers = (f"{value:.1f}" for value in (one.predicted_pct, one.measured_pct, one.off_pct))
                table.add_row(one.fault, one.first, *numbers, "ok" if good else "WRONG")
            console.print(table)
        finally:
            ranks.close()


if __name__ == "__main__":
    main()
