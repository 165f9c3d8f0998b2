"""What every numerical test shares: a float64 oracle, sample calls, and the one tolerance rule.

Imports torch and the standard library, nothing of torch_flashbackend, so that it can judge it. Imported by tests/ and
tests/gpu/. All of it runs on a CPU too.

The tolerance rule
------------------
An error is the difference from attention computed in float64, measured twice: its largest element and its Frobenius
norm (the relative Frobenius norm divides both sides of every comparison by the same norm of the expected tensor, so
the undivided norms are compared). A result passes when both measures are at most

    TOLERANCE_FACTOR * max(best, model)        with TOLERANCE_FACTOR = 2

* `best` is the smallest error that one of PyTorch's own kernels (flash, efficient, cuDNN, math) makes for the same call
  in the same dtype. A kernel that refuses the call, or answers with NaN or infinity, does not compete; one that follows
  other semantics (the mean of V for a masked row, say) has an error that never is the smallest.
* `model` is the rounding that no kernel feeding half-precision matrix units avoids, computed from the data in float64:
  the probabilities, the score gradients and each result are rounded once to the dtype, scores carry the rounding of
  float32 accumulation, and independent errors add in squares. It matters where the math path, which upcasts everything
  to float32, is exact by luck (one key, cancelled gradients), and where no kernel of PyTorch takes the call.

For the largest element the model is doubled: it is a standard deviation, and the largest of many exceeds it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

TOLERANCE_FACTOR = 2.0
HALF_TYPES = (torch.float16, torch.bfloat16)
STOCK_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
# Three TF32 products, which stand for one float32 product on tensor cores, keep at least this many bits.
FLOAT32_UNIT = 2.0**-21
TF32_UNIT = 2.0**-11
# float32 rounding of a score after its mask was added. Beyond LARGE_SCORE the score is absorbed by the mask in every
# arithmetic alike, so nothing is allowed for it.
SCORE_UNIT = 2.0**-23
LARGE_SCORE = 1e6


def forget_plans() -> None:
    """Let every call be planned anew: what plans are made by has been changed, or put back, by a test."""
    from torch_flashbackend import decisions, ops
    from torch_flashbackend.kernels.cuda import backward, forward
    from torch_flashbackend.kernels.triton import attention

    for kept in (attention._plans, forward._plans, backward._plans, ops._backwards):
        kept.clear()
    decisions.forget()


def in_threads(work: Callable[[int], None], number: int) -> None:
    """work(index) in so many fresh threads, which begin at once; when all have ended the first error is raised here."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(number)

    def guarded(index: int) -> None:
        try:
            barrier.wait(60)
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@contextlib.contextmanager
def deterministic_mode(wanted: bool = True) -> Iterator[None]:
    """Under torch.use_deterministic_algorithms, or not."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@dataclasses.dataclass
class Call:
    """One call of scaled_dot_product_attention; `note` says in words how it was made.

    query [..., H, Sq, D], key [..., Hkv, Sk, D], value [..., Hkv, Sk, Dv]; attn_mask bool or float or None. softcap,
    which scaled_dot_product_attention has not: scores become softcap * tanh(score / softcap) before the mask; 0: none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    mask_grad: bool = False
    note: str = ""
    softcap: float = 0.0

    @property
    def softmax_scale(self) -> float:
        return 1.0 / math.sqrt(self.query.size(-1)) if self.scale is None else self.scale

    def leaves(self, grad: bool = True) -> Call:
        """The same call on leaf tensors of the same memory layout; those that have a gradient require it."""

        def leaf(tensor: Tensor, wanted: bool) -> Tensor:
            return tensor.detach().requires_grad_(wanted)

        mask = self.attn_mask
        if mask is not None:
            mask = leaf(mask, grad and self.mask_grad) if mask.is_floating_point() else mask.detach()
        query, key, value = (leaf(t, grad) for t in (self.query, self.key, self.value))
        return dataclasses.replace(self, query=query, key=key, value=value, attn_mask=mask)

    def plain(self) -> Call:
        """The same values in contiguous, aligned memory: some of PyTorch's kernels fault on anything else."""

        def copy(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.detach().clone(memory_format=torch.contiguous_format)

        return dataclasses.replace(
            self, query=copy(self.query), key=copy(self.key), value=copy(self.value), attn_mask=copy(self.attn_mask)
        )

    def differentiable(self) -> dict[str, Tensor]:
        """The inputs that require a gradient, by name."""
        inputs = {"query": self.query, "key": self.key, "value": self.value, "attn_mask": self.attn_mask}
        return {name: t for name, t in inputs.items() if t is not None and t.requires_grad}

    def run(self, function: Callable[..., Tensor] | None = None) -> Tensor:
        function = F.scaled_dot_product_attention if function is None else function
        return function(
            self.query,
            self.key,
            self.value,
            attn_mask=self.attn_mask,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=self.enable_gqa,
        )

    def describe(self) -> str:
        mask = "none" if self.attn_mask is None else f"{self.attn_mask.dtype} {list(self.attn_mask.shape)}"
        layout = [list(t.stride()) for t in (self.query, self.key, self.value)]
        return (
            f"{self.note} query {list(self.query.shape)} key {list(self.key.shape)} value {list(self.value.shape)} "
            f"{self.query.dtype} strides {layout} mask {mask} causal {self.is_causal} scale {self.scale} "
            f"gqa {self.enable_gqa}"
        )


# ----------------------------------------------------------------------------------------------------------- the oracle


def attention_float64(call: Call, keep: Tensor | None = None, dropout_p: float = 0.0) -> Tensor:
    """Attention in float64, differentiable. `keep` [..., H, Sq, Sk] are the entries that dropout kept.

    A row with no key it may see gives zeros and zero gradients. is_causal is aligned at the top left corner.
    """
    probabilities, value = _probabilities(call)
    if keep is not None:
        probabilities = probabilities * keep / (1.0 - dropout_p)
    return probabilities @ value


def _probabilities(call: Call) -> tuple[Tensor, Tensor]:
    scores, value = _scores(call)
    dead = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0), value


