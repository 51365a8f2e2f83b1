# SPDX-License-Identifier: Apache-2.0
"""State that belongs to a microbatch and lives with whoever computes it: what a codec left out, an inner optimizer.

It moves along when another worker gets the microbatch. A strategy owns one `Carried`, calls `configure` in its own, and
within a step `begin`, `stage` and `commit`. Equal stamps are equal states: so a worker that fell one commit behind and
was healed still has its share, and a generation that breaks while states move loses nothing. Only a death does.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.comm import state_tree
from unisono.comm.seam import Comm, Message
from unisono.comm.threads import Hub, ThreadComm
from unisono.core.errors import InternalError, PeerLost, ReplicasDisagree, SetupError
from unisono.core.membership import Membership

_TAG = 1 << 23  # above buckets, buffers, meetings and healing
_NOT_HERE, _HERE, _HERE_ANEW = range(3)

Stamp = tuple[int, int]
"""Commits so far, and the generation of the last. A commit needs everybody's share of its step, so whoever took part in
that generation has the state of that stamp, even if the news of the commit never got there."""

State = dict[str, Tensor]
Make = Callable[[int], State]
"""The state of a microbatch, from nothing or from a checkpoint. The same on every worker."""


# --- who gives what to whom: pure


@dataclass(frozen=True)
class Holding:
    """What a worker says when a generation forms, of the state that it last committed or was given."""

    stamp: Stamp
    here: frozenset[int] = frozenset()  # microbatches whose state of exactly that stamp it has
    anew: frozenset[int] = frozenset()  # those of them that were lost, and of which nothing has been committed since
    can_make: bool = False  # it can make any: nothing has happened since the beginning, or since the checkpoint


class Move(NamedTuple):
    microbatch: int
    source: int  # worker
    target: int


@dataclass(frozen=True)
class Plan:
    stamp: Stamp
    moves: tuple[Move, ...]
    lost: tuple[int, ...]  # nobody has them: they begin anew


def plan_moves(holdings: Mapping[int, Holding], membership: Membership) -> Plan:
    """By worker. The newest stamp counts; what is of an older one is as good as gone."""
    stamp = max(holding.stamp for holding in holdings.values())
    current = {worker: holding for worker, holding in holdings.items() if holding.stamp == stamp}
    given: dict[int, int] = defaultdict(int)
    moves, lost = [], []
    for target, mine in zip(membership.members, membership.ranges, strict=True):
        for microbatch in mine:
            having = [worker for worker, holding in current.items() if microbatch in holding.here]
            making = [worker for worker, holding in current.items() if holding.can_make]
            if any(microbatch in current[worker].anew for worker in having):
                lost.append(microbatch)  # told again: whoever was to tell it may not have got that far
            if target in having or target in making:
                continue
            if not having and not making:
                lost.append(microbatch)
                continue
            source = min(having or making, key=lambda worker: (given[worker], membership.rank_of(worker)))
            given[source] += 1
            moves.append(Move(microbatch, source, target))
    return Plan(stamp, tuple(moves), tuple(lost))


def plan_parting(membership: Membership, leaving: frozenset[int]) -> tuple[Move, ...]:
    """What those who leave give to those who stay, who will know later where it belongs."""
    staying = [worker for worker in membership.members if worker not in leaving]
    parted = [
        m for worker, mine in zip(membership.members, membership.ranges, strict=True) if worker in leaving for m in mine
    ]
    return tuple(
        Move(microbatch, membership.owner_of(microbatch), staying[number % len(staying)])
        for number, microbatch in enumerate(parted)
        if staying
    )


def rounds(moves: tuple[Move, ...]) -> list[list[Move]]:
    """In each round a worker gives at most one state, so that it need not hold all that it reads for others at once."""
    result: list[list[Move]] = []
    given: dict[int, int] = defaultdict(int)
    for move in moves:
        number = given[move.source]
        given[move.source] += 1
        if number == len(result):
            result.append([])
        result[number].append(move)
    return result


# --- the states of one worker


@dataclass
class _Stamped:
    stamp: Stamp
    state: State


@dataclass
class _Attempt:
    """A step in hand: what the states will be if it is committed. What is not staged stays as it is."""

    base: Stamp
    stamp: Stamp
    staged: dict[int, State] = field(default_factory=dict)


class Carried:
    """`fresh` makes a microbatch's state at the beginning. All microbatches have the same names, types and shapes."""

    def __init__(self, comm: Comm, fresh: Make, what: str = "the state that belongs to microbatches") -> None:
        self.comm, self.fresh, self.what = comm, fresh, what
        self.lost: tuple[int, ...] = ()  # when the present generation formed
        self.goes_along = False  # with other ranks of its replica, which carry something where this one does not
        self._stamp: Stamp = (0, 0)
        self._membership: Membership | None = None
        self._mine = range(0)
        self._states: dict[int, _Stamped] = {}  # also what was given away, until a commit shows that all have got it
        self._anew: set[int] = set()
        self._attempt: _Attempt | None = None
        self._room: dict[int, State] = {}  # memory of states that are no longer in use
        self._agreed: dict[int, _Stamped] = {}  # see `keep`
        self._origin: tuple[Stamp, Make] | None = ((0, 0), fresh)

    @cached_property
    def shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Of one microbatch's state, by name."""
        return {name: (dtype, shape) for name, (dtype, shape, _) in self._kinds.items()}

    @cached_property
    def _kinds(self) -> dict[str, tuple[torch.dtype, tuple[int, ...], torch.device]]:
        return {name: (tensor.dtype, tuple(tensor.shape), tensor.device) for name, tensor in self.fresh(0).items()}

    @property
    def is_active(self) -> bool:
        """If not, everything here does nothing. The same on all ranks of a replica, which hear of losses together."""
        return self.goes_along or bool(self.shapes)

    @property
    def stamp(self) -> Stamp:
        return self._stamp

    def take_stamp(self, stamp: Stamp) -> None:
        """The job has been given a state that others committed, or has gone back to an earlier one."""
        if not self.is_active:
            return
        if stamp != self._stamp:
            self._stamp, self._anew = stamp, set()
        for microbatch, agreed in self._agreed.items():
            if agreed.stamp == stamp and self._find(microbatch) is None:
                self._states[microbatch] = _Stamped(stamp, self._placed(agreed.state))

    def begin_from(self, step: int, read: Make | None) -> None:
        """Go on from a checkpoint: `read` gives its states, each when it is needed; None if it has none."""
        if self.is_active:
            self._stamp = (step, 0)
            self._states, self._origin = {}, (self._stamp, read or self.fresh)

    # --- in a step

    def __getitem__(self, microbatch: int) -> State:
        """The committed state. May be changed in place right before `commit`, by whoever does not need `stage`."""
        return self._states[microbatch].state

    def begin(self) -> None:
        """A step begins. If the one before was not committed, nothing of it has happened."""
        if self.is_active:
            assert self._membership is not None
            self._drop_attempt()
            self._attempt = _Attempt(self._stamp, (self._stamp[0] + 1, self._membership.generation))

    @torch.no_grad()
    def stage(self, microbatch: int, copied: bool = True) -> State:
        """What the state will be after this step: a copy of the present one, or memory that is to be filled, all of it.
        To be finished before anything computed with it is sent: so if anybody commits, everybody's share is whole."""
        assert self._attempt is not None
        staged = self._attempt.staged.get(microbatch)
        if staged is None:
            present = self._states[microbatch].state
            staged = self._room.pop(microbatch, None) or {name: torch.empty_like(t) for name, t in present.items()}
            if copied:
                for name, tensor in present.items():
                    staged[name].copy_(tensor)
            self._attempt.staged[microbatch] = staged
        return staged

    def commit(self) -> None:
        """The step's update happens; so all members hold their states, and nothing else is needed any more."""
        if not self.is_active:
            return
        assert self._membership is not None
        self._stamp = (self._stamp[0] + 1, self._membership.generation)
        staged = self._attempt.staged if self._attempt else {}
        states = {}
        for microbatch in self._mine:
            state = self._states[microbatch].state
            if microbatch in staged:
                self._room[microbatch], state = state, staged[microbatch]
            states[microbatch] = _Stamped(self._stamp, state)
        self._states, self._attempt, self._origin = states, None, None
        self._anew.clear()

    def _drop_attempt(self) -> None:
        if self._attempt is not None:
            self._room.update(self._attempt.staged)
        self._attempt = None

    @torch.no_grad()
    def keep(self) -> None:
        """All workers agree on the present state: keep a copy of it, in case they have to go back."""
        self._agreed = {
            microbatch: _Stamped(self._stamp, {n: t.detach().to("cpu", copy=True) for n, t in state.items()})
            for microbatch, state in self.mine.items()
        }

    # --- between generations

    def hand_over(self, leaving: bool) -> None:
        """All members of a generation that ends at a step boundary, before the next is formed: the states of those who
        leave go to those who stay. Raises PeerLost, and then some of them may be lost."""
        if not self.is_active:
            return
        assert self._membership is not None
        rows = self.comm.gather(torch.tensor([leaving], dtype=torch.int64))
        pairs = zip(self._membership.members, rows, strict=True)
        moves = plan_parting(self._membership, frozenset(worker for worker, row in pairs if row.item()))
        for batch in rounds(moves):
            self._exchange(batch, self._membership)
        if moves:  # nobody's connections are closed before all have got theirs; by then, closing breaks nothing
            with contextlib.suppress(PeerLost):
                self.comm.gather(torch.zeros(1))

    def configure(self, membership: Membership) -> tuple[int, ...]:
        """All members at once, when a generation has formed and everyone has the same stamp. Returns the microbatches
        whose state was lost with a worker. Raises PeerLost, and then everything that was here is still here."""
        self.lost = ()
        if not self.is_active:
            return ()
        plan = plan_moves(self._gather(membership), membership)
        self._stamp = plan.stamp
        for batch in rounds(plan.moves):
            self._exchange(batch, membership)
            self._anew |= set(plan.lost) & self._states.keys()
        self._take_over(plan, membership)
        self.lost = plan.lost
        return plan.lost

    def _gather(self, membership: Membership) -> dict[int, Holding]:
        claims = [self._claim(microbatch) for microbatch in range(membership.microbatches)]
        can_make = self._origin is not None and self._origin[0] == self._stamp
        digest = zlib.crc32(repr(sorted(self.shapes.items())).encode())
        row = torch.tensor([digest, *self._stamp, can_make, *claims], dtype=torch.int64)
        rows = dict(zip(membership.members, (each.tolist() for each in self.comm.gather(row)), strict=True))
        for worker, (other, *_) in rows.items():
            if other != digest:
                raise ReplicasDisagree(
                    f"{self.what}: worker {worker} has other tensors, or other shapes, than this worker",
                    cause="a layer was frozen, added or resized on one of them",
                    do="let every worker change the model in the same way, at the same step",
                )
        return {worker: _holding(row[1:]) for worker, row in rows.items()}

    def _claim(self, microbatch: int) -> int:
        if self._find(microbatch) is None:
            return _NOT_HERE
        return _HERE_ANEW if microbatch in self._anew else _HERE

    def _find(self, microbatch: int) -> State | None:
        """The state of this worker's stamp, wherever it comes from."""
        present, attempt = self._states.get(microbatch), self._attempt
        if present is not None and present.stamp == self._stamp:
            return present.state
        if attempt is not None and attempt.stamp == self._stamp and microbatch in self._mine:
            # Others committed the step that was in hand here, and gave us the weights that came of it.
            if microbatch in attempt.staged:
                return attempt.staged[microbatch]
            if present is not None and present.stamp == attempt.base:
                return present.state
        return None

    def _exchange(self, moves: list[Move], membership: Membership) -> None:
        me = membership.members[self.comm.rank]
        sends: list[Message] = []
        receives: list[Message] = []
        arriving: dict[int, State] = {}
        for move in moves:
            if move.source == me:
                found = self._find(move.microbatch)
                state = self._make(move.microbatch) if found is None else found
                sends += _messages(membership.rank_of(move.target), state)
            elif move.target == me:
                arriving[move.microbatch] = state = self._empty()
                receives += _messages(membership.rank_of(move.source), state)
        self.comm.exchange(sends, receives, _TAG).wait()
        self._states.update({microbatch: _Stamped(self._stamp, state) for microbatch, state in arriving.items()})

    def _take_over(self, plan: Plan, membership: Membership) -> None:
        me, mine = membership.members[self.comm.rank], membership.ranges[self.comm.rank]
        given = [move.microbatch for move in plan.moves if move.source == me]
        states = {microbatch: state for microbatch in given if (state := self._find(microbatch)) is not None}
        for microbatch in mine:
            state = self._find(microbatch)
            if state is None:
                state = self._checked(self.fresh(microbatch)) if microbatch in plan.lost else self._make(microbatch)
            states[microbatch] = state
        # Never into memory that was in use: a checkpoint may be copying from it.
        self._states = {microbatch: _Stamped(plan.stamp, state) for microbatch, state in states.items()}
        self._anew = set(plan.lost) & states.keys()
        self._attempt, self._room = None, {}
        self._membership, self._mine = membership, mine

    def _make(self, microbatch: int) -> State:
        assert self._origin is not None
        return self._checked(self._placed(self._origin[1](microbatch)))

    def _checked(self, state: State) -> State:
        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
        if found != self.shapes:
            raise InternalError(f"{self.what} is not the same for all microbatches: {found} and {self.shapes}")
        return state

    def _placed(self, state: State) -> State:
        """A copy, where the state is used."""
        return {name: tensor.to(self._kinds[name][2], copy=True) for name, tensor in state.items()}

    def _empty(self) -> State:
        kinds = self._kinds.items()
        return {name: torch.empty(shape, dtype=dtype, device=device) for name, (dtype, shape, device) in kinds}

    # --- for checkpoints

    @property
    def mine(self) -> dict[int, State]:
        """By microbatch. They change only at `commit`."""
        return {microbatch: self._states[microbatch].state for microbatch in self._mine}

    @property
    def holders(self) -> dict[int, int]:
        """The worker that has a microbatch's state, of all microbatches."""
        members = self._membership
        if members is None:
            return {}
        pairs = zip(members.members, members.ranges, strict=True)
        return {microbatch: worker for worker, mine in pairs for microbatch in mine}


NOTHING = Carried(ThreadComm(Hub(), 0), lambda _: {})


def refuse_new_layout(carried: Carried) -> None:
    """Other parameters train from now on; what is carried for the old ones cannot follow."""
    if carried.is_active:
        raise SetupError(
            f"parameters were frozen or thawed, which {carried.what} cannot follow",
            cause="it was laid out for the parameters that trained at the start",
            do="freeze before the training begins; or use a compression that keeps nothing: fp16, bf16 or int8",
        )


def carried_of(strategy: Any) -> Carried:
    """Strategies that carry nothing need not say so."""
    found = getattr(strategy, "carried", NOTHING)
    assert isinstance(found, Carried)
    return found


def _holding(row: list[int]) -> Holding:
    commits, generation, can_make, *claims = row
    here = frozenset(microbatch for microbatch, claim in enumerate(claims) if claim != _NOT_HERE)
    anew = frozenset(microbatch for microbatch, claim in enumerate(claims) if claim == _HERE_ANEW)
    return Holding((commits, generation), here, anew, bool(can_make))


def _messages(peer: int, state: State) -> list[Message]:
    return [Message(peer, state_tree.as_bytes(state[name])) for name in sorted(state) if state[name].numel()]
