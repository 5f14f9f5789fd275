"""`slurm.sbatch`: a job of two nodes is saved at its time limit, goes back into the queue, and ends with a whole run's bits.

No Slurm is here. Stand-ins of its commands start both nodes' tasks on this machine, signal those tasks, and write down what was
asked of the queue; the test starts the script as Slurm would, and signals the script alone, as `--signal=B:TERM` says.
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from service.config.experiment import load
from tests.integration.conftest import EXPERIMENT, PROJECT, Command, family, is_worker, kill, records, result, wait_until
from tests.integration.test_nodes_come_and_go import LONG_EPOCH
from tests.trainables.jobs import equal, train
from trainables.distributed.rank_pool import RankPool
from trainables.engine import checkpoint
from trainables.rundir import RunDir

pytestmark = pytest.mark.integration

SCRIPT = (PROJECT / "service" / "deploy" / "slurm.sbatch").read_text()
STAND_INS = {
    # All options have their value behind `=`. A signal to srun kills its tasks.
    "srun": """
        tasks=$SLURM_JOB_NUM_NODES
        while [[ $1 == --* ]]; do [[ $1 == --nodes=* ]] && tasks=${1#*=}; shift; done
        trap 'kill -KILL $(jobs -p)' TERM
        for ((node = 0; node < tasks; node++)); do
          SLURM_NODEID=$node SLURM_CPUS_ON_NODE=$SRUN_CPUS_PER_TASK SLURM_LAUNCH_NODE_IPADDR=127.0.0.2 "$@" &
          echo $! >> $STATE/tasks
        done
        wait""",
    "scancel": 'echo "scancel $*" >> $STATE/asked; kill -TERM $(cat $STATE/tasks) 2> /dev/null',
    "scontrol": 'echo "scontrol $*" >> $STATE/asked',
    "distill": f'exec {sys.executable} -P -m service "$@"',
    "ray": f'exec {sys.executable} -m ray.scripts.scripts "$@"',
    "python": f'exec {sys.executable} "$@"',
}
NO_RAY = {
    "ray": 'echo "ray $*" >> $STATE/asked; [ $1 = health-check ] || exec sleep 600',
    "python": 'until [ $(grep -c "ray start" $STATE/asked) = 3 ]; do sleep 0.1; done',
    "distill": 'echo "distill $*" >> $STATE/asked; exit $CODE',
}
"""Where only the script is tried: the command ends at once, with the code `$CODE`."""


@dataclass
class Slurm:
    """Where the stand-ins are, and one job."""

    folder: Path
    job: int
    started: list[subprocess.Popen[bytes]]

    def start(self, command: str, stand_ins: dict[str, str], **env: str) -> Command:
        """The script, its lines marked EDIT changed for `command`, in a job of two nodes with two CPUs each."""
        bin_folder, log = self.folder / "bin", self.folder / "job.log"
        bin_folder.mkdir(exist_ok=True)
        for name, text in stand_ins.items():
            (bin_folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (bin_folder / name).chmod(0o755)
        for name in ("asked", "tasks"):
            (self.folder / name).write_text("")
        script = re.sub(r"^source .*", f"PATH={bin_folder}:$PATH", SCRIPT, flags=re.MULTILINE)
        script = re.sub(r"^command=.*", lambda _: f"command=({command})", script, flags=re.MULTILINE)
        (self.folder / "job.sh").write_text(script)
        slurm = {"SLURM_JOB_ID": str(self.job), "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "2"}
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RAYDISTILL_"))}
        with open(log, "ab") as file:  # as `--open-mode=append` says
            process = subprocess.Popen(
                ["bash", self.folder / "job.sh"],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,
                env={**clean, "PYTHONPATH": str(PROJECT), "STATE": str(self.folder), "RAY_worker_niceness": "0", **slurm, **env},
            )
        self.started.append(process)
        return Command(process, log)

    @property
    def asked(self) -> list[str]:
        return (self.folder / "asked").read_text().splitlines()


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    job = Slurm(tmp_path, secrets.randbelow(10**8), [])
    yield job
    for process in job.started:
        kill(family(process))
        process.wait()
    shutil.rmtree(f"/tmp/rd-{job.job}", ignore_errors=True)


@pytest.mark.parametrize("code", [0, 2, 130])
def test_a_job_goes_back_into_the_queue_where_its_run_was_interrupted_alone(slurm: Slurm, code: int) -> None:
    job = slurm.start("distill train digits --out run", STAND_INS | NO_RAY, CODE=str(code), SLURM_MEM_PER_NODE="4096")
    assert job.end(60) == code, job.output
    starts = [line for line in slurm.asked if line.startswith("ray start ")]
    head, *nodes = sorted(starts, key=lambda line: "--head" not in line)
    assert "--num-gpus=0 --node-ip-address=127.0.0.2 " in head
    assert head.endswith(f" --memory={2**30}")
    assert all("--address=127.0.0.2:" in node and node.endswith("--num-cpus=2 --num-gpus=0") for node in nodes)
    ended = ["distill train digits --out run --continue", f"scancel --signal=TERM {slurm.job}"]
    requeued = [f"scontrol requeue incomplete {slurm.job}"] if code == 130 else []
    assert (len(nodes), [line for line in slurm.asked if not line.startswith("ray ")]) == (2, ended + requeued)
    assert not Path(f"/tmp/rd-{slurm.job}").exists()


def test_nodes_have_time_to_save_before_slurm_kills_them() -> None:
    (before_end,) = re.findall(r"^#SBATCH .*--signal=B:TERM@(\d+)", SCRIPT, re.MULTILINE)
    (save,) = re.findall(r"DRAIN_TIMEOUT_S=(\d+) srun", SCRIPT)
    assert int(before_end) >= int(save) + 60


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_is_saved_at_its_time_limit_and_ends_with_a_whole_runs_bits(slurm: Slurm, ranks: RankPool) -> None:
    run, whole, experiment = slurm.folder / "run", slurm.folder / "whole", slurm.folder / "tiny.yaml"
    experiment.write_text(EXPERIMENT)
    sets = [*LONG_EPOCH, "--set", "scale.num_workers=2"]
    train_it = f"distill train tiny.yaml --out run {' '.join(sets)}"

    first = slurm.start(train_it, STAND_INS)
    wait_until(lambda: len(records(run, "step")) > 40, "step 40", first)
    workers = [process for process in family(first.process) if is_worker(process)]
    assert len({process.ppid() for process in workers}) == len(workers) == 2  # each node's raylet has started one
    assert Path(f"/tmp/rd-{slurm.job}").stat().st_mode & 0o777 == 0o700
    started = family(first.process)[1:]
    os.kill(first.process.pid, signal.SIGTERM)
    assert first.end(120) == 130, first.output
    assert slurm.asked == [f"scancel --signal=TERM {slurm.job}", f"scontrol requeue incomplete {slurm.job}"]
    assert result(run)["status"] == "interrupted"
    saved = records(run, "step")[-1]["step"]
    assert psutil.wait_procs(started, timeout=20)[1] == []

    second = slurm.start(train_it, STAND_INS)
    assert second.end(400) == 0, second.output
    assert slurm.asked == [f"scancel --signal=TERM {slurm.job}"]
    assert [line["step"] for line in records(run, "resume")] == [saved]
    assert set(Counter(line["step"] for line in records(run, "step")).values()) == {1}
    assert not Path(f"/tmp/rd-{slurm.job}").exists()
    stage = load(str(experiment), sets[1::2]).experiment.stage("student", RunDir(whole).stage("student").root, {})
    ranks.run(2, train, stage)
    assert equal(*(checkpoint.read(RunDir(out).stage("student").last)[0] for out in (run, whole)))
