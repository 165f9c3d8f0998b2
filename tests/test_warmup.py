"""Compiling ahead of time, on a machine without the GPU that it is for."""

from __future__ import annotations

import pickle

import pytest
import torch

import torch_flashbackend
from torch_flashbackend import policy, precompile
from torch_flashbackend.__main__ import main
from torch_flashbackend.kernels import KernelUnavailable

SHAPE = (2, 16, 4096, 128)


@pytest.fixture
def compiled(monkeypatch):
    """What would be compiled; nothing is."""
    found = []

    def cuda(specialisation):
        found.append(specialisation)
        return specialisation.entries

    def triton(problem, only):
        found.append((problem.head_dim, problem.is_causal, only))
        return (only,)

    monkeypatch.setattr(precompile, "_compile_cuda", cuda)
    monkeypatch.setattr(precompile, "_compile_triton", triton)
    monkeypatch.setattr(policy, "policies", dict)
    return found


def test_inference_and_training_of_both_kinds(compiled):
    done = torch_flashbackend.warmup([SHAPE], gpu="NVIDIA H200", backends=["cuda"])
    assert [(one.backend, one.kernels) for one in done] == [
        ("cuda", ("flash_forward",)),
        ("cuda", ("flash_forward", "flash_backward")),  # one kernel that does all
        ("cuda", ("flash_forward",)),
        ("cuda", ("flash_forward", "flash_backward_prepare", "flash_backward", "flash_backward_finish")),
    ]
    specialisations = [one for one in compiled if hasattr(one, "tile")]
    backward = [one for one in specialisations if hasattr(one, "deterministic")]
    assert {(s.head_dim, s.is_causal, s.is_bf16) for s in backward} == {(128, False, True), (128, True, True)}
    forward = [one for one in specialisations if one not in backward]
    assert {(s.head_dim, s.is_causal, s.is_bf16, s.write_lse) for s in forward} == {
        (128, causal, True, lse) for causal in (False, True) for lse in (False, True)
    }


def test_equal_specialisations_are_compiled_once(compiled):
    shapes = [SHAPE, (4, 16, 4096, 128), (2, 16, 4096, 120)]
    done = torch_flashbackend.warmup(shapes, gpu="NVIDIA H200", backends=["cuda"], causal=[True], training=[False])
    assert len(done) == 3 and len(compiled) == 1


def test_what_stays_stocks_needs_nothing(compiled):
    (one,) = torch_flashbackend.warmup([SHAPE], gpu="NVIDIA H200", causal=[True], training=[False])
    assert (one.backend, one.kernels) == ("stock", ())
    assert not compiled


def test_triton_where_the_cuda_backend_does_not_go(compiled):
    done = torch_flashbackend.warmup(
        [SHAPE], gpu="NVIDIA A100", backends=["cuda", "triton"], causal=[True], training=[False]
    )
    assert [one.kernels for one in done] == [("attention_forward",)]
    assert compiled == [(128, True, "attention_forward")]


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        ([(16, 4096, 128)], {"gpu": "NVIDIA H200"}, r"shapes are a list of .* got \[16, 4096, 128\]"),
        (SHAPE, {"gpu": "NVIDIA H200"}, f"shapes are a list of .* got {SHAPE[0]} in it"),
        ([SHAPE], {"gpu": "NVIDIA H200", "dtypes": ["bfloat16"]}, "got 'bfloat16'"),
        ([SHAPE], {"gpu": "Abacus"}, "unknown GPU"),
        ([SHAPE], {"gpu": "cpu"}, "no GPU here to compile for"),
        ([SHAPE], {"gpu": "NVIDIA H200", "backends": ["cudnn"]}, "there is no backend"),
        ([SHAPE], {"gpu": "NVIDIA H200", "backends": "cudnn"}, "there is no backend 'cudnn'"),
        ([SHAPE], {"gpu": "NVIDIA H200", "architecture": "Hopper"}, "unknown architecture 'Hopper'"),
        ([SHAPE], {"gpu": "NVIDIA H200", "backends": ()}, "at least one backend"),
        ([SHAPE], {"gpu": "NVIDIA H200", "workers": 0}, "workers is a number of compilers, 1 or more; got 0"),
        ([SHAPE], {"gpu": "NVIDIA H200", "workers": -1}, "got -1"),
        (
            [(2, -16, 4096, 128)],
            {"gpu": "NVIDIA H200"},
            r"whole numbers, 0 or more, as sizes; got \[2, -16, 4096, 128\]",
        ),
        ([(2, 16, 4096.0, 128)], {"gpu": "NVIDIA H200"}, r"got \[2, 16, 4096.0, 128\]"),
        ([SHAPE], {"gpu": "NVIDIA H200", "seqlen_k": -1}, "seqlen_k needs whole numbers"),
        ([SHAPE], {"gpu": "NVIDIA H200", "head_dim_v": "128"}, "head_dim_v needs whole numbers"),
        ([SHAPE], {"gpu": "NVIDIA H200", "kv_heads": 3}, "16 query heads, 3 key heads"),
        ([SHAPE], {"gpu": "NVIDIA H200", "kv_heads": 0, "backends": "triton"}, "16 query heads, 0 key heads"),
    ],
)
def test_what_makes_no_sense_is_a_value_error(compiled, shapes, options, words):
    with pytest.raises(ValueError, match=words):
        torch_flashbackend.warmup(shapes, **options)


