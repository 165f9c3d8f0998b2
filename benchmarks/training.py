"""Training steps of a Llama-shaped model with and without the plugin.

    python -m benchmarks.training                     # under 100 s on an H200, writes <gpu>_training.json
    python -m benchmarks.training --device cpu --smoke --out /tmp/training.json

Hidden size 4096, 32 heads of 128 on 8 of keys and values, 8 layers, one sequence of 8,192 tokens, bfloat16, forward,
backward and optimizer step; weights and tokens are random. The model is transformers' Llama where that is installed,
else the small one below; both call F.scaled_dot_product_attention and know nothing of the plugin.

Each side is a process of its own, "stock" as it is and "plugin" with TORCH_FLASHBACKEND=1 in its environment. They take
turns of a few steps, one at work at a time, so that heat and clocks meet both alike. The rate is the median of the
turns. Losses of all steps are compared, and the gradients' norms of the first ones: what random tokens cost says little
of attention.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.harness import ROOT, ClockLog, Results, say, significant, turns

SIDES = {"stock": {}, "plugin": {"TORCH_FLASHBACKEND": "1"}}
MODES = ("eager", "compile")
WARMUP_STEPS = 3
# Relative: bfloat16 rounds differently on the two sides, from the first step on, and the weights drift apart.
LOSS_TOLERANCE = 0.02
NORM_TOLERANCE = 0.05
SIZES = {
    "hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8, "layers": 8, "vocabulary": 32000,
    "seqlen": 8192,
}  # fmt: skip
SMOKE_SIZES = {
    "hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2, "layers": 2, "vocabulary": 64, "seqlen": 32,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- model


def rotate(tensor: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding of [B, H, S, D]; cosine and sine [S, D]."""
    first, second = tensor.chunk(2, dim=-1)
    return tensor * cosine + torch.cat((-second, first), -1) * sine


