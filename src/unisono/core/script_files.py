# SPDX-License-Identifier: Apache-2.0
"""The files of a training that are the user's: the script, and what it imports from beside or below itself.

Imports are followed without running anything. Hosts that join compare these files (`control.facts`); receipts keep
their hashes. Libraries are not among them: their versions are.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

_MOST_FILES = 500


def named_files(script: str) -> dict[str, Path]:
    """The script first, then what it imports, each named as it lies relative to the script. Empty without a script."""
    main = Path(script)
    if not script or not main.is_file():
        return {}
    root = main.resolve().parent
    return {main.name: main} | {path.relative_to(root).as_posix(): path for path in imported_files(main)}


def digests(script: str) -> dict[str, str]:
    """SHA-256 of each of the files, by name."""
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in named_files(script).items()}


def imported_files(script: Path) -> list[Path]:
    """The files beside or below the script that it imports, directly or through each other."""
    main = script.resolve()
    root, seen, queue = main.parent, {main}, [main]
    while queue and len(seen) < _MOST_FILES:
        path = queue.pop()
        for name in _imports(path, root):
            for found in _files_of(root, name):
                if found not in seen:
                    seen.add(found)
                    queue.append(found)
    return sorted(seen - {main})


def _imports(path: Path, root: Path) -> Iterator[tuple[str, ...]]:
    """Each import as a path of names below the script's folder, whether or not something of ours lies there."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return
    package = path.relative_to(root).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            start = (*above, *(node.module.split(".") if node.module else ()))
            yield start
            yield from ((*start, alias.name) for alias in node.names)


def _files_of(root: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """The module, and every package on the way to it."""
    for count in range(1, len(names) + 1):
        place = root.joinpath(*names[:count])
        yield from (path for path in (place.with_name(place.name + ".py"), place / "__init__.py") if path.is_file())
