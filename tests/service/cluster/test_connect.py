"""What a user sees where there is no Ray."""

import os
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from service.cluster.connect import check_ray_address, excess_bytes, set_token, shorten_tmpdir
from tests.service.commands import run
from trainables.notices import notices_to

CONNECT = """
import sys
from pathlib import Path
from service.cluster.connect import connect
from trainables.errors import ClusterError
import ray
try:
    with connect(1, Path(sys.argv[1])):
        print(ray._private.worker.global_worker.node.get_session_dir_path())
        sys.stdout.flush()
        sys.stdin.read()
except ClusterError as error:
    print(error)
"""


INTERRUPTED = """
import os, signal, sys, time
from pathlib import Path
from service.cluster.connect import connect
import ray._private.node

def start_servers(*_, **__):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(100)

ray._private.node.Node.__init__ = start_servers
signal.signal(signal.SIGTERM, signal.default_int_handler)
try:
    with connect(1, Path(sys.argv[1])):
        pass
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGTERM) is signal.default_int_handler)
"""


@pytest.mark.processes
def test_sigterm_while_ray_starts_is_an_interruption_and_not_the_exit_of_rays_own_handler(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    words = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("interrupted True\n", 0), done.stderr


def test_a_folder_for_sessions_whose_sockets_paths_are_too_long_is_refused_before_a_run_has_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    longest = "/" + "d" * (21 - excess_bytes("/" + "d" * 20))
    monkeypatch.setenv("RAY_TMPDIR", longest[:-1])
    check_ray_address()
    for base, excess in ((longest, 1), (longest + "é", 3)):
        monkeypatch.setenv("RAY_TMPDIR", base)
        code, _, error = run(capsys, "train", "digits", "--runs", tmp_path / "runs")
        assert error == (
            f"error: RAY_TMPDIR is {base}, which is {excess} bytes too long for the sockets that Ray creates below it: "
            "set a shorter folder, or unset it\n"
        )
        assert code == 2
    assert not (tmp_path / "runs").exists()


def test_ray_gets_another_tmpdir_than_one_too_long_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    long = tmp_path / ("d" * 100)
    long.mkdir()
    for folder, used in (("/tmp", "/tmp"), (str(long), "/tmp")):
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        with notices_to(lines.append):
            shorten_tmpdir()
        assert os.environ["TMPDIR"] == used
    (line,) = lines
    assert line.startswith(f"TMPDIR: {long} is too long for sockets: the processes of Ray use /tmp, also for copies")


@pytest.mark.processes
def test_a_ray_that_cannot_start_here_is_one_line(tmp_path: Path) -> None:
    # In a process of its own: Ray turns its authentication on for the rest of a process, whether it starts or not.
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"RAY_TMPDIR": "/dev/null"}
    done = subprocess.run(
        [sys.executable, "-c", CONNECT, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    words = r"Ray does not start on this machine: .*Not a directory: '/dev/null/raydistill-\d+'.*\n"
    assert re.fullmatch(words, done.stdout)


@pytest.fixture
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")  # to be removed after the test
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_token")
def test_a_ray_of_our_own_has_one_token_and_it_is_new() -> None:
    set_token()
    made = os.environ["RAY_AUTH_TOKEN"]
    set_token()
    assert (len(made), os.environ["RAY_AUTH_TOKEN"]) == (64, made)


@pytest.mark.usefixtures("no_token")
@pytest.mark.parametrize(
    ("variable", "value"), [("RAY_AUTH_TOKEN", "x"), ("RAY_AUTH_TOKEN_PATH", "x"), ("RAY_AUTH_MODE", "disabled")]
)
def test_no_token_is_made_where_one_is_named_or_none_is_wanted(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    set_token()
    assert os.environ.get("RAY_AUTH_TOKEN") == ("x" if variable == "RAY_AUTH_TOKEN" else None)


@pytest.mark.processes
def test_no_other_user_reaches_the_session_or_the_token_of_a_ray_of_our_own(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    own = ("RAY_ADDRESS", "RAY_TMPDIR", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= {"HOME": str(home), "TMPDIR": "/tmp"}
    command = [sys.executable, "-c", CONNECT, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        session = Path(process.stdout.readline().strip())
        root = session.parents[1]
        assert session.is_dir()
        assert root.stat().st_uid == os.getuid()
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        assert not (home / ".ray").exists()
        if os.getuid() == 0:
            write = ["/usr/bin/touch", str(session / "runtime_resources" / "x")]
            other = subprocess.run(write, user=65534, group=65534, extra_groups=[], cwd="/", capture_output=True, text=True)
            assert "Permission denied" in other.stderr
        process.stdin.close()
    assert process.returncode == 0
