"""One row of a results file: everything that is measured about one case.

Imports torch, contenders.py, cases.py and harness.py. Imported by attention.py and special.py, which only differ in
their cases and contenders; `main` is their whole command line. Of deterministic.py and batch_invariance.py
`measure_costs` is most.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import contenders, harness
from benchmarks.cases import Case, make_inputs, matmul_precision
from benchmarks.contenders import Prepared
from benchmarks.harness import OURS, Budget, ClockLog, Meter, Results, Run, aa_report, say, significant

AGAIN = " (again)"
# Contenders whose eager time and memory a policy needs: ours against what PyTorch would have run.
EAGER = (*OURS, "default")
BACKWARD_FLOPS = 2.5  # five products instead of two


def measure_case(case: Case, names: list[str], meter: Meter, clocks: ClockLog, layout: str) -> dict[str, Any]:
    """Times, rates, memory and eager times of the contenders on one case, as a row of JSON."""
    start = time.monotonic()
    inference = make_inputs(case, meter.device, training=False, layout=layout)
    training = make_inputs(case, meter.device, training=True, layout=layout) if case.training else None
    row: dict[str, Any] = {"label": case.label, "case": case.to_json(), "policy_case": case.policy_case}
    with matmul_precision(case):
        prepared, refused = contenders.prepare_all(names, case, inference, training, meter)
        row["refused"] = refused
        passes = {"forward": case.flops, "backward": BACKWARD_FLOPS * case.flops}
        for name, flops in passes.items():
            runs = _runs(prepared, name)
            if not runs:
                continue
            times, row.setdefault("aa", {})[name] = times_and_aa(runs, meter)
            row.setdefault("ms", {})[name] = {k: significant(t) for k, t in times.items()}
            row.setdefault("tflops", {})[name] = {k: significant(flops / t * 1e-9, 4) for k, t in times.items()}
        row["eager_us"], row["memory_bytes"] = {}, {}
        for name in ("forward", "training"):
            runs = {k: r for k, r in _runs(prepared, name).items() if k in EAGER}
            if runs:
                times = meter.eager_times(runs)
                row["eager_us"][name] = {k: significant(t) for k, t in times.items()}
                row["memory_bytes"][name] = {k: meter.peak_memory(r) for k, r in runs.items()}
        row.update(_sanity(prepared, case))
    row["gpu_state"] = clocks.since(start)
    row["seconds"] = round(time.monotonic() - start, 2)
    return row


def times_and_aa(
    runs: dict[str, Run], meter: Meter, first: str | None = None
) -> tuple[dict[str, float], dict[str, Any]]:
    """GPU times by contender, and the A/A report of `first`, or of PyTorch's default where it is there."""
    first = first or ("default" if "default" in runs else next(iter(runs)))
    again = first + AGAIN
    times = meter.gpu_times(runs | {again: runs[first]}, (first, again))
    report = aa_report(times, first, again) | {"rounds": meter.rounds_taken}
    del times[again]
    return times, report


def _runs(prepared: dict[str, Prepared], name: str) -> dict[str, Run]:
    runs = {k: getattr(p, name) for k, p in prepared.items()}
    return {k: r for k, r in runs.items() if r is not None}


def _sanity(prepared: dict[str, Prepared], case: Case) -> dict[str, Any]:
    """Whether our kernels ran at all, and how far their results lie from stock's: a fast wrong kernel is no result."""
    kernels, differences = {}, {}
    for name in (name for name in OURS if name in prepared):
        run = prepared[name].training or prepared[name].forward
        kernels[name] = contenders.kernels_launched(run)
        if "default" in prepared and not case.dropout:
            stock = prepared["default"].training or prepared["default"].forward
            differences[name] = significant(contenders.difference(run, stock), 3)
    return {"our_kernels": kernels, "difference": differences} if kernels else {}


def compile_only(cases: list[Case], device: str, layout: str) -> None:
    """Runs ours once on each case, so that its kernels lie compiled on disk. Few heads do."""
    for case in cases:
        group = case.heads // case.kv_heads
        small = dataclasses.replace(case, batch=min(case.batch, 2), heads=2 * group, kv_heads=2)
        with contextlib.suppress(Exception), matmul_precision(small):
            inference = make_inputs(small, device, training=False, layout=layout)
            training = make_inputs(small, device, training=True, layout=layout) if case.training else None
            for name in contenders.our_backends(torch.device(device)):
                context = contenders.context_of(name, torch.device(device))
                prepared = contenders.prepare_sdpa(small, inference, training, context)
                for run in (prepared.forward, prepared.training):
                    if run is not None:
                        with run.context():
                            run.call()


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--layout", choices=("bhsd", "bshd"), default="bhsd", help="memory order of q, k, v")
    options.add_argument("--forward-only", action="store_true", help="inference alone: no backward, no training")
    options.add_argument("--workers", type=int, default=12, help="processes that compile beforehand; 0: none")
    options.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--shard", default=None, help="i/n: every n-th case from the i-th on")


