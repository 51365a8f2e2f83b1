# SPDX-License-Identifier: Apache-2.0
"""A training's state where ranks hold parts of it: put together for checkpoints and hashes, cut when it is taken up.

A checkpoint holds whole tensors under the names of the whole model, whatever the mesh: so any mesh reads what any other
has written. Tensors are put together one at a time and kept by the first rank alone, in the memory of its host. What
microbatches carry cannot be put together, since a code is one of a rank's part: each rank's is saved as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.checkpoint.naming import by_name, by_number, names_in_order
from unisono.checkpoint.specs import TensorSpec, declared
from unisono.comm.inner import Inner
from unisono.core.mesh import Mesh
from unisono.parallel.carried import Carried

if TYPE_CHECKING:
    from unisono.parallel.shards import Shards

Specs = Mapping[str, TensorSpec]


class Whole:
    """How things stood before the model was cut."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.parameters = list(names.values())
        self.names: dict[int, list[str]] = {}  # all of each parameter's, by identity
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), []).append(name)
        self.first_name = {name: known[0] for known in self.names.values() for name in known}
        self.trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        self.modes = [module.training for module in model.modules()]
        self.groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self.entries = [name for name, value in model.state_dict().items() if isinstance(value, Tensor)]
        self.shapes = {  # as a checkpoint names them
            f"model.{name}": declared(name, value.dtype, tuple(value.shape))
            for name, value in model.state_dict().items()
            if isinstance(value, Tensor)
        }

    @property
    def as_before(self) -> dict[str, Any]:
        """Of the facts in a checkpoint, those that a cut model cannot tell."""
        return {"trainable": [self.trainable[name] for name in self.parameters], "modes": self.modes}


class Spread:
    """The state of a replica, seen from one of its ranks."""

    def __init__(
        self, whole: Whole, shards: Shards, optimizer: torch.optim.Optimizer, mesh: Mesh, inner: Inner
    ) -> None:
        self.whole, self.shards, self.optimizer, self.mesh, self.inner = whole, shards, optimizer, mesh, inner
        self._held_names = set(shards.shadow.state_dict())
        self._held_as = {whole.first_name[name]: name for name, _ in shards.shadow.named_parameters()}
        self.carried: Mapping[str, Specs] = {}  # of one microbatch, by the place of the rank that carries it

    @property
    def is_first(self) -> bool:
        return self.inner.rank == 0

    @property
    def place(self) -> str:
        return self.mesh.named(self.inner.rank)

    def compare_carried(self, carried: Carried) -> None:
        """All ranks at the same time, once: what each of them carries."""
        rows: list[Any] = [None] * self.inner.size
        dist.all_gather_object(rows, specs_of_carried(carried))
        self.carried = {self.mesh.named(rank): row for rank, row in enumerate(rows)}
        carried.goes_along = any(rows)

    # --- put together: all ranks call these at the same time

    def weights(self) -> dict[str, Tensor]:
        """The whole model's tensors by name, on the first rank; nothing elsewhere."""
        found = self._collect(self.shards.shadow.state_dict())
        return {name: found[name] for name in self.whole.entries if name in found}

    def optimizer_by_name(self) -> dict[str, Any]:
        local = by_name(self.optimizer.state_dict(), names_in_order(self.shards.shadow, self.optimizer))
        pieces = {f"{name}\n{key}": value for name, entry in local["state"].items() for key, value in entry.items()}
        tensors = self._collect({key: value for key, value in pieces.items() if isinstance(value, Tensor)})
        plain = {key: value for key, value in pieces.items() if not isinstance(value, Tensor)}
        state: dict[str, Any] = {}
        for name in self.whole.parameters:
            prefix = f"{name}\n"
            entry = {
                key.removeprefix(prefix): value for key, value in {**plain, **tensors}.items() if key.startswith(prefix)
            }
            if entry:
                state[name] = entry
        groups = [{**group, "params": names} for group, names in zip(local["groups"], self.whole.groups, strict=True)]
        return {"state": state, "groups": groups}

    def carried_of_all(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What each rank has under names of its own: on the first rank; nothing elsewhere."""
        found = dict(own)
        if not self.is_first:
            _send({name: tensor.to("cpu") for name, tensor in own.items()}, 0)
            return {}
        for sender in range(1, self.inner.size):
            found |= dict(_receive(sender))
        return found

    def _collect(self, local: Mapping[str, Any]) -> dict[str, Tensor]:
        """The first ranks of a pipeline's stages have the whole tensors, and give them to the first of all."""
        found: dict[str, Tensor] = {}
        place = self.mesh.place(self.inner.rank)
        speaks = not (place["fsdp"] or place["tp"])
        for name, value in local.items():
            if isinstance(value, Tensor):
                whole = self.shards.whole(name.split("\n")[0], value)
                if speaks:
                    found[name] = whole.detach().to("cpu", copy=True)
        for stage in range(1, self.mesh.pp):
            sender = self.mesh.rank({"pp": stage, "fsdp": 0, "tp": 0})
            if self.inner.rank == sender:
                _send(found, 0)
            elif self.is_first:
                found |= dict(_receive(sender))
        return found if self.is_first else {}

    # --- cut

    def keep(self, place: tuple[Any, ...], tensor: Tensor) -> Tensor:
        """Of a whole tensor that a checkpoint has at this place, what this rank holds; nothing of other stages'."""
        if len(place) == 2 and place[0] == "model":
            name = place[1] if place[1] in self._held_names else None
        elif len(place) == 4 and place[:2] == ("optimizer", "state"):
            name = self._held_as.get(place[2])
        else:
            return tensor
        return tensor.new_empty(0) if name is None else self.shards.part(name, tensor)

    def cut(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state of which every tensor has gone through `keep`, as this rank takes it up."""
        shards = self.shards
        model = {name: state["model"][name] for name in shards.shadow.state_dict()}
        names = names_in_order(shards.shadow, self.optimizer)
        saved, first = state["optimizer"], self.whole.first_name
        entries = {name: saved["state"][first[name]] for name in names if first[name] in saved["state"]}
        here = {first[name]: name for name in names}  # a tied one may have another name on this rank
        groups = [{**group, "params": [here[n] for n in group["params"] if n in here]} for group in saved["groups"]]
        trainable = dict(zip(self.whole.parameters, state["trainable"], strict=True))
        return {
            **state,
            "model": model,
            "optimizer": by_number({"state": entries, "groups": groups}, names),
            "trainable": [trainable[first[name]] for name, _ in shards.shadow.named_parameters()],
            "modes": [module.training for module in shards.shadow.modules()],
        }


def specs_of_carried(carried: Carried) -> Specs:
    """Of this rank's state of one microbatch."""
    return {name: declared(name, *kind) for name, kind in carried.shapes.items()}


def _send(tensors: Mapping[str, Tensor], to: int) -> None:
    heads = [[name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in tensors.items()]
    dist.send_object_list([heads], to)
    for tensor in tensors.values():
        if tensor.numel():
            dist.send(tensor.contiguous(), to)


def _receive(sender: int) -> Iterator[tuple[str, Tensor]]:
    box: list[Any] = [None]
    dist.recv_object_list(box, sender)
    for name, shape, dtype in box[0]:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        if tensor.numel():
            dist.recv(tensor, sender)
        yield name, tensor
