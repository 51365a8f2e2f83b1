# SPDX-License-Identifier: Apache-2.0
"""What ``unisono doctor`` prints: one line a check, and below the bad ones their cause and what to do.

The network first, when an address is given, then the machine, then torch, whose child process was started before all
of it. The checks themselves are in `control.preflight`, `control.machine` and `control.torch_probe`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import typer

from unisono.control import machine, preflight, torch_probe
from unisono.control.preflight import Finding
from unisono.core.run_dir import DEFAULT_PARENT

Handshake = Callable[[str], list[Finding]]
_COLOURS = {"ok": "green", "warn": "yellow", "bad": "red"}


def doctor(
    address: str | None, handshake: Handshake | None = None, workers: int | None = None, threads: int = 1
) -> int:
    """Exit code 0, or 1 when something is bad. `handshake` asks the run at the address what a joining host would ask.

    `workers` and `threads`: how many the user means to start on this machine.
    """
    counts: Counter[str] = Counter()
    if address is not None:
        preflight.parse(address)  # a spelling mistake should not cost the rest
    child = torch_probe.start()
    try:
        if address is not None:
            _print(_network(address, handshake), counts)
        runs = Path(os.environ.get("UNISONO_RUN_DIR") or DEFAULT_PARENT)
        _print(machine.check(runs, workers, threads), counts)
        _print(machine.check_torch(torch_probe.finish(child)), counts)
    finally:
        if child.poll() is None:
            child.kill()
            child.communicate()
    bad, warnings = counts["bad"], counts["warn"]
    print(f"{bad} bad, {warnings} to look at, {counts['ok']} ok" if bad or warnings else "all is well")
    return 1 if bad else 0


def _network(address: str, handshake: Handshake | None) -> Iterable[Finding]:
    """Nothing more is asked of a host that cannot be reached."""
    for finding in preflight.examine(address):
        yield finding
        if not finding.ok:
            return
    if handshake is not None:
        yield from handshake(address)


def _print(findings: Iterable[Finding], counts: Counter[str]) -> None:
    for finding in findings:
        counts[finding.level] += 1
        first, *rest = finding.lines()
        level = typer.style(finding.level, fg=_COLOURS[finding.level])
        typer.echo("\n".join([level + first[len(finding.level) :], *rest]))
