"""nested.py: F.scaled_dot_product_attention on nested tensors of jagged layout, unwrapped and wrapped by us.

The hook is the one for CPU tensors, and the operators run the math path there. "The long way" is PyTorch's own Python
around the same operators, reached by the kernel hook: what our result must not differ from in anything but its time.
"""

from __future__ import annotations

import contextlib
import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from hooked import counting, hooked, leave_all, run_python, sample
from test_kernel_hook import hooked_backwards
from torch.nested._internal import ops as nested_ops
from torch.nested._internal import sdpa as nested_sdpa
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.weak import TensorWeakRef
from varlen_cases import VarlenCall, gradient_for_varlen, judge_varlen, varlen_call

from torch_flashbackend import _torch, nested, ops, policy, routing, sdpa_backend, set_batch_invariant, varlen
from torch_flashbackend.explain import explain
from torch_flashbackend.kernels import KernelUnavailable

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage:UserWarning")

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
LENGTHS, OTHERS, EQUAL = (20, 1, 33), (7, 40, 12), (24, 24, 24)
NAMES = ("query", "key", "value")
sdpa = F.scaled_dot_product_attention


def jagged(rows: torch.Tensor, lengths=LENGTHS, offsets=None, built="transposed", known=True) -> torch.Tensor:
    """rows [total, H, D] as a nested tensor [B, H, S of each, D], transposed or with its heads first in memory."""
    offsets = torch.tensor([0, *lengths]).cumsum(0) if offsets is None else offsets
    bounds = {"min_seqlen": min(lengths), "max_seqlen": max(lengths)} if known else {}
    if built == "transposed":
        return torch.nested.nested_tensor_from_jagged(rows, offsets, **bounds).transpose(1, 2)
    values = rows.transpose(0, 1).contiguous()
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2, **bounds)


def tensors(grad=False, lengths=LENGTHS, dtype=SINGLE, heads=2, head_dim=16, **options):
    """(leaves [total, H, D], nested tensors of one structure)."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rows = [sample(sum(lengths), heads, head_dim, seed=n).to(dtype).requires_grad_(grad) for n in range(3)]
    return rows, [jagged(row, lengths, offsets, **options) for row in rows]


def packed_values(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(1, 2).values()


@contextlib.contextmanager
def the_long_way(monkeypatch, backend: SDPBackend):
    """PyTorch's own Python, which chooses this backend as on a GPU, and the kernel hook below it."""
    with monkeypatch.context() as patch:
        patch.setattr(nested.NestedHook, "register", lambda self: None)
        patch.setattr(nested_sdpa, "_select_sdp_backend", lambda *_: backend)
        with hooked_backwards():
            yield


@contextlib.contextmanager
def taken(calls=1):
    """The plugin on for CPU tensors; so many calls must have been taken by this short way."""
    with hooked(kernel_key="CPU"), counting() as count:
        yield
        assert count("triton") == calls


# Numbers.


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("built", ["transposed", "heads first"])
@pytest.mark.parametrize(
    "dtype,lengths", [(SINGLE, LENGTHS), (BFLOAT, LENGTHS), (HALF, (30,)), (BFLOAT, EQUAL)], ids=str
)
def test_values_and_gradients(lengths, dtype, built, is_causal):
    call = varlen_call(lengths, heads=2, dtype=dtype, window=(-1, 0) if is_causal else (-1, -1)).leaves()
    offsets, _ = call.cu_seqlens(torch.int64)
    grad_out = gradient_for_varlen(call)
    with taken():
        out = sdpa(*(jagged(t, lengths, offsets, built) for t in (call.query, call.key, call.value)),
                   is_causal=is_causal)  # fmt: skip
        assert type(out.grad_fn).__name__ == "_NestedBackward"
    values = packed_values(out)
    grads = torch.autograd.grad(values, (call.query, call.key, call.value), grad_out)
    judge_varlen(call, {"out": values.detach(), **dict(zip(NAMES, grads))}, grad_out)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("scale", [None, 0.3, -0.2])
