"""Peak memory of causal attention, forward and backward, by sequence length: ours and PyTorch's default grow with the
length, the math path with its square.

    python -m benchmarks.memory                       # under 1 minute on an H200, writes <gpu>_memory.json
    python -m benchmarks.memory --device cpu --smoke --out /tmp/memory.json

One layer's call: batch 1, 32 heads on 8 of keys and values, head dimension 128, bfloat16, 4,096 to 131,072 tokens. A
figure is what one call allocates at its peak beside its inputs and the output's gradient: output, logsumexp, gradients
and every workspace (harness.Meter.peak_memory). The math path is measured where it fits; beyond, its figure is computed
from the largest one measured, growing with the square of the length, and stands under another name.

`plugin` runs what the policy in force chooses, `triton` our portable kernels.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

import torch_flashbackend
from benchmarks import contenders, harness
from benchmarks.generate import plugin
from benchmarks.harness import Budget, Meter, Results, Run, say, significant

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LENGTHS = (4096, 8192, 16_384, 32_768, 65_536, 131_072)
SMOKE_LENGTHS = (32, 64, 128)
# Of what is free, the most that the math path is given: it would rather be computed than run out of memory.
SHARE_OF_FREE = 0.8
# Growth exponents, log2 of the ratio when the length doubles: a line has 1, a square 2.
LINEAR = 1.05
# The allocator rounds blocks up.
AS_MUCH = 1.01


def make_call(length: int, device: torch.device) -> Any:
    """A function that does forward and backward once, on tensors of its own; gives output and gradients."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device=device).manual_seed(length)

    def normal(heads: int) -> Tensor:
        size = (1, length, heads, HEAD_DIM)
        return torch.randn(size, generator=generator, device=device, dtype=dtype).transpose(1, 2)

    query, grad_out = normal(HEADS).requires_grad_(), normal(HEADS)
    key, value = (normal(KV_HEADS).requires_grad_() for _ in range(2))

    def call() -> list[Tensor]:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return [out, *torch.autograd.grad(out, (query, key, value), grad_out)]

    return call


def contexts(device: torch.device) -> dict[str, harness.Context]:
    """On a CPU, where the plugin takes no call, our math path stands in for it."""
    ours: dict[str, harness.Context] = {"plugin": contenders.math_backend}
    if device.type == "cuda":
        ours = {"plugin": plugin, "triton": lambda: torch_flashbackend.sdpa_backend("triton")}
    return {"default": contenders.stock(), **ours, "math": contenders.stock(SDPBackend.MATH)}


def computed(measured: dict[int, int], length: int) -> int | None:
    """What the largest length that was measured gives for `length`, growing with its square."""
    if not measured:
        return None
    largest = max(measured)
    return round(measured[largest] * (length / largest) ** 2)


def growth(before: dict[str, Any] | None, row: dict[str, Any]) -> dict[str, float]:
    """By contender, the power of the length with which the peak has grown since the last row."""
    if before is None:
        return {}
    doublings = math.log(row["seqlen"] / before["seqlen"])
    old, new = before["peak_memory_bytes"], row["peak_memory_bytes"]
    return {
        name: significant(math.log(new[name] / old[name]) / doublings, 4) for name in new if old.get(name) and new[name]
    }


def fits(bytes_needed: int | None, device: torch.device) -> bool:
    """Is there room? Nothing is known of the first length, which is small."""
    if bytes_needed is None or device.type != "cuda":
        return True
    return bytes_needed <= SHARE_OF_FREE * torch.cuda.mem_get_info(device)[0]


def label_of(length: int) -> str:
    """Of a row."""
    return f"S = {length:,}"


def measure(length: int, meter: Meter, math_path: dict[int, int]) -> dict[str, Any]:
    """A row; adds to `math_path` what the math path took, if it ran."""
    row: dict[str, Any] = {"label": label_of(length), "seqlen": length, "peak_memory_bytes": {}, "seconds": {}}
    row |= {"computed_bytes": {}, "kernels": {}, "refused": {}}
    # One matrix of scores in half precision, of which the math path keeps several.
    row["scores_bytes"] = 2 * HEADS * length * length
    call = make_call(length, meter.device)
    for name, context in contexts(meter.device).items():
        expected = computed(math_path, length) if name == "math" else None
        if not fits(expected, meter.device):
            row["computed_bytes"][name] = expected
            continue
        run = Run(call, context)
        try:
            peak = meter.peak_memory(run) or 0
            meter.synchronize()
            start = time.perf_counter()
            row["kernels"][name] = contenders.kernels_launched(run)
            meter.synchronize()
            row["seconds"][name] = significant(time.perf_counter() - start)
            row["peak_memory_bytes"][name] = peak
            if name == "math":
                math_path[length] = peak
        except torch.OutOfMemoryError as error:
            row["refused"][name] = str(error).splitlines()[0][:160]
            if expected is not None:
                row["computed_bytes"][name] = expected
        gc.collect()
        if meter.cuda:
            torch.cuda.empty_cache()
    return row


def main(argv: list[str] | None = None) -> int:
    """Measure and write the results file. Returns 1 where ours takes more than PyTorch's default, or grows faster."""
    arguments = harness.parser(__doc__.splitlines()[0], budget_s=60).parse_args(argv)
    budget = Budget(arguments.budget)
    facts = harness.environment(arguments.device)
    results = Results(harness.results_path(arguments, facts, "memory"), "memory", facts, vars(arguments))
    results.data["call"] = {"batch": 1, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "causal": True}
    meter = Meter(arguments.device)
    math_path: dict[int, int] = {}
    before, wrong = None, []
    lengths = SMOKE_LENGTHS if arguments.smoke else LENGTHS
    wanted = [length for length in lengths if harness.asked_for(arguments, label_of(length))]
    for length in results.each(wanted, budget, label_of):
        row = measure(length, meter, math_path)
        row["growth"] = growth(before, row)
        results.add(row)
        peaks = row["peak_memory_bytes"]
        if peaks["plugin"] > AS_MUCH * peaks["default"] or row["growth"].get("plugin", 1.0) > LINEAR:
            wrong.append(row["label"])
        shown = ", ".join(f"{name} {peak / 2**30:.3f}" for name, peak in peaks.items())
        say(f"[{budget.used:.0f} s] {row['label']}: GiB {shown}; growth {row['growth']}; seconds {row['seconds']}")
        say(f"    computed {row['computed_bytes']} kernels {row['kernels'].get('plugin')} {row['refused'] or ''}")
        before = row
    if wrong:
        say(f"more memory than PyTorch's default, or more than a line: {wrong}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
