"""The Hopper backward of head_dim 192 with values of 128 and of equal ones of 136 to 160: query tiles arrive in halves.

Gradients are judged against float64.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os

import pytest
import torch
from hopper_calls import DTYPES, HOPPER_ONLY, gradient_checker

from torch_flashbackend import ops
from torch_flashbackend.kernels import KernelUnavailable
from torch_flashbackend.kernels.cuda import backward, forward

from common import expect, gradient_for, results_of, simple_call, tensor_in_layout

pytestmark = HOPPER_ONLY
# Queries and keys around tiles of 128 and their halves, few and many tiles, keys that no query sees.
LENGTHS = [(1, 1), (63, 129), (64, 64), (65, 300), (128, 128), (129, 127), (200, 513), (333, 400), (641, 190)]


def compile_or_leave(specialisation):
    with contextlib.suppress(KernelUnavailable):
        specialisation.compile()


@pytest.fixture(scope="module", autouse=True)
def compiled_side_by_side():
    """What most tests launch, compiled several at a time."""
    jobs = []
    for dtype in DTYPES:
        for is_causal in (False, True):
            for sizes in ((192, 128), (160, 160)):
                jobs.append(
                    forward.specialise(
                        *sizes, dtype, is_causal, True, seqlen_q=333, seqlen_k=400, batch_heads=8, num_sms=132
                    )
                )
                jobs.append(backward.specialise(*sizes, dtype, is_causal, False, 1))
                assert jobs[-1].in_halves
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(compile_or_leave, jobs))


@pytest.fixture
def hopper(plugin):
    """A context manager: the block runs on the forced backend, whose own backward must run."""

    @contextlib.contextmanager
    def forced():
        ops.reset_launch_counts()
        with plugin.sdpa_backend("cuda"):
            yield
        assert ops.launch_counts().get("flash_backward"), ops.launch_counts()

    return forced


@pytest.fixture
def check_gradients(plugin, hopper, note):
    return gradient_checker(plugin, hopper, note, ("flash", "math"))


@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_around_tiles(check_gradients, is_causal):
    for number, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        group, layout = (1, 2, 4)[number % 3], ("bhsd", "bshd")[number % 2]
        call = simple_call(
            2, 4, seqlen_q, seqlen_k, 192, head_dim_v=128, kv_heads=4 // group, dtype=DTYPES[number % 2], layout=layout,
            is_causal=is_causal, seed=number,
        )  # fmt: skip
        check_gradients(call)


def test_many_blocks(check_gradients):
    """More tiles of keys than multiprocessors, and long sequences."""
    check_gradients(simple_call(5, 40, 700, 500, 192, head_dim_v=128, is_causal=True))
    check_gradients(simple_call(1, 2, 4096, 4096, 192, head_dim_v=128, is_causal=True))


@pytest.mark.parametrize("is_causal", [False, True])
def test_values_as_wide_as_keys(check_gradients, is_causal):
    for number, (seqlen_q, seqlen_k) in enumerate(LENGTHS[::2]):
        check_gradients(simple_call(2, 4, seqlen_q, seqlen_k, 160, is_causal=is_causal, seed=number))
    check_gradients(simple_call(5, 40, 700, 500, 160, is_causal=is_causal))


@pytest.mark.parametrize("head_dims", [(136, 136), (144, 144), (152, 152), (160, 160), (192, 128)], ids=str)
def test_head_dims(check_gradients, head_dims):
    """All that calls can have: the last box of columns is full, or not."""
    assert backward.specialise(*head_dims, torch.bfloat16, False, False, 1).in_halves
    for is_causal in (False, True):
        check_gradients(simple_call(2, 3, 333, 400, head_dims[0], head_dim_v=head_dims[1], is_causal=is_causal))


@pytest.mark.parametrize("head_dims", [(160, 160), (192, 128)], ids=str)
def test_probabilities_are_not_rounded_before_the_scores_gradients_are(plugin, hopper, head_dims):
    """In bfloat16: rounded twice, errors are 1.22 times those of the triton backend, which rounds once."""
    call = simple_call(2, 4, 1000, 1000, head_dims[0], head_dim_v=head_dims[1])
    grad_out = gradient_for(call)
    with hopper():
        ours = results_of(call, grad_out)
    with plugin.sdpa_backend("triton"):
        others = results_of(call, grad_out)
    exact = expect(call, grad_out).values
    for name in ("query", "key"):
        error, other = ((results[name].double() - exact[name]).square().mean().sqrt() for results in (ours, others))
        assert error < 1.1 * other, (name, float(error), float(other))


@pytest.mark.parametrize("head_dims", [(160, 160), (192, 128)], ids=str)
def test_nan_of_a_query_reaches_all_gradients_that_it_is_in(hopper, head_dims):
    call = simple_call(1, 2, 200, 300, head_dims[0], head_dim_v=head_dims[1])
    call.query[0, 0, 70, 3] = torch.nan
    with hopper():
        results = results_of(call, gradient_for(call))
    for name in ("key", "value"):
        assert results[name][0, 0].isnan().all() and results[name][0, 1].isfinite().all()
    rows = results["query"].isnan().all(-1)
    assert rows[0, 0, 70] and rows.sum() == 1 and results["query"].isfinite().all(-1).sum() == rows.numel() - 1


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_same_bits_each_time_under_load(hopper, is_causal):
    """Gradients of keys and values, which are added up in a fixed order, with all multiprocessors busy."""
    call = simple_call(2, 40, 1100, 1000, 192, head_dim_v=128, is_causal=is_causal)
    grad_out = gradient_for(call)
    with hopper():
        first = results_of(call, grad_out)
        for _ in range(10):
            again = results_of(call, grad_out)
            assert torch.equal(again["key"], first["key"]) and torch.equal(again["value"], first["value"])
            torch.testing.assert_close(again["query"], first["query"], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("is_causal", [False, True])
def test_neighbours_are_not_read(hopper, is_causal):
    """The tensors are windows of larger ones, full of NaN around them."""
    shapes = (192, 192, 128, 128)
    windows = []
    for seed, columns in enumerate(shapes):
        storage = torch.full((2, 4, 600, columns + 64), torch.nan, device="cuda", dtype=torch.bfloat16)
        window = storage[:, 1:3, 100:433, 32 : 32 + columns]
        window.copy_(tensor_in_layout((2, 2, 333, columns), "bhsd", torch.bfloat16, "cuda", seed))
        windows.append(window)
    query, key, value, grad_out = windows
    plain = [t.contiguous().requires_grad_() for t in windows[:3]]
    leaves = [t.detach().requires_grad_() for t in (query, key, value)]
    with hopper():
        for inputs, grad in ((plain, grad_out.contiguous()), (leaves, grad_out)):
            out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=is_causal)
            out.backward(grad)
    for one, other, exact in zip(plain, leaves, (False, True, True), strict=True):
        assert other.grad.isfinite().all()
        if exact:
            assert torch.equal(one.grad, other.grad)
        else:
            torch.testing.assert_close(one.grad, other.grad, rtol=0.02, atol=0.02)
