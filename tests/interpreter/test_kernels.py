"""Every Triton kernel, run by Triton's interpreter on CPU tensors and judged against float64.

The interpreter executes the source that a GPU compiles, so it shows that the arithmetic, the bounds and the addresses
are right; what a compiler makes of them is for tests/test_kernels_compile.py and tests/gpu. Its tl.dot is wrong for
bfloat16 (Triton 3.6 to 3.8): float16 and float32 only. Half types in aligned memory go through tensor maps, others not.

Triton looks at TRITON_INTERPRET when kernels are made, so these tests need their own process: `make test-interpreter`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import random

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from triton._C.libtriton import ir
from triton.runtime import interpreter

from torch_flashbackend import ops, plans, reference
from torch_flashbackend.kernels.triton import attention, launch, stored_plan
from torch_flashbackend.kernels.triton.tiles import Tile

from common import (
    LAYOUTS,
    Call,
    attention_float64,
    check,
    error_of,
    expect,
    gradient_for,
    mask_of_kind,
    random_call,
    simple_call,
    tensor_in_layout,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, about infinities that are meant
HALF, SINGLE = torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
INF, NAN = math.inf, math.nan
B, H, SQ, SK, D = 2, 2, 20, 36, 16
SEED = torch.tensor([0x1234_5678_9ABC_DEF1])


def sample(**options) -> Call:
    """A call of the sizes above."""
    sizes = {"batch": B, "heads": H, "seqlen_q": SQ, "seqlen_k": SK, "head_dim": D}
    return simple_call(**sizes | {"device": "cpu"} | options)


def random_mask(kind: str, *shape: int, dtype: torch.dtype = SINGLE, seed: int = 3) -> Tensor:
    """kind: "bool", "float32" or "query" (a float of the query's dtype)."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "bool":
        return torch.rand(shape, generator=generator) < 0.7
    return torch.randn(shape, generator=generator).to(SINGLE if kind == "float32" else dtype)


def rank_4(mask: Tensor | None) -> Tensor | None:
    return mask if mask is None else mask[(None,) * (4 - mask.dim())]


@dataclasses.dataclass
class Ran:
    """What the kernels gave: `results` by the names that `common` uses, and the raw logsumexp."""

    results: dict[str, Tensor]
    logsumexp: Tensor


def run(
    call: Call, grad_out: Tensor | None = None, *, dropout_p: float = 0.0, seed: Tensor = SEED, tf32=False, new=None
) -> Ran:
    """Forward and, with grad_out, backward. `new(shape, like)` makes the tensors that the kernels must fill."""
    query, key, value, mask, scale = call.query, call.key, call.value, rank_4(call.attn_mask), call.softmax_scale
    new = new or (lambda shape, like: torch.full(shape, NAN, dtype=like.dtype))
    float_mask = mask is not None and mask.is_floating_point()
    out = new((*query.shape[:3], value.size(3)), query)
    logsumexp = torch.full((2,) * float_mask + query.shape[:3], NAN)
    options = dropout_p, call.is_causal, scale
    seed = seed if dropout_p else None
    attention.forward(query, key, value, mask, seed, *options, out, logsumexp, tf32)
    results = {"out": out}
    if grad_out is not None:
        grads = [new(t.shape, t) for t in (query, key, value)]
        grad_mask = attention.backward(
            grad_out, query, key, value, mask, out, logsumexp, seed, *options, *grads, call.mask_grad, tf32
        )
        results |= dict(zip(("query", "key", "value"), grads))
        assert (grad_mask is not None) == call.mask_grad
        if grad_mask is not None:
            assert grad_mask.shape == mask.shape and grad_mask.dtype == mask.dtype and grad_mask.is_contiguous()
            results["attn_mask"] = grad_mask.view(call.attn_mask.shape)
    return Ran(results, logsumexp)


def run_and_check(call: Call, **options) -> dict[str, Tensor]:
    """Forward and backward within the tolerance of `common`; the results by name."""
    grad_out = gradient_for(call)
    results = run(call, grad_out, **options).results
    check(results, expect(call, grad_out, tf32=options.get("tf32", False)), None, call.describe())
    return results


def use_tiles(monkeypatch, block_m: int, block_n: int) -> None:
    """Small blocks, so that small tensors have many of them."""
    monkeypatch.setattr(attention, "choose", lambda *_: Tile(block_m, block_n, 4, 2))
    attention._plans.clear()


def use_multiprocessors(monkeypatch, count: int) -> None:
    """As if the GPU had `count` multiprocessors: this decides how many programs share one tile of a mask's gradient."""
    monkeypatch.setattr(attention, "_device_facts", lambda _: ("sm_90", count, True))
    attention._plans.clear()


@pytest.fixture(autouse=True)
def _plans_of_this_test():
    yield
    attention._plans.clear()


# ----------------------------------------------------------------------------------------------------------------- TF32


@pytest.fixture
def tensor_cores(monkeypatch):
    """Products as tensor cores make them where TF32 is allowed: of each operand the last 13 bits do not count."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def cut(operand):
        bits = np.ascontiguousarray(operand.data).view(np.int32)
        return interpreter.TensorHandle((bits & -0x2000).view(np.float32), operand.dtype)

    def create(self, left, right, accumulator, precision, *rest):
        assert precision == ir.INPUT_PRECISION.TF32
        return create_dot(self, cut(left), cut(right), accumulator, precision, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create)


@pytest.mark.parametrize("kind", ["dense", "causal", "float"])
def test_tf32_operands_in_registers_are_rounded_to_nearest(tensor_cores, kind):
    """With all of them cut off instead, errors of one sign add up to more than twice what rounding makes."""
    mask = random_mask("float32", B, H, 128, 128) if kind == "float" else None
    options = {"is_causal": kind == "causal", "attn_mask": mask, "mask_grad": kind == "float"}
    call = sample(seqlen_q=128, seqlen_k=128, head_dim=64, dtype=SINGLE, **options)
    run_and_check(call, tf32=True)


@pytest.mark.parametrize("kind", ["dense", "causal", "float32"])
def test_float32_rows_of_any_size(kind):
    """Rows from small to large, each of which is scaled for its float16 halves by itself, and scores of hundreds."""
    sizes = torch.logspace(-6, 6, 40)[:, None]
    mask = random_mask("float32", 1, 1, 40, 40) if kind == "float32" else None
    call = sample(batch=1, seqlen_q=40, seqlen_k=40, dtype=SINGLE, is_causal=kind == "causal", attn_mask=mask)
    call.query.mul_(30 / sizes)
    call.key.mul_(sizes)
    call.value.mul_(sizes.flip(0))
    run_and_check(call)


def test_float32_keys_that_are_hidden_may_be_of_any_size():
    mask = torch.ones(1, 1, 1, SK, dtype=torch.bool)
    mask[..., 7] = False
    call = sample(dtype=SINGLE, attn_mask=mask)
    call.key[..., 7, :] = 1e30
    call.value[..., 7, :] = 1e30
    run_and_check(call)


@pytest.fixture
def sums_of_32_rows(monkeypatch):
    """32 keys or queries are added up at a time, as they are 2**16 at a time in long sequences."""
    use_tiles(monkeypatch, 16, 16)
    monkeypatch.setattr(attention, "SUM_ROWS", 32)


@pytest.mark.parametrize(
    ("kind", "seqlen_q"),
    [("dense", 192), ("causal", 199), ("bool", 129), ("grouped", 130), ("row", 150), ("grouped row", 161)],
)
def test_long_sums_in_parts(sums_of_32_rows, kind, seqlen_q):
    mask = random_mask("bool", 1, H, seqlen_q, SK) if kind == "bool" else None
    if kind.endswith("row"):
        mask = random_mask("query", 1, H, 1, SK, dtype=HALF)
    options = {"attn_mask": mask, "mask_grad": kind.endswith("row"), "is_causal": kind == "causal"}
    options |= {"kv_heads": 1 if kind.startswith("grouped") else H}
    run_and_check(sample(batch=1, seqlen_q=seqlen_q, dtype=HALF, **options))


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("kind", ["dense", "causal", "few keys", "bool", "float32", "rising", "negative scale"])
def test_long_sums_over_keys_in_parts(sums_of_32_rows, kind, dtype):
    """Parts of which the last is short or full, rows that see a few or nothing, maxima that move between them."""
    seqlen_q, seqlen_k = (199, 170) if kind == "causal" else (40, 144 if kind == "few keys" else 203)
    mask = random_mask(kind, 1, H, seqlen_q, seqlen_k) if kind in ("bool", "float32") else None
    if kind == "bool":
        mask[..., 3, :] = False
        mask[..., 5, :150] = False
    options = {"is_causal": kind == "causal", "scale": -0.5 if kind == "negative scale" else None}
    call = sample(batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=dtype, attn_mask=mask, **options)
    if kind == "rising":
        call.key.mul_(torch.linspace(0.1, 8, seqlen_k)[:, None])
    run_and_check(call)


def cut_off_sums(monkeypatch) -> None:
    """Sums cut off after 12 bits show at 512 rows what tensor cores, with 24, show at millions."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def create(self, *arguments):
        total = create_dot(self, *arguments)
        bits = np.ascontiguousarray(total.data).view(np.int32)
        return interpreter.TensorHandle((bits & -0x1000).view(np.float32), total.dtype)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create)


