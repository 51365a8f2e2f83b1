# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism, decided: which module is cut how, over how many ranks, and why the others stay whole.

Pure: a function of the model (which may be on the meta device) and a number. No process group is needed, so that what
does not divide is said before the first step. `tensor.py` does what a plan says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from unisono.core.errors import SetupError
from unisono.parallel.tensor_blocks import Refused, Unit, find_units
from unisono.parallel.tensor_names import HEADS, is_conv1d, is_linear, is_norm, join, sizes, ways_that_fit
from unisono.parallel.tensor_own import decide, pair
from unisono.parallel.tensor_sequence import Stack, stacks_of, why_no_sequence
from unisono.parallel.tensor_source import reading

How = Literal["columns", "rows"]


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut: along which dimension, and how many matrices lie one after the other in it."""

    dim: int
    blocks: int = 1


@dataclass(frozen=True)
class Sharding:
    """How one module is cut. `alone`: its input and output are whole, so it can stand anywhere."""

    how: How
    alone: bool = True
    blocks: int = 1  # matrices one after the other, each of which is cut (queries, keys and values in one)


@dataclass(frozen=True)
class TensorPlan:
    """`whole` names every module with parameters that no rank shares with another, and says why."""

    ways: int
    sharded: dict[str, Sharding]  # by module
    cuts: dict[str, Cut]  # by parameter; those that are not here are whole on every rank
    units: tuple[Unit, ...]
    numbers: dict[str, int]  # "blocks.0.attention.n_heads": what it must be on each rank
    whole: dict[str, str]
    head: str | None  # the output layer whose features are the vocabulary
    stacks: tuple[Stack, ...]  # the blocks between which sequences may be cut
    positionwise: tuple[str, ...]  # modules that your plan calls "sequence"
    read_by: dict[str, str]  # modules whose weights another one reads without calling them, and which
    no_sequence: str  # why sequences cannot be cut; empty if they can

    def require(self, sequence: bool, loss: bool) -> None:
        """What is asked for must be possible."""
        if sequence and self.no_sequence:
            raise SetupError(
                "sequence parallelism cannot be used with this model",
                cause=self.no_sequence,
                do="leave sequence parallelism out, or say 'sequence' in your plan for what works position by position",
            )
        if loss and (self.head is None or self.sharded.get(self.head, Sharding("rows")).how != "columns"):
            why = self.whole.get(self.head, "your plan cuts it by rows") if self.head else "no output layer was found"
            raise SetupError(
                "the loss cannot be computed from parts of the vocabulary",
                cause=why,
                do="make the vocabulary a multiple of tp, or say 'columns' for the output layer in your plan",
            )

    def describe(self) -> str:
        """A table for people: layers of the same kind in one line."""
        rows: dict[tuple[str, str], int] = {}
        for name, sharding in self.sharded.items():
            row = (_pattern(name), f"{sharding.how}, 1/{self.ways} on each rank")
            rows[row] = rows.get(row, 0) + 1
        for name, why in self.whole.items():
            row = (_pattern(name) or "(the model itself)", f"whole: {why}")
            rows[row] = rows.get(row, 0) + 1
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join(f"{name:<{width}}  {count:>3} x  {text}" for (name, text), count in rows.items())


def plan_for(model: nn.Module, ways: int, own: Mapping[str, str] | None = None) -> TensorPlan:
    """The automatic plan, changed by your own: patterns of module names to columns, rows, sequence or whole."""
    if ways < 1:
        raise SetupError(f"a model cannot be cut into {ways}", do="give tp as 1 or more")
    decided = decide(model, own or {})
    read = _read_by_others(model)
    _refuse_cutting_what_is_read(read, decided)
    decided |= dict.fromkeys(read, "whole")
    found = list(find_units(model))
    units = [u for u in found if isinstance(u, Unit) and not decided.keys() & set(u.members)] + pair(model, decided)
    why = {member: refused.because for refused in found if isinstance(refused, Refused) for member in refused.members}
    for unit in found:
        if isinstance(unit, Unit) and unit not in units:
            why |= dict.fromkeys(unit.members, f"your plan decides on other layers of {unit.name or 'the model'!r}")
    why |= {name: "your plan says so" for name, how in decided.items() if how == "whole"}
    why |= {name: f"the forward of {reader or 'the model'!r} reads its weight itself" for name, reader in read.items()}

    sharded = {member: Sharding("columns", False, unit.fused) for unit in units for member in unit.columns}
    sharded |= {unit.rows: Sharding("rows", False) for unit in units}
    sharded |= {n: Sharding(_how(how)) for n, how in decided.items() if how in ("columns", "rows") and n not in sharded}
    _refuse_what_does_not_divide(model, ways, units, sharded)
    head = _embeddings_and_head(model, ways, sharded, why, decided)
    _agree_on_tied(model, sharded, why, decided)

    numbers = {join(u.holder, n): v // ways for u in units if u.heads for n, v in u.heads.numbers.items()}
    numbers |= {
        join(n, "nf"): sizes(m)[1] // ways for n, m in _conv1ds(model) if n in sharded and _is_columns(sharded, n)
    }
    whole = {n: why.get(n) or _reason(m) for n, m in model.named_modules() if n not in sharded and _has_own(m)}
    positionwise = tuple(name for name, how in decided.items() if how == "sequence")
    stacks = stacks_of(model, units)
    no_sequence = why_no_sequence(model, units, stacks, whole, positionwise)
    cuts = {join(n, p): cut for n, s in sharded.items() for p, cut in _cuts(model.get_submodule(n), s)}
    return TensorPlan(ways, sharded, cuts, tuple(units), numbers, whole, head, stacks, positionwise, read, no_sequence)


def _read_by_others(model: nn.Module) -> dict[str, str]:
    """Modules whose weights another module computes with: it would meet a part of them, so they stay whole."""
    read = {}
    for reader, module in model.named_modules():
        if type(module).__module__.startswith("torch."):
            continue  # known, and seen to
        for path in reading(type(module).forward).weights:
            name = join(reader, path)
            if any(name == found for found, _ in model.named_modules()):
                read[name] = reader
    return read


def _refuse_cutting_what_is_read(read: Mapping[str, str], decided: Mapping[str, str]) -> None:
    for name, reader in read.items():
        if decided.get(name) in ("columns", "rows"):
            raise SetupError(
                f"your plan cuts {name!r}, whose weight the forward of {reader or 'the model'!r} reads itself",
                do="call the layer there instead, or leave it out of your plan",
            )


def _how(how: str) -> How:
    return "columns" if how == "columns" else "rows"


def _has_own(module: nn.Module) -> bool:
    return any(parameter is not None for parameter in module._parameters.values())


def _cuts(module: nn.Module, sharding: Sharding) -> Iterator[tuple[str, Cut]]:
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if isinstance(module, nn.MultiheadAttention):
            yield name, Cut(0, 3 if name.startswith("in_proj") else 1)
        elif name == "weight":
            yield name, Cut(shard_dimension(module, sharding), sharding.blocks)
        elif sharding.how == "columns":
            yield name, Cut(0, sharding.blocks)


def _is_columns(sharded: Mapping[str, Sharding], name: str) -> bool:
    return sharded[name].how == "columns"


def _conv1ds(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if is_conv1d(module))


def _counts(model: nn.Module, units: list[Unit], sharded: Mapping[str, Sharding]) -> Iterator[tuple[str, int, str]]:
    """(who, how many, of what): everything that must be a multiple of the number of ranks."""
    for unit in units:
        if unit.heads:
            yield unit.rows, unit.heads.queries, "heads"
            if unit.heads.keys != unit.heads.queries:
                yield unit.rows, unit.heads.keys, "key and value heads"
        yield unit.rows, unit.features, "features"
    for name, sharding in sharded.items():
        module = model.get_submodule(name)
        if sharding.alone and is_linear(module):
            yield name, sizes(module)[1 if sharding.how == "columns" else 0], "features"
        elif isinstance(module, nn.Embedding):
            by_rows = sharding.how == "rows"
            yield name, module.num_embeddings if by_rows else module.embedding_dim, "rows" if by_rows else "features"


def _refuse_what_does_not_divide(
    model: nn.Module, ways: int, units: list[Unit], sharded: Mapping[str, Sharding]
) -> None:
    counts = list(_counts(model, units, sharded))
    lines: dict[str, list[str]] = {}
    for name, count, what in counts:
        if count % ways:
            line = f"{count} {what} / {ways} ranks = {count / ways:g} a rank"
            lines.setdefault(f"{_pattern(name) or 'the model'}: {line}", []).append(name)
    if not lines:
        return
    fits = ways_that_fit([count for _, count, _ in counts])
    one = next(iter(lines.values()))[0]
    raise SetupError(
        f"the model cannot be cut into {ways} equal parts (tp={ways})",
        where="\n".join(f"{line} ({len(names)} times)" for line, names in list(lines.items())[:5]),
        do=f"take tp = {', '.join(map(str, fits))}, which divides everything; or keep it whole with your own plan: "
        f"{{{(_pattern(one) or '*')!r}: 'whole'}}",
    )


def _pattern(name: str) -> str:
    """``layers.3.mlp`` as ``layers.*.mlp``: layers of one kind are spoken of together."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _embeddings_and_head(
    model: nn.Module, ways: int, sharded: dict[str, Sharding], why: dict[str, str], decided: Mapping[str, str]
) -> str | None:
    """Adds them to `sharded` or to `why`, and returns the output layer's name."""
    vocabularies: dict[tuple[int, int], int] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding):
            continue
        vocabularies.setdefault((module.num_embeddings, module.embedding_dim), len(vocabularies))
        if name in sharded or name in decided:
            continue
        reason = _embedding_stays(name, module, ways)
        if not reason:
            sharded[name] = Sharding("rows" if module.num_embeddings % ways == 0 else "columns")
        why.setdefault(name, reason)
    head = None
    for name, module in model.named_modules():
        if not is_linear(module) or (name in sharded and not sharded[name].alone):
            continue
        features, out = sizes(module)
        if name.rpartition(".")[2] in HEADS or (out, features) in vocabularies:
            head = name
            if name not in sharded and name not in decided:
                if out % ways:
                    why[name] = f"its {out} features are no multiple of {ways}: {out} / {ways} = {out / ways:g}"
                else:
                    sharded[name] = Sharding("columns")
    return head