def test_values_without_gradients(mode, scale):
    with taken(), mode():
        call = varlen_call(LENGTHS, heads=2, dtype=SINGLE, window=(-1, 0), scale=scale)
        offsets, _ = call.cu_seqlens(torch.int64)
        out = sdpa(*(jagged(t, LENGTHS, offsets) for t in (call.query, call.key, call.value)), is_causal=True,
                   scale=scale)  # fmt: skip
        assert not out.requires_grad and out.is_inference() == (mode is torch.inference_mode)
        values = packed_values(out)
    judge_varlen(call, {"out": values})


@pytest.mark.parametrize("lengths,others", [(LENGTHS, OTHERS), (EQUAL, (7, 7, 7)), (EQUAL, OTHERS)], ids=str)
def test_queries_with_lengths_of_their_own_and_values_of_another_head_dim(lengths, others):
    call = varlen_call(lengths, others, heads=2, head_dim_v=24, dtype=SINGLE).leaves()
    offsets_q, offsets_k = call.cu_seqlens(torch.int64)
    grad_out = gradient_for_varlen(call)
    query, key, value = (jagged(call.query, lengths, offsets_q), jagged(call.key, others, offsets_k),
                         jagged(call.value, others, offsets_k))  # fmt: skip
    with taken():
        out = sdpa(query, key, value)
    assert out.shape[:3] == query.shape[:3] and out.size(3) == 24
    values = packed_values(out)
    grads = torch.autograd.grad(values, (call.query, call.key, call.value), grad_out)
    judge_varlen(call, {"out": values.detach(), **dict(zip(NAMES, grads))}, grad_out)


@pytest.mark.parametrize("lengths", [LENGTHS, EQUAL], ids=["mixed", "equal"])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_gradients_that_nobody_wants_are_not_made(wanted, lengths):
    call = varlen_call(lengths, heads=2, dtype=SINGLE)
    offsets, _ = call.cu_seqlens(torch.int64)
    rows = [t.requires_grad_(n in wanted) for n, t in enumerate((call.query, call.key, call.value))]
    grad_out = gradient_for_varlen(call)
    with taken():
        values = packed_values(sdpa(*(jagged(t, lengths, offsets) for t in rows)))
    leaves = [rows[n] for n in wanted]
    grads = torch.autograd.grad(values, leaves, grad_out, retain_graph=True)
    judge_varlen(call, dict(zip([NAMES[n] for n in wanted], grads)), grad_out)
    assert all(torch.equal(a, b) for a, b in zip(grads, torch.autograd.grad(values, leaves, grad_out)))


def test_gradients_of_nested_leaves_have_the_structure_of_these():
    rows, made = tensors()
    leaves = [tensor.detach().requires_grad_() for tensor in made]
    call = VarlenCall(*rows, LENGTHS, LENGTHS, window=(-1, 0))
    grad_out = gradient_for_varlen(call)
    with taken():
        out = sdpa(*leaves, is_causal=True)
    out.backward(jagged(grad_out, LENGTHS, leaves[0].offsets()))
    assert all(leaf.grad.shape == leaf.shape and leaf.grad.offsets() is leaf.offsets() for leaf in leaves)
    judge_varlen(call, {name: packed_values(leaf.grad) for name, leaf in zip(NAMES, leaves)}, grad_out)


# What it is a result of.


def facts(tensor: torch.Tensor) -> dict:
    values = tensor.values()
    return {
        "shape": tensor.shape, "strides": tensor.stride(), "values": values.shape, "pitches": values.stride(),
        "offsets": id(tensor.offsets()), "lengths": tensor.lengths(), "ragged": tensor._ragged_idx,
        "contiguous": tensor.is_contiguous(), "transposed": tensor.transpose(1, 2).is_contiguous(),
        "dtype": tensor.dtype, "layout": tensor.layout, "grad": tensor.requires_grad, "type": type(tensor),
        "longest": tensor._maybe_max_seqlen, "shortest": tensor._maybe_min_seqlen,
    }  # fmt: skip


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("built", ["transposed", "heads first"])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("lengths", [LENGTHS, (30,), EQUAL], ids=["mixed", "one", "equal"])
@pytest.mark.parametrize(
    "backend,dtype", [(SDPBackend.FLASH_ATTENTION, HALF), (SDPBackend.EFFICIENT_ATTENTION, SINGLE)]
)
def test_the_result_looks_as_it_does_the_long_way(monkeypatch, backend, dtype, lengths, known, built, grad):
    if backend is SDPBackend.EFFICIENT_ATTENTION and len(lengths) == 1 and built == "heads first":
        pytest.skip("stock does not put a single sequence in order, but its efficient kernel's output is")
    _, made = tensors(grad, lengths, dtype, built=built, known=known)
    with taken():
        found = facts(sdpa(*made))
    with the_long_way(monkeypatch, backend):
        expected = facts(sdpa(*made))
    assert found == expected


