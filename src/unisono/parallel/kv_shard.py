# SPDX-License-Identifier: Apache-2.0
"""The server side of the key-value store: values, the pushes to them, and the optimizer that turns pushes into steps.

A synchronous push waits for those of all workers and is added up with them in the order of workers; the n-th push of
one worker meets only the n-th of the others, however late one is. An asynchronous one is applied when it comes. What
a worker asks is put together in `kv`, which also says which part of a value lies where. Nothing is unpickled.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unisono.comm.asking import VERBS, Words
from unisono.core.errors import CheckpointMismatch, PeerLost, SetupError, UnisonoError, suggest

SUBJECT = 17  # of questions about the store
INIT, PUSH, PULL, PULL_ROWS, OPTIMIZER, BARRIER, REFUSED, STATE_OUT, STATE_IN, WORKING = range(10)
Setting = tuple[str, dict[str, Any]]

# Those that treat every number by itself: a value may be cut anywhere.
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__: kind
    for kind in (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    )
}


def packed(value: Any) -> Tensor:
    """A key, or anything else that JSON knows, as a vector of bytes."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def unpacked(vector: Tensor) -> Any:
    return json.loads(vector.numpy().tobytes())


def made_optimizer(setting: Setting, parameter: Tensor) -> torch.optim.Optimizer:
    """Raises `SetupError` if there is none of that name, or not with those arguments."""
    name, arguments = setting
    if name not in OPTIMIZERS:
        raise SetupError(
            f"servers cannot run the optimizer {name!r}",
            cause="it is none of " + ", ".join(OPTIMIZERS),
            do=suggest(name, OPTIMIZERS) or "take one of these: they treat every number by itself",
        )
    values: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in arguments.items()}
    try:
        return OPTIMIZERS[name]([parameter], **values)
    except (TypeError, ValueError) as error:
        raise SetupError(
            f"torch.optim.{name} does not take {arguments}", cause=str(error), do="correct the arguments"
        ) from None


@dataclass
class _Round:
    """One push of each worker, added up in their order as far as they have come."""

    total: Tensor | None = None
    count: int = 0
    _early: dict[int, Tensor] = field(default_factory=dict)

    def add(self, worker: int, value: Tensor) -> None:
        if worker != self.count:
            self._early[worker] = value.clone()
            return
        self._next(value.clone() if self.total is None else value)
        while (early := self._early.pop(self.count, None)) is not None:
            self._next(early)

    def _next(self, value: Tensor) -> None:
        self.total = value if self.total is None else self.total.add_(value)
        self.count += 1


