"""Trials over several seeds: the numbers against scipy's own paired test, and what a reader is told."""

import math
from typing import Any

import pytest
from rich.console import Console
from scipy import stats

from service.report.seeds import groups, seed_table, seeds_figure, seeds_sentence
from service.runs.result import RunResult
from tests.service.report.runs import shown, typed, typed_row
from tests.service.report.test_terminal import SCALE

ALONE, KD, SP = [50.0, 52.0, 51.0, 49.5], [52.1, 53.9, 53.2, 51.4], [50.5, 51.6, 51.9, 49.4]


def trial(method: Any, seed: int, top1_pct: float | None, **more: Any) -> dict[str, Any]:
    params = {**SCALE, "distill.method": method, "seed": seed, **more}
    metrics = {} if top1_pct is None else {"top1_pct": top1_pct, "images_per_s": 100.0}
    return {
        "id": f"{method}-{seed}",
        "params": params,
        "scale": SCALE,
        "status": "ok" if metrics else "failed",
        "reason": "",
        "metrics": metrics,
    }


def result(trials: list[dict[str, Any]], metric: str = "top1_pct", mode: str = "max") -> RunResult:
    return typed(
        {
            "kind": "sweep",
            "name": "methods",
            "status": "complete",
            "space": {},
            "metric": metric,
            "mode": mode,
            "trials": trials,
        }
    )


def sweep() -> RunResult:
    each = {"none": ALONE, "kd": KD, "sp": SP}
    return result([trial(method, seed, top1) for method, tops in each.items() for seed, top1 in enumerate(tops)])


def test_differences_are_those_of_a_paired_t_test() -> None:
    found = groups(sweep()).set_index("point")
    assert math.isnan(found.loc["none", "difference"])
    for point, values in (("kd", KD), ("sp", SP)):
        low, high = stats.ttest_rel(values, ALONE).confidence_interval(0.95)
        assert found.loc[point, "difference"] == pytest.approx((low + high) / 2)
        assert found.loc[point, "half"] == pytest.approx((high - low) / 2)
    assert found.loc["kd", "p"] == pytest.approx(2 * stats.ttest_rel(KD, ALONE).pvalue)  # the smaller of two
    assert found.loc["sp", "p"] == pytest.approx(stats.ttest_rel(SP, ALONE).pvalue)
    assert found["significant"].tolist() == [False, True, False]


def test_only_seeds_that_both_have_are_compared() -> None:
    swept = sweep()
    assert swept.trials is not None
    swept.trials[5] = typed_row(trial("kd", 1, None))  # failed
    kd = groups(swept).set_index("point").loc["kd"]
    assert kd["pairs"] == 3
    assert kd["difference"] == pytest.approx(sum(KD[seed] - ALONE[seed] for seed in (0, 2, 3)) / 3)


@pytest.mark.parametrize("apart", [0.0, 0.28])
def test_differences_that_are_all_the_same_say_nothing_of_the_next(apart: float) -> None:
    swept = result(
        [trial(method, seed, 97.49 + 0.28 * seed + apart * (method == "kd")) for method in ("none", "kd") for seed in range(3)]
    )
    kd = groups(swept).loc[1]
    assert kd["difference"] == pytest.approx(apart)
    assert kd["half"] == pytest.approx(0.0, abs=1e-12)
    assert math.isnan(kd["p"])
    assert not kd["significant"]
    assert "not significant" in seeds_sentence(swept)[0] or not apart
    table = seed_table(swept)
    assert table is not None
    assert table.rows[1][-2:] == ["–", "no"]
    assert seeds_figure(swept) is not None


def test_what_asha_left_over_is_not_compared() -> None:
    assert groups(sweep().model_copy(update={"policy": "asha"})).empty


def test_the_figure_has_a_mark_with_an_interval_for_each_point_but_the_first() -> None:
    (marks,) = shown(seeds_figure(sweep())).traces
    assert marks["x"] == ["kd", "sp"]
    assert marks["y"] == pytest.approx(
        [
            stats.ttest_rel(one, ALONE).confidence_interval().low + half
            for one, half in zip((KD, SP), marks["error_y"]["array"], strict=True)
        ]
    )


def test_the_table_and_the_sentence_say_what_is_sure() -> None:
    console = Console(width=170, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 (closed with the process)
    console.print(seed_table(sweep()))
    lines = {line.split()[1]: line for line in console.export_text().splitlines() if "│" in line}
    assert "better" in lines["kd"]
    assert " no " in lines["sp"]
    assert seeds_sentence(sweep()) == [
        "Over seeds kd is best: 52.65% top-1, the mean of 4, +2.03 ± 0.24 compared with none (95% interval of 4 pairs; "
        "significant)."
    ]


def test_a_slower_point_is_worse() -> None:
    rows = [trial(method, seed, 50.0) for method in ("kd", "sp") for seed in range(3)]
    for row in rows:
        row["metrics"]["epoch_s"] = (20.0 if row["params"]["distill.method"] == "sp" else 10.0) + row["params"]["seed"] / 10
        row["metrics"]["epoch_s"] += 0.01 * (row["id"] == "sp-1")
    table = seed_table(result(rows, "epoch_s", "min"))
    assert table is not None
    assert [row[-1] for row in table.rows] == ["–", "worse"]


def test_points_are_named_by_what_they_set() -> None:
    rows = [trial(["crd", "kd"], seed, 50.0 + seed, **{"optim.lr": 0.1}) for seed in (0, 1)]
    rows += [trial("kd", seed, 50.0, **{"distill.options.kd.weight": 0}) for seed in (0, 1)]
    assert groups(result(rows))["point"].tolist() == ["method crd + kd, optim.lr 0.1", "method kd, options.kd.weight 0"]


@pytest.mark.parametrize("swept", [result([]), result([trial("kd", 0, 50.0), trial("sp", 0, 51.0)])])
def test_without_two_seeds_of_a_point_nothing_is_shown(swept: RunResult) -> None:
    assert seed_table(swept) is None
    assert seeds_figure(swept) is None
    assert seeds_sentence(swept) == []
