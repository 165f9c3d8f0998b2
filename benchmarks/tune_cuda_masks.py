"""Check and measure candidate tiles of the Hopper forward under masks and dropout on this GPU, for ``tiles.py``.

    python -m benchmarks.tune_cuda_masks --out benchmarks/results/tune_cuda_masks.json [--kinds bool float dropout]
        [--only causal] [--budget 100]

One row for each case: milliseconds of every candidate's kernel alone, of the lists or of dropout's table alone (by the
tile that they are made for), of the Triton kernels with theirs and of PyTorch's own choice, timed in turns, medians,
random data. A candidate whose result is not Triton's within rounding, or which does not compile, is named in `failed`
instead.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import cases, tuning
from benchmarks.harness import Meter, Run
from torch_flashbackend import driver, ops, reference
from torch_flashbackend.kernels.cuda import forward, tiles
from torch_flashbackend.kernels.cuda.tiles import Tile

# Two bfloat16 results of the same numbers differ by this part of their norm at most.
LARGEST_DIFFERENCE = 0.01


KINDS = ("bool", "float", "dropout")


def kind_of(case: cases.Case) -> str:
    """Which of the kernels a case is for."""
    if case.mask is None:
        return "dropout"
    return "bool" if cases.MASKS[case.mask] == "bool_mask" else "float"


def candidates(case: cases.Case) -> list[Tile]:
    """What is tried: the table's tiles, then others."""
    head_dim, kind = case.head_dim, kind_of(case)
    if kind == "bool":
        found = [*tiles.masked_variants(head_dim, head_dim)]
        if head_dim <= 64:
            found += [Tile(128, 64, 8, 2), Tile(128, 128, 4, 2), Tile(128, 128, 4, 2, ping_pong=False)]
        elif head_dim <= 128:
            found += [Tile(128, 64, 5, 2), Tile(128, 128, 2, 2)]
    elif kind == "float":
        found = [tiles.choose_biased(head_dim, head_dim, 2, is_per_key(case))]
        found += [dataclasses.replace(found[0], ping_pong=not found[0].ping_pong)]
        if head_dim <= 64:
            found += [Tile(128, 128, 3, 2, mask_stages=2), Tile(128, 128, 3, 2, ping_pong=False, mask_stages=2)]
        elif head_dim <= 128:
            found += [Tile(128, 64, 3, 2, ping_pong=False, mask_stages=4)]
            found += [Tile(128, 128, 2, 2, ping_pong=turns, mask_stages=1) for turns in (False, True)]
    else:
        found = [tiles.choose_dropout(head_dim, head_dim)]
        found += [dataclasses.replace(tile, ping_pong=not tile.ping_pong) for tile in found]
        if head_dim <= 64:
            found += [Tile(128, 64, 6, 2)]
    return list(dict.fromkeys(found))


def is_per_key(case: cases.Case) -> bool:
    return case.mask in ("key_bias", "lowest_padding")


def name_of(tile: Tile) -> str:
    """Short: 128x64 s5 q2 turns."""
    name = f"{tile.block_m}x{tile.block_n} s{tile.stages} q{tile.q_stages}" + (" turns" if tile.ping_pong else "")
    return name + (f" m{tile.mask_stages}" if tile.mask_stages > 1 else "")


def work(kinds: Sequence[str]) -> list[cases.Case]:
    """Cases of these kinds, most important first."""
    found = []
    if "float" in kinds:
        found += [cases.Case("mask", 4, 16, 4096, 4096, 128, mask=mask) for mask in
                  ("lowest_causal", "bias", "batch_bias", "key_bias", "lowest_padding")]  # fmt: skip
        found += [cases.Case("mask", 4, 16, 4096, 4096, 64, mask=mask) for mask in ("lowest_causal", "bias")]
    if "dropout" in kinds:
        found += [cases.Case("dropout", 4, 16, 4096, 4096, head_dim, causal=causal, dropout=0.1)
                  for head_dim in (128, 64) for causal in (True, False)]  # fmt: skip
    if "bool" in kinds:
        listed = [case for case in cases.special() if case.mask and kind_of(case) == "bool"]
        large = [case for case in listed if case.group in ("mask", "gqa")]
        small = [dataclasses.replace(case, head_dim=64, head_dim_v=64) for case in large]
        sizes = [case for case in listed if case.group == "mask_sizes" and case.seqlen_q >= 1024]
        wide = [dataclasses.replace(case, head_dim=256, head_dim_v=256, heads=8, kv_heads=8) for case in large[:3]]
        found += large + small + wide + sizes
    return found


