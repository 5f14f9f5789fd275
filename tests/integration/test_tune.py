"""What becomes of trials whose function raises, dies or has no memory in a real Ray Tune, and of those that a session adds."""

import json
import multiprocessing
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.air.execution import FixedResourceManager, ResourceRequest
from ray.util.state import list_actors, list_tasks

from service.cluster.connect import set_ray_environment
from service.cluster.resources import Cluster, Node
from service.config.experiment import load
from service.config.sweep import SweepConfig
from service.runs.driver_log import recording
from service.runs.events import event
from service.runs.outcome import Outcome
from service.runs.plan import Plan
from service.runs.run_log import read_log
from service.runs.stages.assignment import Assignment
from service.sweeps.trials import plan_trials
from service.sweeps.tune import SessionEnding, tune_trials
from service.sweeps.tune_internals import ActorManager, ActorOutOfMemoryError
from tests.integration.conftest import kill, title, wait_until
from tests.run_log import add, events_of
from tests.trainables.jobs import write_able_teacher
from tests.trainables.methods import own_methods
from trainables.rundir import RunDir

pytestmark = pytest.mark.integration


def sweep_in(run_dir: RunDir) -> tuple[SweepConfig, dict[str, Assignment]]:
    """A sweep by asha with three trials, each of an init stage and a student."""
    asha = ["sweep.policy=asha", "sweep.metric=top1_pct", "sweep.space.optim.lr=[0.01, 0.02, 0.03]", "optim.epochs=1"]
    teacher = {"model": "mlp_large", "weights": write_able_teacher(run_dir.root / "teacher.safetensors")}
    distill = {"method": f"{own_methods.__file__}:InitStage", "options": {"InitStage": {"init_epochs": 2}}}
    sections = [f"{name}={json.dumps(section)}" for name, section in (("teacher", teacher), ("distill", distill))]
    resolved = load("digits", [*asha, *sections, "data.path=digits", "tracking.enabled=false", "data.loader_workers=1"])
    cluster, assignments = Cluster((Node("only", 8, 0),)), dict[str, Assignment]()
    for trial in plan_trials(resolved):
        assert trial.resolved is not None
        assignments[trial.id] = Plan.on(trial.resolved.experiment, cluster).assign(
            "student", run_dir.trial(trial.id), {"run": "tiny", "trial": trial.id}
        )
    return resolved.experiment.sweep, assignments


