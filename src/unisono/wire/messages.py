# SPDX-License-Identifier: Apache-2.0
"""What workers, hosts, the coordinator and operators say to each other: plain values, one JSON object each.

Workers speak to their host (the supervisor, or an agent on another machine) over the channel; hosts speak to the
coordinator over one connection and pass on what is for or from their workers. Nothing here opens a socket.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

KINDS: dict[str, type[Message]] = {}


@dataclass(frozen=True, kw_only=True)
class Message:
    kind: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        KINDS[cls.kind] = cls


# --- from a worker


@dataclass(frozen=True, kw_only=True)
class Ready(Message):
    """The worker has built its job and wants to take part. `facts` must be the same for all workers of a run."""

    kind = "ready"
    worker: int
    address: str
    facts: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Status(Message):
    """A heartbeat: what the worker is doing. `waits`: it is blocked until other workers do their part."""

    kind = "status"
    worker: int
    generation: int = 0
    step: int = 0  # finished ones
    doing: str = "starting"
    waits: bool = False
    waits_for: list[int] = field(default_factory=list)  # workers of whom it has not all it needs, where that is known
    unheard: list[int] = field(default_factory=list)  # of those, and of the others, who do not even say that they wait
    out_of_step_with: int | None = None  # a worker that sent another number of bytes than this one expected
    busy: bool = False  # it has said that this will take long
    for_s: float = 0.0  # how long it has been doing that
    still_s: float = 0.0  # of a replica of several ranks: how long its first rank has not run at all
    where: str = ""  # the user's line it is in
    per_microbatch_s: float = 0.0  # how long it needs for one; 0 while unknown


@dataclass(frozen=True, kw_only=True)
class Broken(Message):
    """The worker has given up this generation: a connection broke. It waits for the next one."""

    kind = "broken"
    worker: int
    generation: int
    lost: int | None = None  # the worker at the other end
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Formed(Message):
    """The worker is connected under this generation and holds the run's state."""

    kind = "formed"
    worker: int
    generation: int


@dataclass(frozen=True, kw_only=True)
class Leaving(Message):
    """The worker was asked to go (a signal) and would like to, at the next step boundary."""

    kind = "leaving"
    worker: int
    because: str


@dataclass(frozen=True, kw_only=True)
class Finished(Message):
    """The worker is through with the training."""

    kind = "finished"
    worker: int


@dataclass(frozen=True, kw_only=True)
class Accuse(Message):
    """All who are right agree that `who` holds other weights than they do."""

    kind = "accuse"
    worker: int
    who: int
    generation: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Turn(Message):
    """`unisono.first_worker()`: the worker has come to the n-th of them, or has left it, with something to say."""

    kind = "turn"
    worker: int
    number: int
    done: bool = False
    said: str = ""


# --- from a host


@dataclass(frozen=True, kw_only=True)
class Hello(Message):
    """The first word on a connection. `role` is owner, host or operator; `workers` is all the host knows of its own."""

    kind = "hello"
    role: str
    host: str  # an id of this agent
    name: str = ""  # of the machine, for people
    address: str = ""  # its IP as others see it
    room: int = 0  # how many workers it can start, servers included
    servers: int = 0  # how many of them should serve
    facts: dict[str, str] = field(default_factory=dict)
    sent_s: float = 0.0
    workers: list[dict[str, Any]] = field(default_factory=list)  # encoded messages, oldest first


@dataclass(frozen=True, kw_only=True)
class Started(Message):
    kind = "started"
    worker: int
    slot: int = 0
    replaces: int | None = None


@dataclass(frozen=True, kw_only=True)
class Gone(Message):
    """A worker process has ended. `fatal`: going on would meet the same fault again, the run must end."""

    kind = "gone"
    worker: int
    exit_code: int
    because: str  # in words
    place: str = ""  # where it died, when that says something: two deaths at one place are no accident
    expected: bool = False  # it was asked to, or was through
    fatal: bool = False
    failure: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Alive(Message):
    """The host's heartbeat, with the latest of each worker's, and those that are stopped (SIGSTOP)."""

    kind = "alive"
    statuses: list[dict[str, Any]] = field(default_factory=list)
    frozen: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Examined(Message):
    kind = "examined"
    worker: int
    where: str = ""
    doing: str = ""
    stopped: bool = False  # by a signal: it cannot even be asked


