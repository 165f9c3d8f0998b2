"""Where the time of a query tile goes in the Hopper forward: clock readings of a kernel with stamps in its source.

    python -m benchmarks.trace_cuda_forward --out trace.json                 # about 10 s, prints one table per problem

For each problem, tile and number of key tiles: medians in cycles, over blocks, warpgroups and query tiles, of the
parts that follow each other in a warpgroup: the steps after the first ("steps"), the wait for the next query
("query"), for its first keys ("keys"), the first scores and their softmax beside the last product ("first"), the wait
for that product ("product"), and sending the output ("send"). Then microseconds from the kernel's first instruction to
each block's first scores, and from each block's last output to the end of the kernel.
"""

from __future__ import annotations

import argparse
import concurrent.futures
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.harness import Results, environment
from benchmarks.tune_cuda_forward import PROBLEMS, Candidate, Problem, tensors_of
from torch_flashbackend.kernels.cuda import forward, tiles
from torch_flashbackend.kernels.cuda.tiles import Tile

TILES, EVENTS = 128, 8  # of each warpgroup
PARTS = ("steps", "query", "keys", "first", "product", "send")

# Where stamps go: text that the source has once, and what replaces it.
STAMPED = {
    "__device__ __forceinline__ void consume(const ForwardParams& params": (
        f"""__device__ __forceinline__ void stamp(const ForwardParams& params, int warpgroup, int tile, int event,
                                      long long value) {{
  if (threadIdx.x % 128 == 0 && tile < {TILES})
    ((long long*)params.logsumexp)[((blockIdx.x * CONSUMERS + warpgroup) * {TILES} + tile) * {EVENTS} + event] = value;
}}
__device__ __forceinline__ long long nanoseconds() {{
  long long x;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(x) :: "memory");
  return x;
}}
__device__ __forceinline__ void consume(const ForwardParams& params"""
    ),
    "  if (!begin_tile()) return;\n": (
        "  int traced = 0;\n  const auto at = [&](int event) { stamp(params, warpgroup, traced, event, clock64()); };\n"
        "  stamp(params, warpgroup, 0, 7, nanoseconds());\n  if (!begin_tile()) return;\n  int visited = j + 1;\n"
    ),
    "  pack_probabilities(probabilities, scores);\n  for (;;) {\n": (
        "  pack_probabilities(probabilities, scores);\n  at(5);\n"
        "  stamp(params, warpgroup, 1, 7, nanoseconds());\n  for (;;) {\n    ++traced;\n"
    ),
    "    // The last product of this query tile runs beside": (
        "    at(0);\n    stamp(params, warpgroup, traced, 6, visited);\n"
        "    // The last product of this query tile runs beside"
    ),
    "    const bool more = begin_tile();\n": (
        "    const bool more = begin_tile();\n    at(1);\n    visited = j + 1;\n"
    ),
    "      send(inverse, q_stage, tile, finished_share);\n      return;\n": (
        "      send(inverse, q_stage, tile, finished_share);\n"
        "      stamp(params, warpgroup, 2, 7, nanoseconds());\n      return;\n"
    ),
    "    issue_scores();\n    filled_wait(shared.v_full(v.stage), v.phase);\n    issue_out(v.stage);\n    accumulate": (
        "    at(2);\n    issue_scores();\n    filled_wait(shared.v_full(v.stage), v.phase);\n    issue_out(v.stage);\n"
        "    accumulate"
    ),
    "    first_softmax([] { wgmma_wait<1>(); });\n    wgmma_wait<0>();\n": (
        "    first_softmax([] { wgmma_wait<1>(); });\n    at(3);\n    wgmma_wait<0>();\n    at(4);\n"
    ),
    "    send(inverse, q_stage, tile, finished_share);\n    pack_probabilities": (
        "    send(inverse, q_stage, tile, finished_share);\n    at(5);\n    pack_probabilities"
    ),
}


class Stamped(forward.Specialisation):
    """A specialisation whose kernel writes readings in the place of the logsumexp."""

    @property
    def source(self) -> Any:
        plain = super().source
        text = plain.text
        for before, after in STAMPED.items():
            if text.count(before) != 1:
                raise ValueError(f"not once in the kernel: {before!r}")
            text = text.replace(before, after)
        return plain._replace(text=text)


def stamped(candidate: Candidate) -> Stamped:
    return Stamped(*candidate.specialisation._replace(write_lse=False))


