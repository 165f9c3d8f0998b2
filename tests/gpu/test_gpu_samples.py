"""PyTorch's own sample inputs of scaled_dot_product_attention, and random calls from fixed seeds."""

from __future__ import annotations

import functools
import os
import sys
import types
import unittest

import pytest
import torch

from common import Call, random_call

RANDOM_CALLS = int(os.environ.get("FLASHBACKEND_RANDOM_CALLS", "500"))
CHUNK = 5
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@functools.cache
def _sample_inputs():
    # torch.testing._internal imports expecttest for its own tests; the sample inputs do not need it.
    try:
        import expecttest  # noqa: F401
    except ImportError:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        stub.assert_expected_inline = None
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_methods_invocations import sample_inputs_scaled_dot_product_attention

    return sample_inputs_scaled_dot_product_attention


@pytest.mark.parametrize("automatic", [False, True], ids=["forced", "auto"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_of_pytorch(check_call, device, dtype, automatic):
    torch.manual_seed(0)
    number = 0
    for sample in _sample_inputs()(None, device, dtype, False):
        options = dict(sample.kwargs)
        if options.pop("dropout_p", 0.0):
            continue  # random: tested by its own properties
        call = Call(sample.input, *sample.args, note=f"sample {number}", mask_grad=True, **options)
        # Ranks that differ are stock's: only the automatic route knows what to do with them.
        check_call(call, automatic=automatic or call.query.dim() != call.key.dim())
        number += 1
    assert number >= 10


@pytest.mark.parametrize("first", range(0, RANDOM_CALLS, CHUNK))
def test_random_calls(check_call, device, first):
    for seed in range(first, min(first + CHUNK, RANDOM_CALLS)):
        check_call(random_call(seed, device))


@pytest.mark.cuda_only
@pytest.mark.parametrize("first", range(0, RANDOM_CALLS // 5, CHUNK))
def test_random_calls_on_the_automatic_route(check_call, device, take_everything, first):
    for seed in range(10_000 + first, 10_000 + min(first + CHUNK, RANDOM_CALLS // 5)):
        check_call(random_call(seed, device), automatic=True)
