"""Check and measure candidate tiles of the Hopper backward on this GPU, for ``kernels/cuda/tiles.py``.

    python -m benchmarks.tune_cuda --out benchmarks/results/tune_cuda.json [--only 128] [--lengths 2048] [--budget 60]
    python -m benchmarks.tune_cuda --out FILE.json --problems closest --modes default
    python -m benchmarks.tune_cuda --out FILE.json --problems 192v128:4096c,192v128:4096 --modes default

First every candidate is compiled, in parallel; then checked against float64 in a process of its own, where one that
hangs or faults costs that process alone; then those that passed are timed beside cuDNN (or --peers), in turn, on
random data, medians. Rates count five products, a causal mask halves them. "*": what the table names. For the best
candidate of each problem the three kernels are timed one by one as well.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import tuning
from benchmarks.harness import Meter, Run
from torch_flashbackend import driver, ops
from torch_flashbackend.kernels import KernelUnavailable
from torch_flashbackend.kernels.cuda import backward, forward, tiles
from torch_flashbackend.kernels.cuda.tiles import BackwardTile

TOKENS, WIDTH = 16384, 2048
# Where other kernels come closest, or are faster: head_dim:length, c for causal, /query heads of a key head. A value of
# other columns has them after the head_dim, as 192v128.
CLOSEST = "128:8192c/4,128:512c,128:16384c,128:16384,256:512c,128:8192,128:1024c,128:2048,128:2048c/4,64:512c"
# batch, query heads, key heads, seqlen_q, seqlen_k of what is checked.
# The last ones have more tiles of keys than multiprocessors, and more heads than have sums at a time.
CHECKED = (
    (1, 1, 1, 128, 128),
    (2, 4, 2, 333, 400),
    (1, 2, 1, 513, 190),
    (1, 8, 8, 1024, 1024),
    (2, 64, 32, 333, 500),
    (16, 32, 32, 200, 260),
)
# Errors of bfloat16 gradients relative to their largest element are 0.002 to 0.008.
LARGEST_ERROR = 0.02
SECONDS_PER_CHECK = 15.0
MOST_HANGS = 3  # no more are checked after so many


def candidates(head_dim: int, deterministic: bool, head_dim_v: int | None = None) -> list[BackwardTile]:
    """What is tried, the usual one first; the table chooses among these. head_dim_v: unless it is head_dim."""
    head_dim_v = head_dim_v or head_dim
    usual = tiles.choose_backward_usual(head_dim, head_dim_v, True, 1 << 20, deterministic)
    change = dataclasses.replace
    if deterministic:
        return [usual]
    if tiles.fits_in_halves(head_dim, head_dim_v):
        return [usual, tiles.IN_HALVES]
    if head_dim != head_dim_v:
        return [usual]
    fused = change(usual, fused=True)
    if head_dim > 192:
        return [usual, change(usual, direct=True), change(fused, paired=True, ds_stages=1)]
    listed = [usual, fused]
    if head_dim <= 128:
        listed.append(change(usual, persistent=True))
    if head_dim in (64, 128):  # between them, registers spill
        listed.append(change(fused, persistent=True))
        listed.append(change(usual, persistent=True, direct=True))
    if 64 < head_dim <= 128:
        listed.append(change(usual, unstaged=True))
    return listed


def head_dims(head_dim: int, value: int) -> str:
    """As printed, and as `Problem.parse` reads them."""
    return f"{head_dim}v{value}" if value else f"{head_dim}"


class Problem(NamedTuple):
    """A row of what is timed: TOKENS in all, `group` query heads for each key head."""

    head_dim: int
    seqlen: int
    is_causal: bool
    group: int = 1
    value: int = 0  # the value's head_dim, unless it is head_dim

    @property
    def head_dim_v(self) -> int:
        """The value's head_dim."""
        return self.value or self.head_dim

    @classmethod
    def parse(cls, text: str) -> Problem:
        """Of head_dim:length or head_dim, "v", the value's, "c" for causal, "/query heads of a key head"."""
        text, _, group = text.partition("/")
        sizes, length = text.removesuffix("c").split(":")
        head_dim, _, value = sizes.partition("v")
        return cls(int(head_dim), int(length), text.endswith("c"), int(group or 1), int(value or 0))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch, query heads, key heads: with groups twice as many, of which a key head's are a part."""
        heads = max(1, WIDTH // self.head_dim) * (1 if self.group == 1 else 2)
        return max(1, TOKENS // self.seqlen), heads, heads // self.group

    def suits(self, candidate: Candidate) -> bool:
        """Whether the candidate is of this head_dim and mask."""
        sizes = candidate.head_dim, candidate.head_dim_v, candidate.is_causal
        return sizes == (self.head_dim, self.head_dim_v, self.is_causal)

    def tries(self, tile: BackwardTile) -> bool:
        """Whether it may be worth while: what saves time between short blocks, or within long ones."""
        rows = self.seqlen * self.group
        if self.head_dim > 128:
            return not tile.paired or rows >= 1024
        if self.head_dim == 128 and tile.fused and (tile.persistent or self.is_causal):
            return False  # slower at all lengths
        return not tile.persistent if rows >= 8192 else rows >= 2048 or not tile.unstaged

    @property
    def name(self) -> str:
        """As printed."""
        mask, heads = "causal" if self.is_causal else "full", f" of {self.group} heads" * (self.group > 1)
        return f"D={head_dims(self.head_dim, self.value)} S={self.seqlen} {mask}{heads}"


def name_of(tile: BackwardTile) -> str:
    """Short: 128/64x128 q2 do2 ds2 keys_in_registers."""
    stages = f"q{tile.q_stages} do{tile.do_stages} ds{tile.ds_stages}"
    flags = [field.name for field in dataclasses.fields(tile) if getattr(tile, field.name) is True]
    return " ".join([f"{tile.block_m}/{tile.step_m}x{tile.block_n} {stages}", *flags])


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One specialisation."""

    head_dim: int
    is_causal: bool
    deterministic: bool
    tile: BackwardTile
    value: int = 0  # as in Problem

    @property
    def head_dim_v(self) -> int:
        """The value's head_dim."""
        return self.value or self.head_dim

    @property
    def name(self) -> str:
        """With its problem's head_dim and mask."""
        mask, mode = "causal" if self.is_causal else "full", ", deterministic" if self.deterministic else ""
        return f"D={head_dims(self.head_dim, self.value)} {mask}{mode} {name_of(self.tile)}"

    @property
    def specialisation(self) -> backward.Specialisation:
        """What it runs."""
        sizes = self.head_dim, self.head_dim_v
        chosen = backward.specialise(*sizes, torch.bfloat16, self.is_causal, self.deterministic, 1)
        return chosen._replace(tile=self.tile)

    def compile(self) -> str | None:
        """What is wrong with it, if anything."""
        try:
            spec = self.specialisation
            if spec.shared_bytes > 227 << 10:
                return f"{spec.shared_bytes} bytes of shared memory"
            log = spec.compile().log
        except Exception as error:
            return str(error)[:300]
        lines = [line for line in log.splitlines() if "C75" in line or "warning" in line]
        return lines[0] if lines else None


def compile_forwards(problems: list[Problem]) -> None:
    """The forward kernels whose results the backwards are given, so that nothing is compiled while others are timed."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 132
    wanted = set()
    for problem in problems:
        batch, heads, _ = problem.shape
        timed = (batch * heads, problem.seqlen, problem.seqlen)
        for batch_heads, seqlen_q, seqlen_k in [(b * h, q, k) for b, h, _, q, k in CHECKED] + [timed]:
            wanted.add(
                forward.specialise(
                    problem.head_dim, problem.head_dim_v, torch.bfloat16, problem.is_causal, True,
                    seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch_heads=batch_heads, num_sms=num_sms,
                )
            )  # fmt: skip
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(forward.Specialisation.compile, wanted))


def line_of(row: dict[str, Any], best: int = 3) -> str:
    """Rates in TFLOP/s of a row: the best ones, and "*", what the table names. "DIFFERS": from the first candidate."""
    ranked = sorted(row["tflops"].items(), key=lambda item: -item[1])
    shown = ranked[:best] + [(name, rate) for name, rate in ranked[best:] if name in row["named"]]
    parts = []
    for name, rate in shown:
        differs = " DIFFERS" if max(row["differences"].get(name, [0.0])) > LARGEST_ERROR else ""
        parts.append(f"{'*' * (name in row['named'])}{rate:.0f} {name.split('x', 1)[-1].split(' ', 1)[-1]}{differs}")
    return " | ".join(parts)


# ---------------------------------------------------------------------------------------------------------------- check


def make(
    batch: int, heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int, head_dim: int, head_dim_v: int
) -> list[torch.Tensor]:
    """query, key, value, grad_out, random."""
    queries, keys = (batch, heads, seqlen_q), (batch, kv_heads, seqlen_k)
    shapes = (*queries, head_dim), (*keys, head_dim), (*keys, head_dim_v), (*queries, head_dim_v)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def with_forward(tensors: list[torch.Tensor], is_causal: bool) -> tuple[Any, ...]:
    """What the backward is given, in the order of Plan's arguments: gradients to fill included."""
    query, key, value, grad_out = tensors
    scale = query.size(3) ** -0.5
    out, lse = ops._attention_forward_cuda(query, key, value, None, None, 0.0, is_causal, scale, "query", "cuda")
    grads = (torch.empty_like(t) for t in (query, key, value))
    return query, key, value, out, lse, grad_out, *grads


def launcher(candidate: Candidate, arguments: tuple[Any, ...]) -> Callable[[], None]:
    """A function that runs the candidate's three kernels."""
    scale = arguments[0].size(3) ** -0.5
    plan = backward.Plan(*arguments, candidate.is_causal, scale, candidate.deterministic, candidate.tile)
    return functools.partial(plan, *arguments)


@functools.lru_cache(len(CHECKED))
def right_answer(
    shape: tuple[int, ...], head_dim: int, head_dim_v: int, is_causal: bool
) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
    """The backward's arguments for random tensors, and the gradients in float64; candidates of a kind share them."""
    torch.manual_seed(CHECKED.index(shape))
    tensors = make(*shape, head_dim, head_dim_v)
    leaves = [t.double().requires_grad_() for t in tensors[:3]]
    out = scaled_dot_product_attention(*leaves, is_causal=is_causal, enable_gqa=shape[1] != shape[2])
    return with_forward(tensors, is_causal), torch.autograd.grad(out, leaves, tensors[3].double())


def check(candidate: Candidate) -> dict[str, Any]:
    """Its largest relative errors, and whether it repeats bit by bit."""
    errors = {"query": 0.0, "key": 0.0, "value": 0.0}
    repeats = True
    for shape in CHECKED:
        arguments, expected = right_answer(shape, candidate.head_dim, candidate.head_dim_v, candidate.is_causal)
        for grad in arguments[6:]:
            grad.fill_(torch.nan)
        run = launcher(candidate, arguments)
        run()
        torch.cuda.synchronize()
        first = [grad.clone() for grad in arguments[6:]]
        for _ in range(5):
            run()
            same = [torch.equal(grad, before) for grad, before in zip(arguments[6:], first, strict=True)]
            repeats = repeats and all(same if candidate.deterministic else same[1:])
        for name, grad, right in zip(errors, first, expected, strict=True):
            error = ((grad.double() - right).abs().max() / right.abs().max()).item()
            errors[name] = max(errors[name], error if error == error else 1e9)
    return {"errors": errors, "repeats": repeats, "right": repeats and max(errors.values()) < LARGEST_ERROR}


def check_here(numbers: list[int], listed: list[Candidate]) -> None:
    """In the child: one line of JSON for each candidate."""
    for number in sorted(numbers, key=lambda n: (listed[n].head_dim, listed[n].value, listed[n].is_causal)):
        try:
            result = check(listed[number])
        except Exception as error:
            result = {"right": False, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
        print("CHECKED " + json.dumps({"number": number, **result}), flush=True)
        if "CUDA error" in result.get("failed", "") or "CUDA_ERROR" in result.get("failed", ""):
            return  # the context is lost


def check_apart(numbers: list[int], options: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """Checks the candidates of these numbers in child processes, a new one after each that ended its own."""
    found: dict[int, dict[str, Any]] = {}
    hangs = 0
    while missing := [number for number in numbers if number not in found]:
        if hangs == MOST_HANGS:
            return found | {number: {"right": False, "failed": "not checked: too many hang"} for number in missing}
        command = [sys.executable, "-m", "benchmarks.tune_cuda", "--out", str(options.out), "--only", options.only]
        command += ["--lengths", options.lengths, *(["--problems", options.problems] if options.problems else [])]
        command += ["--modes", options.modes, "--check", ",".join(map(str, missing))]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=False)
        assert child.stdout is not None
        buffer, said, deadline = b"", "", time.monotonic() + 2 * SECONDS_PER_CHECK  # the first has torch to import
        before = len(found)
        while select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            chunk = os.read(child.stdout.fileno(), 65536)
            if not chunk:
                break
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace")
                if text.startswith("CHECKED "):
                    result = json.loads(text.removeprefix("CHECKED "))
                    found[result.pop("number")] = result
                    deadline = time.monotonic() + SECONDS_PER_CHECK
                else:
                    said = (said + text + "\n")[-400:]
            if len(found) - before == len(missing):
                break
        else:
            said = "no answer within the time: it hangs"
            hangs += 1
        child.kill()
        child.wait()
        left = [number for number in missing if number not in found]
        failed = [number for number in missing if "failed" in found.get(number, {})]
        if left and not failed:
            found[left[0]] = {"right": False, "failed": said or "the process ended"}
    return found


# ----------------------------------------------------------------------------------------------------------------- time


def kernel_times(run: Callable[[], None], entries: tuple[str, ...], rounds: int = 9) -> dict[str, float]:
    """Milliseconds of each kernel of a backward, by events around its launch."""
    times: dict[str, list[float]] = {entry: [] for entry in entries}
    launch = driver.launch
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def timed(*arguments: Any) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch(*arguments)
        end.record()
        events.append((begin, end))

    driver.launch = timed
    try:
        for _ in range(rounds):
            events.clear()
            torch.cuda._sleep(400_000)  # lets the CPU run ahead
            run()
            torch.cuda.synchronize()
            for entry, (begin, end) in zip(entries, events, strict=True):
                times[entry].append(begin.elapsed_time(end))
    finally:
        driver.launch = launch
    return {entry: statistics.median(found) for entry, found in times.items()}


def contenders(
    tensors: list[torch.Tensor], arguments: tuple[Any, ...], is_causal: bool, names: list[str]
) -> dict[str, Run]:
    """The peers' backwards."""
    leaves = [t.detach().requires_grad_() for t in tensors[:3]]
    is_grouped = tensors[0].size(1) != tensors[1].size(1)
    runs = {}
    for name, kernel in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        if name not in names:
            continue
        with sdpa_kernel(kernel):
            out = scaled_dot_product_attention(*leaves, is_causal=is_causal, enable_gqa=is_grouped)
        runs[name] = Run(functools.partial(torch.autograd.grad, out, leaves, tensors[3], retain_graph=True))
    query, key, value, out, lse, grad_out, *_ = arguments
    scale, wanted = query.size(3) ** -0.5, (True, True, True, False)
    if "triton" not in names:
        return runs
    runs["triton"] = Run(
        lambda: ops._gradients_cuda(
            grad_out, query, key, value, None, out, lse, None, 0.0, is_causal, scale, wanted, "triton"
        )
    )
    return runs


def differences(launchers: dict[str, Callable[[], None]], grads: tuple[torch.Tensor, ...]) -> dict[str, list[float]]:
    """By candidate: the largest differences of its gradients from the first one's, relative to their largest element.

    At full size, where all multiprocessors are busy, and after several calls in a row.
    """
    found: dict[str, list[float]] = {}
    first: list[torch.Tensor] = []
    for name, run in launchers.items():
        for grad in grads:
            grad.fill_(torch.nan)
        for _ in range(3):
            run()
        if not first:
            first = [grad.clone() for grad in grads]
        found[name] = [
            ((grad - before).abs().max() / before.abs().max()).item() for grad, before in zip(grads, first, strict=True)
        ]
    return found


def time_problem(problem: Problem, right: list[Candidate], meter: Meter, peers: list[str]) -> dict[str, Any]:
    """Rates in TFLOP/s by contender and candidate."""
    head_dim, head_dim_v, seqlen, is_causal = problem.head_dim, problem.head_dim_v, problem.seqlen, problem.is_causal
    batch, heads, kv_heads = problem.shape
    tensors = make(batch, heads, kv_heads, seqlen, seqlen, head_dim, head_dim_v)
    arguments = with_forward(tensors, is_causal)
    launchers = {}
    for candidate in right:
        with contextlib.suppress(KernelUnavailable):  # sequences too long for it
            launchers[candidate.name] = launcher(candidate, arguments)
    differ = differences(launchers, arguments[6:])
    runs = contenders(tensors, arguments, is_causal, peers)
    for run in runs.values():
        run.call()
    runs |= {name: Run(run) for name, run in launchers.items()}
    times = meter.gpu_times(runs)
    flops = 2 * batch * heads * seqlen**2 * (3 * head_dim + 2 * head_dim_v) / (2 if is_causal else 1)
    rates = {name: flops / ms / 1e9 for name, ms in times.items()}
    best = max(launchers, key=lambda name: rates[name])
    entries = next(candidate.specialisation.entries for candidate in right if candidate.name == best)
    parts = kernel_times(launchers[best], entries)
    row = {"problem": problem.name, "tflops": rates, "best": best}
    named = [
        Candidate(
            head_dim,
            is_causal,
            mode,
            tiles.choose_backward(head_dim, head_dim_v, is_causal, seqlen * problem.group, mode),
            problem.value,
        ).name
        for mode in (False, True)
    ]
    row["named"] = named
    if all(name in rates for name in named):
        row["deterministic_time"] = rates[named[0]] / rates[named[1]]
    row["differences"] = differ
    return {**row, "best_kernels_us": {entry: 1e3 * ms for entry, ms in parts.items()}}


def main() -> None:
    parser = tuning.parser(__doc__, rounds=5, budget_s=60.0, only="head dimensions")
    parser.set_defaults(only="128,64")
    parser.add_argument("--lengths", default="2048,512,1024,4096,16384")
    parser.add_argument("--problems", help=f'in the place of both, and of all masks: "closest" or as {CLOSEST}')
    parser.add_argument("--peers", default="cudnn", help="which are timed beside: cudnn, flash, triton")
    parser.add_argument("--modes", default="default,deterministic")
    parser.add_argument("--compile-only", action="store_true", help="needs no GPU")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    options = parser.parse_args()
    began = time.monotonic()
    if options.problems:
        text = CLOSEST if options.problems == "closest" else options.problems
        problems = [Problem.parse(part) for part in text.split(",")]
    else:
        problems = [
            Problem(int(head_dim), int(length), is_causal)
            for length in options.lengths.split(",")
            for head_dim in options.only.split(",")
            for is_causal in (False, True)
        ]
    kinds = list(dict.fromkeys((problem.head_dim, problem.value, problem.is_causal) for problem in problems))
    listed = [
        Candidate(head_dim, is_causal, deterministic, tile, value)
        for head_dim, value, is_causal in kinds
        for deterministic in (False, True)
        if ("deterministic" if deterministic else "default") in options.modes.split(",")
        for tile in candidates(head_dim, deterministic, value)
        if is_causal or not tile.direct
    ]
    if options.problems:
        listed = [c for c in listed if any(p.suits(c) and p.tries(c.tile) for p in problems)]
    if options.check:
        check_here([int(number) for number in options.check.split(",")], listed)
        return
    usable = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for number, problem in enumerate(pool.map(Candidate.compile, listed)):
            if problem:
                print(f"{listed[number].name}: {problem}", flush=True)
            else:
                usable.append(number)
    print(f"compiled {len(usable)} of {len(listed)} candidates in {time.monotonic() - began:.0f} s", flush=True)
    compile_forwards(problems)
    if options.compile_only:
        return
    results = tuning.begin("tune_cuda", options)
    checked = check_apart(usable, options)
    for number, result in sorted(checked.items()):
        errors = " ".join(f"{name} {error:.4f}" for name, error in result.get("errors", {}).items())
        repeats = "" if result.get("repeats", True) else "DOES NOT REPEAT "
        if not result["right"]:
            print(f"WRONG {listed[number].name}: {repeats}{errors}{result.get('failed', '')}", flush=True)
    results.add({"checked": [{"candidate": listed[n].name, **result} for n, result in sorted(checked.items())]})
    right = [listed[number] for number in usable if checked[number]["right"]]
    print(f"checked in {time.monotonic() - began:.0f} s: {len(right)} of {len(usable)} right", flush=True)

    meter = Meter("cuda", options.rounds)
    tried = {
        problem: [c for c in right if problem.suits(c) and (not options.problems or problem.tries(c.tile))]
        for problem in problems
    }

    def row_of(problem: Problem) -> tuple[dict[str, Any], str]:
        row = time_problem(problem, tried[problem], meter, options.peers.split(","))
        kernels = ", ".join(f"{us:.0f}" for us in row["best_kernels_us"].values())
        return row, f"{line_of(row)} | best's kernels {kernels} us"

    wanted = [problem for problem in problems if tried[problem]]
    tuning.measure_rows("tune_cuda", options, began, wanted, lambda problem: problem.name, row_of, results)


if __name__ == "__main__":
    main()
