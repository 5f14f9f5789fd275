"""A model in pipeline stages trains what it trains as a whole: real jobs of several ranks in float64, without batch norm."""

import contextlib
import gc
import itertools
import os
import re
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torchvision.models import get_model

from tests.trainables.jobs import Recorded, config, equal, no_telemetry, relative_difference, train, write_teacher
from trainables.config import TrainConfig
from trainables.distributed.group import Group, gather_objects
from trainables.distributed.rank_pool import RankDiedError, RankPool
from trainables.engine import checkpoint, checkpoint_writer
from trainables.engine.pipeline.build import possible_cuts, with_saved_cut
from trainables.engine.train import build, finish_epoch, train_epoch, wait_for_disk
from trainables.errors import CheckpointError, ModelError, TrainingError
from trainables.methods.distillation_module import DistillationModule
from trainables.models.checkpoint_header import read_checkpoint_header
from trainables.models.weights import load_teacher
from trainables.rules import pipeline_micro_batches

CUTS = {1: None, 2: ["hidden.1"], 3: ["hidden.1", "head"]}


@pytest.fixture(scope="module")
def many(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """More ranks than other tests need, six for the slow ones."""
    slow = any("slow" in item.keywords for item in request.session.items)
    pool = RankPool(6 if slow else 4, fork_server=True)
    yield pool
    pool.close()


def job(
    folder: Path, stages: int, replicas: int, *, micro_batches: int | None = 2, schedule: str = "1f1b", **sections: Any
) -> TrainConfig:
    """Two epochs, with a short last batch, clipping and a teacher."""
    weights = folder.parent / "teacher.safetensors"
    if not weights.exists():
        write_teacher(weights, "mlp_small")
    scale = {"num_workers": stages * replicas, "pipeline_stages": stages, "cut": CUTS[stages]}
    settings = {
        "model": "mlp_large",
        "teacher": {"model": "mlp_small", "weights": str(weights)},
        "optim": {"epochs": 2, "clip_grad_norm": 0.5},
        "scale": {**scale, "micro_batches": micro_batches, "schedule": schedule},
    }
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section} if isinstance(section, dict) else section  # type: ignore[dict-item]
    return config(folder, **settings)


def whole_state(results: list[dict[str, Any]], stages: int) -> dict[str, Tensor]:
    """The parameters of the first replica's stages."""
    return {name: tensor for result in results[:stages] for name, tensor in result["state"].items()}


def saved(folder: Path) -> dict[str, Tensor]:
    """The tensors of the last checkpoint but for the ranks' generators."""
    tensors, _ = checkpoint.read(folder / "checkpoints" / "last.safetensors")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("rng.")}


FAST = [
    pytest.param(2, 1, 4, "1f1b", {}, id="two stages"),
    pytest.param(
        2, 2, 3, "1f1b", {"data": {"path": "synthetic", "synthetic_images": 65, "global_batch_size": 32}}, id="an empty rank"
    ),
    pytest.param(3, 1, 2, "gpipe", {"optim": {"accumulate": 2}}, id="three stages"),
    pytest.param(2, 1, None, "1f1b", {"scale": {"cut": None}}, id="a cut found by timing"),
    pytest.param(2, 1, 2, "1f1b", {"data": {"device_augment": {"mixup": 0.3}, "last_batch": "drop"}}, id="mixup"),
]
ALL = [
    pytest.param(stages, replicas, micro_batches, schedule, {"optim": {"accumulate": accumulate}}, id=f"{stages}x{replicas}")
    for stages in (1, 2, 3)
    for replicas in (1, 2)
    for micro_batches in (1, 2, 3, 4)
    for schedule in ("1f1b", "gpipe")
    for accumulate in (1, 3)
]
OTHERS = [
    *ALL,
    pytest.param(2, 2, 1, "gpipe", {"optim": {"name": "adamw", "lr": 0.01, "nesterov": False}}, id="one micro-batch"),
]
SLOW = [pytest.param(*each.values, id=each.id, marks=pytest.mark.slow) for each in OTHERS]


