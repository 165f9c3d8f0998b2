"""torch.compile around the hook and around sdpa_backend, on a CPU. Each test is a process: compile state is global."""

from __future__ import annotations

import pytest
from hooked import NO_VIEWS_IN_INFERENCE_MODE, run_python

SETUP = """
import torch, torch.nn.functional as F, torch._dynamo
from hooked import hooked, counting, leave_all, take_valid, sample
import torch_flashbackend
from torch_flashbackend import sdpa_backend, override, routing
sdpa = F.scaled_dot_product_attention
graphs = []

def recorder(gm, inputs):
    from functorch.compile import make_boxed_func
    graphs.append([str(n.target) for n in gm.graph.nodes if n.op == "call_function"])
    return make_boxed_func(gm.forward)

def recording(dynamic=False, fullgraph=True):
    from torch._dynamo.backends.common import aot_autograd
    return lambda f: torch.compile(f, backend=aot_autograd(fw_compiler=recorder, bw_compiler=recorder),
                                   dynamic=dynamic, fullgraph=fullgraph)

def has(name):
    return [sum(name in target for target in graph) for graph in graphs]
"""


def run(code, **environment):
    import textwrap

    return run_python(SETUP + textwrap.dedent(code), **environment)


def test_forward_and_backward_are_ours_in_one_graph_each():
    run("""
        qkv = [sample(2, 3, 8, 16, seed=i, grad=True) for i in range(3)]
        bias = sample(1, 3, 8, 8, seed=4, grad=True)
        f = lambda q, k, v, b: sdpa(q, k, v, b) * 2
        expected = f(*qkv, bias)
        grads = torch.autograd.grad(expected.sum(), [*qkv, bias])
        with hooked():
            g = recording()(f)
            out = g(*qkv, bias)
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(torch.autograd.grad(out.sum(), [*qkv, bias]), grads)
            assert has("flashbackend.attention_forward") == [1, 0], graphs
            assert has("flashbackend.attention_backward") == [0, 1], graphs
            with torch.no_grad():
                torch.testing.assert_close(g(*qkv, bias), expected)
            assert has("flashbackend.attention.default")[2] == 1, graphs
            q = qkv[0]
            same = recording()(lambda q: sdpa(q, q, q))
            wanted = torch.autograd.grad(sdpa(q, q, q).sum(), q)
            torch.testing.assert_close(torch.autograd.grad(same(q).sum(), q), wanted)
    """)


def test_inductor():
    run("""
        qkv = [sample(2, 3, 8, 16, seed=i, grad=True) for i in range(3)]
        f = lambda q, k, v: (sdpa(q, k, v, is_causal=True) + 1).transpose(1, 2).flatten(2)
        expected = f(*qkv)
        grads = torch.autograd.grad(expected.sum(), qkv)
        with hooked(), counting() as count:
            g = torch.compile(f, fullgraph=True)
            for layout in (lambda t: t, lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)):
                inputs = [layout(t) for t in qkv]
                out = g(*inputs)
                torch.testing.assert_close(out, expected)
                torch.testing.assert_close(torch.autograd.grad(out.sum(), qkv), grads)
            assert count("triton")
    """)


def test_dynamic_shapes_compile_once():
    run("""
        with hooked():
            g = recording(dynamic=True)(lambda q, k, v: sdpa(q, k, v, is_causal=True))
            for length in (16, 24, 13, 8, 40):
                qkv = [sample(2, 3, length, 32, seed=i, grad=True) for i in range(3)]
                out = g(*qkv)
                torch.testing.assert_close(out, sdpa(*qkv, is_causal=True))
                out.sum().backward()
            assert len(graphs) == 2, len(graphs)
            assert has("flashbackend.attention_forward") == [1, 0]
        graphs.clear()
        torch._dynamo.reset()
        with hooked(leave_all):
            g = recording(dynamic=True)(lambda q, k, v: sdpa(q, k, v, is_causal=True))
            for length in (16, 24, 13, 8, 40):
                qkv = [sample(2, 3, length, 32, seed=i) for i in range(3)]
                torch.testing.assert_close(g(*qkv), sdpa(*qkv, is_causal=True))
            assert len(graphs) == 1 and not any(has("flashbackend"))
    """)


