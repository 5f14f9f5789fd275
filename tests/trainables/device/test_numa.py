"""The CPUs near a GPU, by a tree of files as Linux has it."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from trainables.device.numa import cpus_near

FIRST, SECOND = "0-3,8-11", "4-7,12-15"
"""The CPUs of two sockets."""
GPU = "0000:9b:00.0"
ALL = frozenset(range(16))


def _sysfs(root: Path, gpus: Mapping[str, str]) -> Path:
    for address, cpus in gpus.items():
        folder = root / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(f"{cpus}\n")
    return root


def test_the_cpus_of_a_gpus_node_are_near(tmp_path: Path) -> None:
    sysfs = _sysfs(tmp_path, {"0000:17:00.0": FIRST, GPU: SECOND})
    assert cpus_near(GPU, ALL, 8, sysfs) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert cpus_near("0000:17:00.0", ALL, 8, sysfs) == {0, 1, 2, 3, 8, 9, 10, 11}


def test_no_cpu_is_near_that_is_not_allowed(tmp_path: Path) -> None:
    sysfs = _sysfs(tmp_path, {GPU: SECOND})
    assert cpus_near(GPU, {0, 1, 4, 5}, 2, sysfs) == {4, 5}


@pytest.mark.parametrize(("allowed", "least"), [(ALL, 9), ({0, 1, 4, 5}, 3), ({0, 1}, 1)])
def test_too_few_near_cpus_are_none(tmp_path: Path, allowed: frozenset[int], least: int) -> None:
    assert cpus_near(GPU, allowed, least, _sysfs(tmp_path, {GPU: SECOND})) is None


def test_nothing_changes_where_all_allowed_cpus_are_near(tmp_path: Path) -> None:
    assert cpus_near(GPU, {4, 5}, 1, _sysfs(tmp_path, {GPU: SECOND})) is None


@pytest.mark.parametrize("cpus", ["0-15", "?", ""], ids=["one node, or unknown", "no numbers", "a node of memory alone"])
def test_a_system_that_does_not_say_which_cpus_are_near_has_none(tmp_path: Path, cpus: str) -> None:
    assert cpus_near(GPU, ALL, 1, _sysfs(tmp_path, {GPU: cpus})) is None


def test_an_unknown_gpu_has_no_near_cpus(tmp_path: Path) -> None:
    assert cpus_near(GPU, ALL, 1, _sysfs(tmp_path, {})) is None
