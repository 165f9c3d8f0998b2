"""Measure candidate tiles of the Hopper backward with masks or dropout on this GPU, for ``kernels/cuda/tiles.py``.

    python -m benchmarks.tune_cuda_masked_backward --out FILE.json [--floats] [--only causal] [--budget 60]

One row for each case: milliseconds of every candidate's kernels with the lists and bits that they need, of the Triton
kernels with their lists and of PyTorch's own choice, timed in turns, medians, random data; and of each of the kernels
of the table's tile apart. "call" is what the cuda backend runs, in as many parts as memory asks for; where the mask's
gradient is wanted, it, Triton and PyTorch compute that too. A candidate whose gradients are not Triton's within
rounding, or which does not compile, is named in `failed` instead. --floats: float masks instead of bool ones.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import cases, tuning
from benchmarks.harness import Meter, Run
from benchmarks.tune_cuda import kernel_times
from benchmarks.tune_cuda_masks import LARGEST_DIFFERENCE
from torch_flashbackend import ops, reference
from torch_flashbackend.kernels.cuda import backward, forward
from torch_flashbackend.kernels.cuda.tiles import BackwardTile

PER_KEY = "key_bias", "lowest_padding"  # float masks with one row for all queries


def has_float_mask(case: cases.Case) -> bool:
    return case.mask is not None and cases.MASKS[case.mask] != "bool_mask"


def specialisation(case: cases.Case) -> backward.Specialisation:
    """The table's for a long call."""
    return backward.specialise(
        case.head_dim, case.head_dim, torch.bfloat16, case.causal, False, 1 << 20, case.mask is not None,
        case.dropout > 0.0, is_float_mask=has_float_mask(case), mask_per_key=case.mask in PER_KEY,
    )  # fmt: skip


def candidates(case: cases.Case) -> dict[str, BackwardTile]:
    """What is tried, by name; the table's for a long call first."""
    size, has_dropout = case.head_dim, case.dropout > 0.0
    chosen = specialisation(case).tile
    found = {"table": chosen}
    if has_float_mask(case):
        return found  # all others lost; what they took is in kernels/cuda/NOTES.md
    if not has_dropout:
        found["persistent"] = dataclasses.replace(chosen, persistent=True)
    if size > 64:
        found["no turns"] = dataclasses.replace(chosen, turns=False, delta_first=False)
    if chosen.delta_first:
        found["no delta first"] = dataclasses.replace(chosen, delta_first=False)
    return found


