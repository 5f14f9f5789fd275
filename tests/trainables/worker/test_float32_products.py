"""Float32 products of matrices are float32 in a worker; and what TF32, which rounds what is multiplied, would do to methods.

A TF32 number has 10 bits after the leading one: rounding to it is off by at most u = 2⁻¹¹, relative. A product of two rounded
matrices is then off by at most (2u + u²)·|A||B|, entry by entry, as long as the sums are exact.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.trainables.jobs import config
from trainables.distributed.group import Group
from trainables.methods import relations
from trainables.worker import torch_settings

U = 2.0**-11
BOUND = 2 * U + U**2


def to_tf32(values: Tensor) -> Tensor:
    """Rounded to 10 bits of mantissa, as tensor cores take float32."""
    return ((values.float().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.fixture
def torch_as_it_was() -> Iterator[None]:
    before, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(before)
    torch.backends.cudnn.benchmark = benchmark
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("torch_as_it_was")
def test_a_worker_has_full_products_also_where_its_container_allows_tf32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_settings, "set_up_cpus", lambda *_: None)
    torch.set_float32_matmul_precision("high")  # as with TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, which NVIDIA's containers set
    torch_settings.set_up_torch(config(tmp_path, precision="fp32"), Group())
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.usefixtures("torch_as_it_was")
def test_a_deterministic_stage_has_one_kernel_for_each_operation_and_the_next_stage_has_the_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_settings, "set_up_cpus", lambda *_: None)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for deterministic in (True, False):
        settings = config(tmp_path, precision="fp32", train={"deterministic": deterministic})
        torch_settings.set_up_torch(settings, Group())
        assert torch.are_deterministic_algorithms_enabled() is deterministic
        assert torch.backends.cudnn.benchmark is not deterministic
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG")


def test_rounding_to_tf32_is_off_by_half_a_unit_of_its_last_bit_at_most() -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    off = (to_tf32(values).double() - values.double()).abs() / values.double().abs()
    assert 0.9 * U < off.max() <= U
    assert torch.equal(to_tf32(to_tf32(values)), to_tf32(values))
    bf16 = values.bfloat16().float()
    assert torch.equal(to_tf32(bf16), bf16), "what autocast gives has fewer bits: a Gram matrix of it is exact"


@pytest.mark.parametrize("shape", [(64, 64, 512), (32, 1000, 128), (8, 8, 4096)], ids=str)
def test_a_product_in_tf32_keeps_to_the_bound(shape: tuple[int, int, int]) -> None:
    rows, columns, inner = shape
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(rows, inner, generator=generator), torch.randn(inner, columns, generator=generator)
    off = (to_tf32(a).double() @ to_tf32(b).double() - a.double() @ b.double()).abs()
    allowed = BOUND * (a.double().abs() @ b.double().abs())
    assert (off <= allowed).all()
    assert off.max() > 1e-3 * allowed.max(), "the bound is no empty one"


def test_crds_scores_would_be_off_by_1_4_percent_at_most() -> None:
    generator, temperature = torch.Generator().manual_seed(2), 0.07
    v, memory = (torch.nn.functional.normalize(torch.randn(count, 128, generator=generator), dim=1) for count in (64, 4096))
    exact = (v.double() @ memory.double().T / temperature).exp()
    off = ((to_tf32(v).double() @ to_tf32(memory).double().T / temperature).exp() / exact - 1).abs()
    assert off.max() <= torch.tensor(BOUND / temperature).expm1() < 0.0141


def test_distances_of_near_samples_would_lose_what_float32_has(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    centres = torch.randn(8, 512, generator=generator)
    rows = (centres[:, None] + 0.02 * torch.randn(8, 4, 512, generator=generator)).flatten(0, 1)  # four views of eight images
    exact = relations.squared_distances_of_pairs(rows.double())
    near = (exact > 0) & (exact < 0.01 * exact.max())
    full = relations.squared_distances_of_pairs(rows)
    squares = (rows - rows.sum(0) / len(rows)).square().sum(1)
    centred = to_tf32(rows - rows.sum(0) / len(rows))
    rounded = (squares[:, None] + squares[None]).double() - 2 * centred.double() @ centred.double().T
    allowed = 2 * BOUND * (centred.double().abs() @ centred.double().abs().T)
    assert ((rounded - exact).abs()[near] <= 1.01 * allowed[near] + 1e-3).all()
    assert (full.double() / exact - 1).abs()[near].max() < 0.01
    assert (rounded / exact - 1).abs()[near].max() > 0.05
