"""torch.compile, dynamic shapes, CUDA graphs, export."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from common import attention_float64, check, expect, gradient_for, simple_call

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_results(function, call, grad_out):
    leaves = call.leaves()
    out = function(leaves.query, leaves.key, leaves.value, leaves.attn_mask)
    inputs = leaves.differentiable()
    gradients = torch.autograd.grad(out, list(inputs.values()), grad_out)
    return {"out": out.detach().clone(), **{n: g.clone() for n, g in zip(inputs, gradients)}}


@pytest.mark.parametrize("kind", ["dense", "causal", "bool", "bias_grad", "gqa"])
def test_compiled_forward_and_backward(plugin, launched, note, device, take_everything, kind):
    length = 256
    mask = None
    if kind == "bool":
        mask = torch.rand(2, 1, length, length, device=device) < 0.7
    if kind == "bias_grad":
        mask = torch.randn(1, 8, length, length, device=device, dtype=torch.bfloat16)
    call = simple_call(
        2, 8, length, head_dim=64, device=device, attn_mask=mask, mask_grad=kind == "bias_grad",
        kv_heads=2 if kind == "gqa" else None, is_causal=kind == "causal",
    )  # fmt: skip

    def attention(q, k, v, m):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=m, is_causal=call.is_causal, enable_gqa=call.enable_gqa
        )

    grad_out = gradient_for(call)
    function = torch.compile(attention, fullgraph=True)
    with launched():
        results = compiled_results(function, call, grad_out)
    note(check(results, expect(call, grad_out), None, f"compiled {kind}"))


@pytest.mark.cuda_only
def test_dynamic_lengths_compile_once(plugin, launched, note, device, take_everything):
    def attention(q, k, v, m):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    function = torch.compile(attention, fullgraph=True, dynamic=True)
    torch._dynamo.utils.counters.clear()
    for length in (512, 640, 192, 768):
        call = simple_call(2, 4, length, head_dim=64, device=device, is_causal=True)
        grad_out = gradient_for(call)
        with launched():
            results = compiled_results(function, call, grad_out)
        note(check(results, expect(call, grad_out), None, f"dynamic {length}"))
    frames = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
    assert frames <= 2, f"{frames} graphs for four lengths"


@pytest.mark.cuda_only
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_with_cuda_graphs(plugin, launched, note, take_everything, mode):
    """Training: forward and backward are replayed from graphs, each of whose steps must see its own inputs."""

    def attention(q, k, v, m):
        return F.scaled_dot_product_attention(q * 1.0, k, v, is_causal=True)

    function = torch.compile(attention, fullgraph=True, mode=mode)
    for step in range(5):
        call = simple_call(2, 4, 256, head_dim=64, is_causal=True, seed=10 * step)
        grad_out = gradient_for(call)
        torch.compiler.cudagraph_mark_step_begin()
        results = compiled_results(function, call, grad_out)
        note(check(results, expect(call, grad_out), None, f"{mode}, step {step}"))


def test_switching_the_plugin_recompiles(plugin, launched, device, take_everything):
    function = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), fullgraph=True)
    query = torch.randn(1, 4, 128, 64, device=device, dtype=torch.bfloat16)
    with launched():
        function(query)
    plugin.disable()
    with launched(False):
        function(query)
    plugin.enable()
    with launched():
        function(query)


def test_backend_selection_around_and_inside_compiled_code(plugin, launched, device, backend):
    query = torch.randn(1, 4, 128, 64, device=device, dtype=torch.bfloat16)

    def inside(q):
        with plugin.sdpa_backend(backend):
            q = F.scaled_dot_product_attention(q, q, q)
        return q

    around = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), fullgraph=True)
    with launched():
        torch.compile(inside, fullgraph=True)(query)
    with plugin.sdpa_backend("stock"), launched(False):
        around(query)
    with plugin.sdpa_backend(backend), launched():
        around(query)


def test_exported_program(plugin, launched, device, take_everything):
    class Attention(torch.nn.Module):
        def forward(self, query):
            return F.scaled_dot_product_attention(query, query, query, is_causal=True)

    query = torch.randn(1, 4, 128, 64, device=device, dtype=torch.bfloat16)
    program = torch.export.export(Attention(), (query,))
    with launched():
        out = program.module()(query)
    call = simple_call(1, 4, 128, head_dim=64, device=device, is_causal=True)
    call.query = call.key = call.value = query
    assert (out.double() - attention_float64(call)).abs().max() < 0.03


@pytest.mark.cuda_only
@pytest.mark.parametrize("compiled", [False, True])
def test_policies_of_selective_checkpointing_that_name_stocks_operators(plugin, launched, take_everything, compiled):
    """Kept by the policy, the forward runs once; recomputed, twice. The kernels are ours both times."""
    import functools

    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    named = {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }

    def forwards(kept):
        def policy(context, op, *args, **kwargs):
            return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.MUST_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)

        def function(q, k, v, m):
            block = lambda *t: F.scaled_dot_product_attention(*t, is_causal=True).relu()  # noqa: E731
            return checkpoint(block, q * 1.0, k, v, use_reentrant=False, context_fn=contexts)

        torch._dynamo.reset()
        call = simple_call(2, 4, 256, head_dim=64, is_causal=True)
        run = torch.compile(function, fullgraph=True) if compiled else function
        with launched():
            compiled_results(run, call, gradient_for(call))
            from torch_flashbackend import ops

            return sum(count for name, count in ops.launch_counts().items() if "forward" in name)

    assert forwards(named) == 1
    assert forwards(set()) == 2


@pytest.mark.cuda_only
def test_compiled_autograd(plugin, launched, note, take_everything):
    from torch._dynamo import compiled_autograd

    call = simple_call(2, 4, 256, head_dim=64, is_causal=True).leaves()
    grad_out = gradient_for(call)
    inputs = call.differentiable()
    with launched(), compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        out = call.run()
        out.backward(grad_out)
    grads = {name: tensor.grad for name, tensor in inputs.items()}
    note(check({"out": out.detach(), **grads}, expect(call, grad_out), None, "compiled autograd"))


@pytest.mark.cuda_only
def test_attention_written_by_hand_ends_in_ours_when_inductor_finds_it(plugin, launched, take_everything):
    from torch._dynamo.utils import counters

    counters.clear()
    query, key, value = (torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.float16) for _ in range(3))

    def attention(q, k, v):
        return (q @ k.transpose(-2, -1) / 8.0).softmax(-1) @ v

    with launched():
        out = torch.compile(attention, fullgraph=True)(query, key, value)
    assert counters["inductor"]["fuse_attention"] >= 1
    expected = attention(query.double(), key.double(), value.double())
    assert (out.double() - expected).abs().max() < 4e-3


WITHOUT_ATTENTION = """
import sys, torch
query = torch.randn(8, device="cuda")
with torch.no_grad():
    program = torch.export.export(torch.nn.ReLU(), (query,))
    torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1]))