@pytest.mark.parametrize(("stages", "replicas", "micro_batches", "schedule", "sections"), [*FAST, *SLOW])
def test_stages_train_what_one_process_does_to_1e_9(
    many: RankPool, tmp_path: Path, stages: int, replicas: int, micro_batches: int | None, schedule: str, sections: dict[str, Any]
) -> None:
    alone = many.run(1, train, job(tmp_path / "alone", 1, 1, **sections))
    settings = job(tmp_path / "stages", stages, replicas, micro_batches=micro_batches, schedule=schedule, **sections)
    found = many.run(stages * replicas, train, settings)
    assert relative_difference(whole_state(alone, 1), whole_state(found, stages)) < 1e-9
    starts = [results[0]["calls"][0][2] for results in (alone, found)]
    assert ["micro_batches" in start for start in starts] == [False, stages > 1]
    for replica in range(1, replicas):
        assert equal(whole_state(found[replica * stages :], stages), whole_state(found, stages))
    assert relative_difference(saved(tmp_path / "alone"), saved(tmp_path / "stages")) < 1e-9
    (before,), (after,) = ([row for row in results[0]["progress"].history if row["epoch"] == 2] for results in (alone, found))
    for name in (
        "val/top1_pct",
        "val/loss",
        "val/num_images",
        "epoch/train/loss",
        "epoch/train/distill_loss",
        "epoch/train/top1_pct",
    ):
        assert after[name] == pytest.approx(before[name], rel=1e-9), name


def test_a_job_resumed_with_other_stages_and_replicas_or_none_goes_on_with_the_same_numbers(
    many: RankPool, tmp_path: Path
) -> None:
    sections = {"train": {"checkpoint_every": 3, "log_every": 3}, "optim": {"epochs": 3, "decay_norm_and_bias": False}}
    whole = many.run(1, train, job(tmp_path / "whole", 1, 1, **sections))
    for die_after, (stages, replicas) in ((5, (2, 1)), (6, (3, 1)), (7, (1, 2)), (None, (2, 2))):
        settings = job(tmp_path / "pieces", stages, replicas, **sections)
        found = many.run(stages * replicas, train, settings, die_after)
        assert found[0]["died"] is (die_after is not None)
        shards = list((tmp_path / "pieces" / "checkpoints").glob("last.*.safetensors"))
        assert len(shards) == stages - 1, "those of another number of stages are removed"
    assert relative_difference(whole_state(whole, 1), whole_state(found, 2)) < 1e-9
    assert relative_difference(saved(tmp_path / "whole"), saved(tmp_path / "pieces")) < 1e-9


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_job_resumed_on_the_same_stages_ends_with_the_same_bits(many: RankPool, tmp_path: Path, precision: str) -> None:
    sections = {
        "model": "resnet8",
        "precision": precision,
        "data": {"path": "synthetic", "synthetic_images": 70, "image_size": 16, "global_batch_size": 32},
        "train": {"checkpoint_every": 2, "log_every": 1},
        "scale": {"cut": ["layer2"]},
        "teacher": None,
        "distill": None,
    }
    whole = many.run(4, train, job(tmp_path / "whole", 2, 2, **sections))
    assert many.run(4, train, job(tmp_path / "pieces", 2, 2, **sections), 5)[0]["died"]
    pieces = many.run(4, train, job(tmp_path / "pieces", 2, 2, **sections))
    assert equal(whole_state(whole, 2), whole_state(pieces, 2))
    assert equal(saved(tmp_path / "whole"), saved(tmp_path / "pieces"))


def train_until_killed(group: Group, settings: TrainConfig, rank: int, function: str) -> None:
    """Kills this rank's process as it calls a function of the checkpoint writer for the second checkpoint."""
    calls, original = itertools.count(), getattr(checkpoint_writer, function)

    def kill_or_call(*arguments: Any, **options: Any) -> Any:
        if group.rank == rank and next(calls):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_writer, function, kill_or_call)
        train(group, settings)


