# SPDX-License-Identifier: Apache-2.0
"""What ``unisono ps`` prints: one line a run, those that run now first. Reads `control.glance`; decides nothing."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

from unisono.control.glance import Glance, find_runs, glance, is_running, read_start
from unisono.core.progress import duration
from unisono.core.run_dir import DEFAULT_PARENT, RunDir

_HEADINGS = ("run", "state", "workers", "step", "samples/s", "age", "note")
_TO_THE_RIGHT = ("workers", "step", "samples/s", "age")
_ALIVE = ("running", "unknown")


def show_runs(all_runs: bool) -> None:
    """Those under ``runs/`` and, where UNISONO_RUN_DIR is set, beside that directory."""
    asked = os.environ.get("UNISONO_RUN_DIR")
    parents = [Path(DEFAULT_PARENT), *([Path(asked).parent] if asked else [])]
    found, now_s = find_runs(parents), time.time()
    seen = [glance(run_dir, now_s) for run_dir in found if all_runs or _may_be_running(run_dir)]
    shown = [run for run in seen if run is not None and (all_runs or run.state in _ALIVE)]
    if not shown:
        places = " or ".join(f"{parent}/" for parent in parents)
        ended = f"; unisono ps -a lists what has ended ({len(found)})" if found else ""
        print(f"there is no run under {places}" if all_runs else f"no run is running under {places}{ended}")
        return
    shown.sort(key=lambda run: (run.state not in _ALIVE, -run.started_s))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join(format_table(shown, now_s, width)))


def _may_be_running(run_dir: RunDir) -> bool:
    """One line is read of a run that is over, so that a thousand of them cost little."""
    started = read_start(run_dir)
    return started is not None and is_running(run_dir, started) is not False


def format_table(runs: list[Glance], now_s: float, width: int | None) -> list[str]:
    """Rows of equal columns; the note is cut where the terminal ends."""
    rows = [_HEADINGS, *(_cells(run, now_s) for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(room) if heading in _TO_THE_RIGHT else cell.ljust(room)
            for cell, room, heading in zip(row, widths, _HEADINGS, strict=True)
        ]
        line = "  ".join(cells).rstrip()
        lines.append(line if width is None or len(line) <= width else line[: width - 1] + "…")
    return lines


def _cells(run: Glance, now_s: float) -> tuple[str, ...]:
    of = f"/{run.steps_total:,}" if run.steps_total else ""
    rate = "" if run.samples_per_s is None else f"{run.samples_per_s:,.0f}"
    note = " ".join(run.note.split())
    age = duration(max(0.0, now_s - run.started_s))
    return run.name, run.state, str(run.workers), f"{run.step:,}{of}", rate, age, note
