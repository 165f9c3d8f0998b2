"""Variable-length attention on the GPU: values and gradients against float64, what must not leak, captured graphs.

FLASHBACKEND_RANDOM_CALLS sets how many random calls are drawn (default 200; 1,000 before a release).
"""

from __future__ import annotations

import gc
import math
import os

import pytest
import torch
import torch.nn.functional as F
from compiling import COMPILE_FOR, compile_varlen_call
from torch.nn.attention.bias import causal_lower_right
from varlen_cases import (
    VarlenCall,
    gradient_for_varlen,
    judge_varlen,
    random_varlen_call,
    stock_results_varlen,
    varlen_call,
)

from torch_flashbackend.kernels import launch_counts
from torch_flashbackend.kernels.cuda import varlen as cuda_varlen

from common import deterministic_mode

RANDOM_CALLS = int(os.environ.get("FLASHBACKEND_RANDOM_CALLS", "200"))
CHUNK = 10
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
MIXED = (300, 1, 0, 64, 517, 129, 16)


def attend(plugin, call: VarlenCall, **options):
    """(out, logsumexp) of the public function."""
    return plugin.attention_varlen(
        call.query, call.key, call.value, *call.cu_seqlens(), max(call.lengths_q), max(call.lengths_k),
        window_size=call.window, causal_alignment="bottom_right" if call.bottom_right else "top_left",
        scale=call.scale, softcap=call.softcap, alibi_slopes=call.alibi, sinks=call.sinks, seqused_k=call.seqused_k(),
        return_lse=True, **options,
    )  # fmt: skip


def results_of_varlen(plugin, call: VarlenCall, grad_out=None) -> dict:
    leaves = call.leaves() if grad_out is not None else call
    out, logsumexp = attend(plugin, leaves)
    results = {"out": out.detach(), "logsumexp": logsumexp}
    if grad_out is not None:
        inputs = leaves.inputs()
        results |= dict(zip(inputs, torch.autograd.grad(out, list(inputs.values()), grad_out)))
    return results


@pytest.fixture(params=["triton", "hopper"])
def kernels(request, monkeypatch, device):
    """Calls that the Hopper kernel takes run on both kinds of kernels."""
    if request.param == "triton":
        monkeypatch.setattr(cuda_varlen, "takes", lambda *_: False)  # of the backward too, which asks it
    elif device == "cpu" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU (compute capability 9.0)")
    return request.param


@pytest.fixture
def check_varlen(plugin, launched, note):
    """Runs a call on our kernels and judges all results against float64 and PyTorch's own kernels."""
    if COMPILE_FOR:
        return compile_varlen_call

    def run(call: VarlenCall) -> dict:
        grad_out = gradient_for_varlen(call)
        plugin.disable()
        stock = stock_results_varlen(call, grad_out)
        plugin.enable()
        computes = call.query.numel() > 0 and call.key.numel() > 0
        with launched(computes):
            results = results_of_varlen(plugin, call, grad_out)
        note(judge_varlen(call, dict(results), grad_out, stock))
        return results

    return run


@pytest.mark.parametrize("first", range(0, RANDOM_CALLS, CHUNK))
def test_random_calls(check_varlen, device, first):
    """On a Hopper GPU half of them on its own kernels, as far as these take them."""
    for seed in range(first, min(first + CHUNK, RANDOM_CALLS)):
        with pytest.MonkeyPatch.context() as patch:
            if seed % 2:
                patch.setattr(cuda_varlen, "takes", lambda *_: False)
            check_varlen(random_varlen_call(seed, device))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, SINGLE], ids=str)
@pytest.mark.parametrize("head_dim", [1, 8, 24, 32, 40, 64, 72, 96, 128, 160, 192, 256])
def test_head_dims(check_varlen, device, head_dim, dtype):
    check_varlen(varlen_call(MIXED, heads=2, head_dim=head_dim, dtype=dtype, device=device, window=(-1, 0)))


@pytest.mark.parametrize("head_dim,head_dim_v", [(64, 128), (192, 128), (128, 32), (40, 64)])
def test_value_of_another_head_dim(check_varlen, device, head_dim, head_dim_v):
    check_varlen(varlen_call(MIXED, (200, 5, 70, 64, 100, 0, 300), 4, 2, head_dim, head_dim_v, BFLOAT, device))