def test_parts_of_one_tensor_give_the_strides_of_the_long_way(monkeypatch):
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    qkv = sample(sum(LENGTHS), 3, 2, 16).to(HALF).requires_grad_()
    made = [jagged(part, LENGTHS, offsets) for part in qkv.unbind(1)]
    with taken():
        out = sdpa(*made, is_causal=True)
    (grad,) = torch.autograd.grad(packed_values(out).float().square().sum(), qkv)
    with the_long_way(monkeypatch, SDPBackend.FLASH_ATTENTION):
        other = sdpa(*made, is_causal=True)
        (expected,) = torch.autograd.grad(packed_values(other).float().square().sum(), qkv)
    assert facts(out) == facts(other)
    assert torch.equal(packed_values(out), packed_values(other)) and torch.equal(grad, expected)


def test_a_tensor_of_ours_has_what_the_constructor_gives_it():
    _, (query, *_) = tensors()
    rows, _ = _torch.jagged_rows(query)
    ours = _torch.jagged_tensor(rows.clone(), _torch.jagged_structure(query))
    theirs = type(query)(rows.clone().transpose(0, 1), query.offsets(), _ragged_idx=2,
                         _metadata_cache=query._metadata_cache)  # fmt: skip
    assert vars(ours).keys() == vars(theirs).keys()
    for name in vars(theirs).keys() - {"_values"}:
        assert vars(ours)[name] is vars(theirs)[name] or vars(ours)[name] == vars(theirs)[name], name
    assert vars(ours._values) == vars(theirs._values)
    for tensor in (ours, ours._values):  # marks for the compiler are each tensor's own
        for name, value in vars(tensor).items():
            if isinstance(value, set):
                assert all(value is not other for other in (vars(query).get(name), vars(query._values).get(name)))


def follow_ups(out: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """What a model does next."""
    rows = out.transpose(1, 2)
    flat = rows.flatten(-2)
    return [
        F.linear(flat, weight).values(), F.linear(flat.values(), weight), (out + out * 2.0).values(),
        rows.to_padded_tensor(0.0), torch.cat([part.transpose(0, 1) for part in out.unbind()]), F.gelu(flat).values(),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(6))
def test_operations_on_the_result(monkeypatch, number):
    rows, made = tensors(True)
    weight = sample(8, 32, seed=7)
    with taken():
        found = follow_ups(sdpa(*made), weight)[number]
    with the_long_way(monkeypatch, SDPBackend.EFFICIENT_ATTENTION):
        expected = follow_ups(sdpa(*made), weight)[number]
        grad_out = sample(*expected.shape, seed=8)
        expected_grads = torch.autograd.grad(expected, rows, grad_out)
    assert torch.equal(found, expected)
    for grad, other in zip(torch.autograd.grad(found, rows, grad_out), expected_grads):
        torch.testing.assert_close(grad, other, rtol=1e-6, atol=1e-6)


def test_results_go_into_the_next_call():
    _, made = tensors()
    with taken(2):
        out = sdpa(*made)
        assert (made[0] + sdpa(out, made[1], out)).shape == made[0].shape


# Autograd's rules.


@pytest.mark.parametrize("what", ["rows", "query", "values of key", "output", "view of the output"])
def test_changes_in_place_before_the_backward_are_noticed(what):
    leaves, _ = tensors(True)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    rows = [leaf * 1.0 for leaf in leaves]
    made = [jagged(row, LENGTHS, offsets) for row in rows]
    with taken():
        out = sdpa(*made)
    scaled = out * 2.0  # which keeps nothing of it
    changed = {"rows": rows[0], "query": made[0], "values of key": packed_values(made[1]), "output": out,
               "view of the output": packed_values(out)}[what]  # fmt: skip
    with torch.no_grad():
        changed.mul_(2.0)
    del out, changed
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(scaled, leaves, torch.ones_like(scaled.detach()))


def test_a_copy_is_not_changed_with_its_source():
    """Tensors whose heads come first are put in order for the kernels; what is saved is the copy, as in stock."""
    leaves, _ = tensors(True)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    made = [jagged(leaf * 1.0, LENGTHS, offsets, "heads first") for leaf in leaves]
    with taken():
        loss = packed_values(sdpa(*made)).square().sum()
    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    with torch.no_grad():
        made[1].mul_(2.0)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(loss, leaves), expected))


