"""A job that dies anywhere continues as if it had not: bit for bit on the same world size, in the same order on another."""

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from tests.trainables.data.image_folder import write_images
from tests.trainables.jobs import config, equal, relative_difference, save, train, write_teacher
from trainables.config import DataConfig, EvaluateConfig, TrainConfig
from trainables.data.identity import data_identity
from trainables.data.order import sample_at
from trainables.data.source import open_source
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine import checkpoint
from trainables.engine.checkpoint import CheckpointState, Progress
from trainables.engine.evaluate import evaluate_checkpoint
from trainables.engine.optim import learning_rate
from trainables.errors import CheckpointError, DataError
from trainables.models.checkpoint_header import META_KEY, read_checkpoint_header
from trainables.models.registry import build_model
from trainables.models.weights import load_teacher
from trainables.rundir import StageDir


def interrupted(ranks: RankPool, folder: Path, world_sizes: list[int], die_after: int, **settings: object) -> dict[str, object]:
    """Train, dying at every try but the last; each try on its own world size."""
    for number, world_size in enumerate(world_sizes):
        last = number == len(world_sizes) - 1
        results = ranks.run(world_size, train, config(folder, **settings), None if last else die_after)
        assert results[0]["died"] is not last
    return results[0]


@pytest.mark.parametrize(
    ("precision", "world_size"),
    [("fp32", 1), ("fp32", 2), ("fp16", 1), pytest.param("fp16", 2, marks=pytest.mark.slow)],
)
def test_a_resumed_job_ends_with_the_same_bits(ranks: RankPool, tmp_path: Path, world_size: int, precision: str) -> None:
    settings = {
        "model": "convnet_small",
        "precision": precision,
        "teacher": {"weights": write_teacher(tmp_path / "t.safetensors")},
        "data": {"global_batch_size": 128, "last_batch": "drop"},
        "optim": {"epochs": 3, "lr": 0.05},
        "train": {"checkpoint_every": 3, "log_every": 2},
    }
    whole = ranks.run(world_size, train, config(tmp_path / "whole", **settings))[0]
    pieces = interrupted(ranks, tmp_path / "pieces", [world_size] * 4, 9, **settings)
    assert equal(whole["state"], pieces["state"])
    histories = [
        [{k: v for k, v in row.items() if not k.endswith("_s")} for row in r["progress"].history] for r in (whole, pieces)
    ]
    assert histories[0] == histories[1]
    tensors = [checkpoint.read(tmp_path / name / "checkpoints" / "last.safetensors")[0] for name in ("whole", "pieces")]
    assert equal(*tensors)


def test_a_job_on_several_sets_goes_on_inside_an_epoch_and_inside_their_passes_with_the_same_bits(
    ranks: RankPool, tmp_path: Path
) -> None:
    settings = {
        "precision": "fp32",
        "teacher": {"weights": write_teacher(tmp_path / "t.safetensors")},
        "data": {
            "synthetic_images": 130,
            "more": [{"path": "synthetic", "share": 0.2, "labels": False}, {"path": "digits", "share": 0.3}],
        },
        "optim": {"epochs": 2},
        "train": {"checkpoint_every": 7, "log_every": 5},
    }
    whole = ranks.run(1, train, config(tmp_path / "whole", **settings))[0]
    pieces = interrupted(ranks, tmp_path / "pieces", [1] * 3, 4, **settings)
    assert equal(whole["state"], pieces["state"])
    tensors = [checkpoint.read(tmp_path / name / "checkpoints" / "last.safetensors")[0] for name in ("whole", "pieces")]
    assert equal(*tensors)


def test_a_job_resumed_on_another_world_size_sees_the_same_samples(ranks: RankPool, tmp_path: Path) -> None:
    settings = {
        "teacher": {"weights": write_teacher(tmp_path / "t.safetensors")},
        "optim": {"epochs": 2},
        "train": {"checkpoint_every": 4},
    }
    whole = ranks.run(1, train, config(tmp_path / "whole", **settings))[0]
    pieces = interrupted(ranks, tmp_path / "pieces", [1, 3, 2], 4, **settings)
    assert relative_difference(whole["state"], pieces["state"]) < 1e-9


