"""stats(): counting calls through Decisions that a cache keeps and forgets."""

from __future__ import annotations

import subprocess
import sys

import pytest

import torch_flashbackend
from torch_flashbackend.routing import Decision
from torch_flashbackend.stats import register, reset_stats, retire, stats


@pytest.fixture(autouse=True)
def fresh():
    reset_stats()
    yield
    reset_stats()


def decision(backend="triton", reason="measured faster: dense", calls=0):
    return Decision(backend, reason, "query", calls=calls)


def test_counts_by_backend_and_reason():
    first, second, third = decision(), decision(), decision("stock", "measured slower")
    for each in (first, second, third):
        register(each)
    first.calls += 3
    second.calls += 4
    third.calls += 1
    try:
        assert stats()["calls"] == {"triton": {"measured faster: dense": 7}, "stock": {"measured slower": 1}}
        assert stats().total("triton") == 7
    finally:
        for each in (first, second, third):
            retire(each)


def test_counts_survive_the_cache():
    kept = decision()
    register(kept)
    kept.calls += 5
    retire(kept)
    retire(kept)
    kept.calls += 100  # no longer ours to count
    assert stats().total("triton") == 5


def test_traced_calls_are_counted_apart():
    register(decision(), traced=True)
    assert stats()["traced"] == {"triton": {"measured faster: dense": 1}}
    assert stats()["calls"] == {}
    assert stats().total("triton", "traced") == 1


def test_reset_also_sets_live_decisions_to_zero():
    live = decision()
    register(live)
    live.calls += 5
    reset_stats()
    assert stats()["calls"] == {}
    live.calls += 1
    assert stats().total("triton") == 1
    retire(live)


def test_it_prints_as_a_table():
    assert "no calls yet" in str(stats())
    counted = decision(calls=12)
    register(counted)
    register(decision("stock", "device"), traced=True)
    lines = str(stats()).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["backend", "calls", "traced", "reason"],
        ["stock", "0", "1", "device"],
        ["triton", "12", "0", "measured", "faster:", "dense"],
    ]
    retire(counted)


def test_verify_results_are_part_of_it():
    from torch_flashbackend import verify

    verify._results.update(checked=3, failed=1, worst=2.5)
    assert stats()["verify"]["failed"] == 1
    assert "verify: 3 checked, 1 above tolerance, 0 skipped, worst 2.5 of the tolerance" in str(stats())
    reset_stats()
    assert stats()["verify"]["checked"] == 0


def test_the_module_and_the_function_are_one_object_in_either_order():
    import torch_flashbackend.stats as module

    assert torch_flashbackend.stats is module is stats
    assert callable(torch_flashbackend.stats)


def test_counting_does_not_import_the_kernels():
    code = (
        "import sys, torch\nbefore = set(sys.modules)\n"
        "import torch_flashbackend\nprint(torch_flashbackend.stats())\n"
        "import torch_flashbackend.routing, torch_flashbackend.explain, torch_flashbackend.verify\n"
        "new = set(sys.modules) - before\n"
        "assert not new & {'triton', 'torch._dynamo', 'sympy'}, sorted(new)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
