"""The kernel hook, at CPU's key: each of stock's operators must be answered as its meta function says, to the stride.

A CPU build has no kernels for these operators, so a stand-in is registered where a test needs stock to be called.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from hooked import counting, forget_kernels_from_python, hooked, sample, take_valid
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_flashbackend import _torch, decisions, kernel_hook, ops, override, reference, routing, sdpa_backend

aten = torch.ops.aten
HALF = torch.float16
OPS = (*kernel_hook.FORWARDS, *kernel_hook.BACKWARDS.values())

SHAPES = {
    "square": ((2, 4, 64, 32), (2, 4, 64, 32), 32),
    "odd length": ((2, 4, 37, 32), (2, 4, 50, 32), 32),
    "value head_dim": ((2, 4, 37, 32), (2, 4, 50, 32), 16),
    "gqa": ((2, 4, 37, 32), (2, 2, 50, 32), 32),
    "one query": ((2, 4, 1, 32), (2, 4, 50, 32), 32),
}
LAYOUTS = {
    "contiguous": lambda t: t,
    "bshd": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "packed": lambda t: torch.stack((t, t), 2).transpose(1, 3).contiguous().transpose(1, 3)[:, :, 0],
}


def tensors(shape, layout, dtype=HALF, bshd=False):
    query_shape, key_shape, head_dim_v = SHAPES[shape]
    value_shape = (*key_shape[:-1], head_dim_v)
    result = [
        LAYOUTS[layout](sample(*s, seed=i).to(dtype)) for i, s in enumerate((query_shape, key_shape, value_shape))
    ]
    return [t.transpose(1, 2) for t in result] if bshd else result


def assert_as_meta(result, op, *args, **kwargs):
    """Shapes, strides, dtypes and devices of real outputs equal those of the operator's fake outputs."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake_args = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        expected = op(*fake_args, **kwargs)
    assert len(result) == len(expected)
    for index, (real, fake) in enumerate(zip(result, expected)):
        if isinstance(fake, torch.Tensor):
            assert real.shape == fake.shape, index
            assert real.dtype == fake.dtype, index
            # What the meta functions call "meta" is a note on CUDA graphs; and strides of one element mean nothing.
            if fake.device.type != "meta" and fake.numel() > 1:
                steps = [(a, b) for a, b, n in zip(real.stride(), fake.stride(), fake.shape) if n > 1]
                assert all(a == b for a, b in steps), (index, real.stride(), fake.stride())
        else:
            assert real == fake, index


def oracle(query, key, value, mask=None, is_causal=False, scale=None):
    out, logsumexp = reference.attention(
        query.double(), key.double(), value.double(), mask, 0.0, is_causal, scale, return_lse=True
    )
    return out, logsumexp.float()


@contextlib.contextmanager
def stand_ins():
    """Kernels at CPU's key that record their name and answer with it."""
    called = []
    library = torch.library.Library("aten", "IMPL")

    def make(name):
        schema = getattr(aten, name).default._schema

        def kernel(*args, **kwargs):
            called.append(name)
            query = args[0]
            results = []
            for returned in schema.returns:
                results.append(torch.zeros_like(query) if str(returned.type) == "Tensor" else 0)
            return tuple(results)

        return kernel

    for name in OPS:
        library.impl(name, make(name), "CPU")
    forget_kernels_from_python(library)
    try:
        yield called
    finally:
        library._destroy()


@contextlib.contextmanager
def over_stand_ins(monkeypatch, decide=take_valid):
    monkeypatch.setattr(override, "_refuse_if_taken", lambda op, key: None)
    with stand_ins() as called, hooked(decide, kernel_key="CPU"):
        yield called


