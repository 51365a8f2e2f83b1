# SPDX-License-Identifier: Apache-2.0
"""The one error tree: a code, what happened, where, the likely cause, what to do, and an exit code.

Exit codes tell a scheduler a user's bug from a lost machine: see `EXIT_CODES`. Errors travel between processes as
plain dictionaries (`as_dict`, `from_dict`), never as pickles. Nothing here prints.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, ClassVar

EXIT_CODES: dict[int, str] = {
    0: "the run finished",
    2: "the command, an option or the spec is wrong; nothing was started",
    10: "the script raised an exception",
    11: "the training was set up in a way that cannot work (batch, microbatches, data, model)",
    12: "the loss became NaN or infinite",
    13: "workers that must agree did not (data, weights)",
    20: "a worker process was lost (killed, crashed, out of memory, hung), and the run could not go on without it",
    21: "this host could not join the run",
    22: "a parameter server was lost with what only it had, and there was no checkpoint to go back to",
    30: "the run directory cannot be written",
    31: "the place of the checkpoints cannot be written or read",
    32: "a checkpoint or receipt is damaged or incomplete, does not fit this training, or needs another key",
    70: "a fault in Unisono itself",
    75: "preempted: asked to leave by SIGTERM, SIGUSR1 or SIGUSR2; start it again",
    130: "stopped by Ctrl-C or by unisono stop --now",
}


class UnisonoError(Exception):
    """Something went wrong, said to a tired person: what, where, why, what to do."""

    code: ClassVar[str] = "UNI-9001"
    exit_code: ClassVar[int] = 70

    def __init__(self, what: str, *, where: str = "", cause: str = "", do: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.cause, self.do = what, where, cause, do
        self.trace = ""  # the user's traceback as text, where the exception itself could not travel

    def __str__(self) -> str:
        rows = [f"{self.code}  {self.what}"]
        for label, text in (("where", self.where), ("cause", self.cause), ("do", self.do)):
            if text:
                head, *rest = text.splitlines()
                rows.append(f"  {label:<7} {head}")
                rows.extend(f"          {line}" for line in rest)
        return "\n".join(rows)

    def as_dict(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "exit_code": self.exit_code,
            "what": self.what,
            "where": self.where,
            "cause": self.cause,
            "do": self.do,
        }


class UsageError(UnisonoError):
    code, exit_code = "UNI-1001", 2


class UnknownKey(UsageError):
    """A spec key nobody knows. Never ignored: a misspelt option that silently does nothing costs days."""

    code = "UNI-1002"


class ScriptMissing(UsageError):
    code = "UNI-1003"


class BadFaultPlan(UsageError):
    code = "UNI-1004"


class ScriptFailed(UnisonoError):
    """The user's own exception; `where` is their file and line."""

    code, exit_code = "UNI-1101", 10


class ScriptSyntax(ScriptFailed):
    code = "UNI-1102"


class NothingTrained(ScriptFailed):
    code = "UNI-1103"


class SetupError(UnisonoError):
    """The training cannot work as it is set up."""

    code, exit_code = "UNI-1201", 11


class TooFewMicrobatches(SetupError):
    code = "UNI-1202"


class BatchTooSmall(SetupError):
    code = "UNI-1203"


class EmptyData(SetupError):
    code = "UNI-1204"


class ModelMismatch(SetupError):
    """The first forward or backward pass failed: the model does not fit the data."""

    code = "UNI-1205"


class SparseGradient(SetupError):
    code = "UNI-1206"


class DeviceMemory(SetupError):
    """A GPU has not enough memory for this model, batch and way of computing."""

    code = "UNI-1207"


class NonFiniteLoss(UnisonoError):
    code, exit_code = "UNI-1301", 12


class DataError(UnisonoError):
    """Data that cannot be used. The message names the file or shard and, where it is about one, the sample."""

    code, exit_code = "UNI-1310", 11


class DataMissing(DataError):
    """A file, shard or index that should be there and is not."""

    code = "UNI-1311"


class DataDamaged(DataError):
    """Truncated, changed since it was written, or never in the format that it claims."""

    code = "UNI-1312"


class SchemaMismatch(DataError):
    """A sample or shard does not have the columns that it should have."""

    code = "UNI-1313"


class BadSample(DataError):
    """One sample cannot be read, or the transform refuses it; `index` says which, -1 if unknown."""

    code = "UNI-1314"
    index: int = -1


class DataUnreachable(DataError):
    """The storage did not do what it was asked to: not the same as having no such file."""

    code = "UNI-1315"


class DataDisagrees(UnisonoError):
    code, exit_code = "UNI-1401", 13


