"""Checkpoints off the training thread: that copies the state to host memory and goes on, another writes it to disk."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainables.disk_writer import DiskWriter
from trainables.distributed.group import Group, gather_objects
from trainables.engine.checkpoint import FORMAT, CheckpointState
from trainables.engine.tensor_file import HostBuffer, PackedTensors, write_packed


class CheckpointWriter:
    """Saves a job's state. Every rank has one; rank 0 writes, one checkpoint at a time, from a host buffer that it reuses."""

    def __init__(self, disk: DiskWriter, device: torch.device, publish: Callable[[Path], None] = lambda path: None) -> None:
        """`publish` is called, by the disk writer, with each checkpoint that was written; it may raise."""
        self._disk, self._buffer, self._publish = disk, HostBuffer(device), publish
        self._written: Future[None] | None = None

    def save(self, paths: Sequence[Path], state: CheckpointState, group: Group) -> None:
        """Copy the state as it is now, and have it written to each of `paths` behind all that the disk writer has to write.

        Every rank calls it. It waits for the checkpoint before, should that still be on its way.

        Raises CheckpointError: on rank 0, where an earlier checkpoint could not be written.
        """
        if self._written is not None:
            self._written.result()
        rngs = gather_objects(rng_state(group.device), group)
        collected = _collect(state) if group.is_main or state.part is not None else None
        if collected is None:
            return
        tensors, optimizers = collected
        for rank, states in enumerate(rngs):
            tensors.update({f"rng.{rank}.{kind}": value for kind, value in states.items()})
        meta = {
            "format": FORMAT,
            **state.about,
            **({"data": state.data.model_dump(exclude={"classes"})} if state.data is not None else {}),
            "progress": vars(state.progress),
            "world_size": group.world_size,
            "optimizers": optimizers,
            "scaler": state.scaler.state_dict(),
        }
        # As text, since training goes on to change what is in it.
        self._written = self._disk.put(partial(self._write, paths, self._buffer.pack(tensors), json.dumps(meta)))

    def _write(self, paths: Sequence[Path], packed: PackedTensors, meta: str) -> None:
        for path in paths:
            write_packed(path, packed, meta)
            self._publish(path)


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """This rank's generator states (uint8 vectors)."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _collect(state: CheckpointState) -> tuple[dict[str, Tensor], list[dict[str, Any]]] | None:
    """The tensors of the whole state and what else its optimizers have; None on a rank that does not write it."""
    tensors = {f"model.{name}": tensor for name, tensor in state.student.state_dict().items()}
    tensors |= {f"method.{name}": tensor for name, tensor in state.methods.state_dict().items()}
    optimizers = []
    for number, optimizer in enumerate(state.optimizers):
        optim = optimizer.state_dict()
        plain: dict[str, dict[str, Any]] = {}
        for index, slots in optim["state"].items():
            for slot, value in slots.items():
                if isinstance(value, Tensor):
                    tensors[f"optim.{number}.{index}.{slot}"] = value
                else:
                    plain.setdefault(str(index), {})[slot] = value
        optimizers.append({"type": type(optimizer).__name__, "param_groups": optim["param_groups"], "plain": plain})
    if state.part is None:
        return tensors, optimizers
    gathered = state.part.gather(tensors, optimizers[0])
    return None if gathered is None else (gathered[0], [gathered[1]])