@pytest.mark.parametrize(
    ("rank", "function", "step"),
    [
        pytest.param(1, "write_packed", 2, id="as one stage writes its shard"),
        pytest.param(0, "write_packed", 2, id="between the shards and the file that names them", marks=pytest.mark.slow),
        pytest.param(0, "remove_shards", 4, id="before the earlier shards are removed"),
    ],
)
def test_a_kill_leaves_the_earlier_checkpoint_or_the_new_one(
    many: RankPool, tmp_path: Path, rank: int, function: str, step: int
) -> None:
    sections = {"train": {"checkpoint_every": 2, "log_every": 1}}
    whole = many.run(2, train, job(tmp_path / "whole", 2, 1, **sections))
    with pytest.raises(RankDiedError):
        many.run(2, train_until_killed, job(tmp_path / "killed", 2, 1, **sections), rank, function)
    assert checkpoint.read_metadata(tmp_path / "killed" / "checkpoints" / "last.safetensors")["progress"]["step"] == step
    resumed = many.run(2, train, job(tmp_path / "killed", 2, 1, **sections))
    assert equal(whole_state(whole, 2), whole_state(resumed, 2))
    assert equal(saved(tmp_path / "whole"), saved(tmp_path / "killed"))
    files = sorted(path.name.split(".") for path in (tmp_path / "killed" / "checkpoints").glob("[!.]*"))
    assert [[name, *rest[1:]] for name, *rest in files] == [
        ["best"],
        ["last", "1", "safetensors"],
        ["last"],
    ], "the best one is one file, and nothing else is left"


def best_while_training(group: Group, settings: TrainConfig) -> tuple[list[str], float]:
    """The files of the best checkpoint before the end, and how far a teacher with its weights is from it."""
    with contextlib.closing(build(settings, group, Recorded(), no_telemetry)) as running:
        train_epoch(running)
        finish_epoch(running)
        wait_for_disk(running)
        gather_objects(None, group)
        path = running.stage.best
        tensors, about = checkpoint.read(path)
        weights = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
        model = load_teacher("mlp_large", str(path), image_size=8, classes=about["classes"], seed=1)
        return about["shards"], relative_difference(model.state_dict(), {name: value.float() for name, value in weights.items()})


def test_a_checkpoint_without_one_of_its_shards_is_refused_in_one_line(many: RankPool, tmp_path: Path) -> None:
    many.run(2, train, job(tmp_path / "job", 2, 1))
    last = tmp_path / "job" / "checkpoints" / "last.safetensors"
    (shard,) = last.parent.glob("last.*.1.safetensors")
    shard.unlink()
    for read in (read_checkpoint_header, checkpoint.read):
        with pytest.raises(CheckpointError, match=re.escape(shard.name)) as caught:
            read(last)
        assert "\n" not in str(caught.value)


def test_the_best_checkpoint_is_read_from_its_shards_while_the_job_trains(many: RankPool, tmp_path: Path) -> None:
    for shards, difference in many.run(2, best_while_training, job(tmp_path / "job", 2, 1)):
        assert [name.split(".")[2] for name in shards] == ["1"]
        assert difference == 0


def test_a_resumed_job_keeps_its_cut_where_that_is_open(many: RankPool, tmp_path: Path) -> None:
    sections = {"train": {"checkpoint_every": 2, "log_every": 1}}
    assert many.run(2, train, job(tmp_path / "run", 2, 1, **sections, scale={"cut": ["head"]}), 5)[0]["died"]
    many.run(2, train, job(tmp_path / "run", 2, 1, **sections, scale={"cut": None}))
    last = tmp_path / "run" / "checkpoints" / "last.safetensors"
    assert checkpoint.read(last)[1]["pipeline"] == {"pipeline_stages": 2, "cut": ["head"]}
    assert with_saved_cut(job(tmp_path / "other", 3, 1, scale={"cut": None}), last).scale.cut is None, "of other stages"


def test_without_a_number_there_are_four_micro_batches_a_stage_and_at_most_one_a_sample(tmp_path: Path) -> None:
    for batch, accumulate, expected in ((32, 1, 8), (32, 2, 8), (12, 2, 6), (6, 1, 6)):
        sections = {"data": {"global_batch_size": 2 * batch}, "optim": {"accumulate": accumulate}}
        assert pipeline_micro_batches(job(tmp_path / "run", 2, 2, micro_batches=None, **sections)) == expected


def test_a_stage_with_nothing_to_train_is_refused(tmp_path: Path) -> None:
    settings = job(tmp_path / "run", 3, 1, model="resnet18", scale={"cut": ["maxpool", "layer1"]})
    with pytest.raises(ModelError, match=r"scale\.cut: the stage that begins with maxpool has no parameters to train"):
        possible_cuts(settings, DistillationModule(get_model("resnet18", num_classes=10)))


