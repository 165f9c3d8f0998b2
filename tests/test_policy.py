"""From measurements to a decision, with a small policy file of invented numbers."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_flashbackend import policy
from torch_flashbackend.problem import Problem
from torch_flashbackend.routing import decide

GPU = "NVIDIA Test 4000"


def row(forward, training=None, case="dense", seqlen=1024, **fields):
    base = {
        "case": case, "causal": False, "dtype": "bfloat16", "head_dim": 128, "head_dim_v": 128, "batch": 2, "heads": 16,
        "kv_heads": 16, "seqlen_q": seqlen, "seqlen_k": seqlen, "forward": forward, "training": training,
    }  # fmt: skip
    return base | fields


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Make these rows the only measurements there are."""

    def write(*rows, name="test.json", **header):
        data = {"gpu": GPU, "architecture": "sm_90", "source": "test", "rows": list(rows)} | header
        (tmp_path / name).write_text(json.dumps(data))
        policy.policies.cache_clear()

    monkeypatch.setattr(policy, "POLICY_FOLDER", tmp_path)
    policy.policies.cache_clear()
    yield write
    policy.policies.cache_clear()


def call(seqlen=1024, head_dim=128, **kwargs):
    return Problem.from_shapes((2, 16, seqlen, head_dim), gpu=GPU, architecture="sm_80", **kwargs)


def judge(problem, backend="triton"):
    return policy.judge(problem, backend)


def takes(*args, **kwargs):
    return judge(call(*args, **kwargs)).take


def test_a_measured_call_is_taken_where_it_was_faster_by_the_margin(install):
    install(row(1.02))
    assert takes()
    install(row(1.01))
    assert not takes()


def test_both_neighbours_in_size_must_be_faster(install):
    install(row(0.9, seqlen=512), row(1.2, seqlen=2048), row(1.3, seqlen=8192))
    assert not takes(1024)  # between a slower and a faster one
    assert takes(4096)  # between two faster ones
    assert takes(2048)  # at a faster one
    assert takes(2**17)  # above the largest, which was faster
    assert not takes(64)  # below the smallest, which was slower


def test_measurements_of_one_size_that_are_equally_near_must_agree(install):
    install(row(1.5, seqlen_q=2048, seqlen_k=512), row(0.9, seqlen_q=512, seqlen_k=2048))
    assert not takes(1024)


def test_nearest_head_dim_at_or_above_else_the_largest(install):
    install(row(0.9, head_dim=64, head_dim_v=64), row(1.5), row(0.5, head_dim=256, head_dim_v=256))
    assert [takes(head_dim=d) for d in (64, 72, 128, 136, 256)] == [False, True, True, False, False]
    install(row(1.5))
    assert takes(head_dim=256)
    # Above 256 stock runs other kernels: nothing was measured, and an unusual head_dim is taken.
    install(row(0.5))
    assert not takes(head_dim=256)
    assert judge(call(head_dim=320)).reason == "unmeasured, likely faster: head_dim"


def test_equal_head_dims_are_not_judged_by_unequal_ones(install):
    install(row(0.9, head_dim=192, head_dim_v=128), row(1.5, head_dim=256, head_dim_v=256))
    assert takes(head_dim=192)
    assert not takes(head_dim=192, head_dim_v=128)


def test_training_and_forward_are_measured_apart(install):
    install(row(1.5, 0.8), row(0.8, 1.5, causal=True))
    assert takes()
    assert not takes(training=True)
    assert not takes(is_causal=True)
    assert takes(is_causal=True, training=True)


def test_null_is_not_measured(install):
    install(row(1.5, None))
    verdict = judge(call(training=True))
    assert not verdict.take
    assert verdict.reason == "unmeasured"
    assert verdict.message == (
        "no measurement of dense bfloat16 training at head_dim 128 on NVIDIA Test 4000; "
        "a plain dense call is left to stock"
    )


