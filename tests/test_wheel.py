"""The wheel: what is in it, and that it runs outside this repository."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = ("optim.epochs=1", "teacher.epochs=1", "data.loader_workers=1", "sweep.steps=5", "sweep.policy=grid")
SPACE = "sweep.space={data.global_batch_size: [64, 128]}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools writes into the folder that it builds from."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("service", "trainables", "tests"):
        shutil.copytree(ROOT / name, folder / "project" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "project")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", folder, folder / "project"], check=True, timeout=120)
    (built,) = folder.glob("raydistill-*.whl")
    return built


@pytest.mark.processes
def test_the_wheel_has_all_that_ships_and_no_tests(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    listed = subprocess.run(["git", "ls-files", "service", "trainables"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    if listed.returncode:
        pytest.skip("no clone of git here")
    new = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard", "service", "trainables"], cwd=ROOT, capture_output=True, text=True
    )
    assert inside == {name for name in (listed.stdout + new.stdout).splitlines() if (ROOT / name).exists()}


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(600)
def test_the_wheel_runs_the_demo_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """The libraries are those of this environment, but for the project, which it has in place."""
    venv, python = tmp_path / "venv", tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=120)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True, timeout=120)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
    )
    # A folder that a .pth file names: its own .pth files, as of a project that is installed in place, are not read.
    (Path(site.stdout.strip()) / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY", "PYTHONPATH"))}

    found = subprocess.run([python, "-c", "import service; print(service.__file__)"], cwd=tmp_path, env=env, capture_output=True)
    assert str(venv) in found.stdout.decode()
    for package in ("service", "trainables"):  # the user's own of the same names, which nothing may import
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise ImportError('of another project')")
    sets = [word for text in (*TINY, SPACE) for word in ("--set", text)]
    done = subprocess.run(
        [venv / "bin" / "distill", "sweep", "digits", "--out", "run", *sets],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert [trial["status"] for trial in result["trials"]] == ["ok", "ok"]
    assert (tmp_path / "run" / "report.html").exists()