"""
PACKAGED = """
import sys, torch, torch.nn.functional as F
import torch_flashbackend

class Attention(torch.nn.Module):
    def forward(self, query):
        return F.scaled_dot_product_attention(query, query * 0.5, query + 1.0, is_causal=True)

torch_flashbackend.enable()
query = torch.randn(1, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
with torch.no_grad():
    program = torch.export.export(Attention(), (query,))
    torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])
    torch.save((query, Attention()(query)), sys.argv[2])
"""
LOADED = """
import sys, torch
query, expected = torch.load(sys.argv[2])
with torch.no_grad():
    out = torch._inductor.aoti_load_package(sys.argv[1])(query)
torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
assert "torch_flashbackend.ops" not in sys.modules
"""


@pytest.mark.cuda_only
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_packages_of_aot_inductor_hold_stocks_operators(tmp_path):
    """Made in a process with the plugin, loaded in one without."""
    files = [str(tmp_path / "attention.pt2"), str(tmp_path / "tensors.pt")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | {"TORCH_FLASHBACKEND": ""}

    def run(script):
        command = [sys.executable, "-c", script, *files]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)

    # PyTorch's loader itself ends the process on some machines, for packages without attention and without this plugin.
    if run(WITHOUT_ATTENTION).returncode < 0:
        pytest.skip("PyTorch's AOTInductor cannot load its own packages on this machine")
    for script in (PACKAGED, LOADED):
        done = run(script)
        assert done.returncode == 0, (script, done.returncode, done.stderr[-2000:])
    package = (tmp_path / "attention.pt2").read_bytes()
    assert b"flashbackend::attention" not in package and b"flashbackend.attention" not in package


# ---------------------------------------------------------------------------------------------------------- CUDA graphs


def captured(function):
    """Runs `function` three times on a side stream, then captures it; returns the graph and its result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


@pytest.mark.cuda_only
@pytest.mark.parametrize("kind", ["dense", "causal", "bool", "bias_grad"])
def test_cuda_graph_of_forward_and_backward(plugin, launched, note, take_everything, kind):
    mask = None
    if kind == "bool":
        mask = torch.rand(2, 1, 256, 256, device="cuda") < 0.7
    if kind == "bias_grad":
        mask = torch.randn(1, 4, 256, 256, device="cuda")
    options = {"attn_mask": mask, "mask_grad": kind == "bias_grad", "is_causal": kind == "causal"}
    call = simple_call(2, 4, 256, head_dim=64, **options).leaves()
    grad_out = gradient_for(call)
    inputs = call.differentiable()

    def step():
        out = call.run()
        return {"out": out, **dict(zip(inputs, torch.autograd.grad(out, list(inputs.values()), grad_out)))}

    with launched():
        graph, results = captured(step)
    fresh = simple_call(2, 4, 256, head_dim=64, seed=77)
    with torch.no_grad():
        for name in ("query", "key", "value"):
            getattr(call, name).copy_(getattr(fresh, name))
    graph.replay()
    torch.cuda.synchronize()
    note(check(results, expect(call, grad_out), None, f"CUDA graph {kind}"))


@pytest.mark.cuda_only
def test_dropout_in_a_cuda_graph_differs_from_replay_to_replay_and_follows_the_seed(plugin, launched, take_everything):
    call = simple_call(1, 2, 128, head_dim=64).leaves()
    grad_out = gradient_for(call)

    def step():
        out = F.scaled_dot_product_attention(call.query, call.key, call.value, dropout_p=0.5)
        return [out, *torch.autograd.grad(out, (call.query, call.key, call.value), grad_out)]

    with launched():
        graph, results = captured(step)

    def replay():
        graph.replay()
        torch.cuda.synchronize()
        return [r.clone() for r in results]

    torch.manual_seed(21)
    first, second = replay(), replay()
    torch.manual_seed(21)
    again = replay()
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not any(torch.equal(a, b) for a, b in zip(first, second))
