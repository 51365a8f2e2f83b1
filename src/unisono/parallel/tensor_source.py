# SPDX-License-Identifier: Apache-2.0
"""What the source of a `forward` tells before it runs: which numbers it reads, and whose weights it reads itself.

Pure, and no more than a look: source that cannot be had tells nothing.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_FACTS = ("dtype", "device", "shape", "requires_grad", "is_cuda")  # may be asked of a weight that is cut


@dataclass(frozen=True)
class Reading:
    used: frozenset[str] = frozenset()  # attributes of self
    divides_by: frozenset[str] = frozenset()  # those by which it divides something that is not an attribute
    weights: frozenset[str] = frozenset()  # modules below whose weight or bias it computes with, without calling them


@functools.cache
def reading(forward: Callable[..., Any]) -> Reading:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return Reading()
    paths = {node: path for node in ast.walk(tree) if isinstance(node, ast.Attribute) and (path := _path(node))}
    facts = {node.value for node in paths if node.attr in _FACTS}
    divisions = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv)]
    return Reading(
        frozenset(path for path in paths.values() if "." not in path),
        frozenset(paths[d.right] for d in divisions if d.right in paths and d.left not in paths),
        frozenset(
            path.rpartition(".")[0]
            for node, path in paths.items()
            if node.attr in ("weight", "bias") and "." in path and node not in facts
        ),
    )


def _path(node: ast.AST) -> str:
    """``a.b`` for ``self.a.b``; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed(parts)) if isinstance(node, ast.Name) and node.id == "self" else ""
