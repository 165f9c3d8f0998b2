"""Without a GPU: compiles for one what the suite's checks would launch, into Triton's disk cache.

    FLASHBACKEND_COMPILE_FOR=90 python -m pytest tests/gpu -n 8    # for sm_90; every test ends skipped

Most of the suite's time is Triton's compiler. What `check_call` and `check_varlen` are given is compiled and judged by
nobody; what is missed, the tests compile themselves. Triton must be the version of the GPU's machine.
"""

from __future__ import annotations

import os

from varlen_cases import VarlenCall

from common import Call

# A compute capability, or None to run the tests.
COMPILE_FOR = os.environ.get("FLASHBACKEND_COMPILE_FOR")


def _target():
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", int(COMPILE_FOR or 0), 32)


def compile_call(call: Call, *, grad: bool = True, tf32: bool = False, backend: str = "triton", **_) -> None:
    """In the place of `check_call`'s function: what a call without softcap launches."""
    from torch_flashbackend.kernels.triton import attention
    from torch_flashbackend.ops import _mask_as_rank_4

    if call.query.dim() == 4 and not call.softcap and backend != "cuda":
        attention.compile_for(
            _target(), call.query, call.key, call.value, _mask_as_rank_4(call.attn_mask), is_causal=call.is_causal,
            scale=call.softmax_scale, logsumexp=grad, backward=grad, mask_gradient=grad and call.mask_grad,
            allow_tf32=tf32,
        )  # fmt: skip


def compile_varlen_call(call: VarlenCall) -> None:
    """In the place of `check_varlen`'s function."""
    from torch_flashbackend.kernels.triton import varlen

    options = varlen.Options(
        call.softmax_scale, *call.window, call.bottom_right, call.softcap, max(call.lengths_q), max(call.lengths_k)
    )
    extras = varlen.Extras(*call.cu_seqlens(), call.seqused_k(), call.alibi, call.sinks)
    varlen.compile_for(_target(), call.query, call.key, call.value, options=options, extras=extras)
