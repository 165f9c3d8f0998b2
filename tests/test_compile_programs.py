"""What compiled programs do around attention: dynamic sizes, checkpoints, exports. Each test is a process."""

from __future__ import annotations

import pytest
from hooked import run_python
from test_compile import run

EXPORTED = """
import torch, torch.nn.functional as F
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(32, 96)
    def forward(self, x):
        heads = self.project(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1))
"""


def test_sizes_marked_dynamic_compile_once():
    run("""
        with hooked():
            g = recording()(lambda q, k, v: sdpa(q, k, v, is_causal=True))
            for length in (16, 24, 13, 8, 40):
                qkv = [sample(2, 3, length, 32, seed=i) for i in range(3)]
                for t in qkv:
                    torch._dynamo.mark_dynamic(t, 2)
                    t.requires_grad_()
                out = g(*qkv)
                torch.testing.assert_close(out, sdpa(*qkv, is_causal=True))
                out.sum().backward()
            assert has("flashbackend.attention_forward") == [1, 0], graphs

            # Neither does a length that is discovered to vary, nor one of keys alone, with a mask.
            graphs.clear()
            torch._dynamo.reset()
            g = recording(dynamic=None)(lambda q, k, v, m: sdpa(q, k, v, m))
            for length in (16, 24, 13, 8, 40):
                q, k = sample(2, 3, 5, 32), sample(2, 3, length, 32, seed=1)
                mask = sample(2, 1, 5, length, seed=2) > 0
                torch.testing.assert_close(g(q, k, k, mask), sdpa(q, k, k, mask))
            assert len(graphs) == 2, len(graphs)
    """)


def test_what_a_compiled_forward_keeps_for_its_backward():
    """query, key, value, output and logsumexp, and nothing that is as large as the scores."""
    run("""
        outputs = []
        def forward_compiler(gm, inputs):
            (node,) = [n for n in gm.graph.nodes if n.op == "output"]
            outputs.append([tuple(n.meta["val"].shape) for n in node.args[0]])
            return recorder(gm, inputs)
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        qkv = [sample(2, 3, 40, 16, seed=i, grad=True) for i in range(3)]
        with hooked():
            for partition in (None, min_cut_rematerialization_partition):
                options = {} if partition is None else {"partition_fn": partition}
                backend = aot_autograd(fw_compiler=forward_compiler, bw_compiler=recorder, **options)
                torch._dynamo.reset()
                out = torch.compile(lambda q, k, v: sdpa(q, k, v), backend=backend, fullgraph=True)(*qkv)
                out.sum().backward()
                shape = (2, 3, 40, 16)
                # The output twice: as result and as what is kept.
                assert sorted(outputs.pop()) == sorted([(2, 3, 40)] + 5 * [shape])
                assert has("attention_forward")[-2:] == [1, 0], graphs
    """)


def test_policies_of_selective_checkpointing_that_name_stocks_operators():
    """They see stock's names, in eager and in compiled code: the same graphs as without the plugin."""
    run("""
        import functools
        from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
        aten = torch.ops.aten
        named = [aten._scaled_dot_product_flash_attention_for_cpu.default,
                 aten._scaled_dot_product_flash_attention.default,
                 aten._scaled_dot_product_efficient_attention.default]
        seen = []
        def policy(context, op, *args, **kwargs):
            seen.append((op, context.is_recompute))
            return CheckpointPolicy.MUST_SAVE if op in named else CheckpointPolicy.PREFER_RECOMPUTE
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        qkv = [sample(2, 3, 8, 16, seed=i, grad=True) for i in range(3)]
        block = lambda q, k, v: sdpa(q * 2.0, k, v).relu()
        expected = block(*qkv)
        grads = torch.autograd.grad(expected.sum(), qkv)
        f = lambda q, k, v: checkpoint(block, q, k, v, use_reentrant=False, context_fn=contexts)
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        def compiled(function):
            graphs.clear()
            torch._dynamo.reset()
            backend = aot_autograd(fw_compiler=recorder, bw_compiler=recorder,
                                   partition_fn=min_cut_rematerialization_partition)
            out = torch.compile(function, backend=backend, fullgraph=True)(*qkv)
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(torch.autograd.grad(out.sum(), qkv), grads)
            return [list(graph) for graph in graphs]
        stock = compiled(f)
        with hooked():
            sdpa(*qkv); sdpa(*qkv)
            seen.clear()
            out = f(*qkv)
            torch.testing.assert_close(torch.autograd.grad(out.sum(), qkv), grads)
            assert [op for op, again in seen if "attention" in str(op) and not again] == named[:1], seen
            assert compiled(f) == stock
            assert not any(has("flashbackend"))
            # A plain checkpoint has no policy and computes ours again.
            compiled(lambda *t: checkpoint(block, *t, use_reentrant=False))
            assert has("attention_forward") == [1, 1], graphs
    """)


