# SPDX-License-Identifier: Apache-2.0
"""Fault plans: what is to go wrong in a run, on which worker, in which step. ``--faults plan.toml`` names one.

A plan is read and checked before anything starts; a mistake in it is refused with the place and a suggestion, for a
fault that silently never happens proves nothing. This file knows plans, not how a fault is done: that is
`elastic.fault_points`. Torch-free.
"""

from __future__ import annotations

import math
import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.core.errors import BadFaultPlan, suggest

KINDS = ("kill", "hang", "freeze", "slow", "drop", "corrupt")
PLACES = ("data", "forward", "collective", "update", "reform", "heal", "evaluate", "start")
WITHIN_A_STEP = ("data", "forward", "collective", "update")  # the others happen now and then, so at or after a step
KEYS = ("kind", "worker", "step", "at", "factor", "until", "seconds")

_ONLY_FOR = {"factor": ("slow",), "until": ("slow",), "seconds": ("hang", "freeze")}
_NOT_FOR = {"at": ("slow",)}
_HARMLESS = ("slow",)  # every other kind costs the run its worker
_EXAMPLE = '[[fault]]\nkind = "kill"\nworker = 2\nstep = 10'


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong. `step` as users count them: the first is 1."""

    kind: str
    worker: int
    step: int = 1
    at: str = "forward"
    factor: float = 1.0  # slow: how many times slower
    until: int | None = None  # slow: the last slow step
    seconds: float | None = None  # hang, freeze: how long; None is for ever

    def matches(self, steps: range, place: str) -> bool:
        """Whether it is due when its worker reaches `place` with these steps in hand. A slow one is slow all along."""
        if place != self.at or self.kind == "slow":
            return False
        if place in WITHIN_A_STEP:
            return self.step in steps
        return place == "start" or steps[-1] >= self.step

    def slows(self, step: int) -> bool:
        return self.kind == "slow" and self.step <= step and (self.until is None or step <= self.until)

    def as_toml(self) -> str:
        rows = ["[[fault]]", f'kind = "{self.kind}"', f"worker = {self.worker}"]
        if self.at != "start":
            rows.append(f"step = {self.step}")
        if self.kind != "slow":
            rows.append(f'at = "{self.at}"')
        else:
            rows.append(f"factor = {self.factor!r}")
        rows += [f"{key} = {value!r}" for key in ("until", "seconds") if (value := getattr(self, key)) is not None]
        return "\n".join(rows) + "\n"


@dataclass(frozen=True)
class FaultPlan:
    faults: tuple[Fault, ...] = ()

    def of(self, worker: int) -> tuple[Fault, ...]:
        return tuple(fault for fault in self.faults if fault.worker == worker)

    def as_toml(self) -> str:
        """The plan as a file that `read_plan` reads back."""
        return "\n".join(fault.as_toml() for fault in self.faults)


def read_plan(path: Path) -> FaultPlan:
    try:
        text = path.read_text()
    except OSError as error:
        raise BadFaultPlan(
            f"cannot read the fault plan {path}: {error.strerror}", do="give the path of a TOML file after --faults"
        ) from None
    except ValueError:
        raise BadFaultPlan(f"the fault plan {path} is not text", do=f"write it like this:\n{_EXAMPLE}") from None
    return parse_plan(text, str(path))


def parse_plan(text: str, source: str) -> FaultPlan:
    """The plan in `text`; `source` is named in errors."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadFaultPlan(f"{source} is not valid TOML: {error}", do=f"write it like this:\n{_EXAMPLE}") from None
    for key in content:
        if key != "fault":
            raise BadFaultPlan(f"{source}: unknown key {key!r}", do=f"a plan holds only faults:\n{_EXAMPLE}")
    entries = content.get("fault", [])
    if not isinstance(entries, list):
        raise BadFaultPlan(f"{source}: 'fault' is not a list", do="write [[fault]] with two brackets on each side")
    if not entries:
        raise BadFaultPlan(f"{source} holds no fault", do=f"write at least one:\n{_EXAMPLE}")
    return FaultPlan(tuple(_Entry(source, number, entry).fault() for number, entry in enumerate(entries, start=1)))