OPTIONS = {
    "causal, fewer keys": {"window": (-1, 0)},
    "causal, top left": {"window": (-1, 0), "bottom_right": False},
    "window": {"window": (100, 30)},
    "causal window": {"window": (64, 0)},
    "wide causal window": {"window": (257, 0)},
    "left": {"window": (50, -1)},
    "softcap": {"softcap": 3.0, "window": (-1, 0)},
    "alibi": {"alibi": "heads"},
    "alibi of sequences": {"alibi": "sequences", "window": (90, 0)},
    "sinks": {"sinks": True, "window": (128, 0)},
    "seqused": {"used_k": (64, 1, 0, 64, 500, 0, 3), "window": (-1, 0)},
    "everything": {"softcap": 3.0, "alibi": "heads", "sinks": True, "window": (90, 20)},
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths_k", [MIXED, (200, 5, 70, 64, 600, 0, 300)], ids=["same", "other keys"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(check_varlen, device, name, lengths_k, head_dim):
    options = dict(OPTIONS[name])
    if "used_k" in options:
        options["used_k"] = tuple(min(pair) for pair in zip(options["used_k"], lengths_k))
    check_varlen(varlen_call(MIXED, lengths_k, 4, 2, head_dim, dtype=BFLOAT, device=device, **options))


@pytest.mark.usefixtures("kernels")
def test_many_short_sequences(check_varlen, device):
    lengths = tuple(1 + n % 7 for n in range(900))
    check_varlen(varlen_call(lengths, heads=1, head_dim=64, dtype=BFLOAT, device=device, window=(-1, 0)))


@pytest.mark.cuda_only
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 192, 256])
def test_the_hopper_kernel_takes_plain_calls(plugin, device, head_dim, is_causal):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU (compute capability 9.0)")
    call = varlen_call(MIXED, None, 4, 2, head_dim, dtype=BFLOAT, device=device,
                       window=(-1, 0 if is_causal else -1))  # fmt: skip
    before = dict(launch_counts)
    results_of_varlen(plugin, call, gradient_for_varlen(call))
    ran = {name for name, count in launch_counts.items() if count > before.get(name, 0)}
    assert "flash_forward" in ran and "varlen_forward" not in ran
    assert ("flash_backward" in ran) == (head_dim <= 128)


@pytest.mark.cuda_only
def test_deterministic_algorithms_repeat_the_bits(plugin, device):
    call = varlen_call(MIXED, None, 8, 2, 128, dtype=BFLOAT, device=device, window=(-1, 0))
    grad_out = gradient_for_varlen(call)
    with deterministic_mode():
        first = results_of_varlen(plugin, call, grad_out)
        for _ in range(5):
            again = results_of_varlen(plugin, call, grad_out)
            assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.cuda_only
def test_more_sequences_than_are_sorted(plugin, device, launched):
    """Above the limit the schedule has gaps; every row must be computed all the same."""
    lengths = torch.randint(0, 6, (9000,), generator=torch.Generator().manual_seed(0))
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(device)
    total = int(cu_seqlens[-1])
    query, key, value = (torch.randn(total, 2, 64, device=device, dtype=HALF, requires_grad=True) for _ in range(3))
    with launched():
        out = plugin.attention_varlen(query, key, value, cu_seqlens, cu_seqlens, 5, 5)
    owner = torch.repeat_interleave(torch.arange(9000), lengths).to(device)
    rows = torch.arange(0, total, 37, device=device)
    scores = torch.einsum("qhd,khd->hqk", query[rows].double(), key.double()) * 64**-0.5
    scores = scores.masked_fill(owner[rows][:, None] != owner[None, :], -math.inf)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.double())
    assert (out[rows].double() - expected).abs().max() < 3e-3
    grad = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (query, key, value), grad)
    wanted = torch.autograd.grad(expected, (query, key, value), grad[rows].double(), retain_graph=True)
    assert all(bool(g.isfinite().all()) for g in gradients)
    # The gradient of the chosen rows' queries alone is comparable: keys hear from the other rows too.
    assert (gradients[0][rows] - wanted[0][rows]).abs().max() < 1e-2


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (40, 0)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nothing_leaks_from_one_sequence_into_another(plugin, device, head_dim, window, poison):
    lengths = (100, 30, 200, 77)
    call = varlen_call(lengths, heads=2, head_dim=head_dim, dtype=BFLOAT, device=device, window=window)
    clean = results_of_varlen(plugin, call, gradient_for_varlen(call))
    grad_out = gradient_for_varlen(call)
    for tensor in (call.query, call.key, call.value, grad_out):
        tensor[100:130] = poison
    results = results_of_varlen(plugin, call, grad_out)
    others = torch.ones(sum(lengths), dtype=torch.bool, device=device)
    others[100:130] = False
    for name in ("out", "query", "key", "value"):
        torch.testing.assert_close(results[name][others], clean[name][others], rtol=0, atol=2e-2)
        assert not bool(results[name][100:130].isfinite().all())