def test_real_routing_puts_no_guard_on_symbolic_sizes():
    """Fake CUDA tensors: what a machine with a GPU would trace."""
    run("""
        from torch._dynamo.source import ConstantSource
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
        torch_flashbackend.enable()
        env = ShapeEnv()

        def size(name, hint):
            source = ConstantSource(name)
            symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
            return env.create_symintnode(symbol, hint=hint, source=source)

        batch, seqlen_q, seqlen_k = size("b", 2), size("q", 96), size("k", 160)
        with FakeTensorMode(shape_env=env), counting() as count:
            q = torch.empty(batch, 4, seqlen_q, 64, device="cuda", dtype=torch.bfloat16)
            k = torch.empty(batch, 4, seqlen_k, 64, device="cuda", dtype=torch.bfloat16)
            mask = torch.empty(batch, 1, seqlen_q, seqlen_k, device="cuda", dtype=torch.bool)
            before = len(env.guards)
            out = sdpa(q, k, k, mask)
            assert count("triton") == 1
            assert len(env.guards) == before, env.guards
            assert str(out.shape[2]) == str(seqlen_q)
    """)


def test_compiled_before_enabling_and_after_disabling():
    run("""
        qkv = [sample(2, 3, 8, 16, seed=i) for i in range(3)]
        g = recording()(sdpa)
        expected = g(*qkv)
        assert has("flashbackend") == [0]
        for _ in range(2):
            graphs.clear()
            with hooked():
                torch.testing.assert_close(g(*qkv), expected)
                assert has("flashbackend") == [1], graphs
            torch.testing.assert_close(g(*qkv), expected)
            assert has("flashbackend") == [1, 0], graphs
    """)


CACHED = """
    import os, torch._inductor.config, torch._functorch.config
    from torch._dynamo.utils import counters
    torch._functorch.config.enable_autograd_cache = True
    torch._inductor.config.fx_graph_cache = True
    qkv = [sample(2, 3, 8, 16, seed=i) for i in range(3)]
    expected = sdpa(*qkv)
    def call():
        with torch.no_grad(), counting() as count:
            torch.testing.assert_close(torch.compile(sdpa, fullgraph=True)(*qkv), expected)
            traced = count("triton") > 0
        hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
        return traced, hits > 0
    if os.environ["PLUGIN"] == "on":
        with hooked():
            print(*call())
    else:
        print(*call())
"""


@pytest.mark.parametrize("first, second", [("off", "on"), ("on", "off")])
def test_caches_on_disk_are_not_shared_between_on_and_off(tmp_path, first, second):
    def call(plugin):
        return run(CACHED, PLUGIN=plugin, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)).split()

    assert call(first) == [str(first == "on"), "False"]
    assert call(second) == [str(second == "on"), "False"]
    # The same state again is served from the cache.
    assert call(second)[1] == "True"


def test_sdpa_backend_around_and_inside_compiled_code():
    run("""
        qkv = [sample(2, 3, 8, 16, seed=i, grad=True) for i in range(3)]
        expected = sdpa(*qkv)
        grads = torch.autograd.grad(expected.sum(), qkv)
        for plugin in (False, True):
            torch._dynamo.reset()
            graphs.clear()
            import contextlib
            with hooked() if plugin else contextlib.nullcontext():
                # Around: entering and leaving recompile at most once each, and the innermost name counts.
                g = recording()(sdpa)
                for _ in range(2):
                    for name in (None, "math", "stock", "math"):
                        with counting() as count, sdpa_backend(name) if name else contextlib.nullcontext():
                            torch.testing.assert_close(g(*qkv), expected)
                assert len(graphs) == 3, len(graphs)
                assert has("flashbackend") == [int(plugin), 0, 0], graphs
                assert has("flash_attention_for_cpu") == [int(not plugin), 0, 1], graphs
                # Inside.
                graphs.clear()

                @recording()
                def inside(q, k, v):
                    with sdpa_backend("math"):
                        a = sdpa(q, k, v)
                        with sdpa_backend("stock"):
                            b = sdpa(q, k, v)
                    return a, b, sdpa(q, k, v)

                outs = inside(*qkv)
                for out in outs:
                    torch.testing.assert_close(out, expected)
                    torch.testing.assert_close(torch.autograd.grad(out.sum(), qkv, retain_graph=True), grads)
                assert has("flash_attention_for_cpu")[0] == (1 if plugin else 2), graphs[0]
                assert has("flashbackend")[0] == int(plugin), graphs[0]

                # As a decorator, of a compiled function and of one that is compiled with it.
                graphs.clear()
                torch.testing.assert_close(sdpa_backend("math")(g)(*qkv), expected)
                torch.testing.assert_close(recording()(sdpa_backend("math")(lambda *a: sdpa(*a)))(*qkv), expected)
                assert not any(has("flash_attention_for_cpu")), graphs
    """)


