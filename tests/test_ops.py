"""The operators torch.ops.flashbackend.* on a CPU, where the math path runs: schemas, fake tensors, derivatives."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import pytest
import torch
from hooked import run_python, sample
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from torch_flashbackend import _torch, direct, ops, reference

from common import Call, attention_float64, check, expect, gradient_for, tensor_in_layout

attention = torch.ops.flashbackend.attention.default
attention_forward = torch.ops.flashbackend.attention_forward.default
attention_backward = torch.ops.flashbackend.attention_backward.default
B, H, SQ, SK, D = 2, 4, 6, 10, 8
SEED = 0x1234_5678_9ABC_DEF0
INF = math.inf


@dataclasses.dataclass(frozen=True)
class Case:
    """The arguments of one call, described so that each test makes its own tensors."""

    query: tuple[int, ...] = (B, H, SQ, D)
    key: tuple[int, ...] = (B, H, SK, D)
    head_dim_v: int = D
    mask: tuple[int, ...] | None = None
    mask_dtype: torch.dtype = torch.bool
    memory: str = "bhsd"
    mask_memory: str = "contiguous"
    is_causal: bool = False
    scale: float = 0.3
    dropout_p: float = 0.0
    layout: str = "query"
    dtype: torch.dtype = torch.float32

    def tensors(self, grad: bool = False) -> list[Tensor | None]:
        """query, key, value, attn_mask, dropout_seed."""
        value = (*self.key[:3], self.head_dim_v)
        shapes = self.query, self.key, value
        made = [_tensor(shape, self.memory, self.dtype, seed).requires_grad_(grad) for seed, shape in enumerate(shapes)]
        seed = torch.tensor([SEED]) if self.dropout_p else None
        return [*made, self._mask(grad), seed]

    def _mask(self, grad: bool) -> Tensor | None:
        if self.mask is None:
            return None
        shape = self.mask if self.mask_memory != "transposed" else (*self.mask[:2], self.mask[3], self.mask[2])
        mask = sample(*shape, seed=5)
        mask = mask > -0.5 if self.mask_dtype == torch.bool else mask.to(self.mask_dtype)
        if self.mask_memory == "transposed":
            mask = mask.mT
        if self.mask_memory == "expanded":
            mask = mask.expand(B, H, SQ, SK)
        return mask.detach().requires_grad_(grad and mask.is_floating_point())

    @property
    def options(self) -> tuple[Any, ...]:
        return self.dropout_p, self.is_causal, self.scale

    @property
    def has_gradient(self) -> list[bool]:
        return [True, True, True, self.mask is not None and self.mask_dtype.is_floating_point]

    def call(self, grad: bool = False) -> Call:
        """The same for the oracle of `common`."""
        query, key, value, mask, _ = self.tensors(grad)
        gqa = self.query[1] != self.key[1]
        return Call(query, key, value, mask, self.is_causal, self.scale, gqa, mask_grad=self.has_gradient[3])


def _tensor(shape: tuple[int, ...], memory: str, dtype: torch.dtype, seed: int) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return tensor_in_layout(shape, memory, dtype, "cpu", seed).detach()


def _of_mask(shape: tuple[int, ...], mask_dtype: torch.dtype = torch.bool, **options) -> Case:
    return Case(mask=shape, mask_dtype=mask_dtype, **options)


CASES = {
    "plain": Case(),
    "causal": Case(is_causal=True),
    "half": Case(dtype=torch.bfloat16),
    "gqa": Case(key=(B, 2, SK, D)),
    "one kv head": Case(key=(B, 1, SK, D), is_causal=True),
    "value dim": Case(head_dim_v=12),
    "value dim, transposed": Case(head_dim_v=12, memory="bshd"),
    "transposed": Case(memory="bshd"),
    "sequence first": Case(memory="sbhd"),
    "packed": Case(memory="packed"),
    "expanded batch": Case(memory="expanded_batch"),
    "expanded heads": Case(memory="expanded_heads", head_dim_v=12),
    "odd strides": Case(memory="odd_strides"),
    "strided last": Case(memory="strided_last"),
    "bshd": Case(layout="bshd"),
    "bhsd": Case(layout="bhsd", memory="bshd"),
    "bshd, value dim": Case(layout="bshd", head_dim_v=12),
    "bool mask": _of_mask((B, H, SQ, SK)),
    "bool mask per key": _of_mask((B, 1, 1, SK)),
    "bool mask per query": _of_mask((1, H, SQ, 1)),
    "bool mask of rank 2": _of_mask((SQ, SK)),
    "bool mask, expanded": _of_mask((B, 1, SQ, SK), mask_memory="expanded"),
    "float mask": _of_mask((B, H, SQ, SK), torch.float32),
    "float mask per head": _of_mask((1, H, SQ, SK), torch.float32),
    "float mask per key": _of_mask((1, 1, 1, SK), torch.float32, key=(B, 2, SK, D)),
    "float mask per query": _of_mask((B, 1, SQ, 1), torch.float32),
    "one number": _of_mask((1, 1, 1, 1), torch.float32),
    "float mask of rank 2": _of_mask((SQ, SK), torch.float32),
    "float mask, transposed": _of_mask((1, H, SQ, SK), torch.float32, mask_memory="transposed"),
    "half mask": _of_mask((1, H, SQ, SK), torch.bfloat16, dtype=torch.bfloat16),
    "single mask for half": _of_mask((1, H, SQ, SK), torch.float32, dtype=torch.bfloat16),
    "dropout": Case(dropout_p=0.3),
    "dropout of a mask": _of_mask((1, H, SQ, SK), torch.float32, dropout_p=0.3),
    "dropout of everything": Case(dropout_p=1.0),
    "negative scale": Case(scale=-0.7),
    "zero scale": Case(scale=0.0, is_causal=True),
    "empty batch": Case(query=(0, H, SQ, D), key=(0, H, SK, D)),
    "no queries": Case(query=(B, H, 0, D)),
    "no keys": Case(key=(B, H, 0, D)),
    "no keys, mask": _of_mask((1, H, SQ, 0), torch.float32, key=(B, H, 0, D)),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
VALUES = {name: case for name, case in CASES.items() if 0 not in case.query + case.key}


def backward_arguments(case: Case, output_mask: list[bool] | None = None) -> tuple[Any, ...]:
    """The arguments of attention_backward after a forward of this case."""
    query, key, value, mask, seed = case.tensors()
    out, logsumexp = attention_forward(query, key, value, mask, seed, *case.options, case.layout)
    grad_out = sample(*out.shape, seed=9).to(case.dtype)
    return (
        grad_out, query, key, value, mask, out, logsumexp, seed, *case.options, output_mask or case.has_gradient,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ schemas, fake tensors


@every_case
@pytest.mark.parametrize("op", [attention, attention_forward], ids=["attention", "attention_forward"])
def test_opcheck(op, case):
    torch.library.opcheck(op, (*case.tensors(grad=True), *case.options, case.layout))


@every_case
def test_opcheck_of_the_backward(case):
    torch.library.opcheck(attention_backward, backward_arguments(case))


SDPA_CASES = (
    "plain", "causal", "gqa", "half", "value dim, transposed", "expanded batch", "bool mask per key",
    "float mask of rank 2", "float mask, transposed", "empty batch",
)  # fmt: skip


@pytest.mark.parametrize("name", SDPA_CASES)
@pytest.mark.parametrize("op", [direct._op, direct._op_with_logsumexp], ids=["sdpa", "sdpa_with_logsumexp"])
def test_opcheck_of_sdpa(op, name):
    case = CASES[name]
    query, key, value, mask, _ = case.tensors(grad=True)
    gqa = case.query[1] != case.key[1]
    torch.library.opcheck(op, (query, key, value, mask, 0.0, case.is_causal, case.scale, gqa, "math"))


def described(result: Any) -> list[Any]:
    """What a fake tensor must say of a result."""
    results = result if isinstance(result, (tuple, list)) else [result]
    return [(t.shape, t.dtype, t.stride(), t.device.type) for t in results]


def faked(op, arguments) -> list[Any]:
    mode = FakeTensorMode()
    arguments = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
    with mode:
        return described(op(*arguments))


@every_case
@pytest.mark.parametrize("layout", ["query", "bshd", "bhsd"])
def test_fake_outputs_are_like_the_real_ones(case, layout):
    arguments = (*case.tensors(), *case.options, layout)
    for op in (attention, attention_forward):
        assert faked(op, arguments) == described(op(*arguments))


@every_case
def test_fake_gradients_are_like_the_real_ones(case):
    for wanted in range(4):
        output_mask = [index == wanted and possible for index, possible in enumerate(case.has_gradient)]
        arguments = backward_arguments(case, output_mask)
        assert faked(attention_backward, arguments) == described(attention_backward(*arguments))
    arguments = backward_arguments(case)
    assert faked(attention_backward, arguments) == described(attention_backward(*arguments))


@every_case
def test_shapes_dtypes_and_memory_order_are_those_promised(case):
    query, key, value, mask, seed = case.tensors()
    out, logsumexp = attention_forward(query, key, value, mask, seed, *case.options, case.layout)
    rows = case.query[:3]
    assert out.shape == (*rows, case.head_dim_v) and out.dtype == case.dtype
    assert logsumexp.shape == ((2, *rows) if case.has_gradient[3] else rows) and logsumexp.dtype == torch.float32
    assert out.stride() == attention(query, key, value, mask, seed, *case.options, case.layout).stride()
    if case.layout == "bhsd":
        assert out.is_contiguous()
    elif case.layout == "bshd":
        assert out.transpose(1, 2).is_contiguous()
    elif case.head_dim_v == D:
        assert out.stride() == torch.empty_like(query).stride()
    elif case.memory == "bshd":
        assert out.transpose(1, 2).is_contiguous()
    gradients = attention_backward(*backward_arguments(case))
    for gradient, like, possible in zip(gradients, (query, key, value, mask), case.has_gradient):
        assert gradient.shape == (like.shape if possible else (0,))
        assert not possible or gradient.dtype == like.dtype


def test_sizes_may_be_symbols():
    """One graph serves every size, with the output in the query's memory order and in a fixed one."""
    compiled_for = []

    def backend(graph, _):
        compiled_for.append(graph)
        return graph

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def run(query, key, value, mask):
        first = attention(query, key, value, mask, None, 0.0, False, 0.3, "query")
        second, logsumexp = attention_forward(query, key, value, mask, None, 0.0, False, 0.3, "bshd")
        return first + second, logsumexp

    for batch, seqlen_q, seqlen_k in ((2, 5, 7), (3, 9, 4), (4, 6, 8)):
        query, key = sample(batch, seqlen_q, H, D).transpose(1, 2), sample(batch, H, seqlen_k, D, seed=1)
        value, mask = sample(batch, H, seqlen_k, 12, seed=2), sample(1, H, seqlen_q, seqlen_k, seed=3)
        out, logsumexp = run(query, key, value, mask)
        expected = attention_float64(Call(query, key, value, mask, scale=0.3))
        torch.testing.assert_close(out.double(), 2 * expected, atol=1e-5, rtol=1e-5)
        assert logsumexp.shape == (2, batch, H, seqlen_q)
    assert len(compiled_for) == 1


