"""Measure candidate tiles of the Hopper backward with bool masks or dropout on this GPU, for ``kernels/cuda/tiles.py``.

    python -m benchmarks.tune_cuda_masked_backward --out FILE.json [--only causal] [--budget 60]

One row for each case: milliseconds of every candidate's kernels with the lists and bits that they need, of the Triton
kernels with their lists and of PyTorch's own choice, timed in turns, medians, random data; and of each of the kernels
of the table's tile apart. A candidate whose gradients are not Triton's within rounding, or which does not compile, is
named in `failed` instead.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import time
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import cases
from benchmarks.harness import Meter, Results, Run, environment
from benchmarks.tune_cuda import kernel_times
from benchmarks.tune_cuda_masks import LARGEST_DIFFERENCE
from torch_flashbackend import ops, reference
from torch_flashbackend.kernels.cuda import backward
from torch_flashbackend.kernels.cuda.tiles import BackwardTile


def candidates(case: cases.Case) -> dict[str, BackwardTile]:
    """What is tried, by name; the table's for a long call first."""
    size, has_dropout = case.head_dim, case.dropout > 0.0
    chosen = backward.specialise(
        size, size, torch.bfloat16, case.causal, False, 1 << 20, case.mask is not None, has_dropout
    ).tile
    found = {"table": chosen}
    if not has_dropout:
        found["persistent"] = dataclasses.replace(chosen, persistent=True)
    if size > 64:
        found["no turns"] = dataclasses.replace(chosen, turns=False, delta_first=False)
    if has_dropout and case.mask is None:
        unstaged = dataclasses.replace(chosen, unstaged=True)
        apart = dataclasses.replace(unstaged, hashed_apart=True)
        found |= {"unstaged": unstaged, "apart": apart}
        for name in ("table", "apart"):
            found[f"{name}, issued whole"] = dataclasses.replace(found[name], issued_whole=True)
        if size > 64:
            found["apart, no turns"] = dataclasses.replace(apart, turns=False)
            found["apart, 4 stages"] = dataclasses.replace(apart, q_stages=4)
    if chosen.delta_first:
        found["no delta first"] = dataclasses.replace(chosen, delta_first=False)
    return found


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
    runs = {"stock": Run(functools.partial(
        torch.autograd.grad, stock, (query, key, value), grad_out, retain_graph=True))}  # fmt: skip
    query, key, value = (t.detach() for t in (query, key, value))
    seed = reference.draw_dropout_seed(query, p)
    out, logsumexp = ops._attention_forward_cuda(query, key, value, mask, seed, p, causal, scale, "query", "triton")
    triton = functools.partial(
        ops._gradients_cuda, grad_out, query, key, value, mask, out, logsumexp, seed, p, causal, scale,
        (True, True, True, False), "triton",
    )  # fmt: skip
    runs["triton"] = Run(triton)
    right = [grad.float() for grad in triton()[:3]]
    grads = [torch.empty_like(t) for t in (query, key, value)]
    failed, parts = {}, {}
    for name, tile in candidates(case).items():
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
    specs = {
        backward.specialise(
            case.head_dim, case.head_dim, torch.bfloat16, case.causal, False, 1 << 20, case.mask is not None,
            case.dropout > 0.0,
        )._replace(tile=tile)
        for case in chosen
        for tile in candidates(case).values()
    }  # fmt: skip

    def compile_one(spec: backward.Specialisation) -> None:
        try:
            spec.compile()
        except Exception as error:
            print(f"{spec.head_dim} {spec.tile}: {str(error)[:200]}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(compile_one, specs))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="cases that have this in their label")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds after which no further row is begun")
    options = parser.parse_args(argv)
    began = time.monotonic()
    chosen = [case for case in work() if options.only in case.label]
    compile_candidates(chosen)
    meter = Meter("cuda", options.rounds, round_ms=4.0)
    results = Results(Path(options.out), "tune_cuda_masked_backward", environment("cuda"), vars(options))
    left = []
    for case in chosen:
        if time.monotonic() - began > options.budget:
            left.append(case.label)
            continue
        times, parts, failed = measure(case, meter)
        results.add({"case": case.to_json(), "label": case.label, "ms": times, "parts": parts, "failed": failed})
        shown = "  ".join(f"{name} {ms:.3f}" for name, ms in sorted(times.items(), key=lambda item: item[1]))
        kernels = ", ".join(f"{name.removeprefix('flash_')} {ms:.3f}" for name, ms in parts.items())
        print(f"{case.label}: {shown} ({kernels})" + (f"  failed: {failed}" if failed else ""), flush=True)
        torch.cuda.empty_cache()
    results.finish(left)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
