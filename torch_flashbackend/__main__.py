"""The command line: python -m torch_flashbackend explain ..., info, warmup ...

May import everything of the package that needs no GPU. Imported by nobody.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import warnings
from collections.abc import Sequence

import torch

from . import __version__, nvrtc, policy, routing, verify
from .batch_invariance import is_batch_invariant
from .explain import explain_problem, other_implementations, plugin_enabled
from .precompile import NotKeptWarning, WarmupError, warmup
from .problem import Problem

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, or 2 for arguments that make no sense."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "info":
        print(_info())
        return 0
    if options.command == "warmup":
        return _warmup(parser, options)
    try:
        problem = Problem.from_shapes(
            options.shape,
            dtype=DTYPES[options.dtype],
            kv_heads=options.kv_heads,
            seqlen_k=options.seqlen_k,
            head_dim_v=options.head_dim_v,
            mask=options.mask,
            is_causal=options.causal,
            dropout_p=options.dropout,
            scale=options.scale,
            training=options.training,
            gpu=policy.full_name(options.gpu),
            architecture=options.architecture,
        )
    except ValueError as error:
        parser.error(str(error))
    # A question of the command line is about programs that use the plugin, not about this process.
    explanation = explain_problem(problem, here=False)
    print(json.dumps(explanation.as_dict(), indent=2) if options.json else explanation)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_flashbackend", description="Questions and orders to torch_flashbackend. None needs a GPU."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, GPU, the measurements in force, is the plugin on")
    explain = commands.add_parser("explain", help="which kernel a call runs on, and why")
    explain.add_argument(
        "--shape", type=_shape, required=True, metavar="B,H,S,D", help="query: batch,heads,seqlen,head_dim"
    )
    explain.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    explain.add_argument("--kv-heads", type=_positive, help="heads of key and value, for grouped-query attention")
    explain.add_argument("--seqlen-k", type=_positive, help="length of key and value")
    explain.add_argument("--head-dim-v", type=_positive, help="head_dim of value")
    explain.add_argument("--causal", action="store_true")
    explain.add_argument(
        "--mask", choices=("bool", "float", "float_grad"), help="an attn_mask; float_grad is a bias that is trained"
    )
    explain.add_argument("--dropout", type=float, default=0.0, metavar="P")
    explain.add_argument("--scale", type=float)
    explain.add_argument("--training", action="store_true", help="with gradients")
    explain.add_argument("--gpu", help='another machine\'s GPU, for example "NVIDIA H200"; or cpu, mps')
    explain.add_argument("--architecture", help="for a GPU whose name is not known here: sm_90, gfx942, ...")
    explain.add_argument("--json", action="store_true")
    warm = commands.add_parser("warmup", help="compile now what calls will need later, for an image say")
    warm.add_argument("--shapes", type=_shape, nargs="+", required=True, metavar="B,H,S,D", help="queries, one or more")
    warm.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), nargs="+", default=["bfloat16"])
    warm.add_argument("--kv-heads", type=_positive, help="heads of key and value, for grouped-query attention")
    warm.add_argument("--seqlen-k", type=_positive, help="length of key and value")
    warm.add_argument("--head-dim-v", type=_positive, help="head_dim of value")
    kind = warm.add_mutually_exclusive_group()
    kind.add_argument("--causal", action="store_true", help="causal calls alone; without this both kinds")
    kind.add_argument("--full", action="store_true", help="calls that are not causal alone")
    warm.add_argument("--inference", action="store_true", help="calls without gradients alone")
    warm.add_argument(
        "--backend", choices=routing.BACKENDS, nargs="+", help="these in order, as sdpa_backend; else as measured"
    )
    warm.add_argument("--gpu", help='the GPU to compile for, if not this machine\'s: "NVIDIA H200"')
    warm.add_argument("--architecture", help="for a GPU whose name is not known here: sm_90, gfx942, ...")
    warm.add_argument("--workers", type=_positive, help="compilers at once; one for each CPU core without this")
    return parser


def _warmup(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Exit status 1 where something does not compile, or is not kept for others."""
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", NotKeptWarning)
            done = warmup(
                options.shapes,
                dtypes=[DTYPES[name] for name in options.dtype],
                causal=(True,) if options.causal else (False,) if options.full else (False, True),
                training=(False,) if options.inference else (False, True),
                kv_heads=options.kv_heads,
                seqlen_k=options.seqlen_k,
                head_dim_v=options.head_dim_v,
                backends=options.backend,
                gpu=options.gpu,
                architecture=options.architecture,
                workers=options.workers,
            )
    except ValueError as error:
        parser.error(str(error))
    except WarmupError as error:
        done = error.warmed
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    for call, backend, kernels, seconds, failures in done:
        what = f"{', '.join(kernels)} ({seconds:.1f} s)" if kernels else "nothing to compile"
        if failures:
            what = f"{', '.join(kernels) or 'nothing'} compiled, {len(failures)} failed ({seconds:.1f} s)"
        print(f"{call}: {backend}, {what}")
    failed = [failure for one in done for failure in one.failures]
    for line in dict.fromkeys((*failed, *(str(one.message) for one in warned))):
        print(line, file=sys.stderr)
    return int(bool(failed) or any(issubclass(one.category, NotKeptWarning) for one in warned))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if len(shape) < 2 or min(shape) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: give numbers with commas, like 2,16,4096,128")
    return shape


def _info() -> str:
    rows = [
        ("torch_flashbackend", __version__),
        ("torch", torch.__version__),
        ("triton", _version("triton")),
        ("python", sys.version.split()[0]),
        ("CUDA / HIP", torch.version.cuda or torch.version.hip or "none in this build of torch"),
    ]
    measured = policy.policies()
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found = measured.get(properties.name)
            if found is not None and found.sm_count not in (None, properties.multi_processor_count):
                found = None
            used = f"{len(found.rows)} measurements, {found.source}" if found else "no measurements"
            rows.append((f"GPU {index}", f"{properties.name}, {properties.multi_processor_count} SMs; {used}"))
    else:
        rows.append(("GPU", "none: nothing changes on this machine"))
    rows.append(("CUDA C++ compiler", nvrtc.unavailable() or nvrtc.version()))
    problem = nvrtc.cache_problem()
    rows.append(("compiled kernels", f"not kept on disk: {problem}" if problem else str(nvrtc.cache_folder())))
    rows.append(("measured GPUs", ", ".join(sorted(measured)) or "none"))
    rows.append(("plugin", _state()))
    if verify.share:
        rows.append(("verify", f"{verify.share:g} of the calls that we take, by {verify.VARIABLE}"))
    if is_batch_invariant():
        rows.append(("batches", "the same bits in every batch, by TORCH_FLASHBACKEND_BATCH_INVARIANT"))
    width = max(len(name) for name, _ in rows)
    return "\n".join([*(f"{name:<{width}}  {text}" for name, text in rows), *other_implementations()])


def _state() -> str:
    """Is the plugin on here, and by which variables?"""
    state = "on" if plugin_enabled() else "off"
    variable, autoload = os.environ.get("TORCH_FLASHBACKEND"), os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    if not variable:
        return f"{state} in this process"
    told = f"TORCH_FLASHBACKEND={variable}"
    if state == "off" and autoload != "1":
        told += f", but TORCH_DEVICE_BACKEND_AUTOLOAD={autoload} stops PyTorch from loading any plugin"
    return f"{state} ({told})"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
