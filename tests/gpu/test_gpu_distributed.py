"""torch.distributed around attention, over NCCL on all GPUs of this host (two or more)."""

from __future__ import annotations

import pytest
import torch
from test_distributed import launch

pytestmark = [
    pytest.mark.cuda_only,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize(
    "name", ["ddp", "fsdp", "tensor_parallel", "sharded_calls", "compiled_tensor_parallel", "context_parallel"]
)
def test_two_ranks(name):
    launch(name, 2, "cuda", timeout=500)


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs more than two GPUs")
@pytest.mark.parametrize("name", ["tensor_parallel", "context_parallel"])
def test_all_ranks(name):
    ranks = 1 << (torch.cuda.device_count().bit_length() - 1)
    launch(name, ranks, "cuda", timeout=500)