def test_dtypes(install):
    install(row(1.5), row(0.9, dtype="float32"), row(1.5, dtype="float32_tf32"))
    assert takes(dtype=torch.float16)
    assert not takes(dtype=torch.float32)
    assert takes(dtype=torch.float32, tf32=True)
    install(row(1.5), row(0.9, dtype="float16"))
    assert not takes(dtype=torch.float16)


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, ("dense",)),
        ({"mask": "bool"}, ("bool_mask",)),
        ({"mask": "float", "training": True}, ("float_mask",)),
        ({"mask": "float_grad", "training": True}, ("mask_grad",)),
        ({"dropout_p": 0.1, "kv_heads": 4}, ("dropout", "gqa")),
        ({"kv_heads": 16}, ("dense",)),
        ({"mask": "bool", "dropout_p": 0.1}, ("bool_mask", "dropout")),
        ({"mask": "bool", "kv_heads": 4}, ("bool_mask",)),
    ],
)
def test_cases(kwargs, expected):
    assert policy.cases(call(**kwargs)) == expected


def test_every_case_of_a_call_must_be_faster(install):
    install(row(1.5, case="dropout"), row(0.9, case="gqa"), row(1.5, case="bool_mask"))
    assert takes(dropout_p=0.1)
    assert not takes(dropout_p=0.1, kv_heads=4)
    assert takes(dropout_p=0.1, mask="bool")


def test_a_ratio_below_the_margin_reads_so(install):
    for ratio, shown in ((1.0199, "1.01"), (0.57, "0.57")):
        install(row(ratio))
        assert policy.judge(call(), "triton").message.startswith(f"{shown} times stock's speed")


def test_decoding_is_compared_with_decoding_only(install):
    install(row(1.5))
    decode = call(seqlen=1, seqlen_k=2**20)
    assert judge(decode).reason == "unmeasured"
    install(row(1.5), row(0.9, seqlen_q=1, seqlen_k=8192))
    assert judge(decode).reason == "measured slower"
    install(row(0.9), row(1.5, seqlen_q=1, seqlen_k=8192))
    assert judge(decode).take


def test_symbolic_sizes_use_the_largest_row_and_add_no_guard(install):
    environment = ShapeEnv()
    size = environment.create_unbacked_symint()
    shape = (2, 16, size, 128)
    symbolic = dataclasses.replace(call(), query_shape=shape, key_shape=shape, value_shape=shape)
    for largest, expected in ((1.5, True), (0.9, False)):
        install(row(2.4 - largest, seqlen=512), row(largest, seqlen=8192))
        assert judge(symbolic).take is expected
    assert not environment.guards


def test_the_message_names_the_ratio_and_the_nearest_measurement(install):
    install(row(1.31, seqlen=512), row(1.04, seqlen=2048))
    verdict = judge(call())
    assert verdict[:3] == (
        True,
        "measured faster: dense",
        "1.04 times stock's speed measured at batch 2, heads 16, seqlen 2048, head_dim 128 (dense, forward)",
    )
    install(row(1e9, case="gqa", kv_heads=4))
    assert judge(call(kv_heads=4)).reason == "stock refuses: gqa"


def test_another_number_of_multiprocessors_is_another_gpu(install):
    install(row(1.5), sm_count=132)
    assert judge(dataclasses.replace(call(), sm_count=132)).take
    assert not judge(dataclasses.replace(call(), sm_count=16)).take
    assert judge(call()).take  # asked by name alone


def test_a_broken_file_is_left_out_with_a_warning(install, tmp_path):
    install(row(1.5))
    (tmp_path / "broken.json").write_text('{"gpu": "NVIDIA H200", "rows": [{"case": "dense"}]}')
    (tmp_path / "README.md").write_text("not a policy")
    with pytest.warns(UserWarning, match=r"policy broken\.json left out"):
        assert set(policy.policies()) == {GPU}


def test_routing_follows_the_measurements(install):
    install(row(1.5), row(0.9, causal=True))
    assert (decide(call()).backend, decide(call()).reason) == ("triton", "measured faster: dense")
    slower = decide(call(is_causal=True))
    assert (slower.backend, slower.reason) == ("stock", "measured slower")
    assert slower.rejected[1][:2] == ("triton", "policy")
    assert "0.90 times stock's speed" in slower.rejected[1][2]


def on_hopper(head_dim=128, **kwargs):
    return Problem.from_shapes((2, 16, 1024, head_dim), gpu=GPU, architecture="sm_90", **kwargs)


def chosen(**kwargs):
    decision = decide(on_hopper(**kwargs))
    return decision.backend, decision.reason


