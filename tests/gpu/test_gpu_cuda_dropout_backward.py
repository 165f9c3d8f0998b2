"""Dropout in the Hopper backward, every form of its main kernel: entries one by one, values, repetition."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import os

import pytest
import torch
from torch import Tensor

from common import Call, attention_float64, gradient_for, simple_call

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.cuda_only,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (compute capability 9.0)"),
]
HALF, BFLOAT = torch.float16, torch.bfloat16
# What is changed in the table's tile.
FORMS = {
    "table": {},
    "issued whole": {"issued_whole": True},
    "unstaged": {"unstaged": True},
    "apart": {"unstaged": True, "hashed_apart": True},
    "apart, issued whole": {"unstaged": True, "hashed_apart": True, "issued_whole": True},
}


# (head_dim, dtype, is_causal) of the specialisations here.
KINDS = [
    *itertools.product((64, 128), (BFLOAT,), (False, True)),
    (128, HALF, True),
    (64, HALF, False),
    (72, BFLOAT, True),
    (96, HALF, False),
]


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def form(request):
    return request.param


def specialise(head_dim: int, dtype: torch.dtype, is_causal: bool, form: dict[str, bool]):
    from torch_flashbackend.kernels.cuda import backward

    spec = backward.specialise(head_dim, head_dim, dtype, is_causal, False, 1 << 20, has_dropout=True, can_fuse=False)
    return spec._replace(tile=dataclasses.replace(spec.tile, **form))


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All of them at once, on all cores, instead of one after the other."""
    specs = [specialise(*kind, form) for form in FORMS.values() for kind in KINDS]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(lambda spec: spec.compile(), specs))


def kept(call: Call, seed: Tensor, p: float) -> Tensor:
    """What stays, bool [B, H, seqlen_q, seqlen_k]."""
    from torch_flashbackend import reference

    return reference.dropout_keep(seed, (*call.query.shape[:3], call.key.size(2)), p)


class Backward:
    """The backward of calls of one shape, in one form. The forward is Triton's."""

    def __init__(self, call: Call, p: float, form: dict[str, bool]) -> None:
        from torch_flashbackend.kernels.cuda import backward

        self.call = call
        self.seed = torch.tensor([2**40 + 17], device="cuda")
        self.out, self.logsumexp = torch.ops.flashbackend.attention_forward(
            call.query, call.key, call.value, None, self.seed, p, call.is_causal, call.softmax_scale, "query", "triton"
        )  # fmt: skip
        self.grads = [torch.full_like(t, torch.nan) for t in (call.query, call.key, call.value)]
        tile = specialise(call.query.size(3), call.query.dtype, call.is_causal, form).tile
        self.plan = backward.Plan(
            call.query, call.key, call.value, self.out, self.logsumexp, gradient_for(call), *self.grads,
            call.is_causal, call.softmax_scale, False, tile, None, p,
        )  # fmt: skip

    def __call__(self, grad_out: Tensor, out: Tensor | None = None) -> list[Tensor]:
        """The gradients of query, key and value, overwritten by the next call."""
        call, out = self.call, self.out if out is None else out
        self.plan(call.query, call.key, call.value, out, self.logsumexp, grad_out, *self.grads, None, self.seed)
        return self.grads


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_entries_that_count_are_those_of_the_reference_one_by_one(form, head_dim, is_causal):
    """Rows of an identity in grad_out show each probability by itself, rows of one in key each gradient of a score."""
    p, lengths = 0.4, (300, 333)
    call = simple_call(2, 4, *lengths, head_dim, kv_heads=2, is_causal=is_causal)
    seen = torch.ones(lengths, dtype=torch.bool, device="cuda")
    if is_causal:
        seen = seen.tril()
    call.key.mul_(0.1)  # no probability rounds to zero
    backward = Backward(call, p, form)
    expected = kept(call, backward.seed, p) & seen
    for first, head in itertools.product(range(0, lengths[0], head_dim), range(2)):
        # Of each group, one query head at a time: grad_value is the sum of a group's.
        rows = min(head_dim, lengths[0] - first)
        grad_out = torch.zeros_like(call.query)
        grad_out[:, head::2, first : first + rows, :rows] = torch.eye(rows, device="cuda", dtype=BFLOAT)
        _, _, grad_value = backward(grad_out)
        wanted = expected[:, head::2, first : first + rows].mT
        assert torch.equal(grad_value[..., :rows] != 0, wanted), (first, head)
    grad_out = gradient_for(call)
    for first in range(0, lengths[1], head_dim):
        columns = min(head_dim, lengths[1] - first)
        call.key.zero_()
        call.key[:, :, first : first + columns, :columns] = torch.eye(columns, device="cuda", dtype=BFLOAT) * 0.5
        backward = Backward(call, p, form)
        # Without an output there is no delta, so that a score's gradient is zero where nothing stays.
        grad_query, _, _ = backward(grad_out, torch.zeros_like(call.query))
        wanted = expected[..., first : first + columns]
        assert torch.equal(grad_query[..., :columns] != 0, wanted), first


