# SPDX-License-Identifier: Apache-2.0
"""What a training's way of computing comes to on this device, and errors that a device explains badly by itself.

Between the values (`computing`, `memory`) and the job: the automatic choice of what to recompute, the meter, and what
is made of out-of-memory errors and of operations without a fixed order. Called by `opening` and the trainer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from unisono.core import process
from unisono.core.errors import SetupError
from unisono.core.spec import JobSpec, RunSpec
from unisono.train.blocks import repeated_blocks
from unisono.train.computing import choose, refuse
from unisono.train.job import Job, Request
from unisono.train.memory import Activations, Setting, choose_recompute, estimate, explain, state_bytes
from unisono.train.metering import NO_METER, Meter, NoMeter, tokens_in, usage_of
from unisono.train.precision import refuse_fp8
from unisono.train.preparing import Prepared

_UNORDERED = " does not have a deterministic implementation"  # in torch's words


def settle_computing(run: RunSpec, request: Request, spec: JobSpec, device: torch.device) -> tuple[JobSpec, Prepared]:
    """How the model is to be computed; nothing is changed yet."""
    computing = choose(run, request.computing)
    strategy = "local" if request.local else run.strategy or "allreduce"
    refuse(computing, request.exact, request.batch_norm, strategy, own_loop=not request.has_end)
    if computing.precision == "fp8":
        refuse_fp8(device)
    if computing.recompute == "auto":
        activations = _activations(request, spec.microbatches, computing.precision)
        if activations is None:
            raise SetupError(
                "recompute auto cannot take effect",
                cause="activations are estimated for repeated blocks of linear layers, from the dataset's first sample",
                do="name it: recompute full or selective",
            )
        state = state_bytes(spec.parameters, request.optimizer)
        computing = replace(computing, recompute=choose_recompute(state, activations, _capacity(device)))
    blocks = [block for _, block in repeated_blocks(request.model)]
    return spec.model_copy(update=vars(computing)), Prepared(computing, device, blocks)


def _activations(request: Request, microbatches: int, precision: str) -> Activations | None:
    """Of one microbatch; None where it cannot be estimated."""
    if not request.data.is_map_style:
        return None
    samples = -(-request.batch_size // microbatches)
    rows = samples * (tokens_in(_stacked(request.data.dataset[0])) or 1)
    found = estimate(request.model, rows, 4 if precision == "fp32" else 2)
    return found if found.none else None


def _stacked(sample: Any) -> Any:
    """One sample as a batch of one."""
    if isinstance(sample, torch.Tensor):
        return sample[None]
    if isinstance(sample, dict):
        return {key: _stacked(value) for key, value in sample.items()}
    return [_stacked(value) for value in sample] if isinstance(sample, list | tuple) else sample


def _capacity(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def meter_for(job: Job) -> Meter | NoMeter:
    if job.device.type != "cuda":
        return NO_METER
    torch.cuda.reset_peak_memory_stats(job.device)
    usage = partial(usage_of, job.request.model, job.request.optimizer, job.device)
    card = torch.cuda.get_device_name(job.device)
    return Meter(card, job.spec.precision, lambda: job.comm.size, usage)


def is_unordered(error: BaseException) -> bool:
    """Whether torch has refused an operation because its results would vary."""
    return _UNORDERED in str(error)


@contextmanager
def explained(job: Job) -> Iterator[None]:
    """Around a training."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        spec = job.spec
        estimated = _activations(job.request, spec.microbatches, spec.precision)
        setting = Setting(spec.microbatches, spec.batch_size, spec.recompute, spec.precision, estimated)
        asked = str(error).split(". GPU", 1)[0]
        raise explain(usage_of(job.request.model, job.request.optimizer, job.device), setting, asked) from error
    except RuntimeError as error:
        if not is_unordered(error):
            raise
        raise SetupError(
            f"{str(error).partition(_UNORDERED)[0]} has no deterministic implementation on this GPU",
            where=process.user_line(error),
            cause="it adds up in any order, so the same run would not give the same bits twice",
            do="use another operation in its place, or give up the same bits with exact=False",
        ) from error
