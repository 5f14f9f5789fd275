"""`scale.pipeline_stages: auto`: a job takes the number of stages that is predicted to be fastest, and a resumed one keeps it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainables.engine.pipeline.test_training import job
from tests.trainables.jobs import train
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.distributed.pipeline.costs import Link
from trainables.distributed.rank_pool import RankPool
from trainables.engine import checkpoint
from trainables.engine.dry_run import untrained_modules
from trainables.engine.pipeline import choose_stages, planning
from trainables.engine.pipeline.build import with_saved_cut
from trainables.errors import ModelError

FAST, SLOW = Link(1e-6, 1e12, overlapped=False), Link(1e-6, 1e4, overlapped=False)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # of the measured times of a plan
        pool = RankPool(2, fork_server=True)
    yield pool
    pool.close()


def auto(folder: Path, *, workers: int = 2, **sections: Any) -> TrainConfig:
    """A job of so many workers that leaves its stages open."""
    settings = job(folder, 1, workers, micro_batches="auto", **sections)
    return settings.model_copy(update={"scale": settings.scale.model_copy(update={"pipeline_stages": "auto"})})


def chosen(settings: TrainConfig, link: Link = FAST) -> choose_stages.StagesChoice:
    return choose_stages._plan_each(settings, Group(), link)


@pytest.fixture
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.processes
def test_a_job_trains_with_the_fastest_number_of_stages_and_a_resumed_one_keeps_it(pair: RankPool, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"train": {"checkpoint_every": 2, "log_every": 1}}
    died = pair.run(2, train, auto(tmp_path / "run", **sections), 5)
    start = died[0]["calls"][0][2]
    predicted_ms = {number: start[f"predicted/{number}_stages_ms"] for number in (1, 2)}
    fastest = min(predicted_ms, key=predicted_ms.__getitem__)
    assert start.get("pipeline_stages", 1) == fastest
    last = tmp_path / "run" / "checkpoints" / "last.safetensors"
    before = checkpoint.read(last)[1]["pipeline"]
    assert before["pipeline_stages"] == fastest
    resumed = pair.run(2, train, auto(tmp_path / "run", **sections))
    assert not any(name.startswith("predicted/") for name in resumed[0]["calls"][0][2])
    assert checkpoint.read(last)[1]["pipeline"] == before


@pytest.mark.usefixtures("_cache")
def test_a_slow_link_is_better_spent_on_the_smaller_of_gradients_and_activations(tmp_path: Path) -> None:
    small_batch = auto(tmp_path / "small", data={"global_batch_size": 4})
    found = chosen(small_batch, SLOW)
    assert found.config.scale.num_stages == 2
    assert found.predicted_s[1] > found.predicted_s[2]
    assert found.config.scale.cut is not None
    assert isinstance(found.config.scale.micro_batches, int)


@pytest.mark.usefixtures("_cache")
def test_numbers_that_cannot_be_are_left_out_with_the_reason(tmp_path: Path) -> None:
    found = chosen(auto(tmp_path / "odd", workers=30, data={"global_batch_size": 30}))
    assert set(found.predicted_s) | set(found.reasons) == {1, 2, 3, 5, 6, 10, 15, 30}
    assert "model mlp_large can be cut at" in found.reasons[30]
    alone = chosen(auto(tmp_path / "fp16", precision="fp16"))
    assert (alone.config.scale.num_stages, alone.predicted_s) == (1, {})
    assert "does not go with precision fp16" in alone.reasons[2]


@pytest.mark.usefixtures("_cache")
def test_what_fits_no_memory_whole_is_cut_and_what_fits_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = auto(tmp_path / "large", data={"global_batch_size": 4}, teacher=None)
    parameters = 8 * sum(parameter.numel() for parameter in untrained_modules(settings, 10)[0].student.parameters())
    monkeypatch.setattr(planning, "memory_bytes", lambda device: 2.6 * parameters)  # whole it needs 3 times as much
    found = chosen(settings)
    assert found.config.scale.num_stages == 2
    assert "the whole model does not fit" in found.reasons[1]
    monkeypatch.setattr(planning, "memory_bytes", lambda device: 0.1 * parameters)
    with pytest.raises(ModelError, match=r"scale\.pipeline_stages auto: 1: .*; 2: "):
        chosen(settings)


@pytest.mark.processes
def test_stages_that_do_not_divide_the_workers_of_a_resumed_job_are_chosen_anew(pair: RankPool, tmp_path: Path) -> None:
    settings = job(tmp_path / "run", 2, 1, train={"checkpoint_every": 2})
    pair.run(2, train, settings)
    last = tmp_path / "run" / "checkpoints" / "last.safetensors"
    for workers, expected in ((2, 2), (4, 2), (3, "auto")):
        settings = auto(tmp_path / "other", workers=workers, data={"global_batch_size": 12})
        assert with_saved_cut(settings, last).scale.pipeline_stages == expected
