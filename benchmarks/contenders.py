"""Who is measured: ours, PyTorch's kernels and FlashAttention-4, each turned into calls that the harness can time.

Imports torch, torch_flashbackend, cases.py and harness.py. Imported by attention.py and special.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_flashbackend
from benchmarks.cases import Case, Inputs
from benchmarks.harness import OURS, Context, Meter, Run, need_gpu, say
from torch_flashbackend import decisions, ops, policy, routing
from torch_flashbackend.problem import Problem

STOCK_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclasses.dataclass
class Prepared:
    """A contender's calls for one case: forward, and (None for inference) backward alone and both."""

    forward: Run
    backward: Run | None
    training: Run | None


@contextlib.contextmanager
def plugin_off() -> Iterator[None]:
    torch_flashbackend.disable()
    yield


def take_everything() -> None:
    """From here on the automatic route takes whatever our kernels can take, in this process: speed is not asked.

    So a call of ours costs what it costs a user whose policy takes it, hook, cached decision and all. The policy that
    is to be made from the measurement must not decide what is measured.
    """
    verdict = policy.Verdict(True, "benchmark", "taken for a benchmark")
    policy.judge = lambda problem, backend: verdict
    policy.not_the_fastest_of_ours = lambda problem, backend: None
    decisions.forget()


def plugin_on(backend: str) -> Context:
    """The plugin on, with an automatic route to this one of our backends and to stock."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        torch_flashbackend.enable()
        if (backend, "stock") != routing.AUTO:
            routing.AUTO = (backend, "stock")
            decisions.forget()
        yield

    return context


def our_backends(device: torch.device) -> list[str]:
    """Those of our backends that this device has kernels for."""
    need_gpu(device)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and torch.version.hip is None:
        return list(OURS)
    return ["triton"]


@contextlib.contextmanager
def math_backend() -> Iterator[None]:
    """Ours on a CPU, where the scripts are tried: there is no automatic route there."""
    with torch_flashbackend.sdpa_backend("math"):
        yield


def stock(backend: SDPBackend | None = None) -> Context:
    """The plugin off; PyTorch's own choice, or one of its kernels."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with plugin_off(), sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
            yield

    return context


def context_of(name: str, device: torch.device) -> Context:
    """The context of a contender other than fa4."""
    if name in OURS:
        return plugin_on(name) if device.type == "cuda" else math_backend
    return stock(STOCK_BACKENDS.get(name))


def prepare_sdpa(case: Case, inference: Inputs, training: Inputs | None, context: Context) -> Prepared:
    """Calls of F.scaled_dot_product_attention. Raises RuntimeError where the chosen kernel refuses the case."""

    def attention(inputs: Inputs) -> Tensor:
        return F.scaled_dot_product_attention(
            inputs.query,
            inputs.key,
            inputs.value,
            attn_mask=inputs.attn_mask,
            dropout_p=case.dropout,
            is_causal=case.causal,
            enable_gqa=case.kv_heads != case.heads,
        )

    def both() -> Any:
        assert training is not None
        return torch.autograd.grad(attention(training), training.differentiable, training.grad_out)

    with context():
        attention(inference)
        if training is None:
            return Prepared(Run(lambda: attention(inference), context), None, None)
        out = attention(training)
        torch.autograd.grad(out, training.differentiable, training.grad_out, retain_graph=True)

    def backward() -> Any:
        return torch.autograd.grad(out, training.differentiable, training.grad_out, retain_graph=True)

    return Prepared(Run(lambda: attention(inference), context), Run(backward, context), Run(both, context))


def fa4_functions() -> tuple[Callable, Callable] | None:
    """FlashAttention-4's forward and backward, or None where it is not installed. It is a peer, not a dependency."""
    try:
        from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
    except Exception as error:  # a broken installation of a peer must not end the measurement
        if not isinstance(error, ModuleNotFoundError):
            say(f"FlashAttention-4 is installed but does not import: {error!r}")
        return None
    return _flash_attn_fwd, _flash_attn_bwd


def prepare_fa4(case: Case, inference: Inputs, training: Inputs | None) -> Prepared:
    """FlashAttention-4 on its own layout, [B, S, H, D] contiguous."""
    functions = fa4_functions()
    if functions is None or case.mask or case.dropout or case.dtype not in ("bfloat16", "float16"):
        raise RuntimeError("FlashAttention-4 does not take this case")
    if case.causal and case.seqlen_q != case.seqlen_k:
        raise RuntimeError("FlashAttention-4 aligns a rectangular causal mask at its other end: another amount of work")
    forward, backward = functions
    sources = (inference.query, inference.key, inference.value, inference.grad_out)
    query, key, value, grad_out = (t.detach().transpose(1, 2).contiguous() for t in sources)

    def run_forward(return_lse: bool = False) -> Any:
        return forward(query, key, value, causal=case.causal, return_lse=return_lse)

    run_forward()
    if training is None:
        return Prepared(Run(run_forward), None, None)
    out, logsumexp = run_forward(return_lse=True)[:2]

    def run_backward() -> Any:
        return backward(query, key, value, out, grad_out, logsumexp, causal=case.causal)

    run_backward()

    def both() -> Any:
        result, lse = run_forward(return_lse=True)[:2]
        return backward(query, key, value, result, grad_out, lse, causal=case.causal)

    return Prepared(Run(run_forward), Run(run_backward), Run(both))


def prepare_all(
    names: list[str], case: Case, inference: Inputs, training: Inputs | None, meter: Meter
) -> tuple[dict[str, Prepared], dict[str, str]]:
    """Every contender that takes the case, and by name why the others do not."""
    prepared: dict[str, Prepared] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if name == "fa4":
                    prepared[name] = prepare_fa4(case, inference, training)
                else:
                    candidate = prepare_sdpa(case, inference, training, context_of(name, meter.device))
                    if name in OURS and meter.cuda and not kernels_launched(candidate.forward):
                        raise RuntimeError(_refusal(name, case, inference))
                    prepared[name] = candidate
                meter.synchronize()
        except Exception as error:  # whatever a contender raises, the others are measured
            if meter.cuda and "CUDA error" in str(error):
                raise  # the context is lost
            refused[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    return prepared, refused


def _refusal(backend: str, case: Case, inputs: Inputs) -> str:
    """Why a backend of ours left a case to stock."""
    problem = Problem.from_tensors(
        inputs.query, inputs.key, inputs.value, inputs.attn_mask, case.dropout, case.causal, None,
        case.kv_heads != case.heads,
    )  # fmt: skip
    failed = routing.first_failure(problem, backend, automatic=False)
    return failed.message(problem) if failed else "stock ran under our name"


def kernels_launched(run: Run) -> dict[str, int]:
    """How many of our kernels one call launches, by name: empty where stock ran under our name."""
    with run.context():
        ops.reset_launch_counts()
        run.call()
        return dict(ops.launch_counts())


def difference(first: Run, second: Run) -> float:
    """Relative Frobenius norm of the difference between the results of two runs, the largest over their tensors."""

    def results(run: Run) -> list[Tensor]:
        with run.context():
            result = run.call()
        return [result] if isinstance(result, Tensor) else list(result)

    worst = 0.0
    for a, b in zip(results(first), results(second), strict=True):
        distance = torch.linalg.vector_norm((a - b).float()) / torch.linalg.vector_norm(b.float()).clamp_min(1e-30)
        value = distance.item()
        worst = max(worst, value if value == value else 1e9)
    return worst
