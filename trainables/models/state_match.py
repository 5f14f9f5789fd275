"""Which of a file's candidates is the state of a model, under which prefix of its names.

The prefix is found, not listed: some candidate's names end with all of the model's. A fit is whole: every tensor of the model, of
its shape, and no other one under that prefix.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from trainables.errors import CheckpointError, first_three
from trainables.models.weight_files import Candidate

AUX_PREFIXES = ("AuxLogits.", "aux1.", "aux2.")
"""Heads that only training uses, and a teacher does not."""
COUNTERS = ("num_batches_tracked", "n_averaged", "total_ops", "total_params")
"""Tensors that evaluation does not read: of batch norms (torch before 0.4.1 has none), AveragedModel, and the profiler thop."""
_WRAPPERS = re.compile(r"(?<![^.])(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Parts of names by DDP, torch.compile, FSDP and activation checkpointing, which wrap parts of a model too."""
_EMA = re.compile(r"(?<![^._])ema(?![^._])")
LIBRARY_NAMES: Mapping[str, Mapping[str, str]] = {
    "DenseNet": {".norm.1.": ".norm1.", ".norm.2.": ".norm2.", ".conv.1.": ".conv1.", ".conv.2.": ".conv2."}
}
"""Class of torchvision → parts of its names in the published files → those of the model."""


@dataclass(frozen=True)
class Match:
    """A candidate's tensors under one prefix, by the model's names, and what they lack of the model."""

    candidate: Candidate
    prefix: str
    """As it is in the file."""
    state: dict[str, Tensor]
    renamed: str
    """A name that differs from the model's in more than the prefix, `X as Y`; empty: there is none."""
    outside: tuple[str, ...]
    """The candidate's other names."""
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[str, ...]

    @property
    def rank(self) -> tuple[int, int, int]:
        """What it lacks, to sort by; (0, 0, 0) for a fit. Where no name is the model's, the largest is first."""
        is_other = len(self.unexpected) == sum(map(is_read, self.state))
        return len(self.missing), -len(self.state) if is_other else 0, len(self.unexpected) + len(self.misshapen)

    @property
    def address(self) -> str:
        """What `weights_key` calls it."""
        return ".".join(part for part in (self.candidate.path, self.prefix.strip(".")) if part)


def is_read(name: str) -> bool:
    """Whether evaluation reads the tensor of this name."""
    return not name.startswith(AUX_PREFIXES) and name.rpartition(".")[2] not in COUNTERS


def expected_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model that evaluation reads, by name."""
    return {name: tensor for name, tensor in model.state_dict().items() if is_read(name)}


def find_matches(candidates: Iterable[Candidate], model: nn.Module, key: str | None, path: object) -> list[Match]:
    """The matches of the best rank; of several, an average of weights (EMA) before others, as timm does.

    `key`: the entry or the prefix that is chosen. Raises CheckpointError: the file at `path` has no such key.
    """
    expected = expected_tensors(model)
    names: Mapping[str, str] = getattr(type(model), "PUBLISHED_NAMES", LIBRARY_NAMES.get(type(model).__name__, {}))
    matches = [match for candidate in candidates for match in _matches(candidate, expected, names)]
    if key is not None:
        chosen = [match for match in matches if match.address == key]
        chosen = chosen or [match for match in matches if f".{key}." in f".{match.address}."]
        if not chosen:
            there_are = ", ".join(dict.fromkeys(match.address for match in matches if match.address))
            raise CheckpointError(f"{path} has no weights_key {key!r}: there are {there_are or 'names without a prefix'}")
        matches = chosen
    best = min(match.rank for match in matches)
    matches = [match for match in matches if match.rank == best]
    averaged = [match for match in matches if _EMA.search(match.address)]
    return averaged if averaged and key is None else matches


def part_of(model: nn.Module, bare: nn.Module) -> dict[str, Tensor]:
    """The tensors of `model` by their names in `bare`, the same without its classifier, as a module of the other may be."""
    return find_matches([Candidate("", model.state_dict(), ())], bare, None, "")[0].state


def compare(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[tuple[str, ...], ...]:
    """Names that are missing in `state`, that are not expected, and whose shapes differ."""
    return (
        tuple(name for name in expected if name not in state),
        tuple(name for name in state if name not in expected and is_read(name)),
        tuple(name for name in expected if name in state and expected[name].shape != state[name].shape),
    )


def _matches(candidate: Candidate, expected: Mapping[str, Tensor], names: Mapping[str, str]) -> list[Match]:
    plain = {_plain(name, names): name for name in candidate.tensors}
    if len(plain) < len(candidate.tensors):  # a module and its wrapper are both in it
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
    ends = next(((raw, name) for name, raw in origin.items() if name in expected and raw.endswith(name)), ("", ""))
    shown = ends[0].removesuffix(ends[1])
    odd = next((f"{raw} as {name}" for name, raw in origin.items() if raw != shown + name), "")
    outside = tuple(raw for name, raw in plain.items() if not name.startswith(prefix) and name not in COUNTERS)
    return Match(candidate, shown or prefix, state, odd, outside, *compare(state, expected))


def _plain(name: str, names: Mapping[str, str]) -> str:
    name = _WRAPPERS.sub("", name)
    for published, own in names.items():
        name = name.replace(published, own)
    return name


def _ends(name: str) -> list[str]:
    """The name, and what is left of it without its first parts."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _of_sequential(name: str, inside: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    """The model's name of a layer that a Sequential has in its place, beside layers without weights, as dropout: fc.1.weight."""
    found = re.fullmatch(r"(.+)\.\d+(\.[^.]+)", name)
    if found is None:
        return None
    target = found[1] + found[2]
    if target not in wanted or target in inside:
        return None
    siblings = [other for other in inside if re.fullmatch(rf"{re.escape(found[1])}\.\d+{re.escape(found[2])}", other)]
    return wanted[target] if siblings == [name] else None


def describe(match: Match, path: object) -> str:
    """What was taken, renamed and left out, in one line; empty where that is the whole file as it is."""
    parts = [match.candidate.path] if match.candidate.path else []
    if match.prefix:
        parts.append(f"prefix {match.prefix!r} removed")
    if match.renamed:
        parts.append(match.renamed)
    groups = [*match.candidate.others, *(f"{name.partition('.')[0]}.…" if "." in name else name for name in match.outside)]
    ignored = f"other entries ignored: {first_three(list(dict.fromkeys(groups)))}" if groups else ""
    text = "; ".join(part for part in (", ".join(parts), ignored) if part)
    return f"weights {path}: {text}" if text else ""
