"""`distill check-method`: what it says of methods that keep the contract, and of the usual mistakes."""

from __future__ import annotations

import pytest

from tests.trainables.methods import mine
from trainables.check_method import Case, check
from trainables.methods import METHODS
from trainables.rank_pool import Ranks


def problems(ranks: Ranks, name: str) -> dict[str, str]:
    """Title → problem of what the method does not do."""
    name = name if name in METHODS else f"{mine.__file__}:{name}"
    return {title: problem for title, problem in check(Case(name, {}), ranks.run) if problem is not None}


@pytest.mark.parametrize("name", ["kd", "Alike", "Prepared"])
def test_a_method_that_keeps_the_contract_has_no_problems(ranks: Ranks, name: str) -> None:
    assert problems(ranks, name) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(METHODS) - {"kd"}))
def test_every_method_of_ours_keeps_the_contract(ranks: Ranks, name: str) -> None:
    assert problems(ranks, name) == {}


def test_a_method_that_compares_the_samples_of_one_worker_is_found_out(ranks: Ranks) -> None:
    (title, problem), *others = problems(ranks, "Apart").items()
    assert title.startswith("2 and 3 workers train what one trains")
    assert "of 2 has another" in problem
    assert not others


def test_a_forgotten_layer_and_a_forgotten_term_are_found_out(ranks: Ranks) -> None:
    found = list(problems(ranks, "Forgetful").values())
    assert found[0] == "it returns kept and declares kept, lost"
    assert found[1].startswith("no loss reaches methods.Forgetful.unused.weight, methods.Forgetful.unused.bias")


def test_a_root_at_zero_is_found_out(ranks: Ranks) -> None:
    ((title, problem),) = problems(ranks, "Rooted").items()
    assert title == "a student that equals its teacher has finite gradients"
    assert problem.startswith("the gradient is not finite of student.")


def test_memory_outside_the_checkpoint_is_found_out(ranks: Ranks) -> None:
    ((title, problem),) = problems(ranks, "Counting").items()
    assert title == "a job that was cut off goes on exactly"
    assert "differs" in problem