class ReplicasDisagree(UnisonoError):
    code, exit_code = "UNI-1402", 13


class WorkerLost(UnisonoError):
    code, exit_code = "UNI-2001", 20


class PeerLost(WorkerLost):
    """This worker's connection to another broke: a consequence, blamed only when nothing better is known.

    `worker` is the other one's id; None when the generation was given up as a whole. `out_of_step`: nothing broke, but
    the two are at different places of the program, or of different models.
    """

    code = "UNI-2002"
    worker: int | None = None
    out_of_step = False
    agreed = False  # all ranks of this replica know of it


class WorkerHung(WorkerLost):
    """A worker did not reach a collective in which others wait."""

    code = "UNI-2003"


class SamePlaceTwice(WorkerLost):
    """Two workers died at the same place: no accident, but the script or its data."""

    code, exit_code = "UNI-2004", 10


class TooFewWorkers(WorkerLost):
    """Below the minimum for longer than the run may wait."""

    code = "UNI-2005"


class WorkerCorrupt(WorkerLost):
    """A replica's weights are not those of the others."""

    code = "UNI-2006"


class SlicesLost(UnisonoError):
    """A parameter server died, and with it the only copy of what it held."""

    code, exit_code = "UNI-2007", 22


class JoinError(UnisonoError):
    """A host, or one of its workers, cannot take part in the run. The run itself goes on."""

    code, exit_code = "UNI-2101", 21


class Unreachable(JoinError):
    code = "UNI-2102"


class ResolvesToLoopback(JoinError):
    code = "UNI-2103"


class WrongInterface(JoinError):
    code = "UNI-2104"


class ClockSkew(JoinError):
    code = "UNI-2105"


class VersionsDiffer(JoinError):
    code = "UNI-2106"


class ScriptDiffers(JoinError):
    code = "UNI-2107"


class DataDiffers(JoinError):
    code = "UNI-2108"


class WrongSecret(JoinError):
    code = "UNI-2109"


class RunIsFull(JoinError):
    code = "UNI-2110"


class RunDirectoryError(UnisonoError):
    code, exit_code = "UNI-3001", 30


class DiskFull(RunDirectoryError):
    code = "UNI-3002"


class StoreFailed(UnisonoError):
    """A checkpoint store could not do what it was asked to, after all retries. `key`: the object, if it was one."""

    code, exit_code = "UNI-3010", 31
    key: str = ""


class StoreMissing(UnisonoError):
    """There is no such object. A store that could not be asked is StoreFailed, and neither is the other."""

    code, exit_code = "UNI-3011", 31
    key: str = ""


class StoreFull(StoreFailed):
    code = "UNI-3012"


class StoreDenied(StoreFailed):
    """Credentials or permissions."""

    code = "UNI-3013"


class CheckpointError(UnisonoError):
    """A checkpoint cannot be saved or used."""

    code, exit_code = "UNI-3020", 32


class CheckpointDamaged(CheckpointError):
    """Bytes are missing or are not those that were written. An older checkpoint may be good."""

    code = "UNI-3021"


class CheckpointMismatch(CheckpointError):
    """A whole checkpoint, of something else: tensors are missing, renamed or reshaped."""

    code = "UNI-3022"


class Unstorable(CheckpointError):
    """A tensor or value of a kind that a checkpoint cannot hold."""

    code = "UNI-3023"


class WrongKey(CheckpointError):
    code = "UNI-3024"


class CheckpointNewer(CheckpointError):
    """Written by a later version. Never skipped in favour of an older one, never counted as rubbish."""

    code = "UNI-3025"


class ReceiptDamaged(UnisonoError):
    """A receipt is not as it was written, or is none. What it says must not be believed."""

    code, exit_code = "UNI-3030", 32


class Interrupted(UnisonoError):
    code, exit_code = "UNI-4001", 130


class Preempted(UnisonoError):
    """The machine is wanted back: drained at a step boundary, with nobody left to go on."""

    code, exit_code = "UNI-4002", 75


class InternalError(UnisonoError):
    """A broken invariant of ours; worth a bug report."""


def _tree(root: type[UnisonoError]) -> Iterable[type[UnisonoError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


def from_dict(data: dict[str, Any]) -> UnisonoError:
    """Rebuild an error that another process sent as a dictionary."""
    kinds = {kind.code: kind for kind in reversed(list(_tree(UnisonoError)))}
    kind = kinds.get(str(data.get("code")), InternalError)
    texts = {key: str(data.get(key, "")) for key in ("where", "cause", "do")}
    return kind(str(data.get("what", "unknown failure")), **texts)


def suggest(word: str, known: Iterable[str]) -> str:
    """``did you mean 'workers'?`` or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""