@pytest.mark.parametrize("name", ["causal", "training"])
@pytest.mark.parametrize("flags", [None, "yes", ["yes"], 1])
def test_a_flag_that_is_none_is_a_type_error(compiled, name, flags):
    with pytest.raises(TypeError, match=f"{name} is True, False or a list of these"):
        torch_flashbackend.warmup([SHAPE], gpu="NVIDIA H200", **{name: flags})


def test_a_measured_gpu_is_known_by_part_of_its_name(compiled, monkeypatch):
    monkeypatch.setattr(policy, "policies", lambda: {"NVIDIA H200": policy.Policy("NVIDIA H200", 132, "", ())})
    for part in ("H200", "nvidia h200"):
        assert torch_flashbackend.warmup([SHAPE], gpu=part)[0].call.endswith("on NVIDIA H200")
    assert torch_flashbackend.warmup([SHAPE], gpu="H20")[0].call.endswith("on H20")


def test_one_option_alone_is_a_list_of_it(compiled):
    one = torch_flashbackend.warmup(
        [SHAPE], gpu="NVIDIA H200", dtypes=torch.float16, causal=True, training=False, backends="cuda"
    )
    listed = torch_flashbackend.warmup(
        [SHAPE], gpu="NVIDIA H200", dtypes=[torch.float16], causal=[True], training=[False], backends=["cuda"]
    )
    assert len(one) == 1 and [call[:3] for call in one] == [call[:3] for call in listed]