class _Entry:
    """A value, or the part of one that lies here. `changed` guards it and tells of it."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.changed = threading.Condition()
        self.version = 0  # how many updates it has had
        self.pushes: dict[int, int] = defaultdict(int)  # by worker
        self.rounds: dict[int, _Round] = defaultdict(_Round)
        self._setting: Setting | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    def update(self, pushed: Tensor, setting: Setting | None) -> None:
        if setting is None:
            self.value.copy_(pushed)
        else:
            self._follow(setting)
            assert self._optimizer is not None
            self._optimizer.param_groups[0]["params"][0].grad = pushed
            self._optimizer.step()
            self._optimizer.zero_grad()
        self.version += 1
        self.changed.notify_all()

    def state_out(self) -> tuple[dict[str, Any], list[Tensor]]:
        """What is plain about it, and copies of the value and of what the optimizer keeps element by element."""
        kept = self._optimizer.state.get(self._parameter, {}) if self._optimizer is not None else {}
        vectors = {name: each for name, each in kept.items() if _is_vector(each, self.value)}
        numbers = {name: [float(each), isinstance(each, Tensor)] for name, each in kept.items() if name not in vectors}
        about = {"optimizer": self._setting and self._setting[0], "vectors": list(vectors), "numbers": numbers}
        return about, [self.value.clone(), *(each.clone() for each in vectors.values())]

    def state_in(self, about: Mapping[str, Any], tensors: Sequence[Tensor], setting: Setting | None) -> None:
        if about["optimizer"] != (setting and setting[0]) and about["optimizer"] is not None:
            raise CheckpointMismatch(
                f"the checkpoint was saved with the optimizer {about['optimizer']}",
                cause=f"this store has {setting[0] if setting else 'none'}",
                do=f'call set_optimizer("{about["optimizer"]}", ...) before load',
            )
        value, *vectors = tensors
        self.value.copy_(value)
        if setting is not None:
            self._follow(setting)
            assert self._optimizer is not None
            state = self._optimizer.state[self._parameter]
            state.update({name: each.clone() for name, each in zip(about["vectors"], vectors, strict=True)})
            for name, (number, is_tensor) in about["numbers"].items():
                state[name] = torch.tensor(number) if is_tensor else number

    @property
    def _parameter(self) -> Tensor:
        assert self._optimizer is not None
        found: Tensor = self._optimizer.param_groups[0]["params"][0]
        return found

    def _follow(self, setting: Setting) -> None:
        """The same optimizer with other arguments, such as a new rate, goes on with its state."""
        if setting == self._setting:
            return
        if self._setting is not None and self._optimizer is not None and setting[0] == self._setting[0]:
            fresh = made_optimizer(setting, torch.zeros(1)).param_groups[0]
            self._optimizer.param_groups[0].update({key: fresh[key] for key in fresh if key != "params"})
        else:
            self._optimizer = made_optimizer(setting, torch.nn.Parameter(self.value))
        self._setting = setting


def _is_vector(value: Any, of: Tensor) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == of.shape


class KeyValueShard:
    """`workers` are the ranks that ask, first worker first: give `answer` and `give_up` to an `Answering`.

    `patience_s`: how long one worker may keep others waiting; None: for ever.
    """

    def __init__(self, workers: Sequence[int], patience_s: float | None = None) -> None:
        self._workers, self._patience_s = {rank: worker for worker, rank in enumerate(workers)}, patience_s
        self._entries: dict[str | int, _Entry] = {}
        self._order: list[tuple[str | int, int, int, torch.dtype, int]] = []  # of keys, as the first worker has it
        self._setting: Setting | None = None
        self._arrived: dict[int, int] = defaultdict(int)  # by worker: at how many barriers
        self._news = threading.Condition()  # of entries and barriers
        self._over = False
        self._signs = 0  # of workers that do something long
        self._left: frozenset[int] = frozenset()  # workers that ask no more
        self._verbs: Mapping[int, Callable[[int, Words], Sequence[Tensor]]] = {
            INIT: self._init,
            PUSH: self._push,
            PULL: self._pull,
            PULL_ROWS: self._pull_rows,
            OPTIMIZER: self._set_optimizer,
            BARRIER: self._barrier,
            STATE_OUT: self._state_out,
            STATE_IN: self._state_in,
            WORKING: self._show_sign,
        }

    @property
    def held_bytes(self) -> int:
        """Of values."""
        return sum(entry.value.numel() * entry.value.element_size() for entry in list(self._entries.values()))

    def answer(self, rank: int, question: Words) -> Words:
        try:
            found = self._verbs[question.what % VERBS](self._workers[rank], question)
        except PeerLost:
            raise
        except UnisonoError as error:  # the worker's mistake: it shall hear of it, and the others go on
            return Words(question.what // VERBS * VERBS + REFUSED, (), [packed(error.as_dict())])
        return Words(question.what, (), found)

    def give_up(self) -> None:
        """Somebody was lost: whoever waits for others waits in vain."""
        self._over = True
        self._wake()

    def leave(self, rank: int) -> None:
        """This worker will push nothing more: whoever waits for a push of it shall hear that."""
        with self._news:
            self._left |= {self._workers[rank]}
        self._wake()

    def regroup(self, workers: Sequence[int]) -> None:
        """Go on with these, when nobody asks. Pushes that still waited for others are forgotten; values stay."""
        self._workers = {rank: worker for worker, rank in enumerate(workers)}
        self._arrived.clear()
        self._left = frozenset()
        self._over = False
        for entry in self._entries.values():
            entry.rounds.clear()
            entry.pushes = defaultdict(int, dict.fromkeys(range(len(workers)), entry.version))

    def _wake(self) -> None:
        for condition in (self._news, *(entry.changed for entry in list(self._entries.values()))):
            with condition:
                condition.notify_all()

    def _await(
        self, condition: threading.Condition, true: Callable[[], bool], owes: Callable[[int], bool], what: str
    ) -> None:
        """With the condition held. `owes(worker)`: it has yet to do its part; then it must not have left."""
        signs = -1
        while signs != self._signs:  # with every sign, patience begins anew
            signs = self._signs
            if condition.wait_for(lambda: self._over or true() or any(map(owes, self._left)), self._patience_s):
                break
        if true():
            return
        if self._over:
            raise PeerLost("a worker was lost for whose push or barrier others waited")
        left = any(map(owes, self._left))
        who = min(filter(owes, self._left if left else self._workers.values()), default=0)
        if not left:
            raise SetupError(
                f"worker {who} has kept others waiting for {self._patience_s:g} s: they want {what} of it",
                cause="it computes something long, is stuck, or has taken another way through the script",
                do=f"look at what worker {who} does; or, if it is only slow, raise --hang-after",
            )
        raise SetupError(
            f"worker {who} has finished, and others wait for {what} of it",
            cause="the workers do not push, or come to a barrier, equally often",
            do="give every worker as many batches; or use dist_async, where nobody waits for the pushes of others",
        )

    def _init(self, worker: int, question: Words) -> Sequence[Tensor]:
        """The first worker brings the value; the others wait for it. Every key comes to every server, for the order."""
        synchronous, number, start, length = question.numbers
        key, value = unpacked(question.vectors[0]), question.vectors[1]
        seen = (key, start, length, value.dtype, synchronous)
        with self._news:
            if worker == 0 and number == len(self._order):
                self._order.append(seen)
                self._entries[key] = _Entry(value.clone())
                self._news.notify_all()
            self._await(self._news, lambda: number < len(self._order), lambda other: other == 0, "a key")
            first = self._order[number]
        if seen != first:
            raise SetupError(
                f"key number {number} is {key!r} on worker {worker} and {first[0]!r} on the first, or of another kind",
                cause="the workers do not initialise the same keys, shapes and dtypes in the same order and mode",
                do="call init in the same way on every worker",
            )
        return []

    def _push(self, worker: int, question: Words) -> Sequence[Tensor]:
        entry, setting, value = self._entry(question), self._setting, question.vectors[1]
        synchronous = question.numbers[0]
        if setting is not None and not entry.value.is_floating_point():
            raise SetupError(
                f"an optimizer cannot step on a value of {entry.value.dtype}",
                do="keep whole numbers in a store without an optimizer",
            )
        if setting is None and not synchronous:
            raise SetupError(
                "an asynchronous push needs an optimizer on the servers",
                cause="nothing says what becomes of the value when pushes come one by one",
                do="call set_optimizer(...) on every worker first, or use dist_sync",
            )
        with entry.changed:
            number = entry.pushes[worker]
            entry.pushes[worker] += 1
            if not synchronous:
                entry.update(value, setting)
                return []
            entry.rounds[number].add(worker, value)
            if entry.rounds[number].count == len(self._workers):
                total = entry.rounds.pop(number).total
                assert total is not None
                entry.update(total, setting)
        return []

    def _pull(self, worker: int, question: Words) -> Sequence[Tensor]:
        entry = self._entry(question)
        with entry.changed:
            self._await_own(entry, worker, question)
            # A synchronous value stays as it is until this worker's next push, which is read after this is sent.
            return [entry.value if question.numbers[0] else entry.value.clone()]

    def _pull_rows(self, worker: int, question: Words) -> Sequence[Tensor]:
        entry, width = self._entry(question), question.numbers[1]
        with entry.changed:
            self._await_own(entry, worker, question)
            return [entry.value.view(-1, width).index_select(0, question.vectors[1]).view(-1)]

    def _await_own(self, entry: _Entry, worker: int, question: Words) -> None:
        """Until what this worker pushed is in the value."""
        if question.numbers[0]:
            mine = entry.pushes[worker]
            self._await(
                entry.changed, lambda: entry.version >= mine, lambda other: entry.pushes[other] < mine, "a push"
            )

    def _state_out(self, worker: int, question: Words) -> Sequence[Tensor]:  # noqa: ARG002
        entry = self._entry(question)
        with entry.changed:
            about, tensors = entry.state_out()
        return [packed(about), *tensors]

    def _state_in(self, worker: int, question: Words) -> Sequence[Tensor]:  # noqa: ARG002
        entry, about = self._entry(question), unpacked(question.vectors[1])
        with entry.changed:
            entry.state_in(about, question.vectors[2:], self._setting)
        return []

    def _set_optimizer(self, worker: int, question: Words) -> Sequence[Tensor]:  # noqa: ARG002
        name, arguments = unpacked(question.vectors[0])
        made_optimizer((name, arguments), torch.zeros(1))
        self._setting = (name, arguments)
        return []

    def _barrier(self, worker: int, question: Words) -> Sequence[Tensor]:  # noqa: ARG002
        with self._news:
            self._arrived[worker] += 1
            mine = self._arrived[worker]
            self._news.notify_all()
            self._await(
                self._news,
                lambda: all(self._arrived[each] >= mine for each in self._workers.values()),
                lambda other: self._arrived[other] < mine,
                "a barrier",
            )
        return []

    def _show_sign(self, worker: int, question: Words) -> Sequence[Tensor]:  # noqa: ARG002
        with self._news:
            self._signs += 1
        return []

    def _entry(self, question: Words) -> _Entry:
        return self._entries[unpacked(question.vectors[0])]
