# SPDX-License-Identifier: Apache-2.0
"""All-reduce of codes by direct exchange: any codec, and the same bits on any number of workers.

Every microbatch's vector is encoded by itself and in blocks at fixed places. The owner of a slice decodes everyone's
codes of it, adds them in the fixed tree over microbatches, encodes the sum and sends that to all; everyone, the owner
too, goes on with what the sum's code says. With feedback both codes leave residuals (DoubleSqueeze, Tang et al. 2019):
an owner's slice is made of the homes of its microbatches, M fixed pieces of the vector, and the residual of the sum
over a piece is carried by its microbatch. Vectors that are small or not float32 are reduced as they are.

Cost per worker, n elements of c code bytes, p workers, k microbatches a worker: two latencies, (k + 1) c n (p-1)/p
bytes out; k encodings and decodings of n (the latter with feedback), M decodings of a slice, one encoding of it and
one decoding of n. `subtree` encodes a worker's sums over subtrees instead: k becomes 1 or 2 and the residual is that of
a sum, so what is said and what is not depends on who computes what: not for exact training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm import tree
from unisono.comm.codecs.clip import Clip
from unisono.comm.codecs.feedback import Carried, Residual, State, encode_with_feedback, residual_of
from unisono.comm.codecs.seam import Codec, stride
from unisono.comm.reducers.blocks import join_rows
from unisono.comm.reducers.cost import Links, round_s
from unisono.comm.reducers.direct import DirectReducer
from unisono.comm.reducers.scratch import Scratch
from unisono.comm.reducers.seam import LANES, Reducer
from unisono.comm.seam import Comm, Message, Op
from unisono.comm.slicing import length_of
from unisono.core import seeds
from unisono.core.errors import InternalError, SetupError
from unisono.core.membership import Membership

SMALLEST_BYTES = 4096  # of a vector that is worth a code: below, messages cost by their number

Shapes = Callable[[int], Sequence[tuple[int, Sequence[int]]]]
"""By tag: (start, shape) of the tensors in that vector. What lies between them is nobody's and kept at zero."""


def is_compressed(elements: int, dtype: torch.dtype) -> bool:
    return dtype == torch.float32 and 4 * elements >= SMALLEST_BYTES


