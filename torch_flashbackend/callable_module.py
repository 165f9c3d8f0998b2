"""CallableModule: a module that can be called, for a public function that has its module's name.

May import the standard library. Imported by explain.py, stats.py and verify.py, each of which makes itself one, so that
`torch_flashbackend.stats` may be the module or the function, whichever was imported first.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

__all__ = ["CallableModule"]


class CallableModule(ModuleType):
    """A subclass has a `__call__`. Pickled by name, as functions are: so it can be sent to another process."""

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)