@pytest.mark.parametrize("built", ["transposed", "heads first"])
def test_there_is_no_second_derivative_and_the_first_is_right(built):
    _, made = tensors(built=built)
    leaves = [tensor.detach().requires_grad_() for tensor in made]
    with taken():
        out = sdpa(*leaves)
    grad_out = torch.ones_like(out.detach())
    grads = torch.autograd.grad(out, leaves, grad_out, create_graph=True)
    plain = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    assert all(torch.equal(a.detach().values(), b.values()) for a, b in zip(grads, plain))
    with pytest.raises(RuntimeError, match="second derivative"):
        grads[0].backward(grad_out)


def test_hooks_on_saved_tensors_see_plain_ones():
    leaves, made = tensors(True)
    seen = []
    with taken(), torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t.clone(), lambda t: t):
        out = sdpa(*made)
    assert len(seen) == 5 and all(type(t) is torch.Tensor for t in seen)
    call = VarlenCall(*(leaf.detach() for leaf in leaves), LENGTHS, LENGTHS)
    grad_out = gradient_for_varlen(call)
    grads = torch.autograd.grad(packed_values(out), leaves, grad_out)
    judge_varlen(call, dict(zip(NAMES, grads)), grad_out)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    leaves, _ = tensors(True)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)

    def block(*rows):
        return packed_values(sdpa(*(jagged(row, LENGTHS, offsets) for row in rows), is_causal=True))

    call = VarlenCall(*(leaf.detach() for leaf in leaves), LENGTHS, LENGTHS, window=(-1, 0))
    grad_out = gradient_for_varlen(call)
    with taken(2):
        values = checkpoint(block, *leaves, use_reentrant=use_reentrant)
        values.backward(grad_out)
    results = {"out": values.detach(), **{name: leaf.grad for name, leaf in zip(NAMES, leaves)}}
    judge_varlen(call, results, grad_out)


def test_an_output_that_nobody_wants_any_more_is_freed_at_once():
    _, made = tensors(True)
    gc.disable()
    try:
        with taken():
            out = sdpa(*made)
        watch = TensorWeakRef(out)
        del out
        assert watch() is None
    finally:
        gc.enable()


# What stays as it was.


def outcome(function) -> object:
    """Values, or the error in its words."""
    try:
        result = function()
    except Exception as error:
        return type(error), str(error).splitlines()[0]
    return result.values().detach()


