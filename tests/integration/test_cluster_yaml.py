"""`cluster.yaml`: its commands, as they stand, start three nodes in network namespaces of their own, which then train.

What `ray up` does over ssh (copying files, running the commands one after the other) is done by hand, and nothing is installed:
the environment of the tests stands for the one that the commands would make.
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.conftest import PROJECT, result

FILE: dict[str, Any] = yaml.safe_load((PROJECT / "cluster.yaml").read_text())
ADDRESSES = [FILE["provider"]["head_ip"], *FILE["provider"]["worker_ips"]]


def can_make_namespaces() -> bool:
    unshare = ["unshare", "-n", "-m", "-p", "-f", "--mount-proc", "ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1"]
    try:
        return os.geteuid() == 0 and subprocess.run(unshare, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not can_make_namespaces(), reason="needs root, and namespaces of networks, mounts and processes"),
    pytest.mark.skipif(not (Path(sys.prefix) / "bin" / "activate").exists(), reason="needs a virtual environment"),
]


class Machine:
    """A machine of the cluster: its own network, name, processes, home and `/tmp/raydistill-UID`."""

    def __init__(self, folder: Path, address: str) -> None:
        self.home, self.address = folder / "home", address
        (self.home / ".ray").mkdir(parents=True)
        (folder / "tmp").mkdir()
        session = Path(f"/tmp/raydistill-{os.getuid()}")
        session.mkdir(mode=0o700, exist_ok=True)
        # The first process ends what the machine runs with itself, and takes leave of ended children.
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {folder.name}\n")
        mounts = f"mount --bind {folder}/tmp {session} && mount --bind {folder}/hosts /etc/hosts"
        first = f"{mounts} && hostname {folder.name} && ip link set lo up && while sleep 60; do :; done"
        self._process = subprocess.Popen(["unshare", "-n", "-m", "-u", "-p", "-f", "--mount-proc", "bash", "-c", first])
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        while not (found := children.read_text().split()):
            pass
        self.pid = int(found[0])

    def run(self, command: str, **env: str) -> subprocess.CompletedProcess[str]:
        """What a login on this machine makes of a command."""
        enter = ["nsenter", "-t", str(self.pid), "-n", "-m", "-u", "-p", "bash", "-c", f"cd {PROJECT} && {command}"]
        clean = {"PATH": os.environ["PATH"], "HOME": str(self.home), "LANG": "C.UTF-8"}
        done = subprocess.run(enter, env={**clean, **env}, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done

    def close(self) -> None:
        self._process.kill()
        subprocess.run(["kill", "-9", str(self.pid)], check=False)
        self._process.wait()


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    """The machines of `cluster.yaml` at its addresses, side by side on one switch."""
    folder = Path(tempfile.mkdtemp(prefix="rd-"))
    made = [Machine(folder / "switch", "127.0.0.1")]
    made[0].run("ip link add switch type bridge && ip link set switch up")
    try:
        for number, address in enumerate(ADDRESSES):
            made.append(Machine(folder / f"node{number}", address))
            here = f"to{number}"
            ends = f"ip link add {here} type veth peer name eth0 netns {made[-1].pid} && ip link set {here} up master switch"
            subprocess.run(["nsenter", "-t", str(made[0].pid), "-n", "sh", "-c", ends], check=True)
            made[-1].run(f"ip address add {address}/24 dev eth0 && ip link set eth0 up")
        yield made[1:]
    finally:
        for machine in made:
            machine.close()
        shutil.rmtree(folder, ignore_errors=True)


def start(machine: Machine, token: str, runs: Path) -> None:
    """What `ray up` does with a machine."""
    (machine.home / ".ray" / "auth_token").write_text(token)
    (machine.home / "raydistill").mkdir()
    shutil.copy(PROJECT / "requirements.lock", machine.home / "raydistill")
    (machine.home / "raydistill" / "venv").symlink_to(sys.prefix)
    for command in FILE["setup_commands"]:
        if "pip install" not in command:
            machine.run(command.replace("/shared/raydistill/runs", str(runs)))
    is_head = machine.address == ADDRESSES[0]
    if is_head:  # whose autoscaler has no other machine to log in to
        alone = {**FILE, "provider": {**FILE["provider"], "worker_ips": []}, "max_workers": 0}
        (machine.home / "ray_bootstrap_config.yaml").write_text(yaml.safe_dump(alone))
    for command in FILE["head_start_ray_commands" if is_head else "worker_start_ray_commands"]:
        machine.run(command, RAY_HEAD_IP=ADDRESSES[0])


def test_the_commands_as_they_stand_start_three_nodes_that_carry_out_a_submitted_sweep(
    machines: list[Machine], tmp_path: Path
) -> None:
    token, runs = secrets.token_hex(32), tmp_path / "runs"
    for machine in machines:
        start(machine, token, runs)
        assert oct((machine.home / ".ray" / "auth_token").stat().st_mode & 0o777) == "0o600"
    head = machines[0]
    # The dashboard and the job server listen on loopback alone.
    sockets = head.run("ss -Hlnt 'sport = :8265'").stdout.split()
    assert "127.0.0.1:8265" in sockets
    assert not any(f"{address}:8265" in sockets for address in ("0.0.0.0", "*", head.address))
    # As on the machine to which `ray dashboard` has tunnelled the head's port.
    space = "{scale.num_workers: [3], data.global_batch_size: [66], data.loader_workers: [1]}"
    submit = (
        f"export RAY_AUTH_MODE=token && {sys.executable} -m service submit --follow "
        f"sweep digits --set 'sweep.space={space}' --set sweep.steps=5 --set tracking.enabled=false"
    )
    output = head.run(submit).stdout
    assert "on 3 nodes" in output or "3 workers" in output, output
    (run,) = (path for path in runs.iterdir() if path.name.startswith("digits"))
    found = result(run)
    assert (found["status"], [trial["status"] for trial in found["trials"]]) == ("complete", ["ok"])
    assert {f"node{number}/gpus" for number in range(3)} <= found["trials"][0]["metrics"].keys()
