"""Problem: what is read from tensors, and what is not (sizes of symbolic shapes, pointers of fake tensors)."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_flashbackend.problem import Problem, is_aligned, known_architecture
from torch_flashbackend.routing import decide


class Mine(torch.Tensor):
    """Anybody's subclass."""


def tensors(*shape, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype) for _ in range(3)]


def test_describes_the_call_in_the_callers_words():
    query, key, value = tensors(2, 4, 8, 16)
    mask = torch.zeros(8, 8, dtype=torch.bool)
    problem = Problem.from_tensors(query, key, value, mask, 0.1, scale=0.5)
    assert str(problem) == ("query [2, 4, 8, 16] float32, attn_mask [8, 8] bool, dropout_p 0.1, scale 0.5 on cpu")
    assert (problem.device_type, problem.architecture, problem.devices) == ("cpu", "cpu", ("cpu",))


def test_gradients_count_only_in_grad_mode():
    query, key, value = tensors(2, 4, 8, 16)
    mask = torch.zeros(8, 8, requires_grad=True)
    assert Problem.from_tensors(query, key, value, mask).requires_grad
    with torch.no_grad():
        assert not Problem.from_tensors(query, key, value, mask).requires_grad
    assert not Problem.from_tensors(query, key, value).requires_grad


@pytest.mark.parametrize(
    ("offset", "step", "aligned"), [(0, 64, True), (1, 64, False), (8, 64, True), (0, 68, False), (0, 72, True)]
)
def test_alignment_is_of_pointers_and_strides(offset, step, aligned):
    buffer = torch.zeros(8 * 128 * 80, dtype=torch.bfloat16)
    query = buffer.as_strided((2, 4, 128, 64), (4 * 128 * step, 128 * step, step, 1), offset)
    assert is_aligned(query) is aligned
    assert Problem.from_tensors(query, query, query).aligned is aligned


def test_strides_that_are_never_used_do_not_count_for_alignment():
    assert is_aligned(torch.zeros(1, 1, 128, 64, dtype=torch.float16).as_strided((1, 1, 128, 64), (3, 5, 64, 1)))
    assert not is_aligned(torch.zeros(2, 4, 64, 128, dtype=torch.float16).mT)


def test_fake_tensors_count_as_aligned_and_no_pointer_is_asked():
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        query = torch.empty(2, 4, 8, 16, device="cuda", dtype=torch.bfloat16)
        problem = Problem.from_tensors(query, query, query)
    assert problem.aligned
    assert problem.tensor_types == ()
    if not torch.cuda.is_available():
        assert problem.architecture == "unknown"


def test_symbolic_sizes_are_not_specialised_and_add_no_guard():
    environment = ShapeEnv()
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])
    sizes = torch.empty(6, 4, 24, 16, device="meta")
    with FakeTensorMode(shape_env=environment) as mode:
        query = mode.from_tensor(sizes, symbolic_context=context)
        query = torch.empty(query.shape, dtype=torch.bfloat16, device="cuda")
        mask = torch.empty((query.shape[0], 1, query.shape[2], query.shape[2]), dtype=torch.bool, device="cuda")
        before = len(environment.guards)
        problem = Problem.from_tensors(query, query, query, mask)
        decision = decide(problem)
        plain = decide(Problem.from_tensors(query, query, query, is_causal=True))
    assert problem.symbolic
    assert isinstance(problem.query_shape[0], torch.SymInt)
    assert (decision.backend, plain.backend) == ("triton", "stock")
    assert len(environment.guards) == before, environment.guards


def test_unknown_tensor_types_are_named():
    query, key, value = tensors(2, 4, 8, 16)
    assert Problem.from_tensors(query.as_subclass(Mine), key, value).tensor_types == ("Mine",)
    assert Problem.from_tensors(torch.nn.Parameter(query), key, value).tensor_types == ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.zeros(4, 8, 16), torch.zeros(4, 6, 16)])
    assert Problem.from_tensors(nested, nested, nested).tensor_types == ("nested tensor",)
    assert Problem.from_tensors(query.to_sparse(), key, value).tensor_types == ("sparse_coo tensor",)
    negated = torch.complex(query, query).conj().imag
    assert Problem.from_tensors(negated, key, value).tensor_types == ("negated view",)


def test_tf32_is_read_through_both_interfaces_and_for_float32_only():
    matmul = torch.backends.cuda.matmul
    query, key, value = tensors(2, 4, 8, 16)
    half = [tensor.half() for tensor in (query, key, value)]
    before = matmul.fp32_precision
    try:
        assert not Problem.from_tensors(query, key, value).tf32
        torch.set_float32_matmul_precision("high")
        assert Problem.from_tensors(query, key, value).tf32
        matmul.fp32_precision = "ieee"
        assert not Problem.from_tensors(query, key, value).tf32
        matmul.fp32_precision = "tf32"
        assert Problem.from_tensors(query, key, value).tf32
        assert not Problem.from_tensors(*half).tf32
    finally:
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = before


