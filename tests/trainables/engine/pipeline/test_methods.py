"""Which methods train a student in pipeline stages, and that they train there what they do in one process."""

from pathlib import Path

import pytest

from tests.trainables.jobs import relative_difference, train
from trainables.config import DistillConfig, TrainConfig
from trainables.distributed.rank_pool import RankPool
from trainables.engine.check_method import Case, job_config
from trainables.engine.dry_run import check_fit
from trainables.errors import DistillError
from trainables.methods.registry import METHODS
from trainables.methods.select import select_methods

REFUSED = [each.key for each in select_methods(DistillConfig(method=tuple(METHODS))) if each.whole_student]
FAST = ("dkd", "fitnet", "sp")


def in_stages(name: str, folder: Path, stages: int, micro_batches: int = 1, cut: list[str] | None = None) -> TrainConfig:
    scale = {"num_workers": stages, "pipeline_stages": stages, "micro_batches": micro_batches, "cut": cut}
    settings = job_config(Case(name, {}), folder).model_dump()
    return TrainConfig.model_validate({**settings, "scale": scale})


@pytest.mark.parametrize("name", REFUSED)
def test_a_method_that_cannot_be_trained_in_stages_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        DistillError, match=r"pipeline_stages 2: write scale.pipeline_stages: 1, or take another method"
    ) as caught:
        check_fit(in_stages(name, tmp_path, 2), 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cut", [["layer2", "layer1"], ["layer2", "layer2"]])
def test_cuts_are_in_the_order_of_the_forward_pass(cut: list[str], tmp_path: Path) -> None:
    with pytest.raises(DistillError, match="list the modules in the order"):
        check_fit(in_stages("kd", tmp_path, 3, cut=cut), 4)


def test_no_cut_lies_behind_what_a_method_reads(tmp_path: Path) -> None:
    check_fit(in_stages("fitnet", tmp_path, 2, cut=["layer1"]), 4)
    with pytest.raises(DistillError, match=r"scale.cut: model resnet8 cannot be cut before layer3: .*; methods read layer2"):
        check_fit(in_stages("fitnet", tmp_path, 2, cut=["layer3"]), 4)


TRAINED = [name for name in METHODS if name not in REFUSED]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in TRAINED])
def test_a_method_trains_in_two_stages_what_it_does_in_one(name: str, ranks: RankPool, tmp_path: Path) -> None:
    """With one micro-batch: batch norms, and methods that compare samples, see the whole batch."""
    (alone,) = ranks.run(1, train, in_stages(name, tmp_path / "alone", 1))
    found = ranks.run(2, train, in_stages(name, tmp_path / "stages", 2, cut=["layer1"]))
    state = {key: tensor for result in found for key, tensor in result["state"].items()}
    assert relative_difference(alone["state"], state) < 1e-9
