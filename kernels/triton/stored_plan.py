"""Which backward calls keep probabilities in memory, how many heads at a time, and their launches.

May import torch and this folder's device code. Used by ``attention.py``; the kernels are ``backward_stored.py``'s.
"""

from __future__ import annotations

import math

import torch

from . import backward_stored as kernels

# Bytes of P and dS over those of the query. PyTorch's default takes three times the query's bytes beside its results
# (head_dim 512, H200), which may not be exceeded.
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


def columns_of_a_program(head_dim: int, tiles: int, multiprocessors: int) -> int:
    """Columns of a gradient's tile where a launch has so many tiles of keys: 256, or 128 where that leaves less padding
    or fewer multiprocessors without work.
    """
    return 256 if head_dim > 384 and tiles * math.ceil(head_dim / 256) >= multiprocessors else 128


def kv_heads_at_a_time(call) -> int:
    """Of how many kv heads, of all batches, P and dS are in memory together; 0: not even those of one may be.

    call: ``attention._Call``.
    """
    size, head_dim = call.tile("stored_scores").block_m, call.constants["HEAD_DIM"]
    group = call.heads // call.kv_heads
    of_one = 2 * group * count_tiles(size, call.seqlen_q, call.seqlen_k, call.is_causal) * size**2
    allowed = SHARE_OF_QUERY * call.batch * call.heads * call.seqlen_q * head_dim // of_one
    if allowed == 0:
        return 0
    programs = math.ceil(call.seqlen_k / size) * math.ceil(head_dim / 256)
    useful = math.ceil(PROGRAMS * call.multiprocessors / programs)
    every = call.batch * call.kv_heads
    return math.ceil(every / math.ceil(every / min(allowed, useful)))


class StoredPlan:
    """The launches that fill grad_query (unless it is None), grad_key and grad_value."""

    def __init__(self, call, query, key, value, grad_out, statistics, grad_query, grad_key, grad_value, scalars):
        """call: ``attention._Call``; scalars: the kernels' arguments that are neither pointers nor strides."""
        self._call, self._scalars = call, scalars
        head_dim, group = call.constants["HEAD_DIM"], call.heads // call.kv_heads
        scores, rows, keys = (call.tile(f"stored_{name}") for name in ("scores", "query", "key"))
        size = scores.block_m
        assert size == scores.block_n == rows.block_m == keys.block_n, "all tiles are as long as the stored ones"
        self._tiles = count_tiles(size, call.seqlen_q, call.seqlen_k, call.is_causal)
        at_a_time = kv_heads_at_a_time(call)
        self._shape = 1, 1, at_a_time * group * self._tiles * size, size
        self._dtype = call.dtype
        stored = torch.empty(self._shape, dtype=call.dtype, device="meta")  # its type and sizes are what matters
        inputs = {"query": query, "key": key, "value": value, "grad_out": grad_out}
        planes = {"statistics": statistics, "probabilities_out": stored, "grad_scores_out": stored}
        tiles_k = math.ceil(call.seqlen_k / size)
        columns = columns_of_a_program(head_dim, at_a_time * tiles_k, call.multiprocessors)
        depth = kernels.DEPTH.value
        self._names = {"BOUND_KEYS": call.seqlen_k % size != 0, "BLOCK_C": columns}
        parts = math.ceil(head_dim / columns)
        rows_of_head, keys_of_head = (math.ceil(length / size) * parts for length in (call.seqlen_q, call.seqlen_k))
        products_of_keys = (query, grad_key, call.scale), (grad_out, grad_value, 1.0)
        every = call.batch * call.kv_heads
        self.chunks = []
        for first in range(0, every, at_a_time):
            kv_heads = min(at_a_time, every - first)
            heads = kv_heads * group
            chunk = [self._launch(kernels.attention_stored_scores, heads * self._tiles, scores, inputs | planes, {},
                                  dict.fromkeys(inputs, (size, depth)), first * group)]
            for right, gradient, out_scale in products_of_keys:
                chunk.append(self._launch(
                    kernels.attention_stored_key, kv_heads * keys_of_head, keys,
                    {"stored": stored, "right": right, "gradient": gradient}, call.strides("b h n d", gradient),
                    {"stored": (keys.block_m, size), "right": (keys.block_m, columns)}, first * group, out_scale,
                ))
            if grad_query is not None:
                chunk.append(self._launch(
                    kernels.attention_stored_query, heads * rows_of_head, rows,
                    {"grad_scores": stored, "key": key, "grad_query": grad_query},
                    call.strides("dqb dqh dqm dqd", grad_query),
                    {"grad_scores": (size, rows.block_n), "key": (rows.block_n, columns)}, first * group,
                ))
            self.chunks.append(tuple(chunk))

    def _launch(self, kernel, programs, tile, pointers, strides, streamed, first_head, out_scale=None):
        scalars = self._scalars | {"first_head": ("i32", first_head), "tiles_of_head": ("i32", self._tiles)}
        if out_scale is not None:
            scalars["out_scale"] = ("fp32", out_scale)
        strides = {name: stride for name, stride in strides.items() if name in kernel.arg_names}
        return self._call.launch(kernel, programs, tile, pointers, strides, {}, scalars, self._names, streamed)

    @property
    def launches(self) -> list:
        """One of each kernel, in the order in which they run."""
        scores, of_keys, _, *of_query = self.chunks[0]
        return [scores, of_keys, *of_query]

    def allocate(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for P and dS of a few heads."""
        return tuple(torch.empty(self._shape, dtype=self._dtype, device=query.device) for _ in range(2))

    def __call__(self, query, key, value, grad_out, statistics, grad_query, grad_key, grad_value) -> None:
        """Arguments as in ``attention.backward``; statistics: what its kernel for queries has left."""
        probabilities, grad_scores = self.allocate(query)
        for scores, of_keys, of_values, *of_queries in self.chunks:
            scores(query, key, value, grad_out, statistics, probabilities, grad_scores)
            of_keys(grad_scores, query, grad_key)
            of_values(probabilities, grad_out, grad_value)
            for of_query in of_queries:
                of_query(grad_scores, key, grad_query)
