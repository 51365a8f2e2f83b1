# SPDX-License-Identifier: Apache-2.0
"""From a dataset to this worker's microbatches: fetching, collating, seeding, loader processes.

`Data` says how a dataset is read; a loader yields `StepData`, one a step, for the range of microbatches it is told.
Every fetch starts from random state that belongs to its (epoch, step, microbatch), so augmentation is the same whoever
does it. Called by the loop; knows nothing of workers' fate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from unisono.core.errors import EmptyData, SetupError, suggest
from unisono.core.ranges import split as split_evenly
from unisono.core.seeds import apply, derive
from unisono.data import offers
from unisono.data.digest import digest
from unisono.data.loader_failures import Failure, explain_death, failure_of, raise_here
from unisono.data.loader_process import same, settle
from unisono.data.look_ahead import Announcer
from unisono.data.order import Order, Shuffle, Split
from unisono.data.rejecting import guard
from unisono.data.step_data import StepData

_PROBES = 4  # samples that all workers read at the start of an epoch, to compare
Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Data:
    """How a dataset is read: ``Data(train_set, split="blocks", loader_processes=2)``.

    A bare dataset given to the trainer is the same as ``Data(dataset)``. `split` and `shuffle` concern map-style
    datasets; an iterable dataset keeps its own order and is read as a whole by every worker, in one process at most.
    """

    dataset: Any
    split: Split = "samples"
    shuffle: Shuffle = True
    drop_last: bool = False
    block_shards: int = 16  # that are mixed together with shuffle="blocks"
    on_bad: Literal["stop", "skip"] = "stop"
    loader_processes: int = 0
    prefetch: int | None = None  # microbatches that each loader process prepares ahead, 2 by default
    collate: Collate | None = None

    def __post_init__(self) -> None:
        if self.split not in ("samples", "blocks"):
            hint = suggest(str(self.split), ("samples", "blocks"))
            raise SetupError(f"split={self.split!r} is neither samples nor blocks" + (f"; {hint}" if hint else ""))
        if self.shuffle not in (True, False, "blocks") or self.block_shards < 1:
            raise SetupError(f"shuffle={self.shuffle!r} in blocks of {self.block_shards} makes no sense")
        if self.loader_processes < 0:
            raise SetupError(f"loader_processes={self.loader_processes} makes no sense", do="give 0 or more")
        if self.prefetch is not None and (self.prefetch < 1 or not self.loader_processes):
            raise SetupError(
                f"prefetch={self.prefetch} cannot take effect with loader_processes={self.loader_processes}",
                do="give at least one loader process and prefetch at least one",
            )

    @property
    def is_map_style(self) -> bool:
        if isinstance(self.dataset, torch.utils.data.IterableDataset):  # it may have a length and inherits __getitem__
            return False
        return hasattr(self.dataset, "__getitem__") and hasattr(self.dataset, "__len__")


class Loader(Protocol):
    """`steps_per_epoch` is None when only the data knows."""

    samples: int | None
    steps_per_epoch: int | None

    def epoch(self, epoch: int, from_step: int, mine: range, to_step: int | None = None) -> Iterator[StepData]:
        """The steps of an epoch from `from_step` on, up to `to_step` or the end."""

    def probe(self, epoch: int) -> tuple[int, int]:
        """(length or -1, digest of a few samples): must agree on all workers."""

    def taken(self) -> offers.Taken: ...  # what reading cost, here and in loader processes, since the last call

    def close(self) -> None: ...


def open_loader(data: Data, batch_size: int, microbatches: int, seed: int) -> Loader:
    """The loader for a dataset, or an error that says why it cannot be read."""
    data = replace(data, dataset=guard(data.dataset, data.on_bad))
    blocks = offers.blocks(data.dataset, data.block_shards) if data.shuffle == "blocks" else None
    if data.is_map_style:
        if len(data.dataset) == 0:
            raise EmptyData(
                "the dataset is empty", cause="its length is 0", do="check the path or the filter behind it"
            )
        how = data.split, data.shuffle, data.drop_last, blocks
        order = Order(len(data.dataset), batch_size, microbatches, seed, *how)
        if order.steps_per_epoch == 0:
            raise EmptyData(
                f"drop_last leaves nothing: {len(data.dataset)} samples do not fill one batch of {batch_size}",
                do="lower batch_size, or keep the last batch with drop_last=False",
            )
        return MapLoader(data, order)
    if not hasattr(data.dataset, "__iter__"):
        raise SetupError(
            f"{type(data.dataset).__name__} is not a dataset",
            cause="it has neither __getitem__ with __len__ nor __iter__",
            do="pass a torch Dataset or IterableDataset, or a sequence of samples",
        )
    if data.split != "samples" or data.loader_processes > 1:
        asked = f"split={data.split!r}" if data.split != "samples" else f"loader_processes={data.loader_processes}"
        raise SetupError(
            f"{asked} cannot take effect on an iterable dataset",
            cause="its order is its own, and one process must read it from start to end",
            do="leave that option out, or give the dataset __getitem__ and __len__",
        )
    return StreamLoader(data, batch_size, microbatches, seed)


@dataclass(frozen=True)
class _Key:
    epoch: int
    step_in_epoch: int
    microbatch: int
    among: _Keys  # what this worker reads next, for looking ahead


@dataclass(frozen=True)
class _Probe:
    """One raw sample, read the way the loader reads: in a loader process where there are any, so that files which the
    dataset opens at the first reading are opened there and not shared."""

    index: int


@dataclass(frozen=True)
class _Keys:
    """The microbatches of some steps, in order; any number of them costs nothing."""

    epoch: int
    steps: range
    mine: range

    def __iter__(self) -> Iterator[_Key]:
        return (_Key(self.epoch, step, microbatch, self) for step in self.steps for microbatch in self.mine)


def _one(epoch: int, step: int, microbatch: int) -> _Key:
    """A microbatch of which nobody knows what comes after it."""
    return _Key(epoch, step, microbatch, _Keys(epoch, range(step, step + 1), range(microbatch, microbatch + 1)))


@dataclass
class _Asked:
    """What the loader processes are asked for next: torch's sampler, whose content we change between epochs."""

    keys: Iterable[_Key | _Probe] = ()

    def __iter__(self) -> Iterator[_Key | _Probe]:
        return iter(self.keys)


