"""Checkpoints off the training thread: that copies the state to host memory and goes on, another writes it to disk."""

import json
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainables.disk_writer import DiskWriter
from trainables.distributed.group import Group, from_each, gather_objects
from trainables.engine.checkpoint import FORMAT, CheckpointState, remove_shards, write_tensors
from trainables.engine.tensor_file import HostBuffer, PackedTensors, write_packed


class CheckpointWriter:
    """Saves a job's state. Every rank has one; rank 0 writes, or each pipeline stage of the first replica its part.

    One checkpoint at a time, from a host buffer that it reuses.
    """

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
        part, writes = state.part, group.is_main if state.part is None else state.part.replica == 0
        tensors, optimizers = _collect(state) if writes else ({}, [])
        if part is not None and writes:
            tensors, optimizers[0] = part.to_whole(tensors, optimizers[0])
        plain = optimizers[0]["plain"] if part is not None and writes else {}
        gathered = gather_objects((rng_state(group.device), plain, secrets.token_hex(4)), group)
        if not writes:
            return
        generators = {f"rng.{rank}.{kind}": value for rank, each in enumerate(gathered) for kind, value in each[0].items()}
        if part is not None:
            optimizers[0]["plain"] = {index: values for each in gathered for index, values in each[1].items()}
        meta = {
            "format": FORMAT,
            **state.about,
            **({"data": state.data.model_dump(exclude={"classes"})} if state.data is not None else {}),
            "progress": vars(state.progress),
            "metrics": state.metrics,
            "world_size": group.world_size,
            "optimizers": optimizers,
            "scaler": state.scaler.state_dict(),
        }
        # As text, since training goes on to change what is in it.
        text = json.dumps(meta)
        if part is None:
            write = partial(self._write, paths, self._buffer.pack(tensors | generators), text)
        else:
            write = partial(self._write_shards, paths, self._buffer.pack(tensors), generators, text, gathered[0][2], part.writers)
        self._written = self._disk.put(write)

    def _write(self, paths: Sequence[Path], packed: PackedTensors, meta: str) -> None:
        for path in paths:
            write_packed(path, packed, meta)
            remove_shards(path, besides=[])  # of a job that had pipeline stages before
            self._publish(path)

    def _write_shards(
        self, paths: Sequence[Path], packed: PackedTensors, generators: dict[str, Tensor], meta: str, name: str, writers: Group
    ) -> None:
        """This rank's part of the state; once all ranks have written theirs, rank 0 the file that names them.

        A kill leaves what that file named before, or what it names now: files have new names each time.
        """
        for path in paths:
            shards = [f"{path.stem}.{name}.{stage}.safetensors" for stage in range(writers.world_size)]
            from_each(partial(write_packed, path.with_name(shards[writers.rank]), packed, "{}"), writers)
            if writers.is_main:
                write_tensors(path, generators, {**json.loads(meta), "shards": shards})
                remove_shards(path, besides=shards)


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """This rank's generator states (uint8 vectors)."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _collect(state: CheckpointState) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The tensors of this rank's state, and what else its optimizers have."""
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
    return tensors, optimizers
