"""`distill compare A B`: common points, what is beyond noise, what differs in the experiments."""

import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import pandas as pd
import pytest

from service.config.experiment import load
from service.config.space import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS
from service.report.compare import RATIO, compare, lead, verdicts
from service.report.records import records_of_run
from tests.service.commands import run
from tests.service.report.parsed import Parsed
from tests.service.report.runs import sweep_dir, train_dir

SPACE = {NUM_WORKERS: [1, 2], GLOBAL_BATCH: [64, 128, 256]}


def test_the_same_twice_differs_by_no_more_than_noise(tmp_path: Path) -> None:
    a, b = (records_of_run(sweep_dir(tmp_path / str(seed), SPACE, seed=seed).root) for seed in (1, 2))
    comparison = compare(a, b)
    assert comparison.points["verdict"].tolist() == ["within noise"] * 6
    (whole,) = re.findall(
        r"B is ([\d.]+) times as fast as A \(geometric mean; 95% between ([\d.]+) and ([\d.]+)\)", " ".join(lead(comparison))
    )
    mean, low, high = map(float, whole)
    assert low < 1 < high or abs(mean - 1) < 0.02


def test_a_tenth_slower_is_beyond_noise_everywhere(tmp_path: Path) -> None:
    a = records_of_run(sweep_dir(tmp_path / "a", SPACE, seed=1).root)
    b = records_of_run(sweep_dir(tmp_path / "b", SPACE, seed=2, slow=1.1).root)
    points = compare(a, b).points
    assert points["verdict"].tolist() == ["B slower"] * 6
    assert points[RATIO].tolist() == pytest.approx([1 / 1.1] * 6, rel=0.05)


def test_many_points_are_judged_by_holm_and_not_by_bonferroni() -> None:
    """Of p-values 0.02 and 0.03 both are significant for Holm (0.04, 0.04), and 0.03 is not for Bonferroni (0.06)."""
    errors = pd.Series([0.01, 0.01])

    def ratios(*p_values: float) -> pd.Series:
        return pd.Series([math.exp(0.01 * NormalDist().inv_cdf(1 - p_value / 2)) for p_value in p_values])

    assert verdicts(ratios(0.02, 0.03), errors).tolist() == ["B faster", "B faster"]
    assert verdicts(ratios(0.026, 0.03), errors).tolist() == ["within noise", "within noise"]


def test_without_the_steps_spread_nothing_is_claimed(tmp_path: Path) -> None:
    bare = {f"{number:03d}": {"steps_s": []} for number in range(6)}
    a, b = (records_of_run(sweep_dir(tmp_path / name, SPACE, ends=bare).root) for name in "ab")
    comparison = compare(a, b)
    assert comparison.points["verdict"].tolist() == ["spread unknown"] * 6
    assert lead(comparison)[-1] == "For 6 of 6 common points, the spread of the step times is unknown."


def test_a_key_that_only_one_has_searched_counts_with_the_others_own_value(tmp_path: Path) -> None:
    a = records_of_run(sweep_dir(tmp_path / "a", {GLOBAL_BATCH: [64, 128]}).root)
    b = records_of_run(sweep_dir(tmp_path / "b", {GLOBAL_BATCH: [64, 128], "precision": ["fp32", "bf16"]}).root)
    comparison = compare(a, b)
    assert len(comparison.points) == 2
    expected = [row.metrics["images_per_s"] for row in b.rows if row.params["precision"] == "fp32"]
    assert comparison.points["B images/s"].tolist() == expected


def test_what_differs_in_the_experiments_is_named(tmp_path: Path) -> None:
    a = records_of_run(sweep_dir(tmp_path / "a", {GLOBAL_BATCH: [64, 128]}, name="one").root)
    b = records_of_run(sweep_dir(tmp_path / "b", {GLOBAL_BATCH: [64, 256]}, name="two").root)
    differences = compare(a, b).differences
    assert differences is not None
    assert [row[0] for row in differences.rows] == ["sweep.space"]


def test_points_are_compared_by_their_probes_and_not_by_trainings_to_a_target(tmp_path: Path) -> None:
    a, b = (records_of_run(sweep_dir(tmp_path / name, {GLOBAL_BATCH: [64, 128]}).root) for name in "ab")
    slow = {"images_per_s": 1.0}
    trained = [row.model_copy(update={"id": f"{row.id}-trained", "speed_trial": row.id, "metrics": slow}) for row in b.rows]
    assert compare(a, replace(b, rows=[*b.rows, *trained])).points[RATIO].tolist() == [1.0, 1.0]


def test_neither_page_nor_terminal_shows_a_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roots = [sweep_dir(tmp_path / name, {GLOBAL_BATCH: [64]}).root for name in "ab"]
    for root, login, host in zip(roots, ("me:hunter2", "me:hunter3"), ("one", "two"), strict=True):
        file = root / "experiment.yaml"
        clean = load(str(file), [f"tracking.uri=postgresql://{host}/mlflow"]).to_yaml()
        file.write_text(clean.replace(f"//{host}", f"//{login}@{host}"))  # as runs of earlier versions may have it
    code, out, _ = run(capsys, "compare", *roots, "--html", tmp_path / "page.html")
    assert code == 0
    assert "postgresql://***@one/mlflow" in out
    code, _, _ = run(capsys, "report", roots[0])
    assert code == 0
    own, both = (path.read_text() for path in (roots[0] / "report.html", tmp_path / "page.html"))
    assert "postgresql://***@one/mlflow" in own
    assert "postgresql://***@two/mlflow" in both
    assert "hunter" not in out + own + both


def test_a_run_is_compared_with_a_sweep_at_its_one_point(tmp_path: Path) -> None:
    a = records_of_run(sweep_dir(tmp_path / "a", {NUM_WORKERS: [1, 2], GLOBAL_BATCH: [64, 128], LOADER_WORKERS: [2]}).root)
    b = records_of_run(train_dir(tmp_path / "b").root)
    points = compare(a, b).points
    assert points.index.tolist() == ["2 GPUs, batch 64, 2 loader workers"]


def test_the_command_says_it_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = sweep_dir(tmp_path / "a", SPACE, name="before", seed=1).root
    b = sweep_dir(tmp_path / "b", SPACE, name="after", slow=0.8, seed=2).root
    code, out, err = run(capsys, "compare", a, b, "--html", tmp_path / "page.html")
    assert (code, err) == (0, "")
    assert "A, before: 2 GPUs × batch 256" in out
    assert "Beyond step noise, B is faster at 6 of 6 common points and slower at 0" in out
    assert "B faster" in out
    assert out.endswith(f"page: {tmp_path}/page.html\n")
    parsed = Parsed((tmp_path / "page.html").read_text())
    assert "before (A) and after (B)" in parsed.text
    assert [figure["id"] for figure in parsed.figures] == ["ratios"]
    assert parsed.fetched() == []


def test_nothing_in_common_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = sweep_dir(tmp_path / "a", {GLOBAL_BATCH: [64]}).root
    b = sweep_dir(tmp_path / "b", {GLOBAL_BATCH: [128]}).root
    code, out, _ = run(capsys, "compare", a, b)
    assert code == 0
    assert "A and B have no point in common." in out


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = sweep_dir(tmp_path / "a", {GLOBAL_BATCH: [64]}).root
    code, _, err = run(capsys, "compare", a, tmp_path)
    assert code == 2
    assert err == f"error: {tmp_path} holds no run: give a directory that `distill train` or `distill sweep` has written\n"
