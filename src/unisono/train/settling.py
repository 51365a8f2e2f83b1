# SPDX-License-Identifier: Apache-2.0
"""What a training's way of computing comes to on this device, and errors that a device explains badly by itself.

Between the values (`computing`, `memory`) and the job: the automatic choice of what to recompute, the meter, and what
is made of out-of-memory errors and of operations without a fixed order. Called by `opening` and the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from unisono.core import process
from unisono.core.cgroup import machine_bytes
from unisono.core.errors import SetupError
from unisono.core.mesh import Mesh
from unisono.core.spec import JobSpec
from unisono.parallel.optimizer_trials import keeps_state
from unisono.train.blocks import repeated_blocks
from unisono.train.computing import choose, refuse
from unisono.train.context import Context
from unisono.train.job import Job, Request
from unisono.train.memory import Activations, Setting, choose_recompute, estimate, rows_of, share_of_machine
from unisono.train.metering import NO_METER, Meter, NoMeter, tokens_in, usage_of
from unisono.train.needs import needs_of
from unisono.train.precision import refuse_fp8
from unisono.train.preparing import Prepared
from unisono.train.remedies import explain
from unisono.train.replica import refuse_mesh, what_is_asked

_UNORDERED = " does not have a deterministic implementation"  # in torch's words
Foresight = Callable[[], Setting]  # of a model as it is before it is cut


def settle_computing(
    context: Context, request: Request, spec: JobSpec, device: torch.device
) -> tuple[JobSpec, Prepared, Foresight]:
    """How the model is to be computed, and what its memory will depend on; nothing is changed yet."""
    run = context.spec
    computing = choose(run, request.computing)
    strategy = "local" if request.local else run.strategy or "allreduce"
    refuse(computing, request.exact, request.batch_norm, strategy, own_loop=not request.has_end)
    if computing.precision == "fp8":
        refuse_fp8(device)
    if computing.recompute == "auto":
        setting = _setting(context, request, spec.model_copy(update=vars(computing)), device)
        if setting.estimated is None:
            raise SetupError(
                "recompute auto cannot take effect",
                cause="activations are estimated for repeated blocks of linear layers, from the dataset's first sample",
                do="name it: recompute full or selective",
            )
        computing = replace(computing, recompute=choose_recompute(setting, _capacity(context, device)))
    spec = spec.model_copy(update=vars(computing))
    blocks = [block for _, block in repeated_blocks(request.model)]
    return spec, Prepared(computing, device, blocks), _foresight(context, request, spec, device)


def _foresight(context: Context, request: Request, spec: JobSpec, device: torch.device) -> Foresight:
    """Of a model that will be cut it is found out now, of any other when somebody asks: few ever do."""

    def look() -> Setting:
        setting = _setting(context, request, spec, device)
        return replace(setting, larger=_larger_meshes(context, request, spec), devices=torch.cuda.device_count())

    if device.type == "cpu" or context.spec.replica.ranks == 1:
        return look
    known = look()
    return lambda: known


def _setting(context: Context, request: Request, spec: JobSpec, device: torch.device) -> Setting:
    return Setting(
        needs=replace(needs_of(context.spec, request), microbatches=spec.microbatches),
        recompute=spec.recompute,
        precision=spec.precision,
        estimated=_activations(request, spec, context.spec.replica),
        mesh=context.spec.replica,
        workers=context.spec.workers,
        host_is_apart=device.type != "cpu",
    )


def _activations(request: Request, spec: JobSpec, mesh: Mesh) -> Activations | None:
    """Of one microbatch on one rank; None where it cannot be estimated."""
    if not request.data.is_map_style:
        return None
    try:
        sample = request.data.dataset[0]
    except Exception:  # of any kind: the dataset is the user's, and will be read with more care
        return None
    rows = rows_of(request.batch_size, spec.microbatches, tokens_in(_stacked(sample)), mesh)
    found = estimate(request.model, rows, 4 if spec.precision == "fp32" else 2, mesh)
    return found if found.none else None


def _stacked(sample: Any) -> Any:
    """One sample as a batch of one."""
    if isinstance(sample, torch.Tensor):
        return sample[None]
    if isinstance(sample, dict):
        return {key: _stacked(value) for key, value in sample.items()}
    return [_stacked(value) for value in sample] if isinstance(sample, list | tuple) else sample


def _larger_meshes(context: Context, request: Request, spec: JobSpec) -> tuple[Mesh, ...]:
    """Those into which this training could be cut instead, in one dimension more or finer."""
    # Late: it loads much of torch.distributed.
    from unisono.train.cutting import decide

    mesh, samples = context.spec.replica, spec.batch_size // spec.microbatches
    asked = replace(what_is_asked(context.spec, request.parallel), cost="operations")  # nothing is timed for advice
    found = []
    for name, factor in (("fsdp", 2), ("fsdp", 4), ("fsdp", 8), ("tp", 2), ("pp", 2)):
        larger = replace(mesh, **{name: factor * getattr(mesh, name)})
        with suppress(Exception):  # refused, for one of many reasons
            keeps_state(request.optimizer)
            refuse_mesh(context.spec.model_copy(update={"mesh": larger.inner}), request, spec)
            decide(request.model, larger, asked, samples, None)
            found.append(larger)
    return tuple(found)


def _capacity(context: Context, device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    workers = context.place.local if context.place else 1
    return share_of_machine(machine_bytes(), workers, context.spec.replica)


def meter_for(job: Job) -> Meter | NoMeter:
    if job.device.type != "cuda":
        return NO_METER
    torch.cuda.reset_peak_memory_stats(job.device)
    usage = partial(usage_of, job.request.model, job.request.optimizer, job.device)
    card = torch.cuda.get_device_name(job.device)
    return Meter(card, job.spec.precision, partial(ranks_of, job), usage)


def ranks_of(job: Job) -> int:
    """Of all replicas together, each on a device of its own."""
    return job.comm.size * job.context.spec.replica.ranks


def is_unordered(error: BaseException) -> bool:
    """Whether torch has refused an operation because its results would vary."""
    return _UNORDERED in str(error)


@contextmanager
def explained(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, foresight: Foresight
) -> Iterator[None]:
    """Around a training, and around what brings it onto the device."""
    if device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats(device)  # the script may have held more before
    try:
        yield
    except torch.OutOfMemoryError as error:
        asked = str(error).split(". GPU", 1)[0]
        raise explain(usage_of(model, optimizer, device), foresight(), asked) from error
    except RuntimeError as error:
        if not is_unordered(error):
            raise
        raise SetupError(
            f"{str(error).partition(_UNORDERED)[0]} has no deterministic implementation on this GPU",
            where=process.user_line(error),
            cause="it adds up in any order, so the same run would not give the same bits twice",
            do="use another operation in its place, or give up the same bits with exact=False",
        ) from error
