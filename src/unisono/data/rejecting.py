# SPDX-License-Identifier: Apache-2.0
"""What becomes of a sample that cannot be used: it stops the run by name, or its neighbour takes its place.

A transform rejects a sample by raising `BadSample`. Other exceptions count as the data's fault only if they are of the
kinds that decoding raises (`is_bad`): a misspelt name in a transform must never make a dataset vanish sample by sample.
`Guarded` is what ``Data(dataset, on_bad="skip")`` reads from; without it the first bad sample stops the run.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset, IterableDataset, default_collate

from unisono.core import process
from unisono.core.errors import BadSample, SetupError, UnisonoError
from unisono.data import offers
from unisono.data.offers import Taken

_MOST_IN_A_ROW = 64
_OF_THE_DATA = (ValueError, EOFError, struct.error, zlib.error, FileNotFoundError)


def is_bad(error: BaseException) -> bool:
    """Whether an exception says that the sample, and not the program, the network or the machine, is at fault.

    Decoders raise ValueError and its kin, EOFError, or an OSError without a number (Pillow does). An OSError with a
    number is the machine's, and another worker would not meet it; of those only a file that is not there counts.
    """
    if isinstance(error, UnisonoError):
        return isinstance(error, BadSample)
    return isinstance(error, _OF_THE_DATA) or (isinstance(error, OSError) and error.errno is None)


def named(error: Exception, dataset: str, index: int, located: str) -> Exception:
    """The exception to raise for a sample: one that names it. What is not the sample's fault stays what it is."""
    if not is_bad(error):
        error.add_note(f"(while preparing sample {index} of {dataset}: {located})")
        return error
    if isinstance(error, BadSample):
        where, cause = error.where, error.cause or error.what
    else:
        where, cause = process.user_line(error), process.describe(error)
    rejected = BadSample(
        f"sample {index} of {dataset} cannot be used",
        where="\n".join(filter(None, (located, where))),
        cause=cause,
        do='correct the sample or the transform; or let its neighbour take its place: Data(..., on_bad="skip")',
    )
    rejected.index, rejected.trace = index, process.user_traceback(error)
    return rejected


class Guarded(Dataset[Any]):
    """A dataset without its bad samples: each is replaced by the next good one, counted, and reported by `taken`.

        data = Data(Shards("s3://bucket/pictures", transform=augment), on_bad="skip")      # reads through Guarded

    "Next" is by number, from the end on to the beginning: the same on any number of workers, in any order of reading,
    and nearly always in the same shard. That neighbour is then read twice in an epoch. A bad sample counts each time
    that it is read in a batch, so once an epoch; ``guarded[i]`` only looks, and does not count.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.endless: bool = getattr(dataset, "endless", False)
        self._skipped = Taken()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        # What the dataset does not offer, this one must not either: others look for it by name.
        if name in ("block_sizes", "expect", "hash", "locate", "transform") and "dataset" in self.__dict__:
            return getattr(self.dataset, name)
        if name == "read_batch" and getattr(self.__dict__.get("dataset"), "read_batch", None):
            return self._read_batch
        raise AttributeError(name)

    def __getitem__(self, index: int) -> Any:
        return self._next_good(index)[0]

    def __getitems__(self, ids: Sequence[int]) -> list[Any]:
        try:
            return offers.read_many(self.dataset, ids)
        except Exception as error:
            if not is_bad(error):
                raise
        return self._one_by_one(ids)

    def _read_batch(self, ids: Sequence[int]) -> Any:
        try:
            return self.dataset.read_batch(ids)
        except Exception as error:
            if not is_bad(error):
                raise
        return default_collate(self._one_by_one(ids))

    def _one_by_one(self, ids: Sequence[int]) -> list[Any]:
        found = [self._next_good(index) for index in ids]
        for _, skipped in found:
            self._skipped += skipped
        return [sample for sample, _ in found]

    def _next_good(self, index: int) -> tuple[Any, Taken]:
        count, first = len(self.dataset), ""
        if not self.endless and not -count <= index < count:
            raise IndexError(f"sample {index} of {count}")
        for distance in range(_MOST_IN_A_ROW if self.endless else min(_MOST_IN_A_ROW, count)):
            number = index + distance if self.endless else (index + distance) % count
            try:
                sample = self.dataset[number]
            except Exception as error:
                if not is_bad(error):
                    raise
                first = first or f"{offers.locate(self.dataset, index)}: {_why(error)}"
                continue
            return sample, Taken(skipped=1, bad=(first,)) if distance else Taken()
        raise BadSample(
            f"{distance + 1} samples in a row cannot be used, from sample {index} on",
            cause=f"the first is {first}",
            do="so many are no accident: look at the transform, and at what it expects of a sample",
        )

    def taken(self) -> Taken:
        mine, self._skipped = self._skipped, Taken()
        return mine + offers.taken(self.dataset)


def _why(error: Exception) -> str:
    return (error.cause or error.what) if isinstance(error, BadSample) else process.describe(error)


def guard(dataset: Any, on_bad: str) -> Any:
    """The dataset to read from under a policy: itself for ``stop``, which needs nothing but its exception."""
    if on_bad not in ("stop", "skip"):
        raise SetupError(f"on_bad={on_bad!r} is neither stop nor skip")
    if on_bad == "stop":
        return dataset
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise SetupError(
            'on_bad="skip" cannot take effect on an iterable dataset',
            cause="there is no neighbour by number; an iterable has its own way to leave a sample out",
            do="leave samples out in its __iter__, or give the dataset __getitem__ and __len__",
        )
    return Guarded(dataset)
