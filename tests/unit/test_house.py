# SPDX-License-Identifier: Apache-2.0
"""The guards of the house: who may import whom (DESIGN.md, section 3), what stays free of torch, and size.

They read the source with `ast`, so an import inside a function counts too; one under ``if TYPE_CHECKING`` does not.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOUSE = ROOT / "src" / "unisono"
TREES = ("src", "bench", "examples", "tests")

_BELOW_STRATEGIES = {"core", "wire", "comm"}
_BELOW_TRAIN = _BELOW_STRATEGIES | {"parallel", "data", "checkpoint", "elastic", "nn"}
MAY_IMPORT = {  # package: the packages to its left
    "core": set(),
    "wire": {"core"},
    "comm": {"core", "wire"},
    "parallel": _BELOW_STRATEGIES,
    "data": _BELOW_STRATEGIES,
    "checkpoint": _BELOW_STRATEGIES,
    "elastic": _BELOW_STRATEGIES,
    "train": _BELOW_TRAIN,
    "federated": _BELOW_TRAIN | {"train"},
    "planner": _BELOW_TRAIN | {"train"},
    "control": {"core", "wire"},
    "cli": _BELOW_TRAIN | {"train", "federated", "planner", "control"},
    "ps": _BELOW_TRAIN | {"train"},  # one module: a door for users
    "nn": set(),  # pieces of models, which know torch alone
    "unisono": {
        "core",
        "data",
        "nn",
        "train",
        "ps",
    },  # the package itself: its public names, fetched when they are first used
}

# Of elastic, all that the coordinator is made of.
_PARTS = (
    "quorum roster orders generations starting watching commands recall balance breaks hangs healing restarts turns"
)
_COORDINATOR = tuple(f"elastic.{name}" for name in ("coordinator", *_PARTS.split()))
_ORDER = ("data.order", "data.blocks", "data.permutation")
_STORES = ("checkpoint.store", "checkpoint.local_store", "checkpoint.fsspec_store", "checkpoint.retrying")
TORCH_FREE = (
    "core",
    "wire",
    "control",
    "cli",
    "data.order",
    "data.blocks",
    "data.permutation",
    *_STORES,
    *_COORDINATOR,
)

LONGEST_FILE, LONGEST_FUNCTION = 400, 60
ALLOWED = {  # "path" or "path::function": why it is better long
    "src/unisono/cli/app.py::run": "a list of the command's options, each with its help, and three lines of work",
    "tests/unit/test_data_sources.py": "one table of damaged and odd inputs per data source; splitting it would "
    "repeat the small idx files that most of its tests share",
}
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "base", "misc"}


def python_files(*trees: str) -> list[Path]:
    return sorted(path for tree in trees for path in (ROOT / tree).rglob("*.py"))


def module_name(path: Path) -> str:
    """``core.spec``, ``core`` for its ``__init__``, and ``unisono`` for the house's own."""
    parts = path.relative_to(HOUSE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "unisono"


MODULES = {module_name(path): path for path in python_files("src/unisono")}


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _running_code(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below, without what only a type checker reads."""
    children = node.orelse if isinstance(node, ast.If) and _is_type_checking(node) else ast.iter_child_nodes(node)
    for child in children:
        yield child
        yield from _running_code(child)


def imported_names(source: str, module: str) -> Iterator[str]:
    """The dotted name of everything that the source of `module` imports when it runs."""
    for node in _running_code(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ["unisono", *module.split(".")][: -node.level] if node.level else []
            start = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (str(arg.value) for arg in node.args if isinstance(arg, ast.Constant))


def forbidden_imports(source: str, module: str) -> list[str]:
    package = module.split(".")[0]
    found = []
    for name in imported_names(source, module):
        first, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if first == "unisono" and target != package:
            target = target if target in MAY_IMPORT else "unisono"
            if target not in MAY_IMPORT[package]:
                found.append(f"{module} imports {name}")
    return found


def torch_imports(source: str, module: str) -> list[str]:
    return [f"{module} imports {name}" for name in imported_names(source, module) if "torch" in name.split(".")]


def is_torch_free(module: str) -> bool:
    return module == "unisono" or any(module == name or module.startswith(f"{name}.") for name in TORCH_FREE)


def too_long(path: Path) -> Iterator[str]:
    """What of a file needs a reason: the file itself, and functions in it."""
    text, name = path.read_text(), path.relative_to(ROOT).as_posix()
    if len(text.splitlines()) > LONGEST_FILE:
        yield name
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION:
                yield f"{name}::{node.name}"


@pytest.mark.parametrize("package", sorted({name.split(".")[0] for name in MODULES}))
def test_a_package_imports_only_what_lies_to_its_left(package: str) -> None:
    assert package in MAY_IMPORT, f"src/unisono/{package} has no place in the house yet"
    mine = {name: path for name, path in MODULES.items() if name.split(".")[0] == package}
    assert [text for name, path in mine.items() for text in forbidden_imports(path.read_text(), name)] == []


@pytest.mark.parametrize(
    ("module", "source", "count"),
    [
        ("core.spec", "import unisono.wire.channel", 1),
        ("core.spec", "from unisono.core.errors import UsageError", 0),
        ("core.spec", "from .errors import UsageError", 0),
        ("core.spec", "from ..wire import channel", 1),
        ("core.spec", "from unisono import train", 1),
        ("core.spec", "from unisono import Trainer", 1),
        ("data.order", "def late():\n    from unisono.parallel import layout", 1),
        ("parallel.layout", "class A:\n    import unisono.elastic.session", 1),
        ("elastic.session", "from unisono.comm.seam import Comm", 0),
        ("train.loop", "from unisono.control.blame import Death", 1),
        ("control.launch", "from importlib import import_module\nimport_module('unisono.train.worker')", 1),
        ("control.launch", "if TYPE_CHECKING:\n    from unisono.train import job\nelse:\n    import unisono.data", 1),
        ("wire.channel", "if TYPE_CHECKING:\n    from unisono.train import job", 0),
        ("cli.show", "from unisono.checkpoint.weights import hash_file", 0),
    ],
)
def test_the_import_guard_sees_every_way_to_import(module: str, source: str, count: int) -> None:
    assert len(forbidden_imports(source, module)) == count


@pytest.mark.parametrize("module", sorted(filter(is_torch_free, MODULES)))
def test_a_torch_free_module_never_imports_torch_not_even_late(module: str) -> None:
    assert torch_imports(MODULES[module].read_text(), module) == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("def late():\n    import torch", 1),
        ("from torch.nn import Module", 1),
        ("from safetensors.torch import save_file", 1),
        ("from torch import Tensor, nn", 2),
        ("if TYPE_CHECKING:\n    from torch import Tensor", 0),
        ("import torchmetrics_like_name", 0),
    ],
)
def test_the_torch_guard_sees_every_way_to_import_it(source: str, count: int) -> None:
    assert len(torch_imports(source, "core.spec")) == count


def test_importing_every_torch_free_module_does_not_load_torch() -> None:
    free = sorted(name for name in filter(is_torch_free, MODULES) if not name.endswith("__main__"))
    assert {"unisono", "core.spec", "wire.channel", "control.supervisor", "cli.show", "data.order"} <= set(free)
    assert set(_COORDINATOR) <= set(free)
    program = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    program += "    assert 'torch' not in sys.modules, f'{name} loads torch'"
    names = [name if name == "unisono" else f"unisono.{name}" for name in free]
    done = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_long_file_or_function_has_a_written_reason() -> None:
    long = {name for path in python_files(*TREES) for name in too_long(path)}
    assert sorted(long - set(ALLOWED)) == [], "shorten it, or write down in ALLOWED why it is better long"
    assert sorted(set(ALLOWED) - long) == [], "no longer long: take it out of ALLOWED"
    assert [name for name, reason in ALLOWED.items() if len(reason.split()) < 5] == []


@pytest.mark.parametrize("path", MODULES.values(), ids=MODULES.keys())
def test_a_module_opens_with_its_licence_and_with_what_it_owns(path: Path) -> None:
    text = path.read_text()
    assert text.splitlines()[0] == "# SPDX-License-Identifier: Apache-2.0"
    tree = ast.parse(text)
    if tree.body:  # the __init__ of a package may hold nothing at all
        assert ast.get_docstring(tree), f"{path} does not say what it owns"


def test_no_file_or_folder_has_a_name_that_says_nothing() -> None:
    found = {path for path in python_files(*TREES) for part in path.relative_to(ROOT).with_suffix("").parts
             if VAGUE_NAMES & set(part.split("_"))}  # fmt: skip
    assert found == set()