@pytest.mark.parametrize("head_dim, dtype, is_causal", KINDS)
def test_gradients(form, head_dim, dtype, is_causal):
    shapes = ((2, 4, 333, 500), (1, 4, 512, 512), (1, 2, 1000, 260), (1, 2, 129, 127), (1, 2, 700, 7))
    for number, (batch, heads, *lengths) in enumerate((*shapes, (2, 2, 1, 700)) if not is_causal else shapes):
        p = (0.05, 0.5, 0.9)[number % 3]
        call = simple_call(batch, heads, *lengths, head_dim, kv_heads=2, dtype=dtype, is_causal=is_causal, seed=number)
        grad_out = gradient_for(call)
        backward = Backward(call, p, form)
        grads = backward(grad_out)
        wide = Call(*(t.detach().double().requires_grad_() for t in (call.query, call.key, call.value)),
                    is_causal=is_causal, enable_gqa=True)  # fmt: skip
        expected = attention_float64(wide, kept(call, backward.seed, p), p)
        wanted = torch.autograd.grad(expected, (wide.query, wide.key, wide.value), grad_out.double())
        for got, right in zip(grads, wanted, strict=True):
            assert (got.double() - right).norm() < 0.01 * right.norm(), (lengths, p)


def test_probabilities_at_the_ends_of_what_a_threshold_can_say(form):
    call = simple_call(1, 2, 200, head_dim=128)
    grad_out = gradient_for(call)
    nothing_dropped = [grad.clone() for grad in Backward(call, 1e-6, form)(grad_out)]
    leaves = [t.detach().double().requires_grad_() for t in (call.query, call.key, call.value)]
    wanted = torch.autograd.grad(attention_float64(Call(*leaves)), leaves, grad_out.double())
    for got, right in zip(nothing_dropped, wanted, strict=True):
        assert (got.double() - right).norm() < 0.01 * right.norm()
    assert not any(grad.any() for grad in Backward(call, 1.0, form)(grad_out))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_and_values_gradients_repeat_bit_by_bit_under_load(form, head_dim, is_causal):
    call = simple_call(4, 16, 1000, 1333, head_dim, is_causal=is_causal)
    grad_out = gradient_for(call)
    backward = Backward(call, 0.1, form)
    other = torch.randn(4096, 4096, device="cuda", dtype=BFLOAT)
    stream = torch.cuda.Stream()
    first = [grad.clone() for grad in backward(grad_out)]
    torch.cuda.synchronize()
    for turn in range(30):
        if turn % 3 == 0:
            with torch.cuda.stream(stream):
                other @ other
        found = backward(grad_out)
        assert torch.equal(found[1], first[1]) and torch.equal(found[2], first[2]), turn
        assert (found[0].float() - first[0].float()).norm() < 0.01 * first[0].float().norm()
    torch.cuda.synchronize()