def check_that_parts_lose_less(monkeypatch, call: Call, rows: int, names=("key", "value")) -> None:
    """Where sums are cut off, those of `rows` rows at a time are closer than the whole; the test has set the tiles."""
    grad_out = gradient_for(call)
    expected = expect(call, grad_out).values
    exact = run(call, grad_out).results
    cut_off_sums(monkeypatch)
    whole = run(call, grad_out).results
    monkeypatch.setattr(attention, "SUM_ROWS", rows)
    attention._plans.clear()
    parts = run(call, grad_out).results
    for name in names:
        errors = [error_of(results[name], expected[name]).norm for results in (exact, parts, whole)]
        assert errors[0] < errors[1] < errors[2] / 2, (name, errors)


def test_long_sums_in_parts_lose_less_where_sums_are_cut_off(monkeypatch):
    use_tiles(monkeypatch, 16, 16)
    check_that_parts_lose_less(monkeypatch, sample(batch=1, heads=1, seqlen_q=512, seqlen_k=16, dtype=HALF), 32)


def test_long_sums_over_keys_in_parts_lose_less_where_sums_are_cut_off(monkeypatch):
    """With values and gradients whose terms do not cancel, as a mean over millions of keys has them."""
    use_tiles(monkeypatch, 16, 16)
    call = sample(batch=1, heads=1, seqlen_q=16, seqlen_k=512, dtype=HALF)
    call.value.abs_()
    check_that_parts_lose_less(monkeypatch, call, 32, ("out",))


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000])
def test_rounding_to_tf32_keeps_nan(tensor_cores, bits):
    """A carry would make a number of a NaN with all bits set, which is the one that GPUs make."""
    call = sample(dtype=SINGLE)
    for name in ("query", "value"):
        tensor = getattr(call, name).clone()
        tensor.view(torch.int32)[0, 1, 3, 5] = bits
        results = run(dataclasses.replace(call, **{name: tensor}), gradient_for(call), tf32=True).results
        out = results["out"][0, 1]
        assert bool((out[3] if name == "query" else out[:, 5]).isnan().all())
        assert bool(results["key"][0, 1].isnan().all()) and not bool(results["key"][0, 0].isnan().any())


# ----------------------------------------------------------------------------------------------------------- dimensions


@DTYPES
@pytest.mark.parametrize("head_dim", [1, 16, 24, 64, 80, 128])
def test_head_dim(dtype, head_dim):
    run_and_check(sample(batch=1, seqlen_q=70, seqlen_k=70, head_dim=head_dim, dtype=dtype))


@DTYPES
def test_largest_head_dim(dtype):
    run_and_check(sample(batch=1, heads=1, seqlen_k=24, head_dim=512, dtype=dtype))


def wide_call(kind: str, batch: int = 1) -> Call:
    """Of a head_dim above 256, with tiles of 16 rows."""
    heads, kv_heads = (4, 2) if kind == "grouped" else (1, 1)
    sizes = {"odd": (37, 50), "causal": (40, 23), "causal long": (23, 40)}.get(kind, (33, 48))
    return sample(
        batch=batch, heads=heads, kv_heads=kv_heads, seqlen_q=sizes[0], seqlen_k=sizes[1], dtype=HALF,
        head_dim=328 if kind == "odd" else 512, is_causal=kind.startswith("causal"),
        scale=-0.05 if kind == "negative scale" else None,
    )  # fmt: skip


WIDE_KINDS = pytest.mark.parametrize("kind", ["dense", "causal", "causal long", "grouped", "odd", "negative scale"])


@WIDE_KINDS
def test_halves_of_wide_heads(monkeypatch, kind):
    """One half of the columns of a gradient, and of out, for each program, where P and dS may not be kept."""
    use_tiles(monkeypatch, 16, 16)
    monkeypatch.setattr(stored_plan, "SHARE_OF_QUERY", 0)
    launched = launch.launch_counts.copy()
    run_and_check(wide_call(kind))
    for name in ("attention_wide_key", "attention_wide_value"):
        assert launch.launch_counts[name] > launched.get(name, 0)


