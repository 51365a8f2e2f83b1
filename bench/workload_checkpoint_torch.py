# SPDX-License-Identifier: Apache-2.0
"""The peers of bench/checkpoint.py: the same training as a plain PyTorch loop that saves every so many steps.

torchrun --standalone bench/workload_checkpoint_torch.py --saver dcp --every 12 --width 1600 --steps 48 \
    --to FOLDER --out FILE

Savers: `torch.save` of model and optimizer by rank 0; `dcp`, torch.distributed.checkpoint.async_save as its recipe
has it; `dcp-staged`, the same with a stager of one's own that copies beside the next forward and backward pass, waited
for before the update. Rank 0 writes the record. Started by the driver; compares nothing.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from workload_checkpoint_model import BATCH, Record, Saved, adam, build, data, loss, parser


class AppState(Stateful):
    """Model and optimizer, as in the documentation of torch.distributed.checkpoint."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Saver(Protocol):
    def save(self, step: int, saved: Saved) -> None: ...

    def before_update(self) -> None: ...

    def finish(self) -> None: ...


class TorchSave:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, folder

    def save(self, step: int, saved: Saved) -> None:
        if dist.get_rank() == 0:
            plain = getattr(self.model, "module", self.model)
            state = {"model": plain.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, self.folder / f"{step}.pt")
        saved.done_s = time.time()

    def before_update(self) -> None:
        return None

    def finish(self) -> None:
        return None


class AsyncSave:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, staged: bool) -> None:
        self.state, self.folder = {"app": AppState(model, optimizer)}, folder
        # Its collectives come from a thread: on the group that DDP uses they would meet the gradients'.
        self.group = dist.new_group(backend="gloo")
        # What is left of the options without an accelerator: a background thread, and memory that is kept.
        self.stager = DefaultStager(StagingOptions(False, False, True, False)) if staged else None
        self.uploaded: Future[Any] | None = None
        self.staged: Future[Any] | None = None

    def save(self, step: int, saved: Saved) -> None:
        if self.uploaded is not None:
            self.uploaded.result()
        more = {"async_stager": self.stager} if self.stager else {}
        where = self.folder / str(step)
        response = dcp.async_save(self.state, checkpoint_id=where, process_group=self.group, **more)
        if isinstance(response, Future):
            self.uploaded = response
        else:
            self.uploaded, self.staged = response.upload_completion, response.staging_completion
        self.uploaded.add_done_callback(lambda _: setattr(saved, "done_s", time.time()))

    def before_update(self) -> None:
        if self.staged is not None:
            self.staged.result()
            self.staged = None

    def finish(self) -> None:
        if self.uploaded is not None:
            self.uploaded.result()
        if self.stager is not None:
            self.stager.close()


def train(options: Any) -> Record:
    rank, workers = dist.get_rank(), dist.get_world_size()
    model: nn.Module = build(options.width, options.frozen)
    if workers > 1:
        model = DistributedDataParallel(model)
    optimizer = adam(model)
    saver: Saver
    if options.saver == "torch.save":
        saver = TorchSave(model, optimizer, options.to)
    else:
        saver = AsyncSave(model, optimizer, options.to, options.saver == "dcp-staged")
    samples = data(options.width, options.steps)
    sampler: DistributedSampler[Any] = DistributedSampler(samples, workers, rank, seed=0)
    record = Record()
    for step, (inputs, targets) in enumerate(DataLoader(samples, BATCH // workers, sampler=sampler), start=1):
        optimizer.zero_grad(set_to_none=True)
        loss(model(inputs), targets).backward()
        saver.before_update()
        optimizer.step()
        record.finished_s.append(time.time())
        if step % options.every == 0 and step < options.steps:
            began_s = time.perf_counter()
            record.saves.append(Saved(step, 0.0))
            saver.save(step, record.saves[-1])
            record.saves[-1].blocked_s = time.perf_counter() - began_s
    saver.finish()
    return record


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))


def main() -> None:
    options = parser()
    options.add_argument("--saver", choices=("torch.save", "dcp", "dcp-staged"), required=True)
    options.add_argument("--every", type=int, required=True, help="steps between saves")
    options.add_argument("--to", type=Path, required=True, help="folder for the checkpoints")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    record = train(chosen)
    dist.barrier()
    if dist.get_rank() == 0:
        for saved in record.saves:
            saved.bytes = size_of(chosen.to / (f"{saved.step}.pt" if chosen.saver == "torch.save" else str(saved.step)))
            saved.bytes_written = saved.bytes
        record.write(chosen.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
