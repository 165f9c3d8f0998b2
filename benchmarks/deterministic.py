"""What deterministic mode costs: GPU time of a backward under torch.use_deterministic_algorithms over that without.

    python -m benchmarks.deterministic                # under 2 minutes on an H200, writes <gpu>_deterministic.json
    python -m benchmarks.deterministic --only D256
    python -m benchmarks.deterministic --device cpu --smoke --out /tmp/deterministic.json

Columns: "stock", PyTorch's default in deterministic mode; "usual", ours without; "ordered", ours in deterministic mode,
which adds the shares of the query's gradient in one order. `repeats`: "ordered" gave the same bits in two runs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import contenders, harness
from benchmarks.cases import Case, make_inputs
from benchmarks.harness import Context, Meter, significant
from benchmarks.measure import measure_costs, times_and_aa

COLUMNS = ("stock", "usual", "ordered")


def cases() -> list[Case]:
    """As the grid of attention.py: batch * seqlen is 16,384 and heads * head_dim about 2,048; grouped queries once."""
    found = [
        Case("deterministic", 16384 // length, 2048 // head_dim, length, length, head_dim, causal=causal)
        for head_dim in (64, 128, 256)
        for length in (512, 1024, 2048, 4096, 8192, 16384)
        for causal in (True, False)
    ]
    found += [
        Case("deterministic", 4, 10, 4096, 4096, head_dim, head_dim_v=head_dim_v, causal=causal)
        for head_dim, head_dim_v in ((96, 96), (160, 160), (192, 192), (192, 128))
        for causal in (True, False)
    ]
    return [*found, Case("deterministic", 2, 32, 8192, 8192, 128, kv_heads=8, causal=True)]


def in_mode(wanted: bool, context: Context) -> Context:
    """`context`, with or without deterministic algorithms."""

    @contextlib.contextmanager
    def both() -> Iterator[None]:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(wanted)
        try:
            with context():
                yield
        finally:
            torch.use_deterministic_algorithms(before)

    return both


def measure_case(case: Case, meter: Meter) -> dict[str, Any]:
    """A row of JSON: milliseconds of the backward, and what the order makes of ours."""
    inputs = make_inputs(case, meter.device, training=True)
    ours = contenders.context_of("cuda", meter.device)
    contexts = {
        "stock": in_mode(True, contenders.stock()), "usual": in_mode(False, ours), "ordered": in_mode(True, ours),
    }  # fmt: skip
    runs, refused, kernels = {}, {}, {}
    for name, context in contexts.items():
        try:
            backward = contenders.prepare_sdpa(case, inputs, inputs, context).backward
        except RuntimeError as error:
            refused[name] = str(error).splitlines()[0][:160]
            continue
        assert backward is not None
        runs[name] = backward
        with context():
            kernels[name] = contenders.kernels_launched(backward)
    with contexts["ordered"]():
        first, again = runs["ordered"].call(), runs["ordered"].call()
    times, aa = times_and_aa(runs, meter, "ordered")
    return {
        "label": case.label,
        "case": case.to_json(),
        "gpu_ms": {name: significant(times[name]) for name in COLUMNS if name in times},
        "cost": significant(times["ordered"] / times["usual"], 4),
        "repeats": all(torch.equal(one, other) for one, other in zip(first, again, strict=True)),
        "our_kernels": {name: kernels[name] for name in ("usual", "ordered")},
        "refused": refused,
        "aa": aa,
    }


def main(argv: list[str] | None = None) -> int:
    """Measure and write the results file."""
    arguments = harness.parser(__doc__.splitlines()[0], budget_s=150).parse_args(argv)
    contenders.take_everything()
    measure_costs("deterministic", cases(), measure_case, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
