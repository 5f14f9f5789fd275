"""The CPUs near a GPU, by a tree of files as Linux has it."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from trainables.device.numa import cpus_near

TWO_SOCKETS = {0: "0-3,8-11", 1: "4-7,12-15"}
GPU = "0000:9b:00.0"
ALL = frozenset(range(16))


def _sysfs(root: Path, nodes: Mapping[int, str], gpus: Mapping[str, str]) -> Path:
    for number, cpus in nodes.items():
        folder = root / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    for address, node in gpus.items():
        folder = root / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return root


def test_the_cpus_of_a_gpus_node_are_near(tmp_path: Path) -> None:
    sysfs = _sysfs(tmp_path, TWO_SOCKETS, {"0000:17:00.0": "0", GPU: "1"})
    (sysfs / "devices/system/node/possible").write_text("0-1\n")
    assert cpus_near(GPU, ALL, 8, sysfs) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert cpus_near("0000:17:00.0", ALL, 8, sysfs) == {0, 1, 2, 3, 8, 9, 10, 11}


def test_no_cpu_is_near_that_is_not_allowed(tmp_path: Path) -> None:
    sysfs = _sysfs(tmp_path, TWO_SOCKETS, {GPU: "1"})
    assert cpus_near(GPU, {0, 1, 4, 5}, 2, sysfs) == {4, 5}


@pytest.mark.parametrize(("allowed", "least"), [(ALL, 9), ({0, 1, 4, 5}, 3), ({0, 1}, 1)])
def test_too_few_near_cpus_are_none(tmp_path: Path, allowed: frozenset[int], least: int) -> None:
    assert cpus_near(GPU, allowed, least, _sysfs(tmp_path, TWO_SOCKETS, {GPU: "1"})) is None


def test_nothing_changes_where_all_allowed_cpus_are_near(tmp_path: Path) -> None:
    assert cpus_near(GPU, {4, 5}, 1, _sysfs(tmp_path, TWO_SOCKETS, {GPU: "1"})) is None


@pytest.mark.parametrize(
    ("nodes", "node"),
    [({0: "0-15"}, "0"), (TWO_SOCKETS, "-1"), (TWO_SOCKETS, "2"), (TWO_SOCKETS, "?"), ({0: "0-7", 1: ""}, "1"), ({}, "0")],
    ids=["one node", "unknown", "no such node", "no number", "a node of memory alone", "no nodes"],
)
def test_a_system_that_does_not_say_which_cpus_are_near_has_none(tmp_path: Path, nodes: dict[int, str], node: str) -> None:
    assert cpus_near(GPU, ALL, 1, _sysfs(tmp_path, nodes, {GPU: node})) is None


def test_an_unknown_gpu_has_no_near_cpus(tmp_path: Path) -> None:
    assert cpus_near(GPU, ALL, 1, _sysfs(tmp_path, TWO_SOCKETS, {})) is None
