"""Masks, biases and their gradients, GQA, other head dims, dropout, float32, short sequences, decoding: ours and stock.

    python -m benchmarks.special                      # about 5 minutes on an H200, writes benchmarks/results/
    python -m benchmarks.special --only mask,gqa      # a file of its own, <gpu>_special_mask_gqa.json
    python -m benchmarks.special --device cpu --smoke --out /tmp/special.json

TFLOP/s count the whole square of a masked call, so that skipping masked tiles may exceed the machine's ceiling. Decode
rows are bound by memory: their rate is in `ms` and case.bytes. See harness.py for how numbers come about.
"""

from __future__ import annotations

import sys

import torch

from benchmarks import cases, contenders, harness, measure


def main(argv: list[str] | None = None) -> int:
    options = harness.parser(__doc__.splitlines()[0], budget_s=420)
    measure.add_options(options)
    arguments = options.parse_args(argv)
    names = [*contenders.our_backends(torch.device(arguments.device)), "default"]
    return measure.main("special", "benchmarks.special", cases.special(), names, arguments)


if __name__ == "__main__":
    sys.exit(main())
