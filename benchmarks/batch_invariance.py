"""What set_batch_invariant costs: GPU time of our kernels with the switch on over that with it off, forward alone.

    python -m benchmarks.batch_invariance             # under 1 minute on an H200, writes <gpu>_batch_invariance.json
    python -m benchmarks.batch_invariance --device cpu --smoke --out /tmp/batch_invariance.json

Choices are then made for a batch of one, so calls in larger batches are what pays: decoding, which cuts keys among more
blocks than a large batch wants, and short sequences, which few of fill no large tiles. PyTorch's default, which gives
no such guarantee, stands beside both. `plugin`: what the policy in force chooses with the switch off.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

import torch_flashbackend
from benchmarks import contenders, harness
from benchmarks.cases import Case, make_inputs
from benchmarks.generate import plugin
from benchmarks.harness import Meter, Run, significant
from benchmarks.measure import measure_costs, times_and_aa

COLUMNS = ("default", "plugin", "invariant")


def cases() -> list[Case]:
    """Head dimension 128 but for one, bfloat16, inference."""

    def decode(batch: int, keys: int) -> Case:
        return Case("decode", batch, 32, 1, keys, 128, kv_heads=8, training=False)

    def prefill(batch: int, length: int, head_dim: int = 128, **options: Any) -> Case:
        return Case("prefill", batch, 2048 // head_dim, length, length, head_dim, training=False, **options)

    found = [decode(batch, keys) for batch in (1, 8, 64) for keys in (1024, 8192)]
    found += [prefill(batch, length, causal=True) for batch, length in ((32, 512), (4, 4096))]
    found += [prefill(32, 512, 64, causal=True), prefill(32, 512, 64), prefill(4, 4096, mask="padding_causal")]
    return found


@contextlib.contextmanager
def invariant() -> Iterator[None]:
    """The plugin on, and the switch."""
    with plugin():
        torch_flashbackend.set_batch_invariant(True)
        try:
            yield
        finally:
            torch_flashbackend.set_batch_invariant(False)


def measure_case(case: Case, meter: Meter) -> dict[str, Any]:
    """A row of JSON: milliseconds by contender, and what the switch makes of ours."""
    inputs = make_inputs(case, meter.device, training=False)

    def call() -> torch.Tensor:
        return F.scaled_dot_product_attention(
            inputs.query, inputs.key, inputs.value, inputs.attn_mask, is_causal=case.causal,
            enable_gqa=case.kv_heads != case.heads,
        )  # fmt: skip

    ours = {"plugin": plugin, "invariant": invariant}
    runs = {name: Run(call, context) for name, context in {"default": contenders.stock(), **ours}.items()}
    kernels = {}
    for name in ours:
        with runs[name].context():
            kernels[name] = contenders.kernels_launched(Run(call))
    times, aa = times_and_aa(runs, meter, "plugin")
    return {
        "label": case.label,
        "case": case.to_json(),
        "gpu_ms": {name: significant(times[name]) for name in COLUMNS},
        "cost": significant(times["invariant"] / times["plugin"], 4),
        "over_default": significant(times["default"] / times["invariant"], 4),
        "our_kernels": kernels,
        "aa": aa,
    }


def main(argv: list[str] | None = None) -> int:
    """Measure and write the results file."""
    arguments = harness.parser(__doc__.splitlines()[0], budget_s=60).parse_args(argv)
    results = measure_costs("batch_invariance", cases(), measure_case, arguments)
    rows = []
    for row in results.data["rows"]:
        times = [f"{row['gpu_ms'][name]:.4g}" for name in COLUMNS]
        rows.append([row["label"], *times, f"{row['cost']:.3f}", f"{row['over_default']:.3f}"])
    harness.table("milliseconds", ["case", *COLUMNS, "invariant / plugin", "default / invariant"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