def main(kind: str, module: str, cases: list[Case], names: list[str], arguments: argparse.Namespace) -> int:
    """Measures the cases within the budget, writes the results file after each, prints a table. Returns 0, or 1."""
    budget = Budget(arguments.budget)
    cases = harness.chosen(arguments, cases)
    if arguments.forward_only:
        cases = [dataclasses.replace(case, training=False) for case in cases]
    cases = harness.shard(cases, arguments.shard)
    contenders.take_everything()
    if arguments.compile_only:
        compile_only(cases, arguments.device, arguments.layout)
        return 0
    if arguments.workers and torch.device(arguments.device).type == "cuda":
        extra = ["--device", arguments.device, "--layout", arguments.layout, "--only", arguments.only]
        extra += ["--smoke"] if arguments.smoke else []
        extra += ["--forward-only"] if arguments.forward_only else []
        harness.precompile(module, arguments.workers, 0.5 * arguments.budget, extra)

    meter = harness.meter_of(arguments)
    facts = harness.environment(arguments.device)
    path = harness.results_path(arguments, facts, kind)
    results = Results(path, kind, facts, {**vars(arguments), "contenders": names})
    clocks = ClockLog(meter.device)
    left_out: list[str] = []
    say(f"{len(cases)} cases, contenders {', '.join(names)}, budget {arguments.budget:.0f} s, writing {path}")
    try:
        for index, case in enumerate(cases):
            if budget.exhausted:
                left_out = [c.label for c in cases[index:]]
                say(f"budget used: {len(left_out)} cases not measured")
                break
            try:
                row = measure_case(case, names, meter, clocks, arguments.layout)
            except torch.OutOfMemoryError as error:
                row = {"label": case.label, "case": case.to_json(), "error": str(error).splitlines()[0]}
            results.add(row)
            say(f"[{index + 1}/{len(cases)} {budget.used:.0f} s] {summary(row)}")
            if meter.cuda:
                torch.cuda.empty_cache()
    finally:
        clocks.close()
        results.finish(left_out)
    print_tables(results.data["rows"], names)
    return 0


def measure_costs(
    kind: str, cases: list[Case], measure: Callable[[Case, Meter], dict[str, Any]], arguments: argparse.Namespace
) -> Results:
    """Measures what a mode of ours costs: rows with `gpu_ms` and `cost`, and the results file after each."""
    budget = Budget(arguments.budget)
    meter = harness.meter_of(arguments)
    facts = harness.environment(arguments.device)
    results = Results(harness.results_path(arguments, facts, kind), kind, facts, vars(arguments))
    for case in results.each(harness.chosen(arguments, cases), budget):
        row = measure(case, meter)
        results.add(row)
        say(f"[{budget.used:.0f} s] {row['label']}: {row['gpu_ms']}, {row['cost']} times as long")
        if meter.cuda:
            torch.cuda.empty_cache()
    return results


def summary(row: dict[str, Any]) -> str:
    """One line of progress: rates of each contender and the ratios that a policy is made of."""
    if "error" in row:
        return f"{row['label']}: {row['error']}"
    parts = []
    for name, rates in row.get("tflops", {}).items():
        parts.append(f"{name} " + " ".join(f"{k} {v:.0f}" for k, v in rates.items()))
    for name, times in row["eager_us"].items():
        ours = [times[k] for k in OURS if k in times]
        ratio = f" ({times['default'] / min(ours):.2f}x)" if ours and "default" in times else ""
        parts.append(f"eager {name} " + " ".join(f"{k} {v:.0f}us" for k, v in times.items()) + ratio)
    flags = [f"A/A {n} {a['ratio']}" for n, a in row.get("aa", {}).items() if not a["within_limit"]]
    for name, difference in row.get("difference", {}).items():
        if difference > 0.05:
            flags.append(f"{name.upper()} DIFFERS FROM STOCK BY {difference}")
    flags += [f"{name} refused: {why}" for name, why in row["refused"].items()]
    return f"{row['label']} | " + " | ".join(parts + flags)


def print_tables(rows: list[dict[str, Any]], names: list[str]) -> None:
    """The rates, and for each row the faster of our backends over PyTorch's default and over the best other peer."""
    rows = [row for row in rows if "error" not in row]
    for name in ("forward", "backward"):
        lines, to_best = [], []
        for row in rows:
            rates = row.get("tflops", {}).get(name, {})
            ours = [rate for peer, rate in rates.items() if peer in OURS]
            peers = [rate for peer, rate in rates.items() if peer not in OURS]
            if not rates:
                continue
            ratios = ["-", "-"]
            if ours and "default" in rates:
                ratios[0] = f"{max(ours) / rates['default']:.3f}"
            if ours and peers:
                to_best.append(max(ours) / max(peers))
                ratios[1] = f"{to_best[-1]:.3f}"
            state = row.get("gpu_state") or {}
            clock = f"{state['sm_clock_mhz']:.0f} MHz {state['power_w']:.0f} W" if state else "-"
            again = row.get("aa", {}).get(name, {}).get("ratio", "-")
            cells = [f"{rates[n]:.0f}" if n in rates else "-" for n in names]
            lines.append([row["label"], *cells, *ratios, str(again), clock])
        if lines:
            harness.table(
                f"{name}, TFLOP/s", ["case", *names, "ours / default", "ours / best peer", "A/A", "GPU"], lines
            )
        if to_best:
            mean = math.exp(sum(map(math.log, to_best)) / len(to_best))
            say(f"{name}: ours over the best peer: geometric mean {mean:.3f}, worst {min(to_best):.3f}")