def _scores(call: Call) -> tuple[Tensor, Tensor]:
    """Scaled and masked scores [..., H, Sq, Sk] and the value tensor with one head per query head, in float64."""
    query, key, value = call.query.double(), call.key.double(), call.value.double()
    if call.enable_gqa:
        group = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
    scores = (query @ key.mT) * call.softmax_scale
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.is_causal:
        below = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~below, -math.inf)
    if call.attn_mask is not None:
        if call.attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~call.attn_mask, -math.inf)
        else:
            scores = scores + call.attn_mask.double()
    return scores, value


def attention_rows_float64(call: Call, rows: Tensor) -> Tensor:
    """The oracle for some query rows only (causal calls and masks included), for sequences too long for all of them."""
    return attention_float64(some_rows(call, rows))


# ------------------------------------------------------------------------------------------------ expectation and model


@dataclasses.dataclass
class Expected:
    """Float64 results ("out", and gradients by input name) and the model's standard deviations."""

    values: dict[str, Tensor]
    deviations: dict[str, Tensor]


def expect(call: Call, grad_out: Tensor | None = None, tf32: bool = False) -> Expected:
    """The oracle's output and, with grad_out [..., H, Sq, Dv], its gradients, with the rounding model of each."""
    leaves = call.leaves(grad=grad_out is not None)
    wide = _in_float64(leaves)
    out = attention_float64(wide)
    values = {"out": out.detach()}
    if grad_out is not None:
        inputs = wide.differentiable()
        gradients = torch.autograd.grad(out, list(inputs.values()), grad_out.double())
        values.update(zip(inputs, gradients, strict=True))
    with torch.no_grad():
        deviations = _rounding_model(leaves, values, grad_out, tf32)
    return Expected(values, deviations)