def test_images_that_were_skipped_before_a_death_are_counted_after_it(ranks: RankPool, tmp_path: Path) -> None:
    for split, bad in (("train", range(0, 16, 2)), ("val", ())):
        for number in range(16):
            file = tmp_path / "data" / split / "ab"[number % 2] / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (number, 0, 0)).save(file) if number not in bad else file.write_bytes(b"broken")
    settings = {
        "teacher": None,
        "data": {"path": str(tmp_path / "data"), "global_batch_size": 2, "max_bad": 0.5},
        "train": {"checkpoint_every": 1, "log_every": 1},
    }
    whole = ranks.run(2, train, config(tmp_path / "whole", **settings))[0]
    pieces = interrupted(ranks, tmp_path / "pieces", [2, 2], 7, **settings)
    assert whole["progress"].history[0]["epoch/skipped_images"] == 8
    assert pieces["progress"].history[0]["epoch/skipped_images"] == 8
    assert pieces["progress"].skipped == {}
    assert equal(whole["state"], pieces["state"])


def test_bad_images_that_pass_the_limit_only_together_stop_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    of_rank = sample_at(3, 0, np.arange(16), 16).reshape(8, 2)  # the samples of each global batch, one a rank
    bad = (of_rank[0, 0], of_rank[3, 1])
    for split in ("train", "val"):
        for number in range(16):
            file = tmp_path / "data" / split / "a" / f"{number:02}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8)).save(file) if split == "val" or number not in bad else file.write_bytes(b"broken")
    data = {"path": str(tmp_path / "data"), "global_batch_size": 2}
    with pytest.raises(
        DataError, match=r"^2 unreadable .* more than the 1 of 16 that data.max_bad=0.001 allows: train/a/"
    ) as caught:
        ranks.run(2, train, config(tmp_path / "out", teacher=None, data=data))
    assert all(f"train/a/{number:02}.png (not an image)" in str(caught.value) for number in bad)
    one = ranks.run(2, train, config(tmp_path / "one", teacher=None, data={**data, "max_bad": 0.125}))
    assert [result["progress"].history[0]["epoch/skipped_images"] for result in one] == [2, 2]


def schedule_job(folder: Path, images: Path, **sections: object) -> TrainConfig:
    data = {"path": str(images), "global_batch_size": 4}
    settings = {"data": data, "optim": {"epochs": 4}, "train": {"checkpoint_every": 1, "log_every": 1}, **sections}
    return config(folder, teacher=None, **settings)


def test_a_training_goes_on_with_other_data_only_where_that_is_accepted_and_then_by_its_share_of_epochs(tmp_path: Path) -> None:
    images, group = write_images(tmp_path / "images", 8), Group()  # 16 images: 4 steps an epoch
    # Dies in the third epoch, at its second step.
    assert train(group, schedule_job(tmp_path / "job", images), 1 + 2 * (4 + 1) + 2)["died"]
    write_images(images, 12)  # 6 steps an epoch
    with pytest.raises(DataError, match=r"^checkpoint .*last.* trained on other data: train had 16 images and has 24: restore"):
        train(group, schedule_job(tmp_path / "job", images))
    data = DataConfig(path=str(images))
    accepted = data_identity(open_source(data, "train"), open_source(data, "val"))
    resumed = train(group, schedule_job(tmp_path / "job", images, accepted_data=accepted), 5)
    assert resumed["died"]
    ended = train(group, schedule_job(tmp_path / "job", images))  # the new data is that of its checkpoint by now
    assert [row["epoch"] for row in ended["progress"].history] == [1, 2, 3, 4]
    assert [row["step"] for row in ended["progress"].history] == [4, 8, 9 + 6, 9 + 12]  # the last checkpoint was that of step 9
    calls = {step: metrics for kind, step, metrics in [*resumed["calls"], *ended["calls"]] if kind == "step"}
    rates = [calls[step]["train/lr"] for step in sorted(calls)]
    optim = schedule_job(tmp_path, images).optim
    assert rates == [learning_rate(step, 6, optim, optim.lr) for step in range(2 * 6, 4 * 6)]


def small_state() -> CheckpointState:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    about = {"model": "tiny", "num_classes": 4, "image_size": 1, "classes": list("abcd")}
    progress = Progress(epoch=2, position=7, step=9, skipped={10: "a/10.png (not an image)", 2: "a/2.png (not an image)"})
    return CheckpointState(model, nn.ModuleDict(), [optimizer], torch.amp.GradScaler("cpu", enabled=False), progress, about)


