"""The grid: head dims 64, 128, 256, lengths 512 to 16384, full and causal, in bfloat16, against every peer.

    python -m benchmarks.attention                    # about 4 minutes on an H200, writes benchmarks/results/
    python -m benchmarks.attention --device cpu --smoke --out /tmp/grid.json

Grouped queries (32 heads, 8 of keys and values) and rectangular calls follow the grid.

TFLOP/s count 2 B H Sq Sk (D + Dv) forward, half when causal, and 2.5 times that backward. Backward is timed alone, on
a graph that is kept. FlashAttention-4 joins in where it can be imported. See harness.py for how numbers come about.
"""

from __future__ import annotations

import sys

import torch

from benchmarks import cases, contenders, harness, measure


def main(argv: list[str] | None = None) -> int:
    options = harness.parser(__doc__.splitlines()[0], budget_s=330)
    measure.add_options(options)
    options.add_argument("--efficient", action="store_true", help="measure PyTorch's memory-efficient kernel too")
    options.add_argument("--math", action="store_true", help="measure PyTorch's math path too (slow, much memory)")
    arguments = options.parse_args(argv)
    names = [*contenders.our_backends(torch.device(arguments.device)), "default"]
    if not arguments.device.startswith("cpu"):
        names += ["flash", "cudnn"]
    names += ["efficient"] if arguments.efficient else []
    names += ["math"] if arguments.math else []
    names += ["fa4"] if not arguments.compile_only and contenders.fa4_functions() is not None else []
    return measure.main("attention", "benchmarks.attention", cases.grid() + cases.beyond_grid(), names, arguments)


if __name__ == "__main__":
    sys.exit(main())
