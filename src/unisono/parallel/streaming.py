# SPDX-License-Identifier: Apache-2.0
"""Local steps whose exchange hides under the next ones: the weights travel in fragments, each at its own time.

A round has as many segments as there are fragments. After segment s, all replicas' differences of fragment s are sent
while segment s + 1 is computed; when that is done, fragment s of every replica becomes alpha of its own weights and the
rest of the new global ones (Streaming DiLoCo, Douillard et al. 2025). So replicas never all stand at the same point:
each one's weights are carried, like its optimizer's state. The last fragment is waited for at the round's end, so that
a round stays a transaction; it is blended in when the next round begins. Same bits on any number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from unisono.core.errors import SetupError
from unisono.core.membership import Membership
from unisono.core.ranges import split
from unisono.parallel.carried import Carried, Make, State
from unisono.parallel.differences import Differences
from unisono.parallel.inner_states import InnerStates, Keep
from unisono.parallel.local import Local
from unisono.parallel.strategy import Compute, Microbatch

_ON_ITS_WAY = "on its way"  # 1 where the replica has weights of its own, 0 where it starts from the global ones


def fragments_of(sizes: Sequence[int], fragments: int) -> list[int]:
    """The fragment of each parameter: neighbours, in so many parts of about the same size; none is empty."""
    if len(sizes) < fragments:
        raise SetupError(
            f"{len(sizes)} trained tensors cannot be cut into {fragments} fragments",
            do=f"give fragments as {len(sizes)} or less",
        )
    if not sizes:
        return []
    ends, bounds = [*accumulate(sizes)], [0]
    for number in range(1, fragments):
        share = ends[-1] * number / fragments
        nearest = min(range(len(sizes)), key=lambda i: abs(ends[i] - share)) + 1
        bounds.append(min(max(nearest, bounds[-1] + 1), len(sizes) - fragments + number))
    return [sum(position >= bound for bound in bounds) - 1 for position in range(len(sizes))]


class Streaming(Local):
    def _what_is_carried(self, carry: Make) -> tuple[Carried, InnerStates]:
        if self.local.inner_state != "keep":
            raise SetupError(
                f"inner_state={self.local.inner_state!r} cannot take effect with fragments",
                cause="replicas go on from round to round with weights of their own, and so do their optimizers",
                do='use inner_state="keep", or fragments=1',
            )
        self._own = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

        def fresh(replica: int) -> State:
            weights = {f"weights/{name}": torch.zeros_like(p) for name, p in self._own.items()}
            device = next(self.model.parameters()).device
            own = {_ON_ITS_WAY: torch.zeros(1, dtype=torch.float64, device=device)}
            return weights | own | self._inner.initial() | carry(replica)

        carried = Carried(self.comm, fresh, "a replica, with weights and an optimizer of its own,")
        return carried, Keep(self._inner, carried, shared=True)

    def _laid_out(self, trained: Sequence[tuple[str, nn.Parameter]]) -> Differences:
        if [name for name, _ in trained] != list(self._own):
            raise SetupError(
                "layers were frozen or thawed in the middle of local steps with fragments",
                cause="each replica carries its own weights, of the layers that were trained at the start",
                do="use fragments=1",
            )
        return Differences(trained, fragments_of([p.numel() for _, p in trained], self.local.fragments))

    def configure(self, membership: Membership | None) -> None:
        self._queued: list[tuple[Microbatch, Sequence[Compute]]] = []
        super().configure(membership)

    def begin_step(self, weights: Sequence[float]) -> None:
        self._queued = []
        super().begin_step(weights)

    def forward_backward(self, microbatch: Microbatch, *turns: Compute) -> None:
        """A worker's replicas go through a round together, segment by segment: when the last has come, all are here."""
        self._open(microbatch.step)
        self._queued.append((microbatch, turns))
        if microbatch.index == self._mine.stop - 1:
            self._go_through_round()

    def _go_through_round(self) -> None:
        staged = {microbatch.index: self._set_out(microbatch.index) for microbatch, _ in self._queued}
        buffers = {microbatch.index: self._buffers.take_out() for microbatch, _ in self._queued}
        last = self.local.fragments - 1
        for number, segment in enumerate(split(len(self._queued[0][1]), self.local.fragments)):
            for microbatch, turns in self._queued:
                state = staged[microbatch.index]
                self._put_in(state)
                self._buffers.put_in(buffers[microbatch.index])
                self._update(microbatch, turns[segment.start : segment.stop], segment.start)
                self._inner.require_same_settings(self._settings)
                self._take_out(state)
                if number < last:
                    buffers[microbatch.index] = self._buffers.take_out()
                else:
                    place = microbatch.index - self._mine.start
                    self._buffers.end_microbatch(microbatch.weight, self._exact_landings[place])
            if number:
                self._blend_in(number - 1, staged)
            # From here on, what is staged changes no more in the last segment: others may commit once they have this.
            self._send(number, staged)
        assert self._differences is not None
        self._differences.put_back()
        self._states.rest()

    @torch.no_grad()
    def _set_out(self, replica: int) -> State:
        """Where the replica begins: where it was, with the last round's last fragment blended in."""
        state = self.carried.stage(replica)
        on_its_way = bool(state[_ON_ITS_WAY].item())
        assert self._differences is not None
        parts = self._differences.sums.fragments
        for name, start, part in zip(self._differences.names, self._differences.start, parts, strict=True):
            own = state[f"weights/{name}"]
            if not on_its_way:
                own.copy_(start)
            elif part == self.local.fragments - 1:
                own.copy_(torch.lerp(start, own.to(start.dtype), self.local.own_share))
        state[_ON_ITS_WAY].fill_(1.0)
        return state

    @torch.no_grad()
    def _put_in(self, state: State) -> None:
        assert self._differences is not None
        for name, parameter in zip(self._differences.names, self._differences.parameters, strict=True):
            parameter.copy_(state[f"weights/{name}"])
        self._inner.write(state)

    @torch.no_grad()
    def _take_out(self, state: State) -> None:
        assert self._differences is not None
        for name, parameter in zip(self._differences.names, self._differences.parameters, strict=True):
            state[f"weights/{name}"].copy_(parameter)
        self._inner.read(state)

    def _send(self, number: int, staged: dict[int, State]) -> None:
        differences = self._differences
        assert differences is not None
        for bucket in differences.sums.buckets_of(number):
            names = {position: differences.names[position] for position in differences.sums.members(bucket)}
            for microbatch, _ in self._queued:
                landing = self._landings[microbatch.index - self._mine.start]
                own = {at: staged[microbatch.index][f"weights/{name}"] for at, name in names.items()}
                differences.land(bucket, microbatch.weight, landing, own)
            self._hand_on(bucket)

    @torch.no_grad()
    def _blend_in(self, number: int, staged: dict[int, State]) -> None:
        """The others' part of a fragment has come while a segment was computed."""
        if self._overlap is not None:
            self._overlap.drain()
        differences = self._differences
        assert differences is not None
        for position, (name, start) in enumerate(zip(differences.names, differences.start, strict=True)):
            if differences.sums.fragments[position] == number:
                weights, _ = self._outer.moved(name, start, differences.sums.total(position))
                for state in staged.values():
                    own = state[f"weights/{name}"]
                    own.copy_(torch.lerp(weights, own.to(start.dtype), self.local.own_share))
