"""Compile what the random calls of the suite will launch, in parallel and without touching the GPU.

    python tests/gpu/precompile.py --calls 500 --workers 8

Worth running while the GPU does something else: most of the suite's time is Triton's compiler. Triton's disk cache
hands the results over; what is missed here the tests compile themselves.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def compile_call(arguments: tuple[int, int]) -> str | None:
    """In a worker: the kernels of one random call; what went wrong, if anything did."""
    import torch
    from triton.backends.compiler import GPUTarget

    from torch_flashbackend.kernels.triton import attention as kernels
    from torch_flashbackend.ops import _mask_as_rank_4

    from common import random_call

    seed, capability = arguments
    torch.set_num_threads(1)
    call = random_call(seed, "cpu")
    mask = _mask_as_rank_4(call.attn_mask)
    try:
        kernels.compile_for(
            GPUTarget("cuda", capability, 32), call.query, call.key, call.value, mask, is_causal=call.is_causal,
            scale=call.softmax_scale, mask_gradient=call.mask_grad,
        )  # fmt: skip
    except Exception as error:
        return f"call {seed}: {type(error).__name__} {str(error)[:200]}"
    return None


def main() -> None:
    """Seeds as in test_gpu_samples.py: the calls themselves, then those on the automatic route."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--calls", type=int, default=500)
    options.add_argument("--workers", type=int, default=8)
    options.add_argument("--capability", type=int, default=90)
    chosen = options.parse_args()
    seeds = [*range(chosen.calls), *range(10_000, 10_000 + chosen.calls // 5)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(chosen.workers, mp_context=context) as pool:
        failures = [f for f in pool.map(compile_call, [(seed, chosen.capability) for seed in seeds]) if f]
    print(f"compiled the kernels of {len(seeds)} calls, {len(failures)} failed", *failures[:20], sep="\n")


if __name__ == "__main__":
    main()