@dataclass(frozen=True)
class _Entry:
    """One ``[[fault]]`` on its way to a `Fault`. `number` counts from 1."""

    source: str
    number: int
    values: Any

    def fault(self) -> Fault:
        if not isinstance(self.values, dict):
            raise self._error("is not a table", f"write it like this:\n{_EXAMPLE}")
        for key in self.values:
            if key not in KEYS:
                raise self._error(f"unknown key {key!r}", _known("keys", KEYS), key, KEYS)
        kind = self._one_of("kind", KINDS)
        self._refuse_what_has_no_effect(kind)
        at = self._one_of("at", PLACES) if "at" in self.values else "forward"
        step = self._whole("step", least=1, default=1 if at == "start" else None)
        if at == "start" and step != 1:
            raise self._error(f"step = {step} has no effect at = 'start'", "leave it out: a worker starts once")
        until = self._whole("until", least=1) if "until" in self.values else None
        if until is not None and until < step:
            raise self._error(f"until = {until} is before step = {step}", "until is the last slow step")
        return Fault(
            kind=kind,
            worker=self._whole("worker", least=0),
            step=step,
            at=at,
            factor=self._number("factor", above=1.0) if kind == "slow" else 1.0,
            until=until,
            seconds=self._number("seconds", above=0.0) if "seconds" in self.values else None,
        )

    def _refuse_what_has_no_effect(self, kind: str) -> None:
        for key in self.values:
            if kind not in _ONLY_FOR.get(key, KINDS):
                takers = " and ".join(_ONLY_FOR[key])
                raise self._error(f"{key!r} has no effect on kind = {kind!r}", f"leave it out: it is for {takers}")
            if kind in _NOT_FOR.get(key, ()):
                raise self._error(f"{key!r} has no effect on kind = {kind!r}", "leave it out: it holds for whole steps")

    def _one_of(self, key: str, known: Sequence[str]) -> str:
        value = self._given(key)
        if value not in known:
            raise self._error(f"{key} = {value!r} is unknown", _known("words", known), str(value), known)
        return str(value)

    def _whole(self, key: str, least: int, default: int | None = None) -> int:
        if default is not None and key not in self.values:
            return default
        value = self._given(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._error(f"{key} = {value!r} is not a whole number from {least} on", f"write {key} = {least}")
        return value

    def _number(self, key: str, above: float) -> float:
        value = self._given(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value <= above:
            raise self._error(f"{key} = {value!r} is not a number above {above:g}", f"write {key} = {above + 2:g}")
        return float(value)

    def _given(self, key: str) -> Any:
        if key not in self.values:
            raise self._error(f"{key!r} is missing", f"a fault looks like this:\n{_EXAMPLE}")
        return self.values[key]

    def _error(self, what: str, do: str, word: str = "", known: Sequence[str] = ()) -> BadFaultPlan:
        hint = suggest(word, known)
        return BadFaultPlan(f"{self.source}: fault {self.number}: {what}" + (f"; {hint}" if hint else ""), do=do)


def _known(what: str, words: Sequence[str]) -> str:
    return f"known {what}: {', '.join(words)}"


def random_plan(seed: int, workers: int, steps: int, count: int, kinds: Sequence[str] = KINDS) -> FaultPlan:
    """`count` faults in different steps, for soak tests; the same arguments always give the same plan.

    A worker that a fault ends is taken to be replaced by one with the next free number. The newest replacement is
    spared while others can be chosen, because it may still be on its way.
    """
    rng = random.Random(seed)
    present, next_free = list(range(workers)), workers
    faults = []
    for step in sorted(rng.sample(range(1, steps + 1), count)):
        settled = [worker for worker in present if worker < max(workers, next_free - 1)]
        kind, worker = rng.choice(list(kinds)), rng.choice(settled or present)
        if kind == "slow":
            factor, lasting = round(rng.uniform(1.5, 4.0), 1), rng.randint(1, max(1, steps // 10))
            faults.append(Fault(kind, worker, step, factor=factor, until=step + lasting))
        else:
            faults.append(Fault(kind, worker, step, at=rng.choice(WITHIN_A_STEP)))
        if kind not in _HARMLESS:
            present.remove(worker)
            present.append(next_free)
            next_free += 1
    return FaultPlan(tuple(faults))
