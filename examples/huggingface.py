"""A Hugging Face Llama, its code unchanged: `attn_implementation="sdpa"` is all that the plugin needs.

    pip install transformers
    python examples/huggingface.py

The weights are random and the model is small, so nothing is downloaded.
"""

import sys

import torch

import torch_flashbackend

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    print("this example needs the package `transformers` (pip install transformers); nothing was run")
    sys.exit(0)


def main() -> None:
    """Run one padded batch with the plugin off and on, and compare."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=512, intermediate_size=1024, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device, dtype).eval()
    tokens = torch.randint(0, 256, (2, 512), device=device)
    padding = torch.ones_like(tokens)
    padding[1, :100] = 0  # the second text is shorter: padded on the left

    with torch.no_grad():
        stock = model(tokens, attention_mask=padding).logits
        torch_flashbackend.enable()
        ours = model(tokens, attention_mask=padding).logits
        torch_flashbackend.disable()

    seen = padding.bool()
    difference = (stock - ours)[seen].abs().max().item()
    print(f"largest difference of the logits, off against on: {difference:.2e} (largest logit {stock.abs().max():.2f})")
    print(torch_flashbackend.stats())


if __name__ == "__main__":
    main()
