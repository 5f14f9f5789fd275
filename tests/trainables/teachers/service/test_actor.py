"""The shell that an actor wears: many wait in it at once, and a network beside another's thread."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.trainables.teachers.service.test_client import ROWS, settings
from trainables.errors import CheckpointError
from trainables.teachers.service.actor import TeacherActor
from trainables.teachers.service.protocol import Question, Reply

CLASSES = tuple(str(label) for label in range(10))


def test_it_opens_a_teacher_and_answers_all_who_wait(tmp_path: Path) -> None:
    told = settings(tmp_path, "ours").model_dump(mode="json")
    images = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)

    async def talk() -> None:
        actor = TeacherActor("cpu", 1)
        question = Question("key", 0, np.arange(6), np.arange(6), images)
        assert await actor.answer(question) == Reply()
        await asyncio.gather(*(actor.open("key", told, CLASSES, ROWS) for _ in range(3)))
        replies = await asyncio.gather(*(actor.answer(question) for _ in range(5)))
        assert [reply.computed for reply in replies] == [6, 0, 0, 0, 0]
        first = replies[0].logits_BK
        assert first is not None
        assert (first.shape, first.dtype) == ((6, 10), np.float64)
        assert all(np.array_equal(reply.logits_BK, first) for reply in replies)
        assert await actor.counts() == {"computed": 6, "answered": 30}

    asyncio.run(talk())


def test_a_teacher_that_is_not_there_is_named(tmp_path: Path) -> None:
    told = settings(tmp_path, "ours").model_dump(mode="json")
    (tmp_path / "teacher.safetensors").unlink()

    async def talk() -> None:
        with pytest.raises(CheckpointError, match=r"teacher.safetensors"):
            await TeacherActor("cpu", 1).open("key", told, CLASSES, ROWS)

    asyncio.run(talk())
