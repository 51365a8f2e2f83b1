# SPDX-License-Identifier: Apache-2.0
"""A model as a sequence of layers, and the part of it that one rank holds.

A model says how it is a sequence: it is an `nn.Sequential`, or it has ``pipeline_layers() -> [(name, module), ...]``.
Each layer is called with what the one before returned; the first with the model's inputs. A layer may be a part of the
model or a small module around such parts (an embedding with its positions, say); either way the parameters keep the
names that they have in the whole model, found by identity. What no local stage needs is moved to the meta device.
A layer's own attribute may also be a parameter or buffer of the model itself: it then follows the one of the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from unisono.core.errors import SetupError
from unisono.parallel.pipeline_split import Split, rank_of_stage

METHOD = "pipeline_layers"

_Moved = dict[int, tuple[torch.Tensor, torch.Tensor]]  # by id: the tensor, kept so that no other gets its id; its image


@dataclass(frozen=True)
class Layer:
    """`spreads`: it takes the several values of the layer before as several arguments, as traced stages do."""

    name: str
    module: nn.Module
    spreads: bool = False


@dataclass(frozen=True)
class Tie:
    """One parameter of the whole model that several ranks hold: `copies` are (rank, name there), the owner first."""

    name: str
    copies: tuple[tuple[int, str], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, _ in self.copies)


def is_sequence(model: nn.Module) -> bool:
    return isinstance(model, nn.Sequential) or callable(getattr(model, METHOD, None))


def layers_of(model: nn.Module) -> list[Layer]:
    """The model's own account of its layers, checked."""
    if not is_sequence(model):
        raise SetupError(
            f"{type(model).__name__} does not say which layers it is a sequence of",
            do=f"give it a method {METHOD}() that returns a list of (name, module), each called with what the one"
            " before returned; or name boundaries and give an example input, so that the model can be traced",
        )
    declared = getattr(model, METHOD, None)
    pairs: Iterable[tuple[str, nn.Module]] = declared() if callable(declared) else model.named_children()
    found = [Layer(name, module) for name, module in pairs]
    _check_names(found)
    _check_parts(model, found)
    return found


