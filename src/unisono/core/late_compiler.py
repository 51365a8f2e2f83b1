# SPDX-License-Identifier: Apache-2.0
"""torch's compiler, loaded when somebody compiles and not before: it costs as much as all the rest of torch.

Torch's optimizers import ``torch._dynamo`` only to tell it that it is to keep out of their way. While nobody has loaded
it, there is nobody to be told. After `put_off`, which `import unisono` calls, an import of it gives a module that knows
the two calls in question. It turns into the real one, in place, when anything else is asked of it or a part of it is
imported; from then on nothing of what is here has any effect. Torch-free.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"
_CACHE = "__dynamo_disable"  # where torch._compile keeps what `disable` has given it
_SLEEP = "_unisono_sleep"  # among the module's names, until it is whole


def put_off() -> None:
    """Nothing changes where the compiler is loaded already."""
    if _NAME not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the compiler sleep, and wakes it before a part of it is imported; steps aside for every other module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == _NAME and target is None:
            spec = importlib.machinery.PathFinder.find_spec(fullname, path)
            if spec is not None and spec.loader is not None:
                spec.loader = _Sleep(spec.loader)
            return spec
        if fullname.startswith(f"{_NAME}."):
            sleep: _Sleep | None = vars(sys.modules[_NAME]).get(_SLEEP)
            if sleep is not None and sleep.end_unless_another_does():
                return _as_it_is(fullname)
        return None


def _as_it_is(name: str) -> importlib.machinery.ModuleSpec | None:
    """A way to load a module that is loaded already: to leave it alone.

    Python has looked whether `name` is there before it asked us, and we have just loaded the whole package. Without
    this it would load that part a second time, and settings made in the one would not be seen by users of the other.
    """
    there = sys.modules.pop(name, None)  # as long as it is in there, Python takes its own loader and not ours
    return None if there is None else importlib.machinery.ModuleSpec(name, _Loaded(there))


class _Loaded(importlib.abc.Loader):
    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:  # noqa: ARG002
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__spec__"] = self._spec  # Python has just put another there; some modules forbid assignments


class _Asleep(ModuleType):
    """``torch._dynamo``, until it is whole."""

    def __getattr__(self, name: str) -> Any:
        """Called for what is not there, or not yet."""
        sleep: _Sleep | None = vars(self).get(_SLEEP)
        if sleep is not None:
            sleep.end()
        if type(self) is _Asleep:  # we are among those who are loading it
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r} yet")
        return getattr(self, name)


class _Sleep(importlib.abc.Loader):
    """Puts the module to sleep where another loader would fill it, and has that one fill it at the end."""

    def __init__(self, real: Any) -> None:
        self._real, self._begun, self._lock = real, False, threading.RLock()
        self._told: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
        self._others: set[int] = set()  # threads that import a part while one loads the whole

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:  # noqa: ARG002
        return None  # a plain one

    def exec_module(self, module: ModuleType) -> None:
        def disable(function: Any = None, recursive: bool = True, *more: Any, **options: Any) -> Any:
            asked_by_torch = function is not None and not options.get("wrapping", True)  # by torch._compile
            if self._begun or not asked_by_torch:
                self.end()
                return module.disable(function, recursive, *more, **options)
            self._told.add(function)
            return function

        self._module = module
        vars(module).update({_SLEEP: self, "disable": disable, "graph_break": lambda *_, **__: None})
        module.__class__ = _Asleep

    def end_unless_another_does(self) -> bool:
        """Another thread that loads the whole may want the part that we are about to import: do not wait for it."""
        if not self._lock.acquire(blocking=False):
            self._others.add(threading.get_ident())
            return False
        try:
            self.end()
        finally:
            self._lock.release()
        return True

    def end(self) -> None:
        """Afterwards the module is whole, or this thread is among those who are loading it."""
        if threading.get_ident() in self._others:
            return
        with self._lock:
            if not self._begun:
                self._begun = True
                self._load(self._module)

    def _load(self, module: ModuleType) -> None:
        names = vars(module)
        del names["disable"], names["graph_break"]
        for function in list(self._told):
            vars(function).pop(_CACHE, None)  # torch asks again, and is answered by the real one
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._real
        try:
            self._real.exec_module(module)
        except BaseException:
            sys.modules.pop(_NAME, None)  # as any import that fails
            raise
        finally:
            module.__class__ = ModuleType
            del names[_SLEEP]
