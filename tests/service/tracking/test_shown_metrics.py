"""Which metrics MLflow shows, held against those of a real training."""

from pathlib import Path

from service.tracking.shown_metrics import HARDWARE, of_epoch, of_summary
from tests.trainables.jobs import config, train
from trainables.distributed.rank_pool import RankPool


def test_a_run_with_a_teacher_and_a_student_has_at_most_40_metrics_rounded_to_what_they_mean(
    ranks: RankPool, tmp_path: Path
) -> None:
    stages = {"teacher/": config(tmp_path / "t", teacher=None), "": config(tmp_path / "s", optim={"epochs": 2})}
    shown, num_measured = {}, 0
    for prefix, settings in stages.items():
        calls = ranks.run(2, train, settings)[0]["calls"]
        epochs = [of_epoch(metrics, prefix) for kind, _, metrics in calls if kind == "epoch"]
        summary = calls[-1][2]
        final = of_summary(summary, prefix, followed=True)
        assert not epochs[-1].keys() & final.keys()  # each number once a step
        alone = {name: value for name, value in of_summary(summary, prefix).items() if not name.startswith("system/")}
        assert {name: (epochs[-1] | final)[name] for name in alone} == alone  # the last epoch has the final values
        shown |= epochs[-1] | final
        num_measured += len({name for _, _, metrics in calls for name in metrics})
    assert num_measured > 150
    assert 30 <= len(shown) <= 40
    assert {"images_per_s", "top1_pct", "val_loss", "train/loss", "phase/data_ms", "teacher/top1_pct"} < shown.keys()
    assert not [name for name in shown if name.endswith(("_min_ms", "_max_ms", "_p50_ms", "_p95_ms")) or "loader/" in name]
    assert shown["top1_pct"] == round(summary["top1_pct"], 2) != summary["top1_pct"]


def test_a_training_whose_steps_are_timed_has_all_in_its_final_numbers_and_what_trials_are_compared_by_first() -> None:
    summary = {"phase/data_ms": 1.25444, "images_per_s": 94.0845, "loader/batch_ms": 2.00044, "node0/cpu_pct": 50.04}
    assert list(of_summary(summary, followed=True, first="loader/batch_ms").items()) == [
        ("loader/batch_ms", 2.0),
        ("images_per_s", 94.1),
        ("phase/data_ms", 1.25),
        ("system/cpu_utilization_percentage", 50.0),
    ]


def test_the_hardware_has_the_names_and_units_of_mlflows_own_monitor() -> None:
    epoch = {"epoch/node0/cpu_pct": 50.0, "epoch/node0/memory_mib": 1000.0, "epoch/node0/gpu1/memory_mib": 2000.0}
    epoch |= {"epoch/node0/gpu1/util_pct": 99.0, "epoch/node0/gpu1/power_w": 300.0, "epoch/node0/gpu1/util_max_pct": 100.0}
    assert of_epoch(epoch, "") == {
        "system/cpu_utilization_percentage": 50.0,
        "system/system_memory_usage_megabytes": 1048.6,
        "system/gpu_1_memory_usage_megabytes": 2097.2,
        "system/gpu_1_utilization_percentage": 99.0,
        "system/gpu_1_power_usage_watts": 300.0,
    }
    assert of_epoch(epoch, "teacher/") == {}
    several = of_epoch({"epoch/node0/cpu_pct": 50.0, "epoch/node12/gpu0/util_pct": 7.0}, "")
    assert several == {
        "system/node_0/cpu_utilization_percentage": 50.0,
        "system/node_12/gpu_0_utilization_percentage": 7.0,
    }


def test_those_names_are_in_mlflows_monitors() -> None:
    from mlflow.system_metrics.metrics import gpu_monitor
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor

    monitor = CPUMonitor()
    monitor.collect_metrics()
    of_gpus = Path(gpu_monitor.__file__).read_text()
    for ours, (name, _) in HARDWARE.items():
        assert f"_{{i}}_{name}" in of_gpus if ours.startswith("gpu/") else name in monitor.aggregate_metrics()
