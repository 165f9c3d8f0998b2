"""CPU time per eager call on tensors so small that the GPU never limits: stock, plugin on but not taking, and taking.

    python -m benchmarks.overhead                     # about 1 minute on an H200, writes benchmarks/results/
    python -m benchmarks.overhead --device cpu --smoke --out /tmp/overhead.json

A batch of calls is timed without a synchronisation in it, and is short enough that the queue of launches never fills;
whether the GPU kept up is checked after each batch. States take turns as in harness.py; stock is measured twice (A/A).
Each row says whether kernels of ours ran, by counting launches: which calls auto takes is the policy's decision.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_flashbackend
from benchmarks import contenders, harness
from benchmarks.harness import Budget, Results, collection_off, say, turns
from torch_flashbackend import decisions, ops, policy

FORWARD_CALLS = 100  # times at most three kernels each: well under the 1,024 launches that a stream holds
BACKWARD_CALLS = 40
PASSES = ("forward, no gradients", "forward, inference mode", "forward, with gradients", "backward")
GPU_BEHIND = 0.25  # share of a batch that the GPU may still need after it, before the batch counts as GPU limited


@dataclasses.dataclass
class SmallCall:
    """A call [1, 8, 64, 64] in bfloat16; `context` surrounds it in every state, the plugin's absence included."""

    name: str
    arguments: dict[str, Any]
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


def small_calls(device: str) -> list[SmallCall]:
    mask = torch.ones(1, 1, 1, 64, dtype=torch.bool, device=device)
    mask[..., 50:] = False
    calls = [
        SmallCall("dense", {}),
        SmallCall("causal", {"is_causal": True}),
        SmallCall("bool mask", {"attn_mask": mask}),
        SmallCall("negative scale", {"scale": -0.1}),
    ]
    if torch.device(device).type == "cuda":  # the user excluded flash attention, so the call is stock's
        without_flash = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        calls.append(SmallCall("dense, flash not allowed", {}, lambda: sdpa_kernel(without_flash)))
    return calls


def states(device: torch.device) -> dict[str, Callable[[], contextlib.AbstractContextManager]]:
    """off: PyTorch alone. auto: the plugin on, with its policy. taken: the same, with a policy that takes everything.

    The others are sdpa_backend(...), which asks no policy either and comes by another way, a TorchFunctionMode.
    """
    backends = contenders.our_backends(device) if device.type == "cuda" else ["math"]
    verdict = policy.Verdict(True, "benchmark", "taken for a benchmark")

    @contextlib.contextmanager
    def off() -> Iterator[None]:
        torch_flashbackend.disable()
        yield

    @contextlib.contextmanager
    def auto() -> Iterator[None]:
        torch_flashbackend.enable()
        yield

    @contextlib.contextmanager
    def taken() -> Iterator[None]:
        before = policy.judge
        policy.judge = lambda problem, backend: verdict
        decisions.forget()
        try:
            with auto():
                yield
        finally:
            policy.judge = before
            decisions.forget()

    def forced(backend: str) -> Callable[[], contextlib.AbstractContextManager]:
        @contextlib.contextmanager
        def context() -> Iterator[None]:
            with auto(), torch_flashbackend.sdpa_backend(backend, "stock"):
                yield

        return context

    by_hand = {f"sdpa_backend({backend!r})": forced(backend) for backend in backends}
    return {"off": off, "off (again)": off, "auto": auto, "taken": taken, **by_hand}


def batch_times(
    call: SmallCall, inputs: list[Tensor], grad_out: Tensor, calls: int, backward: bool, synchronize: Callable[[], None]
) -> tuple[float, float]:
    """Microseconds per call that the CPU spends in the batch, and that the GPU still needs after it."""

    def attention() -> Tensor:
        return F.scaled_dot_product_attention(*inputs, **call.arguments)

    with collection_off():
        if not backward:
            for _ in range(10):
                attention()
            synchronize()
            start = time.perf_counter_ns()
            for _ in range(calls):
                attention()
        else:
            for _ in range(5):
                torch.autograd.grad(attention(), inputs, grad_out)
            outputs = [attention() for _ in range(calls)]
            synchronize()
            start = time.perf_counter_ns()
            for out in outputs:
                torch.autograd.grad(out, inputs, grad_out)
        middle = time.perf_counter_ns()
        synchronize()
        end = time.perf_counter_ns()
    return (middle - start) / calls / 1e3, (end - middle) / calls / 1e3


