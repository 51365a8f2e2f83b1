# SPDX-License-Identifier: Apache-2.0
"""Random state as a pure function of (seed, purpose, step, microbatch), and its application to the generators.

`import unisono` seeds Python's, NumPy's and torch's generators with the run's seed, also when torch is imported
later, so that a script builds the same initial weights under ``python train.py`` and under ``unisono run``. A
script that seeds for itself afterwards has the last word. Torch is only touched, never imported, here.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import sys
from types import ModuleType
from typing import Any

ENVIRONMENT = "UNISONO_SEED"
_LATE_MODULES = ("torch", "numpy")


def derive(seed: int, purpose: str, *place: int) -> int:
    """A 63-bit number that depends on every argument: ``derive(0, "forward", step, microbatch)``."""
    text = f"{seed}/{purpose}/" + "/".join(map(str, place))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def apply(value: int) -> None:
    """Put every generator that is loaded in this process into the state that `value` names."""
    random.seed(value)
    for name in _LATE_MODULES:
        module = sys.modules.get(name)
        if module is not None:
            _apply_to(name, module, value)


def _apply_to(name: str, module: ModuleType, value: int) -> None:
    if name == "numpy":
        module.random.seed(value & 0xFFFFFFFF)
    elif name == "torch" and hasattr(module, "default_generator"):  # absent while torch itself is being imported
        # Not torch.manual_seed: while CUDA is not in use it records a stack trace at every call, and keeps them all.
        value &= 0xFFFFFFFFFFFFFFFF  # more bits than torch takes
        module.default_generator.manual_seed(value)
        if module.cuda.is_initialized():
            module.cuda.manual_seed_all(value)


def _apply_first(name: str, module: ModuleType, value: int) -> None:
    """Once a process: the whole of torch, so that weights built on a GPU that is not yet in use follow the seed too."""
    if name == "torch" and hasattr(module, "manual_seed"):
        module.manual_seed(value & 0xFFFFFFFFFFFFFFFF)
    else:
        _apply_to(name, module, value)


def from_environment() -> int:
    text = os.environ.get(ENVIRONMENT, "0")
    return int(text) if text.strip().isdigit() else 0  # what is not a number is refused where the run starts


class _SeedOnImport(importlib.abc.MetaPathFinder):
    """Seeds torch and NumPy at the moment the script imports them; steps aside for every other module."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.waiting_for = {name for name in _LATE_MODULES if name not in sys.modules}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002
        if fullname not in self.waiting_for:
            return None
        self.waiting_for.discard(fullname)  # the search below comes through here again
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.waiting_for.add(fullname)  # somebody may only be asking whether it is installed
        if spec is None or spec.loader is None:
            return None
        run_module = spec.loader.exec_module

        def exec_and_seed(module: ModuleType) -> None:
            self.waiting_for.discard(fullname)
            run_module(module)
            _apply_first(fullname, module, self.value)

        spec.loader.exec_module = exec_and_seed  # type: ignore[method-assign]
        return spec


def seed_now_and_on_import(value: int) -> None:
    """Seed what is loaded, and the rest as soon as it is."""
    random.seed(value)
    for name in _LATE_MODULES:
        if name in sys.modules:
            _apply_first(name, sys.modules[name], value)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _SeedOnImport)]
    finder = _SeedOnImport(value)
    if finder.waiting_for:
        sys.meta_path.insert(0, finder)
