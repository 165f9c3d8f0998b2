"""Is our kernel faster than stock's for this call? The answer comes from measurements, one file per GPU.

May import torch and problem.py. Imported by routing.py, precompile.py and the command line (`explain`, `info`).
policies/README.md describes the files; benchmarks/make_policy.py writes them.

A call is compared with the measured calls of the same kind (case, causal, dtype, decoding or not) at the nearest
measured head dimension at or above its own (where none is, at the largest, up to 256), and there with the two measured
sizes around its own work, 4·B·H·Sq·Sk·D operations: it is taken where both were faster by at least `MARGIN`. Of several
calls of one size those with the nearest lengths count. Where nothing comparable was measured, or only calls much larger
than this one, `_unmeasured` has a short rule. Nothing here compares a symbolic size: the largest measured size speaks
for it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import math
import re
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .problem import Problem

__all__ = ["MARGIN", "Policy", "Row", "Verdict", "full_name", "judge", "policies", "policy_for"]

# The least measured ratio of times that counts as faster; below it, noise decides.
MARGIN = 1.02
# Up to this many query positions a call reads keys and values and does little else: decoding. Such calls are compared
# with each other only.
DECODE_SEQLEN = 16
# A call with less than this part of the least measured work is another matter: launching it is what takes time.
SMALLEST_PART = 0.25
# GPUs for which stock's kernel for packed sequences (FlashAttention-2) was written.
FLASH_2_GPUS = ("sm_80", "sm_86", "sm_87", "sm_89")
# Operations of a packed call, padded to its longest sequence, below which launching decides: about 20 us on an H200.
LEAST_PACKED_WORK = 4e9
# Stock works for 2 to 5 ms in Python at each call on nested tensors, whoever's kernels run; where ours run, nested.py
# takes 0.1. Up to this many operations for each multiprocessor, padding included, they are done within a millisecond.
NESTED_WORK = 8e8
# Our kernels for one architecture, and those for all.
SPECIAL, PORTABLE = "cuda", "triton"
# A ratio that stands for "stock refused".
REFUSED = 1e8

POLICY_FOLDER: Any = importlib.resources.files(__package__).joinpath("policies")


class Verdict(NamedTuple):
    """take: should the call be ours? reason: short and countable. message: the numbers behind it.

    ratio: stock's time divided by ours at the measurement that decided, NaN where there is none.
    """

    take: bool
    reason: str
    message: str
    ratio: float = math.nan


@dataclass(frozen=True)
class Row:
    """One measured call; forward and training are stock's time divided by ours, None where not measured.

    backend: whose kernels ran, "cuda" or "triton". Of "cuda", training is its forward with the backward that goes with
    it.
    """

    case: str
    causal: bool
    dtype: str
    head_dim: int
    head_dim_v: int
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    forward: float | None
    training: float | None
    backend: str = "triton"

    @functools.cached_property
    def work(self) -> int:
        """Operations of the forward pass, the causal half included."""
        return 4 * self.batch * self.heads * self.seqlen_q * self.seqlen_k * self.head_dim

    @functools.cached_property
    def call(self) -> tuple[Any, ...]:
        """What was measured, whoever's kernels ran."""
        return tuple(getattr(self, name) for name in _FACTS)

    @property
    def decode(self) -> bool:
        """Was this a decoding step?"""
        return self.seqlen_q <= DECODE_SEQLEN

    def ratio(self, training: bool) -> float:
        """Stock's time divided by ours, of forward and backward or of the forward alone; NaN if not measured."""
        measured = self.training if training else self.forward
        return math.nan if measured is None else measured

    def __str__(self) -> str:
        head_dim = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        seqlen = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}x{self.seqlen_k}"
        return f"batch {self.batch}, heads {heads}, seqlen {seqlen}, head_dim {head_dim}"


# The fields of a row that say which call it is.
_FACTS = tuple(field.name for field in dataclasses.fields(Row) if field.name not in ("forward", "training", "backend"))


@dataclass(frozen=True, eq=False)
class Policy:
    """All that was measured on one GPU."""

    gpu: str
    sm_count: int | None
    source: str
    rows: tuple[Row, ...]


def full_name(gpu: str | None) -> str | None:
    """A measured GPU's whole name for words of it that say which, where only one fits: "H200" is "NVIDIA H200".

    Any other name is returned as it is. A maker's name alone ("NVIDIA") says nothing, and an "H20" is no "H200".
    """
    if not gpu or not any(letter.isdigit() for letter in gpu):
        return gpu
    words = re.compile(rf"(?<![a-z0-9]){re.escape(gpu)}(?![a-z0-9])", re.IGNORECASE)
    fitting = [name for name in policies() if words.search(name)]
    return fitting[0] if len(fitting) == 1 else gpu


