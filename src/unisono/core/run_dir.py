# SPDX-License-Identifier: Apache-2.0
"""The directory of a run: its layout, its creation, and the recorder that keeps it.

One process writes it: the supervisor, or the script itself under ``python train.py``. A disk that fills up never
stops the training: the recorder counts what it could not write, says so once, and the run ends with exit code 30.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.core import events
from unisono.core.errors import DiskFull, RunDirectoryError, UnisonoError, UsageError, from_dict
from unisono.core.spec import RunSpec

DEFAULT_PARENT = "runs"
_SAME_TRAINING = ("script", "args", "seed", "microbatches")  # what must be asked again for a run to go on
_CHOOSE_ANOTHER = "choose another --name or --run-dir, or remove that one"


@dataclass(frozen=True)
class RunDir:
    """Paths, and nothing but paths."""

    path: Path

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def receipt(self) -> Path:
        return self.path / "receipt.json"

    @property
    def pipeline(self) -> Path:
        """A picture of how full the pipeline was, where ranks share a model in stages."""
        return self.path / "pipeline.svg"

    @property
    def weights(self) -> Path:
        return self.path / "final.safetensors"

    @property
    def control(self) -> Path:
        """While it runs: how commands such as ``unisono scale`` reach it."""
        return self.path / "control.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def worker_log(self, worker: int) -> Path:
        return self.logs / f"worker-{worker}.log"


def create(spec: RunSpec, now_s: float) -> tuple[RunSpec, RunDir]:
    """Make the run's directory, or take up the one that is there (`resume`); or raise an error that says why not."""
    stem = Path(spec.script).stem or "run"
    name = spec.name or f"{stem}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now_s))}"
    path = Path(spec.run_dir) if spec.run_dir else Path(DEFAULT_PARENT) / name
    attempt = 1
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # also when something that is no directory has its name
            raise _cannot_write(path, error) from None
        try:
            holds_a_run = (path / "events.jsonl").exists()
            path.mkdir(exist_ok=_may_take_up(spec, path) if holds_a_run else bool(spec.run_dir))
            (path / "logs").mkdir(exist_ok=True)
            break
        except FileExistsError:
            if spec.name or spec.run_dir:
                taken = "already holds a run" if path.is_dir() else "is not a directory"
                raise UsageError(
                    f"the run directory {path} {taken}",
                    do=_CHOOSE_ANOTHER,
                ) from None
            attempt += 1  # started within the same second as another run
            path = path.with_name(f"{name}-{attempt}")
        except OSError as error:
            raise _cannot_write(path, error) from None
    return spec.model_copy(update={"name": spec.name or path.name, "run_dir": str(path)}), RunDir(path)


