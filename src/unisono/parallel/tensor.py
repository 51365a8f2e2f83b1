# SPDX-License-Identifier: Apache-2.0
"""Does what a plan of tensor parallelism says: cuts a model in place over one dimension of a device mesh.

Afterwards every parameter is a DTensor on that mesh (cut, or replicated), gradients come out as the parameters are
cut, and the model takes and gives plain whole tensors as before. Parameters are cut on the host, one module after the
other, and only parts go to the device. Every rank must call it with equal values in its model; nothing is sent. FSDP2's
`fully_shard` may follow. Knows nothing of runs, workers and steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from unisono.core.errors import SetupError
from unisono.parallel import tensor_layers as layers
from unisono.parallel import tensor_scopes as scoped
from unisono.parallel.tensor_exchange import Team
from unisono.parallel.tensor_multihead import multihead
from unisono.parallel.tensor_names import join
from unisono.parallel.tensor_parts import my_part
from unisono.parallel.tensor_plan import Cut, TensorPlan
from unisono.parallel.tensor_region import Scopes


def apply(
    model: nn.Module,
    plan: TensorPlan,
    mesh_tp: DeviceMesh,
    sequence: bool = False,
    loss: bool = False,
    device: torch.device | None = None,
    make: Callable[[nn.Module], None] = lambda _: None,
) -> Cutter:
    """From here on modules compute with their parts. What is returned cuts the parameters of the model, or of one piece
    after the other; `make` may give a module its own values just before that.

    `sequence`: activations between blocks are cut by sequence. `loss`: the output layer gives a DTensor that stays
    cut over the vocabulary; compute the loss and its backward pass inside torch's `loss_parallel()`.
    """
    plan.require(sequence, loss)
    if mesh_tp.ndim != 1 or mesh_tp.size() != plan.ways:
        raise SetupError(f"the plan is for {plan.ways} ranks, and the mesh has {tuple(mesh_tp.shape)}")
    team = Team(mesh_tp.get_group(), mesh_tp.get_local_rank(), plan.ways)
    cutter = Cutter(model, plan, mesh_tp, team, device, make)
    _run_parts(model, plan, team, mesh_tp if loss else None, sequence)
    for name, value in plan.numbers.items():
        holder, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(holder), attribute, value)
    if any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules()):
        torch.backends.mha.set_fastpath_enabled(False)  # it reads weights past the modules that hold them
    return cutter


class Cutter:
    """Every parameter becomes a DTensor; those that were shared stay shared. Nothing else is kept of any of them, so
    that what is whole, or is cut again by FSDP2, is gone before the next module's turn."""

    def __init__(
        self,
        model: nn.Module,
        plan: TensorPlan,
        mesh: DeviceMesh,
        team: Team,
        device: torch.device | None,
        make: Callable[[nn.Module], None],
    ) -> None:
        self._plan, self._mesh, self._team = plan, mesh, team
        self._device, self._make = device, make
        self._names = {id(module): name for name, module in model.named_modules()}
        known: dict[int, str] = {}
        named = model.named_parameters(remove_duplicate=False)
        self._first = {name: known.setdefault(id(parameter), name) for name, parameter in named}
        places = Counter(self._first.values())
        self._shared = {first for first, count in places.items() if count > 1}
        self._made: dict[str, nn.Parameter] = {}  # of the shared ones, by their first names
        # Calls a function that does not call the model but pieces of it, and sees what the model itself holds. It stays
        # for as long as the training does, so it must not keep us, and what we hold, alive.
        self.within: Callable[..., Any] = partial(_within, model, team)

    def cut(self, part: nn.Module) -> None:
        """What is a DTensor already stays as it is."""
        for module in part.modules():
            self._make(module)
            for key, parameter in module._parameters.items():
                if parameter is not None and not isinstance(parameter, DTensor):
                    module._parameters[key] = self._placed(parameter, self._name(module, key))

    def _name(self, module: nn.Module, key: str) -> str | None:
        """None: a holder of what hung loose in the model, of which the plan cuts nothing."""
        prefix = self._names.get(id(module))
        return None if prefix is None else join(prefix, key)

    def _placed(self, parameter: nn.Parameter, name: str | None) -> nn.Parameter:
        first = self._first.get(name or "", "")
        if first in self._made:
            return self._made[first]
        made = self._cut(parameter, self._plan.cuts.get(name or ""))
        if first in self._shared:
            self._made[first] = made
        return made

    def _cut(self, parameter: nn.Parameter, cut: Cut | None) -> nn.Parameter:
        placement: Placement = Replicate() if cut is None else Shard(cut.dim)
        whole, team = parameter.detach(), self._team
        mine: Tensor = whole if cut is None else my_part(whole, cut, team.rank, team.ways)
        spread = DTensor.from_local(
            mine.to(self._device), self._mesh, [placement], run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
        return nn.Parameter(spread, requires_grad=parameter.requires_grad)


def _within(model: nn.Module, team: Team, compute: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    seeing = layers.whole(compute, layers.carriers_of(model), team, False)
    return seeing(*args, **kwargs)


def _run_parts(model: nn.Module, plan: TensorPlan, team: Team, keep: DeviceMesh | None, sequence: bool) -> None:
    """New forward passes, from the inside out: layers, then units, then blocks."""
    scopes = Scopes()
    modules = dict(model.named_modules())
    blocks = {name for stack in plan.stacks for name in stack} if sequence else set()
    summed = _summed(plan, blocks)
    for name, module in modules.items():
        if name in plan.sharded:
            _run_layer(module, name, plan, team, scopes, keep)
            continue
        read = [modules[other] for other, reader in plan.read_by.items() if reader == name]
        carriers = [*layers.carriers_of(module), *read]
        if any(parameter is not None for carrier in carriers for parameter in carrier._parameters.values()):
            module.forward = layers.whole(module.forward, carriers, team, name in summed)
    for name in dict.fromkeys(unit.name for unit in plan.units):
        if name not in blocks:
            inside_block = any(name.startswith(f"{block}.") for block in blocks)
            modules[name].forward = scoped.unit(modules[name], name, scopes, team, inside_block)
    for stack in plan.stacks if sequence else ():
        for name in stack:
            ends = (name == stack[0], name == stack[-1])
            modules[name].forward = scoped.block(modules[name], name, scopes, team, *ends)


def _summed(plan: TensorPlan, blocks: set[str]) -> set[str]:
    """Modules with whole parameters that are applied to cut activations."""
    inside = {unit.name for unit in plan.units} - blocks

    def below(name: str, places: set[str]) -> bool:
        return any(name == place or name.startswith(f"{place}.") for place in places)

    between = {name for name in plan.whole if below(name, blocks) and not below(name, inside)}
    return between | {name for unit in plan.units for name in unit.summed}


def _run_layer(
    module: nn.Module, name: str, plan: TensorPlan, team: Team, scopes: Scopes, keep: DeviceMesh | None
) -> None:
    sharding = plan.sharded[name]
    unit = next((unit for unit in plan.units if name in unit.members), None)
    by_columns = sharding.how == "columns"
    if isinstance(module, nn.Embedding):
        cut_by = layers.embedding_columns if by_columns else layers.embedding_rows
        module.forward = cut_by(module, team)  # type: ignore[method-assign]
    elif unit is None:
        kept = keep if name == plan.head else None
        module.forward = layers.lone_columns(module, team, kept) if by_columns else layers.lone_rows(module, team)
    elif isinstance(module, nn.MultiheadAttention):
        module.forward = multihead(module, team, scopes, unit)  # type: ignore[method-assign]
    elif by_columns:
        module.forward = layers.columns(module, scopes, unit)
    else:
        module.forward = layers.rows(module, team, scopes, unit)
