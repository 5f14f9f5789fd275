"""`distill compare A B`: common points, what is beyond noise, what differs in the experiments."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import pytest

from service.config.experiment import load
from service.config.space import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS
from service.report.compare import CommonPoint, compare, overall, with_significance
from service.report.records import records_of_run
from tests.service.commands import run
from tests.service.report.parsed import Parsed
from tests.service.report.runs import sweep_dir, train_dir

SPACE = {NUM_WORKERS: [1, 2], GLOBAL_BATCH: [64, 128, 256]}


def test_the_same_twice_differs_by_no_more_than_noise(tmp_path: Path) -> None:
    a, b = (records_of_run(sweep_dir(tmp_path / str(seed), SPACE, seed=seed).root) for seed in (1, 2))
    pairs = compare(a, b).pairs
    assert len(pairs) == 6
    assert [pair.beyond_noise for pair in pairs] == [False] * 6
    whole = overall(pairs)
    assert whole is not None
    assert whole[1] < 1 < whole[2] or abs(whole[0] - 1) < 0.02


def test_a_tenth_slower_is_beyond_noise_everywhere(tmp_path: Path) -> None:
    a = records_of_run(sweep_dir(tmp_path / "a", SPACE, seed=1).root)
    b = records_of_run(sweep_dir(tmp_path / "b", SPACE, seed=2, slow=1.1).root)
    comparison = compare(a, b)
    assert all(pair.beyond_noise for pair in comparison.pairs)
    assert all(pair.ratio == pytest.approx(1 / 1.1, rel=0.05) for pair in comparison.pairs)


def test_many_points_are_judged_by_holm_and_not_by_bonferroni(tmp_path: Path) -> None:
    """Of p-values 0.02 and 0.03 both are significant for Holm (0.04, 0.04), and 0.03 is not for Bonferroni (0.06)."""
    records = records_of_run(sweep_dir(tmp_path / "a", {GLOBAL_BATCH: [64, 128]}, seed=1).root)
    first, second = compare(records, records).pairs
    pairs = [with_p_value(first, 0.02), with_p_value(second, 0.03)]
    assert [pair.p_value for pair in pairs] == pytest.approx([0.02, 0.03])
    assert [pair.beyond_noise for pair in with_significance(pairs)] == [True, True]
    assert [pair.beyond_noise for pair in with_significance([with_p_value(first, 0.026), pairs[1]])] == [False, False]


def with_p_value(pair: CommonPoint, p_value: float) -> CommonPoint:
    """The pair with B so much faster that its ratio has this p-value."""
    assert pair.error is not None
    ratio = math.exp(pair.error * NormalDist().inv_cdf(1 - p_value / 2))
    metrics = {**pair.b.metrics, "images_per_s": pair.a.metrics["images_per_s"] * ratio}
    return replace(pair, b=pair.b.model_copy(update={"metrics": metrics}))


def test_without_the_steps_spread_nothing_is_claimed(tmp_path: Path) -> None:
    bare = {f"{number:03d}": {"steps_s": []} for number in range(6)}
    a, b = (records_of_run(sweep_dir(tmp_path / name, SPACE, ends=bare).root) for name in "ab")
    assert [pair.beyond_noise for pair in compare(a, b).pairs] == [None] * 6


def test_a_key_that_only_one_has_searched_counts_with_the_others_own_value(tmp_path: Path) -> None:
    a = records_of_run(sweep_dir(tmp_path / "a", {GLOBAL_BATCH: [64, 128]}).root)
    b = records_of_run(sweep_dir(tmp_path / "b", {GLOBAL_BATCH: [64, 128], "precision": ["fp32", "bf16"]}).root)
    comparison = compare(a, b)
    assert {pair.b.params["precision"] for pair in comparison.pairs} == {"fp32"}
    assert len(comparison.pairs) == 2


def test_what_differs_in_the_experiments_is_named(tmp_path: Path) -> None:
    a = records_of_run(sweep_dir(tmp_path / "a", {GLOBAL_BATCH: [64, 128]}, name="one").root)
    b = records_of_run(sweep_dir(tmp_path / "b", {GLOBAL_BATCH: [64, 256]}, name="two").root)
    assert [key for key, _, _ in compare(a, b).differences] == ["sweep.space"]


def test_points_are_compared_by_their_probes_and_not_by_trainings_to_a_target(tmp_path: Path) -> None:
    a, b = (records_of_run(sweep_dir(tmp_path / name, {GLOBAL_BATCH: [64, 128]}).root) for name in "ab")
    trained = [row.model_copy(update={"id": f"{row.id}-trained", "speed_trial": row.id}) for row in b.rows]
    assert [pair.b.id for pair in compare(a, replace(b, rows=[*b.rows, *trained])).pairs] == ["000", "001"]


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
    (pair,) = compare(a, b).pairs
    assert (pair.a.params[NUM_WORKERS], pair.b.id) == (2, "student")


def test_the_command_says_it_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = sweep_dir(tmp_path / "a", SPACE, name="before", seed=1).root
    b = sweep_dir(tmp_path / "b", SPACE, name="after", slow=0.8, seed=2).root
    code, out, err = run(capsys, "compare", a, b, "--html", tmp_path / "page.html")
    assert (code, err) == (0, "")
    assert "A, before: 2 GPUs × batch 256" in out
    assert "Beyond the noise of the steps, B is faster at 6 of 6 common points and slower at 0" in out
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
    assert "No point was run by both." in out


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = sweep_dir(tmp_path / "a", {GLOBAL_BATCH: [64]}).root
    code, _, err = run(capsys, "compare", a, tmp_path)
    assert code == 2
    assert err == f"error: {tmp_path} holds no run: give a directory that `distill train` or `distill sweep` wrote\n"
