"""Run the Triton kernels on a CPU, in Triton's interpreter, and measure their error against float64.

    TRITON_INTERPRET=1 python examples/interpreter_check.py [--json]

The interpreter executes the same kernel source that a GPU compiles, one tile at a time in NumPy: slow, and good enough
to show that the arithmetic is right on a machine with no GPU. Speed it says nothing about.
"""

import argparse
import json
import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when the kernels are imported

import torch

TOLERANCE = 2.0  # times the error of PyTorch's own math path in the same precision, plus a rounding of the output
CASES = {
    "causal": {"is_causal": True},
    "document mask": {"attn_mask": "documents"},
    "float bias": {"attn_mask": "bias"},
}


def run_kernels(query, key, value, attn_mask, is_causal, grad_out):
    """Our Triton kernels forward and backward on CPU tensors: (out, grad_query, grad_key, grad_value).

    The one place here that knows their launcher's arguments.
    """
    from torch_flashbackend.kernels.triton import attention

    scale = query.size(-1) ** -0.5
    float_mask = attn_mask is not None and attn_mask.is_floating_point()
    out = torch.empty_like(query)
    logsumexp = torch.empty((2,) * float_mask + query.shape[:3], dtype=torch.float32)
    options = {"dropout_seed": None, "dropout_p": 0.0, "is_causal": is_causal, "scale": scale, "allow_tf32": False}
    attention.forward(query, key, value, attn_mask, out=out, logsumexp=logsumexp, **options)
    grads = {f"grad_{name}": torch.empty_like(t) for name, t in (("query", query), ("key", key), ("value", value))}
    attention.backward(grad_out, query, key, value, attn_mask, out, logsumexp, **options, **grads, needs_mask=False)
    return (out, *grads.values())


def math_path(query, key, value, attn_mask, is_causal, grad_out):
    """PyTorch's math path and its gradients, in the inputs' precision: same results as `run_kernels`."""
    leaves = [t.detach().clone().requires_grad_() for t in (query, key, value)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=attn_mask, is_causal=is_causal)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad_out))


def make_mask(kind: str | None, batch: int, heads: int, seqlen: int, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask of one of the kinds in CASES."""
    if kind == "documents":
        documents = (torch.arange(seqlen) * 3 // seqlen).expand(batch, seqlen)
        return (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
    if kind == "bias":
        return torch.randn(1, heads, seqlen, seqlen, dtype=dtype)
    return None


def check(cases, dtypes, batch: int = 1, heads: int = 2, seqlen: int = 80, head_dim: int = 32) -> list[dict]:
    """One row per case, precision and result: the largest error of our kernels and of PyTorch's math path."""
    rows = []
    for name in cases:
        options = CASES[name]
        for dtype in dtypes:
            torch.manual_seed(0)
            shape = (batch, heads, seqlen, head_dim)
            tensors = [torch.randn(shape, dtype=dtype) for _ in range(4)]
            mask = make_mask(options.get("attn_mask"), batch, heads, seqlen, dtype)
            exact_mask = mask.double() if mask is not None and mask.is_floating_point() else mask
            is_causal = options.get("is_causal", False)
            query, key, value, grad_out = tensors
            exact = math_path(*(t.double() for t in tensors[:3]), exact_mask, is_causal, grad_out.double())
            stock = math_path(query, key, value, mask, is_causal, grad_out)
            ours = run_kernels(query, key, value, mask, is_causal, grad_out)
            for result, o, s, e in zip(("output", "grad query", "grad key", "grad value"), ours, stock, exact):
                error, stock_error = ((t.double() - e).abs().max().item() for t in (o, s))
                rounding = torch.finfo(dtype).eps * e.abs().max().item()
                rows.append(
                    {
                        "case": name,
                        "dtype": str(dtype).removeprefix("torch."),
                        "result": result,
                        "error": error,
                        "stock_error": stock_error,
                        "ok": error <= TOLERANCE * stock_error + rounding,
                    }
                )
    return rows


def main() -> None:
    """Print the rows, as JSON or as text; exit 1 if an error is out of bounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON list instead of text")
    parser.add_argument("--quick", action="store_true", help="one case in one precision")
    arguments = parser.parse_args()
    cases = ["document mask"] if arguments.quick else list(CASES)
    rows = check(cases, [torch.float16] if arguments.quick else [torch.float32, torch.float16])
    if arguments.json:
        print(json.dumps(rows))
    else:
        print(f"{'case':14} {'dtype':8} {'result':11} {'ours':>9} {'math path':>10}   largest error against float64")
        for row in rows:
            verdict = "" if row["ok"] else "   OUT OF BOUNDS"
            numbers = f"{row['error']:9.1e} {row['stock_error']:10.1e}"
            print(f"{row['case']:14} {row['dtype']:8} {row['result']:11} {numbers}{verdict}")
    raise SystemExit(0 if all(row["ok"] for row in rows) else 1)


if __name__ == "__main__":
    main()
