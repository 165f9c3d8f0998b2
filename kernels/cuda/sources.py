"""What the Hopper kernels are compiled from: a file of this folder, its headers, and the instructions that it needs.

May import ``nvrtc.py`` and ``instructions.py``. Imported by every module here that has a specialisation.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ... import nvrtc
from .. import KernelUnavailable

ARCHITECTURE = "sm_90a"
FOLDER = Path(__file__).parent


_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"', re.MULTILINE)


@functools.cache
def _text(file: str) -> str:
    return (FOLDER / file).read_text()


@functools.cache
def _headers(file: str) -> dict[str, str]:
    """The headers in this folder that a file may include, directly or not, by name: no others change its binaries."""
    found: dict[str, str] = {}
    waiting = [file]
    while waiting:
        for name in _INCLUDE.findall(_text(waiting.pop())):
            if name not in found and (FOLDER / name).exists():
                found[name] = _text(name)
                waiting.append(name)
    return found


def source(
    entry: str, file: str, defines: dict[str, int], columns: Iterable[int] = (), is_bf16: bool = False
) -> nvrtc.Source:
    """What to compile for the kernels of a file, of which `entry` is named in errors.

    columns: of the products of a warpgroup (wgmma) in it; is_bf16: of their operands, else they are float16.
    """
    headers = _headers(file)
    if columns:
        from . import instructions

        header = instructions.header(columns, "bf16" if is_bf16 else "f16")
        headers = headers | {instructions.HEADER_NAME: header}
    return nvrtc.Source(entry, _text(file), headers, defines, ARCHITECTURE)


# By specialisation: a new shape asks for one that is there, most of the time, and reading and hashing what it was
# compiled from takes 0.2 ms.
_binaries: dict[tuple[type, Any], nvrtc.Binary] = {}


def compiled(specialisation: Any) -> nvrtc.Binary:
    """The binary of a specialisation, hashable, of which `source` is what to compile.

    Needs NVRTC and no GPU; raises KernelUnavailable.
    """
    key = type(specialisation), specialisation  # of two kinds that are tuples, some might be equal
    found = _binaries.get(key)
    if found is None:
        try:
            found = _binaries[key] = nvrtc.compile(specialisation.source)
        except (nvrtc.CompileError, OSError) as error:
            raise KernelUnavailable(str(error)) from error
    return found