class _Fetch:
    """The dataset as the loader processes see it: one item is one collated microbatch."""

    def __init__(self, data: Data, order: Order) -> None:
        self.data, self.order = data, order
        self.collate = data.collate or default_collate
        # Indexing whole tensors gives the same values as collating samples one by one, without the loop.
        self.tensors = data.dataset.tensors if type(data.dataset) is TensorDataset and not data.collate else None
        self.announcer = Announcer(data.dataset, self.ids)

    def __len__(self) -> int:
        return self.order.steps_per_epoch * self.order.microbatches

    def ids(self, epoch: int, step_in_epoch: int, microbatch: int) -> Sequence[int]:
        ids = self.order.ids(epoch, step_in_epoch, microbatch)
        # A dataset that never ends goes on, in the second epoch, where the first one ended.
        return [i + epoch * self.order.samples for i in ids] if getattr(self.data.dataset, "endless", False) else ids

    def fetch(self, key: _Key | _Probe) -> Any:
        if isinstance(key, _Probe):
            apply(derive(self.order.seed, "probe-state", key.index))
            return key.index, self.data.dataset[key.index]
        ids = self.ids(key.epoch, key.step_in_epoch, key.microbatch)
        if not len(ids):
            return None
        self.announcer.reached(key.epoch, key.step_in_epoch, key.among.steps.stop, key.among.mine)
        if self.tensors is not None:
            chosen = torch.tensor(ids)
            return [tensor[chosen] for tensor in self.tensors]
        apply(derive(self.order.seed, "fetch", key.epoch, key.step_in_epoch, key.microbatch))
        dataset = self.data.dataset
        ready_made = None if self.data.collate else getattr(dataset, "read_batch", None)
        return ready_made(ids) if ready_made else self.collate(offers.read_many(dataset, ids))

    def __getitem__(self, key: _Key | _Probe) -> tuple[Any, offers.Taken]:  # in a loader process
        try:
            return self.fetch(key), offers.taken(self.data.dataset)
        except Exception as error:
            if isinstance(key, _Probe):
                return failure_of(error, [key.index]), offers.Taken()
            return failure_of(error, list(self.ids(key.epoch, key.step_in_epoch, key.microbatch))), offers.Taken()


class MapLoader:
    def __init__(self, data: Data, order: Order) -> None:
        self.data, self.order = data, order
        self.samples: int | None = order.samples
        self.steps_per_epoch: int | None = order.steps_per_epoch
        self._fetch = _Fetch(data, order)
        self._asked = _Asked()
        self._loader: DataLoader[Any] | None = None
        self._taken = offers.Taken()  # by loader processes
        self._probed: tuple[int, tuple[int, int]] = (-1, (0, 0))  # epoch, result

    def epoch(self, epoch: int, from_step: int, mine: range, to_step: int | None = None) -> Iterator[StepData]:
        whole = self.order.steps_per_epoch
        steps = range(from_step, whole if to_step is None else min(to_step, whole))
        batches = self._batches(_Keys(epoch, steps, mine))
        for step in steps:
            local = _Take(batches, len(mine))
            yield StepData(epoch, step, self.order.counts(step), local)
            local.skip_rest()

    def batch(self, epoch: int, step: int, microbatch: int) -> Any:
        """Any one microbatch, read in this process."""
        return self._fetch.fetch(_one(epoch, step, microbatch))

    def ahead(self, epoch: int, places: Iterable[tuple[int, int]]) -> Iterator[Any]:
        """The microbatches at these places, each a step and a microbatch of it, read ahead by the loader processes."""
        return self._batches(_one(epoch, *place) for place in places)

    def _batches(self, keys: Iterable[_Key | _Probe]) -> Iterator[Any]:
        if not self.data.loader_processes:
            yield from map(self._fetch.fetch, keys)
            return
        if self._loader is None:
            self._loader = DataLoader(
                self._fetch,  # type: ignore[arg-type]
                sampler=self._asked,
                batch_size=None,
                num_workers=self.data.loader_processes,
                prefetch_factor=self.data.prefetch or 2,
                persistent_workers=True,
                collate_fn=same,
                worker_init_fn=settle,
            )
        self._asked.keys = keys
        try:
            for item, taken in self._loader:
                self._taken += taken
                if isinstance(item, Failure):
                    raise_here(item)
                yield item
        except RuntimeError as error:
            death = explain_death(error)
            if death is None:
                raise
            raise death from None

    def probe(self, epoch: int) -> tuple[int, int]:
        if self._probed[0] != epoch:
            length, hash_ = len(self.data.dataset), getattr(self.data.dataset, "hash", "")
            anywhere = [derive(self.order.seed, "probe", epoch, number) % length for number in range(_PROBES)]
            ids = offers.probes(self.data.dataset, anywhere, self._fetch.ids(epoch, 0, 0))
            self._probed = epoch, (length, digest(hash_, list(self._batches(map(_Probe, ids)))))
        return self._probed[1]

    def taken(self) -> offers.Taken:
        taken, self._taken = self._taken, offers.Taken()
        return taken + offers.taken(self.data.dataset)

    def close(self) -> None:
        self._loader = None


