"""Run a function once a module has been imported by somebody else, without importing it.

Imports the standard library only. Imported by integrations/transformers.py and by nested.py.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["cancel", "when_imported"]


def when_imported(name: str, call: Callable[[], None]) -> None:
    """Call `call()` now if the module `name` is loaded, else right after somebody has imported it. Once.

    Until then a finder stands first in sys.meta_path that answers for `name` alone, with what the finders behind it
    find. The module itself ends up with the loader that it would have had. `call` must not raise.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        call()
        return
    cancel(call)
    sys.meta_path.insert(0, _Finder(name, call))


def cancel(call: Callable[[], None]) -> None:
    """Forget about `call`, if it still waits."""
    for finder in list(sys.meta_path):
        if isinstance(finder, _Finder) and finder.call == call:
            sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds one module, by asking the others, and sees to it that `call` runs behind it."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self.name = name
        self.call = call
        self._asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
        return spec


class _Loader:
    """The real loader, except that something happens behind `exec_module`."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        # The module and whoever looks at it (inspect, pickle, importlib.resources) are to see the real loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        cancel(self._finder.call)
        self._finder.call()
