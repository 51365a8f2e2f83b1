# SPDX-License-Identifier: Apache-2.0
"""Draw docs/run.svg: what a terminal really shows of ``make demo``, recorded through a pseudo-terminal.

python docs/picture.py
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 128
ERASE = re.compile(r"\x1b\[(2K|\d*A|\?25[lh])|\r")
BAR, STRIP = "━", "█"


def record(command: list[str]) -> str:
    """Everything the command writes to a terminal of COLUMNS columns."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": str(COLUMNS), "LINES": "40", "TERM": "xterm-256color"}
    process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    chunks = []
    while True:
        try:
            chunk = os.read(ours, 1 << 16)
        except OSError:
            break
        if not chunk:
            break
        chunks.append(chunk)
    if process.wait():
        raise SystemExit(f"{command} failed")
    return b"".join(chunks).decode(errors="replace")


def frame(recording: str) -> list[str]:
    """The lines that stay, and of the live panel, which is redrawn all the time, one state from half way through."""
    lines: list[str] = []
    panel: list[list[str]] = []  # its states: a bar with the numbers, and a strip with the shares of time
    for line in ERASE.sub("\n", recording).split("\n"):
        plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
        if BAR in plain:
            panel.append([line])
        elif STRIP in plain and panel:
            panel[-1].append(line)
        elif plain.startswith("done") and panel:
            lines += [*panel[len(panel) // 2], line]
            panel = []
        elif plain.strip() and "waiting for the first step" not in plain and STRIP not in plain:
            lines.append(line)
    return lines


def main() -> None:
    shown = frame(record([sys.executable, "examples/demo.py"]))
    stop = next((i for i, line in enumerate(shown) if "What to try next" in line), len(shown))
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in shown[:stop]:
        console.print(Text.from_ansi(line), no_wrap=True, overflow="crop")
    (ROOT / "docs" / "run.svg").write_text(console.export_svg(title="make demo"))


if __name__ == "__main__":
    main()