def test_command_line(compiled, capsys):
    arguments = ["warmup", "--shapes", "2,16,4096,128", "1,8,512,64", "--gpu", "NVIDIA H200", "--backend", "cuda"]
    assert main([*arguments, "--causal", "--inference", "--dtype", "float16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("query [2, 16, 4096, 128] float16, is_causal on NVIDIA H200: cuda, flash_forward (")
    assert [(s.head_dim, s.is_bf16) for s in compiled] == [(128, False), (64, False)]


def test_command_line_says_what_failed(compiled, capsys, monkeypatch):
    def fail(specialisation):
        raise KernelUnavailable("cuda-bindings is not installed")

    monkeypatch.setattr(precompile, "_compile_cuda", fail)
    assert main(["warmup", "--shapes", "2,16,4096,128", "--gpu", "NVIDIA H200", "--backend", "cuda"]) == 1
    assert "cuda-bindings is not installed" in capsys.readouterr().err
    assert main(["warmup", "--shapes", "2,16,4096,520", "--gpu", "NVIDIA H200", "--backend", "cuda"]) == 1
    assert "head_dim 520" in capsys.readouterr().err
    # As that error proposes.
    arguments = ["warmup", "--shapes", "2,16,4096,520", "--gpu", "NVIDIA H200", "--backend", "cuda", "stock"]
    assert main(arguments) == 0 and "stock, nothing to compile" in capsys.readouterr().out


def test_what_is_not_kept_for_other_processes_is_said(compiled, capsys, monkeypatch):
    monkeypatch.setattr(precompile.nvrtc, "not_kept", lambda: "the disk is full")
    with pytest.warns(precompile.NotKeptWarning, match="for this process alone.*: the disk is full"):
        torch_flashbackend.warmup([SHAPE], gpu="NVIDIA H200", backends="cuda", causal=True, training=False)
    arguments = ["warmup", "--shapes", "2,16,4096,128", "--gpu", "NVIDIA H200", "--inference"]
    assert main([*arguments, "--backend", "cuda"]) == 1
    assert capsys.readouterr().err.endswith("not kept on disk: the disk is full\n")
    assert main([*arguments, "--backend", "triton"]) == 0  # Triton has a cache of its own
    assert capsys.readouterr().err == ""


def test_one_kernel_that_does_not_compile_leaves_the_report_of_the_others(compiled, capsys, monkeypatch):
    """Whatever the compiler raises, one line of it beside the kernel's name; the rest is compiled."""
    succeed = precompile._compile_triton

    def fail_in_some(problem, only):
        if problem.is_causal and only == precompile.BACKWARD[1]:
            raise ValueError("ptxas died\nof something long")
        return succeed(problem, only)

    monkeypatch.setattr(precompile, "_compile_triton", fail_in_some)
    with pytest.raises(precompile.WarmupError, match="attention_backward_key_value: ptxas died") as caught:
        torch_flashbackend.warmup([SHAPE, (1, 8, 512, 64)], gpu="NVIDIA H200", backends=["triton"])
    assert "long" not in str(caught.value)
    failures = {one.call: one.failures for one in caught.value.warmed}
    assert [bool(found) for found in failures.values()] == [False, False, False, True] * 2
    assert [len(one.kernels) for one in caught.value.warmed] == [1, 3, 1, 2] * 2
    assert len(compiled) == 8 + 2 * 2 + 2 * 1
    copy = pickle.loads(pickle.dumps(caught.value))  # as another process hands it on
    assert (str(copy), copy.warmed) == (str(caught.value), caught.value.warmed)

    arguments = ["warmup", "--shapes", "2,16,4096,128", "--gpu", "NVIDIA H200", "--backend", "triton"]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.err == "attention_backward_key_value: ptxas died\n"
    assert len(printed.out.splitlines()) == 4
    assert "attention_forward, attention_backward_query compiled, 1 failed (" in printed.out.splitlines()[3]
    assert main([*arguments, "--full"]) == 0


def test_a_reason_without_words_is_the_exceptions_name(compiled, monkeypatch):
    def fail(problem, only):
        raise NotImplementedError

    monkeypatch.setattr(precompile, "_compile_triton", fail)
    with pytest.raises(RuntimeError, match=r"^attention_forward: NotImplementedError$"):
        torch_flashbackend.warmup([SHAPE], gpu="NVIDIA A100", backends=["triton"], causal=[True], training=[False])


@pytest.mark.parametrize("name", [precompile.FORWARD, *precompile.BACKWARD])
def test_triton_kernels_are_those_that_a_call_launches(name):
    pytest.importorskip("triton")
    problem = precompile.Problem.from_shapes((2, 8, 256, 64), kv_heads=2, gpu="NVIDIA A100", training=True)
    assert precompile._compile_triton(problem, name) == (name,)


@pytest.mark.parametrize(("heads", "part"), [(1, "wide"), (16, "stored")])
def test_triton_kernels_above_a_head_dim_of_256(monkeypatch, heads, part):
    """Probabilities are stored where their memory is little beside the query's."""
    pytest.importorskip("triton")
    from torch_flashbackend.kernels.triton.launch import Launch

    monkeypatch.setattr(Launch, "compile", lambda launch, target: launch.name)
    problem = precompile.Problem.from_shapes((1, heads, 4096, 512), gpu="NVIDIA H200", training=True, is_causal=True)
    names = [name for one in precompile.WIDE_BACKWARD for name in precompile._compile_triton(problem, one)]
    expected = [name for name in precompile.WIDE_BACKWARD[2:] if name.startswith(f"attention_{part}")]
    assert names == ["attention_backward_query", *expected]


def test_it_is_a_function_whatever_was_imported_first():
    assert torch_flashbackend.warmup is precompile.warmup
