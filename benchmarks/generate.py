"""Generating text with transformers' `generate`: the plugin, PyTorch's default, and its math path.

    python -m benchmarks.generate                     # about 2 minutes on an H200, writes <gpu>_generate.json
    python -m benchmarks.generate --kv-heads 8        # grouped queries; writes <gpu>_generate_kv8.json
    python -m benchmarks.generate --only "B8 prompt 4096 compiled"
    python -m benchmarks.generate --device cpu --smoke --out /tmp/generate.json

A model of Llama 7B's shape (width 4096, 32 layers, 32 heads of 128, bfloat16), its weights random, made on the GPU.
One process: the plugin is switched with enable() and disable(). The cache is static or, as transformers has it unless
told otherwise, grows with every token, so that each step has sizes of its own. `compiled` is what transformers does by
itself for a static cache: the prompt in eager mode, each further token by a program of
torch.compile(mode="reduce-overhead").

How a number comes about: an event on the GPU before the call and one behind the model in each step. Prefill is the
time to the first token's logits, a step the time from one token's to the next one's, launches and all; the rate is the
batch over the median step. The first run of each contender, which compiles and records graphs, is no part of that: it
gives the tokens and logits that are compared, and where the cache grows `first_decode_ms`, the median step through
sizes that this process meets for the first time. Eager contenders take turns; compiled ones run one after another,
since switching the plugin drops compiled programs.

Greedy tokens of two implementations part where two tokens are as good as equal, which with random weights they often
are, and then never meet again. So of each row: the share of equal tokens; over the steps up to the first difference,
where both still see the same text, the largest difference of any logit; and how far apart the two tokens' logits were
where they part. The math path's difference from the default is the measure of what rounding alone does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import torch_flashbackend
from benchmarks import contenders, harness
from benchmarks.harness import Budget, ClockLog, Results, say, significant, turns
from torch_flashbackend import ops

CONTENDERS = ("default", "plugin", "math")
VOCABULARY = 32_000
SIZES = {"hidden": 4096, "intermediate": 11_008, "heads": 32, "layers": 32}
SMOKE_SIZES = {"hidden": 64, "intermediate": 96, "heads": 4, "layers": 1}
PROMPTS, BATCHES, NEW_TOKENS = (512, 4096), (1, 8), 64
SMOKE_PROMPTS, SMOKE_BATCHES, SMOKE_NEW_TOKENS = (12, 24), (2,), 4
# Ours may be this many times farther from the default than PyTorch's own math path is: both are off by rounding.
NOISE_FACTOR = 2.0


@dataclasses.dataclass(frozen=True)
class Case:
    """One setting: `batch` prompts of `prompt` tokens each."""

    prompt: int
    batch: int
    compiled: bool
    grows: bool = False

    @property
    def mode(self) -> str:
        return "compiled" if self.compiled else "eager, growing cache" if self.grows else "eager"

    @property
    def label(self) -> str:
        return f"B{self.batch} prompt {self.prompt} {self.mode}"


def all_cases(smoke: bool) -> list[Case]:
    """Eager first, a cache that grows with the shortest; of the compiled ones, which take longest, the largest first.

    Prompts grow: transformers keeps a static cache as long as the longest so far.
    """
    prompts, batches = (SMOKE_PROMPTS, SMOKE_BATCHES) if smoke else (PROMPTS, BATCHES)
    eager = [Case(prompt, batch, False) for prompt in prompts for batch in batches]
    growing = [Case(prompts[0], batches[0], False, grows=True)]
    return growing + eager + [Case(prompts[-1], batch, True) for batch in reversed(batches)]


def make_model(sizes: dict[str, int], kv_heads: int, longest: int, device: torch.device) -> Any:
    """transformers' Llama with random weights, made where it will run, in bfloat16 (float32 on a CPU).

    Raises ImportError where transformers is missing.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=sizes["hidden"], intermediate_size=sizes["intermediate"], vocab_size=VOCABULARY,
        num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"], num_key_value_heads=kv_heads,
        max_position_embeddings=longest, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None  # every run has the same length
    return model


