# SPDX-License-Identifier: Apache-2.0
"""From the events of a run that has ended to its receipt. Called by whoever keeps the run's directory.

`code_read` is said at the start, for the script may be edited while it runs; `write_receipt` comes at the end and
never raises: what it could not do becomes a notice. Only a run that came to a result gets a receipt.
"""

from __future__ import annotations

import datetime
import platform
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from unisono.core import events
from unisono.core.receipt import (
    FORMAT,
    VERSION,
    Change,
    Code,
    DataSeen,
    Losses,
    Outcome,
    Receipt,
    Resume,
    Saved,
    Start,
    code_digest,
    seal,
)
from unisono.core.run_dir import RunDir, write_atomically
from unisono.core.script_files import digests
from unisono.core.signing import VARIABLE, SigningKey, key_id, key_path, make_key, own_key
from unisono.core.spec import RunSpec

_ROOM = 96_000  # bytes of a receipt, unless what must be in it alone is more
_ROW = 36  # bytes of a loss in it
_MOST_LOSSES, _FEWEST_LOSSES = 1024, 64
_LONGEST = 300  # characters of a text
_STEP = re.compile(rb'^\{"kind":"step_finished",[^{]*?"step":(\d+),')
_SECRET = re.compile(r"(?<=://)[^/@]*@|\?.*")  # in an address: a name and a password, a token


def code_read(script: str) -> events.CodeRead:
    """What the training is made of, now. Nothing, where it cannot be read: the run itself will say why."""
    try:
        return events.CodeRead(files=digests(script))
    except Exception:
        return events.CodeRead(files={})


def write_receipt(run_dir: RunDir, spec: RunSpec, lost: Collection[str] = ()) -> list[events.Notice]:
    """Write it, and say what is worth saying. `lost`: files of the run's that are not whole."""
    try:
        if run_dir.events.name in lost:
            return [_no_receipt("not every event could be written down")]
        receipt = gather(run_dir, spec)
        if receipt is None:
            return []
        key, notices = _key()
        write_atomically(run_dir.receipt, seal(receipt, key).decode())
    except Exception as error:  # whatever it is, the training is done and its result must not be lost over this
        return [_no_receipt(f"{type(error).__name__}: {error}" if not isinstance(error, OSError) else _reason(error))]
    return notices


def _no_receipt(why: str) -> events.Notice:
    return events.Notice(code="no-receipt", text=f"there is no receipt of this run: {why}")


def _reason(error: Exception) -> str:
    strerror = error.strerror if isinstance(error, OSError) else ""
    place = error.filename if isinstance(error, OSError) else ""
    return f"{place}: {strerror}" if strerror and place else strerror or str(error)


def _key() -> tuple[SigningKey | None, list[events.Notice]]:
    """The user's key, made if there is none; without one the receipt is still worth having."""
    try:
        found = own_key()
        if found is not None:
            return found, []
        made = make_key()
    except Exception as error:
        text = f"the receipt is not signed: {_reason(error)}; {VARIABLE} can name a key file elsewhere"
        return None, [events.Notice(code="receipt-unsigned", text=text)]
    text = f"receipts are signed with a new key, {key_id(made.public)}, kept in {key_path()}"
    return made, [events.Notice(code="signing-key", text=text)]


@dataclass
class Sample:
    """Losses of a run of any length, as many as there is room for: whenever it is full, every other one goes."""

    most: int = _MOST_LOSSES
    every: int = 1
    rows: list[tuple[int, str]] = field(default_factory=list)
    last: tuple[int, str] | None = None

    def wants(self, step: int) -> bool:
        return (step - 1) % self.every == 0

    def take(self, step: int, loss: float | None) -> None:
        """Also for a step that is not wanted, if it may be the last."""
        text = float("nan" if loss is None else loss).hex()
        if self.rows and step <= self.rows[-1][0]:
            return
        self.last = (step, text)
        if self.wants(step):
            self.rows.append(self.last)
            self.thin(self.most)

    def thin(self, most: int) -> None:
        while len(self.rows) > most:
            self.every *= 2
            self.rows = [row for row in self.rows if self.wants(row[0])]

    def finish(self, most: int) -> Losses:
        self.thin(most)
        end = [self.last] if self.last and self.last not in self.rows else []
        return Losses(every=self.every, rows=[*self.rows, *end])


