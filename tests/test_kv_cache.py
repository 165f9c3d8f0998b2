"""kv_cache.attend in plain PyTorch, which states what the kernels compute: against float64, and as an operator."""

from __future__ import annotations

import math

import pytest
import torch

from torch_flashbackend import kv_cache

from append_cases import append_call, misplaced
from common import check, error_of
from decode_cases import FEATURES, CacheCall, cache_call, random_cache_call

SINGLE = torch.float32


def attend(call: CacheCall, **more):
    """The call in attend's words: positions count from the end there."""
    options = dict(call.options)
    q, k_cache, v_cache = (tensor.transpose(1, 2) for tensor in (call.query, call.key, call.value))
    used = options.get("seqused_k")
    return kv_cache.attend(
        q, k_cache, v_cache, cache_seqlens=used, cache_batch_idx=options.get("batch_index"),
        cache_leftpad=options.get("leftpad_k"), block_table=options.get("block_table"), softmax_scale=call.scale,
        causal=call.is_causal, softcap=options.get("softcap", 0.0), alibi_slopes=options.get("alibi_slopes"),
        window_size=tuple(-1 if size is None else size for size in
                          (options.get("window_left"), options.get("window_right"))),
        sinks=options.get("sinks"), num_splits=options.get("num_splits", 0), **more,
    )  # fmt: skip


def from_the_end(call: CacheCall) -> bool:
    return call.options.get("bottom_right", True) and call.mask is None


@pytest.mark.parametrize("name", [name for name in FEATURES if name != "mask"])
def test_each_feature(name):
    tried = 0
    for seed in range(12):
        features = (name, "used") if name in ("pages", "causal", "window", "alibi") else (name,)
        call = cache_call(seed, features, dtype=SINGLE, queries=3, keys=60)
        if from_the_end(call):
            out, logsumexp = attend(call, return_softmax_lse=True)
            check({"out": out.transpose(1, 2)}, call.expected(), None, call.note)
            torch.testing.assert_close(logsumexp.double(), call.expected_logsumexp(), atol=1e-4, rtol=1e-5)
            tried += 1
    assert tried >= 4


def test_random_calls():
    calls = [random_cache_call(seed, "cpu", (SINGLE, torch.float16), longest=300) for seed in range(80)]
    calls = [call for call in calls if from_the_end(call)]
    assert len(calls) > 30
    for call in calls:
        check({"out": attend(call).transpose(1, 2)}, call.expected(), None, call.note)


@pytest.mark.parametrize("where", ["plain", "batch_index", "pages"])
@pytest.mark.parametrize("rotary", ["", "interleaved", "halves"])
@pytest.mark.parametrize("causal", [False, True])
def test_adding_to_the_cache(where, rotary, causal):
    for seed in range(4):
        case = append_call(seed, where=where, rotary=rotary, causal=causal, leftpad=seed % 2 == 1)
        arguments = case.arguments
        out = kv_cache.attend(**arguments)
        assert error_of(arguments["k_cache"], case.key_cache).maximum < 1e-5
        assert error_of(arguments["v_cache"], case.value_cache).maximum == 0.0
        names = ("cache_batch_idx", "block_table", "cache_leftpad", "causal")
        rest = {name: arguments[name] for name in names if name in arguments}
        caches = {"k_cache": case.key_cache, "v_cache": case.value_cache}
        lengths = arguments["cache_seqlens"] + arguments["k"].size(1)
        expected = kv_cache.attend(case.query, **caches, cache_seqlens=lengths, **rest)
        assert error_of(out, expected).maximum < 1e-5


def test_one_length_for_all():
    call = cache_call(0, dtype=SINGLE, keys=40)
    q, k_cache, v_cache = (tensor.transpose(1, 2) for tensor in (call.query, call.key, call.value))
    some = kv_cache.attend(q, k_cache, v_cache, cache_seqlens=17)
    torch.testing.assert_close(some, kv_cache.attend(q, k_cache[:, :17], v_cache[:, :17]))


def test_rows_beyond_the_capacity_are_dropped():
    case = append_call(0, rotary="")
    case.arguments["cache_seqlens"].fill_(47)
    key = case.arguments["k_cache"].clone()
    kv_cache.attend(**case.arguments)
    assert torch.equal(case.arguments["k_cache"][:, :47], key[:, :47])
    assert torch.equal(case.arguments["k_cache"][:, 47], case.arguments["k"][:, 0])


@pytest.mark.parametrize("where", ["plain", "pages"])
def test_nothing_is_written_outside_of_the_cache(where):
    arguments, whole = misplaced(append_call(0, where=where))
    if where == "pages":  # a page's rows are fewer than a sequence's
        arguments["cache_seqlens"] = torch.tensor([-17, 48, 500], dtype=torch.int32)
    before = [tensor.clone() for tensor in whole]
    kv_cache.attend(**arguments)
    for tensor, was in zip(whole, before):
        assert torch.equal(tensor, was)


def operator_arguments(seed: int, **options) -> tuple[tuple, tuple]:
    """(arguments of append, arguments of decode) of a call that has most of them."""
    given = append_call(seed, **options).arguments
    query, key, value, key_cache, value_cache = (
        given[name].transpose(1, 2) for name in ("q", "k", "v", "k_cache", "v_cache")
    )
    lengths, table = given["cache_seqlens"], given.get("block_table")
    angles = given.get("rotary_cos"), given.get("rotary_sin")
    append = (query, key, value, key_cache, value_cache, *angles, lengths, None, None, table, True, True)
    decode = (query, key_cache, value_cache, None, None, None, lengths, None, None, table, 0.2, True, True, 0, -1, -1,
              0.0, 0, 3, True)  # fmt: skip
    return append, decode


