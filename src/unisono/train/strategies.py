# SPDX-License-Identifier: Apache-2.0
"""Which strategy a training has, by what the command and the script say; what does not go together is refused here.

Called by `opening`, which wires the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from unisono.comm.codecs import NONE, Compression, parse_codec
from unisono.comm.seam import Comm
from unisono.core import seeds
from unisono.core.errors import SetupError, SparseGradient
from unisono.core.spec import JobSpec, RunSpec
from unisono.parallel import STRATEGIES
from unisono.parallel.allreduce import AllReduce
from unisono.parallel.asynchronous import Asynchronous
from unisono.parallel.grouped import Grouped
from unisono.parallel.local import Local, LocalSteps
from unisono.parallel.rows import tables_of
from unisono.parallel.server import ParameterServer
from unisono.parallel.streaming import Streaming
from unisono.train.adding import Adding
from unisono.train.context import Context
from unisono.train.job import Request
from unisono.train.numerics import Update
from unisono.train.preparing import Prepared
from unisono.train.replica import Replica

_LOCAL_STEPS = 16  # in a round, if nobody says
_NOISE_STEPS = 50  # between two measurements of the gradient noise, likewise


def settle_local_steps(spec: RunSpec, asked: LocalSteps | None) -> LocalSteps | None:
    """What the command says about the strategy comes before what the script says."""
    wishes: dict[str, Any] = {"h": spec.local_steps, "outer": spec.outer or None, "fragments": spec.fragments}
    given = {key: value for key, value in wishes.items() if value is not None}
    options = {"h": "local-steps", "outer": "outer", "fragments": "fragments"}
    if spec.strategy in ("allreduce", "ps") or (not spec.strategy and asked is None):
        if given:
            raise SetupError(
                f"--{options[next(iter(given))]} cannot take effect",
                cause="it belongs to the strategy local",
                do="add --strategy local, or leave it out",
            )
        return None
    return replace(asked or LocalSteps(h=_LOCAL_STEPS), **given)


def open_strategy(
    context: Context,
    request: Request,
    spec: JobSpec,
    comm: Comm,
    device: torch.device,
    update: Update,
    prepared: Prepared,
    trained: nn.Module,
    replica: Replica | None,
) -> AllReduce | Local:
    """`trained` is the model that computes; `request.model` what is added up of it here."""
    local = request.local
    if tables_of(request.model):
        _refuse_for_tables(context.spec, spec, request, device)
    if context.spec.strategy == "ps":
        return _servers(context, request, spec, comm, device, update)
    way = context.spec.comm
    if replica and way == "auto":  # trials would be made by each rank for itself
        way = "direct" if spec.exact else "backend"
    adding = Adding(
        way,
        spec,
        request.model,
        device,
        context.emit,
        wide_sums=local is not None,
        fragments=local.fragments if local else 1,
        apart=replica.group.shards.alike if replica else (),
    )
    made = _strategy(request) if replica is None else partial(Grouped, group=replica.group)
    strategy = made(
        trained if replica else request.model,
        request.optimizer,
        comm,
        update,
        lambda microbatch: seeds.derive(spec.seed, "forward", *microbatch.place),
        adding,
        carry=adding.carry,
    )
    adding.carried = strategy.carried
    if replica and isinstance(strategy, Grouped):
        update.norm_of_all = strategy.norm
        replica.spread.compare_carried(strategy.carried)
    if isinstance(strategy, AllReduce):
        adding.shapes_of = strategy.shapes
        strategy.scale = prepared.scale
    if isinstance(strategy, AllReduce) and replica is None and spec.compress == "none":  # which would count as noise
        asked = context.spec.noise_every
        strategy.noise_every = _NOISE_STEPS if asked is None else asked
    return strategy


def _servers(
    context: Context, request: Request, spec: JobSpec, comm: Comm, device: torch.device, update: Update
) -> ParameterServer:
    bound, copies = context.spec.bound, context.spec.copies or 1
    if bound != 0 and not request.has_end:
        raise SetupError(
            "--staleness and a loop of one's own do not go together",
            cause="who computes what is decided on the way, so run.step() would mean another step on every worker, and "
            "servers would make updates between two of them without what the loop sets, such as a schedule",
            do="use --staleness 0; or unisono.Trainer; or, where the loop itself pushes and pulls, "
            'unisono.kvstore("dist_async")',
        )
    refusals = {
        f"batch_norm={request.batch_norm!r}": request.batch_norm != "local",
        "exact=False": not request.exact,
        f"--comm {context.spec.comm}": context.spec.comm not in ("auto", "direct"),
        f"--device {device.type}": device.type != "cpu",
    }
    for what, refused in refusals.items():
        if refused:
            raise SetupError(f"--strategy ps and {what} do not go together yet", do="leave out one of the two")
    _refuse_codes(spec.compress)
    common = (
        request.model,
        request.optimizer,
        comm,
        update,
        lambda microbatch: seeds.derive(spec.seed, "forward", *microbatch.place),
    )
    if bound == 0:
        adding = Adding("direct", spec, request.model, device, context.emit)
        leaves = request.has_end  # a loop of one's own may change gradients before it steps
        served = ParameterServer(*common, copies=copies, push=adding.push, carry=adding.carry, leaves=leaves)
        adding.carried, adding.shapes_of = served.carried, served.shapes
        return served
    strategy = Asynchronous(
        *common,
        copies=copies,
        bound=bound,
        delayed=context.spec.delayed,
        fresh=context.spec.fresh or "pull",
        compression=_compression_of_slices(request.model, spec),
        seed=spec.seed,
        emit=context.emit,
    )
    strategy.counts = request.count is not None
    return strategy


def _compression_of_slices(model: nn.Module, spec: JobSpec) -> Compression:
    compression = parse_codec(spec.compress)
    trained = {str(p.dtype) for p in model.parameters() if p.requires_grad}
    if compression.codec is not None and trained and "torch.float32" not in trained:
        raise SetupError(
            f"--compress {spec.compress} cannot take effect",
            cause=f"codecs are for float32; the gradients are {', '.join(sorted(trained))}",
            do="leave out --compress",
        )
    return compression


def _refuse_codes(compress: str) -> None:
    """What servers cannot be pushed compressed."""
    if compress == "auto":
        raise SetupError(
            "--strategy ps and --compress auto do not go together yet",
            cause="what a codec would save is predicted for all-reduce, not for pushes to servers",
            do="name a codec, such as --compress int8, or leave out --strategy ps",
        )


def _refuse_for_tables(run: RunSpec, spec: JobSpec, request: Request, device: torch.device) -> None:
    """What does not go together with embeddings whose gradients are rows."""
    compression = NONE if spec.compress == "auto" else parse_codec(spec.compress)
    cures = {
        "local steps": (request.local is not None, "replicas send whole differences of their weights"),
        f"--device {device.type}": (device.type != "cpu", "rows are added up on CPUs only"),
        "--delayed compensate": (run.delayed == "compensate", "servers would keep a table for every worker"),
        f"--compress {spec.compress}": (compression.clip is not None, "rows travel as they are, and are not clipped"),
    }
    for what, (asked, cause) in cures.items():
        if asked:
            raise SparseGradient(
                f"an embedding with sparse=True and {what} do not go together",
                cause=cause,
                do=f"build it with sparse=False, or leave out {what}",
            )


def _strategy(request: Request) -> Callable[..., AllReduce | Local]:
    if request.local is not None:
        return _local(request, request.local)
    if request.batch_norm == "local":
        return STRATEGIES["allreduce"]
    if not request.exact:
        raise SetupError('batch_norm="synchronised" is exact only', do="leave out exact=False")
    return STRATEGIES["synchronised"]


def _local(request: Request, local: LocalSteps) -> Callable[..., Local]:
    if not request.has_end:
        raise SetupError(
            "local steps need unisono.Trainer",
            cause="a loop of your own makes its updates where it likes, and each replica needs some of its own",
            do="use Trainer(..., local=LocalSteps(...)), or all-reduce",
        )
    if request.batch_norm != "local":
        raise SetupError(
            f"batch_norm={request.batch_norm!r} and local steps exclude each other",
            cause="replicas update at their own pace, so no batch norm of all of them has a batch in common",
            do='leave out batch_norm="synchronised": statistics are averaged at the end of each round',
        )
    return partial(Local if local.fragments == 1 else Streaming, local=local)
