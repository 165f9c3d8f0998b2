"""The tag in torch.compile's caches on disk that keeps programs compiled with the plugin from those without.

May import torch and batch_invariance.py; it runs while torch itself is still being imported. Imported by override.py.
The tag, torch.compiler.config.cache_key_tag, is part of the keys of the AOTAutograd and FX graph caches. Their keys
hold the graph before it is traced through our hooks, so that without the tag a process with the plugin off would be
served graphs made with it on. The version is in the tag because the routing rules are in the graphs, and batch
invariance because it is one of them.

Private interface: the entry of that setting in `torch.compiler.config._config`. In newer versions of torch (2.13, not
2.11) what a program assigns to a setting holds for its thread alone, and the plugin is on in all of them. If the entry
goes, the tag is assigned in the ordinary way, and threads other than the one that switches the plugin on find what
was compiled without it.
"""

from __future__ import annotations

from typing import Any

import torch

from .batch_invariance import is_batch_invariant

__all__ = ["CacheTag"]


class CacheTag:
    """cache_key_tag with our name in it, behind whatever the user has put there, in every thread, until `restore`."""

    _ours = ""

    def set(self) -> None:
        """Put our part in, as it is now."""
        from . import __version__

        self._ours = f"torch_flashbackend-{__version__}" + "-batch-invariant" * is_batch_invariant()
        entry = _entry()
        if entry is None:
            torch.compiler.config.cache_key_tag = self.with_ours(torch.compiler.config.cache_key_tag)
            return
        for name in ("default", "env_value_default"):
            setattr(entry, name, self.with_ours(getattr(entry, name)))
        if hasattr(entry.user_override, "get"):
            entry.user_override = _Tagged(entry.user_override, self)
        else:
            entry.user_override = self.with_ours(entry.user_override)

    def restore(self) -> None:
        """Take it out again."""
        entry = _entry()
        if entry is None:
            torch.compiler.config.cache_key_tag = self.without_ours(torch.compiler.config.cache_key_tag)
            return
        for name in ("default", "env_value_default"):
            setattr(entry, name, self.without_ours(getattr(entry, name)))
        if isinstance(entry.user_override, _Tagged):
            entry.user_override = entry.user_override.inner
        else:
            entry.user_override = self.without_ours(entry.user_override)

    def with_ours(self, value: Any) -> Any:
        """A tag with our part at its end. What is no string, such as torch's sign for "not set", stays as it is."""
        if not isinstance(value, str):
            return value
        theirs = self.without_ours(value)
        return f"{theirs}+{self._ours}" if theirs else self._ours

    def without_ours(self, value: Any) -> Any:
        """The user may have changed the tag since: our part is taken out, and the rest left."""
        if not isinstance(value, str):
            return value
        return "+".join(part for part in value.split("+") if part != self._ours)


class _Tagged:
    """The context variable of what each thread has assigned, read with our part in it."""

    def __init__(self, inner: Any, tag: CacheTag) -> None:
        self.inner = inner
        self._tag = tag

    def get(self, *default: Any) -> Any:
        return self._tag.with_ours(self.inner.get(*default))

    def set(self, value: Any) -> Any:
        return self.inner.set(self._tag.without_ours(value))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _entry() -> Any:
    """Where torch keeps the setting, None if that is not where it was."""
    entry = getattr(torch.compiler.config, "_config", {}).get("cache_key_tag")
    known = all(hasattr(entry, name) for name in ("default", "env_value_default", "user_override"))
    return entry if known else None
