"""One test for each statement about what attention means, several of which PyTorch's own kernels get wrong."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from common import Call, attention_float64, check, expect, gradient_for, results_of, simple_call, tensor_in_layout

HALF = (torch.float16, torch.bfloat16)
INF = math.inf
B, H, S, D = 2, 4, 160, 64


def bool_mask(device, *shape, seed=3):
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.rand(shape, generator=generator, device=device) < 0.7


def float_mask(device, *shape, dtype=torch.bfloat16, seed=3):
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


# ---------------------------------------------------------------------------------------------------------- masked rows


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_row_masked_by_false_gives_zero_output_and_gradient(check_call, device, dtype):
    mask = bool_mask(device, B, 1, S, S)
    mask[:, :, 5] = False
    mask[1, :, 100:] = False
    results = check_call(simple_call(B, H, S, head_dim=D, dtype=dtype, device=device, attn_mask=mask))
    for name in ("out", "query"):
        assert results[name][:, :, 5].count_nonzero() == 0
        assert results[name][1, :, 100:].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_row_masked_by_minus_infinity_gives_zero_output_and_gradient(check_call, device, dtype):
    mask = float_mask(device, 1, H, S, S, dtype=dtype)
    mask[..., 5, :] = -INF
    call = simple_call(B, H, S, head_dim=D, dtype=dtype, device=device, attn_mask=mask, mask_grad=True)
    results = check_call(call)
    for name in ("out", "query", "attn_mask"):
        assert results[name][:, :, 5].count_nonzero() == 0


def test_everything_masked_gives_zeros(check_call, device):
    mask = torch.zeros(1, 1, 1, S, dtype=torch.bool, device=device)
    results = check_call(simple_call(B, H, S, head_dim=D, device=device, attn_mask=mask))
    assert all(tensor.count_nonzero() == 0 for tensor in results.values())


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_row_of_finfo_min_gives_the_mean_of_value(check_call, device, dtype):
    mask = float_mask(device, 1, 1, S, S, dtype=dtype)
    mask[..., 7, :] = torch.finfo(dtype).min
    call = simple_call(B, H, S, head_dim=D, dtype=dtype, device=device, attn_mask=mask)
    out = check_call(call)["out"]
    if dtype != torch.float16:  # -65504 does not absorb the scores, so that row is an ordinary softmax
        mean = call.value.double().mean(-2)
        assert (out[:, :, 7].double() - mean).abs().max() < 0.01


def test_sum_of_two_finfo_min_masks_gives_zeros(check_call, device):
    mask = torch.zeros(1, 1, S, S, dtype=torch.bfloat16, device=device)
    mask[..., 7, :] = torch.finfo(torch.bfloat16).min
    mask = mask + mask
    assert mask[0, 0, 7, 0] == -INF
    out = check_call(simple_call(B, H, S, head_dim=D, device=device, attn_mask=mask))["out"]
    assert out[:, :, 7].count_nonzero() == 0


def test_tiles_of_finfo_min_beside_larger_values(check_call, device):
    length = 384
    lowest = torch.finfo(torch.bfloat16).min
    mask = torch.zeros(1, 1, length, length, dtype=torch.bfloat16, device=device)
    mask[..., : length // 3] = lowest  # whole tiles, in rows that have larger values further on
    mask[..., 10, :] = lowest  # and a row that has none
    mask[..., 11, : 2 * length // 3] = -INF
    mask[..., 11, 2 * length // 3 :] = lowest
    check_call(simple_call(B, H, length, head_dim=D, device=device, attn_mask=mask, mask_grad=True))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_mask_on_lengths_of_half_a_tile_with_very_negative_scores_has_finite_gradients(check_call, device, kind):
    length = 192  # 192 % 128 == 64
    call = simple_call(1, 2, length, head_dim=D, device=device)
    call = dataclasses.replace(call, query=call.query * 8, key=-call.query * 8)
    mask = bool_mask(device, 1, 1, length, length) if kind == "bool" else float_mask(device, 1, 2, length, length) * 8
    check_call(dataclasses.replace(call, attn_mask=mask))


# -------------------------------------------------------------------------------------------------------- scale, causal


@pytest.mark.parametrize("scale", [-0.5, -1e-3, 0.0, 3.0, 1e-8])
@pytest.mark.parametrize("kind", ["dense", "causal", "bool", "float"])
def test_any_scale(check_call, device, scale, kind):
    mask = None
    if kind == "bool":
        mask = bool_mask(device, B, 1, S, S)
        mask[:, :, 3] = False
    if kind == "float":
        mask = float_mask(device, 1, H, S, S).masked_fill(~bool_mask(device, 1, 1, S, S), -INF)
    check_call(simple_call(B, H, S, head_dim=D, device=device, attn_mask=mask, is_causal=kind == "causal", scale=scale))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(100, 300), (300, 100), (1, 200), (200, 1), (129, 128), (64, 192)])
def test_causal_is_aligned_at_the_top_left(check_call, device, seqlen_q, seqlen_k):
    out = check_call(simple_call(B, H, seqlen_q, seqlen_k, D, device=device, is_causal=True))["out"]
    call = simple_call(B, H, seqlen_q, seqlen_k, D, device=device)
    assert (out[:, :, 0].float() - call.value[:, :, 0].float()).abs().max() < 1e-2


def test_causal_with_a_mask_is_what_stock_makes_of_it(plugin, launched, device, take_everything):
    call = simple_call(B, H, S, head_dim=D, device=device, is_causal=True, attn_mask=bool_mask(device, S, S))

    def outcome():
        try:
            return call.run()
        except RuntimeError as error:
            return str(error)

    with launched(False):
        ours = outcome()
    plugin.disable()
    stock = outcome()
    assert type(ours) is type(stock)
    assert ours == stock if isinstance(ours, str) else torch.equal(ours, stock)


# ---------------------------------------------------------------------------------------------------------------- empty


@pytest.mark.parametrize("training", [False, True])
def test_empty_batch_gives_an_empty_tensor(plugin, device, take_everything, training):
    tensors = [torch.empty(0, H, S, D, dtype=torch.bfloat16, device=device, requires_grad=training) for _ in range(3)]
    out = F.scaled_dot_product_attention(*tensors)
    assert out.shape == (0, H, S, D) and out.dtype == torch.bfloat16
    if training:
        out.sum().backward()
        assert all(t.grad.shape == t.shape for t in tensors)


@pytest.mark.cuda_only
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_no_keys_give_zeros(plugin, device, take_everything, dtype):
    query = torch.randn(B, H, S, D, dtype=dtype, device=device, requires_grad=True)
    key, value = (torch.empty(B, H, 0, D, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    out = F.scaled_dot_product_attention(query, key, value)
    assert out.shape == query.shape and out.count_nonzero() == 0
    grad = torch.autograd.grad(out, (query, key, value), torch.ones_like(out))
    assert grad[0].count_nonzero() == 0 and grad[1].shape == key.shape


def test_no_queries_give_an_empty_tensor(plugin, device, take_everything):
    query = torch.empty(B, H, 0, D, dtype=torch.bfloat16, device=device)
    key = torch.randn(B, H, S, D, dtype=torch.bfloat16, device=device)
    assert F.scaled_dot_product_attention(query, key, key).shape == (B, H, 0, D)


# ------------------------------------------------------------------------------------------------------- memory layouts


@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize(
    "layout", ["bshd", "sbhd", "packed", "expanded_batch", "expanded_heads", "unaligned", "odd_strides", "strided_last"]
)
def test_memory_layout_of_the_inputs(check_call, device, layout, head_dim):
    check_call(simple_call(B, H, 96, head_dim=head_dim, device=device, layout=layout))


@pytest.mark.parametrize("kind", ["transposed", "strided", "unaligned", "expanded"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32], ids=str)
def test_memory_layout_of_the_mask(check_call, device, kind, dtype):
    def make(*shape):
        return bool_mask(device, *shape) if dtype == torch.bool else float_mask(device, *shape, dtype=dtype)

    if kind == "transposed":
        mask = make(1, H, S, S).mT
    elif kind == "strided":
        mask = make(1, H, S, 2 * S)[..., ::2]
    elif kind == "unaligned":
        mask = make(H * S * S + 1)[1:].view(1, H, S, S)
    else:
        mask = make(1, 1, S, S).expand(B, H, S, S)
    check_call(simple_call(B, H, S, head_dim=D, device=device, attn_mask=mask, mask_grad=dtype != torch.bool))


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd", "packed"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["dense", "causal", "bool", "value_dim", "float32"])
def test_output_has_the_strides_that_stock_gives(plugin, launched, device, take_everything, layout, training, kind):
    mask = bool_mask(device, B, 1, S, S) if kind == "bool" else None
    call = simple_call(
        B, H, S, head_dim=D, device=device, layout=layout, attn_mask=mask, is_causal=kind == "causal",
        head_dim_v=128 if kind == "value_dim" else None, dtype=torch.float32 if kind == "float32" else torch.bfloat16,
    ).leaves(training)  # fmt: skip
    with launched():
        ours = call.run()
    plugin.disable()
    stock = call.run()
    assert ours.stride() == stock.stride()


@pytest.mark.parametrize("shape", [(S, D), (H, S, D), (2, 3, H, S, D)], ids=["rank 2", "rank 3", "rank 5"])
@pytest.mark.parametrize("causal", [False, True])
def test_ranks_other_than_four(check_call, device, shape, causal):
    tensors = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3)]
    check_call(Call(*tensors, is_causal=causal))


@pytest.mark.parametrize(
    ("query", "key"),
    [((1, H, S, D), (B, H, S, D)), ((B, H, S, D), (1, H, S, D)), ((B, H, S, D), (B, 1, S, D)),
     ((B, 1, S, D), (1, H, S, D)), ((3, 1, H, S, D), (1, 2, H, S, D))],
)  # fmt: skip
def test_batch_dimensions_that_broadcast(check_call, device, query, key):
    tensors = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in (query, key, key)]
    check_call(Call(*tensors))


# ---------------------------------------------------------------------------------------------------------------- masks

BROADCASTS = list(itertools.product([False, True], repeat=4))


def broadcast_shape(which):
    return [1 if one else size for one, size in zip(which, (B, H, S, S + 32))]


@pytest.mark.parametrize("which", BROADCASTS, ids=lambda w: "".join("1" if one else "n" for one in w))
def test_bool_mask_broadcasts_over_any_dimensions(check_call, device, which):
    mask = bool_mask(device, *broadcast_shape(which))
    check_call(simple_call(B, H, S, S + 32, D, device=device, attn_mask=mask))


@pytest.mark.parametrize("which", BROADCASTS, ids=lambda w: "".join("1" if one else "n" for one in w))
@pytest.mark.parametrize("mask_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_float_mask_and_its_gradient_broadcast_over_any_dimensions(check_call, device, which, mask_dtype):
    mask = float_mask(device, *broadcast_shape(which), dtype=mask_dtype)
    check_call(simple_call(B, H, S, S + 32, D, device=device, attn_mask=mask, mask_grad=True))


@pytest.mark.parametrize("shape", [(S, S), (1, S), (S, 1), (H, S, S), (1, 1, S)], ids=str)
def test_mask_of_lower_rank(check_call, device, shape):
    check_call(simple_call(B, H, S, head_dim=D, device=device, attn_mask=bool_mask(device, *shape)))
    mask = float_mask(device, *shape)
    check_call(simple_call(B, H, S, head_dim=D, device=device, attn_mask=mask, mask_grad=True))


def test_float_mask_with_minus_infinity_in_places(check_call, device):
    mask = float_mask(device, B, H, S, S).masked_fill(~bool_mask(device, B, 1, S, S), -INF)
    check_call(simple_call(B, H, S, head_dim=D, device=device, attn_mask=mask, mask_grad=True))


def test_only_the_mask_needs_a_gradient(plugin, launched, note, device, backend):
    call = simple_call(B, H, S, head_dim=D, device=device, attn_mask=float_mask(device, 1, H, S, S), mask_grad=True)
    grad_out = gradient_for(call)
    leaf = call.attn_mask.detach().requires_grad_()
    with plugin.sdpa_backend(backend), launched():
        out = F.scaled_dot_product_attention(call.query, call.key, call.value, attn_mask=leaf)
        (gradient,) = torch.autograd.grad(out, leaf, grad_out)
    note(check({"attn_mask": gradient}, expect(call, grad_out), None, call.describe()))


@pytest.mark.parametrize("wanted", ["query", "key", "value"])
def test_only_one_input_needs_a_gradient(plugin, launched, note, device, backend, wanted):
    call = simple_call(B, H, S, head_dim=D, device=device, is_causal=True)
    grad_out = gradient_for(call)
    leaf = getattr(call, wanted).detach().requires_grad_()
    with plugin.sdpa_backend(backend), launched():
        out = dataclasses.replace(call, **{wanted: leaf}).run()
        (gradient,) = torch.autograd.grad(out, leaf, grad_out)
    note(check({wanted: gradient}, expect(call, grad_out), None, call.describe()))


# ------------------------------------------------------------------------------------------------------------------ NaN


@pytest.mark.parametrize("kind", ["bool", "float", "causal"])
def test_nan_in_key_at_a_masked_position_does_not_leak(plugin, launched, device, backend, kind):
    call = simple_call(B, H, S, head_dim=D, device=device)
    clean = call.key.clone()
    call.key[:, :, S - 1] = math.nan
    rows = slice(None)
    if kind == "causal":
        call = dataclasses.replace(call, is_causal=True)
        rows = slice(0, S - 1)
    else:
        mask = torch.ones(1, 1, 1, S, dtype=torch.bool, device=device)
        mask[..., S - 1] = False
        if kind == "float":
            mask = torch.zeros(1, 1, 1, S, dtype=torch.bfloat16, device=device).masked_fill(~mask, -INF)
        call = dataclasses.replace(call, attn_mask=mask)
    with plugin.sdpa_backend(backend), launched():
        out = call.run()
    expected = attention_float64(dataclasses.replace(call, key=clean))
    assert out[:, :, rows].isfinite().all()
    assert (out[:, :, rows].double() - expected[:, :, rows]).abs().max() < 0.03


def test_nan_in_query_makes_its_row_nan_and_no_other(plugin, launched, device, backend):
    call = simple_call(B, H, S, head_dim=D, device=device)
    call.query[0, 1, 17] = math.nan
    with plugin.sdpa_backend(backend), launched():
        out = call.run()
    assert out[0, 1, 17].isnan().all()
    assert out.isnan().sum() == D


def test_nan_in_query_stays_visible_in_the_gradient(plugin, device, backend):
    call = simple_call(B, H, S, head_dim=D, device=device)
    call.query[0, 1, 17] = math.nan
    with plugin.sdpa_backend(backend):
        results = results_of(call, gradient_for(call))
    assert results["query"][0, 1, 17].isnan().all()
    assert results["key"][0, 1].isnan().any() and results["key"][1].isfinite().all()


# ------------------------------------------------------------------------------------------------------------------ GQA


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["dense", "causal", "bool", "float"])
def test_grouped_queries(check_call, device, kv_heads, kind):
    mask = {"bool": lambda: bool_mask(device, B, 8, S, S), "float": lambda: float_mask(device, 1, 8, S, S)}.get(kind)
    check_call(
        simple_call(
            B, 8, S, head_dim=D, kv_heads=kv_heads, device=device, is_causal=kind == "causal",
            attn_mask=mask() if mask else None, mask_grad=kind == "float",
        )
    )  # fmt: skip


@pytest.mark.cuda_only
def test_grouped_queries_never_repeat_key_and_value(plugin, launched, backend):
    call = simple_call(1, 32, 1, 65536, 128, kv_heads=1, device="cuda")
    with plugin.sdpa_backend(backend), launched():
        call.run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call.run()
    assert torch.cuda.max_memory_allocated() - before < call.key.numel() * call.key.element_size()


# -------------------------------------------------------------------------------------------------------------- dropout


def dropout_call(device, dtype=torch.float32):
    """Uniform attention whose value is the identity: the output shows which entries were kept."""
    query = torch.zeros(2, 3, 256, 64, dtype=dtype, device=device)
    key = torch.randn(2, 3, 64, 64, dtype=dtype, device=device)
    return query, key, torch.eye(64, dtype=dtype, device=device).expand(2, 3, 64, 64).contiguous()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_right_share_and_scales_it(plugin, launched, device, take_everything, p):
    torch.manual_seed(1)
    with launched():
        out = F.scaled_dot_product_attention(*dropout_call(device), dropout_p=p)
    kept = out != 0
    deviation = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.float().mean().item() - (1 - p)) < 5 * deviation
    assert torch.allclose(out[kept], torch.full_like(out[kept], 1 / 64 / (1 - p)), rtol=1e-3)
    flat = kept.float().flatten(0, 1)  # heads differ, rows differ
    assert not torch.equal(flat[0], flat[1]) and not torch.equal(flat[0, 0], flat[0, 1])


def test_dropout_of_everything_gives_zeros(plugin, device, take_everything):
    query, key, value = (t.requires_grad_() for t in dropout_call(device))
    out = F.scaled_dot_product_attention(query, key, value, dropout_p=1.0)
    gradients = torch.autograd.grad(out, (query, key, value), torch.ones_like(out))
    assert out.count_nonzero() == 0 and all(g.count_nonzero() == 0 for g in gradients)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_uses_the_same_entries_in_backward(plugin, note, device, take_everything, dtype, causal):
    p = 0.3
    options = {"dropout_p": p, "is_causal": causal}
    query, key, value = (t.requires_grad_() for t in dropout_call(device, dtype))
    torch.manual_seed(5)
    keep = F.scaled_dot_product_attention(query, key, value, **options) != 0
    call = simple_call(2, 3, 256, 64, 64, dtype=dtype, device=device, is_causal=causal).leaves()
    grad_out = gradient_for(call)
    torch.manual_seed(5)
    out = F.scaled_dot_product_attention(call.query, call.key, call.value, **options)
    gradients = torch.autograd.grad(out, (call.query, call.key, call.value), grad_out)

    wide = [t.detach().double().requires_grad_() for t in (call.query, call.key, call.value)]
    expected = attention_float64(Call(*wide, is_causal=causal), keep.double(), p)
    limit = 0.02 if dtype == torch.bfloat16 else 1e-4
    pairs = zip((out, *gradients), (expected, *torch.autograd.grad(expected, wide, grad_out.double())))
    for actual, wanted in pairs:
        assert torch.linalg.vector_norm(actual.double() - wanted) / torch.linalg.vector_norm(wanted) < limit


def test_dropout_follows_manual_seed(plugin, device, take_everything):
    arguments = dropout_call(device)

    def draw():
        return F.scaled_dot_product_attention(*arguments, dropout_p=0.5)

    torch.manual_seed(11)
    first, second = draw(), draw()
    torch.manual_seed(11)
    assert torch.equal(first, draw()) and torch.equal(second, draw())
    assert not torch.equal(first, second)


@pytest.mark.cuda_only
def test_a_call_never_synchronizes_with_the_host(plugin, launched, never_waits, backend):
    call = simple_call(B, H, S, head_dim=D, attn_mask=bool_mask("cuda", B, 1, S, S)).leaves()
    grad_out = gradient_for(call)

    def run():
        options = {"attn_mask": call.attn_mask, "dropout_p": 0.1}
        out = F.scaled_dot_product_attention(call.query, call.key, call.value, **options)
        out.backward(grad_out)

    with plugin.sdpa_backend(backend), launched():
        never_waits(run)


# ------------------------------------------------------------------------------------------------ derivatives, autocast


@pytest.mark.cuda_only
@pytest.mark.parametrize("causal", [False, True])
def test_double_backward(plugin, device, take_everything, causal):
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, 24, 16, device=device, requires_grad=True) for _ in range(3)]
    wide = [t.detach().double().requires_grad_() for t in tensors]

    def second(inputs, function):
        out = function(inputs)
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    ours = second(tensors, lambda i: F.scaled_dot_product_attention(*i, is_causal=causal))
    expected = second(wide, lambda i: attention_float64(Call(*i, is_causal=causal)))
    for actual, wanted in zip(ours, expected):
        assert (actual.double() - wanted).abs().max() < 1e-3 * wanted.abs().max()


@pytest.mark.cuda_only
def test_forward_mode_derivative(plugin, device, take_everything):
    query, key, value, tangent = (torch.randn(1, 2, 24, 16, device=device) for _ in range(4))
    with forward_ad.dual_level():
        out = F.scaled_dot_product_attention(forward_ad.make_dual(query, tangent), key, value)
        ours = forward_ad.unpack_dual(out).tangent
    wide = [t.double() for t in (query, key, value)]
    _, expected = torch.func.jvp(lambda q: attention_float64(Call(q, *wide[1:])), (wide[0],), (tangent.double(),))
    assert ours is not None and (ours.double() - expected).abs().max() < 1e-4


def test_function_transforms_compose(plugin, device, take_everything):
    query, key, value = (torch.randn(3, 2, 24, 16, device=device) for _ in range(3))

    def loss(q, k, v):
        return F.scaled_dot_product_attention(q, k, v).square().sum()

    def loss_float64(q, k, v):
        return attention_float64(Call(q, k, v)).square().sum()

    wide = [t.double() for t in (query, key, value)]
    for transform in (torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f)), torch.func.jacrev):
        ours, expected = transform(loss)(query, key, value), transform(loss_float64)(*wide)
        assert (ours.double() - expected).abs().max() < 1e-3 * expected.abs().max()
    mapped = torch.func.vmap(F.scaled_dot_product_attention)(query, key, value)
    assert (mapped.double() - attention_float64(Call(*wide))).abs().max() < 1e-4


@pytest.mark.cuda_only
def test_autocast_runs_in_its_dtype(plugin, launched, backend):
    call = simple_call(B, H, S, head_dim=D, dtype=torch.float32).leaves()
    with plugin.sdpa_backend(backend), launched(), torch.autocast("cuda", torch.bfloat16):
        out = call.run()
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert call.query.grad.dtype == torch.float32


# -------------------------------------------------------------------------------------------------------------- float32


@pytest.fixture
def allow_tf32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("kind", ["dense", "causal", "float"])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_float32_without_tf32_is_as_exact_as_stock(check_call, device, kind, head_dim):
    assert not torch.backends.cuda.matmul.allow_tf32
    mask = float_mask(device, 1, H, 512, 512, dtype=torch.float32) if kind == "float" else None
    options = {"is_causal": kind == "causal", "attn_mask": mask, "mask_grad": kind == "float"}
    check_call(simple_call(1, H, 512, head_dim=head_dim, dtype=torch.float32, device=device, **options))


@pytest.mark.parametrize("is_causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_float32_of_large_scores(check_call, device, head_dim, is_causal):
    """Scores of some hundreds, whose absolute errors the exponential makes relative ones."""
    call = simple_call(1, H, 500, head_dim=head_dim, dtype=torch.float32, device=device, is_causal=is_causal)
    call.query.mul_(60)
    check_call(call)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_float32_rows_of_any_size(check_call, device, head_dim):
    """Rows from small to large, and keys that a mask hides and that are larger than all others by far."""
    mask = torch.ones(1, 1, 1, 300, dtype=torch.bool, device=device)
    mask[..., 7] = False
    call = simple_call(1, H, 300, head_dim=head_dim, dtype=torch.float32, device=device, attn_mask=mask)
    sizes = torch.logspace(-3, 3, 300, device=device)[:, None]
    call.query.mul_(1 / sizes)
    call.key.mul_(sizes)
    call.value.mul_(sizes)
    for tensor in (call.key, call.value):
        tensor[..., 7, :] = 1e30
    check_call(call)


def test_float32_with_tf32_allowed(check_call, device, allow_tf32):
    check_call(simple_call(1, H, 512, head_dim=64, dtype=torch.float32, device=device), tf32=True)


# --------------------------------------------------------------------------------------------------------- whose choice


@pytest.mark.cuda_only
def test_sdpa_kernel_without_flash_is_stocks(plugin, launched, take_everything):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    call = simple_call(B, H, S, head_dim=D)
    with launched(False), sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        call.run()
    with launched(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        call.run()


def test_unknown_tensor_subclass_goes_to_stock(plugin, launched, device, take_everything):
    class Marked(torch.Tensor):
        pass

    call = simple_call(B, H, S, head_dim=D, device=device)
    call = dataclasses.replace(call, query=call.query.as_subclass(Marked))
    with launched(False):
        assert isinstance(call.run(), Marked)


@pytest.mark.cuda_only
def test_plugin_off_launches_nothing_of_ours(plugin, launched):
    plugin.disable()
    with launched(False):
        simple_call(B, H, S, head_dim=D, attn_mask=bool_mask("cuda", B, 1, S, S)).run()


def test_inference_mode(plugin, launched, note, device, take_everything):
    with torch.inference_mode():
        call = simple_call(B, H, S, head_dim=D, device=device, attn_mask=bool_mask(device, B, 1, S, S))
        out = call.run()
    clones = dataclasses.replace(
        call, query=call.query.clone(), key=call.key.clone(), value=call.value.clone(), attn_mask=call.attn_mask.clone()
    )
    note(check({"out": out}, expect(clones), None, call.describe()))


def test_unaligned_storage_offset_of_every_kind(check_call, device):
    for offset in (1, 2, 4):
        length = B * H * S * D
        tensors = [
            torch.randn(length + offset, device=device, dtype=torch.bfloat16)[offset:].view(B, H, S, D) for _ in "qkv"
        ]
        check_call(Call(*tensors))
    check_call(
        dataclasses.replace(Call(*tensors), query=tensor_in_layout((B, H, S, D), "bshd", torch.bfloat16, device, 3))
    )
