"""22 architectures of Hugging Face transformers, tiny and with random weights: the plugin against PyTorch alone.

    pip install 'transformers>=5'
    python examples/architectures.py [--device cuda] [--dtype bfloat16] [--seqlen 512] [names ...]

Each model runs forward and backward on a padded batch: once in float64 with attention spelled out ("eager"), which is
the truth, then in the chosen dtype on stock PyTorch, and with our kernels, both behind `attn_implementation="sdpa"` and
as `attn_implementation="flashbackend"`. The table shows the error of each, relative to the largest value; for gradients
it is that of all parameters together. Nothing is downloaded. On a CPU our math path stands in for the kernels.

The exit status is 1 if ours errs by more than twice what stock does.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import torch_flashbackend

VOCABULARY = 96
WINDOW = 16
# A kernel that sums in another order errs by another amount. Below this, in units of the dtype's own rounding, an error
# relative to the largest value says nothing about either side.
ROUNDINGS = 4.0

TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 4096, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 16}
# All experts are chosen: which ones would otherwise hang on the last bit.
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
VISION = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER_DECODER = {
    "vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0, "pad_token_id": 0,
    "max_position_embeddings": 4096,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model class, its configuration class and arguments, the kind of its inputs, and what is special in it."""

    model: str
    config: str
    options: dict[str, Any]
    inputs: str = "text"
    note: str = ""
    sdpa: bool = True
    """Is its "sdpa" attention there, and the same function as its "eager" one?"""


ARCHITECTURES = {
    "Llama": Architecture("LlamaForCausalLM", "LlamaConfig", GROUPED, note="grouped heads"),
    "Mistral": Architecture(
        "MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": WINDOW}, note="window"
    ),
    "Mixtral": Architecture("MixtralForCausalLM", "MixtralConfig", {**GROUPED, **EXPERTS}, note="experts"),
    "Qwen2": Architecture("Qwen2ForCausalLM", "Qwen2Config", {**GROUPED}, note="grouped heads"),
    "Qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED}, note="normed query and key"),
    "Gemma 2": Architecture(
        "Gemma2ForCausalLM", "Gemma2Config",
        {**GROUPED, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.5},
        note="softcap, window", sdpa=False,
    ),
    "Gemma 3": Architecture(
        "Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
        note="window in every other layer",
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM", "GptOssConfig", {**GROUPED, **EXPERTS, "sliding_window": WINDOW},
        note="sinks, window, experts", sdpa=False,
    ),
    "Phi-3": Architecture("Phi3ForCausalLM", "Phi3Config", GROUPED, note="packed projections"),
    "OLMo 2": Architecture("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    "GPT-2": Architecture(
        "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 4096, "attn_pdrop": 0.0,
         "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0},
    ),
    "GPT-NeoX": Architecture("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT, note="rotates a part of head_dim"),
    "OPT": Architecture(
        "OPTForCausalLM", "OPTConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 4096, "word_embed_proj_dim": 64, "dropout": 0.0, "pad_token_id": 0},
    ),
    "BERT": Architecture("BertForMaskedLM", "BertConfig", {**TEXT, **NO_DROPOUT}, note="encoder"),
    "RoBERTa": Architecture("RobertaForMaskedLM", "RobertaConfig", {**TEXT, **NO_DROPOUT}, note="encoder"),
    "ModernBERT": Architecture(
        "ModernBertForMaskedLM", "ModernBertConfig",
        {**TEXT, "local_attention": WINDOW, "global_attn_every_n_layers": 2}, note="window on both sides",
    ),
    "BART": Architecture("BartForConditionalGeneration", "BartConfig", ENCODER_DECODER, "pair", "cross-attention"),
    "T5": Architecture(
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4,
         "dropout_rate": 0.0, "pad_token_id": 0}, "pair", "trained position bias",
    ),
    "Whisper": Architecture(
        "WhisperForConditionalGeneration", "WhisperConfig",
        {**ENCODER_DECODER, "num_mel_bins": 16, "max_source_positions": 64, "max_target_positions": 4096,
         "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 1}, "audio", "cross-attention",
    ),
    "ViT": Architecture("ViTModel", "ViTConfig", {**VISION, **NO_DROPOUT, "image_size": 64}, "image"),
    "CLIP": Architecture("CLIPVisionModel", "CLIPVisionConfig", {**VISION, "image_size": 64}, "image"),
    "DINOv2": Architecture("Dinov2Model", "Dinov2Config", {**VISION, "image_size": 64}, "image"),
}  # fmt: skip


