"""Find which of a file's candidates is a model's state dict, and under which prefix of its names.

The prefix is inferred from names that end like the model's. A candidate fits if it has every tensor of the model in its shape,
and no other one under that prefix.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from trainables.errors import CheckpointError, first_three
from trainables.models.weight_files import Candidate

AUX_PREFIXES = ("AuxLogits.", "aux1.", "aux2.")
"""Auxiliary heads, which only training uses."""
COUNTERS = ("num_batches_tracked", "n_averaged", "total_ops", "total_params")
"""Tensors that evaluation ignores: of batch norms (missing before torch 0.4.1), AveragedModel and the profiler thop."""
_WRAPPERS = re.compile(r"(?<![^.])(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Name parts added by DDP, torch.compile, FSDP and activation checkpointing, also inside a model."""
_CLASSIFIER = re.compile(r"(head|fc|classifier|cls_head|linear)(\.|$)")
_EMA = re.compile(r"(?<![^._])ema(?![^._])")
LIBRARY_NAMES: Mapping[str, Mapping[str, str]] = {
    "DenseNet": {".norm.1.": ".norm1.", ".norm.2.": ".norm2.", ".conv.1.": ".conv1.", ".conv.2.": ".conv2."}
}
"""torchvision class → name parts in published files → the model's."""


@dataclass(frozen=True)
class Match:
    """A candidate's tensors under one prefix, by the model's names, and the differences from the model."""

    candidate: Candidate
    prefix: str
    """The prefix as in the file."""
    state: dict[str, Tensor]
    renamed: str
    """An example `X as Y` of a name that differs from the model's in more than the prefix; empty if there is none."""
    outside: tuple[str, ...]
    """The candidate's other names."""
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[str, ...]

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sort key by differences; (0, 0, 0) for a fit. If no name is the model's, the largest match is first."""
        is_other = len(self.unexpected) == sum(map(is_read, self.state))
        return len(self.missing), -len(self.state) if is_other else 0, len(self.unexpected) + len(self.misshapen)

    @property
    def address(self) -> str:
        """The `weights_key` that selects it."""
        return ".".join(part for part in (self.candidate.path, self.prefix.strip(".")) if part)


def is_read(name: str) -> bool:
    """Whether evaluation reads the tensor `name`."""
    return not name.startswith(AUX_PREFIXES) and name.rpartition(".")[2] not in COUNTERS


def expected_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model that evaluation reads, by name."""
    return {name: tensor for name, tensor in model.state_dict().items() if is_read(name)}


def find_matches(candidates: Iterable[Candidate], model: nn.Module, key: str | None, path: object) -> list[Match]:
    """Return the matches of the best rank, or only the EMA weights among them, as timm does.

    `key` selects an entry or a prefix. Raises CheckpointError: the file at `path` has no such key.
    """
    expected = expected_tensors(model)
    names: Mapping[str, str] = getattr(type(model), "PUBLISHED_NAMES", LIBRARY_NAMES.get(type(model).__name__, {}))
    matches = [match for candidate in candidates for match in _matches(candidate, expected, names)]
    if key is not None:
        chosen = [match for match in matches if match.address == key]
        chosen = chosen or [match for match in matches if f".{key}." in f".{match.address}."]
        if not chosen:
            keys = ", ".join(dict.fromkeys(match.address for match in matches if match.address))
            choices = f"choose from {keys}" if keys else "its names have no prefix: leave it out"
            raise CheckpointError(f"{path} has no weights_key {key!r}: {choices}")
        matches = chosen
    best = min(match.rank for match in matches)
    matches = [match for match in matches if match.rank == best]
    averaged = [match for match in matches if _EMA.search(match.address)]
    return averaged if averaged and key is None else matches


def part_of(model: nn.Module, bare: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of `model` by their names in `bare`, the model without its classifier; either may wrap the other."""
    return find_matches([Candidate("", model.state_dict(), ())], bare, None, "")[0].state


