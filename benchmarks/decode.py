"""Decoding: a few queries over a long cache of keys and values, ours and PyTorch's kernels, in microseconds and TB/s.

    python -m benchmarks.decode                              # about 4 minutes on an H200, writes benchmarks/results/
    python -m benchmarks.decode --only "B1 H32/8 S1x8192"
    python -m benchmarks.decode --device cpu --smoke --out /tmp/decode.json

How a number comes about: a CUDA graph holds one call for each of as many sets of tensors as exceed the L2 cache
(KEPT_BYTES), so that no call finds its keys cached and no launch waits for the CPU, as in a model that generates text.
Contenders' graphs are replayed in turn, in another order each round; a time is the median replay divided by
the number of calls. TB/s counts what has to be read and written once: queries, outputs, and of keys and values those
that any query sees. `eager_us` is what a call costs a program without graphs (harness.Meter.eager_times).
`after_product_us`, of ours and the default: what a call adds to a graph where each follows a matrix product, as it does
in a model, whose multiprocessors are still busy with that when the call begins.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import cases, contenders, harness
from benchmarks.cases import Case, Inputs, make_inputs
from benchmarks.harness import Budget, Meter, Results, Run, significant, turns

CONTENDERS = ("cuda", "triton", "default", "flash", "cudnn")
KEPT_BYTES = 192 * 2**20
MOST_SETS = 256
LARGEST_BYTES = 60 * 2**30
PROJECTED = 4096


def used_bytes(case: Case, inputs: Inputs) -> float:
    """What a call must move: case.bytes without the keys and values that the mask hides from every query."""
    if inputs.attn_mask is None:
        return case.bytes
    seen = inputs.attn_mask if inputs.attn_mask.dtype == torch.bool else inputs.attn_mask > -math.inf
    share = seen.any(-2).float().mean().item()
    queries = 2 * case.batch * case.heads * case.seqlen_q * (case.head_dim + case.head_dim_v)
    return queries + (case.bytes - queries) * share


class Recorded:
    """Calls that differ in their tensors, as a CUDA graph (on a CPU: as a loop)."""

    def __init__(
        self, calls: list[Callable[[], Any]], device: torch.device, context: harness.Context = contextlib.nullcontext
    ) -> None:
        self.context = context
        self.calls = calls
        self.graph = None
        if device.type != "cuda":
            return
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), self.context():
            for call in self.calls[:3]:
                call()
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with self.context(), torch.cuda.graph(self.graph):
            for call in self.calls:
                call()

    def run(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        with self.context():
            for call in self.calls:
                call()


def replay_times(recorded: dict[str, Recorded], device: torch.device, rounds: int) -> dict[str, float]:
    """Median microseconds for each call, by contender, their replays taking turns."""
    cuda = device.type == "cuda"
    samples: dict[str, list[float]] = {name: [] for name in recorded}
    for item in recorded.values():
        item.run()
    for order in turns(list(recorded), rounds):
        events = {}
        for name in order:
            if not cuda:
                start = time.perf_counter()
                recorded[name].run()
                samples[name].append(1e6 * (time.perf_counter() - start))
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            recorded[name].run()
            end.record()
            events[name] = start, end
        if cuda:
            torch.cuda.synchronize(device)
            for name, (start, end) in events.items():
                samples[name].append(1e3 * start.elapsed_time(end))
    calls = len(next(iter(recorded.values())).calls)
    return {name: statistics.median(times) / calls for name, times in samples.items()}


def times_after_products(
    case: Case, recorded: dict[str, Recorded], device: torch.device, rounds: int
) -> dict[str, float]:
    """What each call costs behind the projection of PROJECTED numbers for each query, in microseconds."""
    rows = torch.randn(case.batch * case.seqlen_q, PROJECTED, device=device, dtype=torch.bfloat16)
    weight = torch.randn(PROJECTED, PROJECTED, device=device, dtype=torch.bfloat16)
    projected = torch.empty_like(rows)

    def product() -> None:
        torch.mm(rows, weight, out=projected)

    def behind(call: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: (product(), call())

    all_calls = {name: [behind(call) for call in item.calls] for name, item in recorded.items()}
    graphs = {name: Recorded(calls, device, recorded[name].context) for name, calls in all_calls.items()}
    calls = len(next(iter(all_calls.values())))
    times = replay_times(graphs | {"product": Recorded([product] * calls, device)}, device, rounds)
    alone = times.pop("product")
    return {name: us - alone for name, us in times.items()}


def measure_case(case: Case, meter: Meter, rounds: int, smoke: bool) -> dict[str, Any]:
    """A row of JSON: microseconds, TB/s and eager microseconds of every contender, and how far ours is from stock."""
    device = meter.device
    first = make_inputs(case, device, training=False)
    moved = used_bytes(case, first)
    number = 2 if smoke else max(2, min(MOST_SETS, math.ceil(KEPT_BYTES / moved), int(LARGEST_BYTES // case.bytes)))
    sets = [first, *(make_inputs(case, device, training=False, seed=seed) for seed in range(1, number))]
    row: dict[str, Any] = {"label": case.label, "case": case.to_json(), "policy_case": case.policy_case}
    row |= {"sets": number, "bytes": moved, "refused": {}}
    recorded: dict[str, Recorded] = {}
    ours = contenders.our_backends(device)
    for name in CONTENDERS:
        if name in harness.OURS and name not in ours:
            continue
        try:
            context = contenders.context_of(name, device)
            calls = [contenders.prepare_sdpa(case, inputs, None, context).forward.call for inputs in sets]
            recorded[name] = Recorded(calls, device, context)
        except RuntimeError as error:
            row["refused"][name] = str(error).splitlines()[0][:160]
    again = "default" if "default" in recorded else next(iter(recorded))
    times = replay_times(recorded | {"again": recorded[again]}, device, rounds)
    row["again"] = significant(times.pop("again") / times[again], 4)
    row["us"] = {name: significant(us, 4) for name, us in times.items()}
    some = {name: item for name, item in recorded.items() if name in (*harness.OURS, "default")}
    behind = times_after_products(case, some, device, rounds)
    row["after_product_us"] = {name: significant(us, 4) for name, us in behind.items()}
    row["tb_per_s"] = {name: significant(moved / us * 1e-6, 4) for name, us in times.items()}
    eager = {name: Run(item.calls[0], item.context) for name, item in some.items()}
    row["eager_us"] = {"forward": {name: significant(us, 4) for name, us in meter.eager_times(eager).items()}}
    found = [name for name in harness.OURS if name in eager]
    row["our_kernels"] = {name: contenders.kernels_launched(eager[name]) for name in found}
    if "default" in eager:
        row["difference"] = {
            name: significant(contenders.difference(eager[name], eager["default"]), 3) for name in found
        }
    return row


def main(argv: list[str] | None = None) -> int:
    arguments = harness.parser(__doc__.splitlines()[0], budget_s=240).parse_args(argv)
    budget = Budget(arguments.budget)
    contenders.take_everything()
    facts = harness.environment(arguments.device)
    names = {**vars(arguments), "contenders": CONTENDERS}
    results = Results(harness.results_path(arguments, facts, "decode"), "decode", facts, names)
    meter = Meter(arguments.device, 2 if arguments.smoke else arguments.rounds, 0.2 if arguments.smoke else 4.0)
    for case in results.each(harness.chosen(arguments, cases.decode()), budget):
        row = measure_case(case, meter, 2 if arguments.smoke else 2 * arguments.rounds + 1, arguments.smoke)
        results.add(row)
        shown = "  ".join(f"{name} {us} us {row['tb_per_s'][name]} TB/s" for name, us in row["us"].items())
        harness.say(f"{case.label}: {shown}  after a product {row['after_product_us']}")
        if meter.cuda:
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