def plans_of(case: cases.Case, inputs: cases.Inputs, out: torch.Tensor) -> tuple[dict[str, Any], dict[str, str]]:
    """(plan by candidate, why there is none by candidate)."""
    made, failed = {}, {}
    chooser = {"bool": "choose_masked", "float": "choose_biased", "dropout": "choose_dropout"}[kind_of(case)]
    scale, before = case.head_dim**-0.5, getattr(tiles, chooser)
    for tile in candidates(case):
        setattr(tiles, chooser, lambda *_, tile=tile: tile)
        try:
            made[name_of(tile)] = forward.Plan(
                inputs.query, inputs.key, inputs.value, out, False, case.causal, scale, inputs.attn_mask, case.dropout
            )
        except Exception as error:
            failed[name_of(tile)] = f"{type(error).__name__} {str(error)[:200]}"
        finally:
            setattr(tiles, chooser, before)
    return made, failed


class _Made:
    """Lists or a table that are there already, in the place of what makes them."""

    def __init__(self, made: torch.Tensor) -> None:
        self.made = made

    def make(self, *_: Any) -> torch.Tensor:
        return self.made


def measure(case: cases.Case, meter: Meter) -> tuple[dict[str, float], dict[str, str]]:
    """(milliseconds by name, what failed by name)."""
    inputs = cases.make_inputs(case, "cuda", training=False)
    query, key, value, mask = inputs.query, inputs.key, inputs.value, inputs.attn_mask
    scale, p = case.head_dim**-0.5, case.dropout
    seed = reference.draw_dropout_seed(query, p)
    triton = functools.partial(
        ops._attention_cuda, query, key, value, mask, seed, p, case.causal, scale, "query", "triton"
    )  # fmt: skip
    right = triton().float()
    runs = {"triton": Run(triton)}
    runs["stock"] = Run(lambda: scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=p, is_causal=case.causal,
        enable_gqa=case.kv_heads != case.heads))  # fmt: skip
    out = torch.empty_like(query)
    plans, failed = plans_of(case, inputs, out)
    stream = driver.current_stream(0)
    for name, plan in plans.items():
        out.fill_(torch.nan)
        plan(query, key, value, out, None, mask, seed)
        distance = (torch.linalg.vector_norm(out.float() - right) / torch.linalg.vector_norm(right)).item()
        if not distance < LARGEST_DIFFERENCE:
            failed[name] = f"differs from Triton's result by {distance:.3g} of its norm"
            continue
        if mask is None:
            make = functools.partial(plan._dropout_keys.make, seed, 0, stream)
            runs["keys"] = Run(make)
            plan._dropout_keys = _Made(make())
        else:
            make = functools.partial(plan._lists.make, mask, 0, stream)
            runs[f"lists {name.split()[0]}"] = Run(make)
            plan._lists = _Made(make())
        runs[name] = Run(functools.partial(plan, query, key, value, out, None, mask, seed))
    return meter.gpu_times(runs), failed


def compile_candidates(chosen: list[cases.Case]) -> None:
    """Fills the cache of binaries, several at a time; what does not compile shows later."""
    specs = []
    for case in chosen:
        kind, size = kind_of(case), case.head_dim
        for tile in candidates(case):
            bias = (2, is_per_key(case)) if kind == "float" else (0, False)
            specs.append(forward.Specialisation(
                size, size, case.causal, True, False, tile, kind != "dropout", *bias, kind == "dropout"))  # fmt: skip

    tuning.compile_in_threads(specs, lambda spec: name_of(spec.tile))


def main(argv: list[str] | None = None) -> int:
    parser = tuning.parser(__doc__, rounds=7, budget_s=100.0, only="cases that have this in their label")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args(argv)
    began = time.monotonic()
    chosen = [case for case in work(options.kinds) if options.only in case.label]
    compile_candidates(chosen)
    meter = Meter("cuda", options.rounds, round_ms=4.0)

    def row_of(case: cases.Case) -> tuple[dict[str, Any], str]:
        times, failed = measure(case, meter)
        row = {"case": case.to_json(), "label": case.label, "ms": times, "failed": failed}
        return row, tuning.fastest_first(times, failed)

    tuning.measure_rows("tune_cuda_masks", options, began, chosen, lambda case: case.label, row_of)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
