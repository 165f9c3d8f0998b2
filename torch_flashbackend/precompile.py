"""warmup(): compile ahead of time what a list of calls will need, with or without a GPU in the machine.

May import torch, nvrtc.py, policy.py, problem.py, routing.py, reference.py and, when it compiles, the kernels. Imported
by the package's `__init__` and by the command line. Binaries go where a call looks for them: the CUDA kernels' to the
cache of nvrtc.py (TORCH_FLASHBACKEND_CACHE), Triton's to its own (TRITON_CACHE_DIR). So an image build fills both.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from . import nvrtc, policy, reference, routing
from .batch_invariance import planned_batch
from .kernels import KernelUnavailable
from .problem import Problem

__all__ = ["NotKeptWarning", "Warmed", "WarmupError", "warmup"]

# Where nobody knows the GPU's number of multiprocessors; tiles may depend on it.
USUAL_SM_COUNT = 132
# Names of the Triton kernels of a call without a mask.
FORWARD = "attention_forward"
BACKWARD = ("attention_backward_query", "attention_backward_key_value")
# Those of a head_dim above 256, of which a call launches some; the others compile to nothing.
WIDE_BACKWARD = (
    *BACKWARD,
    *(f"attention_{name}" for name in ("wide_key", "wide_value", "stored_scores", "stored_query", "stored_key")),
)


class Warmed(NamedTuple):
    """What was done for one call. kernels: names of what was compiled, or found compiled; none where stock runs it.

    failures: "kernel: reason" for what did not compile, each a line.
    """

    call: str
    backend: str
    kernels: tuple[str, ...]
    seconds: float
    failures: tuple[str, ...] = ()


class NotKeptWarning(RuntimeWarning):
    """What `warmup` has compiled serves this process alone."""


class WarmupError(KernelUnavailable):
    """Some kernels did not compile. warmed: what was done for every call, failures among it."""

    def __init__(self, warmed: list[Warmed]) -> None:
        super().__init__("\n".join(dict.fromkeys(failure for one in warmed for failure in one.failures)))
        self.warmed = warmed

    def __reduce__(self) -> Any:
        # Else a copy, in another process say, would be made from the message.
        return type(self), (self.warmed,)


def warmup(
    shapes: Iterable[Sequence[int]],
    *,
    dtypes: Sequence[torch.dtype] | torch.dtype = (torch.bfloat16,),
    causal: Sequence[bool] | bool = (False, True),
    training: Sequence[bool] | bool = (False, True),
    kv_heads: int | None = None,
    seqlen_k: int | None = None,
    head_dim_v: int | None = None,
    backends: Sequence[str] | str | None = None,
    gpu: str | None = None,
    architecture: str | None = None,
    workers: int | None = None,
) -> list[Warmed]:
    """Compile the kernels of calls without a mask, for every combination of the options, several at once.

    shapes: of queries, [batch, num_heads, seqlen_q, head_dim]. dtypes, causal, training (with gradients, backward
    included): which to prepare for. kv_heads, seqlen_k, head_dim_v: those of key and value, as the query's if None.
    backends: as for sdpa_backend; None compiles what the automatic route runs, which is nothing where PyTorch's own
    kernels are faster. gpu, architecture: the GPU by its name ("NVIDIA H200"; "H200" will do), this machine's if None.
    workers: compilers at once, one for each CPU core if None.

    Tensors are taken to be contiguous; other strides are compiled at their first call where that makes a difference.
    Raises ValueError for a shape, dtype, backend, GPU or number of workers that makes no sense and for a call that
    PyTorch would refuse, TypeError for a flag that is none, RuntimeError where no backend of `backends` takes a call.
    What does not compile stops nothing else: WarmupError (a RuntimeError) at the end has the whole report.
    NotKeptWarning (a RuntimeWarning): no folder takes the CUDA kernels, so that another process compiles them again.
    """
    jobs: dict[Any, Callable[[], tuple[str, ...]]] = {}
    calls = []
    # One alone is meant as a list of it.
    dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    causal, training = ((one,) if isinstance(one, bool) else one for one in (causal, training))
    backends = (backends,) if isinstance(backends, str) else backends
    wrong = [dtype for dtype in dtypes if not isinstance(dtype, torch.dtype)]
    if wrong:
        raise ValueError(f"dtypes are torch's, for example torch.bfloat16; got {wrong[0]!r}")
    for name, flags in (("causal", causal), ("training", training)):
        if not isinstance(flags, Sequence) or any(not isinstance(one, bool) for one in flags):
            raise TypeError(f"{name} is True, False or a list of these; got {flags!r}")
    if backends is not None and not backends:
        raise ValueError(f"name at least one backend, in order of preference: {', '.join(routing.BACKENDS)}")
    if workers is not None and workers < 1:
        raise ValueError(f"workers is a number of compilers, 1 or more; got {workers}")
    for shape, dtype, is_causal, gradients in itertools.product(shapes, dtypes, causal, training):
        if isinstance(shape, (int, str)) or len(shape) != 4:
            got = shape if isinstance(shape, (int, str)) else list(shape)
            raise ValueError(f"shapes are a list of [batch, num_heads, seqlen_q, head_dim]; got {got!r} in it")
        problem = Problem.from_shapes(
            shape, dtype=dtype, kv_heads=kv_heads, seqlen_k=seqlen_k, head_dim_v=head_dim_v, is_causal=is_causal,
            training=gradients, gpu=policy.full_name(gpu), architecture=architecture,
        )  # fmt: skip
        if problem.device_type != "cuda":
            raise ValueError('no GPU here to compile for: name one, "NVIDIA H200" for example')
        invalid = routing.first_failure(problem, "math", automatic=False)
        if invalid is not None and invalid.name in routing.PYTORCHS_BUSINESS:
            raise ValueError(invalid.message(problem))
        backend = routing.decide(problem, backends).backend
        found = list(_jobs(problem, backend))
        jobs.update(found)
        calls.append((problem, backend, [key for key, _ in found]))
    took: dict[Any, tuple[tuple[str, ...], float]] = {}
    failed: dict[Any, str] = {}

    def run(key: Any) -> None:
        start = time.perf_counter()
        names: tuple[str, ...] = ()
        try:
            names = jobs[key]()
        except Exception as error:  # compilers raise what they like
            failed[key] = f"{_kernel_of(key)}: {_first_line(error)}"
        took[key] = names, time.perf_counter() - start

    # NVRTC runs without the interpreter's lock; Triton's compiler is Python, and gains nothing.
    with concurrent.futures.ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        native = [pool.submit(run, key) for key in jobs if key[0] == "cuda"]
        for key in jobs:
            if key[0] != "cuda":
                run(key)
        for future in native:
            future.result()
    warmed = [
        Warmed(
            str(problem),
            backend,
            tuple(name for key in keys for name in took[key][0]),
            sum(took[key][1] for key in keys),
            tuple(failed[key] for key in keys if key in failed),
        )
        for problem, backend, keys in calls
    ]
    not_kept = nvrtc.not_kept() if any(key[0] == "cuda" for key in jobs) else None
    if not_kept is not None:
        message = f"the CUDA kernels are compiled for this process alone, not kept on disk: {not_kept}"
        warnings.warn(message, NotKeptWarning, stacklevel=2)
    if failed:
        raise WarmupError(warmed)
    return warmed


def _kernel_of(key: Any) -> str:
    return key[1].entries[-1] if key[0] == "cuda" else key[-1]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _jobs(problem: Problem, backend: str) -> Iterable[tuple[Any, Callable[[], tuple[str, ...]]]]:
    """(key, what to do) for each compilation that a call needs; equal keys are one compilation."""
    if backend == "cuda":
        for specialisation in _specialisations(problem):
            yield ("cuda", specialisation), functools.partial(_compile_cuda, specialisation)
        # Large head dimensions have their forward alone.
        for name in BACKWARD if problem.requires_grad and problem.head_dim > routing.HOPPER_MAX_MASK_HEAD_DIM else ():
            yield ("triton", problem, name), functools.partial(_compile_triton, problem, name)
    elif backend == "triton":
        yield ("triton", problem, FORWARD), lambda: _compile_triton(problem, FORWARD)
        names = WIDE_BACKWARD if problem.head_dim > 256 else BACKWARD
        for name in names if problem.requires_grad else ():
            yield ("triton", problem, name), functools.partial(_compile_triton, problem, name)


def _specialisations(problem: Problem) -> Iterable[Any]:
    """Of the Hopper kernels."""
    from .kernels.cuda import backward, decode, forward, forward_wide

    if forward_wide.takes(problem.head_dim, problem.head_dim_v):
        yield forward_wide.specialise(problem.head_dim, problem.query_dtype, problem.is_causal, problem.requires_grad)
        return

    measured = policy.policy_for(problem)
    sm_count = problem.sm_count or (measured.sm_count if measured else None) or USUAL_SM_COUNT
    group = problem.num_heads // problem.num_kv_heads
    batch = problem.query_shape[0]
    if decode.takes(batch, problem.num_kv_heads, problem.seqlen_q, problem.seqlen_k, group, problem.is_causal):
        yield decode.specialise(
            problem.head_dim, problem.head_dim_v, problem.query_dtype,
            units=planned_batch(batch) * problem.num_kv_heads, rows=problem.seqlen_q * group, seqlen_k=problem.seqlen_k,
        ).specialisation  # fmt: skip
    else:
        yield forward.specialise(
            problem.head_dim, problem.head_dim_v, problem.query_dtype, problem.is_causal, problem.requires_grad,
            seqlen_q=problem.seqlen_q, seqlen_k=problem.seqlen_k,
            batch_heads=planned_batch(batch) * problem.num_heads, num_sms=sm_count,
        )  # fmt: skip
    if problem.requires_grad:
        deterministic = torch.are_deterministic_algorithms_enabled()
        yield backward.specialise_dense(
            problem.head_dim, problem.head_dim_v, problem.query_dtype, problem.is_causal, deterministic,
            batch, problem.num_heads, problem.num_kv_heads, problem.seqlen_q, problem.seqlen_k, sm_count,
        )  # fmt: skip


def _compile_cuda(specialisation: Any) -> tuple[str, ...]:
    specialisation.compile()
    return specialisation.entries


def _compile_triton(problem: Problem, only: str) -> tuple[str, ...]:
    try:
        from triton.backends.compiler import GPUTarget

        from .kernels.triton import attention
    except ImportError as error:
        raise KernelUnavailable(f"Triton is not installed: {error}") from error
    name = problem.architecture
    target = GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name[3:]), 32)
    # How many batches and heads there are decides whether decoding splits keys, and which kernels a backward above a
    # head_dim of 256 has; else it is no matter of the compiler's.
    matters = not problem.requires_grad or problem.head_dim > 256
    batch, kv_heads = (problem.query_shape[0], problem.num_kv_heads) if matters else (1, 1)
    heads = kv_heads * (problem.num_heads // problem.num_kv_heads)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=problem.query_dtype, device="cpu" if problem.requires_grad else "meta")

    query = empty(batch, heads, problem.seqlen_q, problem.head_dim)
    key, value = (empty(batch, kv_heads, problem.seqlen_k, size) for size in (problem.head_dim, problem.head_dim_v))
    compiled = attention.compile_for(
        target, query, key, value, is_causal=problem.is_causal, scale=reference.default_scale(problem.head_dim),
        logsumexp=problem.requires_grad, backward=only != FORWARD, only=only,
    )  # fmt: skip
    return tuple(compiled)