def same(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


def narrowed() -> list[torch.Tensor]:
    padded = [sample(3, 40, 2, 16, seed=n) for n in range(3)]
    starts, lengths = torch.tensor([0, 2, 1]), torch.tensor([20, 1, 33])
    return [torch.nested.narrow(t, 1, starts, lengths, layout=torch.jagged).transpose(1, 2) for t in padded]


def odd_calls() -> dict:
    _, made = tensors()
    _, others = tensors()
    _, with_empty = tensors(lengths=(20, 0, 33))
    query, key, value = made
    _, (wide, *_) = tensors(heads=4)
    wide = jagged(sample(sum(LENGTHS), 4, 16), LENGTHS, query.offsets())
    dense = sample(3, 2, 8, 16)
    return {
        "mask": lambda: sdpa(*made, attn_mask=torch.ones(1, dtype=torch.bool)),
        "empty sequence": lambda: sdpa(*with_empty),
        "empty sequence, causal": lambda: sdpa(*with_empty, is_causal=True),
        "grouped heads": lambda: sdpa(wide, key, value, enable_gqa=True),
        "three dimensions": lambda: sdpa(*(t.transpose(1, 2).flatten(-2) for t in made)),
        "a dense key": lambda: sdpa(query, dense, value),
        "a dense query": lambda: sdpa(dense, key, value),
        "offsets of their own, causal": lambda: sdpa(query, *others[1:], is_causal=True),
        "value with offsets of its own": lambda: sdpa(query, key, others[2]),
        "several dtypes": lambda: sdpa(query, key.half(), value),
        "narrowed": lambda: sdpa(*narrowed()),
        "another head_dim": lambda: sdpa(query, jagged(sample(54, 2, 8), LENGTHS, query.offsets()), value),
        "wrong argument": lambda: sdpa(query, key, value, wrong=1),
        "doubles": lambda: sdpa(*(t.double() for t in made)),
    }


@pytest.mark.parametrize("name", odd_calls())
def test_other_calls_are_pytorchs_with_its_answers_and_its_errors(name):
    def decide(problem, allowed=None):
        if problem.query_dtype is torch.float64:  # which the real rules leave to stock
            return routing.Decision("stock", "left for the test", "query")
        return hooked_decide(problem, allowed)

    from hooked import take_valid as hooked_decide

    call = odd_calls()[name]
    expected = outcome(call)
    with hooked(decide, kernel_key="CPU"), counting() as count:
        found = outcome(call)
        assert count("triton") == 0
    assert same(found, expected), (found, expected)


def test_dropout_is_pytorchs():
    _, made = tensors()
    torch.manual_seed(0)
    expected = sdpa(*made, dropout_p=0.5).values()
    with taken(0):
        torch.manual_seed(0)
        assert torch.equal(sdpa(*made, dropout_p=0.5).values(), expected)


def test_a_call_that_routing_leaves_to_stock_is_stocks():
    _, made = tensors()
    expected = sdpa(*made).values()
    with hooked(leave_all, kernel_key="CPU"), counting() as count:
        assert torch.equal(sdpa(*made).values(), expected)
        assert count("stock") == 1 and count("triton") == 0


def test_explicit_choices_are_honoured():
    _, made = tensors()
    expected = sdpa(*made).values()
    for choice in (sdpa_kernel(SDPBackend.MATH), sdpa_backend("stock"), sdpa_backend("math", "stock"),
                   sdpa_backend("stock", "triton")):  # fmt: skip
        with taken(0), choice:
            assert torch.equal(sdpa(*made).values(), expected)
    for choice in (sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]), sdpa_backend("triton", "stock")):
        with taken(1), choice:
            sdpa(*made)


def test_modes_and_forward_derivatives_see_pytorchs_operators():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Counting.number += 1
            return func(*args, **(kwargs or {}))

    _, made = tensors()
    with taken(0), Counting():
        sdpa(*made)
    assert Counting.number > 5
    with taken(1):
        sdpa(*made)  # the decision is remembered
        with torch.autograd.forward_ad.dual_level():
            sdpa(*made)


def test_compiled_calls_are_traced_as_without_us(monkeypatch):
    """Into stock's operators, which the kernel hook takes when the compiled program runs."""
    call = varlen_call(LENGTHS, heads=2, dtype=SINGLE, window=(-1, 0)).leaves()
    offsets, _ = call.cu_seqlens(torch.int64)
    made = [jagged(t, LENGTHS, offsets) for t in (call.query, call.key, call.value)]
    grad_out = gradient_for_varlen(call)
    monkeypatch.setattr(nested_sdpa, "_select_sdp_backend", lambda *_: SDPBackend.EFFICIENT_ATTENTION)
    monkeypatch.setattr(nested, "_attend", lambda *_: pytest.fail("a compiled call was taken while it was traced"))

    def attention(query, key, value):
        return sdpa(query, key, value, is_causal=True).transpose(1, 2).values() * 2.0

    with hooked_backwards(), counting() as count:
        values = torch.compile(attention, backend="aot_eager", fullgraph=True)(*made)
        grads = torch.autograd.grad(values, (call.query, call.key, call.value), grad_out / 2.0)
        assert count("triton") == 2
    judge_varlen(call, {"out": values.detach() / 2.0, **dict(zip(NAMES, grads))}, grad_out)


# Switching it on and off.


