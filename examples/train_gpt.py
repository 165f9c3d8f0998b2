"""Train a small byte-level GPT on the Python standard library's own sources. Ordinary PyTorch, nothing else.

The files are laid end to end and cut into sequences of equal length, so one sequence may hold the end of one file and
the start of another. A document mask keeps attention inside each file: it is an ordinary boolean `attn_mask` of
`F.scaled_dot_product_attention`, causal and same-document, the same for every head and layer.

    python examples/train_gpt.py                       # a GPU if there is one, else a tiny model on the CPU
    python examples/train_gpt.py --steps 50 --log run.jsonl

This script imports torch and the standard library only, and does not know which attention kernels run.
"""

import argparse
import contextlib
import json
import math
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256  # bytes
SEPARATOR = 0  # begins each file; no Python source holds a zero byte
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# One set of defaults per kind of device: seconds on a CPU, about a minute on a data-centre GPU.
DEFAULTS = {
    "cpu": {"steps": 30, "seqlen": 256, "batch": 4, "width": 128, "layers": 2, "heads": 4, "dtype": "float32"},
    "cuda": {"steps": 300, "seqlen": 4096, "batch": 8, "width": 768, "layers": 12, "heads": 6, "dtype": "bfloat16"},
}


class Attention(nn.Module):
    """Multi-head self-attention under a mask."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor) -> torch.Tensor:
        """[B, S, width] to the same shape; attn_mask is a bool [B, 1, S, S], True where a query may see a key."""
        batch, seqlen, width = x.shape
        query, key, value = (
            t.view(batch, seqlen, self.heads, width // self.heads).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1)
        )
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask)
        return self.out(out.transpose(1, 2).reshape(batch, seqlen, width))


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a layer norm and around a residual."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor) -> torch.Tensor:
        """[B, S, width] to the same shape."""
        x = x + self.attention(self.attention_norm(x), attn_mask)
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """A decoder-only transformer with learned positions and tied embeddings."""

    def __init__(self, seqlen: int, width: int, layers: int, heads: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(seqlen, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        for block in self.blocks:  # keep the residual stream's size independent of the depth
            for projection in (block.attention.out, block.feed_forward[2]):
                nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens: torch.Tensor, attn_mask: torch.Tensor) -> torch.Tensor:
        """Token ids [B, S] to logits [B, S, 256]."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, attn_mask)
        return F.linear(self.norm(x), self.embedding.weight)


def read_corpus(limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The standard library's sources as one row of bytes, and the number of the file that each byte belongs to.

    Sorted by path, so the same Python gives the same corpus; at most `limit` bytes. Both tensors are 1-D of one
    length, uint8 and int32.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        (path.relative_to(root).as_posix(), path)
        for path in root.rglob("*.py")
        if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    )
    chunks, lengths, total = [], [], 0
    for _, path in files:
        data = bytes([SEPARATOR]) + path.read_bytes().replace(b"\0", b" ")
        chunks.append(data)
        lengths.append(len(data))
        total += len(data)
        if total >= limit:
            break
    if not chunks:
        raise SystemExit(f"no Python sources under {root}: this Python came without its standard library's sources")
    tokens = torch.frombuffer(bytearray(b"".join(chunks)), dtype=torch.uint8)[:limit]
    documents = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))[:limit]
    return tokens, documents


def batches(tokens: torch.Tensor, documents: torch.Tensor, batch: int, seqlen: int, seed: int):
    """Endless (inputs [B, S], targets [B, S], document numbers [B, S]): all sequences in random order, over and over.

    A target is -100 (ignored by the loss) where the next byte belongs to another file.
    """
    count = (len(tokens) - 1) // seqlen
    if count < batch:
        raise SystemExit(f"the corpus holds {count} sequences of {seqlen} bytes, fewer than a batch of {batch}")
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(seqlen + 1)
    while True:
        order = torch.randperm(count, generator=generator)
        for rows in order[: count - count % batch].split(batch):
            index = rows[:, None] * seqlen + offsets
            data, document = tokens[index].long(), documents[index]
            targets = data[:, 1:].masked_fill(document[:, 1:] != document[:, :-1], -100)
            yield data[:, :-1], targets, document[:, :-1]


