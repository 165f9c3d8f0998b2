"""Measure candidate tiles of the decoding kernel on this GPU, for ``_DECODE`` in ``kernels/triton/tiles.py``.

    python -m benchmarks.tune_decode --out benchmarks/results/tune_decode.json [--only D128] [--budget 240]

A candidate is (keys in a tile, warps, stages, programs for each multiprocessor); the last decides into how many parts
keys are cut and needs no other compilation. Candidates are compiled in parallel first (Triton's cache on disk hands
them over); each is a CUDA graph of calls over more tensors than the L2 cache holds, replayed in turn with the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from pathlib import Path

import torch

from benchmarks import cases, decode
from benchmarks.harness import Results, compile_all, environment, significant
from torch_flashbackend.kernels.triton import attention, decode_plan
from torch_flashbackend.kernels.triton.launch import device_target
from torch_flashbackend.kernels.triton.tiles import SHARED_MEMORY, DecodeTile, choose_decode

# (keys, warps, stages) by padded head_dim, for 2 bytes per element.
CANDIDATES = {
    64: [(64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 4, 3), (128, 4, 4), (256, 4, 2), (128, 8, 3), (64, 2, 4)],
    128: [(32, 4, 3), (32, 4, 4), (32, 4, 5), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 4, 3), (128, 8, 2),
          (128, 8, 3), (64, 8, 3), (32, 2, 4)],
    256: [(16, 4, 4), (32, 4, 2), (32, 4, 3), (32, 4, 4), (64, 4, 2), (64, 8, 2), (64, 8, 3), (32, 8, 3)],
}  # fmt: skip
PROGRAMS = (1, 2, 3, 4)


def chosen_cases(only: str) -> list[cases.Case]:
    """Those that decide, the most wanted first."""

    def case(batch, length, head_dim=128, kv_heads=8, rows=1, mask=None):
        return cases.Case("decode", batch, 32, rows, length, head_dim, kv_heads=kv_heads, mask=mask, training=False)

    found = [case(1, 1024), case(1, 8192), case(64, 1024), case(1, 131072), case(8, 8192),
             case(8, 8192, mask="static_cache"), case(1, 8192, mask="static_cache"), case(64, 8192),
             case(1, 8192, kv_heads=1), case(1, 8192, kv_heads=32), case(8, 8192, rows=8)]  # fmt: skip
    found += [case(batch, length, head_dim) for head_dim in (64, 256) for batch, length in
              ((1, 1024), (1, 8192), (64, 1024), (1, 131072))]  # fmt: skip
    return [item for item in found if any(text in item.label for text in only.split(","))]


class Candidate:
    """Puts a tile in the place of the table's."""

    def __init__(self, keys: int, warps: int, stages: int, programs: int) -> None:
        self.choice = keys, warps, stages, programs
        self.name = "x".join(map(str, self.choice))

    def __enter__(self) -> None:
        decode_plan.choose_decode = lambda family, itemsize, head_dim, block_m: DecodeTile(block_m, *self.choice)

    def __exit__(self, *_) -> None:
        decode_plan.choose_decode = choose_decode


def plan_for(query, key, value, mask, target=None) -> decode_plan.DecodePlan:
    out = torch.empty_like(query)
    scale = query.size(3) ** -0.5
    call = attention._Call(query, key, value, mask, 0.0, False, scale, (query, key, value, out), False, target)
    return decode_plan.DecodePlan(call, query, key, value, mask, scale, out, None)


def compile_one(arguments) -> str | None:
    """In a worker process, without the GPU: fills Triton's disk cache. A text says why a candidate is none."""
    case, choice, target = arguments
    torch.set_num_threads(1)
    try:
        small = dataclasses.replace(case, batch=1, seqlen_k=max(choice[0] * 8, 1024))
        inputs = cases.make_inputs(small, "cpu", training=False)
        with Candidate(*choice, 2):
            plan = plan_for(inputs.query, inputs.key, inputs.value, inputs.attn_mask, target)
        if plan.launch.compile(target).metadata.shared > SHARED_MEMORY["sm_90"]:
            return f"{case.label} {choice}: too much shared memory"
    except Exception as error:
        return f"{case.label} {choice}: {type(error).__name__} {str(error)[:160]}"
    return None


