# SPDX-License-Identifier: Apache-2.0
"""How a module computes with its part of its parameters: linear layers, embeddings, and those that have theirs whole.

Each function here makes a new `forward` for one module. Parameters are DTensors; while a module runs it sees its local
tensors under their names, so its own code (a kernel in fp8, say) runs as it is. Names and state_dict stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from unisono.parallel.tensor_blocks import Unit
from unisono.parallel.tensor_exchange import Team, gather, split, sum_backward, sum_forward, sum_to_mine
from unisono.parallel.tensor_region import SEQUENCE_DIM, Region, Scopes

Forward = Callable[..., Any]


def local(parameter: Tensor) -> Tensor:
    """This rank's part; its gradient comes out as the parameter is cut."""
    if isinstance(parameter, DTensor):
        return parameter.to_local(grad_placements=parameter.placements)
    return parameter


@contextlib.contextmanager
def seeing(module: nn.Module, tensors: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Inside, the module's own parameters are these tensors."""
    held = {name: module._parameters[name] for name in tensors}
    module._parameters.update(tensors)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(held)


def whole(inner: Forward, carriers: Sequence[nn.Module], team: Team, summed: bool) -> Forward:
    """`carriers` have the parameters that it reads. `summed`: it works on cut activations, so each rank has one term of
    its parameters' gradients.
    """

    def seen(tensor: Tensor) -> Tensor:
        return sum_backward(local(tensor), team) if summed else local(tensor)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for carrier in carriers:
                stack.enter_context(seeing(carrier, _present(carrier, seen)))
            return inner(*args, **kwargs)

    return forward


def carriers_of(module: nn.Module) -> list[nn.Module]:
    """A module, and those below whose parameters it reads without calling them."""
    below = [child for child in module.children() if isinstance(child, nn.ParameterList | nn.ParameterDict)]
    return [module, *below, *([module.out_proj] if isinstance(module, nn.MultiheadAttention) else [])]


def _present(module: nn.Module, change: Callable[[Tensor], Tensor] = local) -> dict[str, Tensor | None]:
    return {name: change(parameter) for name, parameter in module._parameters.items() if parameter is not None}


def columns(module: nn.Module, scopes: Scopes, unit: Unit) -> Forward:
    """Each rank computes some of the features out."""
    inner, label = module.forward, scopes.label(unit.name)

    def forward(x: Tensor) -> Tensor:
        x = enter_columns(scopes.of(label), unit, x)
        with seeing(module, _present(module)):
            return inner(x)  # type: ignore[no-any-return]

    return forward


def enter_columns(region: Region, unit: Unit, x: Tensor) -> Tensor:
    """From here to the unit's rows, activations are cut by features."""
    x = region.enter(x)
    region.state = "features"
    region.heads = unit.heads.queries // region.team.ways if unit.heads else 0
    region.features = unit.features // region.team.ways
    return x


def rows(module: nn.Module, team: Team, scopes: Scopes, unit: Unit) -> Forward:
    """Each rank computes a term of all features out, from its own features in. The bias comes once, after the sum."""
    inner, label = module.forward, scopes.label(unit.name)

    def forward(x: Tensor) -> Tensor:
        region = scopes.of(label)
        region.state = region.outside
        term = _without_bias(module, inner, x)
        bias = module._parameters.get("bias")
        if region.outside == "sequence":
            out = sum_to_mine(term, team, SEQUENCE_DIM)
            return out if bias is None else out + sum_backward(local(bias), team)
        out = sum_forward(term, team)
        return out if bias is None else out + local(bias)

    return forward


def _without_bias(module: nn.Module, inner: Forward, x: Tensor) -> Tensor:
    weight = module._parameters["weight"]
    assert weight is not None
    if isinstance(module, nn.Linear):
        with seeing(module, {"weight": local(weight), "bias": None}):
            return inner(x)  # type: ignore[no-any-return]
    return x @ local(weight)  # GPT-2's Conv1D cannot do without a bias


def lone_columns(module: nn.Module, team: Team, keep: DeviceMesh | None) -> Forward:
    """Takes and gives whole activations; with `keep`, gives a DTensor that stays cut over that mesh."""
    inner = module.forward

    def forward(x: Tensor) -> Tensor:
        with seeing(module, _present(module)):
            out: Tensor = inner(sum_backward(x, team))
        if keep is not None:
            return DTensor.from_local(out, keep, [Shard(out.dim() - 1)], run_check=False)
        return gather(out, team, out.dim() - 1)

    forward.gives_a_part = keep is not None  # type: ignore[attr-defined]  # for those who would not call it
    return forward


def lone_rows(module: nn.Module, team: Team) -> Forward:
    inner = module.forward

    def forward(x: Tensor) -> Tensor:
        out = sum_forward(_without_bias(module, inner, split(x, team, x.dim() - 1)), team)
        bias = module._parameters.get("bias")
        return out if bias is None else out + local(bias)

    return forward


def embedding_rows(module: nn.Embedding, team: Team) -> Forward:
    """Each rank looks up the words that it has; the sum with the others' zeros is exact."""
    count = module.num_embeddings // team.ways
    first = team.rank * count
    has_padding = module.padding_idx is not None and first <= module.padding_idx < first + count
    padding = module.padding_idx - first if has_padding and module.padding_idx is not None else None

    def forward(words: Tensor) -> Tensor:
        known = (words >= 0) & (words < module.num_embeddings)  # others are for torch to complain about
        elsewhere = known & ((words < first) | (words >= first + count))
        mine = (words - first).masked_fill(elsewhere, 0)
        found = functional.embedding(mine, local(module.weight), padding)  # (..., features)
        return sum_forward(found.masked_fill(elsewhere.unsqueeze(-1), 0), team)

    return forward


def embedding_columns(module: nn.Embedding, team: Team) -> Forward:
    def forward(words: Tensor) -> Tensor:
        found = functional.embedding(words, local(module.weight), module.padding_idx)
        return gather(found, team, found.dim() - 1)

    return forward
