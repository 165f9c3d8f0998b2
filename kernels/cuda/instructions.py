"""Writes the header of wgmma instructions that a kernel needs: CUDA C++ has no intrinsics for them.

PTX ISA, "Asynchronous warpgroup level matrix multiply-accumulate": an instruction names each of its N / 2 accumulator
registers, so that there is one text per N. Imports nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

HEADER_NAME = "wgmma_instructions.cuh"

_STRUCT = """
template <>
struct Wgmma<{n}> {{
  static __device__ __forceinline__ void ss(float (&d)[{count}], uint32_t a, uint32_t b, int accumulate) {{
    asm volatile(
        "{{\\n.reg .pred p;\\n.reg .b64 a, b;\\nsetp.ne.b32 p, %{c2}, 0;\\n"
        "mov.b64 a, {{%{c0}, {high}}};\\nmov.b64 b, {{%{c1}, {high}}};\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{type}.{type} {{{registers}}}, a, b, p, 1, 1, 0, 0;\\n}}\\n"
        : {outputs}
        : "r"(a), "r"(b), "r"(accumulate));
  }}
  static __device__ __forceinline__ void ss_columns(float (&d)[{count}], uint32_t a, uint32_t b, int accumulate) {{
    asm volatile(
        "{{\\n.reg .pred p;\\n.reg .b64 a, b;\\nsetp.ne.b32 p, %{c2}, 0;\\n"
        "mov.b64 a, {{%{c0}, {high}}};\\nmov.b64 b, {{%{c1}, {high}}};\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{type}.{type} {{{registers}}}, a, b, p, 1, 1, 0, 1;\\n}}\\n"
        : {outputs}
        : "r"(a), "r"(b), "r"(accumulate));
  }}
  static __device__ __forceinline__ void rs(float (&d)[{count}], const uint32_t* a, uint32_t b, int accumulate) {{
    asm volatile(
        "{{\\n.reg .pred p;\\n.reg .b64 b;\\nsetp.ne.b32 p, %{c5}, 0;\\nmov.b64 b, {{%{c4}, {high}}};\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{type}.{type} {{{registers}}}, "
        "{{%{c0}, %{c1}, %{c2}, %{c3}}}, b, p, 1, 1, 1;\\n}}\\n"
        : {outputs}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate));
  }}
  static __device__ __forceinline__ void rs_rows(float (&d)[{count}], const uint32_t* a, uint32_t b, int accumulate) {{
    asm volatile(
        "{{\\n.reg .pred p;\\n.reg .b64 b;\\nsetp.ne.b32 p, %{c5}, 0;\\nmov.b64 b, {{%{c4}, {high}}};\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{type}.{type} {{{registers}}}, "
        "{{%{c0}, %{c1}, %{c2}, %{c3}}}, b, p, 1, 1, 0;\\n}}\\n"
        : {outputs}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate));
  }}
}};
"""
# Upper half of every matrix descriptor: 128-byte swizzle, groups of 8 rows 1024 bytes apart.
_DESCRIPTOR_HIGH = 1 << 30 | 1024 >> 4


def header(columns: Iterable[int], dtype: str) -> str:
    """The header's text.

    columns: the N of each instruction, multiples of 8 up to 256. dtype: "bf16" or "f16", of both operands.
    """
    parts = ["#pragma once\n\ntemplate <int N>\nstruct Wgmma;\n"]
    for n in sorted(set(columns)):
        if n % 8 or not 8 <= n <= 256:
            raise ValueError(f"wgmma has no N of {n}; allowed: multiples of 8 from 8 to 256")
        count = n // 2
        parts.append(
            _STRUCT.format(
                n=n,
                count=count,
                type=dtype,
                high=_DESCRIPTOR_HIGH,
                registers=", ".join(f"%{i}" for i in range(count)),
                outputs=", ".join(f'"+f"(d[{i}])' for i in range(count)),
                **{f"c{i}": count + i for i in range(6)},
            )
        )
    return "".join(parts)