def compare(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[tuple[str, ...], ...]:
    """Return the names missing in `state`, the unexpected ones, and those whose shapes differ."""
    return (
        tuple(name for name in expected if name not in state),
        tuple(name for name in state if name not in expected and is_read(name)),
        tuple(name for name in expected if name in state and expected[name].shape != state[name].shape),
    )


def _matches(candidate: Candidate, expected: Mapping[str, Tensor], names: Mapping[str, str]) -> list[Match]:
    plain = {_plain(name, names): name for name in candidate.tensors}
    if len(plain) < len(candidate.tensors):  # it has both a module and its wrapper
        plain = {name: name for name in candidate.tensors}
    wanted = {_plain(name, {}): name for name in expected}
    votes = Counter(name[: len(name) - len(end)] for name in plain for end in _ends(name) if end in wanted)
    most = max(votes.values(), default=0)
    prefixes = [prefix for prefix, count in votes.items() if 2 * count >= most] or [""]
    return [_match(candidate, prefix, plain, wanted, expected) for prefix in prefixes]


def _match(
    candidate: Candidate, prefix: str, plain: Mapping[str, str], wanted: Mapping[str, str], expected: Mapping[str, Tensor]
) -> Match:
    inside = {name[len(prefix) :]: raw for name, raw in plain.items() if name.startswith(prefix)}
    state, origin = {}, {}
    for name, raw in inside.items():
        if name.endswith(f".{COUNTERS[0]}"):
            state[name] = candidate.tensors[raw]
        elif is_read(name):
            target = wanted.get(name) or _of_sequential(name, inside, wanted) or name
            state[target], origin[target] = candidate.tensors[raw], raw
    outside = {name: raw for name, raw in plain.items() if not name.startswith(prefix) and name not in COUNTERS}
    missing = [name for name in expected if name not in state]
    for target, name in _separate_classifier(outside, candidate, missing, expected).items():
        origin[target] = outside.pop(name)
        state[target] = candidate.tensors[origin[target]]
    ends = next(((raw, name) for name, raw in origin.items() if name in expected and raw.endswith(name)), ("", ""))
    shown = ends[0].removesuffix(ends[1])
    odd = next((f"{raw} as {name}" for name, raw in origin.items() if raw not in (name, shown + name)), "")
    return Match(candidate, shown or prefix, state, odd, tuple(outside.values()), *compare(state, expected))


def _separate_classifier(
    outside: Mapping[str, str], candidate: Candidate, missing: Sequence[str], expected: Mapping[str, Tensor]
) -> dict[str, str]:
    """Map the names of the model's last layer to those of a file's classifier outside the prefix, such as `head.fc.weight`.

    Empty if more than this layer is missing, or if the file has more layers outside the prefix, which may compute something.
    """
    layers = {name.rpartition(".")[0] for name in outside if is_read(name)}
    if len(layers) != 1 or len({name.rpartition(".")[0] for name in missing}) != 1:
        return {}
    (layer,) = layers
    names = {name: f"{layer}.{name.rpartition('.')[2]}" for name in missing}
    if not _CLASSIFIER.match(layer) or {*names.values()} != {*outside}:
        return {}
    shapes = [(candidate.tensors[outside[at]].shape, expected[name].shape) for name, at in names.items()]
    return names if all(len(one) == len(other) and one[1:] == other[1:] for one, other in shapes) else {}


def _plain(name: str, names: Mapping[str, str]) -> str:
    name = _WRAPPERS.sub("", name)
    for published, own in names.items():
        name = name.replace(published, own)
    return name


def _ends(name: str) -> list[str]:
    """Return the name and all its dotted suffixes."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _of_sequential(name: str, inside: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    """Return the model's name of a layer that the file has inside a Sequential with, for example, dropout: fc.1.weight."""
    found = re.fullmatch(r"(.+)\.\d+(\.[^.]+)", name)
    if found is None:
        return None
    target = found[1] + found[2]
    if target not in wanted or target in inside:
        return None
    siblings = [other for other in inside if re.fullmatch(rf"{re.escape(found[1])}\.\d+{re.escape(found[2])}", other)]
    return wanted[target] if siblings == [name] else None


def describe(match: Match, path: object) -> str:
    """Describe in one line what was selected, renamed and left out; empty if the whole file is used unchanged."""
    parts = [match.candidate.path] if match.candidate.path else []
    if match.prefix:
        parts.append(f"prefix {match.prefix!r} removed")
    if match.renamed:
        parts.append(match.renamed)
    groups = [*match.candidate.others, *(f"{name.partition('.')[0]}.…" if "." in name else name for name in match.outside)]
    ignored = f"other entries ignored: {first_three(list(dict.fromkeys(groups)))}" if groups else ""
    text = "; ".join(part for part in (", ".join(parts), ignored) if part)
    return f"weights {path}: {text}" if text else ""
