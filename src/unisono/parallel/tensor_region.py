# SPDX-License-Identifier: Apache-2.0
"""Where a forward pass is: whether an activation is whole, or cut by features or by sequence. And dropout there.

All ranks of a tensor-parallel group draw from equal random states, and every draw is that of the whole activation, of
which a rank takes its own part. So the states stay equal, parts are dropped independently of each other, and the
masks are those of one process. A draw that cannot be made that way is refused, never guessed at.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from unisono.core.errors import SetupError
from unisono.parallel.tensor_exchange import Team, gather, gather_sum, laid_like, sum_backward

State = Literal["whole", "features", "sequence"]
SEQUENCE_DIM = 1  # (batch, sequence, features)


@dataclass(frozen=True, eq=False)
class Label:
    """A module's name, told from others by identity: compiled code would look at the letters and not be shared."""

    name: str


@dataclass
class Region:
    """One call of a module inside which activations are cut. `heads` and `features` are those of one rank."""

    label: Label
    team: Team
    outside: State  # what it gives
    state: State
    heads: int = 0
    features: int = 0
    _entered: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.label.name

    def enter(self, tensor: Tensor) -> Tensor:
        """The tensor to feed columns with. Once for all that read the same: their gradients are then summed at once."""
        for seen, entered in self._entered:
            if seen is tensor:
                return entered
        if self.state == "sequence":
            entered = gather_sum(tensor, self.team.gather(tensor.detach(), SEQUENCE_DIM), self.team, SEQUENCE_DIM)
        else:
            entered = sum_backward(tensor, self.team)
        self._entered.append((tensor, entered))
        return entered

    def gathered(self, tensor: Tensor) -> Tensor:
        """The whole sequence, for a module that reads its length. Columns that are fed with it sum only my part."""
        whole = gather(tensor, self.team, SEQUENCE_DIM)
        self._entered.append((whole, gather_sum(tensor, whole.detach(), self.team, SEQUENCE_DIM)))
        return whole

    def cut_dimension(self, tensor: Tensor) -> int:
        """Along which dimension an activation is cut here."""
        shape = tensor.shape
        if self.state == "sequence":
            if len(shape) == 3:
                return SEQUENCE_DIM
        elif self.heads and len(shape) == 4 and self.heads in (shape[1], shape[2]):
            return 1 if shape[1] == self.heads else 2  # (batch, heads, ...) is how nearly all lay it
        elif shape[-1] == self.features:
            return len(shape) - 1
        raise SetupError(
            f"dropout of an activation of shape {tuple(shape)} in {self.name!r} cannot be the same on all ranks",
            cause="nothing says along which dimension it is cut",
            do=f"say 'whole' for {self.name!r} in your plan, or leave its dropout out",
        )


class Scopes:
    """The regions of one model that are being run, the innermost last."""

    def __init__(self) -> None:
        self._open: list[Region] = []
        self._labels: dict[str, Label] = {}

    def label(self, name: str) -> Label:
        """The one of that module."""
        return self._labels.setdefault(name, Label(name))

    @property
    def innermost(self) -> Region:
        return self._open[-1]

    def of(self, label: Label) -> Region:
        """The running call of that module."""
        return next(region for region in reversed(self._open) if region.label is label)

    @contextlib.contextmanager
    def inside(self, region: Region) -> Iterator[Region]:
        self._open.append(region)
        try:
            with contextlib.nullcontext() if len(self._open) > 1 else EqualDraws(self):
                yield region
        finally:
            self._open.pop()


class EqualDraws(TorchFunctionMode):
    """Takes over what is drawn for cut activations, and passes everything else on."""

    def __init__(self, scopes: Scopes) -> None:
        super().__init__()
        self._scopes = scopes

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        region = self._scopes.innermost
        if region.state == "whole":
            return func(*args, **kwargs)
        if func is functional.dropout:
            return _dropout(region, *args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return _attention(region, func, *args, **kwargs)
        if func in _DRAWS and isinstance(args[0], Tensor) and args[0].numel() > args[0].shape[0]:
            raise SetupError(
                f"{func.__name__} in {region.name!r} draws random numbers that would not fit together",
                cause=f"the activation is cut by {region.state} there, and only dropout is drawn as a whole",
                do=f"say 'whole' for {region.name!r} in your plan",
            )
        return func(*args, **kwargs)


_DRAWS = (
    functional.alpha_dropout, functional.feature_alpha_dropout, functional.dropout1d, functional.dropout2d,
    functional.dropout3d, functional.gumbel_softmax, torch.bernoulli, torch.rand_like, torch.randn_like,
    torch.randint_like, torch.multinomial, Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_,
)  # fmt: skip


def _noise(region: Region, tensor: Tensor, p: float) -> Tensor:
    """My part of the mask of the whole activation, drawn by the kernel that one process would use."""
    dim = region.cut_dimension(tensor)
    shape = list(tensor.shape)
    shape[dim] *= region.team.ways
    return region.team.mine(functional.dropout(laid_like(tensor.new_ones(shape), tensor), p, True), dim)


def _dropout(region: Region, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    noise = _noise(region, input, p)
    return input.mul_(noise) if inplace else input * noise


def _attention(
    region: Region,
    func: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Tensor:
    """Queries, keys and values of my heads: (batch, heads, length, size)."""
    if dropout_p == 0:
        return func(query, key, value, attn_mask, dropout_p, is_causal, **more)
    if query.is_cuda:
        with _own_draws(query.device, region.team.rank):
            return func(query, key, value, attn_mask, dropout_p, is_causal, **more)
    scale = more.get("scale") or 1 / math.sqrt(query.shape[-1])
    if more.get("enable_gqa"):
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scores = (query @ key.transpose(-2, -1)) * scale  # (n, h, t, s), as torch's own does it with dropout on a CPU
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1)
    return (weights * _noise(region, weights, dropout_p)) @ value


@contextlib.contextmanager
def _own_draws(device: torch.device, rank: int) -> Iterator[None]:
    """On a GPU the fused kernels draw inside, so a whole mask cannot be had: each rank gets a stream of its own.

    Afterwards all are where one stream would be, so that the ranks' states stay equal.
    """
    generator = torch.cuda.default_generators[device.index or 0]
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.manual_seed((seed ^ (0x9E3779B97F4A7C15 * (rank + 1))) & (2**63 - 1))
    generator.set_offset(offset)
    try:
        yield
    finally:
        offset = generator.get_offset()
        generator.manual_seed(seed)
        generator.set_offset(offset)