def judge(problem: Problem, backend: str) -> Verdict:
    """Should this call be taken by these kernels of ours, because they are faster than stock, and than our others?

    A call may be of several cases (a mask and dropout, say): it is taken if each of them says so.
    """
    measured = policy_for(problem)
    verdict = _judge_all(problem, backend, measured)
    if backend != SPECIAL or not verdict.take:
        return verdict
    # Whatever the special kernels can run, the portable ones can too.
    same, other = _judge_both(problem, measured)
    if other.take and other.ratio > MARGIN * same.ratio:
        return _slower_than_portable(verdict, other)
    return verdict


def not_the_fastest_of_ours(problem: Problem, backend: str) -> Verdict | None:
    """Why a call that stock must not have is not for these kernels of ours; None: they are the ones to run it.

    The portable kernels run what nobody has measured.
    """
    if backend != SPECIAL:
        return None
    measured = policy_for(problem)
    verdict = _judge_all(problem, SPECIAL, measured)
    if math.isnan(verdict.ratio):
        return None if verdict.take else verdict
    same, other = _judge_both(problem, measured)
    if verdict.take:
        slower = other.take and other.ratio > MARGIN * same.ratio
    else:  # and stock is faster than these: so are the portable ones, unless they were measured to be no better
        slower = not other.ratio <= MARGIN * same.ratio
    return _slower_than_portable(verdict, other) if slower else None


def _judge_both(problem: Problem, measured: Policy | None) -> tuple[Verdict, Verdict]:
    """Of the special and of the portable kernels, by calls that both were measured at, where there are any."""
    return (
        _judge_all(problem, SPECIAL, measured, beside=PORTABLE),
        _judge_all(problem, PORTABLE, measured, beside=SPECIAL),
    )


def _slower_than_portable(verdict: Verdict, other: Verdict) -> Verdict:
    message = f"{verdict.message}; {PORTABLE} is faster: {other.message}"
    return Verdict(False, f"measured slower than {PORTABLE}", message, verdict.ratio)


def _judge_all(problem: Problem, backend: str, measured: Policy | None, beside: str | None = None) -> Verdict:
    verdicts = [_judge_case(problem, case, measured, backend, beside) for case in cases(problem)]
    return next((verdict for verdict in verdicts if not verdict.take), verdicts[0])


def cases(problem: Problem) -> tuple[str, ...]:
    """What kinds of call this is, in the vocabulary of the policy files, the one that matters most first."""
    if problem.packed:
        return ("packed",)
    found = []
    if problem.mask is not None:
        if problem.mask.requires_grad and problem.requires_grad:
            found.append("mask_grad")
        else:
            found.append("bool_mask" if problem.mask.dtype is torch.bool else "float_mask")
    if problem.dropout_p:
        found.append("dropout")
    # Beside a mask stock runs other kernels than for the plain grouped calls that were measured, and so do we.
    if problem.mask is None and problem.enable_gqa and problem.query_shape[-3:-2] != problem.key_shape[-3:-2]:
        found.append("gqa")
    return tuple(found) or ("dense",)


def policy_for(problem: Problem) -> Policy | None:
    """The measurements of the call's GPU, or None."""
    policy = policies().get(problem.gpu_name)
    if policy is None or (problem.sm_count and policy.sm_count and problem.sm_count != policy.sm_count):
        return None
    return policy


@functools.cache
def policies() -> dict[str, Policy]:
    """All policies that are installed, by GPU name. Read once; `policies.cache_clear()` forgets them.

    A file that cannot be read is left out with a warning: a wrong policy costs time, an exception costs the program.
    """
    found: dict[str, Policy] = {}
    if not POLICY_FOLDER.is_dir():
        return found
    for file in sorted(POLICY_FOLDER.iterdir(), key=lambda file: file.name):
        if not file.name.endswith(".json"):
            continue
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            fields = [field.name for field in dataclasses.fields(Row) if field.name != "backend"]
            rows = tuple(
                Row(**{name: row[name] for name in fields}, backend=row.get("backend", PORTABLE))
                for row in data["rows"]
            )
            found[data["gpu"]] = Policy(data["gpu"], data.get("sm_count"), data.get("source", file.name), rows)
        except (KeyError, OSError, TypeError, ValueError) as error:
            warnings.warn(f"torch_flashbackend: policy {file.name} left out: {error!r}", stacklevel=2)
    return found