@pytest.fixture
def local_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray on a machine of one core, as we would start it."""
    monkeypatch.setattr(multiprocessing, "cpu_count", lambda: 1)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    set_ray_environment()
    ray.init(address="local", num_cpus=8, log_to_driver=False, include_dashboard=True)
    yield
    ray.shutdown()


def outcome_of(run_dir: RunDir, trial: str) -> Outcome:
    outcome = read_log(run_dir).fold.outcome_of(trial)
    assert outcome is not None
    return outcome


def failed_tasks() -> set[str]:
    """The tasks that Ray's dashboard shows in red."""
    address = ray.get_runtime_context().gcs_address
    return {task.task_id for task in list_tasks(address, filters=[("state", "=", "FAILED")], limit=1000)}


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_trial_that_raises_or_dies_has_failed_whatever_epochs_it_has_and_later_sessions_run_others(
    tmp_path: Path, local_ray: None, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = RunDir(tmp_path)
    config, assignments = sweep_in(run_dir)
    for trial in assignments:
        add(run_dir, event("epoch", f"trials/{trial}/student", step=10, epoch=1.0, metrics={"val/top1_pct": 60.0}))
    run_dir.trial("000").root.mkdir(parents=True)
    run_dir.trial("000").stage("student-init").root.touch()  # in place of a disk that is full

    def run(*trials: str) -> None:
        with recording(run_dir.events) as recorder:
            recorded = {trial: assignments[trial].recorded_by(recorder) for trial in trials}
            tune_trials(config, recorded, run_dir, 2, SessionEnding())

    first = threading.Thread(target=run, args=("000", "001"), daemon=True)
    first.start()
    wait_until(lambda: read_log(run_dir).fold.outcome_of("000"), "end of the trial that raises")
    begun = run_dir.trial("001").stage("student-init").root
    wait_until(lambda: events_of(begun, "stage_begun"), "begin of the one that is to die")
    kill([process for process in psutil.Process().children(recursive=True) if "ray::Trial" in title(process)])
    first.join()
    raised, died = outcome_of(run_dir, "000"), outcome_of(run_dir, "001")
    assert (raised.status, died.status) == ("failed", "failed")
    assert raised.reason.startswith("FileExistsError: ")
    assert died.reason.startswith("the trial's process died: ")
    for outcome in (raised, died):
        assert len(outcome.reason.splitlines()) == 1
        assert Path(outcome.reason.rpartition("see ")[2]).is_file()
    failed = failed_tasks()
    run("002")
    assert outcome_of(run_dir, "002").status == "ok"
    # Ray's dashboard has no red of a healthy trial, and says what the processes are.
    assert failed_tasks() == failed
    listed = list_actors(ray.get_runtime_context().gcs_address, limit=1000, detail=True)
    assert {actor.repr_name for actor in listed if actor.class_name == "Trial"} == {"000", "001", "002"}
    assert "tiny-002-epochs" in {actor.name for actor in listed if actor.class_name == "EpochReports"}
    # As many processes as several trials have at once.
    idle = [ray.remote(num_cpus=0)(threading.Event).remote() for _ in range(12)]
    ray.get([event.is_set.remote() for event in idle])
    assert "worker processes have been started" not in capfd.readouterr().out
    init, student = (run_dir.trial("002").stage(name) for name in ("student-init", "student"))
    assert [line["epoch"] for line in events_of(init.root, "epoch")] == [1.0, 2.0]
    assert events_of(init.root, "summary")
    assert [each["step"] for each in events_of(student.root, "summary")] == [11]
    assert len(events_of(student.root, "stage_begun")) == 1


SPARE_BYTES = 2 << 30


@pytest.fixture
def ray_with_little_memory() -> Iterator[None]:
    """A Ray that kills a process once this machine's are larger by 2 GiB than now."""
    memory = psutil.virtual_memory()
    threshold = (memory.total - memory.available + SPARE_BYTES) / memory.total
    monitor = {"memory_usage_threshold": threshold, "memory_monitor_refresh_ms": 250}
    ray.init(address="local", num_cpus=8, log_to_driver=False, include_dashboard=False, _system_config=monitor)
    yield
    ray.shutdown()


def grow() -> None:
    """Take 64 MiB at a time until this process is killed for it."""
    blocks = [bytearray(b"1") * (64 << 20) for _ in range(2 * SPARE_BYTES >> 26)]
    threading.Event().wait()
    del blocks


class Growing(float):
    """A number that makes each other process that it is sent to grow."""

    def __reduce__(self) -> tuple[Any, ...]:
        return grow_elsewhere, (os.getpid(),)


def grow_elsewhere(pid: int) -> Growing:
    if os.getpid() != pid:
        grow()
    return Growing()


def test_a_process_that_the_memory_monitor_kills_ends_its_trial_alone(
    tmp_path: Path, ray_with_little_memory: None, capfd: pytest.CaptureFixture[str]
) -> None:
    class Grower:
        def grow(self) -> None:
            grow()

    manager, errors = ActorManager(FixedResourceManager({"CPU": 8})), list[Exception]()
    grower = manager.add_actor(Grower, {}, ResourceRequest([{"CPU": 1}]))
    manager.schedule_actor_task(grower, "grow", on_error=lambda _, error: errors.append(error))
    while manager.num_live_actors + manager.num_pending_actors:
        manager.next(1)
    assert isinstance(errors[0], ActorOutOfMemoryError)
    run_dir = RunDir(tmp_path)
    config, assignments = sweep_in(run_dir)
    with recording(run_dir.events) as recorder:
        growing = replace(assignments["000"].recorded_by(recorder), limit_s=Growing())
        tune_trials(config, {"000": growing}, run_dir, 1, SessionEnding())
    outcome = outcome_of(run_dir, "000")
    assert (outcome.status, outcome.failure) == ("oom", "node_out_of_memory")
    assert "ActorOutOfMemoryError" not in capfd.readouterr().err  # which Tune would show with a page on the node's memory
    assert Path(outcome.reason.rpartition("see ")[2]).is_file()
