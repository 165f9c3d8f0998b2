"""The one line: switch the plugin on in a program that you already have, and ask what it does with a call.

    python examples/one_line.py

On a CPU every call goes to PyTorch's own kernel: `explain` says so, and `stats` has nothing to count.
"""

import torch
import torch.nn.functional as F
from torch import nn

import torch_flashbackend

torch_flashbackend.enable()  # the line; from here on F.scaled_dot_product_attention is routed

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
torch.manual_seed(0)

# A model that knows nothing of us: PyTorch's own encoder layer calls F.scaled_dot_product_attention inside.
model = nn.TransformerEncoderLayer(d_model=256, nhead=4, batch_first=True, dropout=0.0).to(device, dtype)
tokens = torch.randn(2, 128, 256, device=device, dtype=dtype)
loss = F.l1_loss(model(tokens), tokens)
loss.backward()
print(f"loss {loss.item():.4f}\n")

# Why did a call run where it ran? Ask with the same arguments; nothing is computed.
query, key, value = (torch.randn(2, 8, 1024, 128, device=device, dtype=dtype) for _ in range(3))
mask = torch.ones(2, 1, 1024, 1024, dtype=torch.bool, device=device).tril()
F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
print(torch_flashbackend.explain(query, key, value, attn_mask=mask))
print()

# And over the whole run:
print(torch_flashbackend.stats())
