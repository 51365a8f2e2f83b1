# SPDX-License-Identifier: Apache-2.0
"""Documents of any length as windows of one length, for language models: joined end to end, cut at equal distances.

Where each document begins in the long row of tokens is computed once, from the lengths alone; after that any window is
a binary search away, and always the same. Reads documents through the dataset that has them. Called by scripts; the
loader sees one more dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from unisono.core.errors import EmptyData, SetupError
from unisono.data import offers
from unisono.data.offers import Taken

_AT_A_TIME = 1024  # documents that are read together to learn their lengths
_Integers = NDArray[np.int64]


class Packed(Dataset[tuple[Tensor, ...]]):
    """Windows of `length` tokens over all documents of a dataset, and the same windows shifted by one, the targets.

        packed = Packed(Shards("s3://bucket/corpus", columns="tokens"), length=2048, eos=50256)
        inputs, targets = packed[0]                 # both (2048,) int64

    `eos` is put behind every document; None puts nothing. With ``documents=True`` a third tensor (length,) says to
    which document of the window each input belongs, from 0: equal numbers may attend to each other. Every token but
    the first is a target at most once; what is left at the end and fills no window is not read. `lengths` saves the
    one pass over the documents that is needed where the dataset does not know them (as ``source.lengths``).
    """

    def __init__(
        self,
        source: Any,
        length: int,
        eos: int | None,
        *,
        documents: bool = False,
        lengths: Sequence[int] | _Integers | None = None,
    ) -> None:
        if length < 1:
            raise SetupError(f"Packed(length={length}): a window has 1 token or more")
        if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            raise SetupError(f"Packed({type(source).__name__}) cannot be read by number", do="give a map-style dataset")
        self.source, self.length, self.eos, self.documents = source, length, eos, documents
        sizes = _lengths(source, lengths)
        self._starts: _Integers = np.zeros(len(sizes) + 1, dtype=np.int64)  # of each document, and the end of all
        np.cumsum(sizes + (eos is not None), out=self._starts[1:])
        self._check_tokens(len(sizes))

    def _check_tokens(self, documents: int) -> None:
        if len(self) < 1:
            raise EmptyData(
                f"{documents:,} documents with {self.tokens:,} tokens fill no window: one needs {self.length + 1:,}",
                do="use a smaller length, or more documents",
            )

    @property
    def tokens(self) -> int:
        """Of all documents, with an `eos` for each."""
        return int(self._starts[-1])

    def __len__(self) -> int:
        return max(self.tokens - 1, 0) // self.length

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, ...]]:
        """Each document that several windows share is read once."""
        begins = self._begins(indices)
        firsts, lasts = self._touched(begins)
        wanted = sorted({d for first, last in zip(firsts, lasts, strict=True) for d in range(first, last + 1)})
        read = dict(zip(wanted, map(self._tokens_of, offers.read_many(self.source, wanted), wanted), strict=True))
        return [
            self._window(begin, [(d, read[d]) for d in range(first, last + 1)])
            for begin, first, last in zip(begins, firsts, lasts, strict=True)
        ]

    def _begins(self, indices: Sequence[int]) -> list[int]:
        count = len(self)
        for index in indices:
            if not -count <= index < count:
                raise IndexError(f"window {index} of {count}")
        return [(index % count) * self.length for index in indices]

    def _touched(self, begins: Sequence[int]) -> tuple[list[int], list[int]]:
        """The first and last document of the ``length + 1`` tokens from each place on."""
        low = np.asarray(begins, dtype=np.int64)
        # An empty document starts where the next one does; from the right, the search finds the one with the token.
        first = np.searchsorted(self._starts, low, side="right") - 1
        last = np.searchsorted(self._starts, low + self.length, side="right") - 1
        return first.tolist(), last.tolist()

    def _tokens_of(self, sample: Any, document: int) -> _Integers:
        tokens = np.asarray(sample)
        expected = int(self._starts[document + 1] - self._starts[document]) - (self.eos is not None)
        if tokens.shape != (expected,) or (expected and tokens.dtype.kind not in "iu"):
            raise SetupError(
                f"{offers.locate(self.source, document)} is not a document of {expected:,} tokens",
                cause=f"it is {tokens.dtype} {tokens.shape}; a document is one row of whole numbers, always the same",
                do='choose the column of tokens, as in Shards(url, columns="tokens"); check lengths that you gave',
            )
        return tokens

    def _window(self, begin: int, documents: list[tuple[int, _Integers]]) -> tuple[Tensor, ...]:
        row = np.empty(self.length + 1, dtype=np.int64)
        owner = np.empty(self.length + 1, dtype=np.int64)
        for number, (document, tokens) in enumerate(documents):
            start, end = int(self._starts[document]) - begin, int(self._starts[document + 1]) - begin
            low, high = max(start, 0), min(end, self.length + 1)  # what the window has of it, with its eos
            upto = min(start + len(tokens), high)
            if low < upto:
                row[low:upto] = tokens[low - start : upto - start]
            if low <= upto < high and self.eos is not None:
                row[upto] = self.eos
            owner[low:high] = number
        window = torch.from_numpy(row)
        # A copy for the targets: masking inputs in place must not change them.
        pair = window[:-1], window[1:].clone()
        return (*pair, torch.from_numpy(owner[:-1])) if self.documents else pair

    @property
    def hash(self) -> str:
        """Stands for all the data; where the source has none, an AttributeError."""
        return f"{self.source.hash} in windows of {self.length}, eos {self.eos}"

    @property
    def block_sizes(self) -> Sequence[int]:
        """Windows that begin in each shard of the source."""
        sizes = self.source.block_sizes  # where there are none, an AttributeError, as for any dataset without shards
        ends = self._starts[np.cumsum(np.asarray(sizes, dtype=np.int64))]
        below = np.minimum(-(-ends // self.length), len(self))  # windows that begin before each end
        counts: list[int] = np.diff(below, prepend=0).tolist()
        return counts

    def expect(self, indices: Sequence[int]) -> None:
        firsts, lasts = self._touched(self._begins(indices))
        offers.expect(self.source, [d for pair in zip(firsts, lasts, strict=True) for d in dict.fromkeys(pair)])

    def locate(self, index: int) -> str:
        (first,), (last,) = self._touched(self._begins([index]))
        where = offers.locate(self.source, first)
        return f"window {index} ({where})" if first == last else f"window {index} ({where}, and {last - first} more)"

    def taken(self) -> Taken:
        return offers.taken(self.source)


def _lengths(source: Any, given: Sequence[int] | _Integers | None) -> _Integers:
    if given is None:
        given = getattr(source, "lengths", None)
    if given is None:
        given = [
            len(document)
            for start in range(0, len(source), _AT_A_TIME)
            for document in offers.read_many(source, range(start, min(start + _AT_A_TIME, len(source))))
        ]
    lengths = np.asarray(given, dtype=np.int64)
    if lengths.shape != (len(source),) or (len(lengths) and int(lengths.min()) < 0):
        raise SetupError(
            f"lengths of {lengths.shape} do not belong to {len(source):,} documents",
            do="give the number of tokens of every document, in order",
        )
    return lengths
