"""Tables on terminals of every width, and in files."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from service.report.table import Table
from service.report.tables import sweep_table
from service.runs.run_directory import reopen
from tests.service.report.runs import sweep_dir

SPACE = {"scale.num_workers": [1, 2], "data.global_batch_size": [64], "data.loader_workers": [2], "optim.lr": [0.1]}
OOM = {"001": {"status": "oom", "reason": "rank 0: CUDA out of memory"}}


def printed(table: object, width: int, *, terminal: bool = True) -> list[str]:
    console = Console(
        width=width, file=(out := io.StringIO()), force_terminal=terminal, force_interactive=terminal, color_system=None
    )
    console.print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 100])
def test_a_sweep_on_a_narrow_terminal_shows_what_decides_in_whole_words(tmp_path: Path, width: int) -> None:
    _, _, result = reopen(sweep_dir(tmp_path / "s", SPACE, ends=OOM, epochs=2).root)
    lines = printed(sweep_table(result), width)
    assert max(map(len, lines)) <= width
    text = " ".join(lines)
    assert result.best is not None
    best = result.best.metrics
    for word in (
        "trial",
        "001",
        "GPUs",
        "workers",
        "optim.",
        "images/s",
        f"{best['images_per_s']:,.1f}",
        f"{best['top1_pct']:.2f}",
    ):
        assert word in text
    assert "← best" in text
    assert "oom: rank" in text
    assert "…" not in text
    assert f"not shown at {width} columns: data wait s (min–max), data wait %" in text


def test_rows_that_fit_no_table_are_paragraphs_with_everything_in_them(tmp_path: Path) -> None:
    path = "/data/copies/a/long/way/down/to/the/folder_of_a_packed_set"
    space = {**SPACE, "data.stage": ["none", path], "distill.method": ["kd"], "precision": ["fp32"]}
    _, _, result = reopen(sweep_dir(tmp_path / "s", space).root)
    for width in (40, 80):
        text = "".join(printed(sweep_table(result), width)).replace(" ", "")
        assert f"data.stage{path},distill.methodkd" in text
        assert "notshown" not in text


def test_a_file_has_every_column(tmp_path: Path) -> None:
    _, _, result = reopen(sweep_dir(tmp_path / "s", SPACE, ends=OOM, epochs=2).root)
    lines = printed(sweep_table(result), 170, terminal=False)
    assert all(column in lines[2] for column in ("data wait s (min–max)", "s/epoch", "status"))


def test_columns_are_left_out_in_their_order_and_only_where_there_is_no_room() -> None:
    table = Table("t", ["name", "a", "b"], [["one two", "1" * 10, "2" * 10]], left=["name"], optional=["b", "a"])
    assert "not shown" not in "".join(printed(table, 40))
    assert "not shown at 30 columns: b; " in " ".join(printed(table, 30))
    assert any("one two │ 1111111111" in line for line in printed(table, 30))