def expect_logsumexp(call: Call) -> Expected:
    """The oracle's "logsumexp" [..., H, Sq] of a call, -inf for rows without a key, and its model.

    Rounding of the scores, weighted as they count, and of the result and its sum, which are float32.
    """
    wide = _in_float64(call.leaves(grad=False))
    scores, _ = _scores(wide)
    probabilities, _ = _probabilities(wide)
    value = scores.logsumexp(-1)
    key = wide.key
    if call.enable_gqa:
        key = key.repeat_interleave(wide.query.size(-3) // key.size(-3), -3)
    score_error = abs(call.softmax_scale) * FLOAT32_UNIT * (wide.query.square() @ key.square().mT).sqrt()
    score_error = score_error + SCORE_UNIT * scores.masked_fill(scores == -math.inf, 0.0).abs()
    own = FLOAT32_UNIT * (1.0 + value.masked_fill(value == -math.inf, 0.0).abs())
    deviation = ((probabilities * score_error).square().sum(-1) + own.square()).sqrt()
    return Expected({"logsumexp": value}, {"logsumexp": deviation})


def some_rows(call: Call, rows: Tensor) -> Call:
    """The call on some of its queries, their causal mask as a mask: for sequences too long for an oracle of all."""
    mask = call.attn_mask
    if mask is not None and mask.size(-2) > 1:
        mask = mask.index_select(-2, rows)
    if call.is_causal:
        mask = rows[:, None] >= torch.arange(call.key.size(-2), device=rows.device)[None, :]
    return dataclasses.replace(call, query=call.query.index_select(-2, rows), attn_mask=mask, is_causal=False)


def _in_float64(call: Call) -> Call:
    """The call on float64 leaves: gradients of narrower leaves would arrive rounded to their dtype."""

    def wide(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point():
            return tensor
        return tensor.detach().double().requires_grad_(tensor.requires_grad)

    return dataclasses.replace(
        call, query=wide(call.query), key=wide(call.key), value=wide(call.value), attn_mask=wide(call.attn_mask)
    )


def _rounding_model(call: Call, values: dict[str, Tensor], grad_out: Tensor | None, tf32: bool) -> dict[str, Tensor]:
    """Standard deviation of each result's rounding error, element by element (see the module's docstring)."""
    dtype = call.query.dtype
    half = dtype in HALF_TYPES
    unit = torch.finfo(dtype).eps / 2 if half else (TF32_UNIT if tf32 else FLOAT32_UNIT)
    store = torch.finfo(dtype).eps / 2
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    accumulate = TF32_UNIT if (tf32 and not half) else FLOAT32_UNIT

    query, key = call.query.double(), call.key.double()
    if call.enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
    scores, value = _scores(call)
    probabilities, _ = _probabilities(call)
    magnitude = scores.abs()
    magnitude = torch.where(magnitude < LARGE_SCORE, magnitude, torch.zeros_like(magnitude))
    score_error = abs(call.softmax_scale) * accumulate * (query.square() @ key.square().mT).sqrt()
    score_error = score_error + SCORE_UNIT * magnitude

    probability_error = (unit * probabilities + smallest).square() + (probabilities * score_error).square()
    out_error = probability_error @ value.square() + (store * values["out"].abs() + smallest).square()
    deviations = {"out": out_error.sqrt()}
    if grad_out is None:
        return deviations

    grad = grad_out.double()
    grad_probabilities = grad @ value.mT
    delta = (grad * values["out"]).sum(-1, keepdim=True)
    centred = grad_probabilities - delta
    delta_error = (out_error * grad.square()).sum(-1, keepdim=True)  # squared, shared by a whole row
    product_error = (accumulate**2) * (grad.square() @ value.square().mT)
    passed_on = probabilities
    if call.softcap:  # the derivative of the cap; its own rounding is small beside the scores'
        derivative = 1.0 - torch.tanh((query @ key.mT) * (call.softmax_scale / call.softcap)).square()
        centred, passed_on = centred * derivative, probabilities * derivative
    grad_scores = probabilities * centred
    own_error = (unit * grad_scores.abs() + smallest).square() + probabilities.square() * (
        product_error + (centred * score_error).square()
    )
    grad_score_error = own_error + passed_on.square() * delta_error
    scale = call.softmax_scale

    def finish(name: str, square: Tensor, like: Tensor) -> None:
        unit_of = torch.finfo(like.dtype).eps / 2
        if call.enable_gqa and name in ("key", "value"):
            square = square.unflatten(-3, (like.size(-3), -1)).sum(-3)
        square = square.sum_to_size(like.shape)
        deviations[name] = (square + (unit_of * values[name].abs() + smallest).square()).sqrt()

    inputs = call.differentiable()
    if "query" in inputs:
        square = own_error @ key.square() + delta_error * (passed_on @ key).square()
        finish("query", scale**2 * square, call.query)
    if "key" in inputs:
        finish("key", scale**2 * (grad_score_error.mT @ query.square()), call.key)
    if "value" in inputs:
        finish("value", probability_error.mT @ grad.square(), call.value)
    if "attn_mask" in inputs:
        square = grad_score_error
        if call.attn_mask.size(-1) == 1:  # a sum over keys: the error of delta is shared, it does not average out
            square = own_error.sum(-1, keepdim=True) + delta_error * passed_on.sum(-1, keepdim=True).square()
        finish("attn_mask", square, call.attn_mask)
    return deviations


# --------------------------------------------------------------------------------------------------- the tolerance rule


@dataclasses.dataclass(frozen=True)
class Error:
    """Difference from float64: its largest element and its Frobenius norm; infinity when anything is not finite."""

    maximum: float
    norm: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.maximum) and math.isfinite(self.norm)


def error_of(actual: Tensor, expected: Tensor) -> Error:
    """Raises AssertionError when the shapes differ: that is no rounding."""
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    if actual.numel() == 0:
        return Error(0.0, 0.0)
    difference = actual.detach().double() - expected
    if not bool(difference.isfinite().all()):
        return Error(math.inf, math.inf)
    return Error(difference.abs().max().item(), torch.linalg.vector_norm(difference).item())


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How one tensor fared. `ratio` is error / max(best, model), the larger of the two measures; 2 is the limit.

    `ratio_to_best` is the norm's error over PyTorch's best alone (None: no kernel of PyTorch competes or it is exact).
    """

    name: str
    error: Error
    best: Error | None
    best_kernel: str | None
    model: Error
    ratio: float
    ratio_to_best: float | None

    @property
    def passed(self) -> bool:
        return self.ratio <= TOLERANCE_FACTOR

    def __str__(self) -> str:
        best = "no kernel of PyTorch" if self.best is None else f"{self.best_kernel} {self.best}"
        return f"{self.name}: {self.error}, PyTorch's best {best}, rounding model {self.model}, ratio {self.ratio:.2f}"


def judge(name: str, actual: Tensor, expected: Expected, stock: dict[str, dict[str, Tensor]] | None = None) -> Verdict:
    """Applies the rule to one tensor. `stock` holds the results of PyTorch's kernels by kernel and tensor name."""
    value, deviation = expected.values[name], expected.deviations[name]
    error = error_of(actual, value)
    model = Error(0.0, 0.0)
    if deviation.numel():
        model = Error(2.0 * deviation.max().item(), torch.linalg.vector_norm(deviation).item())
    errors = {k: error_of(results[name], value) for k, results in (stock or {}).items() if name in results}
    errors = {k: e for k, e in errors.items() if e.finite}
    best_kernel = min(errors, key=lambda k: errors[k].norm) if errors else None
    best = None
    if errors:
        best = Error(min(e.maximum for e in errors.values()), errors[best_kernel].norm)
    floor = best or Error(0.0, 0.0)
    ratio = max(
        _ratio(error.maximum, max(floor.maximum, model.maximum)), _ratio(error.norm, max(floor.norm, model.norm))
    )
    to_best = None if best is None or best.norm == 0.0 else error.norm / best.norm
    return Verdict(name, error, best, best_kernel, model, ratio, to_best)


def _ratio(error: float, allowed: float) -> float:
    if error == 0.0:
        return 0.0
    return math.inf if allowed == 0.0 else error / allowed


def results_of(call: Call, grad_out: Tensor | None, function: Callable[..., Tensor] | None = None) -> dict[str, Tensor]:
    """Runs the call and returns its output and gradients by name."""
    leaves = call.leaves(grad=grad_out is not None)
    out = leaves.run(function)
    results = {"out": out.detach()}
    if grad_out is not None:
        inputs = leaves.differentiable()
        gradients = torch.autograd.grad(out, list(inputs.values()), grad_out, allow_unused=True)
        results.update({n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(inputs.items(), gradients)})
    return results


def stock_results(
    call: Call, grad_out: Tensor | None, kernels: Iterable[str] = tuple(STOCK_KERNELS)
) -> dict[str, dict[str, Tensor]]:
    """What each of PyTorch's kernels answers (call this with the plugin off); kernels that refuse are left out."""
    plain = call.plain()
    # A mask with one column for all keys reaches the fused kernels with stride 0, and "misaligned address" comes back.
    one_column = plain.attn_mask is not None and plain.attn_mask.size(-1) == 1 != plain.key.size(-2)
    if one_column:
        columns = (*plain.attn_mask.shape[:-1], plain.key.size(-2))
        plain = dataclasses.replace(plain, attn_mask=plain.attn_mask.expand(columns).contiguous())
    results = {}
    for name in kernels:
        with warnings.catch_warnings(), sdpa_kernel(STOCK_KERNELS[name]):
            warnings.simplefilter("ignore")
            try:
                results[name] = results_of(plain, grad_out)
                if one_column and "attn_mask" in results[name]:
                    results[name]["attn_mask"] = results[name]["attn_mask"].sum(-1, keepdim=True)
            except RuntimeError as error:
                if "out of memory" not in str(error) and "CUDA error" in str(error):
                    raise  # the context is lost, nothing after this can be believed
    return results


def check(actual: dict[str, Tensor], expected: Expected, stock: dict | None = None, what: str = "") -> list[Verdict]:
    """Judges every tensor of `actual`; raises AssertionError naming each one that fails. Returns the verdicts."""
    verdicts = [judge(name, tensor, expected, stock) for name, tensor in actual.items()]
    failed = [str(v) for v in verdicts if not v.passed]
    assert not failed, "error above twice PyTorch's best\n  " + "\n  ".join(failed) + f"\n  {what}"
    return verdicts


# --------------------------------------------------------------------------------------------------------- sample calls

LAYOUTS = (
    "bhsd",
    "bshd",
    "sbhd",
    "packed",
    "expanded_batch",
    "expanded_heads",
    "unaligned",
    "odd_strides",
    "strided_last",
)
MASK_KINDS = ("none", "causal", "bool", "float", "float32", "dead_rows_bool", "dead_rows_float", "lowest_rows")


def check_logsumexp(logsumexp: Tensor, call: Call, what: str = "") -> list[Verdict]:
    """The same of a call's logsumexp, which of a row without a key is -inf and nothing else."""
    expected = expect_logsumexp(call)
    unseen = expected.values["logsumexp"] == -math.inf
    assert torch.equal(logsumexp == -math.inf, unseen), f"-inf elsewhere than of rows without a key\n  {what}"
    expected.values["logsumexp"].masked_fill_(unseen, 0.0)
    return check({"logsumexp": logsumexp.masked_fill(unseen, 0.0)}, expected, None, what)


def tensor_in_layout(
    shape: tuple[int, int, int, int], layout: str, dtype: torch.dtype, device: torch.device | str, seed: int
) -> Tensor:
    """A random normal tensor [B, H, S, D] of the given memory layout."""
    batch, heads, length, head_dim = shape
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=torch.float32).to(dtype)

    if layout == "bhsd":
        return normal(*shape)
    if layout == "bshd":
        return normal(batch, length, heads, head_dim).transpose(1, 2)
    if layout == "sbhd":
        return normal(length, batch, heads, head_dim).permute(1, 2, 0, 3)
    if layout == "packed":  # one of q, k, v inside a fused projection [B, S, 3, H, D]
        return normal(batch, length, 3, heads, head_dim).select(2, seed % 3).transpose(1, 2)
    if layout == "expanded_batch":
        return normal(1, heads, length, head_dim).expand(shape)
    if layout == "expanded_heads":
        return normal(batch, 1, length, head_dim).expand(shape)
    if layout == "unaligned":  # one element past an aligned address
        return normal(math.prod(shape) + 1)[1:].view(shape)
    if layout == "odd_strides":
        return normal(batch, heads, length, head_dim + 3)[..., :head_dim]
    if layout == "strided_last":
        return normal(batch, heads, length, 2 * head_dim)[..., ::2]
    raise ValueError(f"layout {layout!r} is not one of {', '.join(LAYOUTS)}")


