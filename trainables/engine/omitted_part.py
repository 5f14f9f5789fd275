"""A timing run without one part of its steps, which shows what that part costs. Its numbers mean nothing but time."""

import contextlib
import itertools
from collections.abc import Generator

from torch import Tensor

from trainables.data.loader.loader import Batch
from trainables.errors import ExperimentError
from trainables.methods.contract import ModelOutputs
from trainables.teachers.interface import TeacherInterface, TeacherRequest


def repeat_first(batches: Generator[Batch, None, None]) -> Generator[Batch, None, None]:
    """The first batch of an epoch again and again, as if it stood at the position of each; the loader is at rest meanwhile."""
    with contextlib.closing(batches):
        first = next(batches)
    for step in itertools.count(1):
        yield first._replace(position=step * first.position)


class RepeatedTeacher(TeacherInterface):
    """A teacher that runs once for each shape of a micro-batch, and returns those outputs again."""

    def __init__(self, teacher: TeacherInterface) -> None:
        """Raises ExperimentError: all ranks have to call it equally often."""
        if teacher.is_collective:
            raise ExperimentError("teacher.placement: a sharded teacher cannot be left out of the steps of one worker alone")
        self.teacher, self._outputs = teacher, dict[tuple[int, ...], dict[str, ModelOutputs]]()

    def __call__(self, images_BCHW: Tensor, num_rows: int, request: TeacherRequest | None = None) -> dict[str, ModelOutputs]:
        shape = (*images_BCHW.shape, num_rows)
        if shape not in self._outputs:
            outputs = self.teacher(images_BCHW, num_rows, request)
            self._outputs[shape] = {key: each.map(Tensor.clone) for key, each in outputs.items()}
        return self._outputs[shape]

    def close(self) -> None:
        self.teacher.close()
