"""Verify mode: right answers pass, wrong ones warn once, and nothing else changes."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from hooked import hooked
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_flashbackend import verify
from torch_flashbackend.verify import check_backward, maybe_check, reset, results, set_verify

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# query, key, mask ("bool", "float", None), is_causal, enable_gqa
CALLS = {
    "causal": ((2, 4, 33, 16), (2, 4, 33, 16), None, True, False),
    "gqa, bool mask": ((2, 4, 33, 16), (2, 2, 40, 16), "bool", False, True),
    "rank 3, float mask": ((3, 8, 16), (3, 9, 16), "float", False, False),
    "rank 2": ((8, 16), (9, 16), None, False, False),
    "broadcast batch and heads": ((1, 4, 8, 16), (3, 1, 9, 16), "bool", False, False),
    "no keys": ((1, 4, 8, 16), (1, 4, 0, 16), None, False, False),
    "empty batch": ((0, 4, 8, 16), (0, 4, 9, 16), None, False, False),
}


@pytest.fixture(autouse=True)
def every_call():
    reset()
    set_verify(1.0)
    yield
    set_verify(0.0)
    reset()


def make(name, dtype):
    generator = torch.Generator().manual_seed(0)
    shape, key_shape, mask, is_causal, enable_gqa = CALLS[name]
    query, key, value = (torch.randn(s, generator=generator).to(dtype) for s in (shape, key_shape, key_shape))
    if mask is not None:
        mask_shape = (shape[-2], key_shape[-2])
        drawn = torch.randn(mask_shape, generator=generator)
        mask = (drawn > -0.5) if mask == "bool" else drawn.to(dtype)
        if mask.dtype is torch.bool:
            mask[1] = False  # a row without any key
    return query, key, value, mask, is_causal, enable_gqa


def reference(query, key, value, mask, is_causal, enable_gqa):
    out = F.scaled_dot_product_attention(
        query.double(), key.double(), value.double(),
        mask if mask is None or mask.dtype is torch.bool else mask.double(), is_causal=is_causal, enable_gqa=enable_gqa,
    )  # fmt: skip
    return out.nan_to_num(0.0).to(query.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_right_answer_passes(name, dtype):
    query, key, value, mask, is_causal, enable_gqa = make(name, dtype)
    out = reference(query, key, value, mask, is_causal, enable_gqa)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        maybe_check(query, key, value, mask, 0.0, is_causal, None, enable_gqa, out)
    assert (results()["checked"], results()["failed"], results()["skipped"]) == (1, 0, 0)
    assert results()["worst"] < 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_wrong_element_is_found_and_warned_about_once(dtype):
    query, key, value, mask, is_causal, enable_gqa = make("gqa, bool mask", dtype)
    out = reference(query, key, value, mask, is_causal, enable_gqa)
    out.view(-1)[1000] += 0.2
    with pytest.warns(RuntimeWarning, match=r"query \[2, 4, 33, 16\].* on cpu"):
        maybe_check(query, key, value, mask, 0.0, is_causal, None, enable_gqa, out)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        maybe_check(query, key, value, mask, 0.0, is_causal, None, enable_gqa, out)
    assert (results()["checked"], results()["failed"]) == (2, 2)
    assert results()["worst"] > 1.0
    assert "query [2, 4, 33, 16]" in results()["worst_call"]


def test_a_masked_row_that_is_not_zero_is_found():
    query, key, value, mask, is_causal, enable_gqa = make("gqa, bool mask", torch.bfloat16)
    out = reference(query, key, value, mask, is_causal, enable_gqa)
    out[:, :, 1] = value.mean(-2).repeat_interleave(2, 1)
    with pytest.warns(RuntimeWarning):
        maybe_check(query, key, value, mask, 0.0, is_causal, None, enable_gqa, out)


def test_nan_is_found_where_float64_has_a_number_only():
    query, key, value, mask, is_causal, enable_gqa = make("rank 2", torch.float32)
    query[0] = float("nan")
    out = reference(query, key, value, mask, is_causal, enable_gqa)
    maybe_check(query, key, value, mask, 0.0, is_causal, None, enable_gqa, out)
    assert results()["failed"] == 0
    out[3, 3] = float("nan")
    with pytest.warns(RuntimeWarning):
        maybe_check(query, key, value, mask, 0.0, is_causal, None, enable_gqa, out)


def test_blocks_give_the_same_result(monkeypatch):
    call = make("causal", torch.bfloat16)
    out = reference(*call)
    query, key, value, mask, is_causal, enable_gqa = call
    worst = []
    for memory in (2**28, 2**15):
        monkeypatch.setattr(verify, "MEMORY", memory)
        reset()
        maybe_check(query, key, value, mask, 0.0, is_causal, None, enable_gqa, out)
        worst.append(results()["worst"])
    assert worst[0] == pytest.approx(worst[1])
    assert worst[0] > 0


def test_gradients():
    query, key, value, mask, *_ = make("gqa, bool mask", torch.float32)
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    out = F.scaled_dot_product_attention(*leaves, mask, enable_gqa=True)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    grad_out[:, :, 1] = 0.0
    gradients = [g.float() for g in torch.autograd.grad(out, leaves, grad_out.double())]
    check_backward(query, key, value, mask, 0.0, False, None, True, grad_out, tuple(gradients))
    assert (results()["checked"], results()["failed"]) == (1, 0)
    for index in range(3):
        wrong = [g.clone(memory_format=torch.contiguous_format) for g in gradients]
        wrong[index].view(-1)[70] += 0.01
        reset()
        with pytest.warns(RuntimeWarning, match="gradients"):
            check_backward(query, key, value, mask, 0.0, False, None, True, grad_out, tuple(wrong))


def test_what_cannot_be_checked_is_skipped():
    query, key, value, mask, *_ = make("causal", torch.float32)
    arguments = (None, 0.0, False, None, False)
    maybe_check(query, key, value, mask, 0.1, False, None, False, query)  # dropout
    with FakeTensorMode():
        fake = torch.empty(2, 4, 8, 16)
        maybe_check(fake, fake, fake, *arguments, fake)
    with torch.autograd.forward_ad.dual_level():
        maybe_check(query, key, value, *arguments, query)
    assert (results()["checked"], results()["skipped"]) == (0, 3)


def test_torchs_random_numbers_and_gradients_are_left_alone():
    query, key, value, mask, is_causal, enable_gqa = make("causal", torch.float32)
    query.requires_grad_()
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    before, version = torch.get_rng_state(), out._version
    set_verify(0.5)
    for _ in range(20):
        maybe_check(query, key, value, mask, 0.0, is_causal, None, enable_gqa, out)
    assert torch.equal(torch.get_rng_state(), before)
    assert out._version == version
    assert 0 < results()["checked"] < 20
    out.sum().backward()


def test_the_share_is_checked():
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="between 0 and 1"):
            set_verify(wrong)
    verify(0.25)
    assert verify.share == 0.25


@pytest.mark.parametrize(
    ("value", "share", "warned"), [("0.01", 0.01, 0), ("", 0.0, 0), ("2", 0.0, 1), ("yes", 0.0, 1)]
)
def test_the_variable(value, share, warned):
    code = (
        "import warnings\nwith warnings.catch_warnings(record=True) as seen:\n    warnings.simplefilter('always')\n"
        "    from torch_flashbackend import verify\n"
        "seen = [w for w in seen if 'TORCH_FLASHBACKEND_VERIFY' in str(w.message)]\n"
        f"assert (verify.share, len(seen)) == ({share}, {warned}), (verify.share, seen)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=120, env=os.environ | {"TORCH_FLASHBACKEND_VERIFY": value}
    )


@pytest.mark.parametrize("way", ["attention", "attention with logsumexp", "sdpa_backend", "rank 3"])
def test_calls_past_the_hook_are_checked(way, monkeypatch):
    """Chosen by hand, or of our own function: as on a GPU, with the math path in the kernels' place."""
    from torch_flashbackend import attention, decisions, ops, routing, sdpa_backend

    tensors = [torch.randn(1, 2, 24, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]

    def run():
        if way == "attention":
            return attention(*tensors)
        if way == "attention with logsumexp":
            return attention(*tensors, return_lse=True)[0]
        with sdpa_backend("triton"):
            return F.scaled_dot_product_attention(*((t[0] for t in tensors) if way == "rank 3" else tensors))

    decisions.forget()
    monkeypatch.setattr(routing, "decide", lambda problem, allowed=None: routing.Decision("triton", "", "query"))
    right = run()
    run()  # from the cache
    assert (results()["checked"], results()["failed"]) == (2, 0)
    kernel = ops.run

    def wrong(*arguments, return_lse=False, **options):
        out = kernel(*arguments, return_lse=return_lse, **options)
        return (1.01 * out[0], out[1]) if return_lse else 1.01 * out

    decisions.forget()
    monkeypatch.setattr(ops, "run", wrong)
    # A call that is known may go a shorter way, as on a GPU.
    wrong.unobserved = lambda *arguments: wrong(*arguments[:-1], layout=arguments[-1])
    monkeypatch.setattr(decisions, "_runner", lambda *_: wrong)
    with pytest.warns(RuntimeWarning, match="the numbers of a call differ from float64"):
        assert not torch.equal(run(), right)
    run()
    assert (results()["checked"], results()["failed"]) == (4, 2)
    decisions.forget()


def test_what_a_mode_watches_is_not_checked_under_it():
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    tensors = [torch.randn(1, 2, 24, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    with hooked():
        make_fx(F.scaled_dot_product_attention)(*tensors)
        counter = FlopCounterMode(display=False)
        with counter:
            F.scaled_dot_product_attention(*tensors)
    assert counter.get_total_flops() == 4 * 2 * 24 * 24 * 16
    assert (results()["checked"], results()["skipped"]) == (0, 2)


def test_gradients_of_a_call_are_checked_too(monkeypatch):
    from torch_flashbackend import ops

    tensors = [torch.randn(1, 2, 24, 16, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(3)]
    reset()
    set_verify(1.0)
    ops.run(*tensors).sum().backward()
    assert results()["checked"] == 1
    right = ops.reference.attention_backward

    def wrong(*arguments):
        grad_query, *others = right(*arguments)
        return 1.01 * grad_query, *others

    monkeypatch.setattr(ops.reference, "attention_backward", wrong)
    with pytest.warns(RuntimeWarning, match="gradient"):
        ops.run(*tensors).sum().backward()
    set_verify(0.0)
    assert ops.check_gradients is None