# ---------------------------------------------------------------------------------------------------- values, gradients


@pytest.mark.parametrize("name", [name for name, case in VALUES.items() if not case.dropout_p])
@pytest.mark.parametrize("way", ["run", "run with logsumexp", "attention", "attention_forward"])
def test_values_and_gradients_against_float64(name, way):
    case = VALUES[name]
    call = case.call(grad=True)
    arguments = (call.query, call.key, call.value, call.attn_mask, 0.0, case.is_causal, case.scale)
    operator_arguments = (*arguments[:4], None, *case.options, case.layout)
    out = {
        "run": lambda: ops.run(*arguments, layout=case.layout),
        "run with logsumexp": lambda: ops.run(*arguments, layout=case.layout, return_lse=True)[0],
        "attention": lambda: attention(*operator_arguments),
        "attention_forward": lambda: attention_forward(*operator_arguments)[0],
    }[way]()
    inputs = call.differentiable()
    assert list(inputs) == [n for n, has in zip(("query", "key", "value", "attn_mask"), case.has_gradient) if has]
    grad_out = gradient_for(call)
    results = {"out": out.detach(), **dict(zip(inputs, torch.autograd.grad(out, list(inputs.values()), grad_out)))}
    for name, tensor in inputs.items():
        assert results[name].dtype == tensor.dtype
    check(results, expect(call, grad_out), None, call.describe())


