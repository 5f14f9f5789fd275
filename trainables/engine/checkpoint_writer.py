"""Save checkpoints asynchronously: the training thread copies the state to host memory, and another thread writes it."""

import json
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from trainables.disk_writer import DiskWriter
from trainables.distributed.group import Group, all_gather_results, gather_objects
from trainables.engine.checkpoint import FORMAT, CheckpointState, remove_shards
from trainables.engine.optimizers import plain_numbers
from trainables.engine.tensor_file import HostBuffer, PackedTensors, write_packed
from trainables.rundir import replacing

Publish = Callable[[Sequence[Path], int, float], None]


class CheckpointWriter:
    """Saves a job's state, one checkpoint at a time, from a host buffer that is reused.

    Every rank has a writer. Rank 0 writes everything, or each pipeline stage of the first replica writes its part.
    """

    def __init__(
        self,
        disk: DiskWriter,
        device: torch.device,
        publish: Publish = lambda paths, step, epoch: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Both are called by the disk writer, and may raise.

        `publish`: with the paths of a written checkpoint, its step and epoch. `check`: before one replaces another.
        """
        self._disk, self._buffer, self._publish, self._check = disk, HostBuffer(device), publish, check
        self._written: Future[None] | None = None

    def save(self, paths: Sequence[Path], state: CheckpointState, group: Group, *, keep_as: Path | None = None) -> None:
        """Copy the current state, and queue it on the disk writer for each of `paths`.

        Every rank must call this. It first waits until the previous checkpoint is written. `keep_as`: a file that gets what is in
        the first of `paths` now, before that is replaced.

        Raises CheckpointError: on rank 0, if an earlier checkpoint could not be written.
        """
        if self._written is not None:
            self._written.result()
        stages = state.pipeline_stages
        gathered = gather_objects((rng_state(group.device), secrets.token_hex(4)), group)
        optimizers = state.describe_optimizers(group)
        if group.rank >= stages.world_size:  # another replica
            return
        tensors = _collect(state)
        if group.is_main:
            tensors |= {f"rng.{rank}.{kind}": value for rank, (own, _) in enumerate(gathered) for kind, value in own.items()}
        meta = {
            "format": FORMAT,
            **state.metadata,
            **({"data": state.data.model_dump(exclude={"classes"})} if state.data is not None else {}),
            "progress": vars(state.progress),
            "metrics": state.metrics,
            "world_size": group.world_size,
            "optimizers": optimizers,
            "optimizer_numbers": [plain_numbers(each, state.parameter_names) for each in state.optimizers],
            "scaler": state.scaler.state_dict(),
        }
        shards = {
            path: [f"{path.stem}.{gathered[0][1]}.{stage}.safetensors" for stage in range(1, stages.world_size)] for path in paths
        }
        # Serialize now, since training continues to change these values.
        texts = {path: json.dumps({**meta, "shards": shards[path]}) for path in paths}
        if keep_as is not None and group.is_main:
            self._disk.put(partial(self._copy, paths[0], keep_as))
            paths = [*paths, keep_as]
        publish = partial(self._publish, list(paths), state.progress.step, float(state.progress.epoch))
        self._written = self._disk.put(partial(self._write, self._buffer.pack(tensors), texts, shards, stages, publish))

    def _copy(self, source: Path, path: Path) -> None:
        with replacing(path) as temporary:
            shutil.copyfile(source, temporary)
            self._check()

    def _write(
        self,
        packed: PackedTensors,
        texts: Mapping[Path, str],
        shards: Mapping[Path, Sequence[str]],
        stages: Group,
        publish: Callable[[], None],
    ) -> None:
        """Write this rank's part. The first stage writes its file, which names the shards, after all shards are written.

        Shards have new names each time, so that a kill leaves either the old checkpoint or the new one complete.
        """
        for path, text in texts.items():
            if not stages.is_main:
                all_gather_results(partial(write_packed, path.with_name(shards[path][stages.rank - 1]), packed, "{}"), stages)
                continue
            all_gather_results(lambda: None, stages)
            write_packed(path, packed, text, self._check)
            remove_shards(path, keep=shards[path])
        if stages.is_main:
            publish()


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """Return this rank's random generator states (uint8 vectors)."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _collect(state: CheckpointState) -> dict[str, Tensor]:
    """Return the named tensors of this rank's state."""
    tensors = {f"model.{name}": tensor for name, tensor in state.student.state_dict().items()}
    tensors |= {f"method.{name}": tensor for name, tensor in state.methods.state_dict().items()}
    if state.average is not None:
        averages = state.average.tensors
        tensors |= {f"raw.{name}": tensors[name] for name in averages} | averages
    names = state.parameter_names
    for number, optimizer in enumerate(state.optimizers):
        for parameter, slots in optimizer.state.items():
            slots = {slot: value for slot, value in slots.items() if isinstance(value, Tensor)}  # others: `plain_numbers`
            tensors |= {f"optim.{number}.{names[parameter]}.{slot}": tensor for slot, tensor in slots.items()}
    return tensors
