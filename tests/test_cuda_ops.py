"""The operators with backend="cuda": what they call, what they fall back on, and what a graph says of them."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hooked import hooked, sample
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from torch_flashbackend import decisions, kernel_hook, ops, policy, problem, routing, sdpa_backend, stats
from torch_flashbackend.kernels import KernelUnavailable
from torch_flashbackend.kernels.cuda import forward

OPTIONS = (None, None, 0.0, True, 0.3, "query")


@pytest.fixture
def qkv():
    return [sample(1, 2, 5, 16, seed=i) for i in range(3)]


@pytest.fixture
def kernels(monkeypatch):
    """Kernels that only say that they were called; `failure`: what the Hopper kernels raise."""
    found = SimpleNamespace(calls=[], failure=None, plans=0, mask=None)

    def hopper(query, key, value, is_causal, scale, out, logsumexp, mask=None, dropout_seed=None, dropout_p=0.0):
        if found.failure:
            raise found.failure
        found.calls.append("cuda")
        found.mask = mask
        found.dropout = dropout_seed, dropout_p
        out.fill_(1.0)

    def plan(*arguments):
        found.plans += 1
        return lambda query, key, value, out, logsumexp: hopper(query, key, value, None, None, out, logsumexp)

    def triton(*arguments):
        found.calls.append("triton")
        arguments[8].fill_(2.0)

    aligned = lambda *tensors: all(tensor.data_ptr() % 16 == 0 for tensor in tensors)  # noqa: E731
    monkeypatch.setattr(ops, "_hopper", lambda: SimpleNamespace(
        forward=hopper, aligned=aligned, plan=plan, takes_mask=forward.takes_mask))  # fmt: skip
    monkeypatch.setattr(ops, "_kernels", lambda: SimpleNamespace(forward=triton))
    return found


def misaligned(tensor):
    moved = torch.empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)
    assert moved.data_ptr() % 16
    return moved


@pytest.mark.parametrize("implementation", [ops._attention_cuda, ops._attention_forward_cuda])
def test_the_backend_named_runs(kernels, qkv, implementation):
    implementation(*qkv, *OPTIONS, "cuda")
    implementation(*qkv, *OPTIONS, "triton")
    implementation(*qkv, *OPTIONS)
    assert kernels.calls == ["cuda", "triton", "triton"]


@pytest.mark.parametrize("position", range(3))
def test_misaligned_addresses_run_on_triton(kernels, qkv, position):
    """What a compiled graph may be called with, though it was traced with aligned tensors."""
    qkv[position] = misaligned(qkv[position])
    ops._attention_cuda(*qkv, *OPTIONS, "cuda")
    assert kernels.calls == ["triton"]


def test_what_is_not_theirs_runs_on_triton(kernels, qkv):
    seed, seen = torch.zeros(1, dtype=torch.int64), torch.ones(5, 5, dtype=torch.bool)
    ops._attention_cuda(*qkv, torch.ones(5, 5), None, 0.0, False, 0.3, "query", "cuda")  # rows of 20 bytes
    ops._attention_cuda(*qkv, seen, seed, 0.5, False, 0.3, "query", "cuda")
    ops._attention_cuda(*qkv, seen, None, 0.0, True, 0.3, "query", "cuda")
    assert kernels.calls == ["triton"] * 3


def test_float_masks_in_rows_of_16_bytes_and_dropout_are_theirs(kernels, qkv):
    seed, room = torch.zeros(1, dtype=torch.int64), torch.zeros(5, 8)
    assert room.data_ptr() % 16 == 0
    ops._attention_cuda(*qkv, room[:, :5], None, 0.0, False, 0.3, "query", "cuda")
    assert kernels.mask.shape == (1, 1, 5, 5) and kernels.mask.data_ptr() == room.data_ptr()
    ops._attention_cuda(*qkv, None, seed, 0.5, False, 0.3, "query", "cuda")
    assert kernels.dropout == (seed, 0.5)
    assert kernels.calls == ["cuda"] * 2


@pytest.mark.parametrize("shape", [(5, 5), (2, 1, 5), (1, 1, 1, 5)])
def test_bool_masks_arrive_with_four_dimensions_and_unexpanded(kernels, qkv, shape):
    seen = torch.rand(shape) < 0.5
    ops._attention_cuda(*qkv, seen, None, 0.0, False, 0.3, "query", "cuda")
    assert kernels.calls == ["cuda"]
    assert kernels.mask.shape == (1,) * (4 - len(shape)) + shape
    assert kernels.mask.data_ptr() == seen.data_ptr()


def test_empty_calls_run_nothing(kernels, qkv):
    query, key, value = qkv
    assert ops._attention_cuda(query[:, :, :0], key, value, *OPTIONS, "cuda").shape == (1, 2, 0, 16)
    assert not ops._attention_cuda(query, key[:, :, :0], value[:, :, :0], *OPTIONS, "cuda").any()
    assert not kernels.calls


def test_a_kernel_that_cannot_be_had_is_the_hooks_to_replace_and_triton_runs_in_a_graph(kernels, qkv):
    kernels.failure = KernelUnavailable("no such instruction")
    with pytest.raises(KernelUnavailable):
        ops._attention_cuda(*qkv, *OPTIONS, "cuda")
    assert not kernels.calls
    # As the dispatcher passes arguments: by position, those at the end that have their default left out.
    called_by_the_dispatcher = ops._with_triton_to_fall_back_on(ops._attention_cuda)
    with pytest.warns(UserWarning, match="no such instruction; Triton's kernels run instead"):
        called_by_the_dispatcher(*qkv, *OPTIONS, "cuda")
    assert kernels.calls == ["triton"]
    kernels.failure = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        called_by_the_dispatcher(*qkv, *OPTIONS, "cuda")
    assert kernels.calls == ["triton", "cuda"]


def test_inference_keeps_its_plan_while_the_scale_stays(kernels, qkv):
    run = ops.ReadyRun("cuda", needs_grad=False)
    for _ in range(3):
        assert (run(*qkv, scale=0.3) == 1.0).all()
    assert kernels.plans == 1
    for _ in range(2):
        run(*qkv)
    run(*qkv, scale=0.3)
    assert kernels.plans == 3
    assert kernels.calls == ["cuda"] * 6


def test_inference_passes_on_what_its_plan_is_not_made_for(kernels, qkv):
    run = ops.ReadyRun("cuda", needs_grad=False)
    query, key, value = qkv
    out, logsumexp = run(*qkv, return_lse=True)  # the math path: these are CPU tensors
    torch.testing.assert_close(out, F.scaled_dot_product_attention(*qkv))
    torch.testing.assert_close(logsumexp, torch.logsumexp(query @ key.mT / 4.0, -1))
    assert run(query[:, :, :0], key, value).shape == (1, 2, 0, 16)
    seen = torch.rand(5, 5)
    torch.testing.assert_close(run(*qkv, seen), ops.reference.attention(*qkv, seen, 0.0, False, 0.25))
    with torch.autograd.profiler.profile() as profile:  # a profiler wants to see the operator
        run(*qkv)
    assert "flashbackend::attention" in {event.name for event in profile.function_events}
    assert kernels.plans == 0


@pytest.mark.parametrize("op", ["attention", "attention_forward"])
def test_opcheck(op, qkv):
    qkv = [tensor.requires_grad_() for tensor in qkv]
    torch.library.opcheck(getattr(torch.ops.flashbackend, op).default, (*qkv, *OPTIONS, "cuda"))


def test_opcheck_of_the_backward(qkv):
    out, logsumexp = ops._attention_forward_math(*qkv, *OPTIONS)
    arguments = (torch.ones_like(out), *qkv, None, out, logsumexp, None, 0.0, True, 0.3, [True, True, True, False])
    torch.library.opcheck(torch.ops.flashbackend.attention_backward.default, (*arguments, "cuda"))


@pytest.mark.parametrize("way", ["run", "attention", "attention_forward"])
def test_the_backward_is_asked_of_the_same_backend(qkv, monkeypatch, way):
    asked = []
    below = ops._below_autograd
    monkeypatch.setattr(ops, "_below_autograd", lambda op, *rest: asked.append((op, rest[-1])) or below(op, *rest))
    qkv = [tensor.requires_grad_() for tensor in qkv]
    if way == "run":
        out = ops.run(*qkv, is_causal=True, scale=0.3, backend="cuda")
    else:
        out = getattr(torch.ops.flashbackend, way).default(*qkv, *OPTIONS, "cuda")
        out = out[0] if way == "attention_forward" else out
    out.sum().backward()
    assert asked[-1] == (torch.ops.flashbackend.attention_backward.default, "cuda")
    expected = torch.autograd.grad(F.scaled_dot_product_attention(*qkv, is_causal=True, scale=0.3).sum(), qkv)
    torch.testing.assert_close([tensor.grad for tensor in qkv], list(expected))


class Seen(TorchDispatchMode):
    """Remembers the operators of ours that run, and the backend that they were given."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "flashbackend":
            self.calls.append((func._opname, args[9] if len(args) > 9 else "triton"))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def h200(monkeypatch):
    """Fake CUDA tensors are on an H200."""
    monkeypatch.setattr(problem, "_this_machine", lambda *_: ("sm_90", "NVIDIA H200", 132))
    monkeypatch.setattr("torch_flashbackend.nvrtc.unavailable", lambda: None)
    decisions.forget()
    yield
    decisions.forget()


