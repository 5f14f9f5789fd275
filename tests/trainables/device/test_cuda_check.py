"""A GPU that torch cannot use."""

import pynvml
import pytest
import torch

from trainables.device.cuda_check import check_usable, driver
from trainables.errors import DeviceError
from trainables.failures import kind_of


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use this machine's GPU")
def test_a_gpu_that_torch_cannot_use_is_reported_with_node_and_versions() -> None:
    with pytest.raises(DeviceError) as refused:
        check_usable(torch.device("cpu"), "node7 (10.0.0.7)")
    assert str(refused.value).startswith("node node7 (10.0.0.7): Ray has a GPU there that torch cannot use: ")
    assert f"(torch {torch.__version__}, built " in str(refused.value)
    assert kind_of(refused.value) == "device"


def test_whatever_cuda_puts_off_until_its_first_use_is_reported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def put_off(*_: object, **__: object) -> None:
        raise torch.cuda.DeferredCudaCallError("CUDA call failed lazily at initialization with error: no such arch\n\nstack")

    monkeypatch.setattr(torch, "ones", put_off)
    with pytest.raises(DeviceError, match=r"that torch cannot use: CUDA call failed lazily .* no such arch \(torch "):
        check_usable(torch.device("cpu"), "node7")


def test_the_driver_is_reported_with_the_cuda_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("nvmlInit", None),
        ("nvmlSystemGetCudaDriverVersion", 12080),
        ("nvmlSystemGetDriverVersion", "570.86.10"),
    ):
        monkeypatch.setattr(pynvml, name, lambda value=value: value)
    assert driver() == "NVIDIA driver 570.86.10, for CUDA up to 12.8"
