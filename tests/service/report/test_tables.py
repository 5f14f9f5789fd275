"""The tables of a sweep's page: every trial in them, also those without a result, and the best one where it is seen at once."""

from pathlib import Path
from typing import Any

import pytest

from service.config.space import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS
from service.report.winner import notes
from service.runs.run_directory import reopen
from tests.service.report.parsed import Parsed
from tests.service.report.runs import SPACE, page_text, sweep_dir, typed, written
from trainables.rundir import RunDir

OOM = {"status": "oom", "metrics": {}, "reason": "rank 0: CUDA out of memory", "steps_s": []}
FAILED = {"status": "failed", "metrics": {}, "reason": "a worker died", "steps_s": []}
INFEASIBLE = {"status": "infeasible", "metrics": {}, "reason": "needs 4 GPUs, the cluster has 2", "steps_s": []}
UNTESTED = {"status": "untested", "metrics": {}, "steps_s": []}
TABLE = "Images/s by GPUs, global batch and loader workers"
FLAT = "Images/s by GPUs and global batch"
BIG = {NUM_WORKERS: [1, 2, 4, 8, 16], GLOBAL_BATCH: [64, 128, 256, 512, 1024, 2048], LOADER_WORKERS: [0, 1, 2, 4, 6, 8, 12, 16]}


def page(run_dir: RunDir, **changed: Any) -> Parsed:
    return Parsed(page_text(run_dir, typed({**written(run_dir), **changed})))


@pytest.fixture
def mixed(tmp_path: Path) -> RunDir:
    """36 points: one failed, batch 512 on one GPU is out of memory, four GPUs are not there."""
    ends = {f"{number:03d}": OOM for number in (9, 10, 11)} | {"004": FAILED}
    return sweep_dir(tmp_path / "s", SPACE, ends=ends | {f"{number:03d}": INFEASIBLE for number in range(24, 36)})


def test_the_top_of_the_page_counts_the_trials_without_a_result(mixed: RunDir) -> None:
    text = page(mixed).text
    words = "16 of 36 trials have no result: 1 failed, 3 oom (out of memory), 12 infeasible (cannot run on this cluster)."
    assert words in text
    assert text.index(words) < text.index("Train at this point")
    assert words in notes(reopen(mixed.root)[2])


def test_the_top_of_a_page_without_a_winner_counts_them_too(tmp_path: Path) -> None:
    parsed = page(sweep_dir(tmp_path / "s", {GLOBAL_BATCH: [64, 128]}, ends={"000": OOM, "001": OOM}))
    assert "2 of 2 trials have no result: 2 oom (out of memory)." in parsed.text


def test_nothing_is_counted_where_every_trial_has_a_result(tmp_path: Path) -> None:
    parsed = page(sweep_dir(tmp_path / "s", {GLOBAL_BATCH: [64, 128, 256]}, ends={"001": UNTESTED}, policy="guided"))
    assert "no result" not in parsed.text


def test_the_heat_table_names_what_happened_in_each_cell_and_leaves_no_row_out(mixed: RunDir) -> None:
    heads, *rows = page(mixed).tables[TABLE]
    assert heads == ["", "1 loader worker", "2 loader workers", "4 loader workers"]
    cells = {row[0]: row[1:] for row in rows}
    assert len(cells) == 12
    assert cells["1 GPU × batch 512"] == ["oom"] * 3
    assert cells["4 GPUs × batch 64"] == ["infeasible"] * 3
    assert cells["1 GPU × batch 128"][1] == "failed"
    assert sum("★" in cell for row in rows for cell in row) == 1


def test_a_cell_without_a_trial_is_not_called_a_failure(tmp_path: Path) -> None:
    ends = {"001": UNTESTED, "002": OOM}
    parsed = page(sweep_dir(tmp_path / "s", {NUM_WORKERS: [1, 2], LOADER_WORKERS: [1, 2]}, ends=ends, policy="guided"))
    _, *rows = parsed.tables[TABLE]
    assert [rows[0][2], rows[1][1]] == ["–", "oom"]


