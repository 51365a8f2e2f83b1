# SPDX-License-Identifier: Apache-2.0
"""``unisono checkpoint list | verify | export | diff | prune | reseal``: find the store, call `checkpoint`, print.

A checkpoint is named ``PLACE`` or ``PLACE@STEP``: a run, its name under runs/, a directory of checkpoints or a URL;
without a step the newest good one.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from unisono.checkpoint.difference import Side
    from unisono.checkpoint.listing import Summary
    from unisono.checkpoint.manifest import Manifest
    from unisono.checkpoint.seal import Seal
    from unisono.checkpoint.store import Store

app = typer.Typer(
    name="checkpoint",
    help="List, check, export, compare and remove checkpoints.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
FOLDER = "checkpoints"  # of a run's directory
_WITH_STEP = re.compile(r"(.+)@(\d{1,12})")
_MOST_LINES = 10

Place = Annotated[str, typer.Argument(help="A run, a directory of checkpoints, or a URL.")]
Checkpoint = Annotated[str, typer.Argument(help="The same, with @STEP for another one than the newest.")]
KeyFile = Annotated[
    Path | None, typer.Option("--key-file", help="Keys of encrypted checkpoints (default: UNISONO_CHECKPOINT_KEY).")
]


@app.command(name="list")
def list_(place: Place) -> None:
    """List the checkpoints of a run. Exit code 1 when one is damaged."""
    from unisono.checkpoint.listing import list_checkpoints

    store, _ = _find(place)
    found = list_checkpoints(store)
    if not found:
        print(f"there are no checkpoints in {store.url}")
    for row in found:
        print(_line(row))
    raise SystemExit(1 if any(row.problem for row in found) else 0)


@app.command()
def verify(
    checkpoint: Checkpoint,
    every: Annotated[bool, typer.Option("--all", help="Every checkpoint that is there.")] = False,
    key_file: KeyFile = None,
) -> None:
    """Read a checkpoint and compare every hash. Exit code 1 when something is damaged."""
    from unisono.checkpoint.listing import list_steps, read_manifest
    from unisono.checkpoint.reading import verify as check
    from unisono.checkpoint.seal import find_seal
    from unisono.core.errors import CheckpointDamaged, UsageError

    (store, step), seal = _find(checkpoint), find_seal(key_file)
    steps = list_steps(store)
    chosen = steps if every else [step] if step is not None else steps[-1:]
    if not chosen:
        raise UsageError(f"there are no checkpoints in {store.url}")
    damaged = False
    for number in chosen:
        try:
            manifest = read_manifest(store, number, seal)
            problems = check(store, manifest, seal, _progress("verified"))
        except CheckpointDamaged as error:
            problems = [error]
        if problems:
            damaged = True
            print(f"step {number}: damaged")
            _print_some([error.what for error in problems], "more are damaged")
        else:
            print(f"step {number}: good, {_size(manifest.bytes)} in {len(manifest.chunks)} chunks, {manifest.hash}")
    raise SystemExit(1 if damaged else 0)


@app.command()
def export(
    checkpoint: Checkpoint,
    file: Annotated[Path, typer.Argument(help="Where to: .safetensors, or .pt for a torch.save state dict.")],
    everything: Annotated[
        bool, typer.Option("--all", help="All tensors under their full names, not only the model's weights.")
    ] = False,
    key_file: KeyFile = None,
) -> None:
    """Write a checkpoint as one file that needs no Unisono."""
    from unisono.checkpoint.export import WEIGHTS
    from unisono.checkpoint.export import export as write
    from unisono.checkpoint.seal import find_seal

    seal = find_seal(key_file)
    store, manifest = _choose(checkpoint, seal)
    prefix = "" if everything else WEIGHTS
    count = write(store, manifest, file, prefix, seal=seal, on_progress=_progress("exported"))
    print(f"{count} tensors of step {manifest.step} are in {file} ({_size(file.stat().st_size)})")


@app.command()
def diff(
    one: Checkpoint,
    other: Checkpoint,
    key_file: KeyFile = None,
) -> None:
    """Say where two checkpoints differ; of two runs without a step, also from which step on. Exit code 1 if they do."""
    from unisono.checkpoint.difference import diff as compare
    from unisono.checkpoint.seal import find_seal

    sides = _sides(one, other, find_seal(key_file))
    found = compare(*sides, on_progress=_progress("compared"))
    print(f"{sides[0].store.url} step {found.steps[0]} and {sides[1].store.url} step {found.steps[1]}")
    if found.is_empty:
        print(f"the same, bit for bit: {found.same} tensors")
        raise SystemExit(0)
    print(f"tensors   {len(found.tensors)} differ, {found.same} are the same")
    _print_some([*map(str, found.tensors), *found.specs], "more tensors differ")
    if found.facts:
        print(f"facts     {len(found.facts)} differ")
        _print_some(found.facts, "more facts differ")
    raise SystemExit(1)


@app.command()
def prune(
    place: Place,
    keep_last: Annotated[int | None, typer.Option(help="Keep the newest N (at least 1).", metavar="N")] = None,
    keep_every: Annotated[int | None, typer.Option(help="Keep those whose step divides by K.", metavar="K")] = None,
    best: Annotated[
        str | None, typer.Option(help="Keep the best by a metric: loss:min or accuracy:max:3.", metavar="METRIC:ORDER")
    ] = None,
    damaged: Annotated[bool, typer.Option("--damaged", help="Remove the damaged ones too.")] = False,
    orphans: Annotated[
        bool, typer.Option("--orphans", help="Also what killed saves left; only while no run writes there.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
) -> None:
    """Remove checkpoints that no rule keeps, and the chunks that nobody needs any more."""
    from unisono.checkpoint.listing import list_checkpoints
    from unisono.checkpoint.retention import Best, retain
    from unisono.checkpoint.retention import prune as remove
    from unisono.core.errors import UsageError

    store, _ = _find(place)
    found = list_checkpoints(store)
    doomed: set[int] = set()
    if keep_last is not None or keep_every is not None or best:
        keep_last = 1 if keep_last is None else keep_last
        doomed = retain(found, keep_last, keep_every, Best.parse(best) if best else None)
    elif not (damaged or orphans):
        raise UsageError("nothing says which checkpoints to keep", do="give --keep-last, --keep-every or --best")
    doomed |= {row.step for row in found if row.problem and damaged}
    shown = ", ".join(map(str, sorted(doomed))) or "none"
    if dry_run:
        print(f"would remove {len(doomed)} of {len(found)} checkpoints: {shown}")
        return
    gone = remove(store, doomed, orphans)
    print(f"removed {len(gone.steps)} of {len(found)} checkpoints: {shown}; {gone.chunks} chunks, {_size(gone.bytes)}")


@app.command()
def reseal(checkpoint: Checkpoint, key_file: KeyFile = None) -> None:
    """Encrypt a checkpoint again with the first of the keys, so that older keys can be thrown away."""
    from unisono.checkpoint.resealing import reseal as write_again
    from unisono.checkpoint.seal import find_seal, no_key

    seal = find_seal(key_file)
    if seal is None:
        raise no_key("a checkpoint that is to be encrypted again")
    store, manifest = _choose(checkpoint, seal)
    _, count = write_again(store, manifest, seal)
    print(f"step {manifest.step} is sealed with key {seal.key_id}; {count} chunks were written")


def _find(where: str) -> tuple[Store, int | None]:
    """The store that a user means, and the step if one was given."""
    from unisono.checkpoint.store import open_store
    from unisono.core.errors import UsageError
    from unisono.core.run_dir import DEFAULT_PARENT

    named = _WITH_STEP.fullmatch(where)
    place, step = (named[1], int(named[2])) if named else (where, None)
    if "://" in place or "::" in place:
        return open_store(place), step
    parents = [Path(place), Path(DEFAULT_PARENT) / place]
    for elsewhere in map(_kept_elsewhere, parents):
        if elsewhere:
            return open_store(elsewhere), step
    for path in [*(parent / FOLDER for parent in parents), *parents]:
        if (path / "steps").is_dir():
            return open_store(str(path)), step
    if parents[0].is_dir() or parents[1].is_dir():
        raise UsageError(f"there are no checkpoints in {place}", do="give a run that has saved one (unisono ps -a)")
    raise UsageError(f"there is no run and no directory {place}", do="give a run, a directory of checkpoints or a URL")


def _kept_elsewhere(run: Path) -> str:
    """Where a run keeps its checkpoints, if it was told to (--checkpoint-to)."""
    try:
        return str(json.loads((run / "spec.json").read_text())["run"].get("checkpoint_to") or "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no run, or none that was told
        return ""


def _choose(where: str, seal: Seal | None) -> tuple[Store, Manifest]:
    """The checkpoint that a user means; damaged ones that are newer are mentioned."""
    from unisono.checkpoint.listing import newest_good, read_manifest
    from unisono.core.errors import UsageError

    store, step = _find(where)
    if step is not None:
        return store, read_manifest(store, step, seal)
    manifest = newest_good(store, lambda step, error: print(f"passed over step {step}: {error.what}"), seal)
    if manifest is None:
        raise UsageError(f"there are no checkpoints in {store.url}")
    return store, manifest


def _sides(one: str, other: str, seal: Seal | None) -> tuple[Side, Side]:
    """Of two runs, the first step at which they differ, or the last that both have."""
    from unisono.checkpoint.difference import Side, first_differing_step
    from unisono.checkpoint.listing import read_manifest

    (first, first_step), (second, second_step) = _find(one), _find(other)
    if first_step is None and second_step is None:
        step, shared = first_differing_step(first, second, seal)
        if shared:
            steps = f"{len(shared)} steps that both have a checkpoint of"
            print(
                f"of {steps}, step {step} is the first that differs"
                if step is not None
                else f"of {steps}, none differs"
            )
            first_step = second_step = shared[-1] if step is None else step
    stores = (first, second)
    chosen = [
        _choose(where, seal)[1] if step is None else read_manifest(store, step, seal)
        for where, step, store in zip((one, other), (first_step, second_step), stores, strict=True)
    ]
    return Side(first, chosen[0], seal), Side(second, chosen[1], seal)


def _line(row: Summary) -> str:
    if row.problem:
        return f"step {row.step:>9}  damaged: {row.problem}"
    from unisono.core.progress import format_metrics

    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.created_s))
    sealed = "  encrypted" if row.sealed else ""
    cells = f"step {row.step:>9}  {when}  {_size(row.bytes):>9}  {row.hash[:12]}{sealed}"
    return f"{cells}  {format_metrics(row.metrics)}".rstrip()


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _print_some(lines: list[str], more: str) -> None:
    for line in lines[:_MOST_LINES]:
        print(f"  {line}")
    if len(lines) > _MOST_LINES:
        print(f"  {len(lines) - _MOST_LINES} {more}")


def _progress(verb: str) -> Callable[[int, int], None] | None:
    """A line that is written over, on a terminal only."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        end = "\r\033[K" if done >= total else "\r"
        print(f"{verb} {100 * done // max(1, total)} %", end=end, file=sys.stderr, flush=True)

    return show