@WIDE_KINDS
def test_stored_probabilities_of_wide_heads(monkeypatch, kind):
    """P and dS of one kv head after the other in the same memory, three products from there."""
    use_tiles(monkeypatch, 16, 16)
    monkeypatch.setattr(stored_plan, "PROGRAMS", 0.1)
    launched = launch.launch_counts.copy()
    call = wide_call(kind, batch=2)
    run_and_check(call)
    chunks = 2 * call.key.size(1)
    for name, times in {"scores": 1, "query": 1, "key": 2}.items():
        name = f"attention_stored_{name}"
        assert launch.launch_counts[name] - launched.get(name, 0) == times * chunks


@WIDE_KINDS
def test_stored_probabilities_of_a_part_of_a_head(monkeypatch, kind):
    """Strips of keys, then strips of queries, where the tiles of one head would take too much memory."""
    use_tiles(monkeypatch, 16, 16)
    call = wide_call(kind, batch=2)
    heads, seqlen_q, seqlen_k, head_dim = *call.query.shape[1:3], *call.key.shape[2:]
    rows = math.ceil(seqlen_q / 16)
    tiles = sum(min(row + 1, rows) if call.is_causal else math.ceil(seqlen_k / 16) for row in range(rows))
    allowed = max((tiles - 1) // 2, rows) + 0.5
    share = allowed * 2 * 16**2 * heads / call.key.size(1) / (2 * heads * seqlen_q * head_dim)
    monkeypatch.setattr(stored_plan, "SHARE_OF_QUERY", share)
    launched = launch.launch_counts.copy()
    run_and_check(call)
    launches = {name: launch.launch_counts[name] - launched.get(name, 0) for name in launch.launch_counts}
    assert launches["attention_stored_key"] > 2 * 2 * call.key.size(1)
    assert launches["attention_stored_query"] >= 2 * call.key.size(1)
    parts = launches["attention_stored_key"] // 2 + launches["attention_stored_query"]
    assert launches["attention_stored_scores"] in (parts, parts - 2 * call.key.size(1))  # no query sees the last keys


@pytest.mark.parametrize(("at_a_time", "chunks"), [(1, 3), (2, 2), (3, 1)])
def test_stored_probabilities_of_several_heads(monkeypatch, at_a_time, chunks):
    """Of all heads, or of as many as fill the GPU; the last launches have fewer."""
    use_tiles(monkeypatch, 16, 16)
    monkeypatch.setattr(stored_plan, "PROGRAMS", 1.5 * at_a_time)  # of 4 multiprocessors, for 6 programs a head
    launched = launch.launch_counts["attention_stored_scores"]
    run_and_check(sample(batch=1, heads=3, seqlen_q=40, seqlen_k=40, head_dim=264, dtype=HALF, is_causal=True))
    assert launch.launch_counts["attention_stored_scores"] == launched + chunks


def test_gradients_of_wide_keys_alone(monkeypatch):
    """With stored probabilities dQ is a product like the others, and left out likewise."""
    use_tiles(monkeypatch, 16, 16)
    call = wide_call("causal")
    grad_out = gradient_for(call)
    whole, none = run(call, grad_out), [torch.full_like(t, NAN) for t in (call.key, call.value)]
    before = grad_out, call.query, call.key, call.value, None, whole.results["out"], whole.logsumexp, None
    attention.backward(*before, 0.0, True, call.softmax_scale, None, *none, False, False)
    for name, gradient in zip(("key", "value"), none):
        assert torch.equal(gradient, whole.results[name])


@DTYPES
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 32), (32, 64), (40, 72), (1, 80), (128, 16), (24, 1)])
def test_value_of_another_head_dim(dtype, head_dim, head_dim_v):
    run_and_check(sample(batch=1, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype))


@DTYPES
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 50), (50, 1)])
@pytest.mark.parametrize("kind", ["dense", "causal", "mask"])
def test_sequences_of_one(dtype, seqlen_q, seqlen_k, kind):
    call = sample(seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=dtype, is_causal=kind == "causal")
    if kind == "mask":
        call = dataclasses.replace(call, attn_mask=random_mask("float32", B, H, seqlen_q, seqlen_k), mask_grad=True)
    run_and_check(call)


LENGTHS = pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(48, 48), (45, 45), (33, 70), (70, 33), (16, 64), (64, 16)]
)


@LENGTHS
def test_lengths_that_tiles_do_or_do_not_divide(monkeypatch, seqlen_q, seqlen_k):
    use_tiles(monkeypatch, 16, 32)
    run_and_check(sample(batch=1, heads=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=HALF))
    run_and_check(sample(batch=1, heads=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=SINGLE))


@LENGTHS
@pytest.mark.parametrize(("block_m", "block_n"), [(16, 16), (16, 32), (32, 16)])
def test_causal_diagonal_through_tiles(monkeypatch, block_m, block_n, seqlen_q, seqlen_k):
    use_tiles(monkeypatch, block_m, block_n)
    dtype = HALF if block_m == 16 else SINGLE
    run_and_check(sample(batch=1, heads=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=dtype, is_causal=True))


@DTYPES
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(150, 150), (150, 40), (40, 150)])
def test_causal_is_aligned_at_the_top_left(dtype, seqlen_q, seqlen_k):
    call = sample(batch=1, heads=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=dtype, is_causal=True)
    # One key: its value, of which two halves keep 22 bits.
    first = run_and_check(call)["out"][:, :, 0]
    torch.testing.assert_close(first, call.value[:, :, 0], rtol=0 if dtype == HALF else 2**-22, atol=0)


@pytest.mark.parametrize("scale", [-0.7, -1e-3, 0.0, 1e-8, 3.0])
@pytest.mark.parametrize("kind", ["dense", "causal", "bool", "float32"])
def test_any_scale(scale, kind):
    dtype = HALF if kind in ("dense", "bool") else SINGLE
    mask = None
    if kind in ("bool", "float32"):
        mask = random_mask(kind, B, 1, SQ, SK)
        mask[:, :, 3] = False if kind == "bool" else -INF
    run_and_check(sample(dtype=dtype, scale=scale, attn_mask=mask, is_causal=kind == "causal"))


@DTYPES
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("kind", ["dense", "causal", "bool", "query"])
def test_grouped_queries(monkeypatch, dtype, kv_heads, kind):
    use_tiles(monkeypatch, 16, 32)
    mask = random_mask(kind, 1, 4, SQ, SK, dtype=dtype) if kind in ("bool", "query") else None
    options = {"attn_mask": mask, "mask_grad": kind == "query", "is_causal": kind == "causal"}
    run_and_check(sample(batch=1 if kv_heads == 2 else 2, heads=4, kv_heads=kv_heads, dtype=dtype, **options))


