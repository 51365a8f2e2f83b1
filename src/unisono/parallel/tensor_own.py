# SPDX-License-Identifier: Apache-2.0
"""A user's own plan of tensor parallelism: patterns of module names and what to do with what they match. Pure.

The first pattern that matches a module decides. A pattern that decides nothing is an error: a misspelt name would
otherwise cost memory and nobody would know.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from unisono.core.errors import SetupError, suggest
from unisono.parallel.tensor_blocks import Unit
from unisono.parallel.tensor_heads import Unknown, heads_of
from unisono.parallel.tensor_names import HEAD_COUNTS, HEAD_SIZES, is_elementwise, is_linear, is_norm, parents, sizes

WAYS_TO_CUT = ("columns", "rows", "sequence", "whole")


def decide(model: nn.Module, own: Mapping[str, str]) -> dict[str, str]:
    """What the patterns say, module by module. ``whole`` counts for everything below a module too."""
    modules = dict(model.named_modules())
    decided: dict[str, str] = {}
    for pattern, how in own.items():
        if how not in WAYS_TO_CUT:
            raise SetupError(
                f"the plan says {how!r} for {pattern!r}",
                do=f"take one of {', '.join(WAYS_TO_CUT)}; {suggest(how, WAYS_TO_CUT)}".rstrip("; "),
            )
        matched = [name for name in modules if name and fnmatchcase(name, pattern)]
        useful = [name for name in matched if _can(modules[name], how)]
        if not useful:
            raise _useless(pattern, how, matched, modules)
        for name in useful:
            below = [n for n in modules if n == name or n.startswith(f"{name}.")] if how == "whole" else [name]
            decided |= {n: how for n in below if n not in decided}
    return decided


def _can(module: nn.Module, how: str) -> bool:
    if how in ("columns", "rows"):
        return is_linear(module) or isinstance(module, nn.Embedding)
    return next(module.parameters(), None) is not None


def _useless(pattern: str, how: str, matched: list[str], modules: dict[str, nn.Module]) -> SetupError:
    if not matched:
        return SetupError(
            f"the plan's pattern {pattern!r} matches no module",
            do=suggest(pattern, modules) or "patterns are matched with whole names, such as 'blocks.*.mlp.up'",
        )
    kinds = sorted({type(modules[name]).__name__ for name in matched})
    return SetupError(
        f"the plan's pattern {pattern!r} matches nothing that can be cut by {how}",
        cause=f"it matches {len(matched)} modules of kind {', '.join(kinds)}",
        do="columns and rows are for linear layers and embeddings; sequence is for modules with parameters",
    )


def pair(model: nn.Module, decided: Mapping[str, str]) -> list[Unit]:
    """Columns and rows of a user's plan that belong together: the nearest whose sizes fit. The others stand alone."""
    free = [name for name, how in decided.items() if how == "columns" and is_linear(model.get_submodule(name))]
    units = []
    for rows, how in decided.items():
        if how != "rows" or not is_linear(model.get_submodule(rows)):
            continue
        features = sizes(model.get_submodule(rows))[0]
        for place in parents(rows):
            inside = [name for name in free if not place or name.startswith(f"{place}.")]
            fits = [name for name in inside if sizes(model.get_submodule(name))[1] == features]
            if fits and _nothing_between(model.get_submodule(place), place, fits[0], rows, features):
                shared = [name for name in inside if name in fits or _is_key(model, name, fits[0])]
                units.append(_own_unit(model, place, tuple(shared), rows, features))
                free = [name for name in free if name not in shared]
                break
    return units


def _nothing_between(place: nn.Module, name: str, columns: str, rows: str, features: int) -> bool:
    """Whether nothing is known to stand between that needs all features at once; then each stands alone instead."""
    children = dict(place.named_children())
    if isinstance(place, nn.Sequential):
        first, last = (list(children).index(n.removeprefix(f"{name}.").split(".")[0]) for n in (columns, rows))
        return all(is_elementwise(module) for module in list(children.values())[first + 1 : last])
    norms = (module for module in children.values() if is_norm(module))
    return not any(parameter.numel() == features for norm in norms for parameter in norm.parameters())


def _is_key(model: nn.Module, name: str, query: str) -> bool:
    """Fewer keys than queries: in the same module, and a whole number of times smaller."""
    beside = name.rpartition(".")[0] == query.rpartition(".")[0]
    return beside and sizes(model.get_submodule(query))[1] % sizes(model.get_submodule(name))[1] == 0


def _own_unit(model: nn.Module, place: str, columns: tuple[str, ...], rows: str, features: int) -> Unit:
    holder = columns[0].rpartition(".")[0]
    module = model.get_submodule(holder)
    if len(columns) < 3 or not any(name in vars(module) for name in (*HEAD_COUNTS, *HEAD_SIZES)):
        return Unit(place, "own", columns, rows, features)
    heads = heads_of(module, features, min(sizes(model.get_submodule(name))[1] for name in columns))
    if isinstance(heads, Unknown):
        raise SetupError(
            f"your plan cuts {holder!r}, and what each rank should reshape to is not known",
            cause=heads.because,
            do="reshape with view(..., -1, self.head_dim), or say 'whole' for it",
        )
    return Unit(place, "attention", columns, rows, features, heads, holder)
