# SPDX-License-Identifier: Apache-2.0
"""Evaluation: every sample once, the same numbers on every worker and for any number of workers.

The evaluation set is cut into chunks whose size belongs to the job. Each chunk is computed by one worker; the sums of
all chunks meet in one table, each cell written by one worker, and are added there in float64, rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm.seam import Comm
from unisono.core.errors import EmptyData, SetupError
from unisono.core.ranges import split
from unisono.core.seeds import apply, derive
from unisono.data.loading import Data, open_loader
from unisono.data.offers import Taken

Metric = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> one value a sample, or their mean


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of samples (or tokens) whose largest output is the target class. Classes are the last dimension."""
    return (outputs.argmax(-1) == targets).double()


@dataclass(frozen=True)
class Evaluation:
    """`measure(batch, samples)` gives, for one chunk, a (sum, count) pair per metric; the first metric is the loss."""

    data: Data
    names: tuple[str, ...]
    measure: Callable[[Any, int], list[tuple[float, float]]]
    chunk: int
    seed: int
    tell: Callable[[Taken], None]  # what reading it cost, and what was left out

    @torch.no_grad()
    def run(self, model: nn.Module, comm: Comm) -> dict[str, float]:
        """The model is given back as it was: modes of its parts, and buffers, which some modules change even here."""
        modes = [(module, module.training) for module in model.modules()]
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        model.eval()
        try:
            rows = {index: self.measure(batch, samples) for index, batch, samples in self._mine(comm)}
        finally:
            for module, training in modes:
                module.training = training
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        return self._combine(rows, comm)

    def _mine(self, comm: Comm) -> Iterator[tuple[int, Any, int]]:
        """This worker's chunks. A map-style set is cut into ranges; of a stream everyone keeps every size-th chunk."""
        loader = open_loader(self.data, self.chunk, 1, self.seed)
        steps = loader.steps_per_epoch
        chosen = range(comm.rank, 1 << 62, comm.size) if steps is None else split(steps, comm.size)[comm.rank]
        first, last = (0, None) if steps is None else (chosen.start, chosen.stop)
        for data in loader.epoch(0, first, range(1), last):
            for batch in data.batches:
                if data.step_in_epoch in chosen:
                    apply(derive(self.seed, "evaluate", data.step_in_epoch))
                    yield data.step_in_epoch, batch, data.counts[0]
        self.tell(loader.taken())
        loader.close()

    def _combine(self, rows: dict[int, list[tuple[float, float]]], comm: Comm) -> dict[str, float]:
        highest = torch.tensor([max(rows, default=-1)], dtype=torch.float64)
        chunks = int(max(t.item() for t in comm.gather(highest))) + 1
        if not chunks:
            raise EmptyData("the evaluation set is empty", do="check the path or the filter behind it")
        table = torch.zeros(chunks, 2 * len(self.names), dtype=torch.float64)
        for index, pairs in rows.items():
            table[index] = torch.tensor([value for pair in pairs for value in pair], dtype=torch.float64)
        comm.reduce(table).wait()  # every cell has one writer and zeros from the rest: exact in any order
        totals = [math.fsum(column) for column in table.t().tolist()]
        return {name: totals[2 * i] / totals[2 * i + 1] for i, name in enumerate(self.names)}


def measure_with(
    loss: Metric, metrics: Mapping[str, Metric]
) -> Callable[[Tensor, Tensor, float], list[tuple[float, float]]]:
    """The measurements of one chunk: each metric's sum and how many values it is a sum of."""

    def measure(outputs: Tensor, targets: Tensor, weight: float) -> list[tuple[float, float]]:
        pairs = [(float(loss(outputs, targets).double().mean()) * weight, weight)]
        for name, metric in metrics.items():
            value = torch.as_tensor(metric(outputs, targets)).double()
            if value.ndim == 0:
                pairs.append((float(value) * weight, weight))
            elif value.numel():
                pairs.append((float(value.sum()), float(value.numel())))
            else:
                raise SetupError(f"metric {name!r} returned an empty tensor")
        return pairs

    return measure