@pytest.mark.usefixtures("kernels")
def test_rows_behind_the_last_sequence_are_zeros(plugin, device):
    call = varlen_call((100, 50, 42), heads=2, head_dim=64, dtype=BFLOAT, device=device).leaves()
    cu_seqlens = torch.tensor([0, 100, 150], dtype=torch.int32, device=device)
    out, logsumexp = plugin.attention_varlen(
        call.query, call.key, call.value, cu_seqlens, cu_seqlens, 100, 100, return_lse=True
    )
    grads = torch.autograd.grad(out, (call.query, call.key, call.value), torch.randn_like(out))
    for tensor in (out, *grads):
        assert bool((tensor[150:] == 0).all()) and bool((tensor[:150] != 0).any())
    assert bool((logsumexp[:, 150:] == -math.inf).all())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_types_of_lengths(plugin, device, dtype):
    call = varlen_call(MIXED, heads=2, head_dim=64, dtype=BFLOAT, device=device)
    cu_seqlens = call.cu_seqlens(dtype)
    out, logsumexp = plugin.attention_varlen(call.query, call.key, call.value, *cu_seqlens, return_lse=True)
    judge_varlen(call, {"out": out, "logsumexp": logsumexp})


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_equal_lengths_are_as_exact_as_the_dense_kernel(check_varlen, device, head_dim, is_causal):
    window = (-1, 0) if is_causal else (-1, -1)
    check_varlen(varlen_call((1024,) * 3, heads=2, head_dim=head_dim, dtype=BFLOAT, device=device, window=window))


def test_repeated_runs_give_the_same_bits(plugin, device):
    call = varlen_call(MIXED, None, 8, 2, 128, dtype=BFLOAT, device=device, window=(-1, 0), sinks=True)
    grad_out = gradient_for_varlen(call)
    first = results_of_varlen(plugin, call, grad_out)
    for _ in range(5):
        again = results_of_varlen(plugin, call, grad_out)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.cuda_only
