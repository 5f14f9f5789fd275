"""How long a checkpoint stops the training thread, beside one that this thread writes itself; and how it slows the steps around.

The state is a ResNet-34's with momentum, 1000 classes: 175 MB. The steps are of a resnet20 on one thread, so that a core is left
for the writer as on a machine that trains on GPUs.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from tests.benchmarks.rounds import Bar, Comparison, in_turn
from trainables.disk_writer import DiskWriter
from trainables.distributed.group import Group
from trainables.engine.checkpoint import CheckpointState, Progress
from trainables.engine.checkpoint_writer import CheckpointWriter
from trainables.models.registry import construct
from trainables.rundir import replacing


@contextlib.contextmanager
def comparisons(short: bool) -> Iterator[list[Comparison]]:
    state = trained_state("resnet18" if short else "resnet34", num_classes=10 if short else 1000)
    with tempfile.TemporaryDirectory() as folder, DiskWriter() as disk:
        num_steps = 5 if short else 20
        path, writer, steps = Path(folder) / "last.safetensors", CheckpointWriter(disk, torch.device("cpu")), Steps()

        def blocked_s() -> float:
            began = time.perf_counter()
            writer.save([path], state, Group())
            seconds = time.perf_counter() - began
            disk.wait()
            return seconds

        def save_at_once_s() -> float:
            began = time.perf_counter()
            save_at_once(path, state)
            return time.perf_counter() - began

        def steps_with_checkpoint_s() -> float:
            began = time.perf_counter()
            writer.save([path], state, Group())
            steps.run(num_steps)
            seconds = time.perf_counter() - began
            disk.wait()
            return seconds

        def steps_s() -> float:
            began = time.perf_counter()
            steps.run(num_steps)
            return time.perf_counter() - began

        def steps_and_save_at_once_s() -> float:
            return save_at_once_s() + steps_s()

        yield [
            Comparison(
                "the training thread stops / a checkpoint written there", "s", in_turn(blocked_s, save_at_once_s), Bar("≤", 0.25)
            ),
            Comparison(
                "20 steps with a checkpoint / without",
                "s",
                in_turn(steps_with_checkpoint_s, steps_s),
                None,
            ),
            Comparison(
                "20 steps with a checkpoint / with one written in the training thread",
                "s",
                in_turn(steps_with_checkpoint_s, steps_and_save_at_once_s),
                None,
            ),
        ]


def save_at_once(path: Path, state: CheckpointState) -> None:
    """As a plain script does it safely: copies, safetensors' own function, fsync, rename."""
    tensors = {name: tensor.detach().clone() for name, tensor in state.student.state_dict().items()}
    for index, slots in state.optimizers[0].state_dict()["state"].items():
        tensors |= {f"{index}.{name}": value.clone() for name, value in slots.items()}
    with replacing(path) as temporary:
        save_file(tensors, temporary)


def trained_state(name: str, num_classes: int) -> CheckpointState:
    """Of a model after one step."""
    model = construct(name, num_classes=num_classes, image_size=64, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    optimizer.step()
    about = {"model": name, "num_classes": num_classes, "image_size": 64}
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return CheckpointState(model, nn.ModuleDict(), [optimizer], scaler, Progress(), about)


class Steps:
    """Training steps of a small model."""

    def __init__(self) -> None:
        self._model = construct("resnet20", num_classes=10, image_size=32, seed=0)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1, momentum=0.9)
        self._images_BCHW = torch.randn(16, 3, 32, 32)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._optimizer.zero_grad()
            self._model(self._images_BCHW).logsumexp(1).sum().backward()
            self._optimizer.step()