def _check_names(layers: Sequence[Layer]) -> None:
    names = [layer.name for layer in layers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not names or twice:
        what = f"names {', '.join(twice)} twice" if twice else "is empty"
        raise SetupError(f"{METHOD}() {what}", do="name every layer, each once")


def _check_parts(model: nn.Module, layers: Sequence[Layer]) -> None:
    """Every parameter of the model lies in a layer, and every parameter of a layer in the model."""
    whole = {id(parameter): name for name, parameter in model.named_parameters()}
    used: set[int] = set()
    for layer in layers:
        if any(part is model for part in layer.module.modules()):
            raise SetupError(
                f"layer {layer.name} holds the whole model, so that every stage would",
                do="let it hold only the modules that it calls",
            )
        for name, parameter in layer.module.named_parameters():
            if id(parameter) not in whole:
                raise SetupError(
                    f"parameter {name} of layer {layer.name} is none of the model's",
                    cause="it would have no name in checkpoints",
                    do="make it a parameter of the model, and let the layer refer to that",
                )
            used.add(id(parameter))
    unused = [name for key, name in whole.items() if key not in used]
    if unused:
        raise SetupError(f"parameter {unused[0]} belongs to no layer of {METHOD}()", do="add the layer that uses it")


# --- what each rank holds


def names_by_rank(model: nn.Module, layers: Sequence[Layer], split: Split, ranks: int) -> tuple[tuple[str, ...], ...]:
    """By rank: the names of its parameters in the whole model, in the whole model's order."""
    holders = _holders(model, layers, split, ranks)
    whole = [(name, id(parameter)) for name, parameter in model.named_parameters()]
    return tuple(tuple(name for name, key in whole if rank in holders[key]) for rank in range(ranks))


def ties(model: nn.Module, layers: Sequence[Layer], split: Split, ranks: int) -> tuple[Tie, ...]:
    """Parameters that several ranks hold, in the whole model's order: the same on every rank."""
    holders = _holders(model, layers, split, ranks)
    shared = [(name, p) for name, p in model.named_parameters() if len(holders[id(p)]) > 1]
    if not shared:
        return ()
    local = []
    for rank in range(ranks):
        part = graft(model, [layers[i] for i in positions_of(split, rank, ranks)])
        local.append({id(parameter): name for name, parameter in part.named_parameters()})
    return tuple(Tie(name, tuple((rank, local[rank][id(p)]) for rank in sorted(holders[id(p)]))) for name, p in shared)


def positions_of(split: Split, rank: int, ranks: int) -> list[int]:
    return [i for stage, mine in enumerate(split.stages) if rank_of_stage(stage, ranks) == rank for i in mine]


def _holders(model: nn.Module, layers: Sequence[Layer], split: Split, ranks: int) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {id(parameter): set() for parameter in model.parameters()}
    for rank in range(ranks):
        for position in positions_of(split, rank, ranks):
            for parameter in layers[position].module.parameters():
                found[id(parameter)].add(rank)
    return found


# --- modules of a part


class Part(nn.Module):
    """Some layers of a model, under the names that their parameters and buffers have in the whole model."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self._pipeline_layers = tuple(layers)  # not registered: the modules are, under the model's names
        self._pipeline_links: list[_Link] = []

    def train(self, mode: bool = True) -> Part:
        """Also for small modules around parts of the model, which are in no tree."""
        super().train(mode)
        for layer in self._pipeline_layers:
            layer.module.train(mode)
        return self

    def follow(self) -> None:
        """Let layers see what sharding or loading has put in the place of tensors that the model itself holds."""
        for link in self._pipeline_links:
            getattr(link.user, link.kind)[link.name] = getattr(link.holder, link.kind)[link.held_as]


class _Link(NamedTuple):
    """A tensor of `user`, a module in no tree, that lies in `holder`, a module of the tree."""

    kind: str  # _parameters or _buffers
    user: nn.Module
    name: str
    holder: nn.Module
    held_as: str


def graft(model: nn.Module, layers: Sequence[Layer], part: Part | None = None) -> Part:
    """Hang the modules of the layers into a tree of empty holders shaped like the model's own."""
    part = part or Part(layers)
    modules = [module for layer in layers for module in layer.module.modules()]
    known = {id(module) for module in model.modules()}
    loose = {
        id(tensor): (kind, module, name)
        for module in modules
        if id(module) not in known
        for kind in ("_parameters", "_buffers")
        for name, tensor in getattr(module, kind).items()
        if tensor is not None
    }
    _fill(part, model, {id(module) for module in modules}, loose, part._pipeline_links)
    return part


_Loose = dict[int, tuple[str, nn.Module, str]]  # by id of a tensor: its kind, and where it is used outside of the tree


def _fill(holder: nn.Module, module: nn.Module, wanted: set[int], loose: _Loose, links: list[_Link]) -> None:
    """Give the empty holder what is wanted of the module in whose place it stands."""
    for kind in ("_parameters", "_buffers"):
        for name, tensor in getattr(module, kind).items():
            if id(tensor) in loose:
                getattr(holder, kind)[name] = tensor
                links.append(_Link(kind, *loose[id(tensor)][1:], holder, name))
    for name, child in module.named_children():
        if id(child) in wanted:
            holder.add_module(name, child)
        else:
            below = nn.Module()
            _fill(below, child, wanted, loose, links)
            if any(True for _ in (*below.children(), *below.parameters(), *below.buffers())):
                holder.add_module(name, below)


def drop_others(model: nn.Module, part: Part) -> None:
    """Move what the part does not hold to the meta device, in place: the user's script may still hold the model."""
    keep = {id(tensor) for tensor in (*part.parameters(), *part.buffers())}
    moved: _Moved = {}  # what was tied stays tied
    for module in model.modules():
        _swap(module._parameters, keep, moved, lambda p: nn.Parameter(p.detach().to("meta"), p.requires_grad))
        _swap(module._buffers, keep, moved, lambda b: b.to("meta"))


def _swap(
    tensors: dict[str, nn.Parameter | None] | dict[str, torch.Tensor | None],
    keep: set[int],
    moved: _Moved,
    empty: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and id(tensor) not in keep:
            if id(tensor) not in moved:
                moved[id(tensor)] = (tensor, empty(tensor))
            tensors[name] = moved[id(tensor)][1]  # type: ignore[assignment]
