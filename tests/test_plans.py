"""Plans of calls: what they are found by; and calls with gradients, prepared once, on stand-in kernels."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from hooked import sample
from torch._subclasses import FakeTensorMode

from torch_flashbackend import _torch, decisions, ops, plans, reference
from torch_flashbackend.kernels.cuda import backward as hopper_backward
from torch_flashbackend.kernels.cuda import backward_parts

from common import deterministic_mode

OTHERS = {
    "shape": lambda t: t[:, :, :4],
    "strides": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "dtype": lambda t: t.half(),
    "gradient": lambda t: t.clone().requires_grad_(),
    "address": lambda t: torch.empty(t.numel() + 1)[1:].view(t.shape),
    "negated": lambda t: torch._neg_view(t),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("kind", ["Recent", "Plans"])
def test_a_plan_is_found_for_the_same_call_alone(kind, other):
    tensors = sample(1, 2, 8, 16), sample(1, 2, 8, 16, seed=1)
    known = plans.Recent() if kind == "Recent" else plans.Plans()
    if kind == "Recent":
        known.remember((True, 0.5), tensors, "plan")
    else:
        assert known.look_up((True, 0.5), tensors, lambda: "plan") == "plan"
    assert known.find((True, 0.5), [tensor.clone() for tensor in tensors]) == "plan"
    assert known.find((False, 0.5), tensors) is None
    assert known.find((True, 0.25), tensors) is None
    assert known.find((True, 0.5), (tensors[0], OTHERS[other](tensors[1]))) is None
    known.clear()
    assert known.find((True, 0.5), tensors) is None


def test_misaligned_tensors_are_not_remembered():
    known, tensor = plans.Recent(), OTHERS["address"](sample(1, 2, 8, 16))
    known.remember((), (tensor,), "plan")
    assert known.find((), (tensor,)) is None


def test_plans_are_bounded_and_keep_no_tensor(monkeypatch):
    monkeypatch.setattr(plans, "MAX_PLANS", 5)
    known = plans.Plans()
    tensors = [sample(1, 2, 8, 16) for _ in range(20)]
    for number, tensor in enumerate(tensors):
        known.look_up((number,), (tensor,), lambda number=number: number)
    assert len(known) <= 5 and len(known._times) <= 5
    references = [weakref.ref(tensor) for tensor in tensors]
    del tensor, tensors
    gc.collect()
    assert not any(reference() is not None for reference in references)
    recent = plans.Recent()
    for number in range(40):
        recent.remember((number,), (sample(1, 2, 8, 16),), number)
    assert len(recent._recent) == plans.MAX_RECENT


@pytest.fixture(params=["cuda", "triton"])
def kernels(monkeypatch, request):
    """Kernels of one backend that compute on the CPU; `made` and `ran`: plans made, and those called."""
    found = SimpleNamespace(made=[], ran=[], backend=request.param)
    found.run = lambda needs_grad=True: ops.ReadyRun(found.backend, needs_grad)

    def plan_of_forward(is_causal, scale, mask):
        found.made.append("forward")
        assert mask is None or mask.dim() == 4

        def call(query, key, value, out, logsumexp, mask=None, seed=None):
            found.ran.append("forward")
            result, rows = reference.attention(query, key, value, mask, 0.0, is_causal, scale, return_lse=True)
            out.copy_(result)
            if logsumexp is not None and logsumexp.dim() == 4:
                logsumexp[0], logsumexp[1] = rows, 0.0
            elif logsumexp is not None:
                logsumexp.copy_(rows)

        return call

    def plan_of_backward(is_causal, scale, mask, dropout_p):
        found.made.append("backward")
        assert mask is None or mask.dim() == 4

        def call(query, key, value, out, lse, grad_out, grad_query, grad_key, grad_value, mask, seed):
            found.ran.append("backward")
            *wanted, grad_mask = reference.attention_backward(
                grad_out, query, key, value, mask, dropout_p, is_causal, scale, seed, out, lse
            )
            for grad, like in zip((grad_query, grad_key, grad_value), wanted):
                if grad is not None:
                    grad.copy_(like)
            return grad_mask

        return call

    def hopper_plan(query, key, value, out, write_lse, is_causal, scale, mask=None, dropout_p=0.0):
        return plan_of_forward(is_causal, scale, mask)

    def hopper_backward_plan(grad_out, query, key, value, out, lse, is_causal, scale, grad_query, grad_key, grad_value,
                             deterministic, mask, dropout_p, seed, *_):  # fmt: skip
        call = plan_of_backward(is_causal, scale, mask, dropout_p)
        call(query, key, value, out, lse, grad_out, grad_query, grad_key, grad_value, mask, seed)
        return call

    def triton_plan(query, key, value, mask, seed, dropout_p, is_causal, scale, *_):
        return plan_of_forward(is_causal, scale, mask)

    def triton_backward_plan(grad_out, query, key, value, mask, out, lse, seed, dropout_p, is_causal, scale, *_):
        return plan_of_backward(is_causal, scale, mask, dropout_p)

    hopper = SimpleNamespace(
        backward=hopper_backward_plan, suits=hopper_backward.suits, extras_fit=hopper_backward.extras_fit
    )
    triton = SimpleNamespace(plan_of_forward=triton_plan, plan_of_backward=triton_backward_plan)
    monkeypatch.setattr(ops, "_hopper", lambda: SimpleNamespace(plan=hopper_plan))
    monkeypatch.setattr(ops, "_hopper_backward", lambda: hopper)
    monkeypatch.setattr(ops, "_kernels", lambda: triton)
    monkeypatch.setattr(ops, "_backwards", plans.Recent())
    monkeypatch.setattr(backward_parts, "batches_at_a_time", lambda query, *_: query.size(0))

    def below(operator, implementation, tensor, *arguments):
        if _torch.unobserved(tensor):
            return implementation(tensor, *arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(tensor, *arguments)

    monkeypatch.setattr(ops, "_below_autograd", below)
    # CUDA's allocator takes plain tuples, as this one does.
    monkeypatch.setattr(_torch, "allocator", lambda like: torch._C._dynamo.guards._empty_strided_cpu)
    return found


def leaves(*wanted, layout=lambda t: t):
    return [layout(sample(1, 2, 8, 16, seed=i)).requires_grad_(need) for i, need in enumerate(wanted or (True,) * 3)]


def assert_equals_reference(out, inputs, grad_out, grads, is_causal, scale, mask=None):
    twins = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
    expected = reference.attention(
        *twins, mask, 0.0, is_causal, reference.default_scale(16) if scale is None else scale
    )
    torch.testing.assert_close(out, expected)
    wanted = [twin for twin in twins if twin.requires_grad]
    torch.testing.assert_close(list(grads), list(torch.autograd.grad(expected, wanted, grad_out)))


@pytest.mark.parametrize("layout", [lambda t: t, OTHERS["strides"]], ids=["bhsd", "bshd"])
@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, True, False)])
def test_forward_and_backward_are_prepared_once(kernels, wanted, layout):
    run = kernels.run()
    for turn in range(3):
        inputs = leaves(*wanted, layout=layout)
        out = run(*inputs, is_causal=True)
        assert out.stride() == torch.empty_like(inputs[0]).stride()
        grad_out = sample(1, 2, 8, 16, seed=turn + 5)
        grads = torch.autograd.grad(out, [tensor for tensor in inputs if tensor.requires_grad], grad_out)
        for grad, like in zip(grads, [tensor for tensor in inputs if tensor.requires_grad]):
            assert grad.stride() == torch.empty_like(like).stride()
        assert_equals_reference(out, inputs, grad_out, grads, True, None)
    assert kernels.made == ["forward", "backward"]
    assert kernels.ran == ["forward", "backward"] * 3


def masks_of(turn, *shape):
    """A new bool mask each turn, at a multiple of 16 bytes, that leaves each row a key."""
    mask = sample(*shape, seed=40 + turn).ge_(0.0).to(torch.bool)
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize("shape", [(8, 8), (1, 1, 1, 8), (1, 2, 8, 8)])
def test_calls_with_a_bool_mask_are_prepared_once(kernels, shape):
    run = kernels.run()
    for turn in range(3):
        inputs, mask = leaves(), masks_of(turn, *shape)
        out = run(*inputs, mask)
        grad_out = sample(1, 2, 8, 16, seed=turn + 5)
        grads = torch.autograd.grad(out, inputs, grad_out)
        assert_equals_reference(out, inputs, grad_out, grads, False, None, mask)
    assert kernels.made == ["forward", "backward"]
    assert kernels.ran == ["forward", "backward"] * 3
    run = kernels.run(needs_grad=False)
    for turn in range(2):
        inputs, mask = [tensor.detach() for tensor in leaves()], masks_of(turn, *shape)
        torch.testing.assert_close(run(*inputs, mask), reference.attention(*inputs, mask, 0.0, False, 0.25))
    assert kernels.made[2:] == ["forward"]


def test_a_mask_is_not_taken_for_another(kernels):
    """A backward is found again for masks of one shape and strides, and never for a call without."""
    run = {shape: kernels.run() for shape in ((8, 8), (1, 8), None)}
    for shape in ((8, 8), None, (1, 8), (8, 8), None):
        inputs, grad_out = leaves(), sample(1, 2, 8, 16, seed=5)
        mask = None if shape is None else masks_of(1, *shape)
        out = run[shape](*inputs, mask)
        grads = torch.autograd.grad(out, inputs, grad_out)
        assert_equals_reference(out, inputs, grad_out, grads, False, None, mask)
    assert kernels.made == ["forward", "backward"] * 3


def test_masks_that_plans_do_not_allow_for_go_the_long_way(monkeypatch, kernels):
    long_way = []
    monkeypatch.setattr(ops, "run", lambda *arguments, **options: long_way.append(arguments[3]))
    misaligned = torch.ones(72, dtype=torch.bool)[1:65].view(8, 8)
    other_kinds = [(masks_of(0, 8, 8), True), (torch.zeros(8, 8), False)] if kernels.backend == "cuda" else []
    run = kernels.run()
    for mask, is_causal in ((misaligned, False), *other_kinds):
        run(*leaves(), mask, is_causal=is_causal)
        assert long_way.pop() is mask
    assert kernels.made == []


@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
@pytest.mark.parametrize("needs_mask", [False, True])
@pytest.mark.parametrize("shape", [(8, 8), (1, 1, 1, 8), (1, 2, 8, 8)])
def test_calls_with_a_float_mask_are_prepared_once(kernels, shape, needs_mask):
    run = kernels.run()
    for turn in range(3):
        inputs, mask = leaves(), sample(*shape, seed=turn + 20).requires_grad_(needs_mask)
        out = run(*inputs, mask)
        grad_out = sample(1, 2, 8, 16, seed=turn + 5)
        wanted = [*inputs, mask] if needs_mask else inputs
        twins = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in (*inputs, mask)]
        expected = reference.attention(*twins, 0.0, False, 0.25)
        torch.testing.assert_close(out, expected)
        grads = torch.autograd.grad(out, wanted, grad_out)
        torch.testing.assert_close(grads, torch.autograd.grad(expected, twins[: len(wanted)], grad_out))
    assert kernels.made == ["forward", "backward"]
    assert kernels.ran == ["forward", "backward"] * 3


def test_a_dropped_backward_is_repeated_with_its_own_seed(kernels):
    query, key, value, grad_out = (sample(1, 2, 8, 16, seed=i) for i in range(4))
    for number in (3, 4):
        seed = torch.tensor([number])
        out, lse = reference.attention(query, key, value, None, 0.5, False, 0.25, seed, return_lse=True)
        grads = ops._gradients_cuda(
            grad_out, query, key, value, None, out, lse, seed, 0.5, False, 0.25, [True, True, True, False],
            kernels.backend,
        )  # fmt: skip
        wanted = reference.attention_backward(grad_out, query, key, value, None, 0.5, False, 0.25, seed, out, lse)
        torch.testing.assert_close(grads[:3], tuple(wanted[:3]))
    assert kernels.made == ["backward"]


def test_another_scale_mode_or_layout_is_another_plan(kernels):
    run = kernels.run()
    grad_out = sample(1, 2, 8, 16, seed=9)

    def once(scale, grad_out):
        inputs = leaves()
        out = run(*inputs, scale=scale)
        assert_equals_reference(out, inputs, grad_out, torch.autograd.grad(out, inputs, grad_out), False, scale)

    for scale in (0.3, 0.3, None, None, 0.3):
        once(scale, grad_out)
    assert kernels.made == ["forward", "backward"] * 2 + ["forward"]
    once(0.3, OTHERS["strides"](grad_out))
    once(0.3, torch.ones(()).expand(1, 2, 8, 16))
    assert kernels.made[5:] == ["backward"] * 2
    with deterministic_mode():
        once(0.3, grad_out)
    assert kernels.made[7:] == ["backward"]


def test_saved_tensors_are_watched_and_may_be_moved(kernels):
    run = kernels.run()
    inputs = leaves()
    query = inputs[0] * 1.0
    out = run(query, *inputs[1:])
    query.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    grad_out = sample(1, 2, 8, 16, seed=9)
    # What comes back has other strides and addresses than what was saved.
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: OTHERS["strides"](t) if t.dim() == 4 else t):
        for _ in range(2):
            out = run(*inputs)
            assert_equals_reference(out, inputs, grad_out, torch.autograd.grad(out, inputs, grad_out), False, None)


def test_second_derivatives_and_batches_of_gradients(kernels):
    run, seconds = kernels.run(), []
    for attention in (run, lambda *qkv, is_causal: reference.attention(*qkv, None, 0.0, is_causal, 0.25)):
        inputs = leaves()
        grads = torch.autograd.grad(attention(*inputs, is_causal=True).square().sum(), inputs, create_graph=True)
        seconds.append(torch.autograd.grad(sum(grad.square().sum() for grad in grads), inputs))
    torch.testing.assert_close(*seconds)
    inputs = leaves()
    out = run(*inputs)
    grad_outs = torch.stack([sample(1, 2, 8, 16, seed=i) for i in (5, 6)])
    batched = torch.autograd.grad(out, inputs, grad_outs, is_grads_batched=True, retain_graph=True)
    for index in range(2):
        alone = torch.autograd.grad(out, inputs, grad_outs[index], retain_graph=True)
        torch.testing.assert_close([grad[index] for grad in batched], list(alone))


@pytest.mark.parametrize("masked", [False, True])
def test_compiled_autograd_traces_the_backward(kernels, masked):
    """Not the one that repeats, which autograd's engine calls."""
    from torch._dynamo import compiled_autograd

    inputs, mask = leaves(), masks_of(0, 8, 8) if masked else None
    out, grad_out = kernels.run()(*inputs, mask), sample(1, 2, 8, 16, seed=9)
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager", fullgraph=True)):
        out.backward(grad_out)
    assert_equals_reference(out, inputs, grad_out, [tensor.grad for tensor in inputs], False, None, mask)


