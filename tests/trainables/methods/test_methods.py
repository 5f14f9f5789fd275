import subprocess
import sys
from typing import Any

import pytest
import torch

from trainables.config import DistillConfig
from trainables.errors import ExperimentError
from trainables.methods import METHODS, check_method


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_terms_are_those_that_it_declares_one_value_a_sample(name: str) -> None:
    method = METHODS[name]
    assert method.name == name
    terms = method.terms(torch.randn(3, 4), torch.randn(3, 4), torch.tensor([0, 3, 1]), 4.0)
    assert tuple(terms) == method.own_terms
    assert all(term.shape == (3,) for term in terms.values())


@pytest.mark.parametrize("name", METHODS)
def test_a_samples_terms_do_not_depend_on_its_batch(name: str) -> None:
    draws = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 5, 4, dtype=torch.float64, generator=draws)
    labels = torch.tensor([0, 3, 1, 2, 2])
    whole = METHODS[name].terms(student, teacher, labels, 4.0)
    part = METHODS[name].terms(student[2:3], teacher[2:3], labels[2:3], 4.0)
    for term in part:
        torch.testing.assert_close(part[term], whole[term][2:3], rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    "values",
    [{}, {"method": "kd", "task_weight": 1, "soft_weight": 0}, {"method": "dkd", "soft_weight": 0, "method_weight": 1}],
)
def test_what_can_be_carried_out_is_accepted(values: dict[str, Any]) -> None:
    check_method(DistillConfig(**values))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"method": "dkdd"}, "there is no method 'dkdd'; did you mean dkd?"),
        ({"method": "KD"}, "did you mean kd?"),
        ({"method": "zzz"}, "write one of dkd, kd"),
        (
            {"method": "kd", "method_weight": 0.5},
            "distill.method_weight is 0.5, but kd has no term of its own: set distill.method_weight to 0",
        ),
        ({"method": "dkd"}, "distill.method_weight is 0, so dkd would not be used: set it to 1"),
    ],
)
def test_what_cannot_is_refused_with_what_to_write(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        check_method(DistillConfig(**values))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_checking_a_method_imports_no_torch() -> None:
    program = """
import sys
from trainables.config import DistillConfig
from trainables.methods import check_method
check_method(DistillConfig(method="dkd", method_weight=1))
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