def test_a_captured_graph_sees_the_lengths_of_each_replay(plugin, device):
    call = varlen_call((200, 56), heads=2, head_dim=64, dtype=BFLOAT, device=device, window=(-1, 0)).leaves()
    cu_seqlens, _ = call.cu_seqlens()
    grad_out = gradient_for_varlen(call)

    def step():
        out = plugin.attention_varlen(
            call.query, call.key, call.value, cu_seqlens, cu_seqlens, 256, 256, is_causal=True
        )
        return out, *torch.autograd.grad(out, (call.query, call.key, call.value), grad_out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for split in (200, 1, 256, 100):
        cu_seqlens[1] = split
        graph.replay()
        lengths = (split, 256 - split)
        now = VarlenCall(call.query.detach(), call.key.detach(), call.value.detach(), lengths, lengths, window=(-1, 0))
        names = ("out", "query", "key", "value")
        judge_varlen(now, {name: tensor.detach().clone() for name, tensor in zip(names, captured)}, grad_out)


@pytest.mark.cuda_only
def test_no_host_synchronisation(plugin, never_waits, device):
    call = varlen_call(MIXED, heads=2, head_dim=64, dtype=BFLOAT, device=device, window=(-1, 0)).leaves()
    cu_seqlens, _ = call.cu_seqlens()

    def step():
        out = plugin.attention_varlen(
            call.query, call.key, call.value, cu_seqlens, cu_seqlens, 517, 517, is_causal=True
        )
        out.backward(grad_out)

    grad_out = gradient_for_varlen(call)
    never_waits(step)


@pytest.mark.cuda_only
def test_long_sums_over_grouped_heads(plugin, device):
    """2**18 rows for each key and more: sums are split, see SUM_ROWS; dV of ones is the sum of the probabilities."""
    seqlen, heads = 2**14, 20
    query = torch.randn(seqlen, heads, 64, device=device, dtype=BFLOAT) * 0.01
    key = torch.randn(seqlen, 1, 64, device=device, dtype=BFLOAT) * 0.01
    value = torch.randn(seqlen, 1, 64, device=device, dtype=BFLOAT, requires_grad=True)
    cu_seqlens = torch.tensor([0, seqlen], dtype=torch.int32, device=device)
    out = plugin.attention_varlen(query, key, value, cu_seqlens, cu_seqlens, seqlen, seqlen)
    (grad,) = torch.autograd.grad(out, value, torch.ones_like(out))
    keys = torch.arange(0, seqlen, 1777, device=device)
    scores = torch.einsum("qhd,kd->hqk", query.double(), key[:, 0].double()) * 64**-0.5
    expected = scores.softmax(-1)[:, :, keys].sum((0, 1))
    assert ((grad[keys, 0, 0].double() - expected) / expected).abs().max() < 2.0**-7


@pytest.mark.cuda_only
def test_peak_memory_is_not_above_stocks(plugin, device):
    """torch.nn.attention.varlen, forward and backward: stock sums up the query's gradient in float32 memory."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    lengths = (2000, 100, 1500, 496)
    call = varlen_call(lengths, heads=16, head_dim=64, dtype=BFLOAT, device=device).leaves()
    cu_seqlens, _ = call.cu_seqlens()
    grad_out = gradient_for_varlen(call)

    def peak(function) -> int:
        function()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = function()
        torch.autograd.grad(out, (call.query, call.key, call.value), grad_out)
        return torch.cuda.max_memory_allocated() - before

    tensors = (call.query, call.key, call.value, cu_seqlens, cu_seqlens, 2000, 2000)
    ours = peak(lambda: plugin.attention_varlen(*tensors))
    plugin.disable()
    assert ours <= peak(lambda: varlen.varlen_attn(*tensors))


# What reaches these kernels by other names. On a CPU the plugin takes nothing by itself.


def nested(tensor: torch.Tensor, offsets: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """[total, H, D] as a nested tensor [B, H, S of each, D]."""
    made = torch.nested.nested_tensor_from_jagged(
        tensor, offsets, min_seqlen=min(lengths), max_seqlen=max(lengths)
    )  # fmt: skip
    return made.transpose(1, 2)


@pytest.mark.cuda_only
@pytest.mark.usefixtures("take_everything")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim,dtype", [(64, BFLOAT), (128, HALF), (40, BFLOAT), (64, SINGLE)])
def test_nested_tensors(device, launched, note, head_dim, dtype, is_causal, compiled):
    """float32 goes through the operators of stock's efficient kernel, with their padded logsumexp."""
    lengths = (300, 1, 64, 517, 129)
    window = (-1, 0) if is_causal else (-1, -1)
    call = varlen_call(lengths, heads=2, head_dim=head_dim, dtype=dtype, device=device, window=window).leaves()
    offsets, _ = call.cu_seqlens(torch.int64)
    grad_out = gradient_for_varlen(call)

    def attention(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    with launched():
        tensors = [nested(t, offsets, lengths) for t in (call.query, call.key, call.value)]
        out = (torch.compile(attention) if compiled else attention)(*tensors).transpose(1, 2).values()
        grads = torch.autograd.grad(out, (call.query, call.key, call.value), grad_out)
    results = {"out": out.detach(), **dict(zip(("query", "key", "value"), grads))}
    note(judge_varlen(call, results, grad_out, stock_results_varlen(call, grad_out)))


def jagged_calls(call: VarlenCall, lengths: tuple[int, ...], heads_first: bool = False) -> list[torch.Tensor]:
    """query, key and value as nested tensors that share their offsets."""
    offsets, _ = call.cu_seqlens(torch.int64)
    rows = (call.query, call.key, call.value)
    if not heads_first:
        return [nested(t, offsets, lengths) for t in rows]
    bounds = {"min_seqlen": min(lengths), "max_seqlen": max(lengths), "jagged_dim": 2}
    return [torch.nested.nested_tensor_from_jagged(t.transpose(0, 1).contiguous(), offsets, **bounds) for t in rows]


def looks(tensor: torch.Tensor) -> dict:
    """What a nested tensor is, beside its numbers."""
    return {
        "shape": tensor.shape, "strides": tensor.values().stride(), "offsets": id(tensor.offsets()),
        "contiguous": tensor.is_contiguous(), "rows": tensor.transpose(1, 2).is_contiguous(), "dtype": tensor.dtype,
        "longest": tensor._maybe_max_seqlen, "shortest": tensor._maybe_min_seqlen, "grad": tensor.requires_grad,
    }  # fmt: skip


@pytest.mark.cuda_only
@pytest.mark.usefixtures("take_everything")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("dtype", [BFLOAT, SINGLE], ids=str)
@pytest.mark.parametrize("lengths", [(300, 1, 64, 517, 129), (200, 200)], ids=["mixed", "equal"])
def test_nested_tensors_look_and_compute_as_pytorchs(
    plugin, device, launched, note, lengths, dtype, heads_first, training
):
    call = varlen_call(lengths, heads=4, head_dim=64, dtype=dtype, device=device, window=(-1, 0))
    call = call.leaves() if training else call
    tensors = jagged_calls(call, lengths, heads_first)
    grad_out = gradient_for_varlen(call)
    found = []
    for ours in (True, False):
        plugin.enable() if ours else plugin.disable()
        with launched(ours):
            out = F.scaled_dot_product_attention(*tensors, is_causal=True)
            values = out.transpose(1, 2).values()
            results = {"out": values.detach()}
            if training:
                assert (type(out.grad_fn).__name__ == "_NestedBackward") == ours
                grads = torch.autograd.grad(values, (call.query, call.key, call.value), grad_out)
                results |= dict(zip(("query", "key", "value"), grads))
        found.append((looks(out), results))
    assert found[0][0] == found[1][0]
    note(judge_varlen(call, dict(found[0][1]), grad_out if training else None, {"nested": found[1][1]}))


@pytest.mark.cuda_only
@pytest.mark.usefixtures("take_everything")
def test_nested_tensors_with_an_empty_sequence_are_pytorchs(plugin, device, launched):
    lengths = (100, 0, 30)
    call = varlen_call(lengths, heads=2, head_dim=64, dtype=BFLOAT, device=device)
    tensors = jagged_calls(call, lengths)

    def outcome(is_causal: bool):
        try:
            return F.scaled_dot_product_attention(*tensors, is_causal=is_causal).values()
        except RuntimeError as error:  # no backend of stock's, where it is causal
            return str(error).splitlines()[0]

    with launched(False):
        found = [outcome(is_causal) for is_causal in (False, True)]
    plugin.disable()
    for ours, theirs in zip(found, (outcome(is_causal) for is_causal in (False, True))):
        assert type(ours) is type(theirs)
        assert ours == theirs if isinstance(ours, str) else torch.equal(ours, theirs)


@pytest.mark.cuda_only
@pytest.mark.usefixtures("take_everything")
def test_nested_tensors_without_host_synchronisation(never_waits, device):
    """Where the nested tensors know their longest and shortest length."""
    lengths = (300, 1, 64, 517, 129)
    call = varlen_call(lengths, heads=2, head_dim=64, dtype=BFLOAT, device=device, window=(-1, 0)).leaves()
    tensors = jagged_calls(call, lengths)
    grad_out = gradient_for_varlen(call)

    def step():
        out = F.scaled_dot_product_attention(*tensors, is_causal=True).transpose(1, 2).values()
        return torch.autograd.grad(out, (call.query, call.key, call.value), grad_out)

    never_waits(step)


@pytest.mark.cuda_only
@pytest.mark.usefixtures("take_everything")
@pytest.mark.parametrize("training", [False, True])
def test_nested_tensors_take_no_more_memory_than_pytorchs(plugin, device, training):
    lengths = (2000, 100, 1500, 496)
    call = varlen_call(lengths, heads=16, head_dim=64, dtype=BFLOAT, device=device, window=(-1, 0))
    call = call.leaves() if training else call
    tensors = jagged_calls(call, lengths)
    grad_out = gradient_for_varlen(call)

    def peak() -> int:
        for measured in (False, True):
            gc.collect()  # nested tensors of the round before are in cycles
            torch.cuda.synchronize()
            if measured:
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = F.scaled_dot_product_attention(*tensors, is_causal=True).transpose(1, 2).values()
            if training:
                torch.autograd.grad(out, (call.query, call.key, call.value), grad_out)
            del out
        return torch.cuda.max_memory_allocated() - before

    ours = peak()
    plugin.disable()
    # But for the allocator's smallest block: both work out lengths in small tensors of their own.
    assert ours <= peak() + 512


@pytest.mark.cuda_only
@pytest.mark.usefixtures("take_everything")
def test_a_backward_of_stocks_understands_our_forward_and_the_other_way_round(plugin, device):
    lengths = (300, 1, 64, 517, 129)
    call = varlen_call(lengths, heads=2, head_dim=64, dtype=BFLOAT, device=device, window=(-1, 0)).leaves()
    offsets, _ = call.cu_seqlens(torch.int64)
    grad_out = gradient_for_varlen(call)
    for forward_by_ours in (True, False):
        plugin.enable() if forward_by_ours else plugin.disable()
        tensors = [nested(t, offsets, lengths) for t in (call.query, call.key, call.value)]
        out = F.scaled_dot_product_attention(*tensors, is_causal=True).transpose(1, 2).values()
        plugin.disable() if forward_by_ours else plugin.enable()
        grads = torch.autograd.grad(out, (call.query, call.key, call.value), grad_out)
        results = {"out": out.detach(), **dict(zip(("query", "key", "value"), grads))}
        judge_varlen(call, results, grad_out, stock_results_varlen(call, grad_out))


@pytest.mark.cuda_only
@pytest.mark.usefixtures("take_everything")
def test_varlen_attn_of_pytorch(device, launched, note):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    call = varlen_call(MIXED, (200, 5, 70, 64, 600, 0, 300), 2, head_dim=64, dtype=BFLOAT, device=device).leaves()
    grad_out = gradient_for_varlen(call)
    with launched():
        out = varlen.varlen_attn(
            call.query, call.key, call.value, *call.cu_seqlens(), max(call.lengths_q), max(call.lengths_k)
        )
        grads = torch.autograd.grad(out, (call.query, call.key, call.value), grad_out)
    results = {"out": out.detach(), **dict(zip(("query", "key", "value"), grads))}
    note(judge_varlen(call, results, grad_out, stock_results_varlen(call, grad_out)))


@pytest.mark.cuda_only
@pytest.mark.usefixtures("take_everything")
@pytest.mark.parametrize("lengths", [(100, 300), (64, 1000)])
def test_causal_lower_right_of_pytorch(device, launched, note, lengths):
    seqlen_q, seqlen_k = lengths
    call = varlen_call((seqlen_q,) * 2, (seqlen_k,) * 2, 2, head_dim=64, dtype=BFLOAT, device=device, window=(-1, 0))
    leaves = call.leaves()
    grad_out = gradient_for_varlen(call)
    dense = [t.unflatten(0, (2, -1)).transpose(1, 2) for t in (leaves.query, leaves.key, leaves.value)]
    with launched():
        out = F.scaled_dot_product_attention(*dense, attn_mask=causal_lower_right(seqlen_q, seqlen_k))
        out = out.transpose(1, 2).flatten(0, 1)
        grads = torch.autograd.grad(out, (leaves.query, leaves.key, leaves.value), grad_out)
    results = {"out": out.detach(), **dict(zip(("query", "key", "value"), grads))}
    note(judge_varlen(call, results, grad_out, stock_results_varlen(call, grad_out)))


@pytest.mark.parametrize("name", OPTIONS)
def test_flash_attn_functions(device, launched, note, name):
    """Dense tensors with a window, softcap or slopes are packed ones of one length."""
    from torch_flashbackend.flash_attn import flash_attn_func

    options = dict(OPTIONS[name])
    left, right = options.get("window", (-1, -1))
    if (
        not options.get("bottom_right", True)
        or {"sinks", "used_k"} & set(options)
        or options.get("alibi") == "sequences"
    ):
        pytest.skip("no argument of flash_attn_func")
    call = varlen_call((150,) * 2, (260,) * 2, 4, 2, 64, dtype=BFLOAT, device=device, **options)
    leaves = call.leaves()
    grad_out = gradient_for_varlen(call)
    dense = [t.unflatten(0, (2, -1)) for t in (leaves.query, leaves.key, leaves.value)]
    with launched():
        out = flash_attn_func(*dense, causal=right == 0, window_size=(left, right), softcap=call.softcap,
                              alibi_slopes=call.alibi).flatten(0, 1)  # fmt: skip
        grads = torch.autograd.grad(out, (leaves.query, leaves.key, leaves.value), grad_out)
    results = {"out": out.detach(), **dict(zip(("query", "key", "value"), grads))}
    note(judge_varlen(call, results, grad_out, stock_results_varlen(call, grad_out)))