def _judge_case(problem: Problem, case: str, policy: Policy | None, backend: str, beside: str | None = None) -> Verdict:
    """beside: another backend of ours; calls that it was measured at too decide, where there are any."""
    if problem.entry == "nested" and not problem.symbolic and _work(problem) <= NESTED_WORK * (problem.sm_count or 0):
        message = "stock spends milliseconds in Python on a call on nested tensors, our kernels less than one"
        return Verdict(True, "nested tensors: Python decides", message)
    if policy is None:
        return _unmeasured(problem, case, f"no measurements for {problem.gpu_name or 'this GPU'}", backend)
    training, symbolic = problem.requires_grad, problem.symbolic
    rows = _comparable(problem, case, policy, training, symbolic, backend, beside)
    if not rows:
        kind = "training" if training else "forward"
        causal = "causal " if problem.is_causal else ""
        what = f"{causal}{case} {_dtypes(problem)[0]} {kind}"
        if not symbolic and problem.seqlen_q <= DECODE_SEQLEN:
            what += f" of at most {DECODE_SEQLEN} queries"
        why = f"no measurement of {what} at head_dim {problem.head_dim} on {policy.gpu}"
        return _unmeasured(problem, case, why, backend)
    neighbours = _neighbours(rows, None if symbolic else problem)
    worst = min(neighbours, key=lambda row: row.ratio(training))
    ratio = worst.ratio(training)
    mode = "training" if training else "forward"
    if ratio >= REFUSED:
        message = f"stock refused the nearest measured call ({worst}, {case})"
        return Verdict(True, f"stock refuses: {case}", message, ratio)
    # Below the margin it is to read so, however it is rounded.
    shown = ratio if ratio >= MARGIN else min(ratio, MARGIN - 0.01)
    message = f"{shown:.2f} times stock's speed measured at {worst} ({case}, {mode})"
    if ratio >= MARGIN:
        if not symbolic and _work(problem) < SMALLEST_PART * min(row.work for row in rows):
            return _unmeasured(problem, case, f"{message}, and no call as small as this one", backend)
        return Verdict(True, f"measured faster: {case}", message, ratio)
    return Verdict(False, "measured slower", f"{message}; {MARGIN} is asked", ratio)


def _comparable(
    problem: Problem, case: str, policy: Policy, training: bool, symbolic: bool, backend: str, beside: str | None
) -> list[Row]:
    """Rows of the same kind, all of one pair of head dimensions: the nearest at or above the call's."""
    decode = not symbolic and problem.seqlen_q <= DECODE_SEQLEN
    head_dim, head_dim_v = (size if isinstance(size, int) else None for size in (problem.head_dim, problem.head_dim_v))
    dims = head_dim, head_dim_v
    arguments = case, problem.is_causal, _dtypes(problem), decode, dims, training
    if beside is not None:
        return _measured_on_both(policy, backend, beside, *arguments)
    return _look_up(policy, backend, *arguments)


@functools.lru_cache(1024)
def _measured_on_both(policy: Policy, backend: str, beside: str, *arguments: Any) -> list[Row]:
    """Of the first backend's rows those of calls that the second was measured at; all where there are none."""
    rows = _look_up(policy, backend, *arguments)
    others = {row.call for row in _look_up(policy, beside, *arguments)}
    return [row for row in rows if row.call in others] or rows


# A program whose lengths change asks for the same rows at every step.
@functools.lru_cache(1024)
def _look_up(
    policy: Policy, backend: str, case: str, causal: bool, dtypes: tuple[str, ...], decode: bool,
    wanted: tuple[int | None, int | None], training: bool,
) -> list[Row]:  # fmt: skip
    rows: list[Row] = []
    for dtype in dtypes:
        rows = [
            row
            for row in policy.rows
            if (row.backend, row.case, row.causal, row.dtype, row.decode) == (backend, case, causal, dtype, decode)
            and not math.isnan(row.ratio(training))
        ]
        if rows:
            break
    if not rows:
        return []
    dims = sorted({(row.head_dim, row.head_dim_v) for row in rows})
    head_dim, head_dim_v = wanted
    if head_dim is None or head_dim_v is None:
        chosen = dims[-1]
    else:
        above = [pair for pair in dims if pair[0] >= head_dim and pair[1] >= head_dim_v]
        # An unequal pair says little about equal head dimensions, so it answers only where no equal pair can.
        above.sort(key=lambda pair: (pair != wanted, (pair[0] == pair[1]) != (head_dim == head_dim_v), pair))
        if not above and max(head_dim, head_dim_v) > 256:
            return []  # another kernel of stock's: smaller head dimensions say nothing
        chosen = above[0] if above else dims[-1]
        if training and backend == SPECIAL and chosen != wanted:
            return []  # their backward is the portable kernels', which do worse between powers of two
    return [row for row in rows if (row.head_dim, row.head_dim_v) == chosen]


