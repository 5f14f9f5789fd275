"""The rules of the house, read from the imports: who may know whom, and what stays out of the tree."""

import ast
import functools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted([*(ROOT / "service").rglob("*.py"), *(ROOT / "trainables").rglob("*.py")])


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, at the top or inside a function; relative names are not used here."""
    found: list[str] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


def who_imports(package: str) -> set[str]:
    """Files of ours, relative to the root, that import `package` or something inside it."""
    return {
        str(path.relative_to(ROOT))
        for path in MODULES
        if any(name == package or name.startswith(f"{package}.") for name in imports(path))
    }


def test_the_workers_side_knows_nothing_of_the_drivers() -> None:
    assert not {name for name in who_imports("service") if name.startswith("trainables")}


LAYERS = {
    "trainables": [
        "errors",
        "notices",
        "redact",
        "config",
        "user_code",
        "rules",
        "rundir",
        "disk_writer",
        "stage_result",
        "locks",
        "user_folder",
        "process_exit",
        "stacks",
        "throttled",
        "failures",
        "object_store",
        "distributed",
        "data",
        "device",
        "models",
        "methods",
        "metrics",
        "probes",
        "teachers",
        "engine",
        "export",
        "worker",
    ],
    "service": [
        "recipes",
        "config",
        "cluster",
        "tracking",
        "runs",
        "search",
        "sweeps",
        "report",
        "doctor",
        "reproduce",
        "commands",
        "cli",
    ],
}
"""The rooms of each package from the lowest to the highest: each imports lower ones alone."""


@pytest.mark.parametrize("package", LAYERS)
def test_imports_go_down_the_layers(package: str) -> None:
    rooms = LAYERS[package]
    upward = set()
    for path in (ROOT / package).rglob("*.py"):
        room = path.relative_to(ROOT / package).parts[0].removesuffix(".py")
        if room in ("__init__", "__main__"):
            continue
        assert room in rooms, f"{package}/{room} has no layer: see CONTRIBUTING.md"
        for name in imports(path):
            head, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if head == package and target in rooms and rooms.index(target) > rooms.index(room):
                upward.add(f"{path.relative_to(ROOT)} imports {name}")
    assert not upward


def test_only_the_worker_knows_ray_train() -> None:
    assert all(name.startswith("trainables/worker/") for name in who_imports("ray.train"))


def test_only_tracking_knows_mlflow() -> None:
    assert {name.split("/")[1] for name in who_imports("mlflow")} == {"tracking"}


def test_only_trials_and_sweeps_know_ray_tune() -> None:
    assert who_imports("ray.tune") == {
        "service/search/searcher.py",
        "service/sweeps/asha.py",
        "service/sweeps/trial_functions.py",
        "service/sweeps/trial_outcomes.py",
        "service/sweeps/tune.py",
        "service/sweeps/tune_internals.py",
    }


def test_the_workers_side_knows_ray_in_one_package_alone() -> None:
    rooms = {name.rpartition("/")[0] for name in who_imports("ray") if name.startswith("trainables")}
    assert rooms == {"trainables/worker", "trainables/worker/hangs"}


def test_private_names_of_ray_train_and_of_ray_tune_are_in_one_module_each() -> None:
    assert who_imports("ray.train.v2") == {"trainables/worker/ray_internals.py"}
    assert who_imports("ray.air") == who_imports("ray.tune.execution") == {"service/sweeps/tune_internals.py"}


@functools.cache
def attributes(path: Path) -> frozenset[str]:
    """The dotted names that a file uses, each with what it begins with: `torch`, `torch.nn`, `torch.nn.Linear`."""
    used = (ast.unparse(node) for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute))
    return frozenset(name for name in used if re.fullmatch(r"[\w.]+", name))


def private_names(path: Path, *packages: str) -> set[str]:
    """Dotted names inside `packages` with a part that begins with one underscore, imported or used as attributes."""
    dotted = {*imports(path), *attributes(path)}
    return {
        name
        for name in dotted
        if name.split(".")[0] in packages and any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    }


def test_no_other_private_names_of_torch_are_relied_on() -> None:
    used = {name for path in MODULES for name in private_names(path, "torch")}
    assert used <= {
        "torch._C",
        "torch._C._distributed_c10d",
        "torch._C._host_emptyCache",
        "torch.autograd.Variable._execution_engine",
        "torch._foreach_add_",
        "torch._foreach_copy_",
        "torch._foreach_norm",
        "torch._foreach_sub",
        "torch._utils._flatten_dense_tensors",
        "torch._utils._unflatten_dense_tensors",
        "torch.cuda._sleep",
        "torch.nn.modules.batchnorm._BatchNorm",
        "torch.nn.modules.batchnorm._NormBase",
        "torch.nn.modules.conv._ConvNd",
        "torch.ops.aten._upsample_bilinear2d_aa",
        "torch.ops.aten._upsample_bilinear2d_aa.out",
        "torch.utils._python_dispatch.TorchDispatchMode",
    }


def test_no_private_names_of_mlflow_are_relied_on() -> None:
    assert not {name for path in MODULES for name in private_names(path, "mlflow")}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(tree(path)), f"{path} has no docstring"


LOCKS = ("requirements.lock", "tests/requirements.lock", "docs/requirements.lock")


def pins(lock: str) -> dict[str, str]:
    """Name → version of each package in a lock."""
    lines = (ROOT / lock).read_text().splitlines()
    return dict(re.split(r"==| ", line)[:2] for line in lines if "==" in line and line[0].isalnum())


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_names_no_index(name: str) -> None:
    lock = (ROOT / name).read_text()
    assert "http://" not in lock
    assert "https://" not in lock
    assert "--hash=sha256:" in lock


def test_every_top_level_package_of_the_metadata_is_in_its_lock() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    runtime = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["timm"]]
    for wanted, lock in ((runtime, "requirements.lock"), (project["dependency-groups"]["dev"], "tests/requirements.lock")):
        names = {requirement.split("[")[0].split(">")[0].split("=")[0].strip() for requirement in wanted}
        assert names <= set(pins(lock))


@pytest.mark.parametrize("name", LOCKS[1:])
def test_what_runs_is_tested_and_documented_at_its_own_versions(name: str) -> None:
    runtime, more = pins("requirements.lock"), pins(name)
    assert all(runtime[package] == more[package] for package in runtime.keys() & more.keys())


def test_what_runs_needs_no_tool_of_the_tests() -> None:
    assert not {"pytest", "moto", "mypy", "ruff", "tensorboard"} & set(pins("requirements.lock"))


def test_no_file_that_a_run_writes_is_tracked() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert not [
        name for name in tracked if name.startswith(("runs/", ".venv/")) or name.endswith((".db", ".safetensors", ".pyc"))
    ]