@dataclasses.dataclass
class Result:
    """Errors relative to float64, None where a way does not exist; calls: attention calls of ours in `plugin`."""

    stock: tuple[float, float] | None
    plugin: tuple[float, float] | None
    named: tuple[float, float]
    calls: int
    floor: float

    @property
    def agrees(self) -> bool:
        """Ours errs by at most twice what stock does, in output and gradients."""
        limits = [2.0 * max(error, self.floor) for error in self.stock or (0.0, 0.0)]
        ours = [errors for errors in (self.plugin, self.named) if errors is not None]
        # A NaN is at most nothing.
        return all(error <= limit for errors in ours for error, limit in zip(errors, limits))


def inputs_of(kind: str, seqlen: int, device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A batch of two, the second one padded at its end."""
    generator = torch.Generator().manual_seed(1)

    def tokens(length: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(2, VOCABULARY, (2, length), generator=generator)
        padding = torch.ones_like(ids)
        # Shorter than the window: each query sees a key. Rows without one are NaN in "eager" attention.
        padding[1, length - WINDOW // 2 :] = 0
        return {"input_ids": ids * padding, "attention_mask": padding}

    if kind == "image":
        made = {"pixel_values": torch.randn(2, 3, 64, 64, generator=generator)}
    elif kind == "audio":
        made = {"input_features": torch.randn(2, 16, 128, generator=generator)}
    else:
        made = tokens(seqlen)
    if kind in ("pair", "audio"):
        decoder = tokens(seqlen // 2)
        made |= {"decoder_input_ids": decoder["input_ids"], "decoder_attention_mask": decoder["attention_mask"]}
    return {name: t.to(device, dtype) if t.is_floating_point() else t.to(device) for name, t in made.items()}


def step(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One forward and backward; output at the positions that are no padding, and the gradients, in float64."""
    result = model(**inputs, use_cache=False) if "pixel_values" not in inputs else model(**inputs)
    out = result.logits if "logits" in result else result.last_hidden_state
    padding = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    if padding is not None:
        out = out[padding.bool()]
    weight = torch.linspace(-1.0, 1.0, out.numel(), device=out.device, dtype=torch.float64).sin()
    (out.double() * weight.view_as(out)).sum().backward()
    grads = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return {"output": out.detach().double(), **grads}


def errors_of(results: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> tuple[float, float]:
    """(of the output, of the gradients): largest difference over the largest value."""
    names = [name for name in truth if name != "output"]
    worst = torch.stack([(results[name] - truth[name]).abs().max() for name in names]).max()
    largest = torch.stack([truth[name].abs().max() for name in names]).max()
    difference = (results["output"] - truth["output"]).abs().max() / truth["output"].abs().max()
    return difference.item(), (worst / largest).item()


def make(architecture: Architecture, implementation: str, device: str, dtype: torch.dtype) -> Any:
    """The model, with the same weights each time."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, architecture.config)(**architecture.options)
    config._experts_implementation = "eager"  # the grouped product knows no float64
    model_class = getattr(transformers, architecture.model)
    return model_class._from_config(config, attn_implementation=implementation).to(device, dtype).eval()


@contextlib.contextmanager
def ours(device: str) -> Iterator[None]:
    """The plugin on; every call that our kernels can take is taken, or, on a CPU, our math path."""
    torch_flashbackend.enable()
    try:
        with torch_flashbackend.sdpa_backend(*(("cuda", "triton") if device == "cuda" else ("math",)), "stock"):
            yield
    finally:
        torch_flashbackend.disable()


def compare(
    name: str,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seqlen: int = 40,
    using: Callable[[str], Any] = ours,
) -> Result:
    """Run one architecture in all ways. using: a context manager, given the device, that puts our kernels to work."""
    from torch_flashbackend.integrations import transformers as integration

    architecture = ARCHITECTURES[name]
    integration.register()
    truth = step(
        make(architecture, "eager", device, torch.float64),
        inputs_of(architecture.inputs, seqlen, device, torch.float64),
    )
    inputs = inputs_of(architecture.inputs, seqlen, device, dtype)

    def errors(implementation: str) -> tuple[float, float]:
        return errors_of(step(make(architecture, implementation, device, dtype), inputs), truth)

    torch_flashbackend.disable()
    # Where "sdpa" leaves out what the model has, stock's best is "eager".
    stock = errors("sdpa" if architecture.sdpa else "eager")
    plugin = None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*softcap.*")
        with using(device):
            if architecture.sdpa:
                plugin = errors("sdpa")
            before = torch_flashbackend.stats()
            named = errors("flashbackend")
            after = torch_flashbackend.stats()
    calls = sum(after.total(b) - before.total(b) for b in ("cuda", "triton", "math"))
    return Result(stock, plugin, named, calls, ROUNDINGS * torch.finfo(dtype).eps)


def write_results(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """The table in the form of the benchmarks' results files, of kind "architectures"."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks import harness

    arguments = {"dtype": options.dtype, "seqlen": options.seqlen, "transformers": version("transformers")}
    results = harness.Results(options.json, "architectures", harness.environment(options.device), arguments)
    for row in rows:
        results.add(row)
    results.finish()


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(ARCHITECTURES), metavar="names", help="architectures")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, choices=("cpu", "cuda"))
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16" if device == "cuda" else "float32"
    )
    parser.add_argument("--seqlen", type=int, default=512 if device == "cuda" else 40)
    parser.add_argument("--json", type=Path, help="write the table there too, as the benchmarks write their results")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in ARCHITECTURES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)} (known: {', '.join(ARCHITECTURES)})")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use here")
    if options.seqlen <= WINDOW:
        parser.error(f"--seqlen must be above {WINDOW}, as padding has a part of that length")
    try:
        import transformers
    except ImportError:
        print("this example needs the package `transformers` (pip install 'transformers>=5'); nothing was run")
        return 0
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.device}, {options.dtype}")
    print("errors relative to float64: output / gradients")
    columns = f"{'architecture':13} {'stock':>17} {'plugin':>17} {'flashbackend':>17} {'calls':>6}  "
    print(f"{columns}{'':9}{'what is special'}")

    def show(errors: tuple[float, float] | None) -> str:
        return "-" if errors is None else f"{errors[0]:.1e} / {errors[1]:.1e}"

    failed, rows = [], []
    for name in options.names:
        result = compare(name, options.device, getattr(torch, options.dtype), options.seqlen)
        verdict = "agrees" if result.agrees else "DIFFERS"
        row = " ".join(f"{show(errors):>17}" for errors in (result.stock, result.plugin, result.named))
        print(f"{name:13} {row} {result.calls:6}  {verdict:9}{ARCHITECTURES[name].note}", flush=True)
        about = {"label": name, "note": ARCHITECTURES[name].note, "agrees": result.agrees}
        rows.append(about | dataclasses.asdict(result))
        if not result.agrees:
            failed.append(name)
    if options.json:
        write_results(options, rows)
    print(f"{len(options.names) - len(failed)} of {len(options.names)} architectures agree with stock PyTorch")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
