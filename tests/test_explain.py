"""explain(): the table, what it says about the state of the process, and the command line."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase

import torch_flashbackend.__main__ as command
from torch_flashbackend import policy
from torch_flashbackend.explain import explain, explain_problem, other_implementations
from torch_flashbackend.problem import Problem


@pytest.fixture(autouse=True)
def no_measurements(monkeypatch):
    monkeypatch.setattr(policy, "policies", dict)


@pytest.fixture
def qkv():
    return [torch.zeros(2, 4, 8, 16) for _ in range(3)]


class TableTest(TestCase):
    maxDiff = None

    def test_taken(self):
        problem = Problem.from_shapes((2, 16, 4096, 128), mask="bool", gpu="NVIDIA H200")
        self.assertExpectedInline(
            str(explain_problem(problem, here=False)),
            """\
query [2, 16, 4096, 128] bfloat16, attn_mask [2, 1, 4096, 4096] bool on NVIDIA H200

backend | takes it | why
--------+----------+-----------------------------------------
cuda    | no       | no measurements for NVIDIA H200
triton  | yes      | stock would run cuDNN, which answers a fully masked row with the mean of value instead of zeros
math    | could    | not asked: torch_flashbackend.sdpa_backend("math") does
stock   | could    | triton comes first

runs on: triton (stock is wrong: mask in cuDNN)
PyTorch itself would run: cudnn
This is with the plugin on.""",
        )

    def test_left_to_stock(self):
        problem = Problem.from_shapes((2, 16, 4096, 600), gpu="NVIDIA H200")
        self.assertExpectedInline(
            str(explain_problem(problem, here=False)),
            """\
query [2, 16, 4096, 600] bfloat16 on NVIDIA H200

backend | takes it | why
--------+----------+-----------------------------------------
cuda    | no       | head_dim 600 with value head_dim 600 is not supported by the cuda backend (equal, 8 to 512; or 192 with 128)
triton  | no       | head_dim 600 is not supported by the triton backend (largest: 512)
math    | could    | not asked: torch_flashbackend.sdpa_backend("math") does
stock   | yes      | takes every call

