"""`distill check-method`: what it says of methods that keep the contract, and of the usual mistakes.

The classic mistake, and the command itself, are in `tests.service.test_cli`.
"""

import contextlib
from pathlib import Path

import pytest
import torch

from tests.trainables.jobs import Recorded, no_telemetry
from tests.trainables.methods import own_methods
from trainables.device.device_batches import on_device
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine import check_method
from trainables.engine.check_method import Case, CheckResult, check, job_config
from trainables.engine.train import build, train_step
from trainables.methods.registry import METHODS


def problems(ranks: RankPool, name: str) -> dict[str, str]:
    """Title → problem of what the method does not do."""
    name = name if name in METHODS else f"{own_methods.__file__}:{name}"
    return {title: problem for title, problem in check(Case(name, {}), ranks.run) if problem is not None}


@pytest.mark.parametrize(
    "name", ["GlobalGram", *(pytest.param(name, marks=pytest.mark.slow) for name in ("InitStage", "PooledTwoTerms"))]
)
def test_a_method_that_keeps_the_contract_has_no_problems(ranks: RankPool, name: str) -> None:
    assert problems(ranks, name) == {}


def test_the_method_that_the_documentation_shows_keeps_the_contract(ranks: RankPool, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "own-method.md").read_text()
    (code,) = [block for block in page.split("```python\n")[1:] if "class Margin(Method)" in block]
    (tmp_path / "own.py").write_text(code.partition("```")[0])
    assert [finding for finding in check(Case(f"{tmp_path}/own.py:Margin", {}), ranks.run) if finding.problem] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_of_ours_keeps_the_contract(ranks: RankPool, name: str) -> None:
    assert problems(ranks, name) == {}


@pytest.mark.parametrize(
    ("name", "place", "says"),
    [
        (
            "MissingTerm",
            1,
            "no loss reaches methods.MissingTerm.unused.weight, methods.MissingTerm.unused.bias: use it in a loss",
        ),
        ("WrongInitStage", 0, "in the init stage it returns zzz and declares reconstruction"),
        ("WrongInitStage", 1, "in the init stage its terms do not train what it trains"),
        ("InitGather", 0, "in the init stage it calls batch.all_gather: declare requires = Requirements(whole_batch=True)"),
        ("HalfTrained", 1, "in the init stage no loss reaches methods.HalfTrained.encoder.bias, methods.HalfTrained.dec"),
        ("HalfTrained", 5, "in the init stage gradients are not finite: methods.HalfTrained.encoder.weight"),
        ("ReadsAfterAll", 0, "distill.method: it reads logits but declares Requirements(logits=False): remove that"),
    ],
)
def test_mistakes_are_found_out_in_single_batches(name: str, place: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(without_training(name, monkeypatch)[place].problem).startswith(says)


@pytest.mark.parametrize("name", ["InitStage", "ab", "fsp", "ft"])
def test_an_init_stage_that_keeps_the_contract_has_no_problems(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [finding for finding in without_training(name, monkeypatch) if finding.problem] == []


@pytest.mark.parametrize("name", ["embed", "queue"])
def test_a_method_that_trains_features_alone_has_no_problems_in_single_batches(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [finding for finding in without_training(name, monkeypatch) if finding.problem] == []


def without_training(name: str, monkeypatch: pytest.MonkeyPatch) -> list[CheckResult]:
    """What is found of a method in single batches on this process alone."""
    for title, problem in check_method.CHECKS.items():
        if problem.__name__ in ("_check_workers", "_check_resume", "_check_bf16"):
            monkeypatch.setitem(check_method.CHECKS, title, lambda _: None)
    name = name if name in METHODS else f"{own_methods.__file__}:{name}"
    case = Case(name, {}, teacher="resnet8", image_size=8)
    return list(check(case, lambda *_: []))


@pytest.mark.slow
def test_a_forgotten_layer_and_a_forgotten_term_are_found_out(ranks: RankPool) -> None:
    found = list(problems(ranks, "MissingTerm").values())
    assert found[0] == "it returns distance and declares distance, absent"
    assert found[1].startswith("no loss reaches methods.MissingTerm.unused.weight, methods.MissingTerm.unused.bias")


def test_rows_of_all_workers_without_a_word_are_found_out(ranks: RankPool) -> None:
    first = next(check(Case(f"{own_methods.__file__}:UndeclaredGather", {}), ranks.run))
    assert first.title == "it returns the terms that it declares, per sample or per batch"
    assert "declare requires = Requirements(whole_batch=True)" in str(first.problem)


@pytest.mark.slow
def test_a_root_at_zero_is_found_out(ranks: RankPool) -> None:
    ((title, problem),) = problems(ranks, "Rooted").items()
    assert title == "a student that equals its teacher has finite gradients"
    assert problem.startswith("gradients are not finite: student.")


@pytest.mark.slow
def test_memory_outside_the_checkpoint_is_found_out(ranks: RankPool) -> None:
    ((title, problem),) = problems(ranks, "Counting").items()
    assert title == "an interrupted job resumes exactly"
    assert "differs" in problem


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", sorted(set(METHODS) - {"kdsvd"}))  # its eigenvectors come from a routine that waits
def test_no_method_waits_for_the_gpu(tmp_path: Path, name: str) -> None:
    device = torch.device("cuda")
    config = job_config(Case(name, {}), tmp_path / "job", precision="fp32")
    with contextlib.closing(build(config, Group(0, 1, 0, device), Recorded(), no_telemetry)) as job:
        batches = on_device(job.train_loader.epoch(0), device)
        for number in range(3):  # kernels are loaded and cuDNN chooses its algorithms in the first
            batch = next(batches)
            torch.cuda.set_sync_debug_mode("error" if number else "default")
            try:
                train_step(job.train_state, batch, number, job.metrics.timer)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        batches.close()