def _neighbours(rows: list[Row], problem: Problem | None) -> list[Row]:
    """Rows measured at the sizes just below and just above, at each the nearest in shape; None: the largest.

    A shape is both lengths and how many query heads share a key head, which decides how few queries are computed.
    """
    sizes = sorted({row.work for row in rows})
    if problem is None:
        return [row for row in rows if row.work == sizes[-1]]
    work, shape = _work(problem), (problem.seqlen_q, problem.seqlen_k, _group(problem))
    below = [size for size in sizes if size <= work]
    above = [size for size in sizes if size >= work]
    found = []
    for size in dict.fromkeys(below[-1:] + above[:1]):
        same = [row for row in rows if row.work == size]
        distances = {row: _distance(shape, (row.seqlen_q, row.seqlen_k, row.heads / row.kv_heads)) for row in same}
        nearest = min(distances.values())
        found += [row for row, distance in distances.items() if distance == nearest]
    return found


def _distance(shape: tuple[float, ...], other: tuple[float, ...]) -> float:
    """How far two shapes are from each other, in factors of two."""
    return sum(abs(math.log2(max(a, 1) / b)) for a, b in zip(shape, other, strict=True))


def _group(problem: Problem) -> float:
    """Query heads for each key head; 1 where there are no heads."""
    if problem.rank < 3:
        return 1.0
    return problem.query_shape[-3] / max(problem.key_shape[-3], 1)


def _work(problem: Problem) -> int:
    batch_and_heads = 1
    for index in range(2, problem.rank):
        sizes = [shape[-index - 1] for shape in (problem.query_shape, problem.key_shape, problem.value_shape)]
        batch_and_heads *= max(sizes)
    return 4 * batch_and_heads * problem.seqlen_q * problem.seqlen_k * problem.head_dim


def _dtypes(problem: Problem) -> tuple[str, ...]:
    """Names in the policy files that this call's dtype may use, the best first."""
    if problem.query_dtype is torch.float32:
        return ("float32_tf32",) if problem.tf32 else ("float32",)
    if problem.query_dtype is torch.float16:
        return ("float16", "bfloat16")
    return (str(problem.query_dtype).removeprefix("torch."),)


def _unmeasured(problem: Problem, case: str, why: str, backend: str) -> Verdict:
    """Without a measurement: what stock has no good kernel for is taken, what it does well is left to it.

    The special kernels have nothing that stock does badly and the portable ones do not do as well.
    """
    if backend == SPECIAL:
        return Verdict(False, "unmeasured", f"{why}")
    if case == "packed":
        if problem.architecture in FLASH_2_GPUS:
            return Verdict(False, "unmeasured", f"{why}; packed sequences are left to stock's flash kernel here")
        if not problem.symbolic and _work(problem) < LEAST_PACKED_WORK:
            return Verdict(False, "unmeasured", f"{why}; so small a call is left to stock")
        message = f"{why}; stock's flash kernel for packed sequences was written for older GPUs, so it is taken"
        return Verdict(True, "unmeasured, likely faster: packed", message)
    unusual = _unusual_head_dim(problem)
    # Dropout beside a mask too: it leaves stock the same kernel.
    if problem.mask is not None:
        return Verdict(True, f"unmeasured, likely faster: {case}", f"{why}; stock is slow at masks, so it is taken")
    if unusual:
        message = f"{why}; {unusual} is slow in stock, so it is taken"
        return Verdict(True, "unmeasured, likely faster: head_dim", message)
    return Verdict(False, "unmeasured", f"{why}; a plain {case} call is left to stock")


def _unusual_head_dim(problem: Problem) -> str:
    head_dim, head_dim_v = problem.head_dim, problem.head_dim_v
    if not isinstance(head_dim, int) or not isinstance(head_dim_v, int):
        return ""
    if head_dim != head_dim_v:
        return f"a value head_dim of {head_dim_v} with head_dim {head_dim}"
    if head_dim > 256:
        return f"head_dim {head_dim}, over 256,"
    if head_dim % 8:
        return f"head_dim {head_dim}, no multiple of 8,"
    return ""