def document_mask(documents: torch.Tensor) -> torch.Tensor:
    """Bool [B, 1, S, S]: True where the key is not after the query and both belong to one file. documents: [B, S]."""
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril()[:, None]


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory held so far: on the GPU by tensors, on a CPU by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, with the defaults of the chosen device filled in."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--warmup", type=int, default=10, help="first steps, left out of tokens per second")
    parser.add_argument("--seqlen", type=int, help="bytes per sequence")
    parser.add_argument("--batch", type=int, help="sequences per step")
    parser.add_argument("--width", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--dtype", choices=DTYPES, help="of the matrix products, by autocast; weights stay float32")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus-bytes", type=int, default=16 << 20, help="read at most so much source text")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--log", type=Path, help="write a JSON line per step")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two looks at the clock and the loss")
    arguments = parser.parse_args(argv)
    for name, value in DEFAULTS["cuda" if arguments.device.startswith("cuda") else "cpu"].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    for name in ("steps", "seqlen", "batch", "width", "layers", "heads", "corpus_bytes", "log_every"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if arguments.width % arguments.heads:
        parser.error(f"--width {arguments.width} is not a multiple of --heads {arguments.heads}")
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: there is no GPU that torch can use here")
    arguments.warmup = min(arguments.warmup, arguments.steps - 1)
    return arguments


def main(argv: list[str] | None = None) -> None:
    """Train, and report loss, tokens per second and peak memory."""
    arguments = parse_arguments(argv)
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    torch.manual_seed(arguments.seed)

    model = GPT(arguments.seqlen, arguments.width, arguments.layers, arguments.heads).to(device)
    forward = torch.compile(model) if arguments.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), fused=on_gpu)
    scaler = torch.amp.GradScaler(device.type, enabled=arguments.dtype == "float16" and on_gpu)
    data = batches(*read_corpus(arguments.corpus_bytes), arguments.batch, arguments.seqlen, arguments.seed)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{parameters / 1e6:.1f} M parameters, {arguments.layers} layers of {arguments.heads} heads, "
        f"head_dim {arguments.width // arguments.heads}, {arguments.batch} x {arguments.seqlen} bytes a step, "
        f"{arguments.dtype} on {device}",
        flush=True,
    )

    def autocast() -> contextlib.AbstractContextManager:
        enabled = arguments.dtype != "float32"
        return torch.autocast(device.type, dtype=DTYPES[arguments.dtype]) if enabled else contextlib.nullcontext()

    def synchronize() -> None:
        if on_gpu:
            torch.cuda.synchronize(device)

    synchronize()
    started = time.perf_counter()  # overwritten when the warm-up is over
    tokens_per_second = None
    pending: list[tuple[int, torch.Tensor]] = []  # losses that are still on the device
    with open(arguments.log, "w") if arguments.log else contextlib.nullcontext() as log:
        for step in range(1, arguments.steps + 1):
            tokens, targets, documents = (t.to(device, non_blocking=True) for t in next(data))
            for group in optimizer.param_groups:
                group["lr"] = arguments.lr * min(1.0, step / 20)
            with autocast():
                logits = forward(tokens, document_mask(documents))
                loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            pending.append((step, loss.detach()))

            if step == arguments.warmup:
                synchronize()
                started = time.perf_counter()
            if step % arguments.log_every == 0 or step == arguments.steps:
                synchronize()
                if step > arguments.warmup:
                    done = (step - arguments.warmup) * arguments.batch * arguments.seqlen
                    tokens_per_second = done / (time.perf_counter() - started)
                peak = peak_memory_bytes(device)
                for logged, value in pending:
                    record = {
                        "step": logged,
                        "loss": value.item(),
                        "tokens_per_second": tokens_per_second,
                        "peak_memory_bytes": peak,
                    }
                    if log:
                        log.write(json.dumps(record) + "\n")
                pending.clear()
                if log:
                    log.flush()
                speed = f"{tokens_per_second:,.0f} tokens/s" if tokens_per_second else "warming up"
                print(f"step {step:5d}  loss {record['loss']:.4f}  {speed}  peak {peak / 2**30:.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
