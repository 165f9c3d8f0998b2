"""explain(): the table, what it says about the state of the process, and the command line."""

from __future__ import annotations

import copy
import importlib
import json
import pickle

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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"attn_mask": "causal"}, "'attn_mask' must be Tensor, not str"),
        ({"attn_mask": [True]}, "'attn_mask' must be Tensor, not list"),
        ({"dropout_p": None}, "'dropout_p' must be float, not NoneType"),
        ({"dropout_p": "0.1"}, "'dropout_p' must be float, not str"),
        ({"scale": "1"}, "'scale' must be float, not str"),
        ({"scale": torch.ones(1)}, "'scale' must be float, not Tensor"),
        ({"is_causal": 1}, "'is_causal' must be bool, not int"),
        ({"enable_gqa": 1}, "'enable_gqa' must be bool, not int"),
    ],
)
def test_what_pytorch_would_take_for_nothing_of_that_kind_is_named(qkv, arguments, words):
    (name,) = arguments
    with pytest.raises(TypeError, match=f"argument '{name}'"):
        F.scaled_dot_product_attention(*qkv, **arguments)
    with pytest.raises(TypeError, match=words):
        explain(*qkv, **arguments)


def test_a_tensor_that_holds_a_number_is_one(qkv):
    found = explain(*qkv, scale=torch.tensor(0.5), dropout_p=torch.tensor(0.25, dtype=torch.float64))
    assert str(found.problem) == str(explain(*qkv, scale=0.5, dropout_p=0.25).problem)


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


@pytest.mark.parametrize("name", ["explain", "stats", "verify"])
def test_functions_that_are_modules_can_be_sent_to_another_process(name):
    module = importlib.import_module(f"torch_flashbackend.{name}")
    assert pickle.loads(pickle.dumps(module)) is copy.deepcopy(module) is module


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
    # Another GPU, with a part of that name; and words that name none.
    assert run(capsys, "explain", "--shape", "2,16,64,128", "--gpu", "H20").splitlines()[0].endswith("on H20")
    for words in ("NVIDIA", "H2", "a"):
        with pytest.raises(SystemExit):
            command.main(("explain", "--shape", "2,16,64,128", "--gpu", words))
        assert f"unknown GPU {words!r}" in capsys.readouterr().err


def test_an_architecture_alone_stands_for_any_gpu_of_that_kind(capsys):
    assert "on sm_90" in run(capsys, "explain", "--shape", "2,16,64,128", "--architecture", "sm_90")
    assert "the GPU is sm_80;" in run(capsys, "explain", "--shape", "2,16,64,128", "--architecture", "sm_80")
    assert "on H200" in run(capsys, "explain", "--shape", "2,16,64,128", "--gpu", "H200", "--architecture", "sm_90")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--shape", "2,x"), "'2,x' is no shape"),
        (("--shape", "2,16,64,128", "--gpu", "Abacus"), "unknown GPU 'Abacus'"),
        (("--shape", "2,16,64,128", "--gpu", "h200", "--architecture", "sm90"), "unknown architecture 'sm90'"),
        (("--shape", "2,16,64,128", "--gpu", "h200", "--architecture", "sm_80"), "gpu 'h200' is sm_90, not sm_80"),
        (("--shape", "2,16,64,128", "--gpu", "cpu", "--architecture", "sm_80"), "gpu 'cpu' is no GPU"),
        (("--shape", "2,16,64,128", "--kv-heads", "four"), "'four' is no positive whole number"),
        (("--shape", "64,128", "--kv-heads", "4", "--gpu", "h200"), "kv_heads is for queries with heads"),
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


def test_info_says_why_the_variable_has_no_effect(capsys, monkeypatch):
    monkeypatch.setattr(command, "plugin_enabled", lambda: False)
    monkeypatch.setenv("TORCH_FLASHBACKEND", "1")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 stops PyTorch from loading any plugin" in run(capsys, "info")
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD")
    assert "off (TORCH_FLASHBACKEND=1)" in run(capsys, "info")


def test_info_says_what_is_verified(capsys, monkeypatch):
    assert "verify" not in run(capsys, "info")
    monkeypatch.setattr(command.verify, "share", 0.25)
    assert "0.25 of the calls that we take" in run(capsys, "info")
