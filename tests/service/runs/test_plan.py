"""What stages run on once every `auto` is resolved, and what they reserve."""

from pathlib import Path

import pytest

from service.cluster.resources import Cluster, Node, Reservation
from service.config.experiment import load
from service.runs.plan import Plan
from service.runs.stored.stored_runs import run_folder
from trainables.errors import ExperimentError
from trainables.rundir import RunDir


def cluster(*nodes: tuple[float, float], cores: int | None = None) -> Cluster:
    return Cluster(tuple(Node(str(i), cpus, gpus) for i, (cpus, gpus) in enumerate(nodes)), real_cpus=cores)


def test_only_students_have_a_service_and_an_experiment_says_what_it_takes(tmp_path: Path) -> None:
    overrides = ["teacher.service=2", "scale.cpus_per_worker=2", "data.loader_workers=1"]
    plan = Plan.on(load("digits", overrides).experiment, cluster((16, 0)))
    assert plan.reservation() == Reservation(1, 3, service=Reservation(2, 2, unit="actors"))
    assert plan.describe(cluster((16, 0))).endswith("on 1 node, and 2 for the teacher")
    student = plan.assign("student", RunDir(tmp_path), {}, "/teacher", ("first", "second"))
    assert (student.config.teacher_actors, student.config.teacher and student.config.teacher.service) == (("first", "second"), 2)
    assert student.reservation == plan.reservation()
    assert plan.assign("teacher", RunDir(tmp_path), {}).config.teacher is None
    refusal = Plan.on(load("digits", overrides).experiment, cluster((6, 0))).refusal(cluster((6, 0)))
    assert refusal is not None
    assert refusal.endswith(": lower scale.num_workers or data.loader_workers, or teacher.service")


def test_an_assistant_learns_from_the_network_and_its_student_from_the_service(tmp_path: Path) -> None:
    overrides = ["teacher.service=1", "assistants=[{model: convnet_small}]"]
    experiment = load("digits", overrides).experiment
    stages = {name: experiment.stage(name, tmp_path, {}, "/weights").teacher for name in ("assistant1", "student")}
    assert {name: (t.model, t.service) for name, t in stages.items() if t} == {
        "assistant1": ("convnet_large", None),
        "student": ("convnet_small", 1),
    }


def test_a_stage_whose_methods_have_an_init_stage_comes_with_it(tmp_path: Path) -> None:
    overrides = [
        "distill.method=ft",
        "distill.options={ft: {init_epochs: 3, init_lr: 0.2}}",
        "assistants=[{model: convnet_small}]",
    ]
    overrides += ["optim.lr_scaling=linear", "optim.warmup_epochs=1", "train.until_top1_pct=90"]
    plan = Plan.on(load("digits", overrides).experiment, cluster((16, 0)))
    for name in ("assistant1", "student"):
        assignment = plan.assign(name, RunDir(tmp_path), {"run": "r"}, "/teacher")
        assert assignment.init is not None
        init, stage = assignment.init.config, RunDir(tmp_path).stage(f"{name}-init")
        assert (init.stage, init.output_dir, init.labels) == (f"{name}-init", str(stage.root), {"run": "r"})
        assert assignment.config.init_checkpoint == str(stage.last)
        assert (init.optim.epochs, init.optim.lr, init.optim.lr_scaling, init.optim.schedule) == (3, 0.2, "none", "constant")
        assert (init.optim.warmup_epochs, init.train.until_top1_pct) == (0, None)
        assert assignment.init.reservation == assignment.reservation
    timed = Plan.on(load("digits", [*overrides[:2], "train.max_steps=5"]).experiment, cluster((16, 0)))
    assert timed.assign("student", RunDir(tmp_path), {}, "/teacher").init is None
    assert plan.assign("teacher", RunDir(tmp_path), {}).init is None


def test_auto_takes_the_cores_that_training_leaves(tmp_path: Path) -> None:
    for written in ("auto", "2"):
        plan = Plan.on(load("digits", [f"data.loader_workers={written}"]).experiment, cluster((3, 0), cores=3))
        assert plan.assign("student", RunDir(tmp_path), {}).config.data.loader_workers == 2


def test_pipeline_stages_and_an_evaluator_in_an_object_store_are_refused_where_checkpoints_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYDISTILL_COPIES", str(tmp_path / "copies"))
    stored, stages = RunDir(run_folder("s3://bucket/runs/one")), ["scale.num_workers=2", "scale.pipeline_stages=2"]
    plan = Plan.on(load("digits", stages).experiment, cluster((16, 0)))
    assert plan.assign("student", RunDir(tmp_path), {}, "/teacher").config.run_store is None
    with pytest.raises(ExperimentError, match=r"in an object store: give --out or --runs a folder") as caught:
        plan.assign("student", stored, {}, "/teacher")
    assert "\n" not in str(caught.value)
    evaluated = Plan.on(load("digits", ["eval.asynchronous=true"]).experiment, cluster((16, 0)))
    with pytest.raises(ExperimentError, match=r"^eval.asynchronous: .* or write eval.asynchronous: false$"):
        evaluated.assign("student", stored, {}, "/teacher")
    timing = Plan.on(load("digits", [*stages, "train.max_steps=3"]).experiment, cluster((16, 0)))
    assert timing.assign("student", stored, {}, "/teacher").config.run_store is not None