def float_work() -> list[cases.Case]:
    """Float masks of every kind, most important first."""
    names = "lowest_causal", "bias", "bias_grad", "batch_bias", "key_bias", "lowest_padding"
    return [
        cases.Case("mask", 32768 // (length * size // 64), 16, length, length, size, mask=name)
        for length in (4096, 1024)
        for size in (128, 64)
        for name in names
    ]


def work() -> list[cases.Case]:
    """Bool masks of every kind and dropout, most important first."""
    special = [case for case in cases.special() if case.training]
    listed = [case for case in special if case.mask and cases.MASKS[case.mask] == "bool_mask"]
    dropped = [case for case in special if case.dropout and case.seqlen_q >= 512]
    dropped.sort(key=lambda case: -case.seqlen_q)
    large = [case for case in listed if case.group in ("mask", "gqa") and case.head_dim == 128]
    first = sorted(large, key=lambda case: case.mask != "causal_mask")
    small = [dataclasses.replace(case, head_dim=64, head_dim_v=64) for case in first]
    sizes = [case for case in listed if case.group == "mask_sizes" and case.seqlen_q >= 256]
    return first[:2] + dropped[:2] + first[2:] + small + dropped[2:] + sizes


def measure(case: cases.Case, meter: Meter) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:
    """(milliseconds by name, those of the table's kernels, what failed by name)."""
    inputs = cases.make_inputs(case, "cuda", training=True)
    query, key, value, mask = inputs.query, inputs.key, inputs.value, inputs.attn_mask
    grad_out, scale, grouped = inputs.grad_out, case.head_dim**-0.5, case.kv_heads != case.heads
    p, causal = case.dropout, case.causal
    stock = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=p, is_causal=causal, enable_gqa=grouped
    )
    needs_mask = mask is not None and mask.requires_grad
    leaves = (query, key, value, mask) if needs_mask else (query, key, value)
    runs = {"stock": Run(functools.partial(torch.autograd.grad, stock, leaves, grad_out, retain_graph=True))}
    query, key, value = (t.detach() for t in (query, key, value))
    mask = mask if mask is None else mask.detach()
    seed = reference.draw_dropout_seed(query, p)
    has_floats = has_float_mask(case)
    out, logsumexp = ops._attention_forward_cuda(
        query, key, value, mask, seed, p, causal, scale, "query", "cuda" if has_floats else "triton"
    )
    arguments = grad_out, query, key, value, mask, out, logsumexp, seed, p, causal, scale
    triton = functools.partial(ops._gradients_cuda, *arguments, (True, True, True, needs_mask), "triton")
    runs["triton"] = Run(triton)
    if has_floats:
        runs["call"] = Run(functools.partial(ops._gradients_cuda, *arguments, (True, True, True, needs_mask), "cuda"))
    right = [grad.float() for grad in triton()[:3]]
    grads = [torch.empty_like(t) for t in (query, key, value)]
    failed, parts = {}, {}
    for name, tile in ({} if needs_mask else candidates(case)).items():
        try:
            plan = backward.Plan(
                query, key, value, out, logsumexp, grad_out, *grads, causal, scale, False, tile, mask, p
            )
        except Exception as error:
            failed[name] = f"{type(error).__name__} {str(error)[:200]}"
            continue
        run = functools.partial(plan, query, key, value, out, logsumexp, grad_out, *grads, mask, seed)
        for grad in grads:
            grad.fill_(torch.nan)
        run()
        distance = max(
            (torch.linalg.vector_norm(grad.float() - wanted) / torch.linalg.vector_norm(wanted)).item()
            for grad, wanted in zip(grads, right, strict=True)
        )
        if not distance < LARGEST_DIFFERENCE:
            failed[name] = f"differs from Triton's result by {distance:.3g} of its norm"
            continue
        runs[name] = Run(run)
        parts = parts or kernel_times(run, plan.specialisation.entries, rounds=5)
    return meter.gpu_times(runs), parts, failed


def compile_candidates(chosen: list[cases.Case]) -> None:
    """Fills the cache of binaries, several at a time; what does not compile shows later."""
    specs = [specialisation(case)._replace(tile=tile) for case in chosen for tile in candidates(case).values()]
    forwards = [
        forward.specialise_masked(
            case.head_dim, case.head_dim, torch.bfloat16, case.mask in PER_KEY, True, torch.bfloat16
        )
        for case in chosen
        if has_float_mask(case)
    ]
    tuning.compile_in_threads([*specs, *forwards], lambda spec: f"{spec.head_dim} {spec.tile}")


def main(argv: list[str] | None = None) -> int:
    parser = tuning.parser(__doc__, rounds=5, budget_s=60.0, only="cases that have this in their label")
    parser.add_argument("--floats", action="store_true", help="float masks instead of bool masks and dropout")
    options = parser.parse_args(argv)
    began = time.monotonic()
    chosen = [case for case in (float_work() if options.floats else work()) if options.only in case.label]
    compile_candidates(chosen)
    meter = Meter("cuda", options.rounds, round_ms=4.0)

    def row_of(case: cases.Case) -> tuple[dict[str, Any], str]:
        times, parts, failed = measure(case, meter)
        kernels = ", ".join(f"{name.removeprefix('flash_')} {ms:.3f}" for name, ms in parts.items())
        row = {"case": case.to_json(), "label": case.label, "ms": times, "parts": parts, "failed": failed}
        return row, f"({kernels})  {tuning.fastest_first(times, failed)}"

    tuning.measure_rows("tune_cuda_masked_backward", options, began, chosen, lambda case: case.label, row_of)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
