"""sdpa_backend(...): names, nesting, threads, exceptions, transforms. test_compile.py has torch.compile."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from hooked import counting, hooked, sample
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_flashbackend
from torch_flashbackend import sdpa_backend

sdpa = F.scaled_dot_product_attention


@pytest.fixture
def qkv():
    return [sample(2, 3, 8, 16, seed=i) for i in range(3)]


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="no backend 'cudnn'; choose among cuda, triton, math, stock"):
        sdpa_backend("cudnn")
    with pytest.raises(ValueError, match="at least one"):
        sdpa_backend()


@pytest.mark.parametrize("enabled", [False, True])
def test_math_on_a_cpu_whether_enabled_or_not(qkv, enabled):
    expected = sdpa(*qkv)
    if enabled:
        torch_flashbackend.enable()
    try:
        with sdpa_backend("math"), counting() as count:
            torch.testing.assert_close(sdpa(*qkv), expected)
            assert count("math") == 1
        with counting() as count:
            assert torch.equal(sdpa(*qkv), expected)
            assert count("math") == 0
    finally:
        torch_flashbackend.disable()


def test_the_first_that_takes_the_call_runs(qkv):
    expected = sdpa(*qkv)
    with counting() as count:
        with sdpa_backend("triton", "math", "stock"):
            torch.testing.assert_close(sdpa(*qkv), expected)
        assert (count("triton"), count("math"), count("stock")) == (0, 1, 0)
        with sdpa_backend("triton", "stock"):
            assert torch.equal(sdpa(*qkv), expected)
        assert (count("math"), count("stock")) == (1, 1)


def test_none_takes_it(qkv):
    with sdpa_backend("triton"), pytest.raises(RuntimeError, match="the tensors are on cpu"):
        sdpa(*qkv)


def test_the_inner_block_wins_and_the_outer_returns(qkv):
    with counting() as count:
        with sdpa_backend("math"):
            with sdpa_backend("stock"):
                sdpa(*qkv)
                assert (count("math"), count("stock")) == (0, 1)
            sdpa(*qkv)
            assert (count("math"), count("stock")) == (1, 1)
        sdpa(*qkv)
        assert (count("math"), count("stock")) == (1, 1)


def test_an_exception_ends_the_block(qkv):
    with pytest.raises(KeyError), sdpa_backend("triton"):
        raise KeyError
    sdpa(*qkv)
    with sdpa_backend("math"):
        with pytest.raises(RuntimeError), sdpa_backend("triton"):
            sdpa(*qkv)
        with counting() as count:
            sdpa(*qkv)
            assert count("math") == 1


def test_one_object_may_be_entered_twice(qkv):
    mode = sdpa_backend("math")
    with counting() as count, mode, mode:
        sdpa(*qkv)
        assert count("math") == 1


def test_decorator(qkv):
    @sdpa_backend("math")
    def function(*args):
        """Its docstring."""
        return sdpa(*args)

    with counting() as count:
        function(*qkv)
        assert count("math") == 1
    assert function.__name__ == "function" and function.__doc__ == "Its docstring."


def test_it_holds_for_its_thread_only(qkv):
    results = {}

    def other():
        with counting():
            sdpa(*qkv)
            results["math"] = torch_flashbackend.stats().total("math")

    with sdpa_backend("math"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert results == {"math": 0}


def test_enabled_and_disabled_inside_the_block(qkv):
    expected = sdpa(*qkv)
    with sdpa_backend("math"):
        torch_flashbackend.enable()
        torch.testing.assert_close(sdpa(*qkv), expected)
        torch_flashbackend.disable()
        with counting() as count:
            torch.testing.assert_close(sdpa(*qkv), expected)
            assert count("math") == 1
    assert not torch_flashbackend.is_enabled()


def test_stock_is_not_taken_by_an_enabled_plugin(qkv):
    expected = sdpa(*qkv)
    with hooked(), sdpa_backend("stock"), counting() as count:
        assert torch.equal(sdpa(*qkv), expected)
        assert count("triton") == 0


@pytest.mark.parametrize("call", [torch.ops.aten.scaled_dot_product_attention, None])
def test_the_operator_called_by_name_is_covered(qkv, call):
    call = call or torch.ops.aten.scaled_dot_product_attention.default
    with sdpa_backend("math"), counting() as count:
        call(*qkv)
        assert count("math") == 1


def test_sdpa_kernel_is_honoured(qkv):
    with sdpa_backend("math", "stock"), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), counting() as count:
        with pytest.raises(RuntimeError):
            sdpa(*qkv)
        assert count("math") == 0


def test_gradients_and_options(qkv):
    query, key, value = (t.requires_grad_() for t in qkv)
    bias = sample(1, 1, 8, 8, grad=True)
    for options in ({"is_causal": True, "scale": 0.2}, {"attn_mask": bias}):
        expected = torch.autograd.grad(sdpa(query, key, value, **options).sum(), query)[0]
        with sdpa_backend("math"):
            out = sdpa(query, key, value, **options)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), query)[0], expected)


def test_inference_tensors():
    with torch.inference_mode():
        query = sample(2, 3, 8, 16)
        expected = sdpa(query, query, query)
        with sdpa_backend("math"), counting() as count:
            torch.testing.assert_close(sdpa(query, query, query), expected)
            assert count("math") == 1


def test_autocast(qkv):
    with torch.autocast("cpu", torch.bfloat16), sdpa_backend("math"):
        out = sdpa(*qkv)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), sdpa(*qkv), atol=2e-2, rtol=2e-2)


def test_causal_bias_objects(qkv):
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    for bias, length in ((causal_upper_left(8, 8), 8), (causal_lower_right(8, 8), 8), (causal_lower_right(4, 8), 4)):
        query = qkv[0][..., :length, :]
        expected = sdpa(query, *qkv[1:], bias)
        with sdpa_backend("math"), counting() as count:
            torch.testing.assert_close(sdpa(query, *qkv[1:], bias), expected)
            assert count("math") == 1


def test_nested_tensors_are_stocks():
    nested = torch.nested.nested_tensor([sample(4, 2, 8), sample(6, 2, 8)], layout=torch.jagged).transpose(1, 2)
    with sdpa_backend("math"), pytest.raises(RuntimeError, match="nested tensors are not supported; add"):
        sdpa(nested, nested, nested)
    with sdpa_backend("math", "stock"):
        assert sdpa(nested, nested, nested).is_nested


def test_checkpointing_with_the_documented_context(qkv):
    from torch.utils.checkpoint import checkpoint

    query, key, value = (t.requires_grad_() for t in qkv)
    expected = torch.autograd.grad(sdpa(query, key, value).sum(), query)[0]
    out = checkpoint(
        sdpa, query, key, value, use_reentrant=False, context_fn=lambda: (sdpa_backend("math"), sdpa_backend("math"))
    )
    torch.testing.assert_close(torch.autograd.grad(out.sum(), query)[0], expected)


def test_a_function_that_runs_after_its_call_cannot_be_decorated():
    def generator():
        yield 1

    async def coroutine():
        return 1

    for function in (generator, coroutine):
        with pytest.raises(TypeError, match="runs after its call"):
            sdpa_backend("triton")(function)


def test_the_math_backend_takes_a_head_dim_of_0():
    query, value = torch.randn(1, 2, 4, 0), torch.randn(1, 2, 4, 8)
    with sdpa_backend("math"):
        out = F.scaled_dot_product_attention(query, query, value)
    torch.testing.assert_close(out, value.mean(-2, keepdim=True).expand(1, 2, 4, 8))


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_a_traced_program_holds_the_choice_for_other_sizes(rank):
    """torch.jit.trace, under which sizes are tensors."""

    def function(query, key, value):
        with sdpa_backend("math"):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def sample(seqlen):
        return [torch.randn(*(1, 2, 3)[4 - rank :] if rank < 5 else (1, 2, 3), seqlen, 16) for _ in range(3)]

    traced = torch.jit.trace(function, sample(8))
    longer = sample(11)
    torch.testing.assert_close(traced(*longer), sdpa(*longer, is_causal=True))
    assert "flashbackend::sdpa" in str(traced.graph)