def measure(call: SmallCall, device: str, rounds: int, calls: tuple[int, int]) -> list[dict[str, Any]]:
    """Rows for forward without gradients, in inference mode, with gradients, and backward."""
    dtype = torch.bfloat16
    plain = [torch.randn(1, 8, 64, 64, device=device, dtype=dtype) for _ in range(3)]
    leaves = [t.clone().requires_grad_() for t in plain]
    grad_out = torch.randn(1, 8, 64, 64, device=device, dtype=dtype)

    def synchronize() -> None:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)

    rows = []
    for name in PASSES:
        inputs = leaves if name in ("forward, with gradients", "backward") else plain
        backward = name == "backward"
        grad_mode = torch.inference_mode if name == "forward, inference mode" else contextlib.nullcontext
        samples: dict[str, list[tuple[float, float]]] = {}
        launched: dict[str, bool] = {}
        available = states(torch.device(device))
        for state, context in available.items():
            with context(), call.context(), grad_mode():
                ops.reset_launch_counts()
                out = F.scaled_dot_product_attention(*inputs, **call.arguments)
                if backward:
                    torch.autograd.grad(out, inputs, grad_out)
                synchronize()
                launched[state] = any(ops.launch_counts().values())
        for order in turns(list(available), rounds):
            for state in order:
                with available[state](), call.context(), grad_mode():
                    times = batch_times(call, inputs, grad_out, calls[backward], backward, synchronize)
                samples.setdefault(state, []).append(times)
        cpu = {state: statistics.median(t[0] for t in times) for state, times in samples.items()}
        behind = {state: statistics.median(t[1] for t in times) / cpu[state] for state, times in samples.items()}
        rows.append(
            {
                "label": f"{call.name}: {name}",
                "cpu_us": {state: harness.significant(t, 4) for state, t in cpu.items()},
                "our_kernels_ran": launched,
                "gpu_limited": [state for state, share in behind.items() if share > GPU_BEHIND],
                "aa": harness.aa_report(cpu, "off", "off (again)"),
            }
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    options = harness.parser(__doc__.splitlines()[0], budget_s=120)
    arguments = options.parse_args(argv)
    rounds = 2 if arguments.smoke else 4 * arguments.rounds
    calls = (4, 3) if arguments.smoke else (FORWARD_CALLS, BACKWARD_CALLS)
    budget = Budget(arguments.budget)
    facts = harness.environment(arguments.device)
    results = Results(harness.results_path(arguments, facts, "overhead"), "overhead", facts, vars(arguments))
    wanted = [call for call in small_calls(arguments.device) if harness.asked_for(arguments, call.name)]
    for call in results.each(wanted, budget, lambda call: call.name):
        for row in measure(call, arguments.device, rounds, calls):
            results.add(row)
            took = ", ".join(state for state, ran in row["our_kernels_ran"].items() if ran) or "none"
            times = f"{row['cpu_us']} A/A {row['aa']['ratio']}"
            say(f"[{budget.used:.0f} s] {row['label']}: {times}, our kernels ran in: {took}")
    names = list(states(torch.device(arguments.device)))
    lines = []
    for row in results.data["rows"]:
        marks = row["our_kernels_ran"]
        times = [f"{row['cpu_us'][n]:.1f}" + ("*" if marks[n] else "") for n in names]
        cpu = row["cpu_us"]
        lines.append([row["label"], *times, f"{cpu['auto'] - cpu['off']:+.1f}", f"{cpu['taken'] - cpu['off']:+.1f}"])
    harness.table(
        "CPU microseconds per call (*: our kernels ran)", ["call", *names, "auto - off", "taken - off"], lines
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
