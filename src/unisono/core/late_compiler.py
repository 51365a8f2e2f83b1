# SPDX-License-Identifier: Apache-2.0
"""torch's compiler, loaded when somebody compiles and not before: it costs as much as all the rest of torch.

Torch's optimizers import ``torch._dynamo`` only to tell it that it is to keep out of their way. While nobody has loaded
it, there is nobody to be told. After `put_off`, which `import unisono` calls, an import of it gives a module that knows
the two calls in question, and that turns into the real one, in place, when anything else is asked of it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"
_CACHE = "__dynamo_disable"  # where torch._compile keeps what `disable` has given it


def put_off() -> None:
    """Nothing changes where the compiler is loaded already."""
    if _NAME not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the compiler where it is, and lets it sleep; steps aside for every other module."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002
        if fullname != _NAME or self._searching:
            return None
        self._searching = True  # the search below comes through here again
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, real: Any) -> None:
        self._real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:  # noqa: ARG002
        return None  # a plain one

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = Asleep
        assert isinstance(module, Asleep)
        module.fall_asleep(self._real.exec_module)

    def __getattr__(self, name: str) -> Any:  # what else a loader can, such as showing its source
        return getattr(self._real, name)


class Asleep(ModuleType):
    """``torch._dynamo``, until it is needed."""

    def fall_asleep(self, load: Callable[[ModuleType], None]) -> None:
        told: list[Callable[..., Any]] = []

        def disable(function: Any = None, recursive: bool = True, *more: Any, **options: Any) -> Any:
            if function is None or options.get("wrapping", True):  # not torch._compile, but somebody who means it
                return self._awake("disable")(function, recursive, *more, **options)
            told.append(function)
            return function

        known = vars(self)
        known["_sleep"] = {
            "load": load,
            "told": told,
            "path": known.pop("__path__"),
        }  # whoever looks for parts wakes it
        known["_waking"] = threading.RLock()
        known["graph_break"], known["disable"] = lambda *_, **__: None, disable

    def __getattr__(self, name: str) -> Any:
        """Called for what is not there, or not yet."""
        return self._awake(name)

    def _awake(self, name: str) -> Any:
        known = vars(self)
        with known["_waking"]:  # another thread waits here until it is whole
            if "_sleep" in known:
                self._wake(**known.pop("_sleep"))
        if name in known:
            return known[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def _wake(self, load: Callable[[ModuleType], None], told: list[Callable[..., Any]], path: Any) -> None:
        known = vars(self)
        known["__path__"] = path
        del known["graph_break"], known["disable"]
        for function in told:
            vars(function).pop(_CACHE, None)  # torch asks again, and is answered by the real one
        try:
            load(self)
        except BaseException:
            sys.modules.pop(_NAME, None)  # as any import that fails
            raise