def mask_of_kind(
    kind: str, scores: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str, rng: random.Random
) -> Tensor | None:
    """A mask for scores [B, H, Sq, Sk], broadcast over randomly chosen dimensions; None for "none" and "causal"."""
    if kind in ("none", "causal"):
        return None
    shape = [size if rng.random() < 0.6 else 1 for size in scores]
    if kind in ("dead_rows_bool", "dead_rows_float", "lowest_rows"):
        shape[-1] = scores[-1]
    if rng.random() < 0.3:
        shape = shape[rng.choice([1, 2]) :]
    generator = torch.Generator(device=device).manual_seed(rng.randrange(2**31))
    uniform = torch.rand(shape, generator=generator, device=device)
    if kind in ("bool", "dead_rows_bool"):
        mask = uniform < 0.7
        if kind == "dead_rows_bool":
            mask[..., :: rng.choice([2, 3]), :] = False
        return mask
    mask = (2.0 * torch.randn(shape, generator=generator, device=device)).to(
        torch.float32 if kind == "float32" else dtype
    )
    if kind == "dead_rows_float":
        mask = mask.masked_fill(uniform < 0.2, -math.inf)
        mask[..., :: rng.choice([2, 3]), :] = -math.inf
    if kind == "lowest_rows":
        mask[..., :: rng.choice([2, 3]), :] = torch.finfo(mask.dtype).min
    return mask


