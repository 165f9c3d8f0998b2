"""What `import torch` calls: the entry point of the group torch.backends.

May import the standard library only, at the top; called by torch near the end of its own import, in every process of
every program that has this package installed. So it reads one environment variable and, unless that is set, does
nothing; and it never raises, because torch would then fail to import.
"""

from __future__ import annotations

import os

__all__ = ["autoload"]

VARIABLE = "TORCH_FLASHBACKEND"
ON = frozenset({"1", "true", "on"})
OFF = frozenset({"", "0", "false", "off"})


def autoload() -> None:
    """Enable the plugin if TORCH_FLASHBACKEND is "1", "true" or "on" (any case); "", "0", "false", "off": do nothing.

    Any other value, and any failure, is a RuntimeWarning, and torch runs as if the plugin were not installed.
    """
    setting = os.environ.get(VARIABLE, "").strip()
    if setting.lower() in OFF:
        return
    try:
        if setting.lower() in ON:
            from . import override

            override.enable()
        else:
            _warn(f"{VARIABLE}={setting!r} is not understood and is taken as off (known: 1, true, on; 0, false, off)")
    except Exception as error:
        _warn(
            f"{VARIABLE}={setting} was set, but the plugin could not start and is off: {type(error).__name__}: {error}"
        )


def _warn(message: str) -> None:
    import warnings

    try:
        warnings.warn(f"torch_flashbackend: {message}", RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        # Warnings are errors in this program. They must not keep torch from being imported.
        import sys

        print(f"torch_flashbackend: {message}", file=sys.stderr)
