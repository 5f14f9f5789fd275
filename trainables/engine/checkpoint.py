"""A `CheckpointState` as one safetensors file: no pickle, nothing that could run code. `checkpoint_writer` saves it.

Of a job in pipeline stages it has the first stage's tensors, and names the files next to it with a later stage's each: `shards`.
Names in a file: `model.<parameter or buffer>`, `method.<name>.<parameter or buffer>` (with `optim.ema_decay` their averages, and
in `raw.model.…` and `raw.method.…` what is trained), `optim.<optimizer>.<parameter>.<state>` with the parameter's own name,
`rng.<rank>.cpu|cuda`; everything else (position, schedule of the scaler, metrics, what the model is) is JSON in the header under
`raydistill`. What an optimizer is set to is the experiment's.
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
"""Version of the state that a training continues from; the weights of a file are the same in every format."""


@dataclass
class Progress:
    """How far the training is. `epoch` is the index in the stage, see `Epochs`; `position` counts its global samples so far."""

    epoch: int = 0
    position: int = 0
    step: int = 0
    best_score: float | None = None
    """Top-1 accuracy in percent, or another number of a student without a classifier."""
    best_epoch: int = -1
    history: list[dict[str, float]] = field(default_factory=list)
    epoch_record: dict[str, Any] = field(default_factory=dict)
    """`step`, `epoch` and `metrics` of the last epoch's record: a death may come before it is on disk, and a resume writes it."""
    reached: dict[str, float] = field(default_factory=dict)
    """When `train.until_top1_pct` was reached: `time_to_accuracy_s`, `steps_to_accuracy`; empty until then."""
    skipped: dict[int, str] = field(default_factory=dict)
    """Images of the unfinished epoch that could not be read, on all ranks; see `Loader.skipped`."""
    step_offset: int = 0
    """See `Epochs.step_offset`."""
    partial: list[float] = field(default_factory=list)
    """Sums of the unfinished epoch so far (over all ranks), so that its record is the same after a resume."""

    def end_epoch(self) -> None:
        """The steps of an epoch are over."""
        self.epoch, self.position, self.partial, self.skipped = self.epoch + 1, 0, [], {}

    def take_score(self, score: float | None, top1_pct: float | None, target_pct: float | None, train_s: float) -> bool:
        """The last epoch's score and accuracy, after `train_s` of training. Whether the score is the best so far."""
        if top1_pct is not None and target_pct is not None and top1_pct >= target_pct:
            self.reached = {"time_to_accuracy_s": train_s, "steps_to_accuracy": float(self.step)}
        best = self.best_epoch < 0 or (score is not None and (self.best_score is None or score > self.best_score))
        if best:
            self.best_score, self.best_epoch = score, self.epoch
        return best

    def record_epoch(self, learned: dict[str, float], measured: dict[str, float]) -> None:
        """An epoch is over: `learned` goes into the history too, `measured` into its record alone."""
        self.history = [*self.history, {"epoch": self.epoch, "step": self.step, **learned}]
        self.epoch_record = {"step": self.step, "epoch": float(self.epoch), "metrics": learned | measured}

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """What the last epoch has taken since it was recorded, by the names of its record."""

        def added(numbers: Mapping[str, float]) -> dict[str, float]:
            return {**numbers, **{name: numbers[name] + more for name, more in seconds.items()}}

        self.history = [*self.history[:-1], added(self.history[-1])]
        self.epoch_record = {**self.epoch_record, "metrics": added(self.epoch_record["metrics"])}

    def begin_epoch_on_other_data(self, steps_per_epoch: int, *, forget_best: bool) -> None:
        """Begin the unfinished epoch again, on other data, with the parameters as they are; it has so many steps now.

        Again, since an epoch that is left out would have no record, and the last one no evaluation. `forget_best`: accuracies
        on other images cannot be compared.
        """
        self.position, self.partial, self.skipped = 0, [], {}
        self.step_offset = self.step - self.epoch * steps_per_epoch
        if forget_best:
            self.best_score, self.best_epoch = None, -1