def test_the_last_stages_fill_and_read_a_cache_of_the_teachers_logits(many: RankPool, tmp_path: Path) -> None:
    cached = {
        "data": {"path": "synthetic", "synthetic_images": 65, "global_batch_size": 32},
        "teacher": {"cache": str(tmp_path / "c")},
    }
    images = {}
    for folder, stages, replicas in (("fills", 2, 2), ("reads", 2, 2), ("alone", 1, 1)):
        found = many.run(stages * replicas, train, job(tmp_path / folder, stages, replicas, **cached))
        images[folder] = [metrics["epoch/train/teacher_images"] for kind, _, metrics in found[0]["calls"] if kind == "epoch"]
    assert images == {"fills": [65.0, 0.0], "reads": [0.0, 0.0], "alone": [0.0, 0.0]}
    assert relative_difference(saved(tmp_path / "alone"), saved(tmp_path / "reads")) < 1e-9


def test_models_in_channels_last_and_with_auxiliary_heads_train_in_stages(many: RankPool, tmp_path: Path) -> None:
    """With one micro-batch, in which batch norms see the whole batch."""
    sections = {
        "model": "googlenet",
        "data": {"path": "synthetic", "synthetic_images": 9, "image_size": 64, "global_batch_size": 4, "last_batch": "drop"},
        "train": {"channels_last": True},
        "optim": {"epochs": 1},
        "teacher": None,
        "distill": None,
    }
    alone = many.run(1, train, job(tmp_path / "alone", 1, 1, **sections))
    found = many.run(2, train, job(tmp_path / "stages", 2, 1, micro_batches=1, **sections, scale={"cut": ["inception4a"]}))
    names = whole_state(found, 2).keys()
    assert names == whole_state(alone, 1).keys()
    assert any("aux" in name for name in names)


def test_last_stages_that_share_a_sharded_teacher_train_the_bits_of_whole_ones(many: RankPool, tmp_path: Path) -> None:
    """One replica has fewer micro-batches of the last batch than the other, and runs the teacher as often."""
    data = {"path": "synthetic", "synthetic_images": 35, "global_batch_size": 32}
    whole, sharded = (
        many.run(4, train, job(tmp_path / each, 2, 2, data=data, teacher={"placement": each})) for each in ("whole", "sharded")
    )
    for expected, found in zip(whole, sharded, strict=True):
        assert equal(expected["state"], found["state"])


def images_sent(group: Group, settings: TrainConfig) -> int:
    """By this rank, in an evaluation."""
    sent = []
    with contextlib.closing(build(settings, group, Recorded(), no_telemetry)) as job, pytest.MonkeyPatch.context() as patch:
        isend = dist.isend
        patch.setattr(dist, "isend", lambda tensor, **options: sent.append(tensor) or isend(tensor, **options))
        for _ in job.val_loader.epoch(0):
            pass
    return len(sent)


def test_an_evaluation_sends_no_images_to_the_last_stage(many: RankPool, tmp_path: Path) -> None:
    assert many.run(2, images_sent, job(tmp_path / "job", 2, 1)) == [0, 0]


def test_a_loss_that_is_not_finite_ends_all_stages_with_one_line(many: RankPool, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="the loss is not finite at step"):
        many.run(4, train, job(tmp_path / "stages", 2, 2, optim={"lr": 1e200, "clip_grad_norm": None}))


def bytes_of_job(group: Group, settings: TrainConfig) -> int:
    """Of the tensors that this process has besides those of earlier tests once a job has trained: of parameters, momenta, …"""
    before = bytes_of_tensors()
    with contextlib.closing(build(settings, group, Recorded(), no_telemetry)) as job:
        train_epoch(job)
        return bytes_of_tensors() - before


def bytes_of_tensors() -> int:
    gc.collect()
    with warnings.catch_warnings(action="ignore"):  # of what else is asked for its class
        tensors = [each for each in gc.get_objects() if isinstance(each, Tensor) and each.device.type == "cpu"]
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_a_rank_keeps_its_own_stage_alone(many: RankPool, tmp_path: Path) -> None:
    sections = {"data": {"global_batch_size": 8, "path": "synthetic", "synthetic_images": 32}, "teacher": None, "distill": None}
    (alone,) = many.run(1, bytes_of_job, job(tmp_path / "alone", 1, 1, **sections))
    stages = many.run(2, bytes_of_job, job(tmp_path / "stages", 2, 1, **sections))
    assert max(stages) < 0.65 * alone  # the second stage has 0.58 of the parameters
