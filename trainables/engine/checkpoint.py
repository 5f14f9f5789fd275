"""Store a `CheckpointState` as one safetensors file: no pickle, so reading it runs no code. `checkpoint_writer` saves it.

With pipeline stages the file holds the first stage's tensors, and `shards` in its header names a file next to it for each later
stage. Tensor names are `model.<parameter or buffer>`, `method.<name>.<parameter or buffer>`,
`optim.<optimizer>.<parameter>.<state>` and `rng.<rank>.cpu|cuda`. With `optim.ema_decay`, `model.` and `method.` are the
averages, and `raw.model.` and `raw.method.` the trained values. Everything else (position, scaler, metrics, model description)
is JSON under `raydistill` in the header. Optimizer settings are not stored: they come from the experiment.
"""

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trainables.config import DataIdentity
from trainables.data.identity import check_same_data
from trainables.distributed.group import Group, gather_objects, result_or_error
from trainables.engine.optimizers import set_plain_numbers
from trainables.engine.tensor_file import HostBuffer, write_packed
from trainables.engine.weight_average import WeightAverage
from trainables.errors import CheckpointError, DistillError
from trainables.models.checkpoint_header import META_KEY
from trainables.notices import notice
from trainables.rundir import OLD_FILE_S
from trainables.user_code import option_key

log = logging.getLogger("raydistill")

FORMAT = 6
"""Version of the state that training resumes from. The weights are stored alike in all versions."""


@dataclass
class Progress:
    """How far training has come: `epoch` is its index in the stage, `position` the global samples of that epoch so far."""

    epoch: int = 0
    position: int = 0
    step: int = 0
    best_score: float | None = None
    """Higher is better: see `score_of` in `train`."""
    best_epoch: int = -1
    history: list[dict[str, float]] = field(default_factory=list)
    epoch_record: dict[str, Any] = field(default_factory=dict)
    """`step`, `epoch` and `metrics` of the last epoch. A resume reports them again, in case the record did not reach the disk."""
    evaluation_pending: bool = False
    """Whether that record lacks its evaluation. A checkpoint with a pending evaluation has the weights that it evaluates."""
    reached: dict[str, float] = field(default_factory=dict)
    """`time_to_accuracy_s` and `steps_to_accuracy` once `train.until_top1_pct` is reached; empty until then."""
    skipped: dict[int, str] = field(default_factory=dict)
    """Unreadable images of the unfinished epoch on all ranks, see `Loader.skipped`."""
    step_offset: int = 0
    """See `Epochs.step_offset`."""
    partial: list[float] = field(default_factory=list)
    """Sums of the unfinished epoch over all ranks, so that a resume does not change the epoch's record."""

    def end_epoch(self) -> None:
        """Advance to the next epoch."""
        self.epoch, self.position, self.partial, self.skipped = self.epoch + 1, 0, [], {}

    def update_best(self, score: float | None, top1_pct: float | None, target_pct: float | None, train_s: float) -> bool:
        """Take the last epoch's score and accuracy, after `train_s` of training. Return whether the score is the best so far."""
        if top1_pct is not None and target_pct is not None and top1_pct >= target_pct:
            self.reached = {"time_to_accuracy_s": train_s, "steps_to_accuracy": float(self.step)}
        best = self.best_epoch < 0 or (score is not None and (self.best_score is None or score > self.best_score))
        if best:
            self.best_score, self.best_epoch = score, self.epoch
        return best

    def record_epoch(self, learned: dict[str, float], measured: dict[str, float]) -> None:
        """Set the record of an epoch: `learned` also goes into the history, `measured` does not."""
        self.history = [*self.history, {"epoch": self.epoch, "step": self.step, **learned}]
        self.epoch_record = {"step": self.step, "epoch": float(self.epoch), "metrics": learned | measured}

    def add_to_record(self, numbers: Mapping[str, float]) -> None:
        """Add numbers to the last epoch's record: to those it has of the same names, if any."""

        def added(record: Mapping[str, float]) -> dict[str, float]:
            return {**record, **{name: record.get(name, 0.0) + more for name, more in numbers.items()}}

        self.history = [*self.history[:-1], added(self.history[-1])]
        self.epoch_record = {**self.epoch_record, "metrics": added(self.epoch_record["metrics"])}

    def restart_epoch_on_other_data(self, steps_per_epoch: int, *, forget_best: bool) -> None:
        """Restart the unfinished epoch on other data, with the current parameters and `steps_per_epoch` steps.

        Skipping the epoch instead would leave it without a record, or training without its last evaluation. `forget_best`:
        the validation images changed too, so that earlier accuracies cannot be compared.
        """
        self.position, self.partial, self.skipped = 0, [], {}
        self.step_offset = self.step - self.epoch * steps_per_epoch
        if forget_best:
            self.best_score, self.best_epoch = None, -1


