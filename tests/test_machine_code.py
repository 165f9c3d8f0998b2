"""That ``machine_code.read`` finds in a binary what the disassembler that Triton brings finds there."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
import torch

from torch_flashbackend import nvrtc
from torch_flashbackend.kernels.cuda import backward, bias_gradient, forward, tiles

import machine_code

BFLOAT = torch.bfloat16
LONG = 1 << 20  # queries


def disassembler() -> Path | None:
    spec = importlib.util.find_spec("triton")
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm" if spec and spec.origin else None
    return path if path is not None and path.exists() else None


KERNELS = {
    "forward": forward.Specialisation(64, 64, True, True, False, tiles.variants(64, 64, True)[0]),
    "backward with three roles": backward.specialise(256, 256, BFLOAT, False, False, LONG),
    "bias": bias_gradient.specialise(64, 64, BFLOAT, BFLOAT, True),
}


@pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"no compiler: {nvrtc.unavailable()}")
@pytest.mark.skipif(disassembler() is None, reason="Triton brings no disassembler")
@pytest.mark.parametrize("name", KERNELS)
def test_machine_code_is_read_as_the_disassembler_reads_it(name, tmp_path):
    binary = nvrtc.compile(KERNELS[name].source)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(binary.cubin)
    text = subprocess.run([disassembler(), str(cubin)], capture_output=True, text=True, check=True).stdout
    code = machine_code.read(binary.cubin)
    assert code.operations == {name for name in machine_code.OPERATIONS.values() if re.search(rf"\b{name}\b", text)}
    changes = re.findall(r"USETMAXREG\.(DEALLOC|TRY_ALLOC)\S* (?:UP\d+, )?(0x[0-9a-f]+)", text)
    assert sorted(code.released) == sorted(int(count, 16) for kind, count in changes if kind == "DEALLOC")
    assert sorted(code.claimed) == sorted(int(count, 16) for kind, count in changes if kind == "TRY_ALLOC")
    assert changes
