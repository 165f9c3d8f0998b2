"""set_batch_invariant: what is chosen for a call, on whichever level, is the same for every batch size."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
from test_cuda_decode import call as hopper_call
from test_cuda_decode import cuda  # noqa: F401  a fixture
from test_stored_plan import call_of as stored_call
from triton.backends.compiler import GPUTarget

import torch_flashbackend
from torch_flashbackend import __main__ as command_line
from torch_flashbackend import batch_invariance, decisions, routing
from torch_flashbackend.kernels.cuda import decode, forward
from torch_flashbackend.kernels.cuda import varlen as cuda_varlen
from torch_flashbackend.kernels.triton import kv_cache, mask_plan, stored_plan
from torch_flashbackend.kernels.triton.decode_plan import PLAIN
from torch_flashbackend.problem import Problem

H200 = "NVIDIA H200"
BATCHES = (1, 2, 8, 64, 300)


@pytest.fixture
def invariant():
    torch_flashbackend.set_batch_invariant(True)
    yield
    torch_flashbackend.set_batch_invariant(False)


def choices(kind):
    """What is chosen for a call of some kind in batches of BATCHES sizes."""
    return [kind(batch) for batch in BATCHES]


def route(seqlen_q, seqlen_k=None, **options):
    def of(batch):
        problem = Problem.from_shapes((batch, 32, seqlen_q, 128), kv_heads=8, seqlen_k=seqlen_k, gpu=H200, **options)
        problem = problem if not torch_flashbackend.is_batch_invariant() else _invariant(problem)
        return routing.decide(problem).backend

    return of


def _invariant(problem):
    return dataclasses.replace(problem, batch_invariant=True)


def triton_splits(batch):
    query = torch.empty(batch, 32, 1, 128, dtype=torch.bfloat16, device="meta")
    key, value = (torch.empty(batch, 8, 4096, 128, dtype=torch.bfloat16, device="meta") for _ in range(2))
    plan = kv_cache.plan_of(
        query, key, value, torch.empty_like(query), None, 0.1, PLAIN, target=GPUTarget("cuda", 90, 32)
    )
    return plan.splits, plan.merge is None


def hopper_splits(batch):
    return decode.takes(batch, 8, 1, 4096, 4, False) and decode.specialise(
        128, 128, torch.bfloat16, units=batch_invariance.planned_batch(batch) * 8, rows=4, seqlen_k=4096
    )


def lists(batch):
    return mask_plan.worth_listing((batch, 4, 1024, 64), 1024, (batch, 1, 1024, 1024))


def packed_tile(sequences):
    return cuda_varlen.specialise(64, 64, torch.bfloat16, True, keys=16384, sequences=sequences).tile


def stored(batch):
    return stored_plan.fits(stored_call((batch, 8, 2, 520, 777, 320), False))


KINDS = {
    "route of a decoding step": route(1, 1024),
    "Triton's splits": triton_splits,
    "the Hopper decoding kernel's splits": hopper_splits,
    "mask lists": lists,
    "tiles of packed sequences": packed_tile,
    "probabilities in memory": stored,
}


@pytest.mark.parametrize("kind", KINDS)
def test_choices_do_not_follow_the_batch(kind, invariant):
    assert len(set(choices(KINDS[kind]))) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_they_do_otherwise(kind):
    assert len(set(choices(KINDS[kind]))) > 1


def test_the_hopper_forward_has_one_tile(cuda, monkeypatch):  # noqa: F811
    def tiles():
        found = set()
        for batch in BATCHES:
            hopper_call(batch=batch, heads=2, seqlen_q=512, seqlen_k=512, head_dim=64)
            found.add(next(reversed(forward._plans.values())).specialisation.tile)
        return found

    assert len(tiles()) == 2
    torch_flashbackend.set_batch_invariant(True)
    try:
        forward._plans.clear()  # the fixture has put its own there
        assert len(tiles()) == 1
    finally:
        torch_flashbackend.set_batch_invariant(False)


def test_every_call_that_ours_can_run_is_ours(invariant):
    plain = _invariant(Problem.from_shapes((1, 8, 16, 64), gpu=H200))
    decision = routing.decide(plain)
    assert decision.backend in routing.KERNELS and decision.reason == "batch-invariant"
    assert routing.decide(_invariant(Problem.from_shapes((1, 8, 16, 64), gpu="cpu"))).backend == "stock"
    # What stock would raise for stays stock's.
    wrong = Problem.from_shapes((1, 8, 16, 64), seqlen_k=7, gpu=H200, is_causal=True, mask="bool")
    assert routing.decide(_invariant(wrong)).backend == "stock"


def test_turning_the_switch_forgets_decisions_plans_and_what_was_compiled():
    torch_flashbackend.enable()
    tag = torch.compiler.config.cache_key_tag
    try:
        decisions.cache[("kept",)] = decisions.Entry(routing.Decision("stock", "test", "query"), True, None)
        forward._plans[("kept",)] = None
        torch_flashbackend.set_batch_invariant(True)
        assert not decisions.cache and not forward._plans
        assert torch.compiler.config.cache_key_tag == f"{tag}-batch-invariant"
        torch_flashbackend.set_batch_invariant(False)
        assert torch.compiler.config.cache_key_tag == tag
    finally:
        torch_flashbackend.set_batch_invariant(False)
        torch_flashbackend.disable()


def test_a_problem_knows():
    query = torch.zeros(2, 2, 4, 8)
    assert not Problem.from_tensors(query, query, query).batch_invariant
    torch_flashbackend.set_batch_invariant(True)
    try:
        assert Problem.from_tensors(query, query, query).batch_invariant
        assert "batch-invariant" in str(torch_flashbackend.explain(query, query, query))
    finally:
        torch_flashbackend.set_batch_invariant(False)


def test_the_command_line_and_warmup_know(invariant, capsys):
    """They describe a call by its numbers alone."""
    assert Problem.from_shapes((2, 4, 64, 64), gpu="NVIDIA H200").batch_invariant
    assert command_line.main(["explain", "--shape", "2,16,256,128", "--gpu", "NVIDIA H200"]) == 0
    assert "no choice may depend on the batch size" in capsys.readouterr().out
    assert command_line.main(["info"]) == 0
    assert "the same bits in every batch" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [1, None, "yes"])
def test_it_takes_true_or_false(wrong):
    with pytest.raises(TypeError, match="takes True or False, got"):
        torch_flashbackend.set_batch_invariant(wrong)


@pytest.mark.parametrize(
    ("value", "expected"), [("1", True), ("TRUE", True), ("0", False), ("", False), ("yes", False)]
)
def test_the_environment_variable(value, expected):
    code = "import torch_flashbackend as t; print(t.is_batch_invariant())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"TORCH_FLASHBACKEND_BATCH_INVARIANT": value, "PATH": ""},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == str(expected), done.stderr
    assert ("is not understood" in done.stderr) == (value == "yes")
