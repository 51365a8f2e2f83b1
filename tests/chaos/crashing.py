# SPDX-License-Identifier: Apache-2.0
"""A process that saves checkpoints without end dies, or its disk fails, at a moment that nobody chose; what is left?

    python tests/chaos/crashing.py FOLDER --moments 40 --seed 1 --styles synchronous --ends kill

prints one line of JSON for each moment. All of them happen to one directory, as to a run that is started again and
again. The program has torch loaded and forks: a saver, which it kills, then a verifier, which must find a complete
checkpoint that is no older than the last one that the saver had committed, and must be able to save at once. The state
is a pure function of the step, so that every bit can be compared. Used by test_crash_safety and bench/crashes.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

if __name__ == "__main__":  # a script has only its own folder on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from chaos.failing_calls import fail_from_now_on
from chaos.forking import LIMIT_S, Child, Tell
from unisono.checkpoint import chunks
from unisono.checkpoint.listing import good_checkpoints, list_steps, newest_good, read_manifest
from unisono.checkpoint.local_store import LocalStore
from unisono.checkpoint.manifest import CHUNKS, PARTS, Manifest
from unisono.checkpoint.reading import read_tensors
from unisono.core.errors import CheckpointDamaged, UnisonoError
from unisono.train.saving import Copies, Keeping, Save
from unisono.train.saving import Outcome as Committed

STYLES = ("synchronous", "asynchronous")
KILL, FULL = "kill", "full"
FAILING = ("create", "write", "fsync", "rename", "list", "delete")  # calls of `failing_calls`
HARMLESS = ("delete",)  # what cannot be removed is in nobody's way
ENDS = (KILL, FULL, *FAILING)
WRITERS = (0, 1)
KEEPING = Keeping(last=2)
_SAVES_AHEAD = 2.5  # a moment lies within so many saves from the start
_MORE_SAVES = 3  # that a saver tries after its disk has failed
_STEP_S = 0.001  # of the training beside which an asynchronous save runs
_SMALL_DISK_MB = 8
_ENDLESS = 1_000_000
_LARGE = 40_000  # elements: a chunk of its own, in `strikes`
_SCRATCH = ".unisono-*.scratch"

State = dict[str, Tensor]


@dataclass(frozen=True)
class Moment:
    """How the saver saves, how it ends, and when: a share of the time in which moments lie."""

    number: int
    style: str
    end: str
    share: float
    stride: int  # steps between two saves: a save that was killed is not repeated at the same step

    def __str__(self) -> str:
        return f"{self.number}: {self.style}, {self.end} at {self.share:.3f}"


@dataclass
class Outcome:
    after_s: float = 0.0
    committed: int = 0  # the last step whose commit had returned
    found: int = 0
    interrupted: str = ""  # in which phase of a save, by what lay there
    failures: list[str] = field(default_factory=list)  # of saves, in words
    again_s: float = 0.0  # that the verifier's own save took
    unnamed_bytes: int = 0  # in files that no checkpoint needs, after that save
    checkpoint_bytes: int = 0
    wrong: list[str] = field(default_factory=list)


def draw(number: int, seed: int, styles: Sequence[str], ends: Sequence[str]) -> Moment:
    """The same moment for the same arguments."""
    dice = random.Random(f"{seed} {number}")
    style, end = styles[number % len(styles)], ends[number // len(styles) % len(ends)]
    return Moment(number, style, end, dice.random(), dice.randint(1, 3))


# --- the state


def state_at(step: int) -> State:
    large = torch.arange(_LARGE, dtype=torch.float32)
    state = {f"model.large.{i}": large * (i + 1) + step for i in range(2)}
    state["optimizer.large.exp_avg"] = large - step
    state["model.frozen"] = large.clone()
    state |= {f"model.small.{i}": torch.full((50, i + 1), step, dtype=torch.int64) for i in range(20)}
    return state | {"optimizer.step": torch.tensor(step), "optimizer.mask": torch.arange(99) % (step + 2) == 0}


def advance(state: State, step: int) -> None:
    """In place, as an optimizer does."""
    for name, value in state_at(step).items():
        state[name].copy_(value)


def check_state(found: State, step: int) -> None:
    expected = state_at(step)
    wrong = [name for name in expected if name not in found or not found[name].equal(expected[name])]
    if wrong or found.keys() != expected.keys():
        raise AssertionError(f"the checkpoint of step {step} does not hold the state of step {step}: {wrong[:3]}")


# --- the saver


class Saver:
    """Goes on from the newest checkpoint and saves, through the same door as a training."""

    def __init__(self, root: Path, keeping: Keeping = KEEPING) -> None:
        self.store, self.keeping = LocalStore(root), keeping
        self.trusted = _newest_that_can_be_read(self.store)
        self.step = self.trusted or 0
        self.state = state_at(self.step)
        self.rooms = [Copies() for _ in WRITERS]
        self.life = time.monotonic_ns()  # as a run that is started again is another one

    def save_and_wait(self, tell: Tell) -> Manifest:
        saves = self._begin((), tell)
        while _under_way(saves):
            time.sleep(_STEP_S)
        return self._end(saves)

    def save_beside(self, tell: Tell) -> Manifest:
        """The state goes on changing meanwhile."""
        saves = self._begin(tuple(self.state), tell)
        while _under_way(saves):
            for save in saves:
                save.await_copy()
            self.step += 1
            advance(self.state, self.step)
            time.sleep(_STEP_S)
        return self._end(saves)

    def _begin(self, steady: Sequence[str], tell: Tell) -> list[Save]:
        saves = [Save(self.store, None, self.step, self.life, WRITERS, worker, self.trusted) for worker in WRITERS]
        tell(f"began {self.step}")
        for save, room in zip(saves, self.rooms, strict=True):
            on_committed = partial(_tell_of_commit, tell)
            save.begin(self.state, {"step": self.step}, steady, room, self.keeping, on_committed)
        return saves

    def _end(self, saves: Sequence[Save]) -> Manifest:
        for save in saves:
            if save.error is not None:
                raise save.error
        outcome = saves[0].outcome
        assert outcome is not None
        self.trusted = outcome.manifest.step
        return outcome.manifest


def _under_way(saves: Sequence[Save]) -> bool:
    """What one of them could not do, all hear of."""
    if any(save.is_idle and save.error is not None for save in saves):
        for save in saves:
            save.cancel()
    return not all(save.is_idle for save in saves)


def _newest_that_can_be_read(store: LocalStore) -> int | None:
    for found in good_checkpoints(store):
        with contextlib.suppress(CheckpointDamaged):
            check_state(dict(read_tensors(store, found)), found.step)
            return found.step
    return None


def _tell_of_commit(tell: Tell, outcome: Committed) -> None:
    tell(f"committed {outcome.manifest.step}")


def save_again_and_again(root: Path, moment: Moment, tell: Tell, saves: int, after_s: float) -> None:
    """Until it is killed, or has saved so often, or a few times more after its disk has failed."""
    saver = Saver(root)
    save = saver.save_and_wait if moment.style == "synchronous" else saver.save_beside
    broken = threading.Event()
    if moment.end != KILL:
        _break_after(after_s, moment.end, root, broken)
    tell("ready")
    while saves > 0:
        saves = min(saves, _MORE_SAVES) - 1 if broken.is_set() else saves - 1
        saver.step += moment.stride
        advance(saver.state, saver.step)
        try:
            save(tell)
        except UnisonoError as error:
            tell(f"failed {str(error)!r}")


def _break_after(after_s: float, end: str, root: Path, broken: threading.Event) -> None:
    def act() -> None:
        if end == FULL:
            keep_the_disk_full(root, broken)
        fail_from_now_on(end)
        broken.set()

    timer = threading.Timer(after_s, act)
    timer.daemon = True
    timer.start()


# --- the verifier


def verify(root: Path, committed: int, began: int) -> Outcome:
    """In a process of its own, like the next start of a run: look, read every bit, and save."""
    outcome, store = Outcome(committed=committed), LocalStore(root)
    outcome.interrupted = _phase(root, store, committed, began)
    newest = newest_good(store, lambda _, error: outcome.wrong.append(f"damaged: {error.what}"))
    outcome.found = newest.step if newest else 0
    if not committed <= outcome.found <= max(began, committed):
        outcome.wrong.append(f"found step {outcome.found}, but {committed} was committed and {began} begun")
    for step in list_steps(store):
        check_state(dict(read_tensors(store, read_manifest(store, step))), step)
    _free_the_disk(root)
    started_s = time.monotonic()
    saver = Saver(root)
    saver.step += 1
    advance(saver.state, saver.step)
    manifest = saver.save_and_wait(lambda _: None)
    outcome.again_s = time.monotonic() - started_s
    outcome.checkpoint_bytes = manifest.bytes
    outcome.unnamed_bytes = _unnamed_bytes(root, LocalStore(root))
    return outcome


def _phase(root: Path, store: LocalStore, committed: int, began: int) -> str:
    """What the saver was doing when it ended, by what it has left."""
    steps = list_steps(store)
    newest = steps[-1] if steps else 0
    parts = [int(entry.key.removeprefix(PARTS).partition("-")[0]) for entry in store.list(PARTS)]
    if newest > committed:
        return "just after the commit"
    if newest in parts:
        return "clearing up"
    if began in parts:
        return "between its parts and its commit"
    if any(root.rglob(_SCRATCH)):
        return "writing a file"
    return "between two files" if _unnamed_bytes(root, store) else "before its first file"


def _unnamed_bytes(root: Path, store: LocalStore) -> int:
    named = {chunk.key for step in list_steps(store) for chunk in read_manifest(store, step).chunks.values()}
    rest = sum(entry.bytes for folder in (CHUNKS, PARTS) for entry in store.list(folder) if entry.key not in named)
    return rest + sum(path.stat().st_size for path in root.rglob(_SCRATCH))


# --- a disk that is full


def _filler(root: Path) -> Path:
    return root.parent / "filler"


def keep_the_disk_full(root: Path, filled: threading.Event) -> None:
    """Not one more page fits, and what others give back is taken. The disk must be a small one of its own."""
    assert os.statvfs(root.parent).f_blocks * os.statvfs(root.parent).f_frsize < 1 << 30, "that is no small disk"
    with _filler(root).open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                filled.set()
                time.sleep(_STEP_S)


def _free_the_disk(root: Path) -> None:
    _filler(root).unlink(missing_ok=True)


# --- the parent of both


def strike(root: Path, moment: Moment, horizon_s: float, known: int) -> Outcome:
    """One saver, its end, and what the verifier says. `known`: the newest checkpoint before it."""
    after_s = moment.share * horizon_s
    saver = Child(lambda tell: save_again_and_again(root, moment, tell, _ENDLESS, after_s))
    wrong = []
    if not saver.read("ready"):
        wrong.append("the saver could not begin")
    elif moment.end == KILL:
        time.sleep(after_s)
    elif not saver.read():
        wrong.append(f"the saver was still at it after {LIMIT_S:g} s")
    code = saver.end()
    wrong += saver.told("wrong")
    committed, began, failures = max(known, saver.last("committed")), saver.last("began"), saver.told("failed")
    if moment.end == KILL:
        wrong += [f"a save failed: {text}" for text in failures] + [f"it ended with {code}"] * (code != -signal.SIGKILL)
    else:
        wrong += [f"does not say where: {text}" for text in failures if str(root) not in text]
        wrong += [] if failures or moment.end in HARMLESS else ["nothing failed"]
    verifier = Child(lambda tell: tell("outcome " + json.dumps(asdict(verify(root, committed, began)))))
    in_time = verifier.read()
    verifier.end()
    wrong += verifier.told("wrong") + [f"the verifier was still at it after {LIMIT_S:g} s"] * (not in_time)
    outcome = Outcome(**json.loads("".join(verifier.told("outcome")) or "{}"))
    outcome.after_s, outcome.failures, outcome.wrong = after_s, failures, wrong + outcome.wrong
    return outcome


def time_of_a_save(root: Path, style: str) -> float:
    """Seconds, undisturbed. Also leaves checkpoints behind, so that a moment never comes before the first one."""
    moment = Moment(-1, style, KILL, 0.0, 1)
    child = Child(
        lambda tell: save_again_and_again(root, moment, lambda line: tell(f"{line} {time.monotonic()}"), 6, 0)
    )
    child.read()
    child.end()
    told = [float(line.split()[-1]) for line in child.lines if line.startswith("committed")]
    assert len(told) == 6, child.lines
    return median(later - earlier for earlier, later in pairwise(told))


def strikes(
    folder: Path, moments: int, seed: int, styles: Sequence[str] = STYLES, ends: Sequence[str] = (KILL,)
) -> Iterator[tuple[Moment, Outcome]]:
    """All to one directory. This process must have no threads: it forks."""
    torch.set_num_threads(1)
    chunks.SMALL_BYTES = _LARGE  # many files and few bytes: a moment is as likely in any of them
    root = folder / "checkpoints"
    horizons = {style: _SAVES_AHEAD * time_of_a_save(root, style) for style in styles}
    known = max(list_steps(LocalStore(root)))
    for number in range(moments):
        moment = draw(number, seed, styles, ends)
        outcome = strike(root, moment, horizons[moment.style], known)
        known = max(list_steps(LocalStore(root)))
        yield moment, outcome


def in_a_process(
    folder: Path, moments: int, seed: int, styles: Sequence[str], ends: Sequence[str]
) -> Iterator[tuple[Moment, Outcome]]:
    """The same for a caller that has threads. A disk that is to be full is a small one of its own."""
    small = folder / "small"
    small.mkdir()
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    mount = f'mount -t tmpfs -o size={_SMALL_DISK_MB}m tmpfs "$0" && exec "$@"'
    wrapper = ["unshare", "--mount", *as_root, "sh", "-c", mount, str(small)] if FULL in ends else []
    program = [sys.executable, __file__, str(small), "--moments", str(moments), "--seed", str(seed)]
    command = [*wrapper, *program, "--styles", *styles, "--ends", *ends]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                moment, outcome = json.loads(line)
                yield Moment(**moment), Outcome(**outcome)
        finally:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--moments", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--styles", nargs="+", choices=STYLES, default=STYLES)
    parser.add_argument("--ends", nargs="+", choices=ENDS, default=(KILL,))
    asked = parser.parse_args(arguments)
    for moment, outcome in strikes(asked.folder, asked.moments, asked.seed, asked.styles, asked.ends):
        print(json.dumps([asdict(moment), asdict(outcome)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
