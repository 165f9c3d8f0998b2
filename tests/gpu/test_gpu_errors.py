"""Wrong calls raise what PyTorch raises; kernels that cannot be had fall back to it; verify mode finds nothing."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from common import check, expect, forget_plans, gradient_for, random_call, results_of, simple_call

ROOT = Path(__file__).resolve().parents[2]
B, H, S, D = 2, 4, 64, 64


def tensor(*shape, dtype=torch.bfloat16, device="cuda"):
    return torch.randn(*shape, device=device).to(dtype)


def wrong_calls(device):
    """name -> (arguments, options); made when asked for, since a few need a GPU."""

    def t(*shape, dtype=torch.bfloat16):
        return tensor(*shape, dtype=dtype, device=device)

    q = t(B, H, S, D)
    return {
        "head_dim of key": ((q, t(B, H, S, D + 8), q), {}),
        "length of value": ((q, q, t(B, H, S + 1, D)), {}),
        "batch": ((q, t(B + 1, H, S, D), t(B + 1, H, S, D)), {}),
        "heads": ((q, t(B, 3, S, D), t(B, 3, S, D)), {}),
        "heads with gqa": ((q, t(B, 3, S, D), t(B, 3, S, D)), {"enable_gqa": True}),
        "kv heads differ with gqa": ((q, t(B, 2, S, D), t(B, 1, S, D)), {"enable_gqa": True}),
        "rank 1": ((t(D), t(D), t(D)), {}),
        "mixed ranks": ((q, t(H, S, D), t(H, S, D)), {}),
        "mixed dtypes": ((q, q.half(), q), {}),
        "mixed dtypes of value": ((q, q, q.float()), {}),
        "integers": ((q.int(), q.int(), q.int()), {}),
        "mask dtype": ((q, q, q), {"attn_mask": torch.ones(S, S, dtype=torch.int32, device=device)}),
        "mask double": ((q, q, q), {"attn_mask": torch.zeros(S, S, dtype=torch.float64, device=device)}),
        "mask half": ((q, q, q), {"attn_mask": torch.zeros(S, S, dtype=torch.float16, device=device)}),
        "mask size": ((q, q, q), {"attn_mask": torch.zeros(S, S + 1, dtype=torch.bfloat16, device=device)}),
        "mask enlarges": ((q[:1], q[:1], q[:1]), {"attn_mask": t(3, 1, S, S)}),
        "mask rank": ((q, q, q), {"attn_mask": t(1, B, H, S, S)}),
        "mask and causal": ((q, q, q), {"attn_mask": t(S, S), "is_causal": True}),
        "dropout above one": ((q, q, q), {"dropout_p": 1.5}),
        "dropout below zero": ((q, q, q), {"dropout_p": -0.5}),
        "no tensor": ((q, q, None), {}),
        "unknown option": ((q, q, q), {"window": 3}),
        "mixed devices": ((q, q.cpu(), q.cpu()), {}),
    }


NAMES = (
    "head_dim of key", "length of value", "batch", "heads", "heads with gqa", "kv heads differ with gqa", "rank 1",
    "mixed ranks", "mixed dtypes", "mixed dtypes of value", "integers", "mask dtype", "mask double", "mask half",
    "mask size", "mask enlarges", "mask rank", "mask and causal", "dropout above one", "dropout below zero",
    "no tensor", "unknown option", "mixed devices",
)  # fmt: skip


def outcomes(device):
    """{(name, training): what the call did}; printed as each ends, since some of PyTorch's kernels end the process."""
    for name in NAMES:
        for training in (False, True):
            arguments, options = wrong_calls(device)[name]
            if training:
                arguments = tuple(
                    t.detach().requires_grad_() if t is not None and t.is_floating_point() else t for t in arguments
                )
            try:
                torch.manual_seed(0)
                out = F.scaled_dot_product_attention(*arguments, **options)
                if device != "cpu":
                    torch.cuda.synchronize()
                result = [type(out).__name__, list(out.shape), str(out.dtype)]
            except Exception as error:  # compared by the test
                result = [type(error).__name__, str(error).splitlines()[0]]
            yield name, training, result