def seen(function, **kwargs):
    with FakeTensorMode(), Seen() as modes:
        tensors = [torch.empty(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        function(*tensors, **kwargs)
    return modes.calls


def test_the_choice_by_hand_is_an_argument_of_the_operator(h200):
    for names, expected in ((("cuda",), "cuda"), (("triton",), "triton"), (("triton", "cuda"), "triton")):
        with sdpa_backend(*names):
            assert seen(F.scaled_dot_product_attention) == [("attention", expected)]
    with sdpa_backend("cuda", "triton"):
        assert seen(F.scaled_dot_product_attention, scale=-1.0) == [("attention", "triton")]
    with (
        sdpa_backend("cuda"),
        pytest.raises(RuntimeError, match=r"scale -1\.0 is not supported by the cuda backend"),
    ):
        seen(F.scaled_dot_product_attention, scale=-1.0)


def test_our_own_function_with_logsumexp_prefers_the_cuda_backend(h200):
    from torch_flashbackend import attention

    assert seen(attention, return_lse=True) == [("attention_forward", "cuda")]


def test_stats_count_the_cuda_backend(h200, monkeypatch):
    from torch_flashbackend import attention

    monkeypatch.setattr(policy, "judge", lambda problem, backend: policy.Verdict(True, "test", "taken for a test"))
    stats.reset_stats()
    assert seen(attention) == [("attention", "cuda")]
    assert stats()["traced"] == {"cuda": {"test": 1}}


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_the_kernel_hook_asks_the_backend_that_was_decided(monkeypatch, backend):
    asked = []
    for name in ("_forward", "_backward"):
        function = getattr(kernel_hook, name)
        monkeypatch.setattr(kernel_hook, name, lambda *args, f=function, n=name: asked.append((n, args[0])) or f(*args))

    def decide(call, allowed=None):
        return routing.Decision(backend, "taken for the test", "query")

    tensors = [sample(1, 2, 16, 32, seed=i).half() for i in range(3)]
    aten = torch.ops.aten
    with hooked(decide, kernel_key="CPU"):
        out, logsumexp, *_, seed, offset, _ = aten._scaled_dot_product_flash_attention(*tensors, 0.0, True)
        aten._scaled_dot_product_flash_attention_backward(
            torch.ones_like(out), *tensors, out, logsumexp, None, None, 16, 16, 0.0, True, seed, offset
        )
    assert asked == [("_forward", backend), ("_backward", backend)]