@pytest.mark.parametrize("seed", range(10))
def test_random_calls(seed):
    """Shapes, layouts, masks and scales drawn together, on the tiles that a GPU of compute capability 9.0 uses."""
    call = random_call(seed, "cpu", (HALF, SINGLE)[seed % 2], largest=80)
    run_and_check(dataclasses.replace(call, attn_mask=rank_4(call.attn_mask)))


# ---------------------------------------------------------------------------------------------------------------- masks

BROADCASTS = pytest.mark.parametrize(
    "which", list(itertools.product([False, True], repeat=4)), ids=lambda which: "".join("n1"[one] for one in which)
)


def broadcast(which) -> list[int]:
    return [1 if one else size for one, size in zip(which, (B, H, SQ, SK))]


@BROADCASTS
def test_bool_mask_broadcasts_over_any_dimensions(monkeypatch, which):
    use_tiles(monkeypatch, 16, 32)
    run_and_check(sample(dtype=HALF, attn_mask=random_mask("bool", *broadcast(which))))


@BROADCASTS
@pytest.mark.parametrize("multiprocessors", [0, 64])
def test_float_mask_and_its_gradient_broadcast_over_any_dimensions(monkeypatch, which, multiprocessors):
    use_tiles(monkeypatch, 16, 32) if multiprocessors else use_tiles(monkeypatch, 32, 16)
    use_multiprocessors(monkeypatch, multiprocessors)
    dtype = (HALF, SINGLE)[sum(which) % 2]
    mask = random_mask(("query", "float32")[which[0]], *broadcast(which), dtype=dtype)
    run_and_check(sample(dtype=dtype, attn_mask=mask, mask_grad=True))
    (plan,) = (plan for plan in attention._plans.values() if hasattr(plan, "key_sums"))
    assert (plan.key_sums is not None) == (which[2] and not which[3])
    if plan.key_sums is None:
        assert plan.splits == 1 if multiprocessors == 0 or not any(which) else plan.splits > 1


@pytest.mark.parametrize("shape", [(1, H, 1, SK), (B, 1, 1, SK)], ids=str)
def test_gradient_of_a_mask_with_one_row_alone(shape):
    """No key's gradient is computed on the way of which this one falls off."""
    call = sample(dtype=HALF, attn_mask=random_mask("float32", *shape), mask_grad=True)
    grad_out = gradient_for(call)
    ran = run(call, grad_out)
    alone = attention.backward(
        grad_out, call.query, call.key, call.value, call.attn_mask, ran.results["out"], ran.logsumexp, None, 0.0, False,
        call.softmax_scale, None, None, None, True, False,
    )  # fmt: skip
    check({"attn_mask": alone}, expect(call, grad_out))