@dataclass
class CheckpointState:
    """Everything that training changes, and what the model is."""

    student: nn.Module
    methods: nn.ModuleDict
    """The distillation methods' parameters and buffers."""
    optimizers: Sequence[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler
    progress: Progress
    about: dict[str, Any]
    """Describes the model for those who load the file: model, num_classes, image_size, classes, mean, std, data keys."""
    data: DataIdentity | None = None
    """What it is trained on; None: of a timing run, which has no checkpoints."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """The `JobMetrics.state` that goes into a checkpoint, or came out of it; empty before the first."""
    average: WeightAverage | None = None
    """Averages of the student and the methods, see `optim.ema_decay`."""
    pipeline_stages: Group = field(default_factory=Group)
    """The pipeline stages of this rank's replica, for the threads that write checkpoints; one alone has the whole state."""

    @property
    def parameter_names(self) -> dict[Tensor, str]:
        """The names of the student's and the methods' parameters in a checkpoint; a tied one has its last, with stages too."""
        named = {f"model.{name}": p for name, p in self.student.named_parameters(remove_duplicate=False)}
        named |= {f"method.{name}": p for name, p in self.methods.named_parameters(remove_duplicate=False)}
        return {named[name]: name for name in sorted(named)}

    def describe_optimizers(self, group: Group) -> list[dict[str, Any]]:
        """The class of each, and the names of the parameters that it trains on any rank; every rank of the job calls it."""
        names = self.parameter_names
        own = [[names[p] for each in optimizer.param_groups for p in each["params"]] for optimizer in self.optimizers]
        on_ranks = gather_objects(own, group)
        return [
            {"class": type(optimizer).__name__, "parameters": sorted({name for each in on_ranks for name in each[number]})}
            for number, optimizer in enumerate(self.optimizers)
        ]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], meta: dict[str, Any]) -> None:
    """Write a checkpoint of `tensors`, by their names in it, with the description `meta`; see `write_packed`.

    Raises CheckpointError: where the disk is full or cannot be written.
    """
    write_packed(path, HostBuffer(torch.device("cpu")).pack(tensors), json.dumps(meta))


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors (on the CPU), by name, and the description of a checkpoint. What is not used of a tensor is not read.

    Raises CheckpointError: missing, truncated, not a safetensors file, or not one of ours.
    """
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}: give a .safetensors file that `distill train` wrote")
    try:
        tensors, header = _read_file(path)
        meta = json.loads(header or "{}")
        for shard in meta.get("shards", ()):
            tensors |= _read_file(path.with_name(shard))[0]
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {path} is damaged ({error}): use another one, such as its neighbour best or last"
        ) from error
    if header is None:
        raise CheckpointError(
            f"{path} is not a checkpoint of ours (no `{META_KEY}` in its header): as a teacher, give it in teacher.weights"
        )
    return tensors, meta


def _read_file(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """The tensors of a file, mapped into memory, and our part of its header."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        return tensors, (file.metadata() or {}).get(META_KEY)


def join_shards(path: Path) -> None:
    """Make one file of a checkpoint and its shards, where it has any. Raises CheckpointError: see `read`, `write_tensors`."""
    if names := read_about(path).get("shards"):
        tensors, meta = read(path)
        del meta["shards"]
        write_tensors(path, tensors, meta)
        log.info("%s: joined from the files of %d pipeline stages", path, len(names) + 1)
    remove_shards(path, besides=[])  # also those of a join that was killed before this


def remove_shards(path: Path, besides: Sequence[str]) -> None:
    """Remove the files of stages that a checkpoint has no longer."""
    for shard in path.parent.glob(f"{path.stem}.*.safetensors"):
        if shard.name not in besides:
            shard.unlink(missing_ok=True)


def read_about(path: Path) -> dict[str, Any]:
    """The description of a checkpoint alone; see `read`."""
    return read(path)[1]


def _read_on_all_ranks(path: Path, group: Group) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """See `read`, of the same file on every rank: a node may see what another one wrote to a shared folder up to a minute later.

    Raises CheckpointError: on every rank, where one of them cannot read the file, or still another one than rank 0's.
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
            has = f"has none ({other})" if isinstance(other, str) else f"that of step {other[0]}"
            raise CheckpointError(
                f"rank 0 reads the checkpoint of step {files[0][0]} at {path}, rank {rank} {has}: their nodes do not see the "
                "same file: check that they share the folder, then `distill resume`"
            )
        time.sleep(1)


def _identity(meta: dict[str, Any]) -> tuple[int, str]:
    """The step of a checkpoint, and a digest of its description: that has times in it, so that no two files have the same."""
    return meta.get("progress", {}).get("step", 0), hashlib.sha256(json.dumps(meta).encode()).hexdigest()


def restore(path: Path, state: CheckpointState, group: Group, accepted_data: DataIdentity | None = None) -> DataIdentity | None:
    """Continue from `path`: parameters, optimizer, scaler, progress, and this rank's generators where the world is the same.

    Returns the data that it was trained on, where that is not the one of `state` but `accepted_data` is; else None.

    Raises:
        CheckpointError: damaged, or of another model or optimizer than those of `state`.
        DataError: it was trained on other data, which is not accepted.
    """
    tensors, meta = _read_on_all_ranks(path, group)
    _check_format(path, meta)
    other_data = _check_data(path, state, meta, accepted_data)
    _check_model(path, state, meta)
    own = _without_other_stages(state, tensors, group)
    raw = _without_prefix("raw.", tensors)
    _check_average(path, state, raw)
    _load_modules(path, state.student, state.methods, own | raw, meta)
    if state.average is not None:
        state.average.load(own)
    _check_optimizers(path, state.describe_optimizers(group), meta)
    for number, optimizer in enumerate(state.optimizers):
        tensors_of = _without_prefix(f"optim.{number}.", tensors)
        _restore_optimizer(optimizer, state.parameter_names, tensors_of, meta["optimizer_numbers"][number])
    if meta["scaler"]:
        state.scaler.load_state_dict(meta["scaler"])
    state.progress, state.metrics = Progress(**meta["progress"]), meta["metrics"]
    state.progress.skipped = {int(index): image for index, image in state.progress.skipped.items()}  # JSON's keys are strings
    if meta["world_size"] == group.world_size:
        _restore_generators(tensors, group)
    return other_data


def begin_from_init_stage(path: Path, state: CheckpointState, group: Group) -> None:
    """Begin with the student that an init stage has trained, with the methods of `state` that took part in it, and, where the
    world is the same, with its generators.

    Raises CheckpointError: damaged, or of another model or other methods than those of `state`.
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
        student.load_state_dict(_without_prefix("model.", tensors))
    except RuntimeError as error:
        raise CheckpointError(f"checkpoint {path} does not fit {meta['model']}: {_last_line(error)}") from error
    try:
        methods.load_state_dict(_without_prefix("method.", tensors))
    except RuntimeError as error:
        raise CheckpointError(
            f"checkpoint {path} was written with another distill.method or other options of it "
            f"({_last_line(error)}): resume with the same, or choose another --out"
        ) from error


