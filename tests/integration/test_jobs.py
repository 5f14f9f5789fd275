"""Ray jobs on a real cluster with token authentication: `distill submit`, and `ray job submit` as the README says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import PATIENCE_S, PROJECT, Distill, RayCluster, records, result

pytestmark = pytest.mark.integration


METHOD = """
from trainables.methods.contract import Method, Requirements


class Flat(Method):
    terms = ("flat_loss",)
    requires = Requirements(teacher=False)

    def forward(self, student, teacher, batch):
        return {"flat_loss": student.logits_BK.square().mean(1)}
"""


@pytest.mark.slow
def test_a_submitted_run_with_a_method_of_its_own_is_followed_to_its_end_and_leaves_its_results_in_the_runs_root(
    distill: Distill, cluster: RayCluster
) -> None:
    (distill.folder / "flat.py").write_text(METHOD)
    changes = ("--set", "optim.epochs=1", "--set", "distill.method=flat.py:Flat")
    output = distill.run("submit", "--follow", "train", "tiny.yaml", *changes, "--runs", distill.runs, env=cluster.env)
    assert "student epoch 1/1" in output
    (run,) = distill.runs.iterdir()
    assert f"submitted {run.name}: " in output
    assert result(run)["status"] == "complete"
    assert f"result: {run}/result.json" in output
    assert "methods/flat-" in (run / "experiment.yaml").read_text()
    assert "flat_loss" in "".join(map(str, records(run, "epoch")))


def test_the_exit_code_of_a_followed_job_is_the_jobs_own(distill: Distill, cluster: RayCluster) -> None:
    output = distill.run("submit", "--follow", "resume", "/nowhere", code=2, env=cluster.env)
    assert "error: /nowhere holds no run" in output


def test_without_the_token_no_job_is_taken(distill: Distill, cluster: RayCluster) -> None:
    wrong = distill.folder / "wrong-token"
    wrong.write_text("0" * 64)
    output = distill.run("submit", "train", "digits", code=2, env={**cluster.env, "RAY_AUTH_TOKEN_PATH": str(wrong)})
    assert output.startswith("error: http://127.0.0.1:")
    assert "requires a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH=FILE" in output
    assert len(output.splitlines()) == 1


@pytest.mark.slow
def test_the_token_in_the_users_home_is_sent_where_no_variable_names_one(distill: Distill, cluster: RayCluster) -> None:
    home = distill.folder / "home"
    (home / ".ray").mkdir(parents=True)
    address = cluster.env["RAY_API_SERVER_ADDRESS"]
    env = {"RAY_API_SERVER_ADDRESS": address, "HOME": str(home), "RAY_AUTH_MODE": "token"}
    output = distill.run("submit", "resume", "/nowhere", code=2, env=env)
    assert f"{address} requires a token" in output
    (home / ".ray/auth_token").write_text(cluster.token_file.read_text())
    output = distill.run("submit", "--follow", "resume", "/nowhere", code=2, env=env)
    assert "error: /nowhere holds no run" in output


@pytest.mark.slow
def test_the_project_itself_runs_a_sweep_as_a_ray_job_as_it_stands(cluster: RayCluster) -> None:
    sets = [
        "optim.epochs=1",
        "teacher.epochs=1",
        "tracking.enabled=false",
        "data.loader_workers=1",
        "sweep.steps=5",
        "sweep.space={data.global_batch_size: [64, 128]}",
    ]
    job = subprocess.run(
        [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "job",
            "submit",
            "--working-dir",
            ".",
            "--",
            "python",
            "-m",
            "service",
            "sweep",
            "digits",
            *(part for each in sets for part in ("--set", each)),
        ],
        cwd=PROJECT,
        env={**os.environ, **cluster.env},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    # A job's working directory is thrown away: the runs are in the home of whoever runs the head node.
    (run,) = (path for path in (cluster.folder / "runs").iterdir() if path.is_dir())
    assert [trial["status"] for trial in result(run)["trials"]] == ["ok", "ok"]
    (marker,) = cluster.folder.glob("2/session_2*/runtime_resources/working_dir_files/*/pyproject.toml")
    package = marker.parent
    assert (package / "service" / "cli.py").exists()
    assert not any((package / name).exists() for name in (".venv", ".git", "runs"))
    assert size(package) < 10 * 2**20


def size(folder: Path) -> int:
    """Bytes of all files under a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