@pytest.mark.parametrize("kind", ["hidden", "lowest"])
def test_gradient_of_a_listed_mask_with_one_row(monkeypatch, kind):
    monkeypatch.setattr(attention, "worth_listing", lambda *_: True)
    use_tiles(monkeypatch, 16, 16)
    mask = random_mask("float32", B, 1, 1, SK)
    mask[..., SK // 2 :] = -INF if kind == "hidden" else torch.finfo(SINGLE).min
    run_and_check(sample(dtype=HALF, attn_mask=mask, mask_grad=True))


def test_splits_that_do_not_divide_the_work(monkeypatch):
    use_tiles(monkeypatch, 16, 16)
    use_multiprocessors(monkeypatch, 5)
    run_and_check(sample(dtype=SINGLE, attn_mask=random_mask("float32", 1, 1, 1, 1), mask_grad=True))
    (plan,) = (plan for plan in attention._plans.values() if hasattr(plan, "splits"))
    assert plan.splits == 10  # of 2 * 2 * 2 * 3 tiles


@DTYPES
@pytest.mark.parametrize("kind", ["float32", "query"])
def test_gradient_of_a_mask_on_the_usual_tiles(dtype, kind):
    mask = random_mask(kind, 1, H, 70, 1, dtype=dtype)
    run_and_check(sample(seqlen_q=70, seqlen_k=70, dtype=dtype, attn_mask=mask, mask_grad=True))


@DTYPES
@pytest.mark.parametrize("kind", ["bool", "float32", "query"])
@pytest.mark.parametrize("per_key", [False, True], ids=["per query", "per key"])
def test_row_that_sees_no_key_gives_zeros(dtype, kind, per_key):
    if per_key:
        mask = random_mask(kind, B, H, 1, SK, dtype=dtype)
        mask[1] = False if kind == "bool" else -INF
        dead = (1, slice(None), slice(None))
    else:
        mask = random_mask(kind, 1, H, SQ, SK, dtype=dtype)
        mask[:, :, 5] = False if kind == "bool" else -INF
        mask[:, :, 17:] = False if kind == "bool" else -INF
        dead = (slice(None), slice(None), [5, 17, 18, 19])
    call = sample(dtype=dtype, attn_mask=mask, mask_grad=kind != "bool")
    results = run_and_check(call)
    for name in ("out", "query"):
        assert results[name][dead].count_nonzero() == 0
    if kind != "bool":
        assert (results["attn_mask"][mask == -INF] == 0).all()


def test_no_row_sees_a_key():
    call = sample(dtype=HALF, attn_mask=torch.zeros(1, 1, 1, SK, dtype=torch.bool))
    ran = run(call, gradient_for(call))
    assert all(tensor.count_nonzero() == 0 for tensor in ran.results.values())
    assert (ran.logsumexp == -INF).all()


@DTYPES
@pytest.mark.parametrize("kind", ["float32", "query"])
def test_row_of_finfo_min_gives_the_mean_of_value(monkeypatch, dtype, kind):
    use_tiles(monkeypatch, 16, 16)
    mask = random_mask(kind, 1, H, SQ, SK, dtype=dtype)
    lowest = torch.finfo(mask.dtype).min
    mask[:, :, 7] = lowest
    mask[:, :, 8, :16] = lowest  # a whole tile beside larger values
    mask[:, :, 9, :20] = -INF  # and one that is not seen beside the lowest value
    mask[:, :, 9, 20:] = lowest
    call = sample(dtype=dtype, attn_mask=mask, mask_grad=True)
    out = run_and_check(call)["out"]
    if mask.dtype == SINGLE:  # -65504 does not absorb the scores: that row is an ordinary softmax
        torch.testing.assert_close(out[:, :, 7].double(), call.value.double().mean(-2), atol=1e-3, rtol=0)
        torch.testing.assert_close(out[:, :, 9].double(), call.value[:, :, 20:].double().mean(-2), atol=1e-3, rtol=0)


@DTYPES
def test_float_mask_that_hides_keys(dtype):
    mask = random_mask("float32", B, H, SQ, SK).masked_fill(~random_mask("bool", 1, 1, SQ, SK), -INF)
    run_and_check(sample(dtype=dtype, attn_mask=mask, mask_grad=True))


@pytest.mark.parametrize("kind", ["bool", "float32", "query"])
@pytest.mark.parametrize(
    "layout", ["transposed", "strided", "unaligned", "expanded", "odd rows", "expanded rows", "column of a table"]
)
def test_memory_layout_of_the_mask(kind, layout):
    if layout == "transposed":
        mask = random_mask(kind, 1, H, SK, SQ, dtype=HALF).mT
    elif layout == "strided":
        mask = random_mask(kind, 1, H, SQ, 2 * SK, dtype=HALF)[..., ::2]
    elif layout == "unaligned":
        mask = random_mask(kind, H * SQ * SK + 1, dtype=HALF)[1:].view(1, H, SQ, SK)
    elif layout == "odd rows":
        mask = random_mask(kind, 1, H, SQ, SK + 5, dtype=HALF)[..., :SK]
    elif layout == "expanded":
        mask = random_mask(kind, 1, 1, SQ, SK, dtype=HALF).expand(B, H, SQ, SK)
    elif layout == "column of a table":  # the copy engine could walk it, and would find one key
        mask = random_mask(kind, 1, H, SQ, 48, dtype=HALF)[..., :1]
    else:
        mask = random_mask(kind, B, 1, 1, SK, dtype=HALF).expand(B, H, SQ, SK)
    run_and_check(sample(dtype=HALF, attn_mask=mask, mask_grad=kind != "bool"))


@pytest.mark.parametrize("kind", ["bool", "float"])
@DTYPES
def test_very_negative_scores_on_half_a_tile_have_finite_gradients(dtype, kind):
    call = sample(batch=1, heads=1, seqlen_q=192, seqlen_k=192, head_dim=64, dtype=dtype)  # 192 % 128 == 64
    call = dataclasses.replace(call, query=call.query * 8, key=-call.query * 8)
    mask = random_mask("bool" if kind == "bool" else "query", 1, 1, 192, 192, dtype=dtype)
    mask = mask if kind == "bool" else 8 * mask
    results = run_and_check(dataclasses.replace(call, attn_mask=mask, mask_grad=kind == "float"))
    assert all(tensor.isfinite().all() for tensor in results.values())


# ------------------------------------------------------------------------------------------------------------------ NaN


@DTYPES
@pytest.mark.parametrize("kind", ["bool", "float32", "query", "causal"])
def test_nan_in_key_at_a_masked_position_does_not_leak(dtype, kind):
    call = sample(seqlen_q=SK, dtype=dtype, is_causal=kind == "causal")
    rows = slice(0, SK - 1) if kind == "causal" else slice(None)
    if kind != "causal":
        mask = random_mask(kind, 1, 1, 1, SK, dtype=dtype)
        mask[..., -1] = False if kind == "bool" else -INF
        call = dataclasses.replace(call, attn_mask=mask)
    poisoned = call.key.clone()
    poisoned[:, :, -1] = NAN
    clean = run(call).results["out"]
    assert torch.equal(run(dataclasses.replace(call, key=poisoned)).results["out"][:, :, rows], clean[:, :, rows])


@DTYPES
@pytest.mark.parametrize("kind", ["bool", "float32", "query"])
def test_nan_in_key_at_a_masked_position_does_not_leak_into_other_gradients(dtype, kind):
    """Into those of key, value and mask. That of the query is 0 times the NaN."""
    mask = random_mask(kind, 1, 1, 1, SK, dtype=dtype)
    mask[..., -1] = False if kind == "bool" else -INF
    call = sample(dtype=dtype, attn_mask=mask, mask_grad=kind != "bool")
    poisoned = call.key.clone()
    poisoned[:, :, -1] = NAN
    grad_out = gradient_for(call)
    clean = run(call, grad_out).results
    results = run(dataclasses.replace(call, key=poisoned), grad_out).results
    for name in results.keys() - {"query"}:
        assert torch.equal(results[name], clean[name]), name


@DTYPES
@pytest.mark.parametrize("masked", [False, True])
def test_nan_in_query_makes_its_row_nan_and_no_other(dtype, masked):
    call = sample(dtype=dtype, attn_mask=random_mask("float32", 1, 1, SQ, SK) if masked else None)
    call.query[0, 1, 17, 3] = NAN
    ran = run(call, gradient_for(call))
    out = ran.results["out"]
    assert out[0, 1, 17].isnan().all() and out.isnan().sum() == D
    assert ran.results["query"][0, 1, 17].isnan().all() and ran.results["query"].isnan().sum() == D
    assert ran.results["key"][0, 1].isnan().any() and ran.results["key"][1].isfinite().all()


# --------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("layout", LAYOUTS)
@DTYPES
def test_memory_layout_of_the_inputs(dtype, layout):
    call = sample(layout=layout, dtype=dtype)
    results = run_and_check(call)
    plain = run(call.plain(), gradient_for(call)).results
    for name, tensor in results.items():  # the kernels see the same numbers, however they lie
        assert torch.equal(tensor, plain[name]), name


@DTYPES
def test_each_input_in_a_layout_of_its_own(dtype):
    call = sample(dtype=dtype, kv_heads=1)
    call = dataclasses.replace(
        call,
        key=tensor_in_layout((B, 1, SK, D), "strided_last", dtype, "cpu", 1),
        value=tensor_in_layout((B, 1, SK, D), "expanded_batch", dtype, "cpu", 2),
    )
    grad_out = gradient_for(call)[:1, :1, :1].expand(B, H, SQ, D)
    check(run(call, grad_out).results, expect(call, grad_out), None, call.describe())


@DTYPES
def test_dimensions_of_size_one_with_odd_strides(dtype):
    def odd(tensor):
        return tensor.as_strided(tensor.shape, (7, 3, *tensor.stride()[2:]))

    call = sample(batch=1, heads=1, dtype=dtype)
    call = dataclasses.replace(call, query=odd(call.query), key=odd(call.key), value=odd(call.value))
    run_and_check(call)
    single = torch.randn(1, 1, 1, D, dtype=dtype)
    run_and_check(Call(single.as_strided(single.shape, (5, 3, 7, 1)), call.key, call.value))


class Guarded:
    """Makes tensors for the kernels to fill, each inside a larger one, and can tell if anything else was written."""

    MARK = 123.0

    def __init__(self, pad: int):
        self.pad = pad  # elements after each row; a multiple of 16 keeps rows aligned
        self.made: list[tuple[Tensor, Tensor]] = []

    def __call__(self, shape, like: Tensor) -> Tensor:
        """Rows apart from each other, NaN inside."""
        *outer, columns = shape
        storage = torch.full((1 + math.prod(outer) + 1, columns + self.pad), self.MARK, dtype=like.dtype)
        inside = storage[1:-1].view(*outer, columns + self.pad)[..., :columns]
        inside.fill_(NAN)
        self.made.append((storage, inside))
        return inside

    def empty(self, size, *, dtype, device) -> Tensor:
        """In place of torch.empty: dense, NaN inside."""
        count = math.prod(size)
        storage = torch.full((count + 512,), self.MARK, dtype=dtype, device=device)
        inside = storage[256 : 256 + count]
        inside.fill_(NAN)
        self.made.append((storage, inside))
        return inside.view(size)

    def check(self) -> None:
        for storage, inside in self.made:
            assert not inside.isnan().any(), "not all of it was written"
            inside.fill_(self.MARK)
            assert (storage == self.MARK).all(), "something was written outside"


MEMORY = pytest.mark.parametrize(("dtype", "pad"), [(HALF, 3), (HALF, 16), (SINGLE, 3)])


@MEMORY
@pytest.mark.parametrize("kind", ["dense", "causal", "bool", "float32", "sum over keys", "sum over queries", "splits"])
def test_outputs_are_written_whole_and_nothing_else_is(monkeypatch, dtype, pad, kind):
    use_tiles(monkeypatch, 16, 32)
    use_multiprocessors(monkeypatch, 64 if kind == "splits" else 0)
    shape = {"sum over keys": (1, 1, SQ, 1), "sum over queries": (B, 1, 1, SK), "splits": (1, 1, SQ, SK)}
    mask = None
    if kind not in ("dense", "causal"):
        mask = random_mask("bool" if kind == "bool" else "float32", *shape.get(kind, (B, 1, SQ, SK)))
    call = sample(heads=1, head_dim=24, head_dim_v=40, dtype=dtype, is_causal=kind == "causal", attn_mask=mask)
    call = dataclasses.replace(call, mask_grad=mask is not None and mask.is_floating_point())
    guarded = Guarded(pad)
    grad_out = gradient_for(call)
    expected = run(call, grad_out, new=Guarded(pad)).results  # makes the plans, which allocate things that nobody fills
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guarded.empty)
        ran = run(call, grad_out, new=guarded)
    for name, tensor in ran.results.items():
        assert torch.equal(tensor, expected[name]), name
    assert not ran.logsumexp.isnan().any()
    guarded.check()