@dataclass
class _Seen:
    """What the events have told so far."""

    starts: list[events.RunStarted] = field(default_factory=list)
    code: dict[int, dict[str, str]] = field(default_factory=dict)  # number of the start: files
    configured: events.Configured | None = None
    changes: dict[tuple[int, int], Change] = field(default_factory=dict)  # (number of the start, generation)
    saved: dict[tuple[int, str], Saved] = field(default_factory=dict)
    resumes: list[Resume] = field(default_factory=list)
    losses: Sample = field(default_factory=Sample)
    finished: events.RunFinished | None = None

    def take(self, event: events.Event | None) -> None:
        number = len(self.starts)
        if isinstance(event, events.StepFinished):
            self.losses.take(event.step, event.loss)
        elif isinstance(event, events.RunStarted):
            self.starts.append(event)
            self.finished = None  # what an earlier start came to is not what this one does
        elif isinstance(event, events.CodeRead):
            self.code[number] = event.files
        elif isinstance(event, events.Configured):
            self.configured = event
        elif isinstance(event, events.MembershipChanged):
            self.changes[number, event.generation] = Change(
                generation=event.generation, step=event.step, members=event.members, because=event.because[:_LONGEST]
            )
        elif isinstance(event, events.CheckpointSaved):
            self.saved[event.step, event.digest] = Saved(step=event.step, sha256=event.digest)
        elif isinstance(event, events.Resumed):
            differs = [text[:_LONGEST] for text in event.differs]
            self.resumes.append(Resume(step=event.step, checkpoint=event.digest, differs=differs))
        elif isinstance(event, events.RunFinished):
            self.finished = event


def gather(run_dir: RunDir, spec: RunSpec) -> Receipt | None:
    """The receipt, unsigned; None for a run without a result."""
    seen = _Seen()
    for event in _events(run_dir, seen.losses):
        seen.take(event)
    if seen.finished is None or seen.configured is None or not seen.starts:
        return None
    result, job = seen.finished.result, seen.configured.job
    started, ended = _when(seen.starts[0].time_s), _when(seen.finished.time_s)
    files = seen.code.get(len(seen.starts), {})
    starts = [
        Start(time=_when(start.time_s), workers=start.workers, code=code_digest(seen.code.get(number, {})))
        for number, start in enumerate(seen.starts, 1)
    ]
    receipt = Receipt(
        format=FORMAT,
        version=VERSION,
        name=seen.starts[-1].name,
        started=started,
        ended=ended,
        versions=versions(),
        code=Code(sha256=code_digest(files), files=files, changed=_changed(files, spec.script)),
        data=data_seen(seen.configured),
        run=_without_passwords(spec.model_dump(mode="json")),
        job=job,
        fingerprint=seen.configured.fingerprint,
        result=Outcome(**{name: result[name] for name in Outcome.model_fields if name in result}),
        starts=starts,
        resumes=seen.resumes,
        membership=list(seen.changes.values()),
        checkpoints=list(seen.saved.values()),
        losses=Losses(every=1, rows=[]),
    )
    room = (_ROOM - len(seal(receipt, None))) // _ROW
    losses = seen.losses.finish(max(_FEWEST_LOSSES, min(_MOST_LOSSES, room)))
    return receipt.model_copy(update={"losses": losses})


def _events(run_dir: RunDir, losses: Sample) -> Iterator[events.Event | None]:
    """Steps that the receipt has no room for are not decoded: a long run has millions of them. The last one is."""
    passed_over = b""
    with run_dir.events.open("rb") as file:
        for line in file:
            step = _STEP.match(line)
            if step and not losses.wants(int(step[1])):
                passed_over = line
                continue
            yield events.decode(line)
    if passed_over:
        yield events.decode(passed_over)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "unisono"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _when(time_s: float) -> str:
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).isoformat(timespec="seconds")


def _changed(files: dict[str, str], script: str) -> list[str]:
    """Names of files that were edited, added or removed while the run was going on."""
    try:
        now = digests(script)
    except OSError:
        return []
    if not files or not now:  # a script that has changed its working directory does not find itself
        return []
    return sorted(name for name in files.keys() | now.keys() if files.get(name) != now.get(name))


def data_seen(configured: events.Configured) -> DataSeen:
    """What is known of the data: its own hash where it has one, else the digest of a few samples."""
    probe = str(configured.fingerprint.get("data", ""))
    count, _, digest = probe.partition("/")
    samples = int(count) if count.isdigit() else None
    if configured.data:
        return DataSeen(by="hash", digest=configured.data, samples=samples)
    if samples is None:  # a stream: what it is shows only step by step
        return DataSeen(by="nothing", digest="", samples=None)
    return DataSeen(by="probed samples", digest=digest, samples=samples)


def _without_passwords(run: dict[str, Any]) -> dict[str, Any]:
    """Receipts are shown to others."""
    return run | {"checkpoint_to": _SECRET.sub("", str(run.get("checkpoint_to", "")))}