class Layer(nn.Module):
    """Llama's decoder layer: grouped-query attention and a gated feed-forward, each behind an RMS norm."""

    def __init__(self, hidden: int, intermediate: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """[B, S, hidden] to the same shape."""
        normed = self.attention_norm(x)

        def split(projected: Tensor, heads: int) -> Tensor:
            return projected.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

        query = rotate(split(self.query(normed), self.heads), cosine, sine)
        key = rotate(split(self.key(normed), self.kv_heads), cosine, sine)
        value = split(self.value(normed), self.kv_heads)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        normed = self.feed_forward_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """The model where transformers is not installed. Returns the loss of predicting each next token."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.head_dim = sizes["hidden"] // sizes["heads"]
        self.embedding = nn.Embedding(sizes["vocabulary"], sizes["hidden"])
        self.layers = nn.ModuleList(
            Layer(sizes["hidden"], sizes["intermediate"], sizes["heads"], sizes["kv_heads"])
            for _ in range(sizes["layers"])
        )
        self.norm = nn.RMSNorm(sizes["hidden"])
        self.head = nn.Linear(sizes["hidden"], sizes["vocabulary"], bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [B, S] to a scalar."""
        x = self.embedding(tokens)
        steps = torch.arange(0, self.head_dim, 2, device=x.device, dtype=torch.float32) / self.head_dim
        positions = torch.arange(tokens.size(1), device=x.device, dtype=torch.float32)
        angles = torch.outer(positions, 500_000.0**-steps).repeat(1, 2)
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class FromTransformers(nn.Module):
    """transformers' Llama of the same sizes, with the same loss. Raises ImportError where that is not installed."""

    def __init__(self, sizes: dict[str, int], dtype: torch.dtype) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(
            hidden_size=sizes["hidden"], intermediate_size=sizes["intermediate"], vocab_size=sizes["vocabulary"],
            num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"],
            num_key_value_heads=sizes["kv_heads"], max_position_embeddings=sizes["seqlen"], use_cache=False,
        )  # fmt: skip
        self.model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        self.layers = self.model.model.layers

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [B, S] to a scalar."""
        logits = self.model(input_ids=tokens).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def make_model(sizes: dict[str, int], dtype: torch.dtype, device: str) -> tuple[nn.Module, str]:
    """(the model, whose it is), with the same random weights for one seed."""
    torch.manual_seed(0)
    with torch.device(device):
        try:
            return FromTransformers(sizes, dtype).train(), "transformers"
        except Exception as error:  # not installed, or a version that is made otherwise
            print(f"the model is our own, not transformers': {error}", file=sys.stderr)
            return Llama(sizes).to(dtype).train(), "own"


# --------------------------------------------------------------------------------------------------------- one process


class Worker:
    """One side: a model in training, told over a pipe what to do next."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.sizes = arguments, sizes_of(arguments)
        self.device = torch.device(arguments.device)
        self.cuda = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.losses: list[float] = []
        self.norms: list[float] = []

    def begin(self) -> dict[str, Any]:
        """Make the model and warm it up, compilation included."""
        self.model, whose = make_model(self.sizes, self.dtype, self.arguments.device)
        if self.arguments.worker == "compile":
            # Layer by layer: one compilation for all of them.
            for layer in self.model.layers:
                layer.compile(backend="inductor" if self.cuda else "aot_eager")
        if self.arguments.optimizer == "adamw":
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=self.cuda)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.tokens = torch.Generator(device=self.device).manual_seed(1)
        self.steps(WARMUP_STEPS, with_norms=True)
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        return {
            "model": whose,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "plugin_on": "torch_flashbackend.override" in sys.modules,
        }

    def steps(self, count: int, with_norms: bool = False) -> dict[str, Any]:
        """Train; seconds from idle to idle."""
        shape = (1, self.sizes["seqlen"])
        losses = []
        self._synchronize()
        start = time.perf_counter()
        for _ in range(count):
            tokens = torch.randint(self.sizes["vocabulary"], shape, generator=self.tokens, device=self.device)
            loss = self.model(tokens)
            loss.backward()
            if with_norms:
                self.norms.append(nn.utils.get_total_norm([p.grad for p in self.model.parameters()]).item())
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        self._synchronize()
        seconds = time.perf_counter() - start
        self.losses += [loss.item() for loss in losses]
        return {"seconds": seconds}

    def end(self) -> dict[str, Any]:
        """What the training gave, and which kernels of ours ran; frees the model."""
        found = {
            "losses": self.losses,
            "norms": self.norms,
            "peak_memory_bytes": self._peak(),
            "kernels": self._kernels(),
        }
        del self.model, self.optimizer
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
        return found

    def _synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.cuda else 0

    def _kernels(self) -> dict[str, int]:
        """Launches of our kernels by name so far: empty in a process that never switched the plugin on."""
        ops = sys.modules.get("torch_flashbackend.ops")
        return dict(ops.launch_counts()) if ops else {}

    def serve(self) -> int:
        """Lines of JSON in, [name, arguments...]; lines of JSON out."""
        with contextlib.suppress(Exception):
            import transformers  # noqa: F401  half of the start, while another side still computes
        for line in sys.stdin:
            name, *given = json.loads(line)
            print(json.dumps(getattr(self, name)(*given)), file=self.arguments.pipe, flush=True)
        return 0