@MEMORY
@pytest.mark.parametrize("kind", ["dense", "causal", "bool", "float32"])
def test_nothing_is_read_outside_of_the_inputs(monkeypatch, dtype, pad, kind):
    use_tiles(monkeypatch, 32, 16)
    call = sample(heads=1, head_dim=24, head_dim_v=40, dtype=dtype, is_causal=kind == "causal")
    if kind in ("bool", "float32"):
        mask = random_mask(kind, B, 1, SQ, SK)
        call = dataclasses.replace(call, attn_mask=mask, mask_grad=kind == "float32")
    grad_out = gradient_for(call)
    expected = run(call, grad_out).results

    def surrounded(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.dtype == torch.bool:
            return tensor
        rows = math.prod(tensor.shape[:3])
        storage = torch.full((1 + rows + 1, tensor.size(3) + pad), NAN, dtype=tensor.dtype)
        inside = storage[1:-1].view(*tensor.shape[:3], -1)[..., : tensor.size(3)]
        return inside.copy_(tensor)

    tensors = {name: surrounded(getattr(call, name)) for name in ("query", "key", "value", "attn_mask")}
    results = run(dataclasses.replace(call, **tensors), surrounded(grad_out)).results
    for name, tensor in results.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("kind", ["dense", "float32", "dropout"])
def test_every_run_gives_the_same_bits(monkeypatch, kind):
    use_tiles(monkeypatch, 16, 32)
    dtype = SINGLE if kind == "float32" else HALF
    mask = random_mask("float32", 1, 1, SQ, 1) if kind == "float32" else None
    call = sample(heads=2, kv_heads=1, dtype=dtype, attn_mask=mask, mask_grad=mask is not None)
    dropout_p = 0.3 if kind == "dropout" else 0.0
    first, second = (run(call, gradient_for(call), dropout_p=dropout_p) for _ in range(2))
    assert torch.equal(first.logsumexp, second.logsumexp)
    for name, tensor in first.results.items():
        assert torch.equal(tensor, second.results[name]), name


# ------------------------------------------------------------------------------------------------------------ logsumexp


def logsumexp_float64(call: Call) -> Tensor:
    wide = dataclasses.replace(call, query=call.query.double(), key=call.key.double())
    scores = (wide.query @ wide.key.mT) * call.softmax_scale
    if call.is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -INF)
    if call.attn_mask is not None and call.attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~call.attn_mask, -INF)
    elif call.attn_mask is not None:
        scores = scores + call.attn_mask.double()
    return scores.logsumexp(-1)


@DTYPES
@pytest.mark.parametrize("kind", ["dense", "causal", "bool", "float32", "query"])
@pytest.mark.parametrize("scale", [None, -0.7, 0.0])
def test_logsumexp(monkeypatch, dtype, kind, scale):
    use_tiles(monkeypatch, 16, 16)
    mask = None
    if kind in ("bool", "float32", "query"):
        mask = random_mask(kind, 1, H, SQ, SK, dtype=dtype)
        mask[:, :, 4] = False if kind == "bool" else -INF
    call = sample(dtype=dtype, attn_mask=mask, is_causal=kind == "causal", scale=scale)
    found, expected = run(call).logsumexp, logsumexp_float64(call)
    if kind in ("float32", "query"):
        assert found.shape == (2, B, H, SQ)
        assert (found[1][expected == -INF] == 0).all()
        found = found[0].double() + found[1].double()
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-6)
    assert (found == -INF).sum() == (B * H if mask is not None else 0)


@pytest.mark.parametrize("lowest", [-1e9, torch.finfo(SINGLE).min], ids=["-1e9", "finfo.min"])
def test_logsumexp_keeps_what_rounding_cuts_off(lowest):
    call = sample(dtype=SINGLE, attn_mask=torch.full((1, 1, SQ, SK), lowest), scale=0.0)
    high, low = run(call).logsumexp.double()
    assert (high == float(torch.tensor(lowest))).all()
    torch.testing.assert_close(low, torch.full_like(low, math.log(SK)), atol=1e-6, rtol=0)