class _Take:
    """The next `count` items of an iterator, to be consumed once, in full."""

    def __init__(self, items: Iterator[Any], count: int) -> None:
        self.items, self.left = items, count

    def __iter__(self) -> Iterator[Any]:
        while self.left:
            self.left -= 1
            yield next(self.items)

    def skip_rest(self) -> None:
        for _ in self:
            pass


class StreamLoader:
    """An iterable dataset: every worker reads the whole stream and keeps its own microbatches."""

    def __init__(self, data: Data, batch_size: int, microbatches: int, seed: int) -> None:
        self.data, self.batch_size, self.microbatches, self.seed = data, batch_size, microbatches, seed
        self.samples: int | None = None
        self.steps_per_epoch: int | None = None
        self.collate = data.collate or default_collate

    def epoch(self, epoch: int, from_step: int, mine: range, to_step: int | None = None) -> Iterator[StepData]:
        if self.data.loader_processes:
            steps: Iterable[Any] = self._in_process(epoch, mine)
        else:
            steps = self._steps(epoch, mine)
        empty = True
        for item in steps:
            if isinstance(item, Failure):
                raise_here(item)
            empty = False
            if to_step is not None and item.step_in_epoch >= to_step:
                return
            if item.step_in_epoch >= from_step:
                yield item
        if empty and self.data.drop_last:
            raise EmptyData(
                f"drop_last leaves nothing: the stream did not fill one batch of {self.batch_size}",
                do="lower batch_size, or keep the last batch with drop_last=False",
            )
        if empty:
            raise EmptyData(
                f"the iterable dataset gave nothing in epoch {epoch + 1}",
                cause="it is empty, or it is an iterator that can be read only once",
                do="give an object whose __iter__ starts over each time",
            )

    def _steps(self, epoch: int, mine: range) -> Iterator[StepData]:
        set_epoch = getattr(self.data.dataset, "set_epoch", None)
        if set_epoch:
            set_epoch(epoch)
        apply(derive(self.seed, "stream", epoch))
        stream = iter(self.data.dataset)
        step = 0
        while samples := self._pull(stream, epoch, step):
            if self.data.drop_last and len(samples) < self.batch_size:
                return
            parts = split_evenly(len(samples), self.microbatches)
            batches = [self._collated([samples[i] for i in parts[m]], epoch, step, m) for m in mine]
            yield StepData(epoch, step, tuple(map(len, parts)), batches, digest(len(samples), samples[0]))
            step += 1

    def _collated(self, samples: list[Any], epoch: int, step: int, microbatch: int) -> Any:
        apply(derive(self.seed, "collate", epoch, step, microbatch))  # it may mask or mix at random
        return self.collate(samples) if samples else None

    def _pull(self, stream: Iterator[Any], epoch: int, step: int) -> Sequence[Any]:
        """The step's samples, drawn from random state of their own: the forward passes in between use another."""
        apply(derive(self.seed, "fetch", epoch, step))
        samples: list[Any] = []
        for sample in stream:
            samples.append(sample)
            if len(samples) == self.batch_size:
                break
        return samples

    def _in_process(self, epoch: int, mine: range) -> Iterable[Any]:
        return DataLoader(
            _Stream(self, epoch, mine),
            batch_size=None,
            num_workers=1,
            prefetch_factor=self.data.prefetch or 2,
            collate_fn=same,
            worker_init_fn=settle,
        )

    def probe(self, epoch: int) -> tuple[int, int]:  # noqa: ARG002  every step carries its own check
        return -1, 0

    def taken(self) -> offers.Taken:
        return offers.taken(self.data.dataset)

    def close(self) -> None:
        return None


@dataclass
class _Stream(torch.utils.data.IterableDataset[Any]):
    loader: StreamLoader
    epoch: int
    mine: range

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.loader._steps(self.epoch, self.mine)
        except Exception as error:
            yield failure_of(error, [])
