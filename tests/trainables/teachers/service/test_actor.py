"""The class of the actor: many requests wait in it at once."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainables.teachers.service.test_client import ROWS, settings
from trainables.errors import CheckpointError
from trainables.teachers.service.actor import TeacherActor
from trainables.teachers.service.protocol import LogitsRequest, LogitsResponse

CLASSES = tuple(str(label) for label in range(10))


def test_it_loads_a_teacher_and_responds_to_all_who_wait(tmp_path: Path) -> None:
    plain = settings(tmp_path, "ours").model_dump(mode="json")
    images = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)

    async def talk() -> None:
        actor = TeacherActor("cpu", 1)
        request = LogitsRequest("key", 0, np.arange(6), np.arange(6), images)
        assert await actor.logits(request) == LogitsResponse()
        await asyncio.gather(*(actor.open("key", plain, CLASSES, ROWS) for _ in range(3)))
        responses = await asyncio.gather(*(actor.logits(request) for _ in range(5)))
        assert [response.num_computed for response in responses] == [6, 0, 0, 0, 0]
        first = responses[0].logits_BK
        assert first is not None
        assert (first.shape, first.dtype) == ((6, 10), np.float64)
        assert all(np.array_equal(response.logits_BK, first) for response in responses)
        assert await actor.counts() == {"computed": 6, "returned": 30}

    asyncio.run(talk())


def test_it_has_full_products_also_where_its_container_allows_tf32() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        TeacherActor("cpu", 1)
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_teacher_that_does_not_exist_is_named(tmp_path: Path) -> None:
    plain = settings(tmp_path, "ours").model_dump(mode="json")
    (tmp_path / "teacher.safetensors").unlink()

    async def talk() -> None:
        with pytest.raises(CheckpointError, match=r"teacher.safetensors"):
            await TeacherActor("cpu", 1).open("key", plain, CLASSES, ROWS)

    asyncio.run(talk())
