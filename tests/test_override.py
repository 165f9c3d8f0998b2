"""enable, disable and the call hook: state, values, gradients, errors, transforms, failures."""

from __future__ import annotations

import functools
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from hooked import counting, hooked, leave_all, run_python, sample, take_valid
from torch.nn.attention import SDPBackend, current_flash_attention_impl, sdpa_kernel

import torch_flashbackend
from torch_flashbackend import _torch, cache_tag, decisions, kernel_hook, ops, override, reference, routing, stats
from torch_flashbackend.kernels import KernelUnavailable

from common import deterministic_mode, in_threads

sdpa = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _off():
    yield
    torch_flashbackend.disable()
    ours = ("aten/scaled_dot_product_attention/Autograd", "aten/_scaled_dot_product_cudnn_attention/CUDA")
    assert not [name for name in torch.library._impls if name.startswith(ours)]


def qkv(*shape, grad=False, dtype=torch.float32):
    return tuple(sample(*shape, grad=grad, dtype=dtype, seed=i) for i in range(3))


# State.


def test_enabling_twice_is_enabling_once():
    torch_flashbackend.enable()
    installation = override._installed
    torch_flashbackend.enable()
    assert override._installed is installation
    assert torch_flashbackend.is_enabled()
    torch_flashbackend.disable()
    assert not torch_flashbackend.is_enabled()
    torch_flashbackend.disable()
    assert not torch_flashbackend.is_enabled()


def test_enabling_and_disabling_leave_no_trace():
    before = set(torch.library._impls)
    tag = torch.compiler.config.cache_key_tag
    for _ in range(3):
        torch_flashbackend.enable()
        torch_flashbackend.disable()
    assert set(torch.library._impls) == before
    assert torch.compiler.config.cache_key_tag == tag
    assert current_flash_attention_impl() is None


def test_cpu_results_are_untouched():
    query, key, value = qkv(2, 3, 8, 16, grad=True)
    expected = sdpa(query, key, value, is_causal=True)
    gradient = torch.autograd.grad(expected.sum(), query)[0]
    torch_flashbackend.enable()
    out = sdpa(query, key, value, is_causal=True)
    assert torch.equal(out, expected)
    assert torch.equal(torch.autograd.grad(out.sum(), query)[0], gradient)


@pytest.mark.parametrize("step", ["kernels", "tag", "dynamo"])
def test_failing_half_way_leaves_nothing_registered(monkeypatch, step):
    def fail(*args, **kwargs):
        raise OSError("half way")

    before, tag = set(torch.library._impls), torch.compiler.config.cache_key_tag
    with monkeypatch.context() as patch:
        target = {
            "kernels": (kernel_hook.KernelHook, "register"),
            "tag": (cache_tag.CacheTag, "set"),
            "dynamo": (override, "_forget_compiled"),
        }[step]
        patch.setattr(*target, fail)
        with pytest.raises(OSError, match="half way"):
            torch_flashbackend.enable()
    assert not torch_flashbackend.is_enabled()
    assert set(torch.library._impls) == before
    assert torch.compiler.config.cache_key_tag == tag
    assert current_flash_attention_impl() is None
    torch_flashbackend.enable()
    assert torch_flashbackend.is_enabled()