def test_forward_without_logsumexp_gives_the_same_output():
    for mask in (None, random_mask("float32", 1, 1, SQ, SK)):
        call = sample(dtype=HALF, attn_mask=mask)
        out = torch.full_like(call.query, NAN)
        options = None, 0.0, False, call.softmax_scale
        attention.forward(call.query, call.key, call.value, mask, *options, out, None, False)
        assert torch.equal(out, run(call).results["out"])


@pytest.mark.parametrize("kind", ["dense", "bool", "float32"])
def test_backward_takes_the_logsumexp_of_pytorchs_kernels(kind):
    """Rows padded to a multiple of 32, one part only, +inf where no key is seen."""
    mask = random_mask(kind, 1, H, SQ, SK) if kind != "dense" else None
    if mask is not None:
        mask[:, :, 4] = False if kind == "bool" else -INF
    call = sample(dtype=HALF, attn_mask=mask)
    grad_out = gradient_for(call)
    ran = run(call, grad_out)
    padded = torch.full((B, H, 32), NAN)
    padded[..., :SQ] = logsumexp_float64(call)
    padded[padded == -INF] = INF
    grads = [torch.full_like(tensor, NAN) for tensor in (call.query, call.key, call.value)]
    attention.backward(
        grad_out, call.query, call.key, call.value, mask, ran.results["out"], padded, None, 0.0, False,
        call.softmax_scale, *grads, False, False,
    )  # fmt: skip
    check(dict(zip(("query", "key", "value"), grads)), expect(call, grad_out))


# ------------------------------------------------------------------------------------------------------ what is skipped


@pytest.mark.parametrize("wanted", ["query", "key_value", "mask"])
def test_only_what_is_asked_for_is_computed(wanted):
    call = sample(dtype=HALF, attn_mask=random_mask("float32", 1, H, SQ, SK), mask_grad=True)
    grad_out = gradient_for(call)
    full = run(call, grad_out)
    grad_query = torch.full_like(call.query, NAN) if wanted == "query" else None
    pair = [torch.full_like(t, NAN) if wanted == "key_value" else None for t in (call.key, call.value)]
    before = dict(launch.launch_counts)
    grad_mask = attention.backward(
        grad_out, call.query, call.key, call.value, call.attn_mask, full.results["out"], full.logsumexp, None, 0.0,
        False, call.softmax_scale, grad_query, *pair, wanted == "mask", False,
    )  # fmt: skip
    launched = {name for name, count in launch.launch_counts.items() if count > before[name]}
    # The kernel of the query's gradient always runs: it leaves the row statistics for the others.
    expected = {"attention_backward_query"} | ({f"attention_backward_{wanted}"} if wanted != "query" else set())
    assert launched == expected
    for name, tensor in {"query": grad_query, "key": pair[0], "value": pair[1], "attn_mask": grad_mask}.items():
        assert tensor is None or torch.equal(tensor, full.results[name])
    assert (grad_mask is not None) == (wanted == "mask")


# -------------------------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize(
    ("seed", "dropout_p"), [(0, 0.5), (1, 0.1), (2**32, 0.9), (2**63 - 2, 0.5), (int(SEED), 0.1), (int(SEED), 1 - 1e-9)]
)
def test_dropout_keeps_what_the_reference_keeps(monkeypatch, seed, dropout_p):
    """With one-hot values the output shows which probabilities were kept, and so does dV with one-hot grad_out."""
    use_tiles(monkeypatch, 16, 32)
    length, seed = 40, torch.tensor([seed])
    identity = torch.eye(length).expand(B, 1, length, length).contiguous()
    call = Call(torch.zeros(B, 1, length, D), torch.randn(B, 1, length, D), identity)
    results = run(call, identity, dropout_p=dropout_p, seed=seed).results
    keep = reference.dropout_keep(seed, (B, 1, length, length), dropout_p)
    assert torch.equal(results["out"] != 0, keep)
    assert torch.equal(results["value"] != 0, keep.mT)
    torch.testing.assert_close(results["out"], keep / (length * (1 - dropout_p)))


@DTYPES
@pytest.mark.parametrize("kind", ["dense", "causal", "bool", "mask gradient"])
def test_dropout_values_and_gradients(monkeypatch, dtype, kind):
    use_tiles(monkeypatch, 16, 32)
    p = 0.3
    differentiate_mask = kind == "mask gradient"
    mask = None
    if kind == "bool" or differentiate_mask:
        mask = random_mask("bool" if kind == "bool" else "float32", B, 1, SQ, SK)
    options = {"attn_mask": mask, "is_causal": kind == "causal", "mask_grad": differentiate_mask}
    call = sample(kv_heads=1, dtype=dtype, **options)
    grad_out = gradient_for(call)
    results = run(call, grad_out, dropout_p=p).results
    wide = [t.double().requires_grad_() for t in (call.query, call.key, call.value)]
    wide_mask = mask.double().requires_grad_() if differentiate_mask else mask
    keep = reference.dropout_keep(SEED, (B, H, SQ, SK), p).double()
    wide_call = dataclasses.replace(call, query=wide[0], key=wide[1], value=wide[2], attn_mask=wide_mask)
    out = attention_float64(wide_call, keep, p)
    inputs = [*wide, wide_mask] if differentiate_mask else wide
    expected = [out, *torch.autograd.grad(out, inputs, grad_out.double())]
    assert len(expected) == len(results)
    limit = 2e-3 if dtype == HALF else 2e-6
    for (name, actual), wanted in zip(results.items(), expected):
        error = torch.linalg.vector_norm(actual.double() - wanted) / torch.linalg.vector_norm(wanted)
        assert error < limit, f"{name}: {error}"


def test_dropout_of_everything_gives_zeros():
    call = sample(dtype=HALF, attn_mask=random_mask("float32", 1, 1, SQ, SK), mask_grad=True)
    results = run(call, gradient_for(call), dropout_p=1.0).results
    assert all(tensor.count_nonzero() == 0 for tensor in results.values())


# --------------------------------------------------------------------------------------- the operators' implementations


def described(result) -> list:
    results = result if isinstance(result, (tuple, list)) else [result]
    return [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in results]


CUDA_CASES = {
    "plain": {},
    "transposed": {"layout": "bshd"},
    "expanded": {"layout": "expanded_heads"},
    "strided last": {"layout": "strided_last"},
    "value of another head_dim": {"head_dim_v": 24, "layout": "bshd"},
    "grouped queries": {"kv_heads": 1},
    "float mask": {"attn_mask": random_mask("float32", 1, H, SK, SQ).mT},
    "float mask of rank 2": {"attn_mask": random_mask("float32", SQ, SK)},
    "bool mask": {"attn_mask": random_mask("bool", 1, 1, 1, SK)},
    "empty batch": {"batch": 0},
    "no queries": {"seqlen_q": 0},
    "no keys": {"seqlen_k": 0},
    "no keys, float mask": {"seqlen_k": 0, "attn_mask": torch.empty(1, H, 0, SQ).mT},
}