def test_the_fastest_of_our_backends_is_taken_if_it_is_faster_than_stock(install):
    fast = "measured faster: dense"
    install(row(1.5, backend="cuda"), row(1.2, backend="triton"))
    assert chosen() == ("cuda", fast)
    install(row(1.2, backend="cuda"), row(1.5, backend="triton"))
    assert chosen() == ("triton", fast)
    assert decide(on_hopper()).rejected[0][:2] == ("cuda", "policy")
    assert "triton is faster: 1.50 times stock's speed" in decide(on_hopper()).rejected[0][2]
    install(row(1.2, backend="cuda"), row(1.21, backend="triton"))  # within the noise: the order decides
    assert chosen() == ("cuda", fast)
    install(row(0.9, backend="cuda"), row(1.1, backend="triton"))
    assert chosen() == ("triton", fast)
    install(row(1.1, backend="cuda"), row(0.9, backend="triton"))
    assert chosen() == ("cuda", fast)
    install(row(0.95, backend="cuda"), row(0.9, backend="triton"))
    assert chosen() == ("stock", "measured slower")


def test_our_backends_are_compared_at_calls_that_both_were_measured_at(install):
    """A call that one of them cannot run, and what is measured there, says nothing about which of them is faster."""
    both = [row(1.2, seqlen=512, backend="cuda"), row(1.1, seqlen=512), row(3.0, seqlen=2048, backend="cuda"),
            row(2.0, seqlen=2048)]  # fmt: skip
    install(*both, row(2.0, seqlen=1024))
    assert chosen() == ("cuda", "measured faster: dense")
    install(*(r | {"case": "bool_mask"} for r in (*both, row(2.0, seqlen=1024))))
    assert chosen(mask="bool")[0] == "cuda"
    install(row(1.2, seqlen=512, backend="cuda"), row(2.0, seqlen=1024))  # nothing in common: by what there is
    assert chosen()[0] == "triton"


def test_rows_of_one_backend_say_nothing_about_the_other(install):
    install(row(1.5, backend="triton"))
    assert chosen() == ("triton", "measured faster: dense")
    install(row(1.5))  # files of before there were two
    assert chosen() == ("triton", "measured faster: dense")
    install(row(1.5, training=0.9, backend="cuda"), row(0.8, training=0.7))
    assert chosen() == ("cuda", "measured faster: dense")
    assert chosen(training=True) == ("stock", "measured slower")
    assert chosen(is_causal=True) == ("stock", "unmeasured")


def test_masks_that_stock_gets_wrong_run_on_the_faster_of_our_backends(install):
    wrong = "stock is wrong: mask in cuDNN"
    install(row(1.2, case="bool_mask"))
    assert chosen(mask="bool") == ("triton", wrong)
    assert decide(on_hopper(mask="bool")).rejected[0][:2] == ("cuda", "policy")
    install(row(2.0, case="bool_mask", backend="cuda"), row(1.2, case="bool_mask"))
    assert chosen(mask="bool") == ("cuda", wrong)
    assert chosen(mask="bool", training=True)[0] == "triton"  # its training is not measured
    install(row(1.2, case="bool_mask", backend="cuda"), row(2.0, case="bool_mask"))
    assert chosen(mask="bool") == ("triton", wrong)
    install(row(0.8, case="bool_mask", backend="cuda"), row(0.7, case="bool_mask"))
    assert chosen(mask="bool") == ("cuda", wrong)  # stock must not have it
    # Far below what was measured the portable kernels count as unmeasured, and what was slower there as slower.
    install(row(0.8, seqlen=8192, case="bool_mask", backend="cuda"), row(1.5, seqlen=8192, case="bool_mask"))
    assert chosen(mask="bool") == ("triton", wrong)
    install()
    assert chosen(mask="bool") == ("triton", wrong)


def test_a_backend_that_does_not_take_the_call_has_no_say(install):
    """Dropout above the cuda backend's head dimensions for it."""
    install(
        row(3.0, backend="cuda", case="dropout", head_dim=256, head_dim_v=256),
        row(1.5, case="dropout", head_dim=256, head_dim_v=256),
    )
    assert chosen(dropout_p=0.1, head_dim=256) == ("triton", "measured faster: dropout")