@contextlib.contextmanager
def plugin() -> Iterator[None]:
    """Switched on, with the policy in force."""
    torch_flashbackend.enable()
    try:
        yield
    finally:
        torch_flashbackend.disable()


def context_of(name: str, device: torch.device) -> harness.Context:
    """On a CPU, where the plugin takes no call, our math path stands in for it."""
    if name == "plugin":
        return plugin if device.type == "cuda" else contenders.math_backend
    return contenders.stock(SDPBackend.MATH if name == "math" else None)


class StepClock:
    """A logits processor that changes nothing and notes when each step's logits are there."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.mark()
        return scores

    def intervals(self) -> list[float]:
        """Milliseconds from each mark to the next; waits for the GPU."""
        pairs = zip(self.marks, self.marks[1:])
        if not self.cuda:
            return [1e3 * (end - start) for start, end in pairs]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]


@dataclasses.dataclass
class Outcome:
    """tokens [B, N] chosen, logits [B, vocabulary] of each step, its median time, bytes at the peak, our launches."""

    tokens: Tensor
    logits: tuple[Tensor, ...]
    step_ms: float
    peak_memory_bytes: int
    kernels: dict[str, int]


class Generator:
    """The model, and what `generate` is called with."""

    def __init__(self, model: Any, new_tokens: int, device: torch.device) -> None:
        self.model, self.new_tokens, self.device = model, new_tokens, device

    def prompt(self, case: Case) -> Tensor:
        generator = torch.Generator(device=self.device).manual_seed(case.prompt + case.batch)
        size = (case.batch, case.prompt)
        return torch.randint(3, VOCABULARY, size, generator=generator, device=self.device)

    def _generate(self, case: Case, new_tokens: int, **options: Any) -> Any:
        prompt = self.prompt(case)
        if case.compiled and self.device.type != "cuda":
            options["compile_config"] = self._compile_on_cpu()
        with torch.no_grad():
            return self.model.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens,
                do_sample=False, cache_implementation=None if case.grows else "static",
                disable_compile=not case.compiled, **options,
            )  # fmt: skip

    @staticmethod
    def _compile_on_cpu() -> Any:
        """transformers compiles on accelerators only, unless this says otherwise."""
        from transformers import CompileConfig

        config = CompileConfig(backend="aot_eager", mode="default")
        config._compile_all_devices = True
        return config

    def outcome(self, case: Case) -> Outcome:
        """What is generated. The first such call warms everything up."""
        cuda = self.device.type == "cuda"
        ops.reset_launch_counts()
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        clock = StepClock(self.device)
        result = self._generate(
            case, self.new_tokens, return_dict_in_generate=True, output_logits=True, logits_processor=[clock]
        )
        step = statistics.median(clock.intervals())
        peak = torch.cuda.max_memory_allocated(self.device) if cuda else 0
        # A program in a CUDA graph writes the next step's logits where these are, so transformers has copied them.
        return Outcome(result.sequences[:, case.prompt :], result.logits, step, peak, dict(ops.launch_counts()))

    def times(self, case: Case) -> tuple[float, float]:
        """Milliseconds to the first token's logits, and of a step thereafter, the median."""
        clock, new_tokens = StepClock(self.device), self.new_tokens
        if not case.compiled:
            self._generate(case, 2)  # the plugin has just been switched: its first calls fill caches
            # Any step takes as long as the next one. A compiled one first records a graph for this call's cache.
            new_tokens = -(-new_tokens // 2)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with harness.collection_off():
            clock.mark()
            self._generate(case, new_tokens, logits_processor=[clock])
        prefill, *steps = clock.intervals()
        return prefill, statistics.median(steps)


def compare(first: Outcome, second: Outcome) -> dict[str, Any]:
    """How far the second is from the first; `gap` is None where every token is the same."""
    equal = first.tokens == second.tokens
    # Steps that a sequence shares: those up to the first difference, that one included.
    shared = (equal.cumprod(1).sum(1) + 1).clamp(max=equal.shape[1])
    worst, gaps = 0.0, []
    for step, (ours, theirs) in enumerate(zip(second.logits, first.logits)):
        together = shared > step
        if together.any():
            difference = (ours[together].float() - theirs[together].float()).abs().max().item()
            worst = max(worst, difference) if difference == difference else 1e9
        for index in torch.nonzero(together & ~equal[:, step]).flatten().tolist():
            pair = theirs[index, torch.stack([first.tokens[index, step], second.tokens[index, step]])]
            gaps.append((pair[0] - pair[1]).float().item())
    return {
        "equal_tokens": significant(equal.float().mean().item(), 4),
        "sequences_that_part": len(gaps),
        "steps_together": int(shared.sum()),
        "logit_difference": significant(worst, 3),
        "gap": significant(max(gaps), 3) if gaps else None,
        "largest_logit": significant(max(logits.abs().max().item() for logits in first.logits), 4),
    }


def explained(differences: dict[str, dict[str, Any]], dtype: torch.dtype) -> bool | None:
    """Is ours as close to the default as rounding allows? None where there is nothing to measure that by.

    Where it is, tokens that differ had logits closer than twice that: a near-tie. Where they are all the same, too.
    """
    if "plugin" not in differences:
        return None
    floor = torch.finfo(dtype).eps * differences["plugin"]["largest_logit"]
    if "math" not in differences:
        return True if differences["plugin"]["logit_difference"] <= floor else None
    rounding = max(differences["math"]["logit_difference"], floor)
    return differences["plugin"]["logit_difference"] <= NOISE_FACTOR * rounding


def measure(case: Case, generator: Generator, rounds: int, budget: Budget) -> dict[str, Any]:
    """A row: times and rates of every contender that runs, and what they generate beside what the default does."""
    row: dict[str, Any] = {"label": case.label, **dataclasses.asdict(case), "new_tokens": generator.new_tokens}
    outcomes: dict[str, Outcome] = {}
    samples: dict[str, list[tuple[float, float]]] = {}
    refused: dict[str, str] = {}

    def attempt(name: str, work: Callable[[], None]) -> None:
        # Neither in memory nor on disk does a compiled program tell what sdpa_kernel() allowed when it was made.
        torch.compiler.config.cache_key_tag = f"benchmarks.generate {name}"
        try:
            with context_of(name, generator.device)():
                work()
        except torch.OutOfMemoryError as error:
            refused[name] = str(error).splitlines()[0][:160]
            samples.pop(name, None)
        finally:
            torch.compiler.config.cache_key_tag = ""
        gc.collect()
        if generator.device.type == "cuda":
            torch.cuda.empty_cache()

    def begin(name: str) -> None:
        outcomes[name] = generator.outcome(case)

    def turn(name: str) -> None:
        samples.setdefault(name, []).append(generator.times(case))

    def begin_and_turns(name: str) -> None:
        torch.compiler.reset()
        begin(name)
        for _ in range(rounds):
            turn(name)

    # Each program that is compiled makes later steps of this process slower, by 0.2 to 1 ms of CPU time, so that the
    # order is there and back.
    order = [*CONTENDERS, *CONTENDERS[-2::-1]] if case.compiled else CONTENDERS
    for name in order:
        if budget.exhausted and outcomes:
            if name not in outcomes:
                refused[name] = "no time was left"
        elif name not in refused:
            attempt(name, lambda name=name: (begin_and_turns if case.compiled else begin)(name))
    if not case.compiled:
        for order in turns([name for name in CONTENDERS if name in outcomes], rounds):
            for name in order:
                if name not in refused:
                    attempt(name, lambda name=name: turn(name))
    medians = {name: [statistics.median(part) for part in zip(*times)] for name, times in samples.items()}
    row["prefill_ms"] = {name: significant(prefill) for name, (prefill, _) in medians.items()}
    row["decode_ms"] = {name: significant(step) for name, (_, step) in medians.items()}
    if case.grows:
        row["first_decode_ms"] = {name: significant(outcome.step_ms) for name, outcome in outcomes.items()}
    rates = {name: case.batch / step * 1e3 for name, (_, step) in medians.items()}
    row["decode_tokens_per_second"] = {name: significant(rate) for name, rate in rates.items()}
    row["peak_memory_bytes"] = {name: outcome.peak_memory_bytes for name, outcome in outcomes.items()}
    row["kernels"] = outcomes["plugin"].kernels if "plugin" in outcomes else {}
    row["beside_default"] = {
        name: compare(outcomes["default"], outcome)
        for name, outcome in outcomes.items()
        if name != "default" and "default" in outcomes
    }
    row["explained"] = explained(row["beside_default"], generator.model.dtype)
    row["refused"] = refused
    return row


def main(argv: list[str] | None = None) -> int:
    """Measure and write the results file. Returns 1 where ours differs by more than rounding explains."""
    options = harness.parser(__doc__.splitlines()[0], budget_s=150)
    options.set_defaults(rounds=2)
    options.add_argument("--kv-heads", type=int, default=None, help="heads of keys (default: as of queries)")
    options.add_argument("--layers", type=int, default=None, help="decoder layers (default: 32)")
    options.add_argument("--new-tokens", type=int, default=None, help=f"tokens to generate (default: {NEW_TOKENS})")
    arguments = options.parse_args(argv)
    budget = Budget(arguments.budget)
    device = torch.device(arguments.device)
    sizes = dict(SMOKE_SIZES if arguments.smoke else SIZES)
    sizes["layers"] = arguments.layers or sizes["layers"]
    kv_heads = arguments.kv_heads or sizes["heads"]
    new_tokens = arguments.new_tokens or (SMOKE_NEW_TOKENS if arguments.smoke else NEW_TOKENS)
    chosen = [case for case in all_cases(arguments.smoke) if harness.asked_for(arguments, case.label)]
    facts = harness.environment(arguments.device)
    facts["transformers"] = metadata.version("transformers")
    kind = "generate" if kv_heads == sizes["heads"] else f"generate_kv{kv_heads}"
    given = {**vars(arguments), **sizes, "kv_heads": kv_heads, "new_tokens": new_tokens}
    results = Results(harness.results_path(arguments, facts, kind), "generate", facts, given)
    longest = max(case.prompt for case in chosen) + new_tokens
    generator = Generator(make_model(sizes, kv_heads, longest, device), new_tokens, device)
    weights = sum(parameter.numel() for parameter in generator.model.parameters())
    say(f"[{budget.used:.0f} s] a model of {weights / 1e9:.2f} billion weights")
    clocks = ClockLog(device)
    left, wrong = [], []
    try:
        for case in chosen:
            if budget.exhausted:
                left.append(case.label)
                continue
            started = time.monotonic()
            row = measure(case, generator, 1 if arguments.smoke else arguments.rounds, budget)
            row["label"] = f"{sizes['heads']}/{kv_heads} heads, {row['label']}"
            row |= {"gpu_state": clocks.since(started), "seconds": round(time.monotonic() - started, 1)}
            results.add(row)
            wrong += [case.label] if row["explained"] is False else []
            rates = row["decode_tokens_per_second"]
            shown = ", ".join(f"{name} {ms} ms then {rates[name]} tokens/s" for name, ms in row["prefill_ms"].items())
            say(f"[{budget.used:.0f} s] {row['label']}: {shown}; kernels of ours: {row['kernels']}")
            say(f"    explained by rounding: {row['explained']} {row['beside_default']} {row['refused'] or ''}")
    finally:
        clocks.close()
        results.finish(left)
    if wrong:
        say(f"logits differ by more than rounding explains: {wrong}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