@pytest.mark.parametrize("options", CUDA_CASES.values(), ids=CUDA_CASES)
def test_operators_give_on_a_gpu_what_their_fake_tensors_promise(options):
    """The implementations for CUDA, whose kernels run on CPU tensors here; values too, against those for the CPU."""
    options = {"batch": B, "seqlen_q": SQ, "seqlen_k": SK} | options
    sizes = options["batch"], options["seqlen_q"], options["seqlen_k"]
    if 0 in sizes:
        query, key = (torch.empty(sizes[0], H, length, D, dtype=HALF) for length in sizes[1:])
        value, mask = key, options.get("attn_mask")
    else:
        call = sample(dtype=HALF, **options)
        query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    fake = torch.ops.flashbackend

    def promised(op, *arguments):
        with FakeTensorMode(allow_non_fake_inputs=True):
            return described(op(*arguments))

    for layout in ("query", "bshd", "bhsd"):
        arguments = query, key, value, mask, None, 0.0, False, 0.3, layout
        only_out = ops._attention_cuda(*arguments)
        assert described(only_out) == promised(fake.attention, *arguments)
        out, logsumexp = ops._attention_forward_cuda(*arguments)
        assert described((out, logsumexp)) == promised(fake.attention_forward, *arguments)
        assert torch.equal(only_out, out)
        torch.testing.assert_close(out, ops._attention_math(*arguments), atol=2e-3, rtol=2e-3)
    grad_out = torch.ones((), dtype=out.dtype).expand(out.shape)
    everything = (True, True, True, mask is not None and mask.is_floating_point())
    alone = [[i == j and everything[j] for j in range(4)] for i in range(4)]
    for wanted in (everything, *alone):
        arguments = grad_out, query, key, value, mask, out, logsumexp, None, 0.0, False, 0.3, wanted
        grads = ops._attention_backward_cuda(*arguments)
        assert described(grads) == promised(fake.attention_backward, *arguments)
        torch.testing.assert_close(grads, ops._attention_backward_math(*arguments), atol=2e-3, rtol=2e-3)


# ---------------------------------------------------------------------------------------------------------------- plans


def test_a_plan_is_used_again_and_takes_the_new_tensors():
    first, second = sample(dtype=HALF), sample(dtype=HALF, seed=100)
    run(first, gradient_for(first))
    plans = dict(attention._plans)
    run_and_check(second)
    assert plans.keys() == attention._plans.keys()
    assert all(attention._plans[key] is plan for key, plan in plans.items())


@pytest.mark.parametrize("kind", ["dense", "mask"])
def test_recent_plans_are_found_for_calls_like_theirs_alone(monkeypatch, kind):
    looked_up = []
    look_up = attention._plans.look_up
    monkeypatch.setattr(
        attention._plans, "look_up", lambda *given: looked_up.append(1) or look_up(*given), raising=False
    )

    def misses(call: Call, grad_out: Tensor | None = None) -> int:
        looked_up.clear()
        grad_out = gradient_for(call) if grad_out is None else grad_out
        check(run(call, grad_out).results, expect(call, grad_out), None, call.describe())
        return len(looked_up)

    mask = random_mask("float32", B, H, SQ, SK) if kind == "mask" else None
    call = sample(dtype=SINGLE, attn_mask=mask)
    assert misses(call) == 2
    assert misses(call) == 0
    assert misses(dataclasses.replace(call, scale=0.3)) == 2
    assert misses(sample(dtype=SINGLE, attn_mask=mask, seqlen_q=SQ)) == 0
    for layout in ("bshd", "unaligned", "odd_strides"):
        assert misses(sample(dtype=SINGLE, attn_mask=mask, layout=layout)) == 2, layout
    assert misses(sample(dtype=HALF, attn_mask=mask)) == 2
    expanded = torch.ones(()).expand(gradient_for(call).shape)
    assert misses(call, expanded) == 1  # the backward
    if mask is not None:
        assert misses(dataclasses.replace(call, mask_grad=True)) == 1
        assert misses(dataclasses.replace(call, attn_mask=mask[:1])) == 2
    assert misses(call) == 0


def test_calls_that_take_turns_find_their_plans(monkeypatch):
    """More of them than are recent: the dictionary has the others."""
    monkeypatch.setattr(plans, "MAX_RECENT", 3)
    calls = [sample(batch=1, heads=1, seqlen_q=length, dtype=SINGLE) for length in range(4, 7)]
    for call in calls * 3:
        run_and_check(call)
    assert len(attention._plans) == 6 and len(attention._plans._recent._recent) == 3


def test_launches_are_counted():
    call = sample(dtype=HALF, attn_mask=random_mask("float32", 1, 1, SQ, SK), mask_grad=True)
    run(call, gradient_for(call))
    before = dict(launch.launch_counts)
    run(call, gradient_for(call))
    run(call)
    counts = {name: count - before[name] for name, count in launch.launch_counts.items()}
    assert {name: count for name, count in counts.items() if count} == {
        "attention_forward": 2,
        "attention_backward_query": 1,
        "attention_backward_key_value": 1,
        "attention_backward_mask": 1,
    }


@pytest.mark.parametrize("kind", ["dead_rows_bool", "dead_rows_float", "lowest_rows"])
@pytest.mark.parametrize("family", ["sm_80", "sm_86", "gfx942"])
def test_tiles_of_other_families(monkeypatch, family, kind):
    """Any tile gives right results; these are the ones that no machine at hand runs."""
    monkeypatch.setattr(attention, "_device_facts", lambda _: (family, 4, False))
    mask = mask_of_kind(kind, (1, 1, 70, 70), HALF, "cpu", random.Random(1))
    call = sample(batch=1, heads=1, seqlen_q=70, seqlen_k=70, dtype=HALF, attn_mask=rank_4(mask))
    run_and_check(dataclasses.replace(call, mask_grad=mask.is_floating_point()))


@pytest.mark.parametrize("head_dim", [128, 256, 512])
def test_smallest_tiles(monkeypatch, head_dim):
    """float32 on GPUs with little shared memory: products of eight rows."""
    monkeypatch.setattr(attention, "_device_facts", lambda _: ("sm_86", 4, False))
    mask = random_mask("float32", 1, 1, SQ, SK)
    run_and_check(sample(batch=1, heads=1, head_dim=head_dim, dtype=SINGLE, attn_mask=mask, mask_grad=True))