def test_a_checkpoint_restores_parameters_optimizer_progress_and_generators(tmp_path: Path) -> None:
    path, state, group = tmp_path / "checkpoints" / "last.safetensors", small_state(), Group()
    save(path, state, group)
    expected = torch.rand(3)
    other = small_state()
    for parameter in other.student.parameters():
        torch.nn.init.zeros_(parameter)
    checkpoint.restore(path, other, group)
    assert equal(state.student.state_dict(), other.student.state_dict())
    assert other.progress == state.progress
    assert torch.equal(torch.rand(3), expected)
    theirs, ours = (s.optimizers[0].state_dict()["state"] for s in (other, state))
    assert all(torch.equal(theirs[i][slot], ours[i][slot]) for i in ours for slot in ours[i])


def test_a_checkpoint_names_no_wrapper_holds_no_pickle_and_loads_as_a_teacher_without_its_methods(
    ranks: RankPool, tmp_path: Path
) -> None:
    mutual = {"method": ["dml"], "options": {"dml": {"peer": "mlp_large"}}}
    result = ranks.run(2, train, config(tmp_path, teacher=None, distill=mutual))[0]
    last = tmp_path / "checkpoints" / "last.safetensors"
    tensors, _ = checkpoint.read(last)
    student, peer = (build_model(f"mlp_{size}", num_classes=10, image_size=8, seed=0).state_dict() for size in ("small", "large"))
    assert {name for name in tensors if name.startswith("model.")} == {f"model.{name}" for name in student}
    assert {name for name in tensors if name.startswith("method.")} == {f"method.dml.peer.{name}" for name in peer}
    assert {name.partition(".")[0] for name in tensors} == {"model", "method", "optim", "rng"}
    classes = [str(label) for label in range(10)]
    teacher = load_teacher("mlp_small", str(last), image_size=8, classes=classes, seed=0)
    assert equal(teacher.state_dict(), {name: tensor.float() for name, tensor in result["state"].items()})
    assert {path.suffix for path in (tmp_path / "checkpoints").iterdir()} == {".safetensors"}


def test_a_truncated_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    save(path, small_state(), Group())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged") as caught:
        checkpoint.restore(path, small_state(), Group())
    assert "\n" not in str(caught.value)


def written_by_the_version_before(path: Path) -> None:
    """Give a checkpoint the form of format 2: its epochs' rows have shorter names."""
    tensors, meta = checkpoint.read(path)
    history = [{name.removeprefix("epoch/"): value for name, value in row.items()} for row in meta["progress"]["history"]]
    checkpoint.write_tensors(path, tensors, {**meta, "format": 2, "progress": {**meta["progress"], "history": history}})


def test_a_training_that_an_older_version_began_is_refused_before_its_first_step(ranks: RankPool, tmp_path: Path) -> None:
    """Its epochs are recorded under other names: the summary at the end would find none of them."""
    settings = config(tmp_path, optim={"epochs": 2})
    assert ranks.run(1, train, settings, 8)[0]["died"]
    written_by_the_version_before(tmp_path / "checkpoints" / "last.safetensors")
    with pytest.raises(
        CheckpointError, match=r"was written by another version: resume with that version, or choose another --out"
    ):
        ranks.run(1, train, settings)


def test_weights_that_an_older_version_trained_are_a_teacher_and_can_be_evaluated(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, train, config(tmp_path))
    best, classes = tmp_path / "checkpoints" / "best.safetensors", [str(label) for label in range(10)]
    data = DataConfig(path="digits", image_size=8, loader_workers=1)
    evaluation = EvaluateConfig(checkpoint=str(best), output=str(tmp_path / "evaluated.json"), data=data, precision="fp64")
    accuracy = evaluate_checkpoint(evaluation, Group())
    written_by_the_version_before(best)
    assert evaluate_checkpoint(evaluation, Group()) == accuracy
    header = read_checkpoint_header(best)
    assert header is not None
    assert header.model == "mlp_small"
    teacher = load_teacher("mlp_small", str(best), image_size=8, classes=classes, seed=0)
    tensors, _ = checkpoint.read(best)
    assert equal(
        teacher.state_dict(), {name[6:]: tensor.float() for name, tensor in tensors.items() if name.startswith("model.")}
    )
    taught = config(tmp_path / "taught", teacher={"model": "mlp_small", "weights": str(best)})
    assert not ranks.run(1, train, taught)[0]["died"]


def train_on_nodes(group: Group, folders: list[Path], wait_s: float, newer: Path | None = None) -> dict[str, object]:
    """Train with a folder a rank, as nodes that see a shared one at different times; `newer` comes to rank 1's after a while."""
    checkpoint.OLD_FILE_S = wait_s
    if newer is not None and group.rank == 1:
        last = StageDir(folders[1]).last
        threading.Timer(0.3, lambda: os.replace(shutil.copy(newer, last.with_name("copy")), last)).start()
    return train(group, config(folders[group.rank], train={"checkpoint_every": 1}, optim={"momentum": 0, "nesterov": False}))


