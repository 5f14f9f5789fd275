"""Outputs of a teacher that a graph reads stay where they are."""

import pytest
import torch
from torch import Tensor

from trainables.engine.static_outputs import StaticOutputs
from trainables.methods.contract import ModelOutputs
from trainables.teachers.ensemble import EnsembleReader


def outputs(value: float, *, rows: int = 2, shared: bool = True) -> dict[str, ModelOutputs]:
    """Of two methods, which read the same logits; one of them a feature in channels_last too."""
    logits_BK = torch.full((rows, 3), value)
    feature_BCHW = torch.full((rows, 4, 5, 5), -value).contiguous(memory_format=torch.channels_last)
    return {"kd": ModelOutputs(logits_BK), "fitnet": ModelOutputs(logits_BK if shared else logits_BK.clone(), (feature_BCHW,))}


def tensors(found: StaticOutputs) -> list[Tensor]:
    kd, fitnet = found.outputs["kd"], found.outputs["fitnet"]
    return [kd.logits_BK, fitnet.logits_BK, *fitnet.features]


def test_further_outputs_are_copied_to_the_memory_of_the_first() -> None:
    static = StaticOutputs(outputs(1.0))
    before = [tensor.data_ptr() for tensor in tensors(static)]
    assert [float(tensor.max()) for tensor in tensors(static)] == [1, 1, -1]
    assert static.copy_from(outputs(2.0))
    assert [float(tensor.max()) for tensor in tensors(static)] == [2, 2, -2]
    assert [tensor.data_ptr() for tensor in tensors(static)] == before


def test_what_several_methods_read_is_there_once_and_in_its_own_strides() -> None:
    static = StaticOutputs(outputs(1.0))
    assert static.outputs["kd"].logits_BK is static.outputs["fitnet"].logits_BK
    assert static.outputs["fitnet"].features[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("other", [outputs(2.0, rows=1), outputs(2.0, shared=False), {"kd": outputs(2.0)["kd"]}, {}])
def test_outputs_of_other_tensors_are_not_taken(other: dict[str, ModelOutputs]) -> None:
    static = StaticOutputs(outputs(1.0))
    assert not static.copy_from(other)
    assert [float(tensor.max()) for tensor in tensors(static)] == [1, 1, -1]


def test_an_ensembles_mean_at_any_temperature_is_of_the_further_outputs() -> None:
    reader = EnsembleReader(torch.nn.Identity(), (0.5, 0.5), ["nkd"])
    first, further = (reader.pop(torch.arange(12.0).reshape(2, 2, 3).remainder(divisor), 2) for divisor in (5, 7))
    static = StaticOutputs(first)
    assert static.copy_from(further)
    for temperature in (1.0, 3.0):
        assert torch.equal(static.outputs["nkd"].logits_at(temperature), further["nkd"].logits_at(temperature))


def test_a_teacher_that_no_method_reads_has_none() -> None:
    assert StaticOutputs({}).copy_from({})