@dataclass(frozen=True)
class Homes:
    """A vector in M pieces of whole blocks, one for each microbatch: all of one length but the last ones."""

    elements: int
    each: int

    @staticmethod
    def of(elements: int, block: int, microbatches: int) -> Homes:
        rows = -(-elements // block)
        return Homes(elements, -(-rows // microbatches) * block)

    def of_range(self, mine: range) -> slice:
        return slice(min(self.elements, mine.start * self.each), min(self.elements, mine.stop * self.each))


def even_slices(elements: int, block: int, parts: int) -> tuple[slice, ...]:
    """As even as whole blocks allow, possibly empty."""
    rows = -(-elements // block)
    bounds = [min(elements, rows * i // parts * block) for i in range(parts + 1)]
    return tuple(slice(bounds[i], bounds[i + 1]) for i in range(parts))


def fresh_state(
    codec: Codec, elements: Sequence[int], microbatches: int, device: torch.device
) -> Callable[[int], State]:
    """What a microbatch carries at the beginning: zeros. `elements` of the float32 vectors, by tag; 0 where another."""
    lengths: dict[str, int] = {}
    for tag, count in enumerate(elements):
        if is_compressed(count, torch.float32):
            lengths[f"residual.{tag}"] = count
            if not codec.shared_draws:
                lengths[f"result.{tag}"] = Homes.of(count, codec.block, microbatches).each
    return lambda _: {name: torch.zeros(count, device=device) for name, count in lengths.items()}


class CompressedReducer:
    """For one membership. With feedback, `carried` has the residuals (`fresh_state`); whoever steps the training begins
    and commits it. `shapes` is needed where vectors have gaps, as buckets do."""

    def __init__(
        self,
        comm: Comm,
        membership: Membership,
        codec: Codec,
        feedback: bool = False,
        seed: int = 0,
        carried: Carried | None = None,
        clip: Clip | None = None,
        shapes: Shapes | None = None,
        exact: bool = True,
        subtree: bool = False,
    ) -> None:
        if exact and subtree:
            raise SetupError(
                "sums over a worker's microbatches cannot be encoded in exact training",
                cause="their codes depend on who computes what, so another number of workers gets other bits",
                do="encode every microbatch (subtree=False), or give up the same bits with exact=False",
            )
        if feedback and carried is None:
            raise InternalError(f"error feedback for {codec.name} has nowhere to keep its residuals")
        self.comm, self.membership, self.codec, self.clip, self.seed = comm, membership, codec, clip, seed
        self.name = f"compressed {codec.name}"
        self._result = codec.for_result(membership.microbatches)
        self._carried = carried if feedback else None
        self._shapes, self._subtree, self._step = shapes, subtree, 0
        total = membership.microbatches
        self._nodes = [_nodes(mine, total, subtree) for mine in membership.ranges]  # by rank
        everyone = [node for nodes in self._nodes for node in nodes]
        self._additions = additions(tree.fold(everyone, total), len(everyone))
        self._local = tree.fold(self._nodes[comm.rank], total)
        self._plain: Reducer = DirectReducer(comm, membership)
        self._scratch = Scratch()
        self._levels: list[Tensor] = []
        self._gaps: dict[int, tuple[Sequence[tuple[int, Sequence[int]]], Tensor]] = {}  # by tag: of these shapes
        self._spent: set[tuple[int, int]] = set()  # (microbatch, tag) whose residual is known to be zero
        self._spending: set[tuple[int, int]] = set()  # and those that are once the step is committed

    @property
    def parts(self) -> int:
        return max(1, len(self._nodes[self.comm.rank]))  # who adds nothing still gets the sum

    def landings(self, mine: range) -> tuple[tree.Landing, ...]:
        if self._subtree:
            return tree.landings(mine, self.membership.microbatches)
        return tuple(tree.Landing(level=position, merges=0) for position in range(len(mine)))

    def begin(self, step: int) -> None:
        self._step = step
        self._spending.clear()
        if self._shapes is not None:  # the script may have frozen or thawed something, so that buckets are others now
            self._gaps = {tag: known for tag, known in self._gaps.items() if self._shapes(tag) == known[0]}

    def commit(self) -> None:
        """The residuals themselves are `carried`'s to commit."""
        self._spent |= self._spending

    def reduce(self, parts: Sequence[Tensor], tag: int, op: Op = "sum") -> None:
        target, rank = parts[0], self.comm.rank
        own = parts[: len(self._nodes[rank])]  # none if I am a server
        if op == "sum" and target.is_floating_point():
            self._prepare(own, tag)
        if op != "sum" or not is_compressed(target.numel(), target.dtype):
            self._plain.reduce(join_rows(self._local, own, op) or parts, tag, op)
            return
        owned = self._owned(target.numel())
        self._scratch.begin(target.new_empty(0, dtype=torch.uint8))
        mine = [self._encode(part, node, tag) for part, node in zip(own, self._nodes[rank], strict=True)]
        rows = self._scatter(mine, owned, tag)
        code = self._scratch.row(self._result.length(target.numel()))
        self._add(rows, target, owned[rank], tag)
        self._encode_result(target, owned[rank], code, tag)
        self._bring_back(code, target, owned, tag)
        target.index_fill_(0, self._gaps_of(target, tag), 0.0)

    def _owned(self, elements: int) -> tuple[slice, ...]:
        """By rank, the slice that it adds up: of those who compute, for it is they who carry residuals."""
        ranges, block, workers = self.membership.ranges, self.codec.block, len(self.membership.workers)
        if self._carried is None or self.codec.shared_draws:
            nothing = slice(elements, elements)
            return *even_slices(elements, block, workers), *[nothing] * (len(ranges) - workers)
        homes = Homes.of(elements, block, self.membership.microbatches)
        return tuple(homes.of_range(mine) for mine in ranges)

    def _seed(self, purpose: str, tag: int, microbatch: int = 0) -> int:
        if self.codec.shared_draws:
            purpose, microbatch = "codes", 0
        return seeds.derive(self.seed, f"codec {purpose}", self._step, microbatch, tag)

    def _gaps_of(self, target: Tensor, tag: int) -> Tensor:
        """Places (g,) of the vector that belong to no tensor."""
        if self._shapes is None:
            return torch.empty(0, dtype=torch.int64, device=target.device)
        if tag not in self._gaps:
            empty, shapes = torch.ones(target.numel(), dtype=torch.bool), self._shapes(tag)
            for start, shape in shapes:
                empty[start : start + torch.Size(shape).numel()] = False
            self._gaps[tag] = shapes, empty.nonzero().view(-1).to(target.device)
        return self._gaps[tag][1]

    # --- my vectors

    def _prepare(self, parts: Sequence[Tensor], tag: int) -> None:
        for part, (first, last) in zip(parts, self._nodes[self.comm.rank], strict=True):
            part.index_fill_(0, self._gaps_of(part, tag), 0.0)  # codes of earlier steps may have left something there
            if self.clip is not None:
                self.clip.apply(part, (last - first) / self.membership.microbatches)

    def _encode(self, part: Tensor, node: tree.Node, tag: int) -> Tensor:
        """The code of one of my vectors, which is spoilt by it."""
        code = self._scratch.row(self.codec.length(part.numel()))
        seed = self._seed("codes", tag, node[0])
        if self._carried is None:
            self.codec.encode(part, code, seed)
        else:
            residual = self._residual(self._carried, part, node, tag)
            encode_with_feedback(self.codec, part, code, residual, seed, 0)
            residual.next.index_fill_(0, self._gaps_of(part, tag), 0.0)
        return code

    def _residual(self, carried: Carried, part: Tensor, node: tree.Node, tag: int) -> Residual:
        """That of the node's first microbatch. What the others have, from other ranges, is added and used up."""
        name = f"residual.{tag}"
        for other in range(node[0] + 1, node[1]):
            spent = residual_of(carried, other, name, part.numel())
            if (other, tag) not in self._spent:
                part.add_(spent.present)
            spent.next.zero_()
            self._spending.add((other, tag))
        return residual_of(carried, node[0], name, part.numel())

    # --- between workers

    def _peers(self) -> list[int]:
        """Starting after me: if all began with the first, its link would be the bottleneck."""
        return [(self.comm.rank + i) % self.comm.size for i in range(1, self.comm.size)]

    def _scatter(self, codes: list[Tensor], owned: Sequence[slice], tag: int) -> list[Tensor]:
        """Everyone's codes of my slice, in the order of microbatches."""
        mine = owned[self.comm.rank]
        rows = {peer: [self._scratch.row(self.codec.length(length_of(mine))) for _ in self._nodes[peer]]
                for peer in self._peers()}  # fmt: skip
        sends = [Message(peer, code[self._bytes(self.codec, owned[peer])])
                 for peer in self._peers() if length_of(owned[peer]) for code in codes]  # fmt: skip
        receives = [Message(peer, row) for peer in self._peers() for row in rows[peer] if length_of(mine)]
        self.comm.exchange(sends, receives, LANES * tag).wait()
        rows[self.comm.rank] = [code[self._bytes(self.codec, mine)] for code in codes]
        return [row for peer in range(self.comm.size) for row in rows[peer]]

    def _bring_back(self, code: Tensor, target: Tensor, owned: Sequence[slice], tag: int) -> None:
        """Everyone's code of the result beside mine, and what it says into the target."""
        mine = owned[self.comm.rank]
        sends = [Message(peer, code[self._bytes(self._result, mine)]) for peer in self._peers() if length_of(mine)]
        receives = [Message(peer, code[self._bytes(self._result, owned[peer])])
                    for peer in self._peers() if length_of(owned[peer])]  # fmt: skip
        self.comm.exchange(sends, receives, LANES * tag + 1).wait()
        self._result.decode(code, target, self._seed("result", tag))

    @staticmethod
    def _bytes(codec: Codec, part: slice) -> slice:
        return slice(codec.length(part.start), codec.length(part.stop))

    # --- the slice that I own

    def _add(self, rows: list[Tensor], target: Tensor, mine: slice, tag: int) -> None:
        """Decode and add in tree order, a cache's worth at a time, into my slice of the target."""
        nodes = [node for nodes in self._nodes for node in nodes]
        draws = [self._seed("codes", tag, node[0]) for node in nodes]
        block = self.codec.block
        step = min(stride(target, block), max(1, -(-length_of(mine) // block)) * block)
        if not self._levels or self._levels[0].numel() < step or self._levels[0].device != target.device:
            self._levels = [target.new_zeros(step) for _ in range(max(level for level, _ in self._additions))]
        for low in range(mine.start, mine.stop, step):
            high = min(low + step, mine.stop)
            levels = [target[low:high], *(level[: high - low] for level in self._levels)]
            here = self._bytes(self.codec, slice(low - mine.start, high - mine.start))
            for row, draw, (level, merges) in zip(rows, draws, self._additions, strict=True):
                self.codec.decode(row[here], levels[level], draw, low)
                for upper in range(level, level - merges, -1):
                    levels[upper - 1].add_(levels[upper])

    def _encode_result(self, target: Tensor, mine: slice, code: Tensor, tag: int) -> None:
        gaps = self._gaps_of(target, tag)
        if len(gaps):
            target.index_fill_(0, gaps[(gaps >= mine.start) & (gaps < mine.stop)], 0.0)
        seed = self._seed("result", tag)
        if self._carried is None or self.codec.shared_draws:
            self._result.encode(target[mine], code[self._bytes(self._result, mine)], seed, mine.start)
            return
        homes = Homes.of(target.numel(), self.codec.block, self.membership.microbatches)
        for microbatch in self.membership.ranges[self.comm.rank]:
            home = homes.of_range(range(microbatch, microbatch + 1))
            residual = residual_of(self._carried, microbatch, f"result.{tag}", homes.each)
            residual.next[length_of(home) :].zero_()
            piece = code[self._bytes(self._result, home)]
            part = residual.cut(length_of(home))
            encode_with_feedback(self._result, target[home], piece, part, seed, home.start)
            inside = gaps[(gaps >= home.start) & (gaps < home.stop)] - home.start
            part.next.index_fill_(0, inside, 0.0)


def _nodes(mine: range, microbatches: int, subtree: bool) -> tuple[tree.Node, ...]:
    return tree.cover(mine, microbatches) if subtree else tuple((i, i + 1) for i in mine)


def additions(plan: tree.Fold, count: int) -> tuple[tuple[int, int], ...]:
    """`plan` for one row after the other: the level where it is put, and how often the top is added to the next."""
    result: list[tuple[int, int]] = []
    stack: list[int] = []
    waiting = list(reversed(plan.merges))
    for position in range(count):
        level, merges = len(stack), 0
        stack.append(position)
        while waiting and waiting[-1][1] == stack[-1] and len(stack) > 1 and waiting[-1][0] == stack[-2]:
            waiting.pop()
            stack.pop()
            merges += 1
        result.append((level, merges))
    return tuple(result)


def cost_s(
    bytes_: float,
    links: Links,
    membership: Membership,
    codec: Codec,
    feedback: bool = False,
    encode_s_per_byte: float = 0.0,
    decode_s_per_byte: float = 0.0,
) -> float:
    """Seconds of one reduction of float32 vectors of this many bytes; the codec's own per byte of them, as measured."""
    total, elements = membership.microbatches, int(bytes_) // 4
    result = codec.for_result(total)
    homes = feedback and not codec.shared_draws
    share = [len(mine) / total if homes else 1 / links.size for mine in membership.ranges]
    counts = [len(mine) for mine in membership.ranges]
    pairs = [(one, other) for one in range(links.size) for other in range(links.size) if one != other]
    leaves, sums = codec.length(elements), result.length(elements)
    scattering = round_s(links, ((one, other, counts[one] * leaves * share[other]) for one, other in pairs))
    collecting = round_s(links, ((one, other, sums * share[one]) for one, other in pairs))
    encoding = max(
        bytes_ * (k * (encode_s_per_byte + feedback * decode_s_per_byte) + s * encode_s_per_byte)
        for k, s in zip(counts, share, strict=True)
    )
    decoding = bytes_ * ((total * max(share) + 1) * decode_s_per_byte + total * max(share) * links.add_s_per_byte)
    return scattering + collecting + encoding + decoding
