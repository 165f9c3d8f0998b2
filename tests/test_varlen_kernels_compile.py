"""The variable-length kernels compiled ahead of time for every kind of GPU, with none in the machine."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton
from test_kernels_compile import TARGETS, TENSOR_CORES, assembly, check

from torch_flashbackend.kernels.triton import varlen

KERNELS = ("varlen_forward", "varlen_backward_query", "varlen_backward_key_value")
OPTIONS = {
    "full": {},
    "causal": {"window_right": 0},
    "window": {"window_left": 100, "window_right": 0},
    "softcap": {"softcap": 20.0},
    "alibi": {"window_right": 0},
}


def compiled(target, kernel: str, options: str, head_dim: int, dtype=torch.bfloat16, pad=0, head_dim_v=None, **extras):
    """One kernel for two sequences, 256 rows in all, and two heads. pad: elements after each row."""

    def tensor(columns: int) -> torch.Tensor:
        return torch.empty(256, 2, columns + pad, dtype=dtype)[..., :columns]

    lengths = torch.zeros(3, dtype=torch.int32)
    slopes = torch.zeros(2) if options == "alibi" else None
    made = varlen.compile_for(
        target, tensor(head_dim), tensor(head_dim), tensor(head_dim_v or head_dim), only=kernel,
        options=varlen.Options(scale=0.1, **OPTIONS[options]), extras=varlen.Extras(lengths, lengths, None, slopes),
        backward=kernel != "varlen_forward",
    )  # fmt: skip
    assert list(made) == [kernel]
    return made[kernel]


def every_target() -> list:
    """Every family with every kernel; options and head dimensions take turns."""
    found = []
    for number, name in enumerate(("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942")):
        for position, kernel in enumerate(KERNELS):
            turn = number + position
            found.append((name, kernel, list(OPTIONS)[turn % 5], (64, 128, 256)[turn % 3], torch.bfloat16))
            if (number + position) % 4 == 0:
                found.append((name, kernel, list(OPTIONS)[(turn + 2) % 5], (128, 256, 64)[turn % 3], torch.float32))
    return found


@pytest.mark.parametrize(("name", "kernel", "options", "head_dim", "dtype"), every_target(), ids=str)
def test_every_target(name, kernel, options, head_dim, dtype):
    result = compiled(TARGETS[name], kernel, options, head_dim, dtype)
    check(result, TARGETS[name])
    assert TENSOR_CORES.search(assembly(result))


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "gfx942"])
def test_the_schedule(name):
    result = compiled(TARGETS[name], "varlen_schedule", "causal", 64)
    assert result.metadata.shared < 1024


@pytest.mark.parametrize("kernel", KERNELS)
def test_unaligned_tensors_and_odd_head_dims(kernel):
    check(compiled(TARGETS["sm_90"], kernel, "causal", 33, pad=1, head_dim_v=40), TARGETS["sm_90"])


def loops(kernel) -> list[list[str]]:
    """The innermost loops of sm_90 machine code that multiply matrices, in the order of the source."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton has no cuobjdump")
    return _loops(_disassembled(tool, kernel.asm["cubin"]))


def _disassembled(tool: Path, cubin: bytes) -> list[tuple[int, str]]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    matches = re.finditer(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(.*?);", text, re.MULTILINE)
    return [(int(match[1], 16), match[2]) for match in matches]


def _loops(code: list[tuple[int, str]]) -> list[list[str]]:
    spans = []
    for address, instruction in code:
        jump = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", instruction)
        if jump and int(jump[1], 16) < address:
            spans.append((int(jump[1], 16), address))
    bodies = []
    for first, last in sorted(spans):
        if any((first, last) != (a, b) and first <= a and b <= last for a, b in spans):
            continue
        body = [instruction for address, instruction in code if first <= address <= last]
        if any("GMMA" in instruction for instruction in body):
            bodies.append(body)
    return bodies


@pytest.mark.parametrize("options", ["causal", "window"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_loops_over_whole_tiles_do_not_spill(kernel, head_dim, options):
    """A pair of accesses to local memory is allowed: a counter. What computes once more after a NaN may spill."""
    found = loops(compiled(TARGETS["sm_90"], kernel, options, head_dim))
    assert len(found) >= 2
    spilled = [instruction for instruction in found[0] if re.match(r"(@!?U?P\d+ )?(LDL|STL)", instruction)]
    assert len(spilled) <= 2, spilled
