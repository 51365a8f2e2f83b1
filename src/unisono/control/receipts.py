# SPDX-License-Identifier: Apache-2.0
"""Receipts as a user meets them: found by a path or by a run, checked, and their signer named.

Reading and hashing is `core.receipt`, gathering `core.receipt_gathering` (a script that runs by itself needs it too,
and may not know this package); running one again is `control.replay`. Prints nothing.
"""

from __future__ import annotations

from pathlib import Path

from unisono.core.errors import UsageError
from unisono.core.receipt import Opened, read_receipt
from unisono.core.run_dir import find
from unisono.core.signing import key_id, own_key


def open_receipt(name: str) -> tuple[Path, Opened]:
    """`name`: a receipt, a run's directory, or its name under runs/. Raises ReceiptDamaged."""
    path = Path(name)
    if not path.is_file() and path.suffix != ".json":
        run_dir = find(name)
        path = run_dir.receipt
        if not path.is_file():
            raise UsageError(
                f"the run {run_dir.path} has no receipt",
                cause="it has not come to a result, or the receipt could not be written: unisono show says",
            )
    return path, read_receipt(path)


def is_own(signer: bytes | None) -> bool:
    """Whether this user has signed it."""
    try:
        mine = own_key()
    except (OSError, ValueError):  # there is a file, and it is no key
        return False
    return mine is not None and signer == mine.public


def describe_signer(signer: bytes | None, named: bytes | None) -> tuple[str, bool]:
    """Who signed it, in words, and whether that is good: somebody did, and it is whom the user named, if anyone."""
    if signer is None:
        return "not signed: the hash shows accidents, but anybody could have written it", False
    who = f"signed by key {key_id(signer)}"
    if named is not None:
        return (f"{who}, as you asked", True) if signer == named else (f"{who}, not by {key_id(named)}", False)
    if is_own(signer):
        return f"{who}, which is yours", True
    return f"{who}; whose that is a receipt cannot say: compare it with --key PUBLIC", True