def run_one_process(device, plugged, skip):
    """Lines of [name, training, result] from a process of its own, up to the call that ended it, if one did."""
    code = (
        "import json, sys; sys.path[:0] = ['tests', 'tests/gpu']\n"
        "import test_gpu_errors as t, torch_flashbackend as p\n"
        f"if {plugged}: p.enable()\n"
        f"t.NAMES = [n for n in t.NAMES if n not in {sorted(skip)!r}]\n"
        f"for line in t.outcomes({device!r}): print(json.dumps(line), flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    return [json.loads(line) for line in done.stdout.splitlines()], done.returncode, done.stderr


def test_wrong_calls_do_what_stock_does(device):
    """Type and text of each error, and which calls PyTorch accepts. A call that ends PyTorch's process is left out."""
    stock, fatal = {}, set()
    for _ in range(len(NAMES)):
        lines, status, _ = run_one_process(device, False, fatal)
        stock = {(name, training): result for name, training, result in lines}
        missing = [n for n in NAMES if n not in fatal and not {(n, False), (n, True)} <= stock.keys()]
        broken = [key[0] for key, result in stock.items() if "CUDA error" in str(result)]
        if status == 0 and not broken:
            break
        fatal.add(broken[0] if broken else missing[0])
    assert len(fatal) <= 6, f"too many calls end PyTorch's own process: {sorted(fatal)}"
    lines, status, errors = run_one_process(device, True, fatal)
    ours = {(name, training): result for name, training, result in lines}
    assert status == 0, errors
    assert ours == stock


# ------------------------------------------------------------------------------------------------------------ fallbacks

# A head_dim that no other backend of ours takes: the tests below break Triton's path.
TRITONS = 60


@pytest.fixture
def fresh_warnings(monkeypatch):
    from torch_flashbackend import decisions

    monkeypatch.setattr(decisions, "_warned", set())


@pytest.fixture
def no_plans(take_everything):
    """No launch is prepared: each call compiles, or tries to."""
    forget_plans()
    yield
    forget_plans()


def three_calls(call, grad_out):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [results_of(call, grad_out) for _ in range(3)]
    return results, [w for w in caught if "torch_flashbackend" in str(w.message) or "PyTorch runs" in str(w.message)]


@pytest.mark.cuda_only
@pytest.mark.parametrize("training", [False, True])
def test_a_kernel_that_does_not_compile_falls_back_with_one_warning(
    plugin, launched, note, no_plans, fresh_warnings, monkeypatch, training
):
    from torch_flashbackend.kernels.triton import launch

    def broken(*arguments, **options):
        raise RuntimeError("ptxas: no such instruction (forced by a test)")

    monkeypatch.setattr(launch, "compile_kernel", broken)
    call = simple_call(B, H, S, head_dim=TRITONS)
    grad_out = gradient_for(call) if training else None
    with launched(False):
        results, caught = three_calls(call, grad_out)
    assert len(caught) == 1, [str(w.message) for w in caught]
    for result in results:
        note(check(result, expect(call, grad_out), None, "compile failure"))


@pytest.mark.cuda_only
@pytest.mark.parametrize("training", [False, True])
def test_out_of_memory_falls_back_with_one_warning(
    plugin, launched, note, take_everything, fresh_warnings, monkeypatch, training
):
    from torch_flashbackend.kernels.triton import attention

    def full(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory (forced by a test)")

    monkeypatch.setattr(attention, "plan_of_forward", full)
    call = simple_call(B, H, S, head_dim=TRITONS)
    grad_out = gradient_for(call) if training else None
    with launched(False):
        results, caught = three_calls(call, grad_out)
    assert len(caught) == 1, [str(w.message) for w in caught]
    for result in results:
        note(check(result, expect(call, grad_out), None, "out of memory"))


@pytest.mark.cuda_only
def test_a_backward_that_does_not_compile_is_computed_all_the_same(plugin, note, no_plans, fresh_warnings, monkeypatch):
    from torch_flashbackend.kernels.triton import launch

    compile_kernel = launch.compile_kernel

    def broken(kernel, *arguments, **options):
        if "forward" not in kernel.__name__:
            raise RuntimeError("ptxas: no such instruction (forced by a test)")
        return compile_kernel(kernel, *arguments, **options)

    monkeypatch.setattr(launch, "compile_kernel", broken)
    call = simple_call(B, H, S, head_dim=TRITONS, is_causal=True)
    grad_out = gradient_for(call)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = results_of(call, grad_out)
    note(check(results, expect(call, grad_out), None, "backward compile failure"))


@pytest.mark.cuda_only
def test_a_real_error_is_not_swallowed(plugin, take_everything, monkeypatch):
    from torch_flashbackend.kernels.triton import attention

    def wrong(*arguments, **options):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(attention, "plan_of_forward", wrong)
    with pytest.raises(ZeroDivisionError):
        simple_call(B, H, S, head_dim=TRITONS).run()


# --------------------------------------------------------------------------------------------------------------- verify


@pytest.mark.cuda_only
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_verify_mode_finds_nothing(plugin, take_everything, first):
    verify = importlib.import_module("torch_flashbackend.verify")
    verify.reset()
    verify.set_verify(1.0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            for seed in range(20_000 + first, 20_000 + first + 10):
                call = random_call(seed, "cuda")
                results_of(call, gradient_for(call))
    finally:
        verify.set_verify(0.0)
    found = verify.results()
    assert found["failed"] == 0, found
    assert found["checked"] > 0, found
