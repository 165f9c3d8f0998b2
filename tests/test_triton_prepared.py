"""Triton's kernels once more, for calls that differ in addresses alone: they are launched as a plan launches them."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch

pytest.importorskip("triton")

from test_triton_launch import launched  # noqa: F401  a fixture

from torch_flashbackend import _torch, ops
from torch_flashbackend.kernels import KernelUnavailable
from torch_flashbackend.kernels.triton import attention, launch, mask_plan
from torch_flashbackend.plans import Repeat

DTYPE = torch.bfloat16


class Arena:
    """An allocator that gives the same memory for the same requests each time round."""

    def __init__(self):
        self.made, self.count = [], 0

    def __call__(self, shape, strides, dtype):
        assert type(shape) is type(strides) is tuple  # all that CUDA's allocator takes
        if self.count == len(self.made):
            self.made.append(torch.empty_strided(shape, strides, dtype=dtype))
        tensor = self.made[self.count]
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (shape, strides, dtype)
        self.count += 1
        return tensor


@pytest.fixture
def arena(monkeypatch, launched):  # noqa: F811
    arena = Arena()
    lists = torch.empty(4096, dtype=torch.int64)
    monkeypatch.setattr(_torch, "allocator", lambda like: arena)
    monkeypatch.setattr(mask_plan, "_buffer", lambda size, device: lists)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return arena


def inputs(mask=None, head_dim=64, shared=False):
    """Query, key and value; and a mask of this kind, or none."""
    query, key, value = (
        torch.empty(2, heads, length, head_dim, dtype=DTYPE) for heads, length in ((4, 40), *[(2, 48)] * 2)
    )
    masks = {
        None: (),
        "bool": (torch.ones(2, 1, 1, 48, dtype=torch.bool),),
        "float": (torch.zeros(40, 48, dtype=DTYPE),),
    }
    return query, key, value, *masks[mask]


def ran(launched, arena, function, *tensors):  # noqa: F811
    """What a function returns, and its launches."""
    arena.count = 0
    ops.reset_launch_counts()
    result = function(*tensors)
    calls = [*launched]
    launched.clear()
    assert sum(ops.launch_counts().values()) == len(calls)
    return result, calls


MASKS = [(None, False), ("bool", False), ("bool", True), ("float", False), ("float", True)]


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize(("mask", "listed"), MASKS)
def test_a_prepared_forward(launched, arena, monkeypatch, mask, listed, needs_grad):  # noqa: F811
    monkeypatch.setattr(attention, "worth_listing", lambda *_: listed)
    first = inputs(mask)
    ready = ops.ReadyRun("triton", needs_grad)._prepare(*first[:3], first[3] if mask else None, False, 0.3, "query")
    assert ready.run is not ready
    arena.made.clear()
    for tensors in (first, inputs(mask)):
        (out, logsumexp), expected = ran(launched, arena, ready, *tensors)
        (again, logsumexp_again), calls = ran(launched, arena, ready.run, *tensors)
        assert again is out and logsumexp_again is logsumexp
        assert (logsumexp is not None) == needs_grad
        assert calls == expected and len(calls) == (3 if listed else 1) - (listed and mask is None)


def backward_of(mask, wanted=(True, True, True), head_dim=64, dropout_p=0.0, needs_mask=False):
    """(the backward for repeats, tensors that it takes)."""

    def tensors():
        query, key, value, *masks = inputs(mask, head_dim)
        out = torch.empty(query.shape, dtype=DTYPE)
        logsumexp = torch.empty((2,) * (mask == "float") + query.shape[:3])
        return torch.empty(query.shape, dtype=DTYPE), query, key, value, out, logsumexp, *masks

    grad_out, query, key, value, out, logsumexp, *masks = tensors()
    rank_4 = ops._mask_as_rank_4(masks[0]) if masks else None
    seed = torch.zeros(1, dtype=torch.int64) if dropout_p else None
    grad_query = torch.empty_like(query) if wanted[0] else None
    both = (torch.empty_like(key), torch.empty_like(value)) if any(wanted[1:]) else (None, None)
    plan = attention.plan_of_backward(
        grad_out, query, key, value, rank_4, out, logsumexp, seed, dropout_p, False, 0.3, grad_query, *both,
        needs_mask, False,
    )  # fmt: skip
    return Repeat(plan, (grad_query, *both), (*wanted, needs_mask)), tensors


@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, False, True)], ids=str)
@pytest.mark.parametrize(("mask", "listed"), MASKS)
def test_a_prepared_backward(launched, arena, monkeypatch, mask, listed, wanted):  # noqa: F811
    monkeypatch.setattr(attention, "worth_listing", lambda *_: listed)
    repeat, tensors = backward_of(mask, wanted)
    prepared = repeat.prepared(tensors()[1])
    assert prepared is not repeat
    for _ in range(2):
        given = tensors()
        grads, expected = ran(launched, arena, repeat, *given)
        again, calls = ran(launched, arena, prepared, *given)
        assert [grad is not None for grad in again] == [*wanted, False]
        assert all(one is other for one, other in zip(grads, again, strict=True))
        assert calls == expected
        assert ("attention_backward_key_value" in [name for name, _, _ in calls]) == any(wanted[1:])


@pytest.mark.parametrize("place", range(7))
def test_a_misaligned_address_is_refused_before_any_launch(launched, arena, place):  # noqa: F811
    repeat, tensors = backward_of("bool")
    prepared = repeat.prepared(tensors()[1])
    given = [*tensors()]
    like = given[place]
    given[place] = torch.empty(like.numel() + 1, dtype=like.dtype)[1:].view(like.shape)
    for function in (repeat, prepared):
        if place == 5:  # nothing is read of a logsumexp in vectors
            function(*given)
            assert launched.pop()
            continue
        with pytest.raises(KernelUnavailable):
            function(*given)
        assert not launched


@pytest.mark.parametrize("reason", ["another device", "a profiler"])
def test_who_watches_and_another_device_take_the_long_way(launched, arena, monkeypatch, reason):  # noqa: F811
    query, key, value = inputs()
    ready = ops.ReadyRun("triton", True)._prepare(query, key, value, None, True, None, "query")
    repeat, tensors = backward_of(None)
    prepared = repeat.prepared(query)
    arena.made.clear()
    arena.count, described = 0, []
    monkeypatch.setattr(launch.Launch, "_launch_described", lambda self, given: described.append((self.name, given)))
    if reason == "another device":
        monkeypatch.setattr(launch, "_current_device", lambda: 1)
    else:
        monkeypatch.setattr(launch, "is_watched", lambda: True)
    out, _ = ready.run(query, key, value)
    assert out is arena.made[0]
    prepared(*tensors())
    names = ["attention_forward", "attention_backward_query", "attention_backward_key_value"]
    assert [name for name, *_ in (described if reason == "a profiler" else launched)] == names


@pytest.mark.parametrize(
    "options", [{"dropout_p": 0.5}, {"mask": "float", "needs_mask": True}, {"head_dim": 512}], ids=str
)
@pytest.mark.parametrize("stored", [False, True])
def test_what_takes_more_than_two_kernels_is_not_prepared(launched, arena, monkeypatch, options, stored):  # noqa: F811
    """stored: of two ways to compute wide keys' gradients, by probabilities kept in memory."""
    monkeypatch.setattr(attention, "scores_are_stored", lambda _: stored)
    repeat, tensors = backward_of(**{"mask": None} | options)
    assert repeat.prepared(tensors()[1]) is repeat


def test_lists_of_a_masks_tiles_live_until_the_launch(launched, arena, monkeypatch):  # noqa: F811
    """They may be memory of this call alone, which others could have as soon as nobody refers to it."""
    made, alive = [], []

    def buffer(size, device):
        lists = torch.empty(size, dtype=torch.int64)
        made.append(weakref.ref(lists))
        return lists

    monkeypatch.setattr(attention, "worth_listing", lambda *_: True)
    query, key, value, mask = inputs("bool")
    ready = ops.ReadyRun("triton", True)._prepare(query, key, value, mask, False, None, "query")
    repeat, tensors = backward_of("bool")
    prepared = repeat.prepared(query)
    monkeypatch.setattr(mask_plan, "_buffer", buffer)
    monkeypatch.setattr(launch, "_current_stream", lambda index: alive.append(made[-1]() is not None))
    arena.made.clear()
    arena.count = 0
    ready.run(query, key, value, mask)
    prepared(*tensors())
    assert len(made) == 2 and alive and all(alive)
