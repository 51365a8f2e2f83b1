# SPDX-License-Identifier: Apache-2.0
"""How modules are run inside which activations are cut: units, and the blocks of a sequence that lies cut.

Each function makes a new `forward` for one module. With sequence parallelism the first block of a stack cuts the
sequence, attentions and feed-forward modules put it together for themselves, and the last block puts it together for
what follows: embeddings, positions, masks and the output layer see whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from unisono.core.errors import SetupError
from unisono.parallel.tensor_exchange import Team, gather, split
from unisono.parallel.tensor_layers import Forward
from unisono.parallel.tensor_region import SEQUENCE_DIM, Region, Scopes
from unisono.parallel.tensor_sequence import check_length


def unit(module: nn.Module, name: str, scopes: Scopes, team: Team, cut: bool) -> Forward:
    """`cut`: the sequence comes cut and shall leave cut."""
    inner, label = _explained(module, name), scopes.label(name)

    def forward(*args: Any, **kwargs: Any) -> Any:
        region = Region(label, team, "sequence" if cut else "whole", "whole")
        if cut:
            args, kwargs = _change_first(name, args, kwargs, region.gathered)
        with scopes.inside(region):
            return inner(*args, **kwargs)

    return forward


def block(module: nn.Module, name: str, scopes: Scopes, team: Team, is_first: bool, is_last: bool) -> Forward:
    """One of a stack of blocks between which the sequence lies cut."""
    inner, label = module.forward, scopes.label(name)

    def cut(x: Tensor) -> Tensor:
        check_length(x.shape[SEQUENCE_DIM], team.ways)
        return split(x, team, SEQUENCE_DIM)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if is_first:
            args, kwargs = _change_first(name, args, kwargs, cut)
        with scopes.inside(Region(label, team, "sequence", "sequence")):
            out = inner(*args, **kwargs)
        if not is_last:
            return out
        if isinstance(out, tuple):  # Hugging Face's older blocks give (activations, ...)
            return (gather(out[0], team, SEQUENCE_DIM), *out[1:])
        return gather(out, team, SEQUENCE_DIM)

    return forward


def _change_first(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first activation (batch, sequence, features) among the arguments, wherever it occurs, is changed."""
    values = (*args, *kwargs.values())
    first = next((v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim() == 3), None)
    if first is None:
        raise SetupError(
            f"sequence parallelism found no sequence in what {name!r} was called with",
            cause="it needs an activation of three dimensions: (batch, sequence, features)",
            do="leave sequence parallelism out",
        )
    changed = change(first)
    return (
        tuple(changed if value is first else value for value in args),
        {key: changed if value is first else value for key, value in kwargs.items()},
    )


def _explained(module: nn.Module, name: str) -> Forward:
    """Shapes that do not fit inside a cut module have one likely cause; say it."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        except RuntimeError as error:
            if not any(word in str(error) for word in ("shape", "size", "mixed torch.Tensor and DTensor")):
                raise
            raise SetupError(
                f"{name or 'the model'!r} failed on its part of the features",
                cause=str(error).splitlines()[0],
                do="reshape with view(..., -1, head_dim) and call layers instead of reading their weights, "
                f"or say 'whole' for {name!r} in your plan",
            ) from error

    return forward
