"""torch.distributed around attention, over NCCL on all GPUs of this host (two or more)."""

from __future__ import annotations

import pytest
import torch
from test_distributed import Ranks, launch

pytestmark = [
    pytest.mark.cuda_only,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

# Importing PyTorch and compiling kernels take most of the time, so the groups run side by side.
GROUPS = ("ddp,fsdp,tensor_parallel", "sharded_calls,compiled_tensor_parallel", "context_parallel")


@pytest.fixture(scope="module")
def started():
    groups = {names: Ranks(names, 2, "cuda") for names in GROUPS}
    yield groups
    for group in groups.values():
        group.kill()


@pytest.mark.parametrize("names", GROUPS)
def test_two_ranks(started, names):
    started[names].finish(timeout=150)


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs more than two GPUs")
@pytest.mark.parametrize("name", ["tensor_parallel", "context_parallel"])
def test_all_ranks(name):
    ranks = 1 << (torch.cuda.device_count().bit_length() - 1)
    launch(name, ranks, "cuda", timeout=150)