@dataclass
class CheckpointState:
    """Everything that training changes, and a description of the model."""

    student: nn.Module
    methods: nn.ModuleDict
    """The modules of the distillation methods."""
    optimizers: Sequence[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler
    progress: Progress
    metadata: dict[str, Any]
    """Metadata for readers of the file: model, num_classes, image_size, classes, mean, std, data keys."""
    data: DataIdentity | None = None
    """The training data; None in a timing run, which saves no checkpoints."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """`JobMetrics.state` as saved or restored; empty before the first checkpoint."""
    average: WeightAverage | None = None
    """EMA of the student and the methods, see `optim.ema_decay`."""
    pipeline_stages: Group = field(default_factory=Group)
    """The pipeline stages of this rank's replica, with a process group for the threads that write checkpoints."""

    @property
    def parameter_names(self) -> dict[Tensor, str]:
        """The checkpoint names of all parameters. A tied parameter has the alphabetically last of its names, with stages too."""
        named = {f"model.{name}": p for name, p in self.student.named_parameters(remove_duplicate=False)}
        named |= {f"method.{name}": p for name, p in self.methods.named_parameters(remove_duplicate=False)}
        return {named[name]: name for name in sorted(named)}

    def describe_optimizers(self, group: Group) -> list[dict[str, Any]]:
        """Return each optimizer's class and the names of its parameters over all ranks. Every rank must call it."""
        names = self.parameter_names
        own = [[names[p] for each in optimizer.param_groups for p in each["params"]] for optimizer in self.optimizers]
        on_ranks = gather_objects(own, group)
        return [
            {"class": type(optimizer).__name__, "parameters": sorted({name for each in on_ranks for name in each[number]})}
            for number, optimizer in enumerate(self.optimizers)
        ]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], meta: dict[str, Any]) -> None:
    """Write named tensors and the metadata `meta` as a checkpoint, see `write_packed`.

    Raises CheckpointError: the disk is full or cannot be written.
    """
    write_packed(path, HostBuffer(torch.device("cpu")).pack(tensors), json.dumps(meta))


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors (on the CPU, memory-mapped) by name, and the metadata of a checkpoint.

    Raises CheckpointError: the file is missing, truncated, not a safetensors file, or not one of ours.
    """
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}: pass a .safetensors file that `distill train` wrote")
    try:
        tensors, header = _read_file(path)
        meta = json.loads(header or "{}")
        for shard in meta.get("shards", ()):
            tensors |= _read_file(path.with_name(shard))[0]
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {path} is damaged ({error}): use another one, such as best or last in the same folder"
        ) from error
    if header is None:
        raise CheckpointError(
            f"{path} was not written by raydistill (no `{META_KEY}` in its header): to use it as a teacher, set teacher.weights"
        )
    return tensors, meta


def _read_file(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """Return a file's tensors, memory-mapped, and our part of its header."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        return tensors, (file.metadata() or {}).get(META_KEY)


def join_shards(path: Path) -> None:
    """Merge a checkpoint and its shards, if any, into one file. Raises CheckpointError: see `read`, `write_tensors`."""
    if names := read_metadata(path).get("shards"):
        tensors, meta = read(path)
        del meta["shards"]
        write_tensors(path, tensors, meta)
        log.info("%s: merged the files of %d pipeline stages", path, len(names) + 1)
    remove_shards(path, keep=[])  # also after a merge that was killed at this point


