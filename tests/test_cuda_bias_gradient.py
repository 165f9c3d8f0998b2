"""The Hopper kernel for a bias's gradient: what the compiler makes of it, what is launched for a call, who calls it."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from types import SimpleNamespace

import pytest
import torch
from test_cuda_kernels_compile import SHARED_MEMORY, problems
from test_cuda_launch import OnDevice
from test_nvrtc import FakeDriver, install_fake_driver

from torch_flashbackend import driver, nvrtc, ops
from torch_flashbackend.kernels import KernelUnavailable
from torch_flashbackend.kernels.cuda import bias_gradient, forward, sources, tiles
from torch_flashbackend.plans import Recent

import machine_code
from sampling import cover

BFLOAT, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32
HEAD_DIMS = [*((size, size) for size in range(16, 257, 16)), (192, 128), (64, 128), (128, 64)]
NUM_SMS = 10

# ---------------------------------------------------------------------------------------------------------- compilation


def specialisations():
    """Each head dimension and tile, and each combination of types and parts of logsumexp."""
    kinds = list(itertools.product((BFLOAT, HALF), (False, True), (True, False)))
    found = [
        bias_gradient.specialise(*dims, dtype, SINGLE if is_float32 else dtype, has_low)
        for dims, (dtype, is_float32, has_low) in itertools.product(HEAD_DIMS[::-1], kinds)
    ]
    return cover(
        found,
        lambda spec: (spec.head_dim, spec.head_dim_v),
        lambda spec: spec.tile,
        lambda spec: (spec.is_bf16, spec.bias_is_float32, spec.has_low),
    )


def name_of(spec):
    kind = "bf16" if spec.is_bf16 else "f16", "f32" if spec.bias_is_float32 else "same", "low" if spec.has_low else ""
    return "-".join(filter(None, [f"{spec.head_dim}-{spec.head_dim_v}", *kind]))


@pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"no compiler: {nvrtc.unavailable()}")
@pytest.mark.parametrize("spec", specialisations(), ids=name_of)
def test_specialisation_has_no_spills_and_no_serialised_products(spec):
    binary = nvrtc.compile(spec.source)
    assert problems(binary.log) == []
    assert spec.shared_bytes <= SHARED_MEMORY
    code = machine_code.read(binary.cubin)
    assert code.operations >= {"HGMMA", "UTMALDG", "UTMASTG", "UTMAPF"}
    (released,), (claimed,) = code.released, code.claimed
    assert released + 2 * claimed == 504, code


def test_the_sample_has_every_combination_of_options():
    chosen = specialisations()
    assert len({(s.is_bf16, s.bias_is_float32, s.has_low) for s in chosen}) == 8
    assert {s.tile for s in chosen} >= {tiles.choose_bias(*dims, size) for dims in HEAD_DIMS for size in (2, 4)}


# --------------------------------------------------------------------------------------------------------------- launch


class Tensor(OnDevice):
    """With what this launcher asks for besides."""

    def dim(self):
        return self._tensor.dim()

    def is_contiguous(self):
        return self._tensor.is_contiguous()


@pytest.fixture
def cuda(monkeypatch):
    """A driver and a compiler that answer without doing anything; `launches`: what each launch was given."""
    fake = FakeDriver()
    fake.compiled, fake.launches, fake.encoded = [], [], []
    install_fake_driver(monkeypatch, fake)
    monkeypatch.setattr(forward, "_device", lambda index: ((9, 0), NUM_SMS))
    monkeypatch.setattr(bias_gradient, "_plans", {})

    def compile(source, **_):
        fake.compiled.append(source)
        return nvrtc.Binary(source.key("13.0"), b"\x7fELF", "")

    def launch(config, function, arguments, index, stream):
        *maps, params = (ctypes.c_void_p * 7).from_address(arguments.value)
        addresses = [ctypes.c_uint64.from_address(address).value for address in maps]
        size = ctypes.sizeof(bias_gradient.BiasParams)
        found = bias_gradient.BiasParams.from_buffer_copy(ctypes.string_at(params, size))
        fake.launches.append((list(config.grid), list(config.block), config.shared_bytes, addresses, found))

    encode = driver._encode

    def encoded(dtype, shape, stride, rows, *rest):
        fake.encoded.append((dtype, tuple(shape), tuple(stride), rows))
        return encode(dtype, shape, stride, rows, *rest)

    monkeypatch.setattr(nvrtc, "compile", compile)
    monkeypatch.setattr(driver, "launch", launch)
    monkeypatch.setattr(driver, "_encode", encoded)
    return fake


def tensors(bias_shape=(1, 4, 300, 520), bias_dtype=BFLOAT, kv_heads=2, head_dim=72, dtype=BFLOAT, low=True, bias=None):
    """(grad_out, query, key, value, bias, logsumexp), delta and grad_bias of two batches and four heads."""

    def make(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, keys = bias_shape[2] if bias_shape[2] > 1 else 300, bias_shape[3]
    query, key = (2, 4, rows, head_dim), (2, kv_heads, keys, head_dim)
    bias = make(*bias_shape, dtype=bias_dtype) if bias is None else bias
    statistics = make(2, 2, 4, rows, dtype=SINGLE) if low else make(2, 4, rows + 20, dtype=SINGLE)
    listed = [make(*query), make(*query), make(*key), make(*key), bias, statistics, make(2, 4, 384, dtype=SINGLE),
              make(*bias_shape, dtype=bias_dtype)]  # fmt: skip
    return [Tensor(tensor, (index + 1) << 20) for index, tensor in enumerate(listed)]


def run(listed, scale=0.25):
    bias_gradient.plan(*listed[:6], scale)(*listed)


@pytest.mark.parametrize("shape", [(1, 4), (2, 4), (1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("bias_dtype", [BFLOAT, SINGLE], ids=str)
def test_parameters_of_the_launch(cuda, shape, bias_dtype):
    listed = tensors((*shape, 300, 520), bias_dtype)
    grad_out, query, key, value, bias, logsumexp, delta, grad = listed
    run(listed)
    ((grid, block, shared_bytes, addresses, params),) = cuda.launches
    k_tiles = 5 if bias_dtype == BFLOAT else 6  # of 128 or 96 keys
    count = shape[0] * shape[1] * 3 * k_tiles
    assert (grid, block) == ([min(NUM_SMS, count), 1, 1], [384, 1, 1])
    assert addresses == [t.data_ptr() for t in (query, key, value, grad_out, bias, grad)]
    assert (params.logsumexp, params.delta) == (logsumexp.data_ptr(), delta.data_ptr())
    assert params.logsumexp_low == logsumexp.data_ptr() + 4 * 2 * 4 * 300
    assert (params.logsumexp_pitch, params.delta_pitch) == (300, 384)
    assert (params.q_tiles, params.k_tiles, params.num_tiles, params.q_tiles_per_group) == (3, k_tiles, count, 3)
    assert (params.num_heads, params.group_size, params.bias_heads, params.seqlen_q) == (4, 2, shape[1], 300)
    # The heads of all batches that share a tile, from the tile's first one on.
    every = torch.arange(8).view(2, 4)
    for batch, head in itertools.product(range(shape[0]), range(shape[1])):
        sharing = every[[batch] if shape[0] == 2 else [0, 1]][:, [head] if shape[1] == 4 else slice(None)]
        first = batch * 4 + head  # as the kernel has it
        assert sharing.flatten().tolist() == [first + i * params.item_step for i in range(params.items)]
    spec = bias_gradient.specialise(72, 72, BFLOAT, bias_dtype, True)
    assert cuda.compiled[-1].defines == spec.defines
    assert shared_bytes == spec.shared_bytes
    assert (spec.head_dim, cuda.compiled[-1].defines["BIAS_F32"]) == (80, bias_dtype == SINGLE)
    # float32 as pairs of 16-bit columns
    times = 2 if bias_dtype == SINGLE else 1
    dense = (shape[1] * 300 * 520 * times, 300 * 520 * times, 520 * times, 1)
    assert cuda.encoded[4:] == [(BFLOAT, (*shape, 300, 520 * times), dense, 64)] * 2


def test_a_logsumexp_in_one_part(cuda):
    run(tensors(low=False))
    params = cuda.launches[0][4]
    assert (params.logsumexp_pitch, params.logsumexp_low) == (320, None)
    assert not cuda.compiled[-1].defines["HAS_LOW"]


def test_an_expanded_bias_is_walked_as_what_it_is(cuda):
    expanded = torch.empty(1, 1, 300, 520, dtype=BFLOAT, device="meta").expand(2, 4, -1, -1)
    run(tensors((2, 4, 300, 520), bias=expanded))
    params = cuda.launches[0][4]
    assert (params.batch_step, params.head_step, params.items, params.bias_heads) == (0, 0, 1, 4)
    assert [shape for _, shape, _, _ in cuda.encoded[4:]] == [(1, 1, 300, 520), (2, 4, 300, 520)]
    run(tensors())
    params = cuda.launches[1][4]
    assert (params.batch_step, params.head_step) == (1, 1)


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("batches and heads alone", {"bias_shape": (1, 4, 1, 520)}),
        ("batches and heads alone", {"bias_shape": (1, 4, 300, 1)}),
        ("cannot walk the bias", {"bias_shape": (1, 4, 300, 500)}),
        ("cannot walk the bias", {"bias": torch.empty(1, 4, 520, 300, dtype=BFLOAT, device="meta").mT}),
        ("cannot walk the bias", {"bias": torch.empty(1, 4, 300, 521, dtype=BFLOAT, device="meta")[..., :520]}),
        ("cannot walk the bias", {"bias": torch.empty(4, 1, 520, dtype=BFLOAT, device="meta").expand(1, 4, 300, 520)}),
        ("no head_dim 264", {"head_dim": 264}),
        ("no head_dim 68", {"head_dim": 68}),
        ("float32", {"dtype": SINGLE, "bias_dtype": SINGLE}),
        ("gradient of a bias of torch.float16", {"bias_dtype": HALF}),
        ("most of the GPU without work", {"bias_shape": (1, 1, 80, 80)}),
    ],
)  # fmt: skip
def test_what_is_refused(cuda, what, options):
    with pytest.raises(KernelUnavailable, match=what):
        run(tensors(**options))
    assert not cuda.launches and not cuda.compiled


def test_another_gpu_is_refused(cuda, monkeypatch):
    monkeypatch.setattr(forward, "_device", lambda index: ((10, 0), NUM_SMS))
    with pytest.raises(KernelUnavailable, match=r"compute capability 9\.0"):
        run(tensors())


# ---------------------------------------------------------------------------------------------------------------- tiles


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, 1), (2, 3, 5, 7, 3), (1, 4, 32, 32, 11), (3, 1, 12, 2, 11), (1, 2, 4, 9, 4)]
)
def test_every_tile_has_one_number(sizes, tmp_path):
    """``tile_at`` of the kernel, compiled for this machine."""
    compiler = next((path for path in ("g++", "clang++") if _exists(path)), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    batches, heads, q_tiles, k_tiles, per_group = sizes
    text = (sources.FOLDER / "bias_gradient.cu").read_text()
    part = text[text.index("struct Tile {") : text.index("// The loading thread.")]
    program = f"""
