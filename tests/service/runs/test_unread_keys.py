"""Lines about values without effect."""

from pathlib import Path

import pytest

from service.config.experiment import load
from service.runs.unread_keys import note_unread
from trainables.notices import notices_to


def notes_of(*overrides: str, recipe: str = "digits", sweep: bool = False) -> list[str]:
    lines: list[str] = []
    resolved = load(recipe, overrides)
    with notices_to(lines.append):
        note_unread(resolved, (resolved.experiment.sweep.points or [resolved.experiment.sweep.space]) if sweep else ())
    return lines


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["optim.name=adamw", "optim.momentum=0.5"], "optim.momentum 0.5: nothing reads it with optim.name adamw"),
        (["optim.name=adamw", "optim.nesterov=true"], "optim.nesterov true: nothing reads it with optim.name adamw"),
        (["optim.milestones=[3, 6]"], "optim.milestones [3, 6]: nothing reads it with optim.schedule cosine"),
        (["optim.lr_base_batch=512"], "optim.lr_base_batch 512: nothing reads it with optim.lr_scaling none"),
        (["data.min_crop_area=0.5"], "data.min_crop_area 0.5: nothing reads it with data.augment none"),
    ],
)
def test_a_value_that_nothing_reads_is_a_line(overrides: list[str], line: str) -> None:
    (found,) = notes_of(*overrides)
    assert line in found


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optim.name=adamw"],
        ["optim.name=adamw", "optim.nesterov=false"],
        ["optim.schedule=step", "optim.milestones=[3, 6]"],
        ["optim.milestones=[3, 6]", "optim.losses.kd.schedule=step"],
    ],
)
def test_a_value_that_is_read_and_one_that_nobody_wrote_have_no_line(overrides: list[str]) -> None:
    assert notes_of(*overrides) == []


def test_an_override_of_what_a_sweep_searches_is_a_line_and_a_files_value_is_none(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("base: digits\noptim: {lr: 0.5}\nsweep: {space: {optim.lr: [0.1, 0.2], optim.schedule: [step, cosine]}}\n")
    assert notes_of("optim.milestones=[3, 6]", recipe=str(file), sweep=True) == []
    assert notes_of("optim.lr=0.3", recipe=str(file), sweep=True) == [
        "--set optim.lr: each trial has a value of the sweep's instead"
    ]
    file.write_text("base: digits\nsweep: {space: {}, points: [{optim.lr: 0.2}, {optim.name: adamw}]}\n")
    assert notes_of("optim.lr=0.3", recipe=str(file), sweep=True) == []  # the second trial trains with it