def test_sdpa_backend_under_autocast():
    run("""
        qkv = [sample(2, 3, 8, 16, seed=i) for i in range(3)]
        expected = sdpa(*qkv)

        @recording()
        def f(q, k, v):
            with torch.autocast("cpu", torch.bfloat16), sdpa_backend("math"):
                return sdpa(q, k, v)

        out = f(*qkv)
        assert out.dtype is torch.bfloat16
        torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
        assert not any(has("flash_attention_for_cpu")), graphs
    """)


@pytest.mark.skipif(NO_VIEWS_IN_INFERENCE_MODE, reason="torch 2.11 compiles no view made in inference mode")
def test_sdpa_backend_under_inference_mode():
    run("""
        qkv = [sample(2, 3, 8, 16, seed=i) for i in range(3)]
        expected = sdpa(*qkv)

        @recording()
        def g(q, k, v):
            with torch.inference_mode(), sdpa_backend("math"):
                return sdpa(q, k, v)

        torch.testing.assert_close(g(*qkv), expected)
        assert not any(has("flash_attention_for_cpu")), graphs
    """)


def test_attention_in_compiled_code():
    run("""
        qkv = [sample(2, 3, 8, 16, seed=i, grad=True) for i in range(3)]
        expected, lse = torch_flashbackend.attention(*qkv, return_lse=True)
        grads = torch.autograd.grad(expected.sum(), qkv)
        for dynamic in (False, True):
            g = recording(dynamic)(lambda q, k, v: torch_flashbackend.attention(q, k, v, return_lse=True))
            out, logsumexp = g(*qkv)
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(logsumexp, lse)
            torch.testing.assert_close(torch.autograd.grad(out.sum(), qkv), grads)
            torch.testing.assert_close(recording(dynamic)(torch_flashbackend.attention)(*qkv), expected)
    """)


def test_export_holds_stocks_operator():
    run("""
        class Module(torch.nn.Module):
            def forward(self, q, k, v):
                return sdpa(q, k, v)

        qkv = tuple(sample(2, 3, 8, 16, seed=i) for i in range(3))
        with torch.no_grad():
            plain = torch.export.export(Module(), qkv).run_decompositions()
            targets = lambda program: [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
            with hooked():
                program = torch.export.export(Module(), qkv)
                assert targets(program) == ["aten.scaled_dot_product_attention.default"]
                with counting() as count:
                    torch.testing.assert_close(program.module()(*qkv), sdpa(*qkv))
                    assert count("triton") >= 1
            assert targets(program.run_decompositions()) == targets(plain)
    """)


def test_checkpointing_and_dropout_in_compiled_code():
    run("""
        from torch.utils.checkpoint import checkpoint
        qkv = [sample(2, 3, 8, 16, seed=i, grad=True) for i in range(3)]
        with hooked():
            f = lambda q, k, v: checkpoint(lambda *a: sdpa(*a, dropout_p=0.5), q, k, v, use_reentrant=False)
            for g in (f, torch.compile(f, backend="aot_eager", fullgraph=True)):
                grads = []
                for _ in range(2):
                    torch.manual_seed(3)
                    out = g(*qkv)
                    grads.append(torch.autograd.grad((out * out).sum(), qkv))
                torch.testing.assert_close(*grads, atol=0, rtol=0)
                assert not torch.equal(out, g(*qkv))
    """)