@pytest.mark.parametrize("options", [{"rotary": ""}, {"rotary": "interleaved", "where": "pages"}], ids=str)
def test_operators_are_well_formed(options):
    append, decode = operator_arguments(0, **options)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.flashbackend.append.default, append, test_utils=tests)
    torch.library.opcheck(torch.ops.flashbackend.decode.default, decode, test_utils=tests)
    torch.library.opcheck(torch.ops.flashbackend.decode.default, (*decode[:-1], False), test_utils=tests)


def test_compiled_as_one_graph_that_writes_into_the_cache():
    case, other = (append_call(1, where="pages") for _ in range(2))
    compiled = torch.compile(kv_cache.attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**case.arguments), kv_cache.attend(**other.arguments))
    assert torch.equal(case.arguments["k_cache"], other.arguments["k_cache"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": None}, "k and v go together"),
        ({"cache_seqlens": None}, "cache_seqlens"),
        ({"rotary_sin": None}, "rotary_cos and rotary_sin"),
        ({"cache_seqlens": torch.zeros(3)}, "int32"),
        ({"k": torch.zeros(3, 3, 2, 8)}, "do not go with"),
        ({"q": torch.zeros(3, 3, 3, 32)}, "no multiple"),
        ({"q": torch.zeros(3, 3, 4, 32, dtype=torch.float64)}, "float64"),
        ({"q": torch.zeros(2, 3, 4, 32)}, "batches"),
        ({"q": torch.zeros(4, 32)}, "batch, seqlen"),
        ({"cache_batch_idx": torch.zeros(3, dtype=torch.int32), "block_table": torch.zeros(3, 3, dtype=torch.int32)},
         "cache_batch_idx"),
        ({"rotary_cos": torch.zeros(60, 17), "rotary_sin": torch.zeros(60, 17)}, "at most 16"),
        ({"rotary_cos": torch.zeros(17), "rotary_sin": torch.zeros(17)}, "positions, at most 16"),
        # What a kernel would read behind the end of a tensor, or on another device.
        ({"cache_seqlens": torch.zeros(1, dtype=torch.int32)}, r"one number or \[batch\] = \[3\]"),
        ({"cache_seqlens": -1}, "cache_seqlens -1"),
        ({"cache_leftpad": torch.zeros(2, dtype=torch.int32)}, "cache_leftpad"),
        ({"cache_batch_idx": torch.zeros(2, dtype=torch.int32)}, "cache_batch_idx"),
        ({"block_table": torch.zeros(3, dtype=torch.int32)}, "block_table"),
        ({"sinks": torch.zeros(3)}, r"sinks are \[4\]"),
        ({"alibi_slopes": torch.zeros(2, 4)}, r"alibi_slopes are \[4\] or \[3, 4\]"),
        ({"cache_seqlens": torch.zeros(3, dtype=torch.int32, device="meta")}, "cache_seqlens is on meta"),
        ({"window_size": 3}, "window_size"),
        ({"softcap": -1.0}, "softcap is 0.0 for none, or a positive number; got -1.0"),
    ],
)  # fmt: skip
def test_errors_name_what_is_wrong(change, message):
    arguments = append_call(0).arguments | change
    with pytest.raises(ValueError, match=message):
        kv_cache.attend(**arguments)


def test_what_is_no_tensor_is_named():
    arguments = append_call(0).arguments
    for name in ("q", "k_cache", "cache_seqlens"):
        with pytest.raises(TypeError, match=f"{name} must be a tensor, not list"):
            kv_cache.attend(**arguments | {name: [1, 2, 3]})


def test_whole_numbers_are_refused():
    given = {"q": torch.zeros(1, 1, 2, 8, dtype=torch.int32)}
    given |= {name: torch.zeros(1, 4, 2, 8, dtype=torch.int32) for name in ("k_cache", "v_cache")}
    with pytest.raises(ValueError, match="int32"):
        kv_cache.attend(**given)


def test_parameters_that_require_grad_leave_no_history_in_the_cache():
    """As in a decoding loop without no_grad: every step would hang its graph on the cache of the one before."""
    arguments = append_call(0).arguments
    for name in ("q", "k", "v"):
        arguments[name] = arguments[name].clone().requires_grad_()
    out = kv_cache.attend(**arguments)
    assert not out.requires_grad
    assert not arguments["k_cache"].requires_grad and not arguments["v_cache"].requires_grad


def test_a_query_that_sees_nothing_gives_zeros():
    call = cache_call(0, dtype=SINGLE, keys=20, queries=5)
    q, k_cache, v_cache = (tensor.transpose(1, 2) for tensor in (call.query, call.key, call.value))
    lengths = torch.tensor([3, 0], dtype=torch.int32)
    out, logsumexp = kv_cache.attend(q, k_cache, v_cache, cache_seqlens=lengths, causal=True, return_softmax_lse=True)
    assert bool((out[0, :2] == 0).all()) and bool((out[1] == 0).all()) and bool((out[0, 2:] != 0).any())
    assert bool((logsumexp[1] == -math.inf).all()) and bool(logsumexp[0, :, 2:].isfinite().all())