# Mostly two of them: each head dimension is compiled anew, and tests of their own go through all the others.
HEAD_DIMS = (*[64] * 7, *[128] * 6, 8, 40, 80, 96, 192, 256, 33)


def random_call(seed: int, device: torch.device | str, dtype: torch.dtype | None = None, largest: int = 640) -> Call:
    """A call drawn from a fixed seed: shapes up to `largest` long, every layout, every kind of mask, GQA, any scale."""
    rng = random.Random(seed)
    dtype = dtype or rng.choice([torch.float16, torch.bfloat16, torch.bfloat16, torch.float32])
    batch, kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 4]), rng.choice([1, 1, 1, 2, 4])

    def length() -> int:
        exact = rng.choice([1, 16, 63, 64, 65, 127, 128, 192, 256, 320, 448, 512])
        return min(exact if rng.random() < 0.5 else rng.randint(1, largest), largest)

    seqlen_q = length()
    seqlen_k = seqlen_q if rng.random() < 0.5 else length()
    head_dim = rng.choice(HEAD_DIMS)
    head_dim_v = head_dim if rng.random() < 0.85 else rng.choice(HEAD_DIMS)
    layouts = [rng.choice(LAYOUTS if rng.random() < 0.5 else ("bhsd", "bshd")) for _ in range(3)]
    kind = rng.choice(MASK_KINDS)
    scale = rng.choice([None, None, None, 0.5, 1.0, -0.3, 0.0])
    query = tensor_in_layout((batch, kv_heads * group, seqlen_q, head_dim), layouts[0], dtype, device, seed * 4)
    key = tensor_in_layout((batch, kv_heads, seqlen_k, head_dim), layouts[1], dtype, device, seed * 4 + 1)
    value = tensor_in_layout((batch, kv_heads, seqlen_k, head_dim_v), layouts[2], dtype, device, seed * 4 + 2)
    scores = (batch, kv_heads * group, seqlen_q, seqlen_k)
    mask = mask_of_kind(kind, scores, dtype, device, rng)
    return Call(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=kind == "causal",
        scale=scale,
        enable_gqa=group > 1,
        mask_grad=mask is not None and mask.is_floating_point() and rng.random() < 0.6,
        note=f"random call {seed} ({', '.join(layouts)}; {kind})",
    )


