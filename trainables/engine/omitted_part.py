"""Leave one part out of a timing run's steps, to show what that part costs. Only the times of such a run mean anything."""

import contextlib
import itertools
from collections.abc import Generator

from torch import Tensor

from trainables.data.loader.loader import Batch
from trainables.errors import ExperimentError
from trainables.methods.contract import ModelOutputs
from trainables.teachers.interface import TeacherInterface, TeacherRequest


def repeat_first(batches: Generator[Batch, None, None]) -> Generator[Batch, None, None]:
    """Repeat the first batch at the position of each batch, while the loader is idle."""
    with contextlib.closing(batches):
        first = next(batches, None)
    if first is None:
        return
    for step in itertools.count(1):
        yield first._replace(position=step * first.position)


class RepeatedTeacher(TeacherInterface):
    """A teacher that runs once per micro-batch shape, and then returns the same outputs."""

    def __init__(self, teacher: TeacherInterface) -> None:
        """Raises ExperimentError: all ranks would have to call the teacher equally often."""
        if teacher.is_collective:
            raise ExperimentError("teacher.placement: cannot leave a sharded teacher out of the steps of a single worker")
        self.teacher, self._outputs = teacher, dict[tuple[int, ...], dict[str, ModelOutputs]]()

    def __call__(self, images_BCHW: Tensor, num_rows: int, request: TeacherRequest | None = None) -> dict[str, ModelOutputs]:
        shape = (*images_BCHW.shape, num_rows)
        if shape not in self._outputs:
            outputs = self.teacher(images_BCHW, num_rows, request)
            self._outputs[shape] = {key: each.map(Tensor.clone) for key, each in outputs.items()}
        return self._outputs[shape]

    def close(self) -> None:
        self.teacher.close()