@pytest.mark.parametrize("name", ["plain", "gqa", "bool mask", "float mask", "single mask for half", "causal"])
def test_logsumexp(name):
    case = CASES[name]
    query, key, value, mask, _ = case.tensors()
    if mask is not None:
        mask[:, :, 2] = False if mask.dtype == torch.bool else -INF
    _, logsumexp = ops.run(query, key, value, mask, 0.0, case.is_causal, case.scale, return_lse=True)
    leaf = query.clone().requires_grad_()
    _, with_gradient = ops.run(leaf, key, value, mask, 0.0, case.is_causal, case.scale, return_lse=True)
    scores = query.double() @ key.double().repeat_interleave(H // key.size(1), 1).mT * case.scale
    if case.is_causal:
        scores = scores.masked_fill(~torch.ones(SQ, SK, dtype=torch.bool).tril(), -INF)
    if mask is not None:
        scores = scores.masked_fill(~mask, -INF) if mask.dtype == torch.bool else scores + mask
    for found in (logsumexp, with_gradient):
        assert found.shape == (B, H, SQ) and not found.requires_grad
        torch.testing.assert_close(found, scores.logsumexp(-1).float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wanted", ["query", "key", "value", "attn_mask"])
def test_one_input_alone_needs_a_gradient(wanted):
    call = CASES["float mask per head"].call()
    arguments = {"query": call.query, "key": call.key, "value": call.value, "attn_mask": call.attn_mask}
    leaf = arguments[wanted].detach().requires_grad_()
    out = ops.run(**arguments | {wanted: leaf}, scale=call.scale)
    (gradient,) = torch.autograd.grad(out, leaf, gradient_for(call))
    check({wanted: gradient}, expect(call, gradient_for(call)))


@pytest.mark.parametrize("shape", ["sum", "row", "zero strides"])
def test_gradient_of_the_output_may_be_expanded(shape):
    call = CASES["gqa"].call(grad=True)
    out = ops.run(call.query, call.key, call.value, scale=call.scale)
    grad_out = {"sum": torch.ones(()), "row": sample(1, 1, 1, D), "zero strides": sample(B, H, SQ, 1)}[shape]
    grad_out = grad_out.expand(out.shape)
    gradients = torch.autograd.grad(out, (call.query, call.key, call.value), grad_out)
    check(dict(zip(("query", "key", "value"), gradients)), expect(call, grad_out))


def test_row_that_sees_no_key_gives_zeros_and_zero_gradients():
    call = CASES["float mask"].call(grad=True)
    mask = call.attn_mask.detach()
    mask[:, :, 3] = -INF
    mask.requires_grad_()
    out = ops.run(call.query, call.key, call.value, mask)
    gradients = torch.autograd.grad(out, (call.query, mask), torch.ones_like(out))
    assert not any(t[:, :, 3].any() for t in (out, *gradients)) and all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("name", ["empty batch", "no queries", "no keys", "no keys, mask"])
def test_nothing_to_compute(name):
    case = CASES[name]
    query, key, value, mask, _ = case.tensors(grad=True)
    out = ops.run(query, key, value, mask)
    assert out.shape == query.shape and not out.any()
    leaves = [query, key, value] + ([mask] if mask is not None else [])
    for leaf, gradient in zip(leaves, torch.autograd.grad(out, leaves, torch.ones_like(out))):
        assert gradient.shape == leaf.shape and not gradient.any()


def test_no_gradient_is_kept_where_none_is_wanted():
    case = CASES["plain"]
    query, key, value, _, _ = case.tensors(grad=True)
    with torch.no_grad():
        assert not ops.run(query, key, value).requires_grad
    assert not ops.run(*case.tensors()[:3]).requires_grad
    with torch.inference_mode():
        assert ops.run(*case.tensors()[:3]).is_inference()


@pytest.mark.parametrize("return_lse", [False, True])
def test_changing_an_input_before_backward_raises(return_lse):
    for changed in range(3):
        leaves = [t.requires_grad_() for t in CASES["plain"].tensors()[:3]]
        inputs = [leaf * 1 for leaf in leaves]
        out = ops.run(*inputs, return_lse=return_lse)
        out = out[0] if return_lse else out
        inputs[changed].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


# -------------------------------------------------------------------------------------------------- higher derivatives

F64 = torch.float64
SMALL = {
    "plain": Case(query=(1, 2, 3, 2), key=(1, 2, 4, 2), head_dim_v=3),
    "causal": Case(query=(1, 2, 4, 2), key=(1, 2, 4, 2), head_dim_v=2, is_causal=True),
    "gqa": Case(query=(1, 2, 3, 2), key=(1, 1, 4, 2), head_dim_v=2, scale=-0.7),
    "bool mask": Case(query=(1, 2, 3, 2), key=(1, 2, 4, 2), head_dim_v=2, mask=(1, 1, 3, 4)),
    "float mask": Case(query=(1, 2, 3, 2), key=(1, 2, 4, 2), head_dim_v=2, mask=(1, 2, 3, 4), mask_dtype=F64),
    "float mask per key": Case(query=(2, 1, 3, 2), key=(2, 1, 4, 2), head_dim_v=2, mask=(1, 1, 1, 4), mask_dtype=F64),
    "dropout": Case(query=(1, 2, 3, 2), key=(1, 2, 4, 2), head_dim_v=2, dropout_p=0.3),
}  # fmt: skip


def differentiable_function(case: Case, way: str):
    """(function of the tensors that need a gradient, these tensors in float64)."""
    query, key, value, mask, seed = dataclasses.replace(case, dtype=torch.float64).tensors(grad=True)
    if case.mask is not None and case.mask_dtype == torch.bool:
        mask[..., 1, :] = False
    leaves = [query, key, value, mask] if case.has_gradient[3] else [query, key, value]

    def function(*inputs):
        inputs = inputs if len(inputs) == 4 else (*inputs, mask)
        if way == "run":
            return ops.run(*inputs, 0.0, case.is_causal, case.scale)
        if way == "attention":
            return attention(*inputs, seed, *case.options, "query")
        return attention_forward(*inputs, seed, *case.options, "query")[0]

    return function, leaves


WAYS = [(name, way) for name in SMALL for way in ("run", "attention", "attention_forward")]
WAYS.remove(("dropout", "run"))  # it draws a new seed for each call


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_first_and_second_derivatives_by_finite_differences(name, way):
    function, leaves = differentiable_function(SMALL[name], way)
    assert gradcheck(function, leaves)
    assert gradgradcheck(function, leaves)


def test_second_derivatives_of_some_inputs():
    case = SMALL["float mask"]
    query, key, value, mask, _ = dataclasses.replace(case, dtype=torch.float64).tensors(grad=True)
    assert gradgradcheck(lambda q, m: ops.run(q, key.detach(), value.detach(), m), (query, mask))
    assert gradgradcheck(lambda v: ops.run(query.detach(), key.detach(), v, mask.detach()), (value,))


@pytest.mark.parametrize("name", [name for name, case in VALUES.items() if case.dtype == torch.float32])
def test_gradients_by_formula_are_those_of_autograd(name):
    case = dataclasses.replace(VALUES[name], dtype=torch.float64)
    query, key, value, mask, seed = case.tensors(grad=True)
    out = reference.attention(query, key, value, mask, *case.options, seed)
    grad_out = sample(*out.shape, dtype=torch.float64, seed=9)
    leaves = [tensor for tensor, possible in zip((query, key, value, mask), case.has_gradient) if possible]
    expected = torch.autograd.grad(out, leaves, grad_out)
    found = reference.attention_backward(grad_out, query, key, value, mask, *case.options, seed)
    torch.testing.assert_close([g for g in found if g is not None], list(expected))


# ------------------------------------------------------------------------------------------------------------- dropout


def keep(seed: int = SEED, p: float = 0.3, shape: tuple[int, ...] = (2, 4, 192, 160)) -> Tensor:
    return reference.dropout_keep(torch.tensor([seed]), shape, p)


def chi_square(counts: Tensor, trials: int, probability: float) -> float:
    """How likely independent draws give counts that vary as much or more, or as little or less, whichever is less."""
    squares = (counts.double() - trials * probability).square() / (trials * probability * (1 - probability))
    half_freedom = torch.tensor(squares.numel() / 2, dtype=torch.float64)
    upper = torch.special.gammaincc(half_freedom, squares.sum() / 2).item()
    return min(upper, 1 - upper)


def likelihood(kept: Tensor, p: float) -> float:
    """The least likely of all that independent draws would decide. kept bool [N, Sq, Sk], sizes that 4 divides."""
    share = 1 - p
    found = [chi_square(kept.sum().view(1), kept.numel(), share)]
    for dim, size in enumerate(kept.shape):
        others = [d for d in range(3) if d != dim]
        found.append(chi_square(kept.sum(others), kept.numel() // size, share))
        for step in (1, 2, size // 2):  # do neighbours, and lines further apart, agree as often as they should?
            differ = _differ(kept, dim, step)
            found.append(chi_square(differ.sum(others), kept.numel() // size, 2 * p * share))
    # The corners of rectangles: this often an odd number of the four is kept. A generator that only joins a number of
    # the row and one of the column, without mixing, fails here.
    odd = (1 - (1 - 2 * p) ** 4) / 2
    for steps in ((1, 1), (2, 4), (kept.size(1) // 2, kept.size(2) // 2)):
        corners = _differ(_differ(kept, 1, steps[0]), 2, steps[1])
        found.append(chi_square(corners.sum((1, 2)), corners[0].numel(), odd))
    return min(found)


def _differ(kept: Tensor, dim: int, step: int) -> Tensor:
    """Where the two lines of each of the disjoint pairs (i, i + step) along a dimension differ."""
    first, second = kept.unflatten(dim, (-1, 2, step)).unbind(dim + 1)
    return (first ^ second).flatten(dim, dim + 1)


UNLIKELY = 1e-8  # what a sound generator gives once in a million runs of all these


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, SEED, 2**63 - 2])
def test_dropout_draws_are_independent(p, seed):
    assert likelihood(keep(seed, p).flatten(0, 1), p) > UNLIKELY


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_draws_of_different_seeds_are_independent(p):
    seeds = [*range(8), *(1 << bit for bit in range(3, 59, 4)), SEED, SEED + 1]
    kept = torch.stack([keep(seed, p, (1, 1, 96, 96))[0, 0] for seed in seeds])
    assert likelihood(kept, p) > UNLIKELY


def test_dropout_draws_of_batch_and_head_do_not_repeat():
    kept = keep(p=0.5, shape=(3, 5, 40, 40)).flatten(0, 1).flatten(1)
    agreement = (kept[:, None] == kept[None]).double().mean(-1)
    off_diagonal = agreement[~torch.eye(15, dtype=torch.bool)]
    assert (off_diagonal - 0.5).abs().max() < 6 * 0.5 / math.sqrt(1600)


def test_the_limit_rejects_broken_generators():
    p, shape = 0.3, (8, 192, 160)
    generator = torch.Generator().manual_seed(0)
    good = torch.rand(shape, generator=generator) >= p
    assert likelihood(good, p) > UNLIKELY
    rows, columns = (torch.randint(2**16, size, generator=generator) for size in ((8, 192, 1), (8, 1, 160)))
    threshold = round(p * 2**16)
    broken = {
        "rows and columns are not mixed": (rows ^ columns) >= threshold,
        "they are added": ((rows + columns) & 0xFFFF) >= threshold,
        "heads repeat": good[:4].repeat(2, 1, 1),
        "rows repeat": good[:, :96].repeat(1, 2, 1),
        "columns repeat in pairs": good[:, :, :80].repeat_interleave(2, 2),
        "the share is off by 3%": torch.rand(shape, generator=generator) >= p * 1.03,
        "some rows are not dropped": good | (torch.arange(192)[:, None] % 8 == 0),
    }
    for name, kept in broken.items():
        assert likelihood(kept, p) < UNLIKELY, name


def test_dropout_is_decided_by_the_seed_alone():
    assert torch.equal(keep(7), keep(7))
    assert not torch.equal(keep(7), keep(8))
    assert not torch.equal(keep(7), keep(7 + 2**32))
    part = keep(7, shape=(1, 2, 50, 30))
    assert torch.equal(part, keep(7, shape=(2, 2, 192, 160))[:1, :, :50, :30]), "it must not depend on the lengths"
    assert not (keep(7, 0.5) & ~keep(7, 0.3)).any(), "a larger p drops more of the same"


@pytest.mark.parametrize("p", [2**-32, 1e-9, 1 - 1e-9])
def test_dropout_at_the_ends_of_its_range(p):
    share = keep(p=p).double().mean().item()
    assert abs(share - (1 - p)) < 1e-4


def test_dropout_of_nothing_and_of_everything():
    query, key, value, _, _ = CASES["plain"].tensors(grad=True)
    assert torch.equal(ops.run(query, key, value, dropout_p=0.0), ops.run(query, key, value))
    out = ops.run(query, key, value, dropout_p=1.0)
    gradients = torch.autograd.grad(out, (query, key, value), torch.ones_like(out))
    assert not any(t.any() for t in (out, *gradients))


def test_dropout_scales_what_it_keeps():
    length, p = 64, 0.3
    query, key = torch.zeros(1, 2, length, D), sample(1, 2, length, D)
    value = torch.eye(length).expand(1, 2, length, length)
    torch.manual_seed(3)
    out = ops.run(query, key, value, dropout_p=p)
    kept = out != 0
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / length / (1 - p)))
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / kept.numel())


def test_dropout_drops_the_same_in_backward():
    case = CASES["dropout of a mask"]
    call = case.call(grad=True)
    kept = reference.dropout_keep(torch.tensor([SEED]), (B, H, SQ, SK), case.dropout_p)
    inputs = [call.query, call.key, call.value, call.attn_mask]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    expected = attention_float64(Call(*wide, scale=case.scale), kept, case.dropout_p)
    grad_out = gradient_for(call)
    wanted = torch.autograd.grad(expected, wide, grad_out.double())
    for op in (attention, attention_forward):
        out = op(*inputs, torch.tensor([SEED]), *case.options, "query")
        out = out[0] if op is attention_forward else out
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
        gradients = torch.autograd.grad(out, inputs, grad_out)
        torch.testing.assert_close([g.double() for g in gradients], list(wanted), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("grad", [False, True])
def test_dropout_follows_manual_seed(grad):
    query, key, value, _, _ = CASES["plain"].tensors(grad=grad)

    def draw():
        return ops.run(query, key, value, dropout_p=0.5)

    torch.manual_seed(11)
    first, second = draw(), draw()
    torch.manual_seed(11)
    assert torch.equal(first, draw()) and torch.equal(second, draw())
    assert not torch.equal(first, second)


# ---------------------------------------------------------------------------------------------- flops, counts, failures


def counted(function, *arguments) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*arguments)
    return counter.get_total_flops()


@pytest.mark.parametrize("is_causal", [False, True])
def test_flops_are_counted_as_stocks_are(is_causal):
    query, key, value = (torch.empty(2, 3, n, 16, dtype=torch.float16, device="meta") for n in (40, 56, 56))
    stock = torch.ops.aten._scaled_dot_product_flash_attention
    expected = counted(stock, query, key, value, 0.0, is_causal)
    arguments = (query, key, value, None, None, 0.0, is_causal, 0.25, "query")
    assert counted(attention, *arguments) == counted(attention_forward, *arguments) == expected > 0
    out, logsumexp = attention_forward(*arguments)
    philox = torch.empty(2, dtype=torch.uint64, device="meta")
    stock_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    stock_arguments = (out, query, key, value, out, logsumexp, None, None, 40, 56, 0.0, is_causal, philox, philox)
    wanted = [True, True, True, False]
    ours = (out, query, key, value, None, out, logsumexp, None, 0.0, is_causal, 0.25, wanted)
    expected = counted(stock_backward, *stock_arguments)
    assert counted(attention_backward, *ours) == expected > 0


def test_flops_of_a_training_step_and_of_grouped_queries():
    def step(query, key, value):
        ops.run(query, key, value).sum().backward()

    product = 2 * B * H * SQ * SK * D
    assert counted(step, *CASES["plain"].tensors(grad=True)[:3]) == (2 + 5) * product
    assert counted(step, *CASES["gqa"].tensors(grad=True)[:3]) == (2 + 5) * product
    query, key, value = CASES["plain"].tensors()[:3]
    with sdpa_kernel(SDPBackend.MATH):
        stock = counted(lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value))
    assert counted(lambda: ops.run(query, key, value)) == stock


def test_nothing_is_launched_on_a_cpu():
    ops.reset_launch_counts()
    ops.run(*CASES["plain"].tensors()[:3])
    assert ops.launch_counts() == {}


def test_launches_are_counted_until_they_are_reset():
    """In a process of its own, where Triton's interpreter runs the kernels on CPU tensors."""
    out = run_python(
        """
        import torch
        from torch_flashbackend import ops
        assert ops.launch_counts() == {}
        query = torch.randn(1, 2, 8, 16)
        arguments = (query, query, query, None, None, 0.0, False, 0.25)
        ops._attention_cuda(*arguments, "query")
        out, logsumexp = ops._attention_forward_cuda(*arguments, "query")
        ops._attention_backward_cuda(out, *arguments[:4], out, logsumexp, *arguments[4:], [True, True, True, False])
        print(sorted(ops.launch_counts().items()))
        ops.reset_launch_counts()
        print(ops.launch_counts())
        """,
        TRITON_INTERPRET="1",
    )
    counts = [("attention_backward_key_value", 1), ("attention_backward_query", 1)]
    counts += [("attention_decode", 1), ("attention_forward", 1)]  # few queries; a logsumexp for the backward
    assert out.splitlines() == [str(counts), "{}"]


@pytest.fixture
def failing_backward(monkeypatch):
    def install(error: Exception) -> None:
        def fail(*_):
            raise error

        monkeypatch.setattr(ops, "_attention_backward", fail)

    return install


@pytest.mark.parametrize("name", ["plain", "gqa", "bool mask", "float mask per key", "dropout"])
def test_backward_whose_kernel_is_unavailable_takes_the_math_path_and_warns_once(failing_backward, name):
    from torch_flashbackend.kernels import KernelUnavailable

    case = CASES[name]
    query, key, value, mask, _ = case.tensors(grad=True)
    leaves = [t for t in (query, key, value, mask) if t is not None and t.requires_grad]

    def gradients():
        torch.manual_seed(2)
        out = ops.run(query, key, value, mask, *case.options)
        return torch.autograd.grad(out, leaves, sample(*out.shape, seed=9))

    expected = gradients()
    failing_backward(KernelUnavailable("Triton could not compile it: no PTX"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = gradients()
    assert [str(w.message) for w in caught] == [
        "torch_flashbackend: Triton could not compile it: no PTX; the math path computes this backward"
    ]
    torch.testing.assert_close(found, expected)


def test_backward_that_fails_otherwise_raises(failing_backward):
    query, key, value, _, _ = CASES["plain"].tensors(grad=True)
    failing_backward(RuntimeError("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        ops.run(query, key, value).sum().backward()


def test_a_batch_of_gradients_is_not_taken_for_an_ordinary_tensor():
    """Below autograd only ordinary tensors go past the dispatcher, straight to the kernels' launchers."""
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad_out):
            seen.append(_torch.unobserved(grad_out))
            return 2 * grad_out

    x = torch.randn(3, requires_grad=True)
    torch.autograd.grad(Double.apply(x), x, torch.ones(2, 3), is_grads_batched=True)
    torch.autograd.grad(Double.apply(x), x, torch.ones(3))
    assert seen == [False, True]
