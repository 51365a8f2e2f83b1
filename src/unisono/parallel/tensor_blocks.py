# SPDX-License-Identifier: Apache-2.0
"""Finds what tensor parallelism can cut as one: attentions and feed-forward pairs, by names, sizes and structure.

Pure. A unit is a set of layers cut by columns (by features out) followed by one that is cut by rows (by features
in): between them each rank works on its own features, and only the sum behind the rows is exchanged. What looks like a
unit and cannot be cut is returned with the reason. Whether sizes divide is not asked here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from unisono.parallel.tensor_heads import Heads, Unknown, heads_of
from unisono.parallel.tensor_names import (
    FEED_FORWARD,
    FUSED,
    FUSED_OUTPUT,
    INTERLEAVED,
    OUTPUT,
    QUERY_KEY_VALUE,
    is_elementwise,
    is_linear,
    is_norm,
    join,
    linear_at,
    sizes,
)


@dataclass(frozen=True)
class Unit:
    """Names are those of the whole model. `name` is the module inside which activations are cut."""

    name: str
    kind: Literal["attention", "feed-forward", "own"]
    columns: tuple[str, ...]
    rows: str
    features: int  # between columns and rows, of all ranks together
    heads: Heads | None = None
    holder: str = ""  # the module whose numbers count heads
    summed: tuple[str, ...] = ()  # modules inside that every rank has whole and applies to its own heads
    fused: int = 1  # how many matrices lie one after the other in the columns

    @property
    def members(self) -> tuple[str, ...]:
        return (*self.columns, self.rows)


@dataclass(frozen=True)
class Refused:
    """Layers that look like a unit, and why they stay whole."""

    members: tuple[str, ...]
    because: str


def find_units(model: nn.Module) -> Iterator[Unit | Refused]:
    """In the order of the model's modules; no layer is in two of them."""
    taken: set[str] = set()
    for name, module in model.named_modules():
        for unit in _units_in(name, module):
            if not taken & set(unit.members):
                taken |= set(unit.members)
                yield unit


def _units_in(name: str, module: nn.Module) -> Iterator[Unit | Refused]:
    if isinstance(module, nn.MultiheadAttention):
        yield _multihead(name, module)
        return
    if isinstance(module, nn.Sequential):
        yield from _sequential_pairs(name, module)
        return
    attention = _separate_attention(name, module) or _fused_attention(name, module)
    if attention:
        yield attention
    feed_forward = _feed_forward(name, module)
    if feed_forward:
        yield feed_forward


def _multihead(name: str, module: nn.MultiheadAttention) -> Unit | Refused:
    members = (name, join(name, "out_proj"))
    if module.bias_k is not None or module.add_zero_attn:
        return Refused(members, "add_bias_kv and add_zero_attn add a key that no single head owns")
    heads = Heads(module.num_heads, module.num_heads, module.head_dim)  # its forward is ours: no number to change
    return Unit(name, "attention", (name,), members[1], module.embed_dim, heads, name, fused=3)


def _separate_attention(name: str, module: nn.Module) -> Unit | Refused | None:
    for names in QUERY_KEY_VALUE:
        if not all(linear_at(module, part) for part in names):
            continue
        query, key, value = (module.get_submodule(part) for part in names)
        (_, features), (_, key_features), (_, value_features) = sizes(query), sizes(key), sizes(value)
        fits = (o for o in OUTPUT if linear_at(module, o) and sizes(module.get_submodule(o))[0] == features)
        output = next((o for o in fits if o not in names), None)
        columns = tuple(join(name, part) for part in names)
        if output is None:
            return Refused(columns, f"no output layer with {features} features in was found beside {', '.join(names)}")
        members = (*columns, join(name, output))
        if key_features != value_features:
            return Refused(members, f"keys have {key_features} features and values {value_features}")
        holder = join(name, names[0].rpartition(".")[0])
        heads = heads_of(module.get_submodule(names[0].rpartition(".")[0]), features, key_features)
        return _attention(name, module, columns, members[-1], features, heads, holder, 1)
    return None


def _fused_attention(name: str, module: nn.Module) -> Unit | Refused | None:
    for part in (*FUSED, *INTERLEAVED):
        output = next((o for o in FUSED_OUTPUT if linear_at(module, o)), None)
        if output is None or not linear_at(module, part):
            continue
        total, features = sizes(module.get_submodule(part))[1], sizes(module.get_submodule(output))[0]
        columns, rows = (join(name, part),), join(name, output)
        if total == features:
            return None  # an ordinary layer that happens to bear that name
        if part in INTERLEAVED:
            return Refused((*columns, rows), "models differ in the order of queries, keys and values inside it")
        if total != 3 * features:
            return Refused((*columns, rows), f"{total} features are not three times {features}: the order is not known")
        return _attention(name, module, columns, rows, features, heads_of(module, features, features), name, 3)
    return None


def _attention(
    name: str,
    module: nn.Module,
    columns: tuple[str, ...],
    rows: str,
    features: int,
    heads: Heads | Unknown,
    holder: str,
    fused: int,
) -> Unit | Refused:
    """A unit, if everything else in there can be understood too."""
    members = (*columns, rows)
    if isinstance(heads, Unknown):
        return Refused(members, heads.because)
    place = module.get_submodule(holder.removeprefix(name).lstrip("."))
    own = next(iter(place._parameters), None)
    if own is not None:
        return Refused(members, f"it has a parameter {own!r} of its own, which may belong to single heads")
    summed = []
    for child, found in place.named_children():
        if join(holder, child) in members or next(found.parameters(), None) is None:
            continue
        if isinstance(found, nn.Embedding):
            return Refused(members, f"its embedding {child!r} may belong to single heads")
        if is_norm(found) and child.lower().startswith(("q", "k")):
            if any(parameter.numel() != heads.size for parameter in found.parameters()):
                return Refused(members, f"{child!r} is a norm over all heads together")
            summed.append(join(holder, child))
    return Unit(name, "attention", columns, rows, features, heads, holder, tuple(summed), fused)


def _feed_forward(name: str, module: nn.Module) -> Unit | Refused | None:
    for parts, last in FEED_FORWARD:
        if not all(linear_at(module, part) for part in (*parts, last)):
            continue
        outs = {sizes(module.get_submodule(part))[1] for part in parts}
        features = sizes(module.get_submodule(last))[0]
        if outs != {features}:
            continue
        columns, rows = tuple(join(name, part) for part in parts), join(name, last)
        width = sizes(module.get_submodule(parts[0]))[0]
        for child, found in module.named_children():
            inner = is_norm(found) and features != width
            if inner and any(parameter.numel() == features for parameter in found.parameters()):
                return Refused((*columns, rows), f"{child!r} is a norm over all features between them")
        return Unit(name, "feed-forward", columns, rows, features)
    return None


def _sequential_pairs(name: str, module: nn.Sequential) -> Iterator[Unit]:
    """Linear layers two by two, where only elementwise modules stand between."""
    first: str | None = None
    for child, found in module.named_children():
        if is_linear(found):
            if first is not None and sizes(module.get_submodule(first))[1] == sizes(found)[0]:
                yield Unit(name, "feed-forward", (join(name, first),), join(name, child), sizes(found)[0])
                first = None
            else:
                first = child
        elif not is_elementwise(found):
            first = None