def remove_shards(path: Path, keep: Sequence[str]) -> None:
    """Remove a checkpoint's shard files, except those named in `keep`."""
    for shard in path.parent.glob(f"{path.stem}.*.safetensors"):
        if shard.name not in keep:
            shard.unlink(missing_ok=True)


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a checkpoint, see `read`."""
    return read(path)[1]


def _read_on_all_ranks(path: Path, group: Group) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`read` the same file on every rank, waiting up to a minute for shared folders to show it to all nodes.

    Raises CheckpointError: on every rank, if a rank cannot read the file or still reads another one than rank 0.
    """
    until_s = time.monotonic() + OLD_FILE_S
    while True:
        found = result_or_error(lambda: read(path))
        files = gather_objects(str(found) if isinstance(found, DistillError) else _identity(found[1]), group)
        if isinstance(files[0], str):
            raise CheckpointError(files[0])
        if not isinstance(found, DistillError) and all(file == files[0] for file in files):
            return found
        if gather_objects(time.monotonic() > until_s, group)[0]:
            rank, other = next((rank, file) for rank, file in enumerate(files) if file != files[0])
            has = f"cannot read it ({other})" if isinstance(other, str) else f"reads that of step {other[0]}"
            raise CheckpointError(
                f"rank 0 reads the checkpoint of step {files[0][0]} at {path}, rank {rank} {has}: "
                "check that their nodes share the folder, then run `distill resume`"
            )
        time.sleep(1)


def _identity(meta: dict[str, Any]) -> tuple[int, str]:
    """Return a checkpoint's step and a hash of its metadata, which contains times and so differs between any two files."""
    return meta.get("progress", {}).get("step", 0), hashlib.sha256(json.dumps(meta).encode()).hexdigest()


def restore(path: Path, state: CheckpointState, group: Group, accepted_data: DataIdentity | None = None) -> DataIdentity | None:
    """Restore everything from `path`; the random generators only if the world size is the same.

    Returns the data of the checkpoint if it differs from that of `state` and the latter is `accepted_data`, else None.

    Raises:
        CheckpointError: the file is damaged, or has another model or optimizer than `state`.
        DataError: it was trained on other data, and the change was not accepted.
    """
    tensors, meta = _read_on_all_ranks(path, group)
    _check_format(path, meta)
    other_data = _check_data(path, state, meta, accepted_data)
    _check_model(path, state, meta)
    own = _drop_other_stages(state, tensors, group)
    raw = _strip_prefix("raw.", tensors)
    _check_average(path, state, raw)
    _load_modules(path, state.student, state.methods, own | raw, meta)
    if state.average is not None:
        state.average.load(own)
    _check_optimizers(path, state.describe_optimizers(group), meta)
    for number, optimizer in enumerate(state.optimizers):
        tensors_of = _strip_prefix(f"optim.{number}.", tensors)
        _restore_optimizer(optimizer, state.parameter_names, tensors_of, meta["optimizer_numbers"][number])
    if meta["scaler"]:
        state.scaler.load_state_dict(meta["scaler"])
    state.progress, state.metrics = Progress(**meta["progress"]), meta["metrics"]
    state.progress.skipped = {int(index): image for index, image in state.progress.skipped.items()}  # JSON's keys are strings
    if meta["world_size"] == group.world_size:
        _restore_generators(tensors, group)
    return other_data


def load_student(path: Path, step: int, student: nn.Module, average: WeightAverage | None) -> None:
    """Load the student of the checkpoint of `step`, and its averages, waiting for shared folders as `restore` does.

    Raises CheckpointError: the file is damaged or does not appear, or has another model.
    """
    until_s = time.monotonic() + OLD_FILE_S
    while True:
        found = result_or_error(lambda: read(path))
        if not isinstance(found, DistillError) and _identity(found[1])[0] == step:
            break
        if time.monotonic() > until_s:
            seen = found if isinstance(found, DistillError) else f"the checkpoint at {path} is of step {_identity(found[1])[0]}"
            raise CheckpointError(f"{seen}, and not that of step {step}: check that the nodes share the folder")
        time.sleep(1)
    tensors, meta = found
    weights = tensors | _strip_prefix("raw.", tensors)
    _load_modules(path, student, nn.ModuleDict(), {name: weights[name] for name in weights if name.startswith("model.")}, meta)
    if average is not None:
        average.load(tensors)


def load_init_stage(path: Path, state: CheckpointState, group: Group) -> None:
    """Start from an init stage: load its student, the methods of `state` that took part, and the random generators.

    The generators are restored only if the world size is the same.

    Raises CheckpointError: the file is damaged, or has another model or other methods than `state`.
    """
    tensors, meta = _read_on_all_ranks(path, group)
    _check_format(path, meta)
    _check_model(path, state, meta)
    wanted = ("model.", "rng.", *(f"method.{key}." for key in state.methods))
    tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(wanted)}
    shared = {name.split(".")[1] for name in tensors if name.startswith("method.")}
    _load_modules(path, state.student, nn.ModuleDict({key: state.methods[key] for key in shared}), tensors, meta)
    if meta["world_size"] == group.world_size:
        _restore_generators(tensors, group)