def _embedding_stays(name: str, module: nn.Embedding, ways: int) -> str:
    last = name.rpartition(".")[2].lower()
    if "pos" in last or last == "wpe" or "type" in last:
        return "embeddings of positions and kinds are small"
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return "max_norm, scale_grad_by_freq and sparse gradients need all rows"
    rows, width = module.num_embeddings, module.embedding_dim
    if rows % ways and width % ways:
        return f"neither its {rows} rows nor its {width} features are a multiple of {ways}"
    return ""


def shard_dimension(module: nn.Module, sharding: Sharding) -> int:
    """The dimension of its weight that is cut. Biases are cut with columns, and stay whole with rows."""
    by_first = sharding.how == "rows" if isinstance(module, nn.Embedding) else sharding.how == "columns"
    return int(by_first) if is_conv1d(module) else int(not by_first)


def _agree_on_tied(
    model: nn.Module, sharded: dict[str, Sharding], why: dict[str, str], decided: Mapping[str, str]
) -> None:
    """A weight that several modules share is cut one way, or not at all."""
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append(name)
    for names in users.values():
        cuts = {shard_dimension(model.get_submodule(n), sharded[n]) if n in sharded else None for n in names}
        if len(cuts) == 1:
            continue
        asked = [name for name in names if decided.get(name) in ("columns", "rows")]
        if asked:
            other = next(name for name in names if name != asked[0])
            raise SetupError(
                f"your plan cuts {asked[0]!r}, whose weight is also that of {other!r}",
                do="rows of an embedding go with columns of an output layer; say one for both, or neither",
            )
        for name in names:
            if sharded.pop(name, None):
                why[name] = f"its weight is also that of {next(n for n in names if n != name)!r}, which stays whole"


def _reason(module: nn.Module) -> str:
    kind = type(module).__name__
    if is_norm(module):
        return "a norm is small, and every rank needs all of it"
    if is_linear(module):
        return "nothing says what follows it; your own plan may say columns or rows"
    if isinstance(module, nn.MultiheadAttention):
        return "its output layer is not cut"
    if isinstance(module, nn.RNNBase | nn.modules.conv._ConvNd | nn.modules.batchnorm._NormBase):
        return f"{kind} cannot be cut"
    return f"nothing is known of how {kind} uses its parameters"