# Forwards.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", ["square", "odd length", "gqa", "one query"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_flash(shape, layout, is_causal):
    query, key, value = tensors(shape, layout)
    if is_causal and query.shape[2] != key.shape[2]:
        pytest.skip("aligned at the other end in stock's flash kernel")
    args = (query, key, value, 0.0, is_causal, False)
    with hooked(kernel_key="CPU"):
        result = aten._scaled_dot_product_flash_attention(*args, scale=0.3)
    assert_as_meta(result, aten._scaled_dot_product_flash_attention, *args, scale=0.3)
    out, logsumexp = oracle(query, key, value, None, is_causal, 0.3)
    torch.testing.assert_close(result[0].double(), out, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(result[1], logsumexp, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", ["square", "odd length", "gqa"])
def test_flash_forward_dense(shape, layout):
    query, key, value = tensors(shape, layout, bshd=True)
    args = (query, key, value, None, None, query.shape[1], key.shape[1], 0.0, False, False)
    with hooked(kernel_key="CPU"):
        result = aten._flash_attention_forward(*args, scale=0.3)
    assert_as_meta(result, aten._flash_attention_forward, *args, scale=0.3)
    out, logsumexp = oracle(*(t.transpose(1, 2) for t in (query, key, value)), scale=0.3)
    torch.testing.assert_close(result[0].double(), out.transpose(1, 2), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(result[1], logsumexp, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", ["square", "odd length", "value head_dim", "one query"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("compute_log_sumexp", [False, True])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_efficient(shape, layout, bias, compute_log_sumexp, dtype):
    query, key, value = tensors(shape, layout, dtype)
    attn_bias = full_bias(query, key, dtype) if bias else None
    args = (query, key, value, attn_bias, compute_log_sumexp, 0.0, not bias)
    with hooked(kernel_key="CPU"):
        result = aten._scaled_dot_product_efficient_attention(*args)
    assert_as_meta(result, aten._scaled_dot_product_efficient_attention, *args)
    out, logsumexp = oracle(query, key, value, attn_bias, not bias)
    torch.testing.assert_close(result[0].double(), out, atol=2e-3, rtol=2e-3)
    if compute_log_sumexp:
        length = query.shape[2]
        logsumexp = logsumexp.masked_fill(logsumexp == -torch.inf, torch.inf)
        torch.testing.assert_close(result[1][..., :length], logsumexp, atol=2e-3, rtol=2e-3)
        assert (result[1][..., length:] == torch.inf).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_cudnn(shape, layout, bias):
    query, key, value = tensors(shape, layout)
    attn_bias = full_bias(query, key, HALF) if bias else None
    args = (query, key, value, attn_bias, True, 0.0, False, False)
    with hooked(kernel_key="CPU"):
        result = aten._scaled_dot_product_cudnn_attention(*args)
    assert_as_meta(result, aten._scaled_dot_product_cudnn_attention, *args)
    out, logsumexp = oracle(query, key, value, attn_bias)
    torch.testing.assert_close(result[0].double(), out, atol=2e-3, rtol=2e-3)
    logsumexp = logsumexp.masked_fill(logsumexp == -torch.inf, torch.inf)
    torch.testing.assert_close(result[1].squeeze(-1), logsumexp, atol=2e-3, rtol=2e-3)


def full_bias(query, key, dtype):
    """[B, H, Sq, Sk] of which batch and heads have stride 0; its first row is masked entirely."""
    bias = sample(1, 1, query.shape[2], key.shape[2], seed=8).to(dtype)
    bias[:, :, 0] = -torch.inf
    return bias.expand(*query.shape[:3], key.shape[2])


# Backwards. What stock's forward would have left behind is made by hand.


def expected_gradients(query, key, value, bias, is_causal, grad_out):
    inputs = [t.double().detach().requires_grad_() for t in (query, key, value, *([bias] if bias is not None else []))]
    out = reference.attention(*inputs[:3], inputs[3] if bias is not None else None, 0.0, is_causal)
    return torch.autograd.grad(out, inputs, grad_out.double())


def hooked_backwards():
    """The plugin with all backwards hooked, as after a forward of each kind."""
    stack = contextlib.ExitStack()
    stack.enter_context(hooked(kernel_key="CPU"))
    for op in kernel_hook.FORWARDS:
        override._installed.kernels.forward_taken(op)
    return stack


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", ["square", "odd length", "gqa"])
def test_flash_backward(shape, layout):
    query, key, value = tensors(shape, layout)
    is_causal = query.shape[2] == key.shape[2]
    out, logsumexp = oracle(query, key, value, None, is_causal)
    grad_out = sample(*out.shape, seed=5).half()
    none = torch.empty(0)
    args = (
        grad_out,
        query,
        key,
        value,
        out.half(),
        logsumexp,
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        is_causal,
    )
    with hooked_backwards():
        grads = aten._scaled_dot_product_flash_attention_backward(*args, none, none)
    assert_as_meta(grads, aten._scaled_dot_product_flash_attention_backward, *args, none, none)
    expected = expected_gradients(query, key, value, None, is_causal, grad_out)
    for grad, wanted in zip(grads, expected):
        torch.testing.assert_close(grad.double(), wanted, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flash_forward_backward_dense(layout):
    query, key, value = tensors("odd length", layout, bshd=True)
    heads_first = [t.transpose(1, 2) for t in (query, key, value)]
    out, logsumexp = oracle(*heads_first)
    grad_out = sample(*out.shape, seed=5).half()
    none = torch.empty(0)
    args = (
        grad_out.transpose(1, 2), query, key, value, out.half().transpose(1, 2), logsumexp, None, None,
        query.shape[1], key.shape[1], 0.0, False, none, none,
    )  # fmt: skip
    with hooked_backwards():
        grads = aten._flash_attention_backward(*args)
    assert_as_meta(grads, aten._flash_attention_backward, *args)
    for grad, wanted in zip(grads, expected_gradients(*heads_first, None, False, grad_out)):
        torch.testing.assert_close(grad.double().transpose(1, 2), wanted, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("masked_row", [torch.inf, -torch.inf])
@pytest.mark.parametrize("bias_grad", [False, True])
@pytest.mark.parametrize("shape", ["square", "odd length", "value head_dim"])
def test_efficient_backward_takes_either_logsumexp_of_a_masked_row(shape, bias_grad, masked_row):
    query, key, value = tensors(shape, "bshd")
    bias = full_bias(query, key, HALF)
    out, logsumexp = oracle(query, key, value, bias)
    logsumexp = logsumexp.masked_fill(logsumexp == -torch.inf, masked_row)
    logsumexp = torch.nn.functional.pad(logsumexp, (0, -query.shape[2] % 32), value=torch.inf)
    grad_out = sample(*out.shape, seed=5).half()
    seed = torch.zeros((), dtype=torch.int64)
    args = (grad_out, query, key, value, bias, out.half(), logsumexp, seed, seed, 0.0, [True, True, True, bias_grad])
    with hooked_backwards():
        grads = aten._scaled_dot_product_efficient_attention_backward(*args)
    assert_as_meta(grads, aten._scaled_dot_product_efficient_attention_backward, *args)
    expected = expected_gradients(query, key, value, bias, False, grad_out)
    for grad, wanted in zip(grads if bias_grad else grads[:3], expected):
        torch.testing.assert_close(grad.double(), wanted, atol=5e-3, rtol=5e-3)
    assert not grads[0][:, :, 0].any()


def test_backward_without_a_logsumexp():
    """Under torch.func.grad of vmap the forward is told that nobody needs it; stock's backward then raises."""
    query, key, value = tensors("odd length", "bshd")
    out, _ = oracle(query, key, value)
    grad_out = sample(*out.shape, seed=5).half()
    seed, nothing = torch.zeros((), dtype=torch.int64), torch.empty(*query.shape[:2], 0)
    efficient = (grad_out, query, key, value, None, out.half(), nothing, seed, seed, 0.0, [True, True, True, False])
    cudnn = (grad_out, query, key, value, out.half(), nothing, seed, seed, None, None, None, query.shape[2],
             key.shape[2], 0.0, False)  # fmt: skip
    expected = expected_gradients(query, key, value, None, False, grad_out)
    with hooked_backwards():
        for grads in (
            aten._scaled_dot_product_efficient_attention_backward(*efficient)[:3],
            aten._scaled_dot_product_cudnn_attention_backward(*cudnn),
        ):
            for grad, wanted in zip(grads, expected, strict=True):
                torch.testing.assert_close(grad.double(), wanted, atol=5e-3, rtol=5e-3)


def test_cudnn_backward():
    query, key, value = tensors("value head_dim", "bshd")
    bias = full_bias(query, key, HALF)
    out, logsumexp = oracle(query, key, value, bias)
    grad_out = sample(*out.shape, seed=5).half()
    seed = torch.zeros((), dtype=torch.int64)
    args = (
        grad_out, query, key, value, out.half(), logsumexp[..., None], seed, seed, bias, None, None,
        query.shape[2], key.shape[2], 0.0, False,
    )  # fmt: skip
    with hooked_backwards():
        grads = aten._scaled_dot_product_cudnn_attention_backward(*args)
    assert_as_meta(grads, aten._scaled_dot_product_cudnn_attention_backward, *args)
    for grad, wanted in zip(grads, expected_gradients(query, key, value, bias, False, grad_out)):
        torch.testing.assert_close(grad.double(), wanted, atol=5e-3, rtol=5e-3)


# PyTorch's autograd around both.


@pytest.mark.parametrize("op", ["flash", "efficient", "cudnn"])
def test_autograd_around_the_operators(op):
    query, key, value = (t.requires_grad_() for t in tensors("odd length", "contiguous"))
    call = {
        "flash": lambda: aten._scaled_dot_product_flash_attention(query, key, value)[0],
        "efficient": lambda: aten._scaled_dot_product_efficient_attention(query, key, value, None, True)[0],
        "cudnn": lambda: aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)[0],
    }[op]
    with hooked(kernel_key="CPU"), counting() as count:
        out = call()
        grad_out = sample(*out.shape, seed=5).half()
        grads = torch.autograd.grad(out, (query, key, value), grad_out)
        assert count("triton") == 2
    for grad, wanted in zip(grads, expected_gradients(query, key, value, None, False, grad_out)):
        torch.testing.assert_close(grad.double(), wanted, atol=5e-3, rtol=5e-3)


def test_inference_tensors_are_taken():
    with hooked(kernel_key="CPU"), torch.inference_mode(), counting() as count:
        query, key, value = tensors("odd length", "contiguous")
        out = aten._scaled_dot_product_flash_attention(query, key, value)[0]
        assert count("triton") == 1
    assert out.is_inference()
    torch.testing.assert_close(out.double(), oracle(query, key, value)[0], atol=2e-3, rtol=2e-3)


def test_vmap_reaches_the_operators():
    with hooked(kernel_key="CPU"):
        query, key, value = (t[None].repeat(3, 1, 1, 1, 1) for t in tensors("square", "contiguous"))
        out = torch.func.vmap(lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v)[0])(query, key, value)
    for i in range(3):
        torch.testing.assert_close(out[i].double(), oracle(query[i], key[i], value[i])[0], atol=2e-3, rtol=2e-3)


# Calls that stay stock's.


def flash(query, key, value, **kwargs):
    return aten._scaled_dot_product_flash_attention(query, key, value, **kwargs)


STOCKS = {
    "dropout": lambda q, k, v: flash(q, k, v, dropout_p=0.1),
    "debug mask": lambda q, k, v: flash(q, k, v, return_debug_mask=True),
    "causal, lengths differ, rows not in a line": lambda q, k, v: flash(q, k[:, :, :32], v[:, :, :32], is_causal=True),
    "float32": lambda q, k, v: flash(q.float(), k.float(), v.float()),
    "odd head_dim": lambda q, k, v: flash(q[..., :30], k[..., :30], v[..., :30]),
    "shapes": lambda q, k, v: flash(q, k[:1], v),
    "alibi": lambda q, k, v: aten._flash_attention_forward(
        q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1),
        torch.tensor([0, 64]), torch.tensor([0, 64]), 64, 64, 0.0, False, False, alibi_slopes=torch.ones(4),
    ),
    "packed, dropout": lambda q, k, v: aten._flash_attention_forward(
        q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1),
        torch.tensor([0, 64]), torch.tensor([0, 64]), 64, 64, 0.1, False, False,
    ),
    "dense, lengths of keys used": lambda q, k, v: aten._flash_attention_forward(
        q, k, v, None, None, 4, 4, 0.0, False, False, seqused_k=torch.tensor([2, 3])
    ),
    "bias and causal": lambda q, k, v: aten._scaled_dot_product_efficient_attention(
        q, k, v, full_bias(q, k, HALF), True, 0.0, True
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STOCKS)
def test_left_to_stock(monkeypatch, name):
    query, key, value = tensors("square", "contiguous")
    with over_stand_ins(monkeypatch) as called, counting() as count:
        with contextlib.suppress(NotImplementedError):
            STOCKS[name](query, key, value)
        assert len(called) == 1
        assert count("triton") == 0
        assert not _torch.thread_mark.stock


def test_an_explicit_choice_of_another_backend_is_honoured(monkeypatch):
    query, key, value = tensors("square", "contiguous")
    with over_stand_ins(monkeypatch) as called:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            aten._scaled_dot_product_cudnn_attention(query, key, value, None, False)
        assert called == ["_scaled_dot_product_cudnn_attention"]
        aten._scaled_dot_product_cudnn_attention(query, key, value, None, False)
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
            aten._scaled_dot_product_cudnn_attention(query, key, value, None, False)
        assert len(called) == 1


def test_a_marked_call_is_not_judged_again(monkeypatch):
    query, key, value = tensors("square", "contiguous")
    with over_stand_ins(monkeypatch) as called, counting() as count:
        _torch.thread_mark.stock = True
        try:
            flash(query, key, value)
        finally:
            _torch.thread_mark.stock = False
        assert called == ["_scaled_dot_product_flash_attention"]
        assert count("triton") + count("stock") == 0


def test_no_backward_is_hooked_before_a_forward_was_taken(monkeypatch):
    query, key, value = tensors("square", "contiguous")
    backward = kernel_hook.BACKWARDS[kernel_hook.FLASH]

    def left(problem, allowed=None):
        return routing.Decision("stock", "left", "query")

    with over_stand_ins(monkeypatch, left):
        flash(query, key, value)
        assert backward not in override._installed.kernels._hooked
    with over_stand_ins(monkeypatch):
        flash(query, key, value)
        assert backward in override._installed.kernels._hooked
        assert kernel_hook.BACKWARDS[kernel_hook.CUDNN] not in override._installed.kernels._hooked


def test_a_kernel_that_does_not_compile_is_stocks(monkeypatch):
    class Unavailable(RuntimeError):
        pass

    def fail(*args, **kwargs):
        raise Unavailable("no PTX")

    monkeypatch.setattr(decisions, "kernel_failures", lambda: (Unavailable,))
    monkeypatch.setattr(decisions, "_warned", set())
    monkeypatch.setattr(kernel_hook, "_forward", fail)
    query, key, value = tensors("square", "contiguous")
    with over_stand_ins(monkeypatch) as called:
        with pytest.warns(RuntimeWarning, match="no PTX"):
            flash(query, key, value)
        flash(query, key, value)
        assert len(called) == 2


def test_the_schemas_are_those_that_the_hooks_were_written_for():
    """A new argument of stock's must be understood before it is passed over."""
    import inspect

    answers = {
        kernel_hook.FLASH: kernel_hook._flash,
        kernel_hook.EFFICIENT: kernel_hook._efficient,
        kernel_hook.CUDNN: kernel_hook._cudnn,
        kernel_hook.FLASH_FORWARD: kernel_hook._flash_forward,
        kernel_hook.BACKWARDS[kernel_hook.FLASH]: kernel_hook._flash_backward,
        kernel_hook.BACKWARDS[kernel_hook.EFFICIENT]: kernel_hook._efficient_backward,
        kernel_hook.BACKWARDS[kernel_hook.CUDNN]: kernel_hook._cudnn_backward,
        kernel_hook.BACKWARDS[kernel_hook.FLASH_FORWARD]: kernel_hook._flash_forward_backward,
        kernel_hook.EFFICIENT_FORWARD: kernel_hook._efficient_forward,
        kernel_hook.BACKWARDS[kernel_hook.EFFICIENT_FORWARD]: kernel_hook._efficient_forward_backward,
    }
    for name, answer in answers.items():
        arguments = [argument.name.rstrip("_") for argument in getattr(aten, name).default._schema.arguments]
        ours = list(inspect.signature(answer).parameters)
        assert ours[: len(arguments)] == arguments, name


def test_the_operators_of_ours_are_loaded_by_the_first_taken_call():
    assert hasattr(torch.ops.flashbackend, "attention_forward")
    assert ops.run is not None


@pytest.mark.parametrize("compiled", [False, True])
def test_the_block_that_asks_for_stock_is_heard_here(monkeypatch, compiled):
    """Code that was compiled under sdpa_backend arrives as stock's operators, with the block still open."""
    query, key, value = tensors("square", "contiguous")

    def function(*rows):
        return aten._scaled_dot_product_flash_attention(*rows)[0]

    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    with over_stand_ins(monkeypatch) as called:
        for backends, ours in ((("stock",), False), (("math", "stock"), False), (("triton", "stock"), True)):
            with sdpa_backend(*backends), _nothing_else():
                out = function(query, key, value)
            assert bool(out.any()) == ours and len(called) == (0 if ours else 1), backends
            called.clear()
        assert function(query, key, value).any() and not called


class _nothing_else(torch.overrides.TorchFunctionMode):
    """Another mode, opened inside."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn"])
def test_the_straight_way_to_a_kernel_passes_no_hook(monkeypatch, backend, scale, needs_grad):
    """With autograd's node around it: its keys leave out BackendSelect, where the hook stands."""
    monkeypatch.setattr(decisions, "decide", lambda *args, **kwargs: pytest.fail("the hook was asked"))
    query, key, value = (t.requires_grad_(needs_grad) for t in tensors("square", "contiguous"))
    with over_stand_ins(monkeypatch) as called:
        assert override._installed is not None
        kernel = override._installed.kernels.kernels[backend, needs_grad]
        out = kernel(query, key, value, True, scale)
    assert called == [f"_scaled_dot_product_{backend}_attention"]
    assert out.requires_grad == needs_grad
    if needs_grad:
        assert out.grad_fn.name().lower() == f"scaleddotproduct{backend}attentionbackward0"
        assert out.grad_fn._saved_scale == scale and out.grad_fn._saved_is_causal


@pytest.mark.parametrize("op", kernel_hook.AT_BACKEND_SELECT)
def test_tensors_of_other_kinds_go_on_to_pytorchs_kernels(op):
    """Fake and meta tensors pass BackendSelect as well, and so do those of other devices."""
    from torch._subclasses import FakeTensorMode

    operator = getattr(aten, op)
    options = () if op == kernel_hook.FLASH else (None, True)
    expected = [tuple(t.shape) for t in operator(*(torch.empty(2, 4, 64, 32, device="meta") for _ in "qkv"), *options)
                if isinstance(t, torch.Tensor)]  # fmt: skip
    with hooked(kernel_key="CPU"), counting() as count:
        metas = operator(*(torch.empty(2, 4, 64, 32, device="meta") for _ in "qkv"), *options)
        with FakeTensorMode():
            fakes = operator(*(torch.empty(2, 4, 64, 32) for _ in "qkv"), *options)
        for results in (metas, fakes):
            assert [tuple(t.shape) for t in results if isinstance(t, torch.Tensor)] == expected
        sparse = torch.eye(64).to_sparse()
        with pytest.raises((NotImplementedError, RuntimeError), match="Sparse"):
            operator(sparse, sparse, sparse, *options)
        assert count("triton") == count("stock") == 0