@pytest.mark.parametrize("offset", [1, 8])
def test_a_gradient_at_another_alignment_is_not_the_repeated_ones(kernels, offset):
    """The same but for the address: a plan reads in pieces of 16 bytes."""
    run = kernels.run()
    for _ in range(2):
        inputs = leaves()
        torch.autograd.grad(run(*inputs), inputs, sample(1, 2, 8, 16, seed=9))
    kernels.made.clear()
    shifted = torch.empty(256 + offset)[offset:].view(1, 2, 8, 16).copy_(sample(1, 2, 8, 16, seed=9))
    inputs = leaves()
    out = run(*inputs)
    grads = torch.autograd.grad(out, inputs, shifted)
    assert_equals_reference(out, inputs, shifted, grads, False, None)
    assert kernels.made == (["backward"] if offset == 1 else [])


@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
def test_a_backward_is_not_repeated_where_tf32_is_switched(monkeypatch, kernels):
    run, allowed = kernels.run(), []
    monkeypatch.setattr(_torch, "allows_tf32", lambda: bool(allowed))
    for allow in (False, True, True, False):
        allowed[:] = [True] * allow
        inputs = leaves()
        torch.autograd.grad(run(*inputs), inputs, sample(1, 2, 8, 16, seed=9))
    assert kernels.made == ["forward", "backward", "backward"]


