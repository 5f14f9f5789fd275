"""Every command in every encoding, with streams that are closed, and with readers that leave early."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.report.runs import sweep_dir

DISTILL = [sys.executable, "-m", "service"]
NO_UTF8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def in_shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = command.replace("distill", " ".join(DISTILL))
    return subprocess.run(["bash", "-c", command], env={**os.environ, **environment}, capture_output=True, check=False)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    failed = {"000": {"status": "failed", "reason": "class 中 has no image"}}
    return sweep_dir(tmp_path_factory.mktemp("runs") / "s", {"data.global_batch_size": [64, 128]}, ends=failed).root


@pytest.mark.processes
@pytest.mark.parametrize("environment", [NO_UTF8, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}], ids=str)
def test_what_an_encoding_lacks_is_printed_as_an_escape(sweep: Path, environment: dict[str, str]) -> None:
    done = in_shell(f"distill report {sweep} && distill doctor {sweep} && distill recipes && distill --help", **environment)
    assert done.stderr == b""
    assert done.returncode == 0
    assert b"class \\u4e2d has no image" in done.stdout


@pytest.mark.processes
def test_a_reader_that_leaves_early_ends_a_command_in_silence(sweep: Path) -> None:
    for command in (f"report {sweep}", f"doctor {sweep}", "methods kd", "show digits", "--help"):
        done = in_shell(f"distill {command} | true; exit ${{PIPESTATUS[0]}}")
        assert (done.returncode, done.stdout, done.stderr) == (141, b"", b""), command


@pytest.mark.processes
def test_streams_may_be_closed(sweep: Path) -> None:
    assert in_shell(f"distill report {sweep} >&- 2>&- <&-").returncode == 0
    assert in_shell("distill report /nowhere 2>&-").returncode == 2
    assert in_shell("distill show digits >&-").stderr == b""
    child = "import os, subprocess; subprocess.run(['sh', '-c', 'test -e /proc/self/fd/0 -a -e /proc/self/fd/1'], check=True)"
    prepared = f"from service.cli import prepare_streams; prepare_streams(); {child}"
    assert in_shell(f'{sys.executable} -c "{prepared}" <&- >&-').returncode == 0


@pytest.mark.processes
def test_no_color_and_a_terminal_that_knows_none_are_honored(sweep: Path) -> None:
    report, keys = f"distill report {sweep}", "distill show --keys optim"
    for command in (report, keys):
        assert b"\x1b[" not in in_shell(command).stdout
        assert b"\x1b[1m" in in_shell(command, FORCE_COLOR="1").stdout
        assert b"\x1b[" not in in_shell(command, FORCE_COLOR="1", TERM="dumb").stdout
    assert b"\x1b[1;32m" in in_shell(report, FORCE_COLOR="1", TERM="xterm").stdout
    assert b"\x1b[1;32m" not in in_shell(report, FORCE_COLOR="1", TERM="xterm", NO_COLOR="1").stdout


@pytest.mark.processes
def test_experiments_are_read_as_utf_8_in_every_locale(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text("base: digits\nteacher: {weights: été-中.pt}\n", encoding="utf-8")
    done = in_shell(f"distill show {tmp_path}/e.yaml", **NO_UTF8)
    assert done.stderr == b""
    assert "été-中.pt ".encode() in done.stdout  # click's own way with a stream that says it is ASCII