def test_compiled_autograd_and_an_explicit_choice_inside():
    run("""
        from torch._dynamo import compiled_autograd
        from torch.nn.attention import SDPBackend, sdpa_kernel
        qkv = [sample(2, 3, 8, 16, seed=i, grad=True) for i in range(3)]
        expected = torch.autograd.grad(sdpa(*qkv).square().sum(), qkv)
        with hooked():
            for function in (sdpa, torch.compile(sdpa, backend="aot_eager", fullgraph=True)):
                with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
                    function(*qkv).square().sum().backward()
                torch.testing.assert_close([t.grad for t in qkv], list(expected))
                for t in qkv:
                    t.grad = None
        # Routing itself, and not a stand-in that takes everything, honours sdpa_kernel.
        def decide(problem, allowed=None):
            taken = "flash" in problem.sdp_backends and not problem.transforms
            return routing.Decision("triton" if taken else "stock", "test", "query")
        with hooked(decide):
            @recording()
            def f(q, k, v):
                with sdpa_kernel(SDPBackend.MATH):
                    a = sdpa(q, k, v)
                with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
                    b = sdpa(a, k, v)
                return b, sdpa(b, k, v)
            out = f(*(t.detach() for t in qkv))
            assert has("flashbackend.attention") == [2], graphs
    """)


@pytest.mark.extended
def test_max_autotune():
    """Forward and backward between operations that Inductor tunes."""
    run("""
        qkv = [sample(2, 4, 16, 32, seed=i, grad=True) for i in range(3)]
        weight = sample(32, 32, seed=4, grad=True)
        f = lambda q, k, v, w: sdpa(q @ w, k, v, is_causal=True) @ w
        expected = f(*qkv, weight)
        grads = torch.autograd.grad(expected.square().sum(), [*qkv, weight])
        with hooked(), counting() as count:
            out = torch.compile(f, fullgraph=True, mode="max-autotune")(*qkv, weight)
            torch.testing.assert_close(out, expected)
            results = torch.autograd.grad(out.square().sum(), [*qkv, weight])
            for result, wanted in zip(results, grads):
                # In the first row, which sees one key, the query's gradient is nothing but rounding.
                assert (result - wanted).norm() <= 1e-5 * wanted.norm()
            assert count("triton")
    """)


@pytest.mark.extended
def test_attention_written_by_hand_ends_in_ours_when_inductor_finds_it():
    run("""
        from torch._dynamo.utils import counters
        import math
        qkv = [sample(2, 4, 16, 32, seed=i, grad=True) for i in range(3)]
        def f(q, k, v):
            return (q @ k.transpose(-2, -1) / math.sqrt(32)).softmax(-1) @ v
        expected = f(*qkv)
        grads = torch.autograd.grad(expected.square().sum(), qkv)
        from torch.utils._python_dispatch import TorchDispatchMode
        with hooked(), counting() as count:
            out = torch.compile(f, fullgraph=True)(*qkv)
            torch.testing.assert_close(out, expected)
            with torch.profiler.profile() as profile:
                torch.testing.assert_close(torch.autograd.grad(out.square().sum(), qkv), grads)
            assert counters["inductor"]["fuse_attention"] >= 1
            assert any("flashbackend::attention_backward" in e.name for e in profile.events())
    """)


def test_exported_programs_run_where_the_plugin_is_absent(tmp_path):
    """Strict and not, inference and training; loaded in a process that never imports this package."""
    run_python(
        EXPORTED
        + f"""
from hooked import hooked
with hooked():
    for strict in (False, True):
        length = torch.export.Dim("length", min=2, max=64)
        program = torch.export.export(Block(), (x,), strict=strict, dynamic_shapes=({{1: length}},))
        torch.export.save(program, {str(tmp_path)!r} + f"/{{strict}}.pt2")
    with torch.no_grad():
        torch.save(Block()(x), {str(tmp_path)!r} + "/expected.pt")
"""
    )
    out = run_python(
        EXPORTED
        + f"""
import sys
expected = torch.load({str(tmp_path)!r} + "/expected.pt")
for strict in (False, True):
    program = torch.export.load({str(tmp_path)!r} + f"/{{strict}}.pt2")
    torch.testing.assert_close(program.module()(x), expected)
    program.module()(x[:, :7]).sum().backward()
    assert not [n for n in program.run_decompositions().graph.nodes if "flashbackend" in str(n.target)]
assert "torch_flashbackend.ops" not in sys.modules
print("ran")
""",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert out.strip() == "ran"


@pytest.mark.extended
def test_packages_of_aot_inductor_run_where_the_plugin_is_absent(tmp_path):
    path = str(tmp_path / "block.pt2")
    run_python(
        EXPORTED
        + f"""
from hooked import hooked
with hooked(), torch.no_grad():
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(Block(), (x,), dynamic_shapes=({{1: length}},))
    torch._inductor.aoti_compile_and_package(program, package_path={path!r})
    torch.save(Block()(x), {path!r} + ".expected")
""",
        timeout=500,
    )
    out = run_python(
        EXPORTED
        + f"""
import sys
with torch.no_grad():
    model = torch._inductor.aoti_load_package({path!r})
    expected = torch.load({path!r} + ".expected")
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model(x[:, :7].contiguous()), expected[:, :, :7])
assert "torch_flashbackend.ops" not in sys.modules
print("ran")
""",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert out.strip() == "ran"
