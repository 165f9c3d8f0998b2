"""Measure ways to run the Hopper decoding kernel on this GPU, for ``kernels/cuda/decode_tiles.py``: how many blocks in
a cluster, and which calls gain by it.

    python -m benchmarks.tune_cuda_decode --out benchmarks/results/tune_cuda_decode.json [--only D128] [--budget 40]

As in tune_decode, every call is a CUDA graph over more keys and values than the L2 cache holds, replayed in turn with
the others, with Triton's kernel and with PyTorch's default. "*": what the rules choose, which is always among them.
Variants are compiled in parallel first. `active`: how many such clusters the GPU runs at a time.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import math
import time
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import cases, contenders, decode, tuning
from benchmarks.harness import significant
from benchmarks.tune_decode import Recorded, sets_of
from torch_flashbackend import driver, selection
from torch_flashbackend.kernels.cuda import decode_tiles
from torch_flashbackend.kernels.cuda.decode import Chosen, DecodePlan, DecodeSpecialisation, specialise

LARGEST_CALL = 5 * 2**30
TOLERANCE = 2e-2


def chosen_cases(only: str) -> list[cases.Case]:
    """Those that decide, the most wanted first."""
    wanted = [  # batch, key heads, queries, keys, head_dim
        (1, 8, 1, 8192, 128), (1, 8, 1, 1024, 128), (1, 8, 1, 131072, 128), (8, 8, 1, 8192, 128), (8, 8, 1, 1024, 128),
        (64, 8, 1, 1024, 64), (1, 8, 1, 131072, 64), (1, 8, 1, 8192, 64), (1, 32, 1, 1024, 128), (1, 32, 1, 8192, 128),
        (64, 8, 1, 1024, 128), (1, 8, 4, 8192, 128), (1, 8, 8, 8192, 128), (1, 8, 1, 8192, 256), (1, 1, 1, 8192, 128),
        (1, 8, 1, 32768, 128), (8, 32, 1, 8192, 128), (1, 1, 1, 131072, 128), (64, 8, 1, 1024, 256),
        (8, 8, 1, 131072, 128), (8, 8, 1, 8192, 64), (1, 8, 1, 1024, 64), (1, 8, 1, 1024, 256), (8, 8, 8, 8192, 128),
        (64, 8, 8, 1024, 128), (8, 1, 1, 8192, 128), (64, 32, 1, 1024, 128), (1, 8, 1, 131072, 256),
        (8, 32, 1, 4159, 128), (64, 8, 1, 8192, 128), (4, 32, 1, 8192, 128), (3, 8, 1, 8192, 128), (5, 8, 1, 8192, 128),
        (3, 8, 1, 1024, 128), (5, 8, 1, 1024, 128), (9, 32, 1, 4096, 128), (8, 8, 1, 8192, 256), (64, 8, 1, 8192, 64),
        (8, 32, 1, 8192, 64), (2, 8, 1, 8192, 128), (1, 4, 1, 8192, 128), (1, 4, 1, 1024, 128), (4, 8, 1, 32768, 128),
    ]  # fmt: skip
    masked = [  # batch, key heads, keys, head_dim, mask
        (1, 8, 8192, 128, "static_cache"), (1, 32, 4159, 128, "full_cache"), (8, 32, 4159, 128, "full_cache"),
        (1, 8, 4159, 128, "full_cache"), (8, 8, 4159, 128, "full_cache"), (2, 8, 4159, 128, "full_cache"),
        (4, 8, 4159, 128, "full_cache"), (4, 32, 4159, 128, "full_cache"), (8, 8, 8192, 128, "static_cache"),
        (64, 8, 8192, 128, "static_cache"), (1, 8, 1055, 128, "full_cache"), (8, 8, 1055, 128, "full_cache"),
        (64, 8, 1055, 128, "full_cache"), (1, 8, 4159, 64, "full_cache"), (1, 32, 4159, 64, "full_cache"),
        (8, 32, 4159, 64, "full_cache"), (1, 8, 4159, 256, "full_cache"), (1, 1, 4159, 128, "full_cache"),
        (8, 1, 4159, 128, "full_cache"), (8, 8, 8192, 128, "padding"), (1, 4, 4159, 128, "full_cache"),
        (1, 4, 1055, 128, "full_cache"), (1, 1, 1055, 128, "full_cache"), (3, 8, 4159, 128, "full_cache"),
        (3, 8, 1055, 128, "full_cache"), (5, 8, 4159, 128, "full_cache"), (5, 8, 1055, 128, "full_cache"),
        (3, 4, 4159, 128, "full_cache"), (8, 8, 32767, 128, "full_cache"), (1, 32, 32767, 128, "full_cache"),
        (1, 8, 32767, 128, "full_cache"), (8, 32, 16383, 128, "full_cache"), (64, 8, 1055, 256, "full_cache"),
        (8, 8, 4159, 256, "full_cache"), (1, 32, 4159, 256, "full_cache"), (64, 8, 1055, 64, "full_cache"),
        (8, 8, 4159, 64, "full_cache"), (64, 8, 4159, 128, "full_cache"), (9, 32, 4159, 128, "full_cache"),
    ]  # fmt: skip
    found = [
        cases.Case("decode", batch, 32, queries, keys, head_dim, kv_heads=kv_heads, mask=mask, training=False)
        for batch, kv_heads, queries, keys, head_dim, mask in [(*case, None) for case in wanted]
        + [(*case[:2], 1, *case[2:]) for case in masked]
    ]
    return [case for case in found if case.bytes <= LARGEST_CALL and any(t in case.label for t in only.split(","))]


def rule(case: cases.Case) -> Chosen:
    """What the rules choose."""
    rows, units = case.heads // case.kv_heads * case.seqlen_q, case.batch * case.kv_heads
    return specialise(
        case.head_dim, case.head_dim, torch.bfloat16, units=units, rows=rows, seqlen_k=case.seqlen_k,
        is_masked=case.mask is not None,
    )  # fmt: skip


def variants_of(case: cases.Case) -> list[Chosen]:
    """The rules' choice and all other numbers of splits."""
    chosen = rule(case)
    key_tiles = -(-case.seqlen_k // chosen.specialisation.tile.block_n)
    return [chosen._replace(splits=splits) for splits in decode_tiles.SPLITS if splits <= key_tiles]


def name_of(variant: Chosen) -> str:
    """Short: 64 keys by 4 warps, 3 + 3 stages, 2 blocks a multiprocessor; clusters of 8."""
    tile = variant.specialisation.tile
    return f"{tile.row_tiles}m {tile.block_n}x{tile.key_warps} s{tile.k_stages} b{tile.blocks} C{variant.splits}"


def compiled(spec: DecodeSpecialisation) -> str | None:
    """What is wrong with a specialisation, if anything."""
    try:
        if spec.shared_bytes > decode_tiles.SHARED_MEMORY:
            return f"{spec.shared_bytes} bytes of shared memory"
        log = spec.compile().log
    except Exception as error:
        return str(error)[:200]
    spilled = [line for line in log.splitlines() if "bytes spill" in line and " 0 bytes spill stores" not in line]
    return spilled[0] if spilled else None


def measure(case: cases.Case, variants: list[Chosen], buffer: torch.Tensor, rounds: int) -> dict[str, Any]:
    """A row of JSON."""
    sets = sets_of(case, buffer)
    grouped = case.kv_heads != case.heads
    mask = cases.make_mask(case, buffer.device, torch.Generator(buffer.device).manual_seed(0))
    out = torch.empty_like(sets[0][0])
    pool = torch.cuda.graph_pool_handle()
    sdpa = [lambda s=s: F.scaled_dot_product_attention(*s, mask, enable_gqa=grouped) for s in sets]
    with contenders.stock(None)():
        expected = F.scaled_dot_product_attention(*sets[-1], mask, enable_gqa=grouped).float()  # what a replay leaves
    recorded = {"default": Recorded(sdpa, pool, contenders.stock(None))}
    recorded["triton"] = Recorded(sdpa, pool, lambda: selection.sdpa_backend("triton"))
    failed, facts = {}, {}
    for variant in variants:
        name = name_of(variant)
        try:
            plan = DecodePlan(*sets[0], out, case.head_dim**-0.5, mask, variant)
            if plan.chosen != variant:
                failed[name] = "no room for such a cluster"
                continue
            out.fill_(math.nan)
            item = Recorded([lambda s=s, plan=plan: plan(*s, out, None, mask) for s in sets], pool)
            item.run()
            if not torch.allclose(out.float(), expected, atol=TOLERANCE, rtol=TOLERANCE):
                failed[name] = f"differs by {(out.float() - expected).abs().max().item()}"
                continue
        except Exception as error:
            if "CUDA error" in str(error):
                raise
            failed[name] = f"{type(error).__name__} {str(error)[:160]}"
            continue
        recorded[name] = item
        facts[name] = dataclasses.asdict(variant.specialisation.tile) | {
            "splits": variant.splits,
            "active": driver.max_active_clusters(plan._function, plan._config, variant.splits),
        }  # fmt: skip
    times = decode.replay_times(recorded, buffer.device, rounds)
    stock, triton = times.pop("default"), times.pop("triton")
    return {
        "label": case.label, "case": case.to_json(), "sets": len(sets), "bytes": case.bytes,
        "rule": name_of(rule(case)), "default_us": significant(stock, 4), "triton_us": significant(triton, 4),
        "variants": [{"name": name, **facts[name], "us": significant(us, 4)} for name, us in
                     sorted(times.items(), key=lambda item: item[1])],
        "failed": failed,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    only = "cases whose label has one of these texts, separated by commas"
    parser = tuning.parser(__doc__, rounds=9, budget_s=40.0, only=only)
    options = parser.parse_args(argv)
    work = chosen_cases(options.only)
    specs = list(dict.fromkeys(variant.specialisation for case in work for variant in variants_of(case)))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        wrong = {spec: what for spec, what in zip(specs, pool.map(compiled, specs)) if what}
    for spec, what in wrong.items():
        print(f"left out: {spec}: {what}", flush=True)
    began = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    largest = max(max(2, math.ceil(decode.KEPT_BYTES / case.bytes)) * case.bytes for case in work)
    buffer = torch.empty(int(largest) // 2, dtype=torch.bfloat16, device=device).normal_()

    def row_of(case: cases.Case) -> tuple[dict[str, Any], str]:
        variants = [variant for variant in variants_of(case) if variant.specialisation not in wrong]
        row = measure(case, variants, buffer, options.rounds)
        best = row["variants"][:6]
        shown = "  ".join(f"{'*' if v['name'] == row['rule'] else ''}{v['name']} {v['us']}" for v in best)
        of_rule = next((v["us"] for v in row["variants"] if v["name"] == row["rule"]), None)
        return row, (f"default {row['default_us']} triton {row['triton_us']} rule {of_rule} | {shown}"
                     + (f"  failed: {row['failed']}" if row["failed"] else ""))  # fmt: skip

    gc.disable()
    tuning.measure_rows("tune_cuda_decode", options, began, work, lambda case: case.label, row_of)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