def random_calls(seeds: Iterable[int], device: torch.device | str) -> Iterator[Call]:
    return (random_call(seed, device) for seed in seeds)


def simple_call(
    batch: int = 2,
    heads: int = 4,
    seqlen_q: int = 128,
    seqlen_k: int | None = None,
    head_dim: int = 64,
    *,
    head_dim_v: int | None = None,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    layout: str = "bhsd",
    seed: int = 0,
    **options,
) -> Call:
    """A dense call of the given sizes; `options` are Call's other fields."""
    kv_heads = heads if kv_heads is None else kv_heads
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    query = tensor_in_layout((batch, heads, seqlen_q, head_dim), layout, dtype, device, seed)
    key = tensor_in_layout((batch, kv_heads, seqlen_k, head_dim), layout, dtype, device, seed + 1)
    value = tensor_in_layout((batch, kv_heads, seqlen_k, head_dim_v or head_dim), layout, dtype, device, seed + 2)
    return Call(query, key, value, enable_gqa=kv_heads != heads, **options)


def gradient_for(call: Call, seed: int = 9) -> Tensor:
    """A random grad_out [..., H, Sq, Dv] for the call, in its dtype."""
    batch = torch.broadcast_shapes(call.query.shape[:-2], () if call.enable_gqa else call.key.shape[:-2])
    generator = torch.Generator(device=call.query.device).manual_seed(seed)
    shape = (*batch, call.query.size(-2), call.value.size(-1))
    return torch.randn(shape, generator=generator, device=call.query.device, dtype=torch.float32).to(call.query.dtype)