#include <algorithm>
#include <cstdio>
using std::min;
#define __device__
#define __forceinline__ inline
constexpr int BLOCK_M = 128;
struct BiasParams {{ int q_tiles, k_tiles, q_tiles_per_group, bias_heads, num_heads; }};
{part}
int main() {{
  BiasParams params{{{q_tiles}, {k_tiles}, {per_group}, {heads}, 8}};
  for (int i = 0; i < {batches * heads * q_tiles * k_tiles}; ++i) {{
    Tile t = tile_at(i, params);
    std::printf("%d %d %d %d %d\\n", t.bias_batch, t.bias_head, t.row, t.k_tile, t.first_head);
  }}
}}
"""
    (tmp_path / "tiles.cpp").write_text(program)
    subprocess.run([compiler, "-std=c++17", "-o", tmp_path / "tiles", tmp_path / "tiles.cpp"], check=True)
    lines = subprocess.run([tmp_path / "tiles"], capture_output=True, text=True, check=True).stdout.splitlines()
    found = [tuple(map(int, line.split())) for line in lines]
    wanted = itertools.product(range(batches), range(heads), range(0, q_tiles * 128, 128), range(k_tiles))
    assert sorted(found) == sorted((*tile, tile[0] * 8 + tile[1]) for tile in wanted)


def _exists(program: str) -> bool:
    return subprocess.run(["which", program], capture_output=True).returncode == 0


# ------------------------------------------------------------------------------------------------------------- operator


@pytest.mark.parametrize("available", [True, False])
def test_the_backward_takes_it_where_it_can(monkeypatch, available):
    """And Triton's kernels compute the mask's gradient where not; both are repeated."""
    asked = []

    def triton(*arguments):
        *_, needs_mask, _ = arguments

        def call(query, key, value, out, logsumexp, grad_out, *_, bias_gradient=None):
            asked.append(needs_mask)
            if bias_gradient is None:
                return torch.ones(1, 2, 8, 8)
            return bias_gradient(grad_out, query, key, value, mask, logsumexp, "delta")

        return call

    def plan(*arguments):
        if not available:
            raise KernelUnavailable("none")
        return lambda *given: given[-1].fill_(2.0)

    monkeypatch.setattr(ops, "_kernels", lambda: SimpleNamespace(plan_of_backward=triton))
    monkeypatch.setattr(ops, "_backwards", Recent())
    monkeypatch.setattr(ops, "_hopper_bias", lambda: SimpleNamespace(aligned=lambda *_: True, plan=plan))
    query, mask = torch.randn(1, 2, 8, 16, dtype=BFLOAT), torch.zeros(1, 2, 8, 8)
    logsumexp = torch.zeros(2, 1, 2, 8)
    for is_causal, dropout_p in ((False, 0.0), (True, 0.0), (False, 0.5)):
        taken = available and not is_causal and not dropout_p
        for _ in range(2):
            grads = ops._gradients_cuda(query, query, query, query, mask, query, logsumexp, None, dropout_p, is_causal,
                                        1.0, [True] * 4)  # fmt: skip
            assert asked.pop() is not taken
            assert grads[3].unique().tolist() == [2.0 if taken else 1.0]