def trace(problem: Problem, candidate: Candidate) -> dict[str, Any]:
    """Medians in cycles by number of key tiles, and the kernel's ends in microseconds."""
    tensors = tensors_of(
        (problem.batch, problem.heads, problem.heads, problem.seqlen, problem.seqlen), problem.head_dim
    )
    warpgroups = candidate.tile.num_warpgroups
    readings = torch.zeros(132, warpgroups, TILES, EVENTS, device="cuda", dtype=torch.int64)
    cold = torch.empty(1 << 28, device="cuda", dtype=torch.int8)
    with candidate.chosen(), mock.patch.object(forward, "specialise", lambda *_, **__: stamped(candidate)):
        plan = forward.Plan(*tensors, True, candidate.is_causal, problem.head_dim**-0.5)
    for _ in range(3):
        readings.zero_()
        cold.zero_()  # the L2 cache holds nothing of the inputs
        plan(*tensors, readings)
        torch.cuda.synchronize()
    data = readings.cpu()
    found: dict[int, list[list[int]]] = {}
    for block in data:
        for rows in block:
            for tile in range(1, TILES):
                now, before = rows[tile].tolist(), rows[tile - 1].tolist()
                if now[5] and before[5]:
                    parts = [now[0] - before[5], *(now[i + 1] - now[i] for i in range(5))]
                    found.setdefault(now[6], []).append(parts)
    table = {}
    for visited, parts in sorted(found.items()):
        medians = torch.tensor(parts).double().median(0).values.tolist()
        means = torch.tensor(parts).double().mean(0).tolist()
        table[visited] = {"tiles": len(parts), "median": medians, "mean": means}
    begins, firsts, ends = (data[:, :, event, 7].double() for event in range(3))
    start, end = begins[begins > 0].min(), ends.max()
    spread = lambda x: [x.min().item(), x.median().item(), x.max().item()]  # noqa: E731
    return {
        "problem": problem.name,
        "candidate": candidate.name,
        "key_tiles": table,
        "first_scores_us": spread((firsts[firsts > 0] - start) / 1e3),
        "idle_at_end_us": spread((end - ends[ends > 0]) / 1e3),
        "kernel_us": ((end - start) / 1e3).item(),
    }


def work() -> list[tuple[Problem, Candidate]]:
    """The table's tiles on short causal rows, and what may take their place."""
    found = []
    for problem in PROBLEMS:
        short = problem.is_causal and problem.seqlen in (512, 1024)
        if short or (problem.head_dim == 72 and problem.seqlen > 1000):
            padded = -(-problem.head_dim // 16) * 16
            heads = problem.batch * problem.heads
            tile = tiles.choose(padded, padded, problem.is_causal, problem.seqlen, problem.seqlen, heads, 132)
            found.append((problem, Candidate(problem.head_dim, problem.is_causal, tile)))
            if problem.head_dim == 64:
                found.append((problem, Candidate(64, True, Tile(256, 64, 8, 2, False, rotate=True))))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--compile-only", action="store_true", help="needs no GPU")
    options = parser.parse_args()
    listed = work()
    if options.compile_only:
        for _, candidate in listed:
            log = stamped(candidate).compile().log
            print(candidate.name, *(line for line in log.splitlines() if "C75" in line or "spill" in line), flush=True)
        return
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda pair: stamped(pair[1]).compile(), listed))
    results = Results(Path(options.out), "trace_cuda_forward", environment("cuda"), vars(options))
    for problem, candidate in listed:
        row = trace(problem, candidate)
        print(f"{row['problem']}, {row['candidate']}: {row['kernel_us']:.1f} us", flush=True)
        print(f"  key tiles  count  {'  '.join(f'{part:>7}' for part in PARTS)}   (medians, then means)")
        for visited, parts in row["key_tiles"].items():
            print(f"  {visited:9}  {parts['tiles']:5}  {'  '.join(f'{x:7.0f}' for x in parts['median'])}")
            print(f"  {'':9}  {'':5}  {'  '.join(f'{x:7.0f}' for x in parts['mean'])}")
        for what in ("first_scores_us", "idle_at_end_us"):
            print(f"  {what}: least, median, most {', '.join(f'{x:.1f}' for x in row[what])}", flush=True)
        results.add(row)
    results.finish([])


if __name__ == "__main__":
    main()