def test_failing_while_disabling_counts_as_disabled(monkeypatch):
    torch_flashbackend.enable()
    with monkeypatch.context() as patch:
        patch.setattr(override, "_forget_compiled", lambda ops: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            torch_flashbackend.disable()
    assert not torch_flashbackend.is_enabled()
    torch_flashbackend.enable()
    torch_flashbackend.disable()


@pytest.mark.parametrize(
    "op, key",
    [("scaled_dot_product_attention", "AutogradCUDA"), ("_scaled_dot_product_cudnn_attention", "CUDA")],
)
def test_another_library_on_the_same_operator_is_named(op, key):
    other = torch.library.Library("aten", "IMPL")
    other.impl(op, lambda *args, **kwargs: None, key)
    try:
        with pytest.raises(RuntimeError, match=f"another Python library.*aten::{op}.*{key}"):
            torch_flashbackend.enable()
        assert not torch_flashbackend.is_enabled()
    finally:
        other._destroy()


def test_the_users_cache_tag_stays():
    config = torch.compiler.config
    before = config.cache_key_tag
    try:
        config.cache_key_tag = "mine"
        torch_flashbackend.enable()
        assert config.cache_key_tag.startswith("mine+torch_flashbackend-")
        torch_flashbackend.disable()
        assert config.cache_key_tag == "mine"
        torch_flashbackend.enable()
        config.cache_key_tag = "changed since"
        torch_flashbackend.disable()
        assert config.cache_key_tag == "changed since"
    finally:
        config.cache_key_tag = before


def tag_in_a_thread(assigned=None, first=lambda: None):
    """torch.compiler.config.cache_key_tag as another thread sees it, after what it does first."""
    seen = []

    def look():
        first()
        if assigned is not None:
            torch.compiler.config.cache_key_tag = assigned
        seen.append(torch.compiler.config.cache_key_tag)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return seen[0]


def test_the_cache_tag_is_there_in_every_thread():
    torch_flashbackend.enable()
    tag = torch.compiler.config.cache_key_tag
    assert tag.startswith("torch_flashbackend-") and tag_in_a_thread() == tag
    assert tag_in_a_thread(first=torch_flashbackend.disable) == torch.compiler.config.cache_key_tag == ""


@pytest.mark.skipif(
    not hasattr(torch.compiler.config._config["cache_key_tag"].user_override, "get"),
    reason="settings of this version of torch hold for all threads; one that is assigned later replaces ours",
)
def test_the_cache_tag_stays_behind_what_is_assigned_later():
    config = torch.compiler.config
    before = config.cache_key_tag
    try:
        torch_flashbackend.enable()
        ours = config.cache_key_tag
        assert tag_in_a_thread("mine") == f"mine+{ours}"
        with config.patch(cache_key_tag="for a while"):
            assert config.cache_key_tag == f"for a while+{ours}"
        config.cache_key_tag = ""
        assert config.cache_key_tag == ours
    finally:
        config.cache_key_tag = before


def test_enabling_loads_neither_the_compiler_nor_triton():
    out = run_python("""
        import sys, torch
        heavy = ["torch._dynamo", "torch._inductor", "triton", "sympy"]
        before = {name for name in heavy if name in sys.modules}
        import torch_flashbackend
        torch_flashbackend.enable()
        torch_flashbackend.disable()
        print([name for name in heavy if name in sys.modules and name not in before])
    """)
    assert out.strip() == "[]"


def test_switching_in_threads_while_others_call():
    query, key, value = qkv(1, 2, 8, 16)
    expected = sdpa(query, key, value)
    stop, wrong = threading.Event(), []

    def call():
        while not stop.is_set():
            try:
                if not torch.equal(sdpa(query, key, value), expected):
                    wrong.append("value")
            except Exception as error:
                wrong.append(error)

    def switch():
        for _ in range(20):
            torch_flashbackend.enable()
            torch_flashbackend.disable()

    callers = [threading.Thread(target=call) for _ in range(2)]
    switchers = [threading.Thread(target=switch) for _ in range(3)]
    for thread in callers + switchers:
        thread.start()
    for thread in switchers:
        thread.join()
    stop.set()
    for thread in callers:
        thread.join()
    assert not wrong
    assert not torch_flashbackend.is_enabled()


def test_calls_in_many_threads_share_the_hook():
    query, key, value = qkv(1, 2, 8, 16)
    expected = [sdpa(query * i, key, value) for i in range(4)]
    results = {}

    def call(i):
        for _ in range(50):
            results[i] = sdpa(query * i, key[..., :8, :], value[..., :8, :])

    with hooked(), counting() as count:
        in_threads(call, 4)
        assert count("triton") > 0
    for i in range(4):
        torch.testing.assert_close(results[i], expected[i])


# torch's registry of flash attention implementations.


def test_activating_by_name_enables_and_restoring_disables():
    attention = torch.nn.attention
    assert "flashbackend" in attention.list_flash_attention_impls()
    attention.activate_flash_attention_impl("flashbackend")
    assert torch_flashbackend.is_enabled()
    attention.activate_flash_attention_impl("flashbackend")
    assert torch_flashbackend.is_enabled()
    attention.restore_flash_attention_impl()
    assert not torch_flashbackend.is_enabled()


@pytest.mark.parametrize("switch_on", ["enable", "activate"])
def test_activating_another_implementation_takes_ours_out(switch_on):
    attention = torch.nn.attention
    removed = []

    class Handle:
        def remove(self):
            removed.append(True)

    attention.register_flash_attention_impl("another", register_fn=Handle)
    try:
        if switch_on == "enable":
            torch_flashbackend.enable()
        else:
            attention.activate_flash_attention_impl("flashbackend")
        assert current_flash_attention_impl() == "flashbackend"
        attention.activate_flash_attention_impl("another")
        assert not torch_flashbackend.is_enabled()
        assert current_flash_attention_impl() == "another"
        torch_flashbackend.disable()
        assert current_flash_attention_impl() == "another"
        torch_flashbackend.enable()
        assert removed and current_flash_attention_impl() == "flashbackend"
    finally:
        torch_flashbackend.disable()
        from torch.nn.attention import _registry

        _registry._FLASH_ATTENTION_IMPLS.pop("another")


def test_failing_to_enable_leaves_the_other_implementation_active(monkeypatch):
    attention = torch.nn.attention

    class Handle:
        def remove(self):
            pass

    attention.register_flash_attention_impl("another", register_fn=Handle)
    try:
        attention.activate_flash_attention_impl("another")
        monkeypatch.setattr(override, "_install", lambda *keys: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            torch_flashbackend.enable()
        assert current_flash_attention_impl() == "another"
    finally:
        from torch.nn.attention import _registry

        attention.restore_flash_attention_impl()
        _registry._FLASH_ATTENTION_IMPLS.pop("another")


def test_a_stale_handle_does_not_switch_a_later_enabling_off():
    torch.nn.attention.activate_flash_attention_impl("flashbackend")
    stale = override._Handle(override._installed)
    torch_flashbackend.disable()
    torch_flashbackend.enable()
    stale.remove()
    assert torch_flashbackend.is_enabled()


# Values and gradients, through the hook at AutogradCPU.

CALLS = {
    "plain": ((2, 3, 8, 16), (2, 3, 8, 16), {}),
    "causal": ((2, 3, 8, 16), (2, 3, 12, 16), {"is_causal": True}),
    "scale": ((2, 3, 8, 16), (2, 3, 8, 16), {"scale": -0.3}),
    "gqa": ((2, 4, 8, 16), (2, 2, 8, 16), {"enable_gqa": True}),
    "rank 2": ((8, 16), (12, 16), {}),
    "rank 3": ((3, 8, 16), (3, 12, 16), {}),
    "rank 5": ((2, 2, 3, 8, 16), (2, 2, 3, 12, 16), {}),
    "broadcast batch": ((2, 3, 8, 16), (1, 3, 12, 16), {}),
    "broadcast query batch": ((1, 3, 8, 16), (2, 3, 12, 16), {}),
    "broadcast heads": ((2, 3, 8, 16), (2, 1, 12, 16), {}),
    "broadcast query heads": ((2, 1, 8, 16), (2, 3, 12, 16), {}),
    "rank 5 broadcast": ((2, 1, 3, 8, 16), (1, 4, 3, 12, 16), {}),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_values_and_gradients_equal_stocks(name, mask):
    query_shape, key_shape, options = CALLS[name]
    if mask and options.get("is_causal"):
        pytest.skip("attn_mask and is_causal exclude each other")
    query, key, value = sample(*query_shape, grad=True), sample(*key_shape, grad=True), sample(*key_shape, grad=True)
    inputs = [query, key, value]
    if mask == "bool":
        options = {**options, "attn_mask": sample(query_shape[-2], key_shape[-2], seed=9) > -0.5}
    elif mask == "float":
        bias = sample(*(1 for _ in query_shape[:-2]), query_shape[-2], key_shape[-2], seed=9, grad=True)
        options = {**options, "attn_mask": bias}
        inputs.append(bias)
    expected = sdpa(query, key, value, **options)
    grad_out = sample(*expected.shape, seed=7)
    expected_grads = torch.autograd.grad(expected, inputs, grad_out)
    with hooked(), counting() as count:
        out = sdpa(query, key, value, **options)
        grads = torch.autograd.grad(out, inputs, grad_out)
        with torch.no_grad():
            inference = [sdpa(query, key, value, **options) for _ in range(3)]
        assert count("triton") == 4
    for result in (out, *inference):
        torch.testing.assert_close(result, expected)
    torch.testing.assert_close(grads, expected_grads)


def test_calls_not_taken_are_stocks_bit_for_bit():
    query, key, value = qkv(2, 3, 8, 16, grad=True)
    mask = sample(8, 8) > 0
    expected = sdpa(query, key, value, mask)
    expected_grads = torch.autograd.grad(expected.sum(), (query, key, value))
    with hooked(leave_all), counting() as count:
        for _ in range(3):
            out = sdpa(query, key, value, mask)
            assert out.requires_grad
            assert torch.equal(out, expected)
            grads = torch.autograd.grad(out.sum(), (query, key, value))
            assert all(torch.equal(a, b) for a, b in zip(grads, expected_grads))
            with torch.no_grad():
                inference = sdpa(query, key, value, mask)
            assert torch.equal(inference, expected)
            assert not inference.requires_grad and not inference.is_inference()
        assert count("stock") == 6
    assert not torch._C._dispatch_tls_is_dispatch_key_excluded(_torch.dispatch_key("AutogradCPU"))


def test_the_most_common_calls_go_straight_to_stocks_kernel(monkeypatch):
    """On a CPU "flash" is another operator, which stands in here for those of a GPU."""
    straight = []

    handle = _torch.kernel_handle("_scaled_dot_product_flash_attention_for_cpu", "AutogradCPU")
    keyset = _torch.keyset("AutogradCPU", "CPU")

    def kernel(needs_grad, query, key, value, is_causal, scale):
        straight.append(needs_grad)
        return handle.call_boxed(keyset, query, key, value, 0.0, is_causal, scale=scale)[0]

    def hook_with_kernel(call_key, stock, _):
        return make(call_key, stock, {("flash", grad): functools.partial(kernel, grad) for grad in (False, True)})

    make = override.make_call_hook
    monkeypatch.setattr("torch_flashbackend.stock.backend", lambda *args: "flash")
    monkeypatch.setattr(override, "make_call_hook", hook_with_kernel)
    query, key, value = qkv(2, 3, 8, 16)
    calls = {
        "plain": lambda: sdpa(query, key, value),
        "causal": lambda: sdpa(query, key, value, is_causal=True, scale=0.3),
        "gradient": lambda: sdpa(query.clone().requires_grad_(), key, value),
        "causal gradient": lambda: sdpa(query, key.clone().requires_grad_(), value, is_causal=True, scale=0.3),
        "mask": lambda: sdpa(query, key, value, sample(8, 8) > 0),
        "dropout": lambda: sdpa(query, key, value, dropout_p=1e-9),
        "head_dim": lambda: sdpa(query[..., :12], key[..., :12], value[..., :12]),
        "rank": lambda: sdpa(query[0], key[0], value[0]),
        "broadcast": lambda: sdpa(query, key[:1], value[:1]),
    }
    expected = {name: call() for name, call in calls.items()}
    with hooked(leave_all):
        for name, call in calls.items():
            straight.clear()
            for _ in range(3):
                out = call()
                torch.testing.assert_close(out, expected[name], atol=0 if name != "dropout" else 1e-5, rtol=0)
                assert out.requires_grad == ("gradient" in name)
                if out.requires_grad:
                    assert out.grad_fn.name() == expected[name].grad_fn.name()
            # The first call of a kind goes the long way.
            goes_straight = name in ("plain", "causal", "gradient", "causal gradient")
            assert straight == ([out.requires_grad] * 2 if goes_straight else []), name
        straight.clear()
        for name in ("plain", "gradient"):
            with torch.profiler.profile() as profile:
                calls[name]()
            assert not straight and "flash_attention_for_cpu" in str([e.name for e in profile.events()])


def test_each_grad_mode_has_its_own_decision():
    query, key, value = qkv(1, 2, 8, 16, grad=True)
    with hooked(leave_all):
        for _ in range(3):
            with torch.no_grad():
                assert not sdpa(query, key, value).requires_grad
            assert sdpa(query, key, value).requires_grad
            assert sdpa(query.detach(), key, value).requires_grad
            assert not sdpa(query.detach(), key.detach(), value.detach()).requires_grad


WRONG = {
    "shapes": lambda q: sdpa(q, q[..., :8], q),
    "dtypes": lambda q: sdpa(q, q.double(), q),
    "devices": lambda q: sdpa(q, q.to("meta"), q),
    "rank": lambda q: sdpa(q[0, 0, 0], q, q),
    "mask dtype": lambda q: sdpa(q, q, q, torch.ones(8, 8, dtype=torch.int64)),
    "mask shape": lambda q: sdpa(q, q, q, torch.ones(7, 8, dtype=torch.bool)),
    "mask and causal": lambda q: sdpa(q, q, q, torch.ones(8, 8, dtype=torch.bool), is_causal=True),
    "heads": lambda q: sdpa(q, q[:, :2], q[:, :2]),
    "gqa": lambda q: sdpa(q, q[:, :2], q[:, :2], enable_gqa=True),
    "dropout": lambda q: sdpa(q, q, q, dropout_p=1.5),
    "type": lambda q: sdpa(q, q, None),
    "integers": lambda q: sdpa(q.long(), q.long(), q.long()),
}


def test_steps_over_a_growing_cache_are_decided_as_one():
    decided = []

    def decide(problem, allowed=None):
        decided.append(problem.seqlen_k)
        return take_valid(problem, allowed)

    def attend(length, seqlen_q=1, cut=False, grad=False, **options):
        query, key, value = (sample(2, 3, rows, 16, seed=rows).detach() for rows in (seqlen_q, length + cut, length))
        key = key[:, :, :length]
        query.requires_grad_(grad)
        out = F.scaled_dot_product_attention(query, key, value, **options)
        torch.testing.assert_close(out, reference.attention(query, key, value, None, 0.0, False, 0.25))

    with hooked(decide), counting() as count:
        for length in range(120, 140):
            attend(length)
        assert decided == [120, 129] and count("triton") == 20
        # Keys with gaps, one key, many queries and masks are decided by every number; a gradient is another call.
        decided.clear()
        for length in (120, 121, 122):
            attend(length, cut=True)
            attend(length, seqlen_q=17)
            attend(length, attn_mask=torch.ones(1, length, dtype=torch.bool))
            attend(length - 119)
            attend(length, grad=True)
        assert len(decided) == 4 * 3 + 1
    assert not decisions._steps


def test_a_step_whose_kernel_fails_leaves_the_counts_of_the_others(monkeypatch):
    def attend(length):
        query, key = sample(1, 1, 1, 16).detach(), sample(1, 1, length, 16).detach()
        F.scaled_dot_product_attention(query, key, key)

    def fails(*_, **__):
        raise KernelUnavailable("not this one")

    decisions._warned.clear()
    with hooked(), counting() as count:
        attend(120)
        attend(121)
        with monkeypatch.context() as patch:
            patch.setattr(ops, "run", fails)
            with pytest.warns(RuntimeWarning, match="not this one"):
                attend(122)
        for _ in range(3):
            for length in (120, 121, 122, 123):
                attend(length)
        assert (count("triton"), count("stock")) == (2 + 1 + 3 * 3, 1 + 3)  # what fails is counted by both


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("decide", [take_valid, routing.decide])
def test_wrong_calls_raise_what_stock_raises(name, decide):
    query = sample(2, 3, 8, 16)

    def outcome():
        try:
            return WRONG[name](query)
        except Exception as error:
            return type(error), str(error)

    expected = outcome()
    with hooked(decide):
        for _ in range(2):
            result = outcome()
            if isinstance(expected, torch.Tensor):
                assert torch.equal(result, expected)
            else:
                assert result == expected


def test_autocast_has_run_before():
    query, key, value = qkv(2, 3, 8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = sdpa(query, key, value)
    with hooked(), counting() as count, torch.autocast("cpu", torch.bfloat16):
        out = sdpa(query, key, value)
        assert count("triton") == 1
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


# Function transforms and forward-mode AD: stock's, also when the same call has just been taken.


def test_function_transforms_equal_stocks_with_a_warm_cache():
    from torch.func import grad, jacfwd, jvp, vjp, vmap
    from torch.nn.attention import SDPBackend

    query, key, value = qkv(2, 2, 4, 8)
    tangent = sample(2, 2, 4, 8, seed=5)

    def f(q, k=key, v=value):
        return sdpa(q, k, v)

    transforms = {
        "grad": lambda: grad(lambda q: f(q).sum())(query),
        "vjp": lambda: vjp(f, query)[1](tangent)[0],
        "jvp": lambda: jvp(f, (query,), (tangent,))[1],
        "jacfwd": lambda: jacfwd(f)(query),
        "vmap": lambda: vmap(f)(query[:, None], key[:, None], value[:, None]),
        "vmap of grad": lambda: vmap(grad(lambda q: f(q).sum()))(query[:, None].expand(2, 2, 2, 4, 8)),
        "constant inputs": lambda: grad(lambda x: (f(query) * x).sum())(torch.ones(())),
    }
    with sdpa_kernel(SDPBackend.MATH):
        expected = {name: transform() for name, transform in transforms.items()}
        with hooked(), counting() as count:
            for q in (query, query.clone().requires_grad_()):
                sdpa(q, key, value)
                sdpa(q, key, value)
            taken = count("triton")
            assert taken == 4
            for name, transform in transforms.items():
                torch.testing.assert_close(transform(), expected[name], msg=name)


def test_forward_mode_tangents_are_kept():
    import torch.autograd.forward_ad as fwd

    query, key, value = qkv(2, 2, 4, 8)
    tangent = sample(2, 2, 4, 8, seed=5)
    with sdpa_kernel(SDPBackend.MATH):
        with fwd.dual_level():
            expected = fwd.unpack_dual(sdpa(fwd.make_dual(query, tangent), key, value)).tangent
        with hooked():
            sdpa(query, key, value)
            sdpa(query, key, value)
            with fwd.dual_level():
                result = fwd.unpack_dual(sdpa(fwd.make_dual(query, tangent), key, value)).tangent
    assert result is not None
    torch.testing.assert_close(result, expected)


def test_forward_mode_works_where_stocks_kernel_has_no_formula():
    import torch.autograd.forward_ad as fwd

    query, key, value = qkv(2, 2, 4, 8)
    tangent = sample(2, 2, 4, 8, seed=5)

    def derivative():
        with fwd.dual_level():
            return fwd.unpack_dual(sdpa(fwd.make_dual(query, tangent), key, value)).tangent

    with sdpa_kernel(SDPBackend.MATH):
        expected = derivative()
    with pytest.raises(NotImplementedError):
        derivative()
    with hooked():
        torch.testing.assert_close(derivative(), expected)
        jacobian = torch.func.jvp(lambda q: sdpa(q, key, value), (query,), (tangent,))[1]
    torch.testing.assert_close(jacobian, expected)


def test_double_backward():
    query, key, value = qkv(1, 1, 4, 8, grad=True, dtype=torch.float64)
    with hooked(), counting() as count:
        assert torch.autograd.gradgradcheck(lambda q, k, v: sdpa(q, k, v), (query, key, value))
        assert count("triton")


# Tensors that are not plain.


def test_a_negated_view_is_not_mistaken_for_the_tensor_under_it():
    query, key, value = qkv(1, 2, 8, 16)
    expected = sdpa(-query, key, value)
    with hooked():
        for q in (query, torch._neg_view(query), query):
            out = sdpa(q, key, value)
    with hooked(leave_all):
        sdpa(query, key, value)
        sdpa(query, key, value)
        torch.testing.assert_close(sdpa(torch._neg_view(query), key, value), expected)
    assert not torch.allclose(out, expected)


def test_subclasses_keep_their_type():
    class Mine(torch.Tensor):
        pass

    query, key, value = qkv(1, 2, 8, 16)
    expected = sdpa(query, key, value)
    with hooked():
        sdpa(query, key, value)
        out = sdpa(query.as_subclass(Mine), key, value)
        assert type(out) is Mine
        torch.testing.assert_close(out.as_subclass(torch.Tensor), expected)
        assert type(sdpa(torch.nn.Parameter(query), key, value)) is torch.Tensor


def test_modes_see_the_operators_that_they_would_see_without_the_plugin():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    query, key, value = qkv(1, 2, 8, 16)

    def seen():
        with Names():
            sdpa(query, key, value)
        result = list(names)
        names.clear()
        return result

    names: list[str] = []
    expected = seen()
    with hooked(leave_all):
        sdpa(query, key, value)
        sdpa(query, key, value)
        assert seen() == expected
    with hooked():
        assert seen() == ["attention.default"]


def test_a_wrapper_with_rules_of_its_own_is_judged_where_they_end(monkeypatch):
    """Its rules may end in stock's operators by name, as ring attention's do: no mark keeps the kernel hook away."""
    from torch.testing._internal.two_tensor import TwoTensor

    marks = []

    class Watched(TwoTensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args, kwargs):
            marks.append(_torch.thread_mark.stock)
            return super().__torch_dispatch__(func, types, args, kwargs)

    query, key, value = qkv(1, 2, 8, 16)
    expected = sdpa(query, key, value)
    with hooked(leave_all):
        for _ in range(2):
            out = sdpa(*(Watched(t, t.clone()) for t in (query, key, value)))
            torch.testing.assert_close(out.a, expected)
    assert marks and not any(marks)


def test_modes_that_dynamos_guards_overlook_see_the_call(monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        @classmethod
        def ignore_compile_internals(cls):
            return True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    names = []

    def kernel(query, key, value, is_causal, scale):
        raise AssertionError("past the mode")

    make = override.make_call_hook
    monkeypatch.setattr("torch_flashbackend.stock.backend", lambda *args: "flash")
    monkeypatch.setattr(override, "make_call_hook", lambda key, stock, _: make(key, stock, {("flash", False): kernel}))
    query, key, value = qkv(1, 2, 8, 16)
    with hooked(leave_all):
        sdpa(query, key, value)
        with Names():
            sdpa(query, key, value)
    assert names == ["_scaled_dot_product_flash_attention_for_cpu.default"]


def test_function_modes_see_one_call():
    from torch.overrides import TorchFunctionMode

    class Count(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls += func is sdpa
            return func(*args, **(kwargs or {}))

    query, key, value = qkv(1, 2, 8, 16)
    with hooked(leave_all):
        for _ in range(2):
            with Count() as mode:
                sdpa(query, key, value)
            assert mode.calls == 1


def test_fake_tensors_do_not_warn():
    from torch._subclasses import FakeTensorMode

    with hooked(), warnings.catch_warnings(), FakeTensorMode():
        warnings.simplefilter("error")
        query = torch.empty(2, 3, 8, 16)
        sdpa(query, query, query)
        out = sdpa(query, query, query)
    assert out.shape == (2, 3, 8, 16)


def test_fake_cuda_tensors_are_decided_without_a_gpu():
    from torch._subclasses import FakeTensorMode

    torch_flashbackend.enable()
    with counting() as count, FakeTensorMode():
        query = torch.empty(2, 3, 8, 16, device="cuda", dtype=torch.float16)
        mask = torch.empty(8, 8, device="cuda", dtype=torch.bool)
        assert sdpa(query, query, query, mask).device.type == "cuda"
        assert count("triton") + count("stock") == 1


# Decisions.


def test_what_a_rule_may_look_at_is_in_the_key():
    seen = []

    def decide(problem, allowed=None):
        seen.append(problem)
        return routing.Decision("stock", "", "query")

    query, key, value = qkv(1, 2, 8, 16)
    storage = torch.randn(1 * 2 * 8 * 16 + 1)
    unaligned = storage[1:].view(1, 2, 8, 16)
    mask = torch.ones(8, 8, dtype=torch.bool)
    calls = [
        lambda: sdpa(query, key, value),
        lambda: sdpa(query, key, value, is_causal=True),
        lambda: sdpa(query, key, value, scale=1.0),
        lambda: sdpa(query, key, value, scale=-1.0),
        lambda: sdpa(query, key, value, scale=float("inf")),
        lambda: sdpa(query, key, value, dropout_p=0.5),
        lambda: sdpa(query, key, value, enable_gqa=True),
        lambda: sdpa(unaligned, key, value),
        lambda: sdpa(query.transpose(1, 2).contiguous().transpose(1, 2), key, value),
        lambda: sdpa(query, key, value, mask),
        lambda: sdpa(query, key, value, mask[None, None]),
        lambda: sdpa(query, key, value, mask.float()),
        lambda: sdpa(query, key, value, mask.float().requires_grad_()),
        lambda: sdpa(query.clone().requires_grad_(), key, value),
        lambda: sdpa(query[..., :7, :], key, value),
    ]
    settings = [
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]),
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
        lambda: torch.no_grad(),
    ]
    with hooked(decide):
        for index, call in enumerate(calls):
            for _ in range(3):
                call()
            assert len(seen) == index + 1
        number = len(seen)
        for setting in settings[:2]:
            for _ in range(3):
                with setting():
                    calls[0]()
            number += 1
            assert len(seen) == number
        with deterministic_mode():
            calls[0]()
        assert len(seen) == number + 1
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        try:
            calls[0]()
        finally:
            torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert len(seen) == number + 2
        torch.backends.cuda.matmul.fp32_precision = "none"
        calls[0]()
        assert len(seen) == number + 2


def test_the_cache_is_bounded_and_keeps_the_counts(monkeypatch):
    monkeypatch.setattr(decisions, "CAPACITY", 4)
    key = sample(1, 1, 16, 8)
    with hooked(leave_all), counting() as count:
        for _ in range(2):
            for length in range(1, 11):
                sdpa(key[..., :length, :], key, key)
                assert len(decisions.cache) <= 4
                assert len(decisions.recent) <= decisions.RECENT
        assert count("stock") == 20
    assert not decisions.cache and not decisions.recent
    assert stats().total("stock") == 20


def test_a_scale_that_changes_from_call_to_call_is_looked_up_once():
    query, key, value = qkv(1, 2, 8, 16)
    with hooked(leave_all):
        for i in range(20):
            torch.testing.assert_close(
                sdpa(query, key, value, scale=0.1 + i),
                sdpa(query.double(), key.double(), value.double(), scale=0.1 + i).float(),
            )
        assert len(decisions.cache) == 2 and len(decisions.recent) == 2


def test_without_torchs_guards_the_dictionary_decides(monkeypatch):
    monkeypatch.setattr(_torch, "tensor_guard", lambda tensors: None)
    query, key, value = qkv(1, 2, 8, 16)
    expected = sdpa(query, key, value)
    for decide in (leave_all, take_valid):
        with hooked(decide):
            for _ in range(3):
                torch.testing.assert_close(sdpa(query, key, value), expected)
            assert not decisions.recent


# Kernels that cannot be had.


def test_a_kernel_that_does_not_compile_leaves_the_call_to_stock_for_good(monkeypatch):
    class Unavailable(RuntimeError):
        pass

    attempts = []

    def run(*args, **kwargs):
        attempts.append(1)
        raise Unavailable("no PTX for sm_999\nand a page of details")

    monkeypatch.setattr(decisions, "kernel_failures", lambda: (Unavailable, torch.OutOfMemoryError))
    monkeypatch.setattr(decisions, "_warned", set())
    monkeypatch.setattr(ops, "run", run)
    query, key, value = qkv(1, 2, 8, 16, grad=True)
    expected = sdpa(query, key, value)
    with hooked(), counting() as count:
        with pytest.warns(RuntimeWarning, match="triton kernel is not available.*no PTX for sm_999$"):
            assert torch.equal(sdpa(query, key, value), expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(sdpa(query, key, value), expected)
            assert torch.equal(sdpa(query, key, value), expected)
        assert attempts == [1]
        assert count("stock") == 3
        assert any("no PTX" in reason for reason in stats()["calls"]["stock"])


def test_no_memory_for_a_workspace_leaves_that_call_to_stock(monkeypatch):
    attempts = []
    real = ops.run

    def run(*args, **kwargs):
        attempts.append(1)
        if len(attempts) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(decisions, "_warned", set())
    monkeypatch.setattr(ops, "run", run)
    query, key, value = qkv(1, 2, 8, 16)
    expected = sdpa(query, key, value)
    with hooked():
        with pytest.warns(RuntimeWarning, match="no memory for the workspace of the triton kernel"):
            torch.testing.assert_close(sdpa(query, key, value), expected)
        torch.testing.assert_close(sdpa(query, key, value), expected)
    assert len(attempts) == 2


def test_other_errors_of_a_taken_call_are_raised_and_leave_the_thread_clean(monkeypatch):
    monkeypatch.setattr(ops, "run", lambda *args, **kwargs: 1 / 0)
    query, key, value = qkv(1, 2, 8, 16)
    with hooked():
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                sdpa(query, key, value)
        assert not _torch.thread_mark.stock


def test_an_error_in_stock_leaves_the_thread_clean():
    query = sample(1, 2, 8, 16)
    with hooked(leave_all):
        for _ in range(3):
            with pytest.raises(RuntimeError):
                sdpa(query, query, query, torch.ones(7, 8, dtype=torch.bool))
            assert not _torch.thread_mark.stock
            assert not torch._C._dispatch_tls_is_dispatch_key_excluded(_torch.dispatch_key("AutogradCPU"))
            assert not torch._C._dispatch_tls_is_dispatch_key_excluded(_torch.dispatch_key("ADInplaceOrView"))


def test_a_call_left_to_stock_is_marked_while_it_runs():
    from torch.utils._python_dispatch import TorchDispatchMode

    marks = []

    class Mark(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            marks.append(_torch.thread_mark.stock)
            return func(*args, **(kwargs or {}))

    query, key, value = qkv(1, 2, 8, 16)
    with hooked(leave_all), Mark():
        sdpa(query, key, value)
    assert marks and all(marks)
    assert not _torch.thread_mark.stock


# Below autograd: in inference mode, and in what operators are made of.


def test_calls_in_inference_mode_are_judged_whole():
    """With the mask as it was given, by the rules of the function itself, also where they stay stock's."""
    query, key, value = qkv(2, 3, 8, 16)
    mask = sample(8, 8, seed=7) > -1.0
    expected = sdpa(query, key, value, mask)
    with torch.inference_mode():
        inputs = [tensor.clone() for tensor in (query, key, value, mask)]
    for decide, backend in ((take_valid, "triton"), (leave_all, "stock")):
        # Tensors made in inference mode pass no autograd outside of it either.
        for mode in (torch.inference_mode, torch.enable_grad):
            with hooked(decide, kernel_key="CPU"), counting() as count, mode():
                for times in (1, 2):
                    torch.testing.assert_close(sdpa(*inputs), expected)
                    assert count(backend) == times


def test_below_autograd_nobody_records():
    query, key, value = qkv(2, 3, 8, 16, grad=True)
    with hooked(kernel_key="CPU"), counting() as count:
        with torch._C._AutoDispatchBelowAutograd():
            out = sdpa(query, key, value)
        assert count("triton") == 1
    assert torch.is_grad_enabled() and not out.requires_grad
    torch.testing.assert_close(out, sdpa(query, key, value).detach())


def test_calls_on_a_cpu_pass_nothing_of_ours_where_pytorch_knows_no_gpu():
    torch_flashbackend.enable()
    try:
        hooked_below = _torch.python_kernel_registered(override.OP, "BackendSelect")
    finally:
        torch_flashbackend.disable()
    assert hooked_below == (torch.version.cuda is not None or torch.version.hip is not None)


def test_what_is_marked_as_stocks_stays_so_in_inference_mode():
    query, key, value = qkv(2, 3, 8, 16)
    with hooked(kernel_key="CPU"), counting() as count, torch.inference_mode():
        out = _torch.as_stock(sdpa, query, key, value)
        assert count("triton") == count("stock") == 0
    torch.testing.assert_close(out, sdpa(query, key, value))


def test_other_kinds_of_tensor_are_pytorchs_in_inference_mode():
    with hooked(kernel_key="CPU"), counting() as count, torch.inference_mode():
        meta = torch.empty(2, 3, 8, 16, device="meta")
        assert sdpa(meta, meta, meta).shape == meta.shape
        assert count("triton") == count("stock") == 0


def test_the_way_past_observers_is_for_calls_without_one(monkeypatch):
    """Prepared calls skip the operator, which a profiler wants to see."""
    ways = []

    class Run:
        def __call__(self, query, *rest, layout):
            ways.append("operator")
            return query.clone()

        def unobserved(self, query, *rest):
            ways.append("direct")
            return query.clone()

    monkeypatch.setattr(decisions, "_runner", lambda *_: Run())
    query, key, value = qkv(2, 3, 8, 16)
    with hooked():
        for _ in range(2):
            sdpa(query, key, value)
        with torch.profiler.profile():
            sdpa(query, key, value)
    assert ways == ["operator", "direct", "operator"]
