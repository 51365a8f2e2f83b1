# SPDX-License-Identifier: Apache-2.0
"""A worker's gradient of a piece on its way to the owners of the slices, without waiting for other workers.

Buckets leave in the order in which the backward pass completes them, so that owners make the update of the last layers
while the gradients of the first are computed. The last message says that this was all; the piece counts as an update
then. Where the gradient as a whole must be known before a part of it may leave, that message brings everything. Made
for every round by `asynchronous`; who is asked is `owner`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from unisono.comm.asking import Words
from unisono.core.membership import Membership
from unisono.parallel.clock import Piece
from unisono.parallel.coding import Outgoing
from unisono.parallel.fresh import Ask
from unisono.parallel.gradients import Gradients
from unisono.parallel.owner import PART, PUSH, bits
from unisono.parallel.round_words import flags
from unisono.parallel.slices import Place
from unisono.parallel.views import owned_by


@dataclass
class _UnderWay:
    """A piece of which something may have been pushed."""

    piece: Piece
    draw: int  # of the codes
    sent: dict[int, int]  # by owner: how many of its slices
    asked: list[tuple[int, Callable[[], Words]]] = field(default_factory=list)  # and not answered yet


class Pushing:
    """`known`: by owner, the newest update that our weights have seen; it changes from piece to piece."""

    def __init__(
        self,
        rank: int,
        membership: Membership,
        gradients: Gradients,
        outgoing: Outgoing,
        known: dict[int, int],
        ask: Ask,
    ) -> None:
        self._rank, self._gradients, self._outgoing, self._known, self._ask = rank, gradients, outgoing, known, ask
        self._places = {owner: owned_by(owner, gradients.layout, membership) for owner in membership.owners}
        self._dense = len(gradients.layout.bucket_elements)

    def begin(self, piece: Piece, draw: int) -> None:
        self._under_way = _UnderWay(piece, draw, dict.fromkeys(self._places, 0))

    def push_up_to(self, bucket: int, share: float, loss: float) -> None:
        """While the backward pass goes on: all buckets up to this one are complete."""
        if bucket + 1 == self._dense:
            return  # the message that closes the piece comes at once
        for owner, places in self._places.items():
            stop = sum(place[0] <= bucket for place in places)
            if stop > self._under_way.sent[owner]:
                self._send(PART, owner, stop, share, loss)

    def push_rest(self, share: float, loss: float) -> Iterator[tuple[int, Words]]:
        """Returns what each owner says of the piece, when it has made the update. Without a share, there is none."""
        for owner, places in self._places.items():
            self._send(PUSH, owner, len(places), share, loss)
        for owner, wait in self._under_way.asked:
            answer = wait()
            if answer.numbers:
                yield owner, answer

    def _send(self, what: int, owner: int, stop: int, share: float, loss: float) -> None:
        now = self._under_way
        start, now.sent[owner] = now.sent[owner], stop
        vectors = [self._slice(owner, place) for place in self._places[owner][start:stop]] if share else []
        numbers = (self._known[owner], *now.piece, bits(share), bits(loss), now.draw, start, stop)
        words = Words(what, numbers, [*vectors, flags(self._gradients.used)] if share else [])
        now.asked.append((owner, self._ask(owner, words)))

    def _slice(self, owner: int, place: Place) -> Tensor:
        """Our gradient of it; codes are for others."""
        if place[0] >= self._dense:
            return self._gradients.packed_rows(*place)
        bucket = self._gradients.partial_sums(place[0], 1)[0]
        if owner == self._rank:
            return self._outgoing.whole(place, bucket)
        return self._outgoing.coded(place, bucket, self._under_way.draw)
