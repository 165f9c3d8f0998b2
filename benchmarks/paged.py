"""Decoding from a paged cache, one query for each sequence, beside a contiguous cache of the same lengths.

    python -m benchmarks.paged                               # under 1 minute on an H200, writes <gpu>_paged.json
    python -m benchmarks.paged --device cpu --smoke --out /tmp/paged.json

PyTorch has no such call, so the measure is our own contiguous cache: the same keys, in rows [batch, capacity] instead
of pages in random order. Times are those of decode.py: CUDA graphs that take turns, keys from memory. TB/s counts
queries, outputs and the keys and values in use.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.decode import KEPT_BYTES, Recorded, replay_times
from benchmarks.harness import Budget, Results, say, significant
from torch_flashbackend import kv_cache

HEADS, KV_HEADS = 32, 8


@dataclasses.dataclass(frozen=True)
class Case:
    """`batch` sequences of `shortest` to `longest` keys in pages of `page_size`."""

    batch: int
    shortest: int
    longest: int
    page_size: int
    head_dim: int = 128

    @property
    def label(self) -> str:
        lengths = f"{self.longest}" if self.shortest == self.longest else f"{self.shortest} to {self.longest}"
        return f"paged: B{self.batch} H{HEADS}/{KV_HEADS} {lengths} keys, D{self.head_dim}, pages of {self.page_size}"


def all_cases(smoke: bool) -> list[Case]:
    if smoke:
        return [Case(2, 5, 40, 16), Case(2, 32, 32, 16, 64)]
    mixed = [Case(64, 100, 8192, page_size) for page_size in (16, 64, 256)]
    return [
        *mixed,
        Case(8, 100, 8192, 64),
        Case(1, 8192, 8192, 64),
        Case(64, 8192, 8192, 64),
        Case(64, 100, 8192, 64, 64),
    ]


def make_calls(case: Case, device: torch.device, seed: int) -> tuple[dict[str, Any], float, Tensor, Tensor]:
    """A call on pages and one on rows, the bytes that each must move, and what both compute."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    lengths = torch.randint(case.shortest, case.longest + 1, (case.batch,), generator=generator, device=device)
    lengths = lengths.int()
    pages = math.ceil(case.longest / case.page_size)
    table = torch.randperm(case.batch * pages, generator=generator, device=device).view(case.batch, pages).int()
    query = normal(case.batch, 1, HEADS, case.head_dim)
    rows = [normal(case.batch, pages * case.page_size, KV_HEADS, case.head_dim) for _ in range(2)]
    in_pages = []
    for cache in rows:
        pool = torch.empty_like(cache).view(-1, case.page_size, KV_HEADS, case.head_dim)
        pool[table.flatten().long()] = cache.view(pool.shape)
        in_pages.append(pool)
    calls = {
        "paged": lambda: kv_cache.attend(query, *in_pages, cache_seqlens=lengths, block_table=table),
        "contiguous": lambda: kv_cache.attend(query, *rows, cache_seqlens=lengths),
    }
    in_use = 2 * int(lengths.sum()) * KV_HEADS * case.head_dim + 2 * query.numel()
    return calls, float(query.element_size() * in_use), calls["paged"](), calls["contiguous"]()


def measure_case(case: Case, device: torch.device, rounds: int) -> dict[str, Any]:
    """A row of JSON."""
    calls, moved, paged, contiguous = make_calls(case, device, 0)
    difference = (paged.double() - contiguous.double()).abs().max().item()
    sets = [calls]
    while device.type == "cuda" and len(sets) * moved < KEPT_BYTES:
        sets.append(make_calls(case, device, len(sets))[0])
    recorded = {name: Recorded([one[name] for one in sets], device) for name in calls}
    times = replay_times(recorded | {"again": recorded["contiguous"]}, device, rounds)
    row: dict[str, Any] = {"label": case.label, "case": dataclasses.asdict(case), "sets": len(sets), "bytes": moved}
    row["aa"] = harness.aa_report(times, "contiguous", "again")
    del times["again"]
    row["us"] = {name: significant(us, 4) for name, us in times.items()}
    row["tb_per_s"] = {name: significant(moved / us * 1e-6, 4) for name, us in times.items()}
    row["of_contiguous"] = significant(times["contiguous"] / times["paged"], 4)
    row["difference"] = significant(difference, 3)
    return row


def main(argv: list[str] | None = None) -> int:
    """Measure and write the results file. Returns 1 where both disagree."""
    arguments = harness.parser(__doc__.splitlines()[0], budget_s=60).parse_args(argv)
    budget = Budget(arguments.budget)
    device = torch.device(arguments.device)
    facts = harness.environment(arguments.device)
    results = Results(harness.results_path(arguments, facts, "paged"), "paged", facts, vars(arguments))
    wrong = []
    wanted = [case for case in all_cases(arguments.smoke) if harness.asked_for(arguments, case.label)]
    for case in results.each(wanted, budget):
        row = measure_case(case, device, 2 if arguments.smoke else 2 * arguments.rounds + 1)
        results.add(row)
        wrong += [case.label] if row["difference"] > 0.02 else []
        shown = "  ".join(f"{name} {us} us {row['tb_per_s'][name]} TB/s" for name, us in row["us"].items())
        say(f"{case.label}: {shown}, {row['of_contiguous']} of the contiguous speed, difference {row['difference']}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if wrong:
        say(f"pages and rows disagree: {wrong}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