def _load_modules(
    path: Path, student: nn.Module, methods: nn.ModuleDict, tensors: Mapping[str, Tensor], meta: dict[str, Any]
) -> None:
    try:
        student.load_state_dict(_strip_prefix("model.", tensors))
    except RuntimeError as error:
        raise CheckpointError(f"checkpoint {path} does not fit {meta['model']}: {_last_line(error)}") from error
    try:
        methods.load_state_dict(_strip_prefix("method.", tensors))
    except RuntimeError as error:
        raise CheckpointError(
            f"checkpoint {path} was written with another distill.method or other method options "
            f"({_last_line(error)}): resume with the same ones, or choose another --out"
        ) from error


def _restore_generators(tensors: Mapping[str, Tensor], group: Group) -> None:
    torch.set_rng_state(tensors[f"rng.{group.rank}.cpu"])
    if group.device.type == "cuda" and f"rng.{group.rank}.cuda" in tensors:
        torch.cuda.set_rng_state(tensors[f"rng.{group.rank}.cuda"], group.device)


def _check_data(
    path: Path, state: CheckpointState, meta: dict[str, Any], accepted_data: DataIdentity | None
) -> DataIdentity | None:
    """See `restore`. Checkpoints of older versions do not record their data."""
    if state.data is None:
        return None
    if "data" not in meta:
        notice(f"{path} does not record its training data, so changes to the data go unchecked")
        return None
    before = DataIdentity(classes=meta["classes"], **meta["data"])
    changes = check_same_data(f"checkpoint {path}", before, state.data, accept=state.data == accepted_data)
    return before if changes else None


def _check_format(path: Path, meta: dict[str, Any]) -> None:
    if meta.get("format") != FORMAT:
        raise CheckpointError(
            f"checkpoint {path} was written by another version: resume with that version, or choose another --out"
        )


def _check_model(path: Path, state: CheckpointState, meta: dict[str, Any]) -> None:
    if option_key(meta["model"]) != option_key(state.metadata["model"]) or meta["num_classes"] != state.metadata["num_classes"]:
        raise CheckpointError(
            f"checkpoint {path} holds {meta['model']} with {meta['num_classes']} classes, but the experiment has "
            f"{state.metadata['model']} with {state.metadata['num_classes']}: choose the same model or another --out"
        )


def _check_optimizers(path: Path, current: Sequence[dict[str, Any]], meta: dict[str, Any]) -> None:
    if meta["optimizers"] != current:
        saved, here = (
            " and ".join(f"{each['class']} of {len(each['parameters'])} parameters" for each in optimizers)
            for optimizers in (meta["optimizers"], current)
        )
        raise CheckpointError(
            f"checkpoint {path} was written with {saved}, but the experiment has {here}: resume with the same optim.name and "
            "optim.losses, and the same version"
        )


def _check_average(path: Path, state: CheckpointState, raw: Mapping[str, Tensor]) -> None:
    if bool(raw) != (state.average is not None):
        has = "averages of the weights" if raw else "no averages of the weights"
        raise CheckpointError(f"checkpoint {path} has {has}: resume with the same optim.ema_decay, or choose another --out")


def _drop_other_stages(state: CheckpointState, tensors: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
    """Drop the tensors that belong to modules of other ranks only."""
    own = {f"model.{name}" for name in state.student.state_dict()} | {f"method.{name}" for name in state.methods.state_dict()}
    others = set[str]().union(*gather_objects(own, group)) - own
    return {name: tensor for name, tensor in tensors.items() if name not in others}


def _strip_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _last_line(error: RuntimeError) -> str:
    return str(error).splitlines()[-1].strip()


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]
) -> None:
    """`tensors` are the state of all pipeline stages, by `<parameter>.<state>`. For `numbers` see `plain_numbers`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = {names[parameter]: index for index, parameter in enumerate(parameters)}
    states: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        parameter_name, state = name.rsplit(".", 1)
        index = indices.get(parameter_name)
        if index is None:
            continue
        if tensor.shape == parameters[index].shape:
            # In the parameter's memory format, so that fused updates still work.
            tensor = torch.empty_like(parameters[index], requires_grad=False).copy_(tensor)
        states.setdefault(index, {})[state] = tensor
    for name, own in numbers["parameters"].items():
        states.setdefault(indices[name], {}).update(own)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
    set_plain_numbers(optimizer, numbers["groups"])