def _may_take_up(spec: RunSpec, path: Path) -> bool:
    """Whether it is the same training that is to go on there. Raises UsageError, with what differs, where it is not."""
    if spec.resume == "never" or not (spec.name or spec.run_dir):
        return False
    try:
        before = json.loads((path / "spec.json").read_text())["run"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    now = spec.model_dump(mode="json")
    differs = [f"{key} {before.get(key)} -> {now[key]}" for key in _SAME_TRAINING if before.get(key) != now[key]]
    if differs and spec.resume != "force":
        raise UsageError(
            f"the run directory {path} holds another training",
            cause="\n".join(differs),
            do=f"ask for the same to go on with it, or {_CHOOSE_ANOTHER}; --resume force goes on all the same",
        )
    return True


def _cannot_write(path: Path, error: OSError) -> RunDirectoryError:
    kind = DiskFull if error.errno == errno.ENOSPC else RunDirectoryError
    in_the_way = next((part for part in (path, *path.parents) if part.exists() and not part.is_dir()), None)
    return kind(
        f"cannot write to the run directory {path}: {error.strerror}",
        where=f"{in_the_way} is a file, not a directory" if in_the_way else "",
        do="point --run-dir at a directory you may write to, with space left",
    )


def find(name: str) -> RunDir:
    """The run that a user means by a path or by a name under ``runs/``."""
    candidates = [Path(name), Path(DEFAULT_PARENT) / name]
    for path in candidates:
        if (path / "spec.json").exists() or (path / "events.jsonl").exists():
            return RunDir(path)
    raise UsageError(
        f"there is no run at {name} or {candidates[1]}", do="give a run's directory, or its name under runs/"
    )


def read_result(run_dir: RunDir) -> dict[str, Any] | None:
    """What a run came to, or None while there is nothing."""
    try:
        result = json.loads(run_dir.result.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{run_dir.result} is damaged: {error}", do="trust the run's events.jsonl instead") from None
    return result if isinstance(result, dict) else None


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, never a half."""
    scratch = path.with_name(path.name + ".tmp")
    try:
        with scratch.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


@contextlib.contextmanager
def needing_a_place() -> Iterator[None]:
    """For temporary files: an OSError in the body becomes an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(
            f"cannot make a temporary directory: {error.strerror or error}",
            do="point TMPDIR at a directory you may write to, with space left",
        ) from None


@dataclass
class Recorder:
    """Writes a run's directory from its events. `handle` never raises for a full or failing disk."""

    run_dir: RunDir
    spec: RunSpec
    lost: dict[str, int] = field(default_factory=dict)  # file name: lines that could not be written
    first_loss: OSError | None = None
    unsaved: UnisonoError | None = None  # why there is no newer checkpoint
    saved_step: int | None = None  # of the newest checkpoint that this run has written or gone on from
    _files: dict[Path, int] = field(default_factory=dict)
    _finished: bool = False
    last_step: int = 0
    _last_evaluation: tuple[int, int] = (-1, -1)

    def start(self) -> None:
        """First write, while failing is still cheap."""
        try:
            self._append(self.run_dir.events, b"")
            if self._claim(self._files[self.run_dir.events]):
                self._take_up()
            self._write_spec(job=None)
        except OSError as error:
            raise _cannot_write(self.run_dir.path, error) from None

    def _claim(self, descriptor: int) -> bool:
        """Of two runs that want the same directory, one gets it. Where locks do not work, both do. Returns whether
        there is a run in it already, that is to go on."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"the run directory {self.run_dir.path} is in use by a run that is running",
                do=f"wait for it, or stop it (unisono stop), or {_CHOOSE_ANOTHER}",
            ) from None
        except OSError:
            return False
        holds_a_run = os.fstat(descriptor).st_size > 0
        if holds_a_run and not _may_take_up(self.spec, self.run_dir.path):
            raise UsageError(f"the run directory {self.run_dir.path} already holds a run", do=_CHOOSE_ANOTHER)
        return holds_a_run

    def _take_up(self) -> None:
        """Go on with the record: what it has is not told twice, and half a line at its end is closed."""
        with self.run_dir.events.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        if torn:
            self._append(self.run_dir.events, b"\n")
        for event in events.read(self.run_dir.events):
            if not isinstance(event, events.RunFinished):
                self._is_old(event)
        old = self.run_dir
        for path in (old.path / "journal.jsonl", old.control, old.result, old.receipt):
            path.unlink(missing_ok=True)

    def handle(self, event: events.Event) -> bool:
        """Write it down. False for one that is known: after a change of membership the last is told again."""
        if self._is_old(event):
            return False
        self.append(self.run_dir.events, events.encode(event).encode() + b"\n")
        try:
            if isinstance(event, events.Configured):
                self._write_spec(event.job)
            elif isinstance(event, events.RunFinished):
                write_atomically(self.run_dir.result, json.dumps(events.plain(event.result), indent=2) + "\n")
            elif isinstance(event, events.Resumed):
                self.saved_step = event.step
            elif isinstance(event, events.CheckpointFailed):
                self.unsaved = from_dict(event.failure)
            elif isinstance(event, events.CheckpointSaved):
                self.unsaved, self.saved_step = None, event.step
            elif isinstance(event, events.Notice) and event.code == "weights-not-saved":
                full = os.strerror(errno.ENOSPC)  # all that is left of the worker's exception
                error = OSError(errno.ENOSPC, full) if full in event.text else OSError(errno.EIO, event.text)
                self._count_loss(self.run_dir.weights.name, error)
        except OSError as error:
            self._count_loss("spec.json" if isinstance(event, events.Configured) else "result.json", error)
        return True

    def _is_old(self, event: events.Event) -> bool:
        if isinstance(event, events.StepFinished | events.StepSkipped):
            old, self.last_step = event.step <= self.last_step, max(self.last_step, event.step)
            return old
        if isinstance(event, events.Evaluated):
            key = (event.epoch, event.step)
            old, self._last_evaluation = key <= self._last_evaluation, max(self._last_evaluation, key)
            return old
        if isinstance(event, events.RunFinished):
            old, self._finished = self._finished, True
            return old
        return False

    def append(self, path: Path, data: bytes) -> None:
        try:
            self._append(path, data)
        except OSError as error:
            self._count_loss(path.name, error)

    def _append(self, path: Path, data: bytes) -> None:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        view = memoryview(data)
        while view:
            view = view[os.write(self._files[path], view) :]

    def _write_spec(self, job: dict[str, Any] | None) -> None:
        text = json.dumps({"run": self.spec.model_dump(mode="json"), "job": job}, indent=2)
        write_atomically(self.run_dir.spec, text + "\n")

    def _count_loss(self, name: str, error: OSError) -> None:
        self.lost[name] = self.lost.get(name, 0) + 1
        self.first_loss = self.first_loss or error

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def failure(self) -> UnisonoError | None:
        """What could not be written, if anything, as the error that the run ends with."""
        if self.first_loss is None:
            return self.unsaved
        full = self.first_loss.errno in (errno.ENOSPC, errno.EDQUOT)
        kind = DiskFull if full else RunDirectoryError
        free_mb = shutil.disk_usage(self.run_dir.path).free / 1e6 if self.run_dir.path.exists() else 0.0
        lost = ", ".join(f"{name} ({count} write{'s' if count > 1 else ''})" for name, count in self.lost.items())
        return kind(
            f"the run directory {self.run_dir.path} {'is full' if full else 'could not be written'}: lost {lost}",
            cause=f"{self.first_loss.strerror}; {free_mb:.1f} MB free there now",
            do="free some space or point --run-dir elsewhere; the training itself was not disturbed",
        )