def test_ranks_that_read_different_checkpoints_end_with_one_line_or_wait_for_the_newer(ranks: RankPool, tmp_path: Path) -> None:
    settings = {"train": {"checkpoint_every": 1}, "optim": {"momentum": 0, "nesterov": False}}
    for name, die_after in (("old", 4), ("new", 8)):
        assert ranks.run(2, train, config(tmp_path / name, **settings), die_after)[0]["died"]
    steps = [checkpoint.read_metadata(StageDir(tmp_path / name).last)["progress"]["step"] for name in ("new", "old")]
    assert steps[0] > steps[1]
    folders = [tmp_path / "new", tmp_path / "old"]
    message = rf"rank 0 reads the checkpoint of step {steps[0]} at .*, rank 1 reads that of step {steps[1]}: check that"
    with pytest.raises(CheckpointError, match=message):
        ranks.run(2, train_on_nodes, folders, 0.0)
    resumed = ranks.run(2, train_on_nodes, folders, 60.0, StageDir(tmp_path / "new").last)
    whole = ranks.run(2, train, config(tmp_path / "whole", **settings))
    assert equal(resumed[0]["state"], whole[0]["state"])


def test_a_rank_that_sees_no_checkpoint_ends_all_with_one_line(ranks: RankPool, tmp_path: Path) -> None:
    settings = {"train": {"checkpoint_every": 1}, "optim": {"momentum": 0, "nesterov": False}}
    assert ranks.run(2, train, config(tmp_path / "new", **settings), 5)[0]["died"]
    with pytest.raises(
        CheckpointError, match=r"rank 0 reads the checkpoint of step \d+ at .*, rank 1 cannot read it \(no checkpoint at"
    ):
        ranks.run(2, train_on_nodes, [tmp_path / "new", tmp_path / "empty"], 0.0)


def test_a_checkpoint_without_the_keys_of_its_version_or_with_a_damaged_description_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    save(path, small_state(), Group())
    tensors, _ = checkpoint.read(path)
    checkpoint.write_tensors(path, tensors, {"format": 99})
    with pytest.raises(CheckpointError, match="written by another version"):
        checkpoint.restore(path, small_state(), Group())
    save_file(tensors, path, {META_KEY: '{"format": '})
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.restore(path, small_state(), Group())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    path, state = tmp_path / "last.safetensors", small_state()
    save(path, state, Group())
    state.metadata["model"] = "other"
    with pytest.raises(CheckpointError, match="holds tiny with 4 classes, but the experiment has other"):
        checkpoint.restore(path, state, Group())


def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path: Path) -> None:
    path, adam, sgd = tmp_path / "last.safetensors", small_state(), small_state()
    save(path, adam, Group())
    sgd.optimizers = [torch.optim.SGD(sgd.student.parameters(), lr=0.1)]
    with pytest.raises(
        CheckpointError, match="was written with AdamW of 4 parameters, but the experiment has SGD of 4 parameters: resume"
    ):
        checkpoint.restore(path, sgd, Group())
    fewer = small_state()
    fewer.optimizers = [torch.optim.AdamW(list(fewer.student.parameters())[1:], lr=0.1)]
    with pytest.raises(CheckpointError, match="AdamW of 4 parameters, but the experiment has AdamW of 3 parameters"):
        checkpoint.restore(path, fewer, Group())


def test_a_restored_optimizer_has_the_settings_that_it_is_built_with(tmp_path: Path) -> None:
    path, other = tmp_path / "last.safetensors", small_state()
    save(path, small_state(), Group())
    other.optimizers[0].param_groups[0]["weight_decay"] = 0.5
    checkpoint.restore(path, other, Group())
    assert other.optimizers[0].param_groups[0]["weight_decay"] == 0.5


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path, state = tmp_path / "last.safetensors", small_state()
    save(path, state, Group())
    before = path.read_bytes()
    broken = CheckpointState(
        state.student, state.methods, state.optimizers, state.scaler, state.progress, {"unserialisable": object()}
    )
    with pytest.raises(TypeError):
        save(path, broken, Group())
    with pytest.raises(CheckpointError, match="the previous one is intact"):
        checkpoint.write_tensors(tmp_path / "last.safetensors" / "below-a-file", {"a": torch.zeros(1)}, {})
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.safetensors"]