def test_gradients_needed_decide_which_backward_is_repeated(kernels):
    run, grad_out = kernels.run(), sample(1, 2, 8, 16, seed=9)
    every, one = (True, True, True), (True, False, False)
    for wanted in (every, one, every, one):
        inputs = leaves(*wanted)
        out = run(*inputs)
        needed = [tensor for tensor in inputs if tensor.requires_grad]
        assert_equals_reference(out, inputs, grad_out, torch.autograd.grad(out, needed, grad_out), False, None)
    assert kernels.made == ["forward", "backward", "backward"]


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_runs_are_kept_for_calls_with_a_key_alone(monkeypatch, backend):
    """A traced call brings other tensors each time: nothing prepared may be kept for it.

    Nor for a CPU, for dropout, or where one of three addresses, whichever, is no multiple of 16 bytes.
    """
    from torch_flashbackend import routing

    monkeypatch.setattr(routing, "decide", lambda problem, allowed=None: routing.Decision(backend, "test", "query"))

    def run_of(device, has_key, dropout_p=0.0, alignment=0):
        monkeypatch.setattr(decisions, "_alignment", lambda *_: alignment)
        with FakeTensorMode():
            tensors = [torch.empty(1, 2, 8, 16, device=device) for _ in range(3)]
        arguments = *tensors, None, dropout_p, False, None, False
        keep_as = (device, "key") if has_key else None
        return decisions.decide(*arguments, entry="sdpa", keep_as=keep_as).run

    assert type(run_of("cuda", has_key=False)) is not ops.ReadyRun
    assert type(run_of("cuda", has_key=True)) is ops.ReadyRun
    assert type(run_of("cpu", has_key=True)) is not ops.ReadyRun
    assert type(run_of("cuda", has_key=True, dropout_p=0.5)) is not ops.ReadyRun
    assert type(run_of("cuda", has_key=True, alignment=8)) is not ops.ReadyRun
    decisions.forget()