def test_installed_policies_can_be_read(recwarn):
    policy.policies.cache_clear()
    for name, found in policy.policies().items():
        assert found.gpu == name
        assert found.rows
        assert {row.case for row in found.rows} <= {
            "dense", "bool_mask", "float_mask", "mask_grad", "dropout", "gqa", "packed"
        }  # fmt: skip
    assert not recwarn.list


def problem_of(row, training):
    return Problem.from_shapes(
        (row.batch, row.heads, row.seqlen_q, row.head_dim), kv_heads=row.kv_heads, seqlen_k=row.seqlen_k,
        head_dim_v=row.head_dim_v, is_causal=row.causal, training=training, gpu="NVIDIA H200",
    )  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
def test_a_measured_call_gets_the_verdict_of_its_own_measurement(training):
    """Of the installed policy: calls without a mask and without dropout, each judged by the row that is its own."""
    policy.policies.cache_clear()
    rows = [r for r in policy.policies()["NVIDIA H200"].rows if r.case in ("dense", "gqa") and r.dtype == "bfloat16"]
    rows = [row for row in rows if row.ratio(training) == row.ratio(training) and (row.heads, row.case) != (1, "gqa")]
    assert len(rows) > 20
    for row in rows:
        verdict = policy._judge_all(problem_of(row, training), row.backend, policy.policies()["NVIDIA H200"])
        assert verdict.take == (row.ratio(training) >= policy.MARGIN), f"{row.backend} {row}: {verdict}"


@pytest.mark.parametrize("kv_heads", [32, 8])
@pytest.mark.parametrize("batch", [1, 8])
def test_steps_over_a_static_cache_run_on_the_kernel_that_splits_the_keys(batch, kv_heads):
    """Of the installed policy: a prefill kernel's block for each head would take 2 to 4 times as long in a graph."""
    policy.policies.cache_clear()
    for queries, backend in ((1, "cuda"), (4, "triton")):  # whose kernel has a row of the mask for each query
        step = Problem.from_shapes(
            (batch, 32, queries, 128), seqlen_k=4160, kv_heads=kv_heads, mask="bool", gpu="NVIDIA H200",
            architecture="sm_90",
        )  # fmt: skip
        assert decide(step).backend == backend


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "seqlen_k", "splits"),
    [
        (1, 32, 8, 8192, True),
        (8, 32, 8, 1024, True),
        (1, 28, 4, 4096, True),
        (5, 32, 8, 4096, True),
        (8, 32, 8, 4096, True),
        (1, 28, 4, 16384, False),
        (1, 8, 1, 131072, False),
        (1, 32, 1, 2048, False),
    ],
)
def test_steps_without_a_mask_are_the_cuda_backends_where_it_splits_keys(batch, heads, kv_heads, seqlen_k, splits):
    """Of the installed policy: its other kernel would take 2 to 40 times as long as PyTorch's."""
    policy.policies.cache_clear()
    step = Problem.from_shapes(
        (batch, heads, 1, 128), seqlen_k=seqlen_k, kv_heads=kv_heads, gpu="NVIDIA H200", architecture="sm_90"
    )
    decision = decide(step)
    assert (decision.backend == "cuda") == splits
    assert splits or decision.rejected[0][:2] == ("cuda", "policy")
    trained = dataclasses.replace(step, requires_grad=True)
    assert decide(trained, ("cuda",)).backend == decide(step, ("cuda",)).backend == "cuda"  # who asks for it, gets it


def test_a_call_far_below_what_was_measured_is_unmeasured(install):
    install(row(1.5, 1.5, seqlen=1024))
    assert takes(1024) and takes(600)
    assert not takes(200) and "no call as small" in judge(call(200)).message
    install(row(1.5, seqlen=1024), row(1.5, seqlen=64))
    assert takes(200)


def test_of_equal_sizes_the_nearest_lengths_count(install):
    tall = row(0.5, batch=8, heads=16, seqlen=512)
    install(row(1.5, seqlen=1024), tall)
    assert takes(1024)
    install(row(0.5, seqlen=1024), tall | {"forward": 1.5})
    assert not takes(1024)


def test_training_on_special_kernels_needs_its_own_head_dim(install):
    install(row(1.5, 1.5, backend="cuda", head_dim=128, head_dim_v=128))
    assert judge(call(1024, 128, training=True), "cuda").take
    assert not judge(call(1024, 96, training=True), "cuda").take
    assert judge(call(1024, 96), "cuda").take