def test_the_plugin_switched_off_leaves_nothing_behind():
    before = nested_ops.jagged_scaled_dot_product_attention
    with hooked(kernel_key="CPU"):
        assert nested_ops.jagged_scaled_dot_product_attention is not before
    assert nested_ops.jagged_scaled_dot_product_attention is before is nested_sdpa.jagged_scaled_dot_product_attention
    with hooked(kernel_key=None):
        assert nested_ops.jagged_scaled_dot_product_attention is before


def test_a_replacement_by_others_stays(monkeypatch):
    before = nested_ops.jagged_scaled_dot_product_attention
    try:
        with hooked(kernel_key="CPU"):
            ours = nested_ops.jagged_scaled_dot_product_attention
            nested_ops.jagged_scaled_dot_product_attention = theirs = lambda *args: ours(*args)
        assert nested_ops.jagged_scaled_dot_product_attention is theirs
        _, made = tensors()  # and calls of ours that others kept run stock's
        assert sdpa(*made).shape == made[0].shape
    finally:
        nested_ops.jagged_scaled_dot_product_attention = before


def test_an_output_outlives_the_plugin():
    leaves, made = tensors(True)
    with taken():
        out = sdpa(*made)
    call = VarlenCall(*(leaf.detach() for leaf in leaves), LENGTHS, LENGTHS)
    grad_out = gradient_for_varlen(call)
    grads = torch.autograd.grad(packed_values(out), leaves, grad_out)
    judge_varlen(call, dict(zip(NAMES, grads)), grad_out)


def test_it_waits_for_the_first_nested_tensor():
    run_python(
        """
        import sys, torch
        import torch_flashbackend
        NAME = "torch.nested._internal.ops"
        finders = list(sys.meta_path)
        torch_flashbackend.enable()
        assert NAME not in sys.modules
        torch_flashbackend.disable()
        assert sys.meta_path == finders
        torch_flashbackend.enable()
        rows = torch.randn(10, 2, 8)
        torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 4, 10]), min_seqlen=4, max_seqlen=6)
        function = sys.modules[NAME].jagged_scaled_dot_product_attention
        assert function.__wrapped__ is sys.modules["torch.nested._internal.sdpa"].jagged_scaled_dot_product_attention
        torch_flashbackend.disable()
        assert sys.modules[NAME].jagged_scaled_dot_product_attention is function.__wrapped__
        """
    )


@pytest.mark.parametrize("name", ["jagged_class", "jagged_known", "nested_sdpa"])
def test_without_the_private_names_calls_go_the_long_way(monkeypatch, name):
    _, made = tensors()
    expected = sdpa(*made).values()
    monkeypatch.setattr(_torch, name, lambda: None)
    with taken(0):
        assert torch.equal(sdpa(*made).values(), expected)


def test_how_nested_tensors_are_made_is_checked(monkeypatch):
    class Other:
        def __init__(self, *args, **kwargs):
            self._metadata_cache = {}

    _torch.jagged_known.cache_clear()
    _torch._how_jagged_are_made.cache_clear()
    try:
        monkeypatch.setattr(_torch, "jagged_class", lambda: Other)
        assert not _torch.jagged_known()
    finally:
        _torch.jagged_known.cache_clear()
    monkeypatch.undo()
    assert _torch.jagged_known()


# The rest of the plugin.


def test_without_a_kernel_the_call_is_stocks(monkeypatch):
    def unavailable(*arguments):
        raise KernelUnavailable("no compiler for the test")

    _, made = tensors(True)
    expected = sdpa(*made).values()
    monkeypatch.setattr(ops, "_below_autograd", unavailable)
    with hooked(kernel_key="CPU"), counting() as count, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(sdpa(*made).values(), expected)
        assert torch.equal(sdpa(*made).values(), expected)
        assert count("stock") == 2
    assert sum("no compiler for the test" in str(warning.message) for warning in caught) <= 1