def block_pattern(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, *, block: int = 64, device: torch.device | str = "cpu"
) -> Tensor:
    """A random mask [., ., Sq, Sk] of blocks, each empty, full, random or (floats) lowest or a bias, at any offset.

    Nothing but chance decides what is side by side, rows and columns without a single key included.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.rand(size, generator=generator)

    outer, (seqlen_q, seqlen_k) = shape[:2], shape[2:]
    rows, keys = -(-seqlen_q // block), -(-seqlen_k // block)
    kinds = draw(*outer, rows, keys)
    kinds = torch.where(draw(*outer, rows, 1) < 0.15, 0.1, kinds)  # whole rows of blocks without anything
    kinds = torch.where(draw(*outer, 1, keys) < 0.15, 0.1, kinds)
    kinds = kinds.repeat_interleave(block, 2).repeat_interleave(block, 3)
    shift = [int(draw(1) * block) if draw(1) < 0.3 else 0 for _ in range(2)]
    kinds = kinds.roll(shift, (2, 3))[:, :, :seqlen_q, :seqlen_k]
    random = draw(*outer, seqlen_q, seqlen_k) < 0.6
    seen = (kinds >= 0.35) & ((kinds < 0.75) | random)
    if dtype == torch.bool:
        return seen.contiguous().to(device)
    mask = torch.zeros(seen.shape).masked_fill(~seen, -math.inf)
    bias = torch.randn(seen.shape, generator=generator)
    mask = torch.where(kinds > 0.88, bias, mask).to(dtype)
    mask[(kinds > 0.15) & (kinds < 0.35)] = torch.finfo(dtype).min
    return mask.to(device)
