"""torch_flashbackend.attention: the function, on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hooked import counting, run_python, sample

import torch_flashbackend
from torch_flashbackend import attention, direct, routing

sdpa = F.scaled_dot_product_attention


def inputs(query_shape, key_shape, grad=False, dtype=torch.float32):
    return [
        sample(*shape, seed=i, grad=grad, dtype=dtype) for i, shape in enumerate((query_shape, key_shape, key_shape))
    ]


SHAPES = {
    "rank 2": ((8, 16), (12, 16)),
    "rank 3": ((3, 8, 16), (3, 12, 16)),
    "rank 4": ((2, 3, 8, 16), (2, 3, 12, 16)),
    "rank 5": ((2, 2, 3, 8, 16), (2, 2, 3, 12, 16)),
    "rank 6": ((2, 1, 2, 3, 8, 16), (1, 2, 2, 3, 12, 16)),
    "broadcast": ((2, 3, 8, 16), (1, 1, 12, 16)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", [None, "causal", "bool", "full bool", "float"])
def test_output_logsumexp_and_gradients(shape, mask):
    query, key, value = inputs(*SHAPES[shape], grad=True)
    options = {"is_causal": mask == "causal"}
    leaves = [query, key, value]
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    if mask == "bool":
        options["attn_mask"] = sample(8, 12, seed=4) > -0.5
    elif mask == "full bool":
        options["attn_mask"] = sample(*batch, 8, 12, seed=4) > -0.5
    elif mask == "float":
        options["attn_mask"] = sample(*(1 for _ in batch), 8, 12, seed=4, grad=True)
        leaves.append(options["attn_mask"])
    expected = sdpa(query, key, value, **options)
    out = attention(query, key, value, **options)
    with_lse, logsumexp = attention(query, key, value, **options, return_lse=True)
    scores = query @ key.transpose(-2, -1) / 4
    if mask == "causal":
        scores = scores.masked_fill(~torch.ones(8, 12, dtype=torch.bool).tril(), -torch.inf)
    elif mask == "float":
        scores = scores + options["attn_mask"]
    elif mask is not None:
        scores = scores.masked_fill(~options["attn_mask"], -torch.inf)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(with_lse, expected)
    assert logsumexp.shape == out.shape[:-1] and logsumexp.dtype is torch.float32 and not logsumexp.requires_grad
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1).detach())
    grad_out = sample(*out.shape, seed=3)
    wanted = torch.autograd.grad(expected, leaves, grad_out)
    for result in (out, with_lse):
        torch.testing.assert_close(torch.autograd.grad(result, leaves, grad_out), wanted)


def test_gqa():
    query, key, value = sample(2, 6, 8, 16), sample(2, 2, 12, 16), sample(2, 2, 12, 16)
    expected = sdpa(query, key, value, enable_gqa=True)
    out, _ = attention(query, key, value, enable_gqa=True, return_lse=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(attention(query, key, value, enable_gqa=True), expected)


def test_rank_four_is_used_as_it_is():
    query, key, value = inputs((2, 3, 8, 16), (2, 3, 12, 16))
    batch, *same = direct._to_rank_4(query, key, value, None, False)
    assert batch is None
    assert same[0] is query and same[1] is key and same[2] is value


def test_views_copy_nothing():
    query, key, value = inputs((2, 3, 8, 16), (1, 1, 12, 16))
    _, q, k, v, _ = direct._to_rank_4(query, key, value, None, False)
    assert [t.data_ptr() for t in (q, k, v)] == [t.data_ptr() for t in (query, key, value)]
    assert q.shape[0] == k.shape[0] == 2 and k.shape[1] == 1
    _, q, k, v, mask = direct._to_rank_4(
        *inputs((2, 2, 3, 8, 16), (2, 2, 3, 12, 16)), torch.ones(1, 1, 1, 8, 12), False
    )
    assert mask.shape == (1, 1, 8, 12) and q.shape == (4, 3, 8, 16)


def test_a_row_without_a_key_is_zeros():
    query, key, value = inputs((1, 1, 4, 8), (1, 1, 4, 8))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    out, logsumexp = attention(query, key, value, mask, return_lse=True)
    assert not out[0, 0, 1].any() and logsumexp[0, 0, 1] == -torch.inf


def test_dropout_follows_the_seed():
    query, key, value = inputs((1, 2, 32, 8), (1, 2, 32, 8))

    def call(seed):
        torch.manual_seed(seed)
        return attention(query, key, value, dropout_p=0.5, return_lse=True)[0]

    assert torch.equal(call(1), call(1))
    assert not torch.equal(call(1), call(2))
    assert not call(1).equal(attention(query, key, value, return_lse=True)[0])


def test_wrong_arguments_raise_stocks_errors():
    query, key, value = inputs((2, 3, 8, 16), (2, 3, 12, 16))
    with pytest.raises(RuntimeError) as expected:
        sdpa(query, key[..., :8], value)
    with pytest.raises(RuntimeError) as error:
        attention(query, key[..., :8], value)
    assert str(error.value) == str(expected.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": [1.0]}, "argument 'query' must be Tensor, not list"),
        ({"key": None}, "argument 'key' must be Tensor, not NoneType"),
        ({"value": "v"}, "argument 'value' must be Tensor, not str"),
        ({"attn_mask": [[True]]}, "argument 'attn_mask' must be Tensor, not list"),
        ({"scale": "1"}, "argument 'scale' must be float, not str"),
    ],
)
def test_what_is_no_tensor_is_named(change, message):
    arguments = dict(zip(("query", "key", "value"), inputs((2, 3, 8, 16), (2, 3, 12, 16))))
    with pytest.raises(TypeError, match=message):
        attention(**arguments | change)


def test_meta_tensors_give_shapes():
    query, key, value = (tensor.to("meta") for tensor in inputs((2, 3, 8, 16), (2, 3, 12, 16)))
    assert attention(query, key, value).shape == (2, 3, 8, 16)
    out, logsumexp = attention(query, key, value, return_lse=True)
    assert out.shape == (2, 3, 8, 16) and logsumexp.shape == (2, 3, 8)


def test_with_logsumexp_stock_is_never_the_way_out():
    query = sample(1, 2, 8, 16).to(torch.int64)
    with pytest.raises(RuntimeError, match=r"triton: .*\n.*math: "):
        attention(query, query, query, return_lse=True)


def test_autocast():
    query, key, value = inputs((2, 3, 8, 16), (2, 3, 12, 16))
    with torch.autocast("cpu", torch.bfloat16):
        expected = sdpa(query, key, value)
        out = attention(query, key, value)
        with_lse, logsumexp = attention(query, key, value, return_lse=True)
    assert out.dtype is with_lse.dtype is torch.bfloat16 and logsumexp.dtype is torch.float32
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(with_lse, expected, atol=2e-2, rtol=2e-2)


def test_function_transforms():
    from torch.func import grad, jvp, vmap

    query, key, value = inputs((2, 3, 8, 16), (2, 3, 12, 16))
    tangent = sample(2, 3, 8, 16, seed=6)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for call in (
            lambda f: grad(lambda q: f(q, key, value).sum())(query),
            lambda f: vmap(f)(query, key, value),
            lambda f: jvp(lambda q: f(q, key, value), (query,), (tangent,))[1],
        ):
            expected = call(sdpa)
            torch.testing.assert_close(call(attention), expected)
            with_lse = call(lambda q, k, v: attention(q, k, v, return_lse=True)[0])
            torch.testing.assert_close(with_lse, expected)


def test_stock_is_not_judged_again_by_an_enabled_plugin():
    from hooked import hooked

    query, key, value = inputs((2, 3, 8, 16), (2, 3, 12, 16), grad=True)
    expected = sdpa(query, key, value)
    with hooked(), counting() as count:
        out = direct.run_stock(query, key, value)
        assert count("triton") == 0
    assert torch.equal(out, expected)
    out.sum().backward()
    assert query.grad is not None


def test_a_failing_kernel_leaves_the_next_backend(monkeypatch):
    from torch_flashbackend import decisions, ops

    class Unavailable(RuntimeError):
        pass

    def fail(*args, **kwargs):
        raise Unavailable("no PTX")

    def decide(problem, allowed=None):
        return routing.Decision("triton" if allowed is None or "triton" in allowed else allowed[0], "", "query")

    decisions.forget()
    monkeypatch.setattr(decisions, "kernel_failures", lambda: (Unavailable,))
    monkeypatch.setattr(decisions, "_warned", set())
    monkeypatch.setattr(routing, "decide", decide)
    monkeypatch.setattr(ops, "run", fail)
    query, key, value = inputs((2, 3, 8, 16), (2, 3, 12, 16))
    expected = sdpa(query, key, value)
    with pytest.warns(RuntimeWarning, match="math runs the call instead: no PTX"):
        out, _ = attention(query, key, value, return_lse=True)
    torch.testing.assert_close(out, expected)
    with pytest.warns(RuntimeWarning, match="stock runs the call instead: no PTX"):
        torch.testing.assert_close(attention(query, key, value), expected)
    with torch_flashbackend.sdpa_backend("triton"), pytest.raises(Unavailable):
        sdpa(query, key, value)
    decisions.forget()


def test_a_traced_program_serves_other_sizes():
    """torch.jit.trace, under which sizes are tensors."""

    def function(query, key, value):
        return attention(query, key, value, is_causal=True, return_lse=True)

    traced = torch.jit.trace(function, inputs((2, 3, 8, 16), (2, 3, 12, 16)))
    others = inputs((1, 4, 7, 16), (1, 4, 9, 16))
    for actual, expected in zip(traced(*others), function(*others)):
        torch.testing.assert_close(actual, expected)


def test_public_names():
    out = run_python("""
        import torch_flashbackend
        import sys
        assert "torch" not in sys.modules, "importing the package must not import torch"
        assert set(torch_flashbackend.__all__) <= set(dir(torch_flashbackend))
        torch_flashbackend.enable()
        for name in torch_flashbackend.__all__:
            assert callable(getattr(torch_flashbackend, name)), name
        from torch_flashbackend import attention, explain, sdpa_backend, stats, verify
        assert callable(stats) and callable(explain) and callable(verify) and callable(attention)
        try:
            torch_flashbackend.nothing
        except AttributeError as error:
            print(error)
    """)
    assert out.strip() == "module 'torch_flashbackend' has no attribute 'nothing'"