def test_autocast_applies():
    leaves, made = tensors(True)
    with taken(), torch.autocast("cpu", dtype=BFLOAT):
        out = sdpa(*made, is_causal=True)
    assert out.dtype is BFLOAT
    call = VarlenCall(*(leaf.detach().bfloat16() for leaf in leaves), LENGTHS, LENGTHS, window=(-1, 0))
    grad_out = gradient_for_varlen(call)
    values = packed_values(out)
    grads = torch.autograd.grad(values, leaves, grad_out)
    assert all(grad.dtype is SINGLE for grad in grads)
    judge_varlen(call, {"out": values.detach(), **{n: g.bfloat16() for n, g in zip(NAMES, grads)}}, grad_out)


def test_explain_and_the_decision_agree(monkeypatch):
    problems = []

    def decide(problem, allowed=None):
        problems.append(problem)
        return routing.Decision("triton", "taken for the test", "query")

    _, made = tensors(True, dtype=HALF)
    with hooked(decide, kernel_key="CPU"):
        sdpa(*made, is_causal=True)
        explained = explain(*made, is_causal=True)
    assert explained.backend == "triton"
    assert problems[0] == explained.problem and problems[0].entry == "nested" and problems[0].requires_grad


def test_explain_sees_what_is_not_taken():
    calls = {"empty": tensors(lengths=(20, 0, 33))[1], "mask": tensors()[1]}
    assert not explain(*calls["empty"]).problem.packed
    assert not explain(*calls["mask"], attn_mask=torch.ones(1, dtype=torch.bool)).problem.packed


def nested_problem(lengths: tuple[int, ...], gpu: str, architecture: str, sm_count: int):
    from dataclasses import replace

    from torch_flashbackend.packed import Call, describe

    tensor = torch.empty((sum(lengths), 16, 128), dtype=BFLOAT, device="meta")
    offsets = torch.empty(len(lengths) + 1, dtype=torch.int64, device="meta")
    call = Call(tensor, tensor, tensor, offsets, offsets, max(lengths), max(lengths), -1, 0, None)
    return replace(describe(call, nested.ENTRY, "flash", False), device_type="cuda", devices=("cuda:0",), gpu_name=gpu,
                   architecture=architecture, sm_count=sm_count)  # fmt: skip


def test_small_calls_are_taken_for_the_python_that_they_save(monkeypatch):
    monkeypatch.setattr(policy, "policies", dict)
    small, large = (20, 30, 100), (8192,) * 8
    for gpu, architecture, sm_count in (("NVIDIA H200", "sm_90", 132), ("NVIDIA A100", "sm_80", 108)):
        decision = routing.decide(nested_problem(small, gpu, architecture, sm_count))
        assert (decision.backend, decision.reason) == ("triton", "nested tensors: Python decides")
    assert routing.decide(nested_problem(large, "NVIDIA H200", "sm_90", 132)).reason != decision.reason
    assert routing.decide(nested_problem(large, "NVIDIA A100", "sm_80", 108)).backend == "stock"


@pytest.fixture
def operators_run(monkeypatch):
    """Those whose implementations ran, in order."""
    found = []
    real = ops._below_autograd
    monkeypatch.setattr(ops, "_below_autograd", lambda operator, *rest: found.append(operator) or real(operator, *rest))
    return found


@pytest.mark.parametrize("lengths", [LENGTHS, EQUAL], ids=["mixed", "equal"])
def test_no_synchronisation_for_what_is_known(monkeypatch, operators_run, lengths):
    """Lengths that the nested tensors know already are not asked for; one operator runs, once."""
    _, made = tensors(lengths=lengths)
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("a value was read from the device"))
    with taken():
        sdpa(*made)
    assert operators_run == [ops._attention_forward if lengths is EQUAL else varlen._forward_op]


@pytest.mark.parametrize("why", ["rows behind", "batch-invariant"])
def test_sequences_of_one_length_that_are_no_dense_call(operators_run, why):
    rows = [sample(72 + 8 * (why == "rows behind"), 2, 16, seed=n) for n in range(3)]
    offsets = torch.tensor([0, *EQUAL]).cumsum(0)
    set_batch_invariant(why == "batch-invariant")
    try:
        with taken():
            out = sdpa(*(jagged(t, EQUAL, offsets) for t in rows))
    finally:
        set_batch_invariant(False)
    assert operators_run == [varlen._forward_op]
    judge_varlen(VarlenCall(*(t[:72] for t in rows), EQUAL, EQUAL), {"out": packed_values(out)[:72]})