def test_sdpa_kernel_is_seen_with_its_priority():
    query, key, value = tensors(2, 4, 8, 16)

    def seen(backends, **kwargs):
        with sdpa_kernel(backends, **kwargs):
            return Problem.from_tensors(query, key, value).sdp_backends

    assert "flash" in Problem.from_tensors(query, key, value).sdp_backends
    assert seen(SDPBackend.EFFICIENT_ATTENTION) == {"efficient"}
    assert seen([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True) == {"flash", "math"}
    # Math takes every call, so what comes after it never runs.
    assert seen([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True) == {"math"}


def test_transforms_and_forward_mode_are_seen():
    query, key, value = tensors(2, 4, 8, 16)
    seen = []

    def function(tensor):
        seen.append(Problem.from_tensors(tensor, key, value).transforms)
        return tensor.sum()

    torch.func.grad(function)(query)
    with torch.autograd.forward_ad.dual_level():
        function(query)
    function(query)
    assert seen == [True, True, False]


def test_the_kernel_hooks_entry_says_what_stock_chose():
    query, key, value = tensors(2, 4, 8, 16)
    for entry, backend in (
        ("_scaled_dot_product_flash_attention", "flash"),
        ("_scaled_dot_product_efficient_attention_backward", "efficient"),
        ("_scaled_dot_product_cudnn_attention", "cudnn"),
    ):
        assert Problem.from_tensors(query, key, value, entry=entry).stock_backend == backend


@pytest.mark.parametrize(
    ("kwargs", "h200", "a100"),
    [
        ({}, "cudnn", "flash"),
        ({"mask": "bool"}, "cudnn", "efficient"),
        ({"mask": "float_grad", "training": True}, "efficient", "efficient"),
        ({"dtype": torch.float32}, "efficient", "efficient"),
        ({"dtype": torch.float64}, "math", "math"),
        ({"seqlen_k": 1}, "flash", "flash"),
        ({"seqlen_k": 0}, "math", "math"),
        ({"seqlen_k": 64, "is_causal": True}, "cudnn", "efficient"),
        ({"head_dim_v": 64}, "cudnn", "efficient"),
        ({"kv_heads": 4}, "cudnn", "flash"),
    ],
)
def test_the_estimate_of_stocks_choice(kwargs, h200, a100):
    """The same choices that torch 2.11 makes on an H200, and by its rules on an A100."""
    for gpu, expected in (("NVIDIA H200", h200), ("NVIDIA A100-SXM4-80GB", a100)):
        assert Problem.from_shapes((2, 16, 128, 128), gpu=gpu, **kwargs).stock_backend == expected


def test_head_dims_that_stocks_kernels_refuse():
    def stock(head_dim, dtype=torch.bfloat16, gpu="NVIDIA H200", **kwargs):
        return Problem.from_shapes((2, 16, 128, head_dim), dtype=dtype, gpu=gpu, **kwargs).stock_backend

    assert [stock(d) for d in (64, 36, 256, 264, 300, 512)] == [
        "cudnn", "flash", "cudnn", "efficient", "math", "efficient"
    ]  # fmt: skip
    assert [stock(d, torch.float32) for d in (36, 33)] == ["efficient", "math"]
    assert [stock(d, gpu="NVIDIA GeForce RTX 4090", training=True) for d in (192, 200, 256)] == [
        "flash", "efficient", "flash"
    ]  # fmt: skip


def test_gpu_names():
    assert known_architecture("NVIDIA L40S") == "sm_89"
    assert known_architecture("NVIDIA A100-SXM4-80GB") == "sm_80"
    assert known_architecture("NVIDIA A10G") == "sm_86"
    for name in ("NVIDIA RTX A1000", "NVIDIA H2000"):  # not an A100, not an H200
        with pytest.raises(ValueError, match="unknown GPU"):
            known_architecture(name)
    assert known_architecture("NVIDIA H200 NVL") == known_architecture("NVIDIA H20") == "sm_90"
    assert known_architecture("AMD Instinct MI300X") == "gfx942"
    with pytest.raises(ValueError, match="unknown GPU 'Abacus'"):
        known_architecture("Abacus")
    with pytest.raises(ValueError, match="unknown mask"):
        Problem.from_shapes((2, 16, 128, 64), mask="alibi", gpu="NVIDIA H200")


def test_a_question_about_this_machine_knows_whether_it_can_compile(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("torch_flashbackend.problem._this_machine", lambda *_: ("sm_90", "NVIDIA H200", 132))
    monkeypatch.setattr("torch_flashbackend.nvrtc.unavailable", lambda: "no NVRTC")
    assert Problem.from_shapes((2, 16, 128, 64)).no_compiler == "no NVRTC"
    assert Problem.from_shapes((2, 16, 128, 64), gpu="NVIDIA H200").no_compiler == ""