def _restore_generators(tensors: Mapping[str, Tensor], group: Group) -> None:
    torch.set_rng_state(tensors[f"rng.{group.rank}.cpu"])
    if group.device.type == "cuda" and f"rng.{group.rank}.cuda" in tensors:
        torch.cuda.set_rng_state(tensors[f"rng.{group.rank}.cuda"], group.device)


def _check_data(
    path: Path, state: CheckpointState, meta: dict[str, Any], accepted_data: DataIdentity | None
) -> DataIdentity | None:
    """See `restore`. An older version's checkpoint does not say on what it was trained."""
    if state.data is None:
        return None
    if "data" not in meta:
        notice(f"{path} does not say on what data it was trained: whether that has changed is not checked")
        return None
    before = DataIdentity(classes=meta["classes"], **meta["data"])
    changes = check_same_data(f"checkpoint {path}", before, state.data, accept=state.data == accepted_data)
    return before if changes else None


def _check_format(path: Path, meta: dict[str, Any]) -> None:
    if meta.get("format") != FORMAT:
        raise CheckpointError(
            f"checkpoint {path} was written by another version: train on with that one, or choose another --out"
        )


def _check_model(path: Path, state: CheckpointState, meta: dict[str, Any]) -> None:
    if option_key(meta["model"]) != option_key(state.about["model"]) or meta["num_classes"] != state.about["num_classes"]:
        raise CheckpointError(
            f"checkpoint {path} holds {meta['model']} with {meta['num_classes']} classes, the experiment asks for "
            f"{state.about['model']} with {state.about['num_classes']}: choose another --out or the same model"
        )


def _check_optimizers(path: Path, current: Sequence[dict[str, Any]], meta: dict[str, Any]) -> None:
    if meta["optimizers"] != current:
        saved, here = (
            " and ".join(f"{each['class']} of {len(each['parameters'])} parameters" for each in optimizers)
            for optimizers in (meta["optimizers"], current)
        )
        raise CheckpointError(
            f"checkpoint {path} was written by {saved}, and here there is {here}: resume with the same optim.name and "
            "optim.losses, and with the version that wrote it"
        )


def _check_average(path: Path, state: CheckpointState, raw: Mapping[str, Tensor]) -> None:
    if bool(raw) != (state.average is not None):
        has = "averages of the weights" if raw else "no averages of the weights"
        raise CheckpointError(f"checkpoint {path} has {has}: resume with the optim.ema_decay of before, or choose another --out")


def _without_other_stages(state: CheckpointState, tensors: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
    """Without what other ranks have in their modules and this one does not."""
    own = {f"model.{name}" for name in state.student.state_dict()} | {f"method.{name}" for name in state.methods.state_dict()}
    others = set[str]().union(*gather_objects(own, group)) - own
    return {name: tensor for name, tensor in tensors.items() if name not in others}


def _without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _last_line(error: RuntimeError) -> str:
    return str(error).splitlines()[-1].strip()


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]
) -> None:
    """`tensors`: the whole state, by parameter and name of the state; another pipeline stage's is left out. `numbers`: see
    `plain_numbers`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = {names[parameter]: index for index, parameter in enumerate(parameters)}
    states: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        parameter_name, state = name.rsplit(".", 1)
        index = indices.get(parameter_name)
        if index is None:
            continue
        if tensor.shape == parameters[index].shape:
            # The parameter's own memory format, so that a fused update stays fused.
            tensor = torch.empty_like(parameters[index], requires_grad=False).copy_(tensor)
        states.setdefault(index, {})[state] = tensor
    for name, own in numbers["parameters"].items():
        states.setdefault(indices[name], {}).update(own)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
    set_plain_numbers(optimizer, numbers["groups"])
