"""Calls with attention sinks, and the one tolerance rule applied to them: a sink is one more key, with zeros for value.

Shared by tests/, tests/interpreter/ and tests/gpu/. Imports nothing of torch_flashbackend.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from common import Call, Expected, check, expect

MASKS = ("none", "causal", "bool", "float", "large float")


@dataclasses.dataclass
class SinkCall:
    """query [B, H, Sq, D], key and value [B, Hkv, Sk, D], attn_mask, sinks [H]."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    sinks: Tensor
    is_causal: bool

    def inputs(self) -> dict[str, Tensor]:
        """What can have a gradient, by name."""
        made = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {n: t for n, t in made.items() if isinstance(t, Tensor) and t.is_floating_point()}

    def leaves(self) -> SinkCall:
        """The same call on leaves that require gradients."""
        return dataclasses.replace(self, **{n: t.detach().requires_grad_() for n, t in self.inputs().items()})


def sink_call(kind: str, dtype: torch.dtype, device: str = "cpu", sizes=(2, 4, 2, 20, 36, 16)) -> SinkCall:
    """sizes: batch, heads, key and value heads, queries, keys, head_dim. With a mask, one row sees no key."""
    batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim = sizes
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    query, key, value = (random(batch, h, n, head_dim) for h, n in
                         ((heads, seqlen_q), (kv_heads, seqlen_k), (kv_heads, seqlen_k)))  # fmt: skip
    # Weaker than all keys, as strong, stronger than all, and none.
    sinks = torch.tensor([-3.0, 0.5, 40.0, -torch.inf]).repeat(heads)[:heads].to(device, dtype)
    attn_mask = None
    if kind == "bool":
        attn_mask = torch.rand((batch, 1, seqlen_q, seqlen_k), generator=generator).to(device) < 0.7
        attn_mask[0, 0, 2] = False
    elif kind == "float":
        attn_mask = random(1, heads, seqlen_q, seqlen_k)
        attn_mask[:, :, 3] = -torch.inf
    elif kind == "large float":
        # Where a float32 logsumexp has lost the digits that matter.
        attn_mask = random(1, heads, seqlen_q, seqlen_k).float() + 1e4
        sinks = (sinks + 1e4).float()
    return SinkCall(query, key, value, attn_mask, sinks, kind == "causal")


def expected_of(call: SinkCall, grad_out: Tensor) -> Expected:
    """Float64 values and rounding of the output and of each gradient."""
    batch, heads, seqlen_q, _ = call.query.shape
    seqlen_k = call.key.size(2)
    scores = torch.zeros(batch, heads, seqlen_q, seqlen_k, device=call.query.device)
    mask = call.attn_mask
    if call.is_causal:
        mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask.float()
    column = call.sinks.float().view(1, heads, 1, 1).expand(batch, heads, seqlen_q, 1)
    key, value = (torch.cat((t, torch.zeros_like(t[:, :, :1])), 2) for t in (call.key, call.value))
    longer = Call(
        call.query, key, value, torch.cat((scores, column), -1), enable_gqa=key.size(1) != heads, mask_grad=True
    )
    full = expect(longer, grad_out)

    def cut(results: dict[str, Tensor], add) -> dict[str, Tensor]:
        found = {"out": results["out"], "query": results["query"]}
        found |= {name: results[name][:, :, :seqlen_k] for name in ("key", "value")}
        found["sinks"] = add(results["attn_mask"][..., seqlen_k], (heads,))
        if "attn_mask" in call.inputs():
            found["attn_mask"] = add(results["attn_mask"][..., :seqlen_k], call.attn_mask.shape)
        return found

    def add(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        return tensor.sum((0, 2)) if len(shape) == 1 else tensor.sum_to_size(shape)

    return Expected(cut(full.values, add), cut(full.deviations, lambda t, shape: add(t.square(), shape).sqrt()))


def judge_sinks(call: SinkCall, results: dict[str, Tensor], grad_out: Tensor) -> list:
    """Raises AssertionError for a result outside the tolerance."""
    expected = expected_of(call, grad_out)
    # Stored once, in the dtype of the input.
    for name, tensor in call.inputs().items():
        unit = torch.finfo(tensor.dtype).eps / 2
        rounded = unit * expected.values[name].abs()
        expected.deviations[name] = (expected.deviations[name].square() + rounded.square()).sqrt()
    return check(results, expected)
