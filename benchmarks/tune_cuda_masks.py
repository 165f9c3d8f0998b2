"""Check and measure candidate tiles of the Hopper forward under bool masks on this GPU, for ``kernels/cuda/tiles.py``.

    python -m benchmarks.tune_cuda_masks --out benchmarks/results/tune_cuda_masks.json [--only causal] [--budget 100]

One row for each case: milliseconds of every candidate's kernel alone, of the lists alone (by the tile that they are
made for), of the Triton kernels with their lists and of PyTorch's own choice, timed in turns, medians, random data. A
candidate whose result is not Triton's within rounding, or which does not compile, is named in `failed` instead.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import cases
from benchmarks.harness import Meter, Results, Run, environment
from torch_flashbackend import driver, ops
from torch_flashbackend.kernels.cuda import forward, tiles
from torch_flashbackend.kernels.cuda.tiles import Tile

# Two bfloat16 results of the same numbers differ by this part of their norm at most.
LARGEST_DIFFERENCE = 0.01


def candidates(head_dim: int) -> list[Tile]:
    """What is tried: the table's tiles, then others."""
    found = [*tiles.masked_variants(head_dim, head_dim)]
    if head_dim <= 64:
        found += [Tile(128, 64, 8, 2), Tile(128, 128, 4, 2), Tile(128, 128, 4, 2, ping_pong=False)]
    elif head_dim <= 128:
        found += [Tile(128, 64, 5, 2), Tile(128, 128, 2, 2)]
    return list(dict.fromkeys(found))


def name_of(tile: Tile) -> str:
    """Short: 128x64 s5 q2 turns."""
    return f"{tile.block_m}x{tile.block_n} s{tile.stages} q{tile.q_stages}" + (" turns" if tile.ping_pong else "")


def work() -> list[cases.Case]:
    """Bool masks of every kind, most important first."""
    listed = [case for case in cases.special() if case.mask and cases.MASKS[case.mask] == "bool_mask"]
    large = [case for case in listed if case.group in ("mask", "gqa")]
    small = [dataclasses.replace(case, head_dim=64, head_dim_v=64) for case in large]
    sizes = [case for case in listed if case.group == "mask_sizes" and case.seqlen_q >= 1024]
    wide = [dataclasses.replace(case, head_dim=256, head_dim_v=256, heads=8, kv_heads=8) for case in large[:3]]
    return large + small + wide + sizes


def plans_of(case: cases.Case, inputs: cases.Inputs, out: torch.Tensor) -> tuple[dict[str, Any], dict[str, str]]:
    """(plan by candidate, why there is none by candidate)."""
    made, failed = {}, {}
    scale, before = case.head_dim**-0.5, tiles.choose_masked
    for tile in candidates(case.head_dim):
        tiles.choose_masked = lambda *_, tile=tile: tile
        try:
            made[name_of(tile)] = forward.Plan(
                inputs.query, inputs.key, inputs.value, out, False, False, scale, inputs.attn_mask
            )
        except Exception as error:
            failed[name_of(tile)] = f"{type(error).__name__} {str(error)[:200]}"
        finally:
            tiles.choose_masked = before
    return made, failed


class _Made:
    """Lists that are there already, in the place of what makes them."""

    def __init__(self, lists: torch.Tensor) -> None:
        self.lists = lists

    def make(self, *_: Any) -> torch.Tensor:
        return self.lists


def measure(case: cases.Case, meter: Meter) -> tuple[dict[str, float], dict[str, str]]:
    """(milliseconds by name, what failed by name)."""
    inputs = cases.make_inputs(case, "cuda", training=False)
    query, key, value, mask = inputs.query, inputs.key, inputs.value, inputs.attn_mask
    scale = case.head_dim**-0.5
    triton = functools.partial(
        ops._attention_cuda, query, key, value, mask, None, 0.0, False, scale, "query", "triton"
    )  # fmt: skip
    right = triton().float()
    runs = {"triton": Run(triton)}
    runs["stock"] = Run(lambda: scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=case.kv_heads != case.heads))  # fmt: skip
    out = torch.empty_like(query)
    plans, failed = plans_of(case, inputs, out)
    for name, plan in plans.items():
        out.fill_(torch.nan)
        plan(query, key, value, out, None, mask)
        distance = (torch.linalg.vector_norm(out.float() - right) / torch.linalg.vector_norm(right)).item()
        if not distance < LARGEST_DIFFERENCE:
            failed[name] = f"differs from Triton's result by {distance:.3g} of its norm"
            continue
        make = functools.partial(plan._lists.make, mask, 0, driver.current_stream(0))
        runs[f"lists {name.split()[0]}"] = Run(make)
        plan._lists = _Made(make())
        runs[name] = Run(functools.partial(plan, query, key, value, out, None, mask))
    return meter.gpu_times(runs), failed


def compile_candidates(chosen: list[cases.Case]) -> None:
    """Fills the cache of binaries, several at a time; what does not compile shows later."""
    head_dims = {case.head_dim for case in chosen}
    specs = [
        forward.Specialisation(size, size, False, True, False, tile, is_masked=True)
        for size in head_dims
        for tile in candidates(size)
    ]

    def compile_one(spec: forward.Specialisation) -> None:
        try:
            spec.compile()
        except Exception as error:
            print(f"{name_of(spec.tile)}: {str(error)[:200]}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(compile_one, specs))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="cases that have this in their label")
    parser.add_argument("--budget", type=float, default=100.0, help="seconds after which no further row is begun")
    options = parser.parse_args(argv)
    began = time.monotonic()
    chosen = [case for case in work() if options.only in case.label]
    compile_candidates(chosen)
    meter = Meter("cuda", options.rounds, round_ms=4.0)
    results = Results(Path(options.out), "tune_cuda_masks", environment("cuda"), vars(options))
    left = []
    for case in chosen:
        if time.monotonic() - began > options.budget:
            left.append(case.label)
            continue
        times, failed = measure(case, meter)
        results.add({"case": case.to_json(), "label": case.label, "ms": times, "failed": failed})
        shown = "  ".join(f"{name} {ms:.3f}" for name, ms in sorted(times.items(), key=lambda item: item[1]))
        print(f"{case.label}: {shown}" + (f"  failed: {failed}" if failed else ""), flush=True)
        torch.cuda.empty_cache()
    results.finish(left)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
