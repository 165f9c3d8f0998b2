"""Whose memory the lists of a mask's tiles take: nobody's who may still need it."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from torch_flashbackend.kernels.triton import mask_plan

GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def stream(monkeypatch):
    """A GPU whose current stream and capture are what this says."""
    state = SimpleNamespace(number=7, capturing=False)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: empty(size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(mask_plan, "_current_stream", lambda index: state.number + 100 * index)
    monkeypatch.setattr(mask_plan, "_thread", threading.local())
    return state


def buffer(size=100, device=GPU):
    return mask_plan._buffer(size, device).data_ptr()


def test_calls_of_a_thread_on_a_stream_share_one_buffer_that_grows(stream):
    first = buffer()
    assert buffer() == buffer(2**13) == first
    larger = mask_plan._buffer(2**13 + 1, GPU)
    assert larger.numel() == 2**13 + 1 and buffer() == larger.data_ptr()


def test_other_streams_devices_and_threads_have_others(stream):
    found = [mask_plan._buffer(100, GPU), mask_plan._buffer(100, OTHER)]
    stream.number = 8
    found.append(mask_plan._buffer(100, GPU))
    thread = threading.Thread(target=lambda: found.append(mask_plan._buffer(100, GPU)))
    thread.start()
    thread.join()
    assert len({tensor.data_ptr() for tensor in found}) == 4


def test_captured_calls_large_ones_and_those_of_a_cpu_keep_nothing(stream):
    kept = buffer()
    stream.capturing = True
    captured = [mask_plan._buffer(100, GPU) for _ in range(2)]
    stream.capturing = False
    others = [mask_plan._buffer(mask_plan._KEPT + 1, GPU) for _ in range(2)]
    others += [mask_plan._buffer(100, torch.device("cpu")) for _ in range(2)]
    assert len({kept, *(tensor.data_ptr() for tensor in (*captured, *others))}) == 7
    assert all(tensor.numel() == 100 for tensor in (*captured, *others[2:]))