class Recorded:
    """A graph of one call for each set, by one plan."""

    def __init__(self, plan: decode_plan.DecodePlan, sets: list[cases.Inputs], outs: list[torch.Tensor]) -> None:
        self.calls = [
            lambda i=i, out=out: plan(i.query, i.key, i.value, i.attn_mask, out) for i, out in zip(sets, outs)
        ]
        self.graph = None
        self.calls[0]()
        if sets[0].query.is_cuda:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                for call in self.calls:
                    call()

    def run(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            for call in self.calls:
                call()


def measure(case: cases.Case, device: torch.device, rounds: int) -> dict:
    first = cases.make_inputs(case, device, training=False)
    moved = decode.used_bytes(case, first)
    number = max(2, min(decode.MOST_SETS, math.ceil(decode.KEPT_BYTES / moved),
                        int(decode.LARGEST_BYTES // case.bytes)))  # fmt: skip
    number = number if device.type == "cuda" else 2
    sets = [first, *(cases.make_inputs(case, device, training=False, seed=seed) for seed in range(1, number))]
    outs = [torch.empty_like(inputs.query) for inputs in sets]
    recorded, failed, splits = {}, {}, {}
    expected = None
    seen = set()
    padded = max(64, 1 << (case.head_dim - 1).bit_length())
    for choice in CANDIDATES[padded]:
        for programs in PROGRAMS:
            candidate = Candidate(*choice, programs)
            try:
                with candidate:
                    plan = plan_for(first.query, first.key, first.value, first.attn_mask)
                if (choice, plan.splits) in seen:
                    continue  # the same launch
                seen.add((choice, plan.splits))
                if device.type == "cuda" and programs * plan.launch.compiled.metadata.shared > 233472:
                    continue  # so many do not fit
                recorded[candidate.name] = Recorded(plan, sets, outs)
                splits[candidate.name] = plan.splits
            except Exception as error:
                failed[candidate.name] = f"{type(error).__name__} {str(error)[:160]}"
                continue
            outs[0].fill_(math.nan)
            recorded[candidate.name].run()
            result = outs[0].float()
            expected = result.clone() if expected is None else expected
            if not torch.allclose(result, expected, atol=2e-2, rtol=2e-2):
                failed[candidate.name] = f"differs by {(result - expected).abs().max().item()}"
    try:  # the table's own tile, with the query tile loaded once instead of with every tile of keys
        decode_plan.STREAM_QUERY = False
        plan = plan_for(first.query, first.key, first.value, first.attn_mask)
        recorded["table, query loaded once"] = Recorded(plan, sets, outs)
        splits["table, query loaded once"] = plan.splits
    finally:
        decode_plan.STREAM_QUERY = True
    plan = plan_for(first.query, first.key, first.value, first.attn_mask)
    recorded["table"], splits["table"] = Recorded(plan, sets, outs), plan.splits
    times = decode.replay_times(recorded, device, rounds)
    return {
        "label": case.label, "case": case.to_json(), "sets": number, "bytes": moved, "splits": splits,
        "us": {name: significant(us, 4) for name, us in sorted(times.items(), key=lambda item: item[1])},
        "tb_per_s": significant(moved / min(times.values()) * 1e-6, 4), "failed": failed,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="cases whose label has one of these texts, separated by commas")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which no further case is begun")
    options = parser.parse_args(argv)
    began = time.monotonic()
    device = torch.device(options.device)
    work = chosen_cases(options.only)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        target = device_target(device)
        kinds = {(case.head_dim, case.heads // case.kv_heads * case.seqlen_q, case.mask): case for case in work}
        jobs = [(case, choice, target) for case in kinds.values() for choice in CANDIDATES[case.head_dim]]
        compile_all(compile_one, jobs)
    else:
        work = list({case.smaller(): None for case in work})
    results = Results(Path(options.out), "tune_decode", environment(options.device), vars(options))
    left = []
    for case in work:
        if time.monotonic() - began > options.budget:
            left.append(case.label)
            continue
        row = measure(case, device, options.rounds if device.type == "cuda" else 1)
        results.add(row)
        best = "  ".join(f"{name} (S={row['splits'][name]}) {us}" for name, us in list(row["us"].items())[:6])
        print(f"{case.label}: {row['tb_per_s']} TB/s  {best}" + (f"  failed: {row['failed']}" if row["failed"] else ""),
              flush=True)  # fmt: skip
        if device.type == "cuda":
            torch.cuda.empty_cache()
    results.finish(left)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
