# SPDX-License-Identifier: Apache-2.0
"""What two hosts must have in common before they train one model: versions, the script and what it imports, the data.

`facts` reads them on one host, as plain texts that travel; `compare` says in one line each what differs, with both
values. Imports are followed without running anything. A digest of the data comes from whoever has loaded it.
"""

from __future__ import annotations

import hashlib
import platform
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from unisono.core.errors import DataDiffers, ScriptDiffers, UnisonoError, VersionsDiffer
from unisono.core.progress import duration
from unisono.core.script_files import named_files

MISSING = "not installed"
_MODULE = "module "  # before the name of a file that the script imports
_DIGITS = 12  # of a sha256, enough to tell two files apart


@dataclass(frozen=True)
class _File:
    sha256: str
    size: int
    changed_s: int
    name: str

    def encode(self) -> str:
        return f"{self.sha256} {self.size} {self.changed_s} {self.name}"

    @classmethod
    def decode(cls, text: str) -> _File | None:
        """None for what another version may have sent."""
        try:
            sha256, size, changed_s, name = text.split(" ", 3)
            return cls(sha256, int(size), int(changed_s), name)
        except ValueError:
            return None

    def describe(self, now_s: float) -> str:
        ago = duration(max(0.0, now_s - self.changed_s))
        return f"sha256 {self.sha256}… ({self.size:,} bytes, changed {ago} ago)"


def facts(script: str) -> dict[str, str]:
    """Of this host. The script's own files are named as they lie relative to it."""
    found = {"python": platform.python_version(), "torch": version("torch"), "unisono": version("unisono")}
    for number, (name, path) in enumerate(named_files(script).items()):
        found[_MODULE + name if number else "script"] = _read(path, name).encode()
    return found


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return MISSING


def _read(path: Path, name: str) -> _File:
    data = path.read_bytes()
    return _File(hashlib.sha256(data).hexdigest()[:_DIGITS], len(data), int(path.stat().st_mtime), name)


def compare(
    facts_here: dict[str, str], facts_there: dict[str, str], here: str, there: str, now_s: float | None = None
) -> list[UnisonoError]:
    """What differs between this host and the other, whose word counts. What only one of them knows is left out."""
    now_s = time.time() if now_s is None else now_s
    found: list[UnisonoError] = []
    for name in ("python", "torch", "unisono"):
        mine, other = facts_here.get(name), facts_there.get(name)
        if mine and other and _significant(name, mine) != _significant(name, other):
            cure = f"use Python {_significant(name, other)}" if name == "python" else f"pip install {name}=={other}"
            found.append(
                VersionsDiffer(
                    f"{name} differs: {here} has {mine}, {there} has {other}", do=f"on {here}: {cure}, then join again"
                )
            )
    found += _compare_files(facts_here, facts_there, here, there, now_s)
    mine, other = facts_here.get("data"), facts_there.get("data")
    if mine and other and mine != other:
        found.append(
            DataDiffers(
                f"the data differs: {here} has {_describe_data(mine)}, {there} has {_describe_data(other)}",
                do=f"give {here} the same data as {there}, in the same order, then join again",
            )
        )
    return found


def _significant(name: str, text: str) -> str:
    return ".".join(text.split(".")[:2]) if name == "python" else text


def _describe_data(text: str) -> str:
    count, slash, digest = text.partition("/")
    return f"{int(count):,} samples with digest {digest}" if slash and count.isdigit() else text


def _compare_files(
    facts_here: dict[str, str], facts_there: dict[str, str], here: str, there: str, now_s: float
) -> list[UnisonoError]:
    """The script first. A module counts only where both sides have looked for modules, so where both have a script."""
    scripts = [_File.decode(found.get("script", "")) for found in (facts_here, facts_there)]
    if scripts[0] is None or scripts[1] is None:
        return []
    keys = sorted(key for key in facts_here.keys() | facts_there.keys() if key.startswith(_MODULE))
    found: list[UnisonoError] = []
    for key in ("script", *keys):
        mine, other = (_File.decode(side.get(key, "")) for side in (facts_here, facts_there))
        if (mine and mine.sha256) == (other and other.sha256):
            continue
        known = other or mine
        name = known.name if known else key
        whose = name if key == "script" else f"{name}, which {scripts[1].name} imports,"
        shown = [side.describe(now_s) if side else "no such file" for side in (mine, other)]
        found.append(
            ScriptDiffers(
                f"{whose} differs: {here} has {shown[0]}, {there} has {shown[1]}",
                do=f"copy {name} from {there} to {here}, then join again",
            )
        )
    return found
