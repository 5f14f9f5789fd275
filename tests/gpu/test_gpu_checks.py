"""The checks for a GPU, each by its twin on the CPU; and the command around them, which is stopped and goes on."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from PIL import Image
from rich.console import Console

from tests.gpu import __main__ as command
from tests.gpu import check_compile, check_decoders, check_pytest, check_ranks
from tests.gpu.checks import CHECKS
from tests.gpu.contract import Check, Expected, Piece, Settings
from tests.gpu.page import page
from tests.gpu.results import Folder, Record
from tests.waiting import wait_until
from trainables.data.jpeg import Region
from trainables.device import decode
from trainables.distributed.rank_pool import RankPool

ROOT = Path(__file__).parents[2]
SAME_CODE = (
    "2-filled-plain",
    *("4-bf16-128", "4-bf16-64", "4-fp32-128", "4-fp32-64", "4-fp32-32"),
    *("5-loop-64", "5-loop-256"),
    "7-batch-norm",
    *("12-bf16-32", "12-overlap", "12-overlap-32"),
)
"""Beside those that differ from them by a number alone."""
LONG = ("1-pytest", "2-filled-search", "2-doubling", "3-peaks", "5-loop-32", "7-uneven", "8-fp16", "12-methods")
"""Several seconds, as all of check 11, whose ranks start as processes."""
PIECES = [piece for check in CHECKS for piece in check.pieces]


def marks(piece: Piece) -> list[pytest.MarkDecorator]:
    if piece.name.startswith("10-"):
        return [pytest.mark.integration, pytest.mark.slow]
    return [pytest.mark.slow] if piece.name.startswith("11-") or piece.name in (*SAME_CODE, *LONG) else []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos and packed sets are made once."""
    return tmp_path_factory.mktemp("gpu-checks")


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    yield
    cudnn.benchmark, cudnn.deterministic = before


class Running:
    """The session's ranks, which outlive a piece."""

    def __init__(self, ranks: RankPool) -> None:
        self.run = ranks.run

    def close(self) -> None: ...


