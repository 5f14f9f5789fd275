"""Another user of the same machine, with a shell alone: what of a run and of `distill ui` it can read, write or reach."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

from service.cluster.connect import session_base
from tests.integration.conftest import Command, Distill, records, wait_until
from tests.integration.test_ui import open_ui

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or shutil.which("setpriv") is None,
        reason="needs root, who can be another user, and setpriv",
    ),
]

NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "bash", "-c"]
LONG = ("--set", "optim.epochs=500", "--set", "train.log_every=1")


def as_nobody(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What a shell of the other user makes of a script."""
    command = [*NOBODY, script, "bash", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=False)


def get_as_nobody(port: int, path: str) -> str:
    """What a server on loopback answers the other user, who has no token."""
    script = 'exec 3<>/dev/tcp/127.0.0.1/$1; printf "GET $2 HTTP/1.0\\r\\n\\r\\n" >&3; timeout 5 head -c 2000 <&3'
    return as_nobody(script, str(port), path).stdout


def listening(processes: Sequence[psutil.Process]) -> list[tuple[str, int]]:
    """Address and port of every TCP socket on which the processes listen."""
    found = set[tuple[str, int]]()
    for process in processes:
        try:
            connections = process.net_connections("tcp")
        except psutil.NoSuchProcess:
            continue
        found |= {(one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN}
    return sorted(found)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The test's folder, which the other user may enter, as it may enter a home of mode 0755."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    return tmp_path


@pytest.fixture
def running(distill: Distill, shared: Path) -> Command:
    """A run that trains, in a Ray and with a home of its own."""
    home = shared / "home"
    home.mkdir(mode=0o755)
    command = distill.start("train", distill.experiment, "--out", distill.runs / "run", *LONG, env={"HOME": str(home)})
    wait_until(lambda: records(distill.runs / "run", "step"), "first step", command, 500)
    return command


def test_what_a_run_has_on_this_machine_is_closed_to_another_user(distill: Distill, running: Command, shared: Path) -> None:
    # The folders of Ray's sessions, which Ray makes writable for everybody.
    base = Path(session_base()) / f"raydistill-{os.getuid()}"
    writable = [path for path in base.rglob("*") if path.is_dir() and path.stat().st_mode & 0o002]
    assert writable, "then Ray has become careful, and these folders need no other above them"
    script = 'ls "$1"; for folder in "${@:2}"; do touch "$folder/intruder" && echo wrote "$folder"; done'
    done = as_nobody(script, base, *writable[:200])
    assert done.stdout == ""
    assert "Permission denied" in done.stderr
    # The token, by which a job could be submitted, is in no file; its processes have it in their environment, see below.
    assert not (shared / "home" / ".ray" / "auth_token").exists()
    # Every port is one of loopback, and whoever reaches it needs the token.
    ports = listening(running.family())
    assert ports
    assert all(ip_address(address.removeprefix("::ffff:")).is_loopback for address, _ in ports)
    for _, port in ports:
        answer = get_as_nobody(port, "/api/jobs/")
        assert " 200 " not in answer.partition("\r\n")[0] or "submission_id" not in answer, answer
    # What the run has written, and the memory that its processes share.
    run = distill.runs / "run"
    script = 'touch "$1/intruder"; echo "{}" >> "$1/events.jsonl"; mv -f "$1/experiment.yaml" "$1/other"; rm -rf "$1"'
    assert "Permission denied" in as_nobody(script, run).stderr
    assert (run / "experiment.yaml").exists()
    assert not (run / "intruder").exists()
    own = {process.pid for process in running.family()}
    for file in Path("/dev/shm").iterdir():
        if any(str(file) in _open_files(pid) for pid in own):
            assert not file.stat().st_mode & 0o077, file
    # And its processes.
    done = as_nobody('kill -0 "$1"; cat "/proc/$1/environ"; ls "/proc/$1/fd"', str(running.process.pid))
    assert done.stdout == ""


def _open_files(pid: int) -> list[str]:
    try:
        return [opened.path for opened in psutil.Process(pid).open_files()]
    except psutil.Error:
        return []


def test_the_ui_is_closed_to_another_user_who_cannot_learn_its_token(shared: Path) -> None:
    with open_ui(shared) as address:
        base, _, token = address.partition("/?token=")
        port = int(base.rpartition(":")[2])
        for path in ("/", "/?token=guess", "/api/2.0/mlflow/experiments/search?max_results=1", "/ajax-api/2.0/mlflow/runs/get"):
            assert " 401 " in get_as_nobody(port, path).partition("\r\n")[0]
        done = as_nobody("cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2> /dev/null | tr '\\0' '\\n'")
        assert "mlflow" in done.stdout  # it sees that there is a server
        assert token not in done.stdout