@pytest.mark.parametrize("status", ["pending", "untested"])
def test_a_dash_is_explained(tmp_path: Path, status: str) -> None:
    ends = {"001": {"status": status, "metrics": {}, "steps_s": []}}
    text = page(sweep_dir(tmp_path / "s", {NUM_WORKERS: [1, 2], LOADER_WORKERS: [1, 2]}, ends=ends)).text
    assert "★ is the best trial. – has no result." in text


def test_values_that_no_experiment_takes_have_rows_too(tmp_path: Path) -> None:
    run_dir = sweep_dir(tmp_path / "s", {NUM_WORKERS: [1, 2, 4, 8], GLOBAL_BATCH: [64, 128]})
    rows = written(run_dir)["trials"]
    for row, wrong in ((rows[-1], [1]), (rows[-2], "x"), (rows[-3], None)):
        row |= INFEASIBLE | {"params": {**row["params"], NUM_WORKERS: wrong}, "scale": {**row["scale"], NUM_WORKERS: wrong}}
    _, *cells = page(run_dir, trials=rows).tables[FLAT]
    assert [cell[0] for cell in cells] == ["1 GPU", "2 GPUs", "4 GPUs", "None GPUs", "[1] GPUs", "x GPUs"]


def test_the_best_trial_has_its_cell_where_another_one_there_is_faster(tmp_path: Path) -> None:
    run_dir = sweep_dir(tmp_path / "s", {NUM_WORKERS: [1, 2], "precision": ["fp32", "bf16"]})
    best = next(row for row in written(run_dir)["trials"] if row["params"] == {NUM_WORKERS: 2, "precision": "fp32"})
    parsed = page(run_dir, chosen=best["id"])
    _, *rows = parsed.tables[FLAT]
    assert rows[1][1] == f"{best['metrics']['images_per_s']:,.1f} ★"


def test_a_best_trial_without_a_speed_has_its_star(tmp_path: Path) -> None:
    run_dir = sweep_dir(tmp_path / "s", {NUM_WORKERS: [1, 2, 4], GLOBAL_BATCH: [64, 128]}, epochs=1)
    rows = written(run_dir)["trials"]
    del rows[-1]["metrics"]["images_per_s"]  # too few steps for one
    parsed = page(run_dir, trials=rows, chosen=rows[-1]["id"], metric="top1_pct")
    assert parsed.tables[FLAT][-1] == ["4 GPUs", parsed.tables[FLAT][-1][1], "ok ★"]


def test_of_240_points_every_one_has_its_cell_in_a_frame_that_opens_at_the_best(tmp_path: Path) -> None:
    parsed = page(sweep_dir(tmp_path / "s", BIG))
    heads, *rows = parsed.tables[TABLE]
    assert [len(rows), len(heads) - 1] == [30, 8]
    assert sum("★" in cell for row in rows for cell in row) == 1
    assert TABLE not in parsed.folded
    frame = next(attributes for attributes in parsed.all("div") if attributes.get("aria-label") == TABLE)
    assert frame["class"] == "scroll tall"
    assert "heat best" in str([attributes.get("class") for attributes in parsed.all("td")])


def test_the_status_of_a_trial_stands_next_to_its_name(mixed: RunDir) -> None:
    heads, *rows = page(mixed).tables["All 36 trials"]
    assert heads[:2] == ["trial", "status"]
    assert [row[1].partition(":")[0] for row in rows if row[0] in ("000", "004", "009", "024")] == [
        *("ok", "failed", "oom", "infeasible")
    ]


def test_an_epochs_cost_has_the_digits_of_its_time(tmp_path: Path) -> None:
    run_dir = sweep_dir(tmp_path / "s", {NUM_WORKERS: [1, 2]}, gpu=False)
    rows = written(run_dir)["trials"]
    for row in rows:
        row["metrics"] |= {"epoch_s": 0.03, "gpu_s_per_epoch": 0.03 * row["scale"][NUM_WORKERS]}
    heads, *cells = page(run_dir, trials=rows).tables["All 2 trials"]
    assert [row[heads.index("worker-s/epoch")] for row in cells] == ["0.03", "0.06"]


def test_two_tables_of_a_section_have_headings(tmp_path: Path) -> None:
    text = page(sweep_dir(tmp_path / "s", {NUM_WORKERS: [1, 2], GLOBAL_BATCH: [64, 128]})).text
    assert text.index(FLAT) < text.index("Images/s; the stronger") < text.index("All 4 trials")
