# SPDX-License-Identifier: Apache-2.0
"""What one rank of a replica holds of the model: its parts, as plain tensors under the names of the whole.

Parameters that are spread over ranks are DTensors; the optimizer, the reduction between replicas and everything that
moves or compares state work on their local tensors, which share memory with them. `shadow` is a module made of those.
Whole tensors are put together, and cut, one at a time. Called by the grouped strategy and by whoever saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.core.errors import SetupError
from unisono.parallel.tensor_parts import gather_full, local_gradient, parts_of, window
from unisono.parallel.tensor_plan import Cut

NO_CUTS: Mapping[str, Cut] = MappingProxyType({})


class Shards:
    def __init__(
        self,
        model: nn.Module,
        cuts: Mapping[str, Cut] = NO_CUTS,
        ways: int = 1,
        copies: frozenset[str] = frozenset(),
    ) -> None:
        """`model` has been cut; its parameters stay the objects that they are now. `cuts`: how tensor parallelism has
        cut some of them, over so many ways. `copies` belong to another stage, which shares them with this one."""
        self._cuts, self._ways, self.copies = cuts, ways, copies
        self.real = dict(model.named_parameters())  # each once
        self.local = {name: nn.Parameter(_local(p).detach(), p.requires_grad) for name, p in self.real.items()}
        first = {id(parameter): name for name, parameter in self.real.items()}
        self.shadow = nn.Module()
        self._named = dict(model.named_parameters(remove_duplicate=False))  # under all their names
        for name, parameter in self._named.items():
            owner, key = _owner(self.shadow, name)
            owner.register_parameter(key, self.local[first[id(parameter)]])
        kept = set(model.state_dict())
        for name, buffer in model.named_buffers():
            owner, key = _owner(self.shadow, name)
            owner.register_buffer(key, buffer, persistent=name in kept)

    def follow(self) -> None:
        """What the script freezes or thaws."""
        for name, parameter in self.real.items():
            self.local[name].requires_grad_(parameter.requires_grad)

    def gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """Of the backward pass just done, those that have not been told, each in its parameter's own cut; they are
        taken away from the parameters."""
        for name in self.real:
            yield name, self._taken(name)

    def tell_gradients(self, tell: Callable[[str, Tensor], None]) -> None:
        """From now on, each as soon as the backward pass has it, so that they are never all there a second time. Not
        where a microbatch goes backward in several pieces."""

        def hook(name: str) -> Callable[[Tensor], None]:
            def taken(_: Tensor) -> None:
                gradient = self._taken(name)
                if gradient is not None:
                    tell(name, gradient)

            return taken

        for name, parameter in self.real.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(hook(name))  # type: ignore[no-untyped-call]

    def _taken(self, name: str) -> Tensor | None:
        parameter = self.real[name]
        gradient, parameter.grad = local_gradient(parameter), None
        return gradient

    @torch.no_grad()
    def whole(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor of which `local` is this rank's part, cut as the parameter is. All ranks that share the
        parameter call it together."""
        parameter = self._named.get(name)
        if not isinstance(parameter, DTensor) or local.shape != parameter.to_local().shape:
            return local
        spread = DTensor.from_local(
            local, parameter.device_mesh, parameter.placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
        return gather_full(spread, self._cuts.get(name), self._ways)

    @torch.no_grad()
    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, cut as the parameter is."""
        parameter = self._named.get(name)
        if not isinstance(parameter, DTensor):
            return whole
        if whole.shape != parameter.shape:  # a number that belongs to the parameter as a whole
            return whole
        part = torch.empty_like(parameter.to_local(), dtype=whole.dtype)
        for piece in parts_of(name, parameter, self._cuts.get(name), self._ways):
            window(part, piece.at, piece.sizes).copy_(window(whole, piece.offsets, piece.sizes))
        return part

    @staticmethod
    def joined(outputs: Any) -> Any:
        """Outputs that were left cut over the vocabulary."""
        return outputs.full_tensor() if isinstance(outputs, DTensor) else outputs

    @property
    def alike(self) -> frozenset[str]:
        """Parameters that other ranks of the stage hold with the same values: to stay so they must get the same bits,
        and a code of a block says of each element what its neighbours allow. So nothing else is in their buckets."""
        return frozenset(name for name in self.real if self.share(name) != 1.0)

    def share(self, name: str) -> float:
        """1 over the number of ranks that hold the same part of it: so that, added over ranks, it counts once."""
        parameter = self.real[name]
        if not isinstance(parameter, DTensor):
            return 0.0
        copies = 1
        for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            copies *= size if placement.is_replicate() else 1  # a cut that FSDP has cut again is no Shard to torch
        return 1.0 / copies


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that is to hold it, made on the way."""
    *path, key = name.split(".")
    for part in path:
        found = root._modules.get(part)
        if found is None:
            found = nn.Module()
            root.add_module(part, found)
        root = found
    return root, key


def point_optimizer_at(optimizer: torch.optim.Optimizer, before: Mapping[int, Sequence[str]], shards: Shards) -> None:
    """The user's optimizer was made for the whole parameters, of which `before` has all names by identity; from now on
    it works on the parts. Those that other ranks hold alone are theirs."""
    if optimizer.state:
        raise SetupError(
            "the optimizer has state already, which cannot be cut",
            cause="it has made steps before the training began, or makes state when it is built, as Adagrad does",
            do="give a fresh optimizer, such as AdamW; a run is continued from its checkpoint",
        )
    for group in optimizer.param_groups:
        names = [name for parameter in group["params"] for name in before[id(parameter)]]
        group["params"] = [shards.local[name] for name in names if name in shards.local]