@dataclass(frozen=True, kw_only=True)
class Relay(Message):
    """Events and output of another machine's workers, numbered, for the owner; kept until `Acknowledge`."""

    kind = "relay"
    host: str
    number: int
    event: dict[str, Any] | None = None
    log_of: int = 0
    output: str = ""  # its bytes, one character each


@dataclass(frozen=True, kw_only=True)
class Acknowledge(Message):
    kind = "acknowledge"
    host: str
    number: int


# --- from an operator


@dataclass(frozen=True, kw_only=True)
class Command(Message):
    """`what`: scale (to `number` workers and `servers`), stop, preempt, leave (`host`'s workers), over (from the
    owner), ps, reach back."""

    kind = "command"
    what: str
    number: int = 0  # of workers, where servers are named: 0 leaves them as they are
    servers: int | None = None  # None: as they are
    because: str = ""
    host: str = ""  # empty: the one that says it


@dataclass(frozen=True, kw_only=True)
class Answer(Message):
    kind = "answer"
    ok: bool
    text: str
    data: dict[str, Any] = field(default_factory=dict)


# --- from the coordinator to a host


@dataclass(frozen=True, kw_only=True)
class Welcome(Message):
    """The host is in. What it needs to start workers of its own, if it is another machine."""

    kind = "welcome"
    spec: dict[str, Any] = field(default_factory=dict)
    credentials: dict[str, str] = field(default_factory=dict)
    token: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    time_s: float = 0.0
    peers: list[str] = field(default_factory=list)  # addresses at which the other workers listen


@dataclass(frozen=True, kw_only=True)
class Refused(Message):
    """The host may not take part: an error as a dictionary."""

    kind = "refused"
    failure: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Spawn(Message):
    kind = "spawn"
    worker: int
    slot: int
    replaces: int | None = None
    under_way: bool = False  # the training has begun: its state comes from the others, not from a checkpoint


@dataclass(frozen=True, kw_only=True)
class Kill(Message):
    kind = "kill"
    worker: int
    because: str
    place: str = ""


@dataclass(frozen=True, kw_only=True)
class Examine(Message):
    """Look at a worker from outside: in which line is it?"""

    kind = "examine"
    worker: int


@dataclass(frozen=True, kw_only=True)
class Record(Message):
    """For the owner: an event for the run's record."""

    kind = "record"
    event: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class End(Message):
    """For all hosts: the run is over. Without a `failure`, the deaths of the workers in `blame` are the reason."""

    kind = "end"
    failure: dict[str, Any] | None = None
    blame: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Verdict(Message):
    """For the owner: the run ends when those who are left have saved, and this is why."""

    kind = "verdict"
    failure: dict[str, Any]


# --- from the coordinator to a worker


@dataclass(frozen=True, kw_only=True)
class Form(Message):
    """The next generation. `urgent`: drop what you wait for; otherwise finish the step in hand first."""

    kind = "form"
    worker: int
    generation: int
    members: list[int]
    ranges: list[list[int]]
    addresses: list[str]
    urgent: bool
    because: str


@dataclass(frozen=True, kw_only=True)
class Depart(Message):
    """The run goes on without this worker. With a `failure` it was not fit to take part."""

    kind = "depart"
    worker: int
    because: str
    failure: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Stop(Message):
    """Make the step in hand the last one."""

    kind = "stop"
    worker: int
    because: str


@dataclass(frozen=True, kw_only=True)
class Proceed(Message):
    """The answer to `Turn`: you may go in. Whoever was there first has `said` this; empty: you are the first."""

    kind = "proceed"
    worker: int
    number: int
    said: str = ""


TO_WORKERS = (Form, Depart, Stop, Proceed)
FROM_WORKERS = (Ready, Status, Broken, Formed, Leaving, Finished, Accuse, Turn)


def as_dict(message: Message) -> dict[str, Any]:
    return {"message": message.kind, **asdict(message)}


def encode(message: Message) -> str:
    return json.dumps(as_dict(message), separators=(",", ":"))


def from_dict(data: Any) -> Message | None:
    """The message, or None for what is not one, or of a kind that this version does not know."""
    try:
        kind = KINDS[data["message"]]
        known = {item.name for item in fields(kind)}
        return kind(**{key: value for key, value in data.items() if key in known})
    except (KeyError, TypeError):
        return None


def decode(text: str | bytes) -> Message | None:
    try:
        return from_dict(json.loads(text))
    except ValueError:
        return None
