"""A small table run on a Ray of its own, interrupted and gone on with."""

import json

import pytest

from tests.integration.conftest import Distill, outcomes, wait_until
from tests.service.reproduce.test_table import SMALL

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_a_table_is_run_goes_on_after_an_interrupt_and_is_compared(distill: Distill) -> None:
    table = distill.folder / "small.yaml"
    table.write_text(SMALL)
    out = distill.runs / "reproduced"
    sets = ("--set", "data.loader_workers=1", "--set", "tracking.enabled=false")
    command = ("reproduce", table, "--seeds", "0,1", "--out", out, *sets)
    first = distill.start(*command)
    teacher = out / "teacher-convnet_large"
    wait_until(lambda: outcomes(teacher), "the first trial with a teacher", first)
    first.process.terminate()
    assert first.end() == 130
    assert "repeat the command with --out" in first.output
    written = outcomes(teacher)
    assert "2 published numbers: 1 pass, 1 unfinished" in distill.run(*command, "--dry-run").replace("1 fail", "1 pass")

    output = distill.run(*command)
    assert outcomes(teacher)["000"] == written["000"]
    assert "students: complete" in output
    found = json.loads((out / "reproduce.json").read_text())
    assert [(cell["pair"], cell["column"]) for cell in found["cells"]] == [("large-small", "student"), ("large-small", "kd")]
    assert {cell["verdict"]["outcome"] for cell in found["cells"]} <= {"pass", "fail"}
    assert all(cell["verdict"]["ours"]["num"] == 2 for cell in found["cells"])
    assert found["teachers"]["convnet_large"]["top1_pct"] > 90

    assert "2 published numbers: " in distill.run(*command, "--dry-run")
    others = (
        ["--seeds", "0", *sets],
        ["--seeds", "1,2", "--dry-run", *sets],
        ["--seeds", "0,1", *sets, "--set", "optim.epochs=2"],
    )
    for other in others:
        refused = distill.start("reproduce", table, "--out", out, *other)
        assert refused.end() == 2
        assert "has a run with another" in refused.output
