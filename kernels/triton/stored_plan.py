"""Which backward calls keep probabilities in memory, how many heads at a time, and their launches.

May import torch and this folder's device code. Used by ``attention.py``; the kernels are ``backward_stored.py``'s.
"""

from __future__ import annotations

import math

import torch

from . import backward_stored as kernels

# PyTorch's default takes three times a query's bytes beside its results at these head dimensions, which may not be
# exceeded.
SHARE_OF_QUERY = 2
# So many programs for each multiprocessor that they end together; more heads at a time would only take memory.
PROGRAMS = 8


def count_tiles(size: int, seqlen_q: int, seqlen_k: int, is_causal: bool) -> int:
    """Stored tiles of one head, of `size` queries and keys: those that some query sees."""
    tiles_q, tiles_k = math.ceil(seqlen_q / size), math.ceil(seqlen_k / size)
    if not is_causal:
        return tiles_q * tiles_k
    triangle = min(tiles_q, tiles_k)
    return triangle * (triangle + 1) // 2 + (tiles_q - triangle) * tiles_k


def columns_of_a_program(head_dim: int) -> int:
    """Columns of a gradient's tile: 256, or 128 where that leaves fewer columns of padding."""
    return 256 if head_dim > 384 else 128


def kv_heads_at_a_time(call, head_dim: int) -> int:
    """Of how many kv heads P and dS are in memory together; 0: not even those of one may be.

    call: attention._Call. Counted over all batches.
    """
    size = call.tile("stored_scores").block_m
    group = call.heads // call.kv_heads
    of_one = 2 * group * count_tiles(size, call.seqlen_q, call.seqlen_k, call.is_causal) * size**2
    allowed = SHARE_OF_QUERY * call.batch * call.heads * call.seqlen_q * head_dim // of_one
    programs = math.ceil(call.seqlen_k / size) * math.ceil(head_dim / columns_of_a_program(head_dim))
    useful = math.ceil(PROGRAMS * call.multiprocessors / programs)
    every = call.batch * call.kv_heads
    chunks = math.ceil(every / max(1, min(allowed, useful)))
    return math.ceil(every / chunks) if allowed > 0 else 0


class StoredPlan:
    """The launches that fill grad_query, grad_key and grad_value after the row statistics are there."""

    def __init__(self, call, query, key, value, grad_out, statistics, grads, strides, scalars):
        """call: attention._Call; grads: (grad_query or None, grad_key, grad_value); strides of the two latter's rows
        and grad_query's by the names of the kernels' arguments."""
        head_dim = call.constants["HEAD_DIM"]
        group = call.heads // call.kv_heads
        every = call.batch * call.kv_heads
        self._at_a_time = kv_heads_at_a_time(call, head_dim)
        scores, rows, keys = (call.tile(name) for name in ("stored_scores", "stored_query", "stored_key"))
        size = scores.block_m
        assert size == scores.block_n == rows.block_m == keys.block_n, "the three kernels' tiles are the stored ones"
        tiles_of_head = count_tiles(size, call.seqlen_q, call.seqlen_k, call.is_causal)
        self._shape = 1, 1, self._at_a_time * group * tiles_of_head * size, size
        self._dtype = call.dtype
        stored = torch.empty(self._shape, dtype=call.dtype, device="meta")
        grad_query, grad_key, grad_value = grads
        columns = columns_of_a_program(head_dim)
        parts = math.ceil(head_dim / columns)
        bounds = {"BOUND_KEYS": call.seqlen_k % size != 0, "BLOCK_C": columns}
        depth = kernels.DEPTH.value
        self.chunks = []
        for first in range(0, every, self._at_a_time):
            count = min(self._at_a_time, every - first)
            numbers = scalars | {"first_head": ("i32", first * group), "tiles_of_head": ("i32", tiles_of_head)}

            def launch(kernel, programs, tile, pointers, row_strides, streamed, numbers=numbers):
                return call.launch(kernel, programs, tile, pointers, row_strides, {}, numbers, bounds, streamed)

            chunk = [
                launch(
                    kernels.attention_stored_scores, count * group * tiles_of_head, scores,
                    {"query": query, "key": key, "value": value, "grad_out": grad_out, "statistics": statistics,
                     "probabilities_out": stored, "grad_scores_out": stored}, {},
                    {"query": (size, depth), "key": (size, depth), "value": (size, depth),
                     "grad_out": (size, depth)},
                )
            ]  # fmt: skip
            programs = count * math.ceil(call.seqlen_k / size) * parts
            maps = {"stored": (keys.block_m, size), "right": (keys.block_m, columns)}
            for right, gradient, prefix in ((query, grad_key, "dk"), (grad_out, grad_value, "dv")):
                steps = {f"stride_{name}": strides[f"stride_{prefix}{name}"] for name in "bhn"}
                pointers = {"stored": stored, "right": right, "gradient": gradient}
                if prefix == "dv":
                    numbers = numbers | {"out_scale": ("fp32", 1.0)}
                chunk.append(launch(kernels.attention_stored_key, programs, keys, pointers, steps, maps, numbers))
            if grad_query is not None:
                chunk.append(launch(
                    kernels.attention_stored_query, count * group * math.ceil(call.seqlen_q / size) * parts, rows,
                    {"grad_scores": stored, "key": key, "grad_query": grad_query},
                    {f"stride_dq{name}": strides[f"stride_dq{name}"] for name in "bhm"},
                    {"grad_scores": (size, rows.block_n), "key": (rows.block_n, columns)},
                ))  # fmt: skip
            self.chunks.append(tuple(chunk))

    @property
    def launches(self) -> list:
        """In the order in which they run."""
        return [launch for chunk in self.chunks for launch in chunk]

    def allocate(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for P and dS of a few heads."""
        probabilities, grad_scores = (
            torch.empty(self._shape, dtype=self._dtype, device=query.device) for _ in range(2)
        )
        return probabilities, grad_scores

    def __call__(self, query, key, value, grad_out, statistics, grad_query, grad_key, grad_value) -> None:
        """Arguments as in ``attention.backward``; statistics: what its kernel for queries has left."""
        probabilities, grad_scores = self.allocate(query)
        for scores, of_keys, of_values, *of_queries in self.chunks:
            scores(query, key, value, grad_out, statistics, probabilities, grad_scores)
            of_keys(grad_scores, query, grad_key)
            of_values(probabilities, grad_out, grad_value)
            for of_query in of_queries:
                of_query(grad_scores, key, grad_query)