@pytest.mark.parametrize("piece", [pytest.param(piece, id=piece.name, marks=marks(piece)) for piece in PIECES])
def test_the_twin_of_a_piece_gives_its_figures(
    piece: Piece, folder: Path, ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (check_ranks, check_compile):
        monkeypatch.setattr(module, "RankPool", lambda _: Running(ranks))
    settings = Settings("cpu", folder)
    if (reason := piece.lacks(settings)) is not None:
        pytest.skip(reason)
    measured = piece.measure(settings)
    assert all(isinstance(value, (int, float, str)) for value in measured.values())
    judged = {each.figure: each.verdict(measured, "cpu") for each in piece.expected if each.on_cpu}
    assert set(judged.values()) <= {"ok"}, (judged, measured)


class WithPil:
    """A decoder of regions that needs no library."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self._device = device

    def decode(self, regions: list[Region]) -> list[torch.Tensor | None]:
        images = [Image.open(io.BytesIO(region.data)).convert("RGB").crop(region.box) for region in regions]
        return [
            torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3) for image in images
        ]


def test_the_decoders_check_without_their_libraries(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "make_decoder", WithPil)
    found = check_decoders.decoder(Settings("cpu", folder))
    assert float(found["images_per_s"]) > 0
    assert found["decoders kept"] == 0


@pytest.mark.parametrize(
    ("expected", "value", "verdict"),
    [
        (Expected("x", "", low=1.0), 1.0, "ok"),
        (Expected("x", "", low=1.0), 0.99, "MISSED"),
        (Expected("x", "", high=2.0, estimate=True), 3.0, "finding"),
        (Expected("x", ""), 3.0, "recorded"),
        (Expected("x", "", low=1.0), None, "MISSED"),
        (Expected("x", "", high=1.0), float("nan"), "MISSED"),
    ],
)
def test_a_figure_is_judged_by_its_bounds(expected: Expected, value: float | None, verdict: str) -> None:
    assert expected.verdict({} if value is None else {"x": value}, "cuda") == verdict


def test_names_are_unique_and_every_piece_ends_within_ten_minutes() -> None:
    names = [piece.name for piece in PIECES]
    assert len(names) == len(set(names))
    assert [check.number for check in CHECKS] == list(range(1, 13))
    assert all(piece.minutes <= 9 and piece.expected for piece in PIECES)
    assert all(piece.name.startswith(f"{check.number}-") for check in CHECKS for piece in check.pieces)


def pieces_named(*names: str, minutes: float = 1.0) -> list[Piece]:
    return [Piece(name, lambda _: {}, (Expected("x", "x at least 1", low=1),), minutes) for name in names]


def test_a_piece_for_which_no_time_is_left_waits_for_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[str]()

    def measured(piece: Piece, records: Folder, seconds: float) -> Record | None:
        begun.append(piece.name)
        return None if piece.name == "stopped" else Record("measured", measured={"x": 2})

    monkeypatch.setattr(command, "measure_in_child", measured)
    records, console = Folder(tmp_path, "cuda"), Console(file=io.StringIO())
    first, long = pieces_named("first"), pieces_named("long", minutes=9.0)
    stopped, last = pieces_named("stopped"), pieces_named("last")
    pieces = [*first, *long, *stopped, *last]
    assert command.run(pieces, records, 120, console) == ["long", "stopped"]
    assert begun == ["first", "stopped", "last"]
    assert command.run(pieces, records, 1e-3, console) == ["stopped"]
    assert begun[3:] == ["long"]  # the first one of a call begins whatever it may take


def test_records_of_another_machine_are_not_mixed_with_these(tmp_path: Path) -> None:
    Folder(tmp_path, "cpu")
    with pytest.raises(SystemExit, match="another machine"):
        Folder(tmp_path, "cuda")


def test_the_page_names_what_is_missed_skipped_and_not_run_and_loads_nothing(tmp_path: Path) -> None:
    failed, skipped, missed, waiting = pieces_named("failed", "skipped", "missed", "waiting")
    records = Folder(tmp_path, "cuda")
    records.write(failed, Record("failed", reason="RuntimeError: <b>"))
    records.write(skipped, Record("skipped", reason="Ray is not installed"))
    records.write(missed, Record("measured", measured={"x": 0.5}))
    checks = [Check(1, "a check", (failed, skipped, missed, waiting))]
    verdicts = [row.verdict for row in records.rows(checks)]
    assert verdicts == ["MISSED", "skipped", "MISSED", "not run yet"]
    html = page(records, checks)
    assert "RuntimeError: &lt;b&gt;" in html
    assert "Ray is not installed" in html
    assert "http" not in html
    assert "src=" not in html


def test_pytests_report_is_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="a" name="passes"/><testcase classname="a" name="fails"><failure>x</failure></testcase>'
        '<testcase classname="a" name="skips"><skipped/></testcase>'
        '<testcase classname="" name="b"><error>ModuleNotFoundError: No module named \'ray\'</error></testcase>'
        "</testsuite></testsuites>"
    )
    found = check_pytest.outcomes(report)
    assert found == {"passed": 1, "failed": 1, "skipped": 1, "files without Ray": 1, "which failed": "a.fails"}


@pytest.mark.slow
def test_a_run_that_is_stopped_ends_with_all_it_started_and_the_next_one_goes_on(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--only", "8-collectives,8-contexts", "--out", str(tmp_path)]
    first, second = (tmp_path / "pieces" / f"8-{name}.json" for name in ("collectives", "contexts"))
    with subprocess.Popen(
        [sys.executable, "-m", "tests.gpu", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    ) as process:
        wait_until(lambda: first.exists() and psutil.Process(process.pid).children())
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
    assert not psutil.wait_procs(family, timeout=10)[1]
    assert not second.exists()
    written = first.stat().st_mtime_ns
    assert command.main(words) == 0
    assert first.stat().st_mtime_ns == written
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["pieces"]["8-contexts"]["measured"]["steps"] == 10
    assert {row["verdict"] for row in results["rows"] if row["piece"] == "8-collectives"} == {"ok"}
    assert (tmp_path / "results.html").read_text().startswith("<!doctype html>")
    assert not (tmp_path / "made").exists()