runs on: stock (head_dim)
PyTorch itself would run: efficient
This is with the plugin on.""",  # noqa: E501
        )


def test_cpu_tensors_change_nothing(qkv):
    explanation = explain(*qkv)
    assert explanation.backend == "stock"
    assert "These tensors are on cpu: torch_flashbackend changes nothing for them." in str(explanation)
    assert explanation.rows[0] == ("cuda", "no", "the tensors are on cpu; the cuda backend runs on NVIDIA GPUs")
    assert explanation.rows[1] == (
        "triton", "no", "the tensors are on cpu; the triton backend runs on NVIDIA and AMD GPUs"
    )  # fmt: skip


def test_an_invalid_call_is_explained_too(qkv):
    query, key, value = qkv
    rows = explain(query, key[:, :3], value).rows
    assert {row[0]: row[1] for row in rows} == {"cuda": "no", "triton": "no", "math": "no", "stock": "yes"}
    assert "do not broadcast" in rows[2][2]


def test_what_is_no_tensor_is_named(qkv):
    query, key, _ = qkv
    with pytest.raises(TypeError, match="argument 'value' must be Tensor, not NoneType"):
        explain(query, key, None)


def test_of_arguments_that_pytorch_refuses_no_kernel_of_pytorch_is_named():
    wrong = explain_problem(Problem.from_shapes((2, 16, 64, 128), dropout_p=2.0, gpu="NVIDIA H200"), here=False)
    assert wrong.stock_backend is None and "an error most likely" in str(wrong)
    right = explain_problem(Problem.from_shapes((2, 16, 64, 128), dropout_p=0.5, gpu="NVIDIA H200"), here=False)
    assert right.stock_backend is not None and "an error" not in str(right)


def test_it_says_whether_the_plugin_is_on(monkeypatch):
    problem = Problem.from_shapes((2, 16, 4096, 128), mask="bool", gpu="NVIDIA H200")
    monkeypatch.setattr("torch_flashbackend.explain.plugin_enabled", lambda: False)
    assert "The plugin is off: PyTorch runs this call." in str(explain_problem(problem))
    monkeypatch.setattr("torch_flashbackend.explain.plugin_enabled", lambda: True)
    assert "The plugin is on." in str(explain_problem(problem))
    left = Problem.from_shapes((2, 16, 4096, 128), gpu="NVIDIA H200")
    assert "The plugin is on, and leaves this call to PyTorch." in str(explain_problem(left))


def test_a_patched_function_is_named(monkeypatch):
    def sage_attention(*args, **kwargs):
        raise NotImplementedError

    assert other_implementations() == ()
    monkeypatch.setattr(F, "scaled_dot_product_attention", sage_attention)
    (note,) = other_implementations()
    assert "replaced by test_explain.test_a_patched_function_is_named.<locals>.sage_attention" in note


def test_another_implementation_in_torchs_slot_is_named(monkeypatch):
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False)
    assert "activate_flash_attention_impl('FA4') is in force" in other_implementations()[0]


def test_backends_chosen_by_hand(qkv, monkeypatch):
    monkeypatch.setattr("torch_flashbackend.explain._selected", lambda: ("triton", "math"))
    chosen = explain(*qkv)
    assert (chosen.backend, chosen.decision.reason) == ("math", "asked for")
    assert "sdpa_backend allows here, in order: triton, math." in str(chosen)
    monkeypatch.setattr("torch_flashbackend.explain._selected", lambda: ("triton",))
    refused = explain(*qkv)
    assert (refused.backend, refused.decision) == ("error", None)
    assert "runs on: nothing: every backend that is allowed refuses it" in str(refused)


def test_the_public_name_is_callable_even_after_the_module_was_imported(qkv):
    import torch_flashbackend
    import torch_flashbackend.explain as module

    assert module(*qkv).backend == torch_flashbackend.explain(*qkv).backend == "stock"


def run(capsys, *arguments):
    assert command.main(arguments) == 0
    return capsys.readouterr().out


def test_command_line(capsys):
    text = run(
        capsys, "explain", "--shape", "2,16,4096,128", "--dtype", "bfloat16", "--mask", "bool", "--gpu", "NVIDIA H200"
    )
    assert "runs on: triton (stock is wrong: mask in cuDNN)" in text


def test_command_line_json_with_every_option(capsys):
    options = {
        "shape": "2,16,64,128", "dtype": "float16", "kv-heads": 4, "seqlen-k": 96, "head-dim-v": 64, "dropout": 0.5,
        "scale": 0.25, "architecture": "sm_80", "gpu": "My GPU",
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in options.items()]
    data = json.loads(run(capsys, "explain", *arguments, "--causal", "--training", "--json"))
    assert data["call"] == (
        "query [2, 16, 64, 128] float16, key [2, 4, 96, 128] float16, value [2, 4, 96, 64] float16, is_causal, "
        "dropout_p 0.5, scale 0.25, enable_gqa, gradients on My GPU"
    )
    assert [row["backend"] for row in data["rows"]] == ["cuda", "triton", "math", "stock"]


def test_command_line_knows_a_measured_gpu_by_part_of_its_name(monkeypatch, capsys):
    monkeypatch.setattr(policy, "policies", lambda: {"NVIDIA H200": policy.Policy("NVIDIA H200", 132, "", ())})
    assert "on NVIDIA H200" in run(capsys, "explain", "--shape", "2,16,64,128", "--gpu", "h200")


def test_an_architecture_alone_stands_for_any_gpu_of_that_kind(capsys):
    assert "on sm_90" in run(capsys, "explain", "--shape", "2,16,64,128", "--architecture", "sm_90")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--shape", "2,x"), "'2,x' is no shape"),
        (("--shape", "2,16,64,128", "--gpu", "Abacus"), "unknown GPU 'Abacus'"),
        (("--shape", "2,16,64,128", "--gpu", "h200", "--architecture", "sm90"), "unknown architecture 'sm90'"),
        (("--shape", "2,16,64,128", "--kv-heads", "four"), "'four' is no positive whole number"),
        ((), "--shape"),
    ],
)
def test_command_line_errors(arguments, words, capsys):
    with pytest.raises(SystemExit) as caught:
        command.main(("explain", *arguments))
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "error:" in error and words in error


def test_info(capsys):
    text = run(capsys, "info")
    assert torch.__version__ in text
    assert "measured GPUs" in text
