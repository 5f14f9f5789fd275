"""The storm itself, in small: its faults strike, and its oracle finds what is lost."""

from __future__ import annotations

import http.server
import json
import random
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.faults.storm.oracle import stage_losses
from tests.faults.storm.process_tier import DISK_FULL, KILL_AT_WRITE, ProcessTier, small_disk, training
from tests.faults.storm.proxy import FAULTS, Plan, proxy_to
from tests.faults.storm.table import Fault, Table, Trial
from tests.trainables.jobs import config, train_on_record
from trainables.rundir import StageDir, lines_after


@pytest.mark.processes
def test_a_training_that_is_killed_at_writes_and_whose_disk_fills_loses_nothing(tmp_path: Path) -> None:
    # This seed strikes writes that every job has: of a checkpoint, of the result. How many appends records take varies.
    with small_disk(tmp_path / "disk") as can_fill:
        tier = ProcessTier(tmp_path / "disk", random.Random(1), can_fill, max_faults=1)
        workload = training("train", tmp_path, 1)
        kinds = [KILL_AT_WRITE, *([DISK_FULL] if can_fill else [])]
        trials = [tier.trial(workload, [kind]) for kind in kinds]
    assert [trial.losses for trial in trials] == [()] * len(kinds)
    assert [{fault.kind for fault in trial.faults} for trial in trials] == [{kind} for kind in kinds]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> StageDir:
    """A stage that nothing has struck."""
    stage = StageDir(tmp_path_factory.mktemp("whole") / "student")
    train_on_record(config(stage.root, teacher=None, optim={"epochs": 1}))
    return stage


def test_a_lost_record_a_doubled_one_and_a_changed_tensor_are_found(whole: StageDir, tmp_path: Path) -> None:
    lines = [line.record or {} for line in lines_after(whole.root / "events.jsonl", 0)]
    assert not list(stage_losses(whole, whole))
    struck = StageDir(shutil.copytree(whole.root, tmp_path / "lost"))

    def write(records: list[dict[str, Any]]) -> None:
        (struck.root / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in records))

    step = next(line for line in lines if line["kind"] == "step")
    write([line for line in lines if line is not step])
    assert [loss.partition(",")[0] for loss in stage_losses(whole, struck)] == ["1 records are lost"]
    write([*lines, step])
    assert any("twice" in loss for loss in stage_losses(whole, struck))
    epoch = next(line for line in lines if line["kind"] == "epoch")
    epoch["metrics"] = epoch["metrics"] | {"epoch/node0/cpu_pct": 1.0}  # telemetry, where a sample fell into the epoch
    write(lines)
    assert not list(stage_losses(whole, struck))
    epoch["metrics"] = epoch["metrics"] | {"val/loss": -1.0}
    write(lines)
    assert [loss.partition(" has")[0] for loss in stage_losses(whole, struck)] == [
        f"records differ: ['epoch', {epoch['step']}, 1.0]"
    ]
    write([line for line in lines if line["kind"] != "summary"])
    assert "no summary" in list(stage_losses(whole, struck))
    struck = StageDir(shutil.copytree(whole.root, tmp_path / "changed"))
    tensors = load_file(struck.last)
    name = next(name for name in tensors if name.startswith("model."))
    tensors[name] += 1e-12
    save_file(tensors, struck.last)
    assert list(stage_losses(whole, struck)) == [f"last.safetensors: 1 of {len(tensors)} tensors differ, such as {name}"]


def test_faults_are_counted_by_kind_and_workload_and_losses_by_trial() -> None:
    killed, stopped = Fault("kill", "train"), Fault("stop", "sweep")
    table = Table([Trial("train", (killed, killed)), Trial("sweep", (stopped, Fault("kill", "sweep")), ("a record",))])
    assert (table.num_faults, table.num_losses) == (4, 1)
    assert list(table.markdown())[2:] == ["| kill | 2 | 1 | 3 | 1 |", "| stop |  | 1 | 1 | 1 |", "| all | 2 | 2 | 4 | 1 |"]


class _Upstream(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"x" * 1000)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


@pytest.fixture
def upstream() -> Iterator[int]:
    """The port of a server whose every answer is 1000 times x."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Upstream) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield int(server.server_address[1])
        server.shutdown()


def test_each_fault_of_the_proxy_spoils_one_answer_and_no_other(upstream: int) -> None:
    with proxy_to(upstream) as proxy:
        for kind in FAULTS.keys() - {"10 s a call", "bytes that trickle"}:
            proxy.plan = Plan(random.Random(0), [kind], share=1.0, most=1)
            try:
                with urllib.request.urlopen(proxy.uri, timeout=20) as response:
                    spoiled = response.read() != b"x" * 1000
            except (urllib.error.URLError, HTTPException, OSError):
                spoiled = True
            assert spoiled, kind
            assert proxy.plan.struck == [kind]
            with urllib.request.urlopen(proxy.uri, timeout=20) as response:
                assert response.read() == b"x" * 1000


def test_the_seed_decides_what_is_altered(upstream: int) -> None:
    def altered(seed: int) -> bytes:
        proxy.plan = Plan(random.Random(seed), ["a bit altered"], share=1.0, most=1)
        with urllib.request.urlopen(proxy.uri, timeout=20) as response:
            return bytes(response.read())

    with proxy_to(upstream) as proxy:
        assert altered(1) == altered(1)
        assert altered(1) != altered(2)
