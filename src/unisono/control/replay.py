# SPDX-License-Identifier: Apache-2.0
"""Run again what a receipt says was run, on any number of workers, and compare: code, data, losses, final weights.

`prepare` decides what will run and says what is not as it was; `Plan.run` runs it, watching its events, and comes to a
verdict. What a stranger's receipt asks for is not run: it names a script and its arguments.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.control.launch import launch
from unisono.control.receipts import is_own, open_receipt
from unisono.core import events
from unisono.core.errors import ScriptMissing, UsageError
from unisono.core.progress import Progress
from unisono.core.receipt import Receipt
from unisono.core.receipt_gathering import data_seen, versions
from unisono.core.run_dir import DEFAULT_PARENT, RunDir
from unisono.core.script_files import digests
from unisono.core.signing import key_id
from unisono.core.spec import parse_workers, why_not_exact

SAME, DIFFERENT = 0, 1
_ASKED_AGAIN = ("args", "threads", "seed", "hang_after", "rejoin_within", "max_restarts", "verify_every", "balance")
_ENVIRONMENT = ("UNISONO_SEED", "UNISONO_MICROBATCHES", "UNISONO_THREADS", "UNISONO_RUN_DIR")
_SHOWN = 12  # digits of a hash
_MOST_LINES = 10


@dataclass(frozen=True)
class Verdict:
    exit_code: int
    lines: list[str]


@dataclass
class Comparison:
    """Takes the events of the run as they come; says, once each, what is not as in the receipt."""

    receipt: Receipt
    result: dict[str, Any] | None = None
    same_up_to: int = 0  # the last step whose loss was compared and found the same
    compared: int = 0
    first_other: tuple[int, float | None, float] | None = None  # step, loss here, loss there

    def __post_init__(self) -> None:
        self._losses = dict(self.receipt.losses.rows)

    def take(self, event: events.Event) -> list[str]:
        if isinstance(event, events.Configured):
            return self._on_configured(event)
        if isinstance(event, events.StepFinished):
            return self._on_step(event)
        if isinstance(event, events.RunFinished):
            self.result = event.result
        return []

    def _on_configured(self, event: events.Configured) -> list[str]:
        here, there = data_seen(event), self.receipt.data
        lines = []
        if there.by == "nothing" or here.by == "nothing":
            lines.append("the data is a stream, of which the receipt holds nothing to compare")
        elif (here.by, here.digest, here.samples) != (there.by, there.digest, there.samples):
            lines.append(f"the data is not that of the receipt: {_data(here)} here, {_data(there)} there")
        jobs = _differences(self.receipt.job, event.job, but=())
        lines += [f"the training is set up differently: {', '.join(jobs)}"] if jobs else []
        prints = _differences(self.receipt.fingerprint, event.fingerprint, but=("data",))
        lines += [f"another numerics fingerprint, so the bits may differ: {', '.join(prints)}"] if prints else []
        return lines

    def _on_step(self, event: events.StepFinished) -> list[str]:
        there = self._losses.get(event.step)
        if there is None or self.first_other is not None:
            return []
        self.compared += 1
        # What is not finite has become None on its way, and one NaN is as good as another.
        here = math.nan if event.loss is None else event.loss
        if here.hex() == there:
            self.same_up_to = event.step
            return []
        self.first_other = (event.step, event.loss, float.fromhex(there))
        return [f"the loss of step {event.step} is {here:.9g} here, {float.fromhex(there):.9g} in the receipt"]

    def verdict(self, exit_code: int) -> Verdict:
        there = self.receipt.result
        if self.result is None:
            return Verdict(exit_code or DIFFERENT, ["the replay came to no result, so there is nothing to compare"])
        here = str(self.result.get("weights_sha256"))
        steps = int(self.result.get("steps", 0))
        if here == there.weights_sha256:
            workers = f"workers: {self.result.get('workers')} here, {there.workers} in the receipt"
            return Verdict(SAME, [f"the same weights, bit for bit: sha256 {here}", f"  {steps:,} steps; {workers}"])
        lines = [f"different weights: sha256 {here} here, {there.weights_sha256} in the receipt", *self._where()]
        if steps != there.steps:
            early = f" (stopped early: {self.result['stopped_early']})" if self.result.get("stopped_early") else ""
            lines.append(f"  {steps:,} steps here{early}, {there.steps:,} in the receipt")
        if reason := why_not_exact(self.receipt.job):
            lines.append(f"  the run was not exact: its {reason}")
        for resume in self.receipt.resumes:
            if resume.differs:
                lines.append(f"  the run went on from step {resume.step:,} not as before: {', '.join(resume.differs)}")
        return Verdict(exit_code or DIFFERENT, lines)

    def _where(self) -> list[str]:
        """The first step that differs, as closely as the receipt can tell."""
        if self.first_other is None:
            return [f"  all {self.compared:,} losses that were compared are the same, up to step {self.same_up_to:,}"]
        step, here, there = self.first_other
        shown = "not finite" if here is None else f"{here:.9g}"
        if step - self.same_up_to <= 1:
            return [f"  the first loss that differs is that of step {step:,}: {shown} here, {there:.9g} in the receipt"]
        return [
            f"  the losses are the same up to step {self.same_up_to:,} and differ at step {step:,} "
            f"({shown} here, {there:.9g} there); the receipt holds every {self.receipt.losses.every:,}th"
        ]


class _Watching(Progress):
    """The usual display, which also says what is not as in the receipt."""

    def __init__(self, run_dir: RunDir, comparison: Comparison) -> None:
        super().__init__(run_dir)
        self.comparison = comparison

    def handle(self, event: events.Event) -> None:
        super().handle(event)
        for line in self.comparison.take(event):
            super().handle(events.Notice(code="replay", text=line))


@dataclass
class Plan:
    """What will run, and what is known beforehand not to be as it was."""

    receipt: Receipt
    values: dict[str, Any]
    lines: list[str] = field(default_factory=list)

    def run(self) -> Verdict:
        for name in _ENVIRONMENT:  # what counts is what the receipt says
            os.environ.pop(name, None)
        comparison = Comparison(self.receipt)
        code = launch(self.values, "the receipt", lambda run_dir: _Watching(run_dir, comparison))
        return comparison.verdict(code)


def prepare(
    name: str,
    workers: str | None = None,
    run_dir: str | None = None,
    script: str | None = None,
    signer: bytes | None = None,
    trusted: bool = False,
) -> Plan:
    """Raises ReceiptDamaged, or UsageError for what cannot be run again. `signer`: whom the user trusts."""
    path, opened = open_receipt(name)
    receipt = opened.receipt
    if not trusted:
        _require_trust(path, opened.signer, signer, receipt)
    place = script or str(receipt.run.get("script", ""))
    if not place:
        raise UsageError(
            f"the run of {path} had no script that could be run again",
            cause="it was typed into an interpreter or a notebook",
            do="give the file that holds it now: --script FILE",
        )
    if not Path(place).is_file():
        raise ScriptMissing(
            f"the script {place} of {path} is not here",
            do="go to the folder in which the run was started, or say where it is: --script FILE",
        )
    values = {key: receipt.run[key] for key in _ASKED_AGAIN if key in receipt.run}
    values |= {
        "script": place,
        "workers": _workers(receipt, workers),
        "microbatches": receipt.job.get("microbatches"),
        "device": _device(receipt),
        "name": "" if run_dir else _free_name(receipt.name),
        "run_dir": run_dir or "",
        "resume": "never",
        "checkpoint_every": "never",
        "stop_after": receipt.result.steps if receipt.result.stopped_early else None,
    }
    return Plan(receipt, values, [*_code_differences(receipt, place), *_version_differences(receipt)])


def _require_trust(path: Path, signer: bytes | None, named: bytes | None, receipt: Receipt) -> None:
    """A receipt says which file to run and with which arguments: as much as a script does."""
    if signer is not None and (signer == named if named is not None else is_own(signer)):
        return
    who = f"is signed by key {key_id(signer)}" if signer else "is not signed"
    asked = " ".join([str(receipt.run.get("script", "")), *map(str, receipt.run.get("args", ()))])
    raise UsageError(
        f"{path} {who}, and not by {'the key you named' if named is not None else 'you'}: it is not run unseen",
        where=f"it asks for: {asked[:300]}",
        do="name its signer if you trust them: --key PUBLIC; or look at that line and say --trust",
    )


def _workers(receipt: Receipt, asked: str | None) -> str:
    """As asked; else as many as there were, if this machine has as many processors."""
    microbatches = int(receipt.job.get("microbatches", 1))
    if asked is not None:
        if parse_workers(asked).max > microbatches:
            raise UsageError(
                f"--workers {asked} is more than the run can occupy: its steps have {microbatches} microbatches",
                do=f"use --workers {microbatches} or fewer; another number of microbatches is another training",
            )
        return asked
    before = parse_workers(str(receipt.run.get("workers", 1)))
    if why_not_exact(receipt.job) or _device(receipt) != "cpu":
        return str(before.max)
    return str(min(before.max, os.cpu_count() or 1))


def _device(receipt: Receipt) -> str:
    """What ``auto`` came to, not what it would come to here."""
    return str(receipt.fingerprint.get("device", "auto"))


def _free_name(name: str) -> str:
    stem = (re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-")[:50] or "run") + "-replay"
    numbers = range(2, 10_000)
    candidates = (stem, *(f"{stem}-{number}" for number in numbers))
    return next(candidate for candidate in candidates if not (Path(DEFAULT_PARENT) / candidate).exists())


def _code_differences(receipt: Receipt, script: str) -> list[str]:
    there, here = receipt.code.files, digests(script)
    if not there:
        return ["the receipt does not say what the script was"]
    main_there, main_here = str(next(iter(there), "")), str(next(iter(here), ""))
    if main_there in there and main_there != main_here:  # the same script under another name
        there = {main_here if name == main_there else name: digest for name, digest in there.items()}
    lines = []
    for name in sorted(there.keys() | here.keys(), key=lambda name: (name != main_here, name)):
        old, new = there.get(name), here.get(name)
        if old == new:
            continue
        if old and new:
            lines.append(f"{name} is not that of the receipt: sha256 {new[:_SHOWN]}… here, {old[:_SHOWN]}… there")
        else:
            lines.append(f"{name} is {'imported here, and was not then' if new else 'not here, and was imported then'}")
    changed = [f"{name} was changed while the run of the receipt was going on" for name in receipt.code.changed]
    more = len(lines) + len(changed) - _MOST_LINES
    return [*lines, *changed][:_MOST_LINES] + ([f"and {more} more files differ"] if more > 0 else [])


def _version_differences(receipt: Receipt) -> list[str]:
    here = versions()
    pairs = [(name, receipt.versions.get(name), here[name]) for name in here]
    return [f"{name} is {new} here, {old} in the receipt" for name, old, new in pairs if old and old != new]


def _differences(there: dict[str, Any], here: dict[str, Any], but: tuple[str, ...]) -> list[str]:
    keys = [key for key in there if key not in but and key in here and there[key] != here[key]]
    return [f"{key} {there[key]} -> {here[key]}" for key in keys]


def _data(seen: Any) -> str:
    kind = "hash" if seen.by == "hash" else "digest"
    return f"{seen.samples:,} samples, {kind} {seen.digest[:60]}"
