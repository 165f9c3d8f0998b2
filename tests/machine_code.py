"""What a kernel for sm_90a is made of, read from its binary: a disassembler takes as long as the compiler.

An instruction has 16 bytes; its lowest 12 bits are the operation, and the one that changes the number of registers has
that number 32 bits up. The codes were seen in nvdisasm's output, with which
``test_machine_code.py`` compares them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

OPERATIONS = {
    0x9F0: "HGMMA",  # products of a warpgroup
    0x5B4: "UTMALDG",  # loads, stores and prefetches through tensor maps
    0x3B5: "UTMASTG",
    0x5B8: "UTMAPF",
    0x9C8: "USETMAXREG",
}


class MachineCode(NamedTuple):
    """operations: names of those of ``OPERATIONS`` that occur. released, claimed: registers of a thread, one number for
    each instruction that says how many a warpgroup keeps or wants.
    """

    operations: set[str]
    released: list[int]
    claimed: list[int]


def _text_sections(cubin: bytes) -> Iterator[bytes]:
    """The code of each function: sections ``.text.NAME`` of an ELF file of 64 bits."""
    assert cubin[:5] == b"\x7fELF\x02"
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + index * size) for index in range(count)]
    for name, _, _, _, offset, length in sections:
        start = sections[names][4] + name
        if cubin.startswith(b".text.", start):
            yield cubin[offset : offset + length]


def read(cubin: bytes) -> MachineCode:
    """All functions of a binary together."""
    found = MachineCode(set(), [], [])
    for text in _text_sections(cubin):
        for low, high in struct.iter_unpack("<QQ", text):
            name = OPERATIONS.get(low & 0xFFF)
            if name is None:
                continue
            found.operations.add(name)
            if name == "USETMAXREG":
                kind = {5: found.released, 6: found.claimed}[high >> 8 & 0xF]
                kind.append(low >> 32 & 0xFFFF)
    assert found.operations, "no known instruction in this binary"
    return found