class Side:
    """A worker's process, seen from the one that measures."""

    def __init__(self, name: str, mode: str, arguments: argparse.Namespace) -> None:
        command = [sys.executable, "-m", "benchmarks.training", "--worker", mode, "--device", arguments.device]
        command += ["--optimizer", arguments.optimizer] + ["--smoke"] * arguments.smoke
        environment = {k: v for k, v in os.environ.items() if k != "TORCH_FLASHBACKEND"} | SIDES[name]
        self.name = f"{name}, {mode}"
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def send(self, *order: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer will be missing, and that is said
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """The answer to what was sent. Raises RuntimeError where the process ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name} ended with {self._process.wait()}; its error is above")
        return json.loads(line)

    def ask(self, *order: Any) -> dict[str, Any]:
        self.send(*order)
        return self.receive()

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()


# ------------------------------------------------------------------------------------------------------------- measure


def measure(mode: str, sides: dict[str, Side], arguments: argparse.Namespace, clocks: ClockLog) -> dict[str, Any]:
    """A row of tokens per second; ends the processes."""
    sizes = sizes_of(arguments)
    started = time.monotonic()
    try:
        for side in sides.values():
            side.send("begin")
        begun = {name: side.receive() for name, side in sides.items()}
        if [one["plugin_on"] for one in begun.values()] != [False, True]:
            raise RuntimeError("the environment variable does not switch the plugin on: is the package installed?")
        measured = time.monotonic()
        rates: dict[str, list[float]] = {name: [] for name in SIDES}
        for order in turns(list(SIDES), arguments.rounds):
            for name in order:
                seconds = sides[name].ask("steps", arguments.steps)["seconds"]
                rates[name].append(arguments.steps * sizes["seqlen"] / seconds)
        state = clocks.since(measured)
        ends = {name: side.ask("end") for name, side in sides.items()}
        row = _training_row(mode, arguments, begun["plugin"], rates, ends)
        row |= {"gpu_state": state, "seconds": round(time.monotonic() - started, 1)}
        return row
    finally:
        for side in sides.values():
            side.close()


def _training_row(mode: str, arguments: argparse.Namespace, begun: dict[str, Any], rates: dict[str, list[float]],
                  ends: dict[str, dict[str, Any]]) -> dict[str, Any]:  # fmt: skip
    sizes = sizes_of(arguments)
    losses, norms = (_worst_difference(*(ends[name][what] for name in SIDES)) for what in ("losses", "norms"))
    heads = f"{sizes['heads']}/{sizes['kv_heads']} heads"
    return {
        "label": f"Llama, {sizes['layers']} layers, width {sizes['hidden']}, {heads}, S = {sizes['seqlen']:,}, {mode}",
        "mode": mode,
        "model": begun["model"],
        "parameters": begun["parameters"],
        "sizes": sizes,
        "tokens_per_second": {name: significant(statistics.median(found)) for name, found in rates.items()},
        "turns": {name: [significant(rate) for rate in found] for name, found in rates.items()},
        "peak_memory_bytes": {name: end["peak_memory_bytes"] for name, end in ends.items()},
        "loss": {name: significant(end["losses"][-1]) for name, end in ends.items()},
        "worst_loss_difference": significant(losses, 3),
        "worst_norm_difference": significant(norms, 3),
        "losses_agree": losses <= LOSS_TOLERANCE and norms <= NORM_TOLERANCE,
        "kernels": ends["plugin"]["kernels"],
    }


def _worst_difference(stock: list[float], ours: list[float]) -> float:
    """The largest relative difference; what is not a number differs from everything."""
    return max(abs(a - b) / abs(a) if a == a and b == b else 1e9 for a, b in zip(stock, ours, strict=True))


def sizes_of(arguments: argparse.Namespace) -> dict[str, int]:
    """The model's sizes."""
    return SMOKE_SIZES if arguments.smoke else SIZES


def main(argv: list[str] | None = None) -> int:
    """Measure and write the results file. Returns 1 where losses differ or a mode fails."""
    options = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    options.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu with --smoke")
    options.add_argument("--smoke", action="store_true", help="tiny sizes: checks the script itself")
    options.add_argument("--only", default="", help="eager or compile; both without this")
    options.add_argument("--rounds", type=int, default=5, help="turns of each side")
    options.add_argument("--steps", type=int, default=3, help="steps in a turn")
    options.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    options.add_argument("--out", type=harness.Path, default=None, help="results file")
    options.add_argument("--worker", choices=MODES, help=argparse.SUPPRESS)
    arguments = options.parse_args(argv)
    if arguments.worker:
        # What a library prints must not land among the answers.
        arguments.pipe, sys.stdout = sys.stdout, sys.stderr
        return Worker(arguments).serve()
    facts = harness.environment(arguments.device)
    given = {name: value for name, value in vars(arguments).items() if name != "worker"}
    results = Results(harness.results_path(arguments, facts, "training"), "training", facts, given)
    clocks = ClockLog(torch.device(arguments.device))
    failed = []
    modes = [mode for mode in MODES if mode in (arguments.only or mode)]
    # All start at once, since importing takes long; they touch the GPU when they are told to begin.
    sides = {mode: {name: Side(name, mode, arguments) for name in SIDES} for mode in modes}
    try:
        for mode in modes:
            try:
                row = measure(mode, sides[mode], arguments, clocks)
            except RuntimeError as error:  # the other mode is measured all the same
                say(str(error))
                failed.append(mode)
                continue
            results.add(row)
            say(json.dumps({name: value for name, value in row.items() if name not in ("sizes", "turns")}))
            if not row["losses_agree"]:
                failed.append(f"{mode}: losses differ")
    finally:
        for side in (side for pair in sides.values() for side in pair.values()):
            side.close()
        clocks.close()
        results.finish(failed)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
