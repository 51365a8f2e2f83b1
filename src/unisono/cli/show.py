# SPDX-License-Identifier: Apache-2.0
"""What ``unisono show`` and ``unisono hash`` print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from unisono.checkpoint.weights import hash_file
from unisono.control.summary import summarise
from unisono.core.errors import UsageError
from unisono.core.fingerprint import Fingerprint, explain
from unisono.core.progress import PARTS, duration, format_metrics
from unisono.core.run_dir import RunDir, find, read_result


def weights_hash(path: Path) -> str:
    """A run's recorded hash, or the hash of a file."""
    if path.is_file():
        return hash_file(path)
    run_dir = find(str(path))
    if run_dir.weights.exists():
        return hash_file(run_dir.weights)
    result = read_result(run_dir)
    if result and "weights_sha256" in result:
        return str(result["weights_sha256"])
    raise UsageError(f"the run {path} has no weights yet", do="wait until it has finished (unisono show says)")


def compare(paths: Sequence[Path]) -> tuple[str, bool]:
    """The hashes side by side, whether they are one, and for runs what differs besides."""
    hashes = [weights_hash(path) for path in paths]
    rows = [f"{digest}  {path}" for digest, path in zip(hashes, paths, strict=True)]
    same = len(set(hashes)) == 1
    rows.append("the same weights, bit for bit" if same else "different weights")
    if not same:
        odd = next(i for i, digest in enumerate(hashes) if digest != hashes[0])
        rows += [f"  {line}" for line in _differences(paths[0], paths[odd])]
    return "\n".join(rows), same


def _differences(first: Path, other: Path) -> list[str]:
    """What two runs were told or found that decides bits, where it differs. Empty for files."""
    if first.is_file() or other.is_file():
        return []
    specs, prints = [], []
    try:
        for run_dir in (find(str(first)), find(str(other))):
            specs.append(json.loads(run_dir.spec.read_text())["job"] or {})
            prints.append(Fingerprint(**json.loads(run_dir.result.read_text())["fingerprint"]))
    except (OSError, ValueError, KeyError, TypeError):  # one of them has not finished, or is of another version
        return []
    changed = [
        f"{key} {specs[0][key]} -> {specs[1].get(key)}" for key in specs[0] if specs[0][key] != specs[1].get(key)
    ]
    reasons = [f"spec: {', '.join(changed)}"] if changed else []
    moved = explain(*prints)
    return reasons + ([f"fingerprint: {moved}"] if moved else [])


def show_run(name: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    run_dir: RunDir = find(name)
    summary = summarise(run_dir)
    console = Console(soft_wrap=True)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    for label, text in summary.rows():
        table.add_row(label, Text(text))  # as it is: brackets of the user's are no markup
    console.print(table)
    if summary.timings:
        console.print()
        workers = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
        for heading in ("worker", "microbatches", *PARTS):
            workers.add_column(heading, justify="right")
        for worker, row in sorted(summary.timings.items(), key=lambda item: int(item[0])):
            whole = sum(row.values()) or 1.0
            cells = [f"{duration(row[part])} ({row[part] / whole:.0%})" for part in PARTS]
            workers.add_row(worker, summary.ranges.get(worker, ""), *cells)
        console.print(workers)
    for entry in summary.evaluations[-5:]:
        console.print(
            f"epoch {entry.epoch}  step {entry.step}  {format_metrics(entry.metrics)}", highlight=False, markup=False
        )
