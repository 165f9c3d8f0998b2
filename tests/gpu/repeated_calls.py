"""Calls that are repeated on one backend: each must read and fill its own tensors, whatever was kept of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_flashbackend import ops, reference

from common import Call, check, expect, gradient_for, in_threads, results_of

TURNS = 4
# Of queries and of keys.
LENGTHS = 150, 170


def check_repeats(backend: str, make_mask: Callable[[], Tensor] | None = None, is_causal: bool = False) -> None:
    """TURNS calls with tensors at other addresses each time, against float64; launch counts are of these alone."""
    run, eps = ops.ReadyRun(backend, needs_grad=True), torch.finfo(torch.bfloat16).eps
    queries, keys = LENGTHS
    ops.reset_launch_counts()
    kept = []  # so that each turn has addresses of its own
    for turn in range(TURNS):
        torch.manual_seed(turn)
        rows_of = queries, keys, keys, queries
        tensors = [torch.randn(2, 3, rows, 64, device="cuda", dtype=torch.bfloat16) for rows in rows_of]
        inputs, grad_out = [tensor.requires_grad_() for tensor in tensors[:3]], tensors[3]
        mask = None if make_mask is None else make_mask()
        out = run(*inputs, mask, is_causal=is_causal)
        grads = torch.autograd.grad(out, inputs, grad_out)
        kept.append((inputs, mask, out, grads))
        twins = [tensor.detach().double().requires_grad_() for tensor in inputs]
        expected = reference.attention(*twins, mask, 0.0, is_causal, 0.125)
        wanted = torch.autograd.grad(expected, twins, grad_out.double())
        for name, got, want in zip(("out", "query", "key", "value"), (out, *grads), (expected, *wanted)):
            error = (got.double() - want).abs().max() / want.abs().max()
            assert error < 4 * eps, f"turn {turn}, {name}: {error:.2e} of the largest"


def check_threads(
    plugin, note, backend: str, calls: Sequence[Call], threads: int, on_one_stream: int, turns: int
) -> None:
    """Threads that run these calls in turn, forward and backward: so many on one stream, the others on their own."""
    gradients = [gradient_for(call) for call in calls]
    expected = [expect(call, grad_out) for call, grad_out in zip(calls, gradients)]
    shared, results = torch.cuda.Stream(), []
    torch.cuda.synchronize()

    def work(thread):
        stream = shared if thread < on_one_stream else torch.cuda.Stream()
        with plugin.sdpa_backend(backend), torch.cuda.stream(stream):
            for turn in range(turns):
                number = (thread + turn) % len(calls)
                results.append((number, results_of(calls[number], gradients[number])))
            torch.cuda.current_stream().synchronize()

    in_threads(work, threads)
    assert len(results) == threads * turns
    for number, found in results:
        note(check(found, expected[number], None, "training"))
