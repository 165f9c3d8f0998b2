"""Fills the README's results section and benchmarks/RESULTS.md from the files in benchmarks/results/, and draws a plot.

    python -m benchmarks.report            # writes both texts and benchmarks/results/<gpu>_attention.svg
    python -m benchmarks.report --check    # ends with 1 if they do not say what the files say

Numbers are never typed: in the README they stand between two markers that this script rewrites, RESULTS.md is its own.
The text needs the standard library only, the plot needs matplotlib (extra `bench`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.harness import OURS, RESULTS_DIRECTORY, RESULTS_FORMAT, ROOT, by_backend, say, slug

README = ROOT / "README.md"
DETAILS = ROOT / "benchmarks" / "RESULTS.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
NOTHING = (
    "No results file is committed yet. `make bench` on a GPU writes one, "
    "`benchmarks/report.py` fills this section from it."
)
KINDS = (
    "attention", "special", "overhead", "batch_invariance", "deterministic", "training", "generate", "encoder",
    "memory", "decode", "paged", "varlen", "architectures", "errors",
)  # fmt: skip
PASSES = ("forward", "backward")
PASS_FIELDS = ("tflops", "eager_us", "memory_bytes", "ms")
PEERS = {
    "default": "PyTorch's default",
    "cudnn": "its cuDNN",
    "flash": "its FlashAttention-2",
    "fa4": "FlashAttention-4",
}
# What the README shows of special.py: of these groups the calls of this length and above.
FRONT_GROUPS, FRONT_SEQLEN = ("mask", "head_dim", "dropout", "float32"), 2048
# What the groups of special.py are called in the table.
GROUPS = {
    "mask": "masks and biases, S = 4096, D = 128",
    "mask_sizes": "masks and biases, S = 64 to 2048",
    "gqa": "grouped queries",
    "head_dim": "other head dimensions",
    "dropout": "dropout 0.1",
    "float32": "float32, with and without TF32",
    "float16": "float16",
    "rectangular": "queries and keys of different length",
    "short": "short sequences",
    "prompt": "prompts, one sequence",
    "decode": "decoding",
}


def geometric_mean(numbers: Iterable[float]) -> float:
    """Raises ValueError for no numbers."""
    logs = [math.log(n) for n in numbers]
    if not logs:
        raise ValueError("geometric mean of nothing")
    return math.exp(sum(logs) / len(logs))


def load_results(directory: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Results by GPU name and kind; files of another format are an error, other JSON is ignored.

    Several files of one kind count as one, see `merged`; its commits are those of all of them.
    """
    files: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for path in sorted(directory.glob("*.json")):
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or data.get("kind") not in KINDS:
            continue
        if data.get("format") != RESULTS_FORMAT:
            raise ValueError(f"{path}: format {data.get('format')!r}, this script reads {RESULTS_FORMAT}")
        data["rows"] = [by_backend(row) for row in data["rows"] if "error" not in row]
        if data["rows"]:
            files.setdefault(data["environment"]["gpu"], {}).setdefault(data["kind"], []).append(data)
    return {gpu: {kind: merged(several) for kind, several in kinds.items()} for gpu, kinds in files.items()}


def merged(several: list[dict[str, Any]]) -> dict[str, Any]:
    """One set of results from several: of each pass of each call, the measurement with the most contenders.

    So every ratio is one of figures from one run. Of two with as many contenders the later file's counts, and of rows
    without passes the later one whole.
    """
    rows: dict[str, dict[str, Any]] = {}
    for row in (row for data in several for row in data["rows"]):
        if not {*PASS_FIELDS, "us"} & row.keys():
            rows[row["label"]] = row
            continue
        known = rows.setdefault(row["label"], row)
        for field, passes in row.items():
            if field in PASS_FIELDS or (field == "aa" and "ms" in row):
                old = known.setdefault(field, {})
                old |= {name: found for name, found in passes.items() if len(found) >= len(old.get(name, ()))}
            elif field != "us" or len(passes) >= len(known.get(field, ())):  # "us": of decoding, which has one pass
                known[field] = passes
    commits = dict.fromkeys(str(data["environment"].get("commit") or "unknown")[:12] for data in several)
    return {**several[0], "rows": list(rows.values()), "commits": list(commits)}


def section(directory: Path) -> str:
    """The Markdown between the README's markers: what most readers want to know."""
    results = load_results(directory)
    if not results:
        return NOTHING
    parts = [part for gpu in sorted(results) for part in _front(gpu, results[gpu], directory)]
    return "\n\n".join([*parts, "All that was measured, row by row: [benchmarks/RESULTS.md](benchmarks/RESULTS.md)."])


def details(directory: Path) -> str:
    """The Markdown of RESULTS.md: all that was measured and does not stand in the README."""
    results = load_results(directory)
    parts = [part for gpu in sorted(results) for part in _details(gpu, results[gpu])]
    return "\n\n".join(["# Measured", *(parts or [NOTHING])]) + "\n"


def _environment(gpu: str, kinds: dict[str, dict[str, Any]]) -> str:
    facts = next(iter(kinds.values()))["environment"]
    versions = [f"torch {facts['torch']}"]
    versions += [f"cuDNN {facts['cudnn']}"] if facts.get("cudnn") else []
    versions += [f"Triton {facts['triton']}"] if facts.get("triton") else []
    commits = list(dict.fromkeys(commit for data in kinds.values() for commit in data["commits"]))
    versions += [f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"]
    name = f"{gpu}, {facts['sm_count']} SMs" if facts.get("sm_count") else gpu
    return f"**{name}** ({', '.join(versions)}, {facts['date']})"


def _front(gpu: str, kinds: dict[str, dict[str, Any]], directory: Path) -> list[str]:
    shown = {kind: kinds[kind] for kind in ("training", "attention", "special") if kind in kinds}
    parts = [_environment(gpu, shown or kinds)]
    if "training" in kinds:
        parts += _training(kinds["training"]["rows"])
    if "attention" in kinds:
        parts += _attention(kinds["attention"]["rows"])
        plot = directory / f"{slug(gpu)}_attention.svg"
        if plot.is_relative_to(ROOT) and plot.exists():
            parts.append(f"![TFLOP/s by sequence length]({plot.relative_to(ROOT)})")
    if "special" in kinds:
        parts += _special(kinds["special"]["rows"])
    return parts


def _details(gpu: str, kinds: dict[str, dict[str, Any]]) -> list[str]:
    parts = [_environment(gpu, kinds)]
    if "attention" in kinds:
        rows = kinds["attention"]["rows"]
        parts += _beyond_grid([row for row in rows if row["case"]["group"] != "grid"])
    if "special" in kinds:
        parts += _special_rows(kinds["special"]["rows"])
    if "overhead" in kinds:
        parts += _overhead(kinds["overhead"]["rows"])
        left_out = kinds["overhead"].get("not_measured") or []
        parts += [f"Not measured in this run: {', '.join(left_out)}."] if left_out else []
    simple = {
        "decode": _decode, "paged": _paged, "varlen": _varlen, "batch_invariance": _batch_invariance,
        "deterministic": _deterministic, "errors": _errors, "memory": _memory_by_length, "generate": _generate,
        "encoder": _encoder,
    }  # fmt: skip
    for kind, tables in simple.items():
        if kind in kinds:
            parts += tables(kinds[kind]["rows"])
    if "architectures" in kinds:
        parts += _architectures(kinds["architectures"])
    return parts


def _attention(all_rows: list[dict[str, Any]]) -> list[str]:
    rows = [row for row in all_rows if row["case"]["group"] == "grid"]
    lengths = sorted({row["case"]["seqlen_k"] for row in rows})
    head = ["D", "mask", "pass", *(f"S = {length}" for length in lengths), "mean", "worst"]
    body = []
    ratios: dict[str, list[float]] = {name: [] for name in PASSES}
    best: dict[str, list[float]] = {name: [] for name in PASSES}
    for head_dim in sorted({row["case"]["head_dim"] for row in rows}):
        for causal in (False, True):
            for name in PASSES:
                cells, line_ratios = [], []
                for length in lengths:
                    cell, ratio, to_best = _grid_cell(rows, head_dim, causal, length, name)
                    cells.append(cell)
                    line_ratios += [] if ratio is None else [ratio]
                    best[name] += [] if to_best is None else [to_best]
                if not line_ratios:
                    continue
                ratios[name] += line_ratios
                summary = [f"{geometric_mean(line_ratios):.2f}", f"{min(line_ratios):.2f}"]
                body.append([str(head_dim), "causal" if causal else "full", name, *cells, *summary])
    lines = [
        "bfloat16, 16,384 tokens, model width 2,048. Cells: TFLOP/s of ours on the GPU (times PyTorch's default). "
        "The mean is geometric."
    ]
    lines.append(_table(head, body))
    for name in PASSES:
        if ratios[name]:
            text = f"Over all {len(ratios[name])} rows, {name}: "
            text += f"{geometric_mean(ratios[name]):.2f} times PyTorch's default (worst {min(ratios[name]):.2f})"
            if best[name]:
                text += f", {geometric_mean(best[name]):.2f} times the best of its peers (worst {min(best[name]):.2f}"
                text += f"): {', '.join(_peers(rows, name))}"
            lines.append(text + ".")
    memory = _memory(all_rows)
    return [*lines, *([memory] if memory else [])]


def _peers(rows: Iterable[dict[str, Any]], name: str) -> list[str]:
    """Whose kernels a pass was measured beside, in all rows or in some."""
    found = {peer: None for row in rows for peer in row["tflops"].get(name, {}) if peer not in OURS}
    return [PEERS.get(peer, peer) for peer in found]


def _grid_cell(
    rows: list[dict[str, Any]], head_dim: int, causal: bool, length: int, name: str
) -> tuple[str, float | None, float | None]:
    """The cell's text, the rate of ours over default's, and over that of the best other contender."""
    for row in rows:
        case = row["case"]
        if (case["head_dim"], case["causal"], case["seqlen_k"]) == (head_dim, causal, length):
            rates = row.get("tflops", {}).get(name, {})
            ours = [rates[backend] for backend in OURS if backend in rates]
            if ours and "default" in rates:
                ratio = max(ours) / rates["default"]
                best = max(rate for peer, rate in rates.items() if peer not in OURS)
                return f"{max(ours):.0f} ({ratio:.2f})", ratio, max(ours) / best
    return "-", None, None


def _beyond_grid(rows: list[dict[str, Any]]) -> list[str]:
    """Grouped queries and rectangular calls: a line each."""
    body = []
    for row in rows:
        cells = [_call_of(row)]
        for name in PASSES:
            rates = row.get("tflops", {}).get(name, {})
            ours = [rates[backend] for backend in OURS if backend in rates]
            peers = [rate for peer, rate in rates.items() if peer not in OURS]
            if ours and "default" in rates:
                cells += [f"{max(ours):.0f} ({max(ours) / rates['default']:.2f})", f"{max(ours) / max(peers):.2f}"]
            else:
                cells += ["-", "-"]
        body.append(cells)
    head = ["call", "forward", "to the best peer", "backward", "to the best peer"]
    what = "Grouped queries, and queries and keys of different length: TFLOP/s of ours (times PyTorch's default)."
    return [what, _table(head, body)] if body else []


def _fastest(row: dict[str, Any], name: str, values: dict[str, float]) -> float | None:
    """The value of that of our backends which was the faster one in eager time."""
    times = row.get("eager_us", {}).get(name, {})
    ours = [backend for backend in OURS if backend in times and values.get(backend)]
    return values[min(ours, key=times.__getitem__)] if ours else None


def _special(rows: list[dict[str, Any]]) -> list[str]:
    """What a mask, a bias, dropout and other head dimensions cost: the large calls, GPU time."""
    body = []
    for row in rows:
        case = row["case"]
        if case["group"] not in FRONT_GROUPS or case["seqlen_k"] < FRONT_SEQLEN:
            continue
        cells = []
        for name in PASSES:
            times = row.get("ms", {}).get(name, {})
            ours = [times[backend] for backend in OURS if backend in times]
            cells += [f"{min(ours):.3g}" if _has_both(times) else "-", _ratio_cell(times)]
        body.append([_call_of(row), *cells])
    head = ["call", "forward, ms", "times PyTorch's default", "backward, ms", "times PyTorch's default"]
    lines = ["Masks, biases, dropout and other head dimensions, GPU time.", _table(head, body)] if body else []
    memory = _memory(rows)
    return [*lines, *([memory] if memory else [])]


def _special_rows(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each call, as forced kernels of ours run it."""
    lines = [
        "PyTorch's time over ours, of the faster of our backends whether or not the automatic route takes the call: on "
        "the GPU, and of an eager program (CPU and GPU together), which is what decides about the route."
    ]
    head = ["call", "forward, GPU", "backward, GPU", "forward, eager", "forward and backward, eager"]
    for group, title in GROUPS.items():
        body = []
        for row in (row for row in rows if row["case"]["group"] == group):
            times = [row.get("ms", {}).get(name, {}) for name in PASSES]
            times += [row["eager_us"].get(name, {}) for name in ("forward", "training")]
            body.append([_call_of(row), *(_ratio_cell(found) for found in times)])
        lines += [f"**{title[0].upper()}{title[1:]}**", _table(head, body)] if body else []
    return lines


def _call_of(row: dict[str, Any]) -> str:
    """What a row measured, without the group that its label begins with."""
    return row["label"].split(": ", 1)[1]


def _ratio_cell(times: dict[str, float]) -> str:
    if not _has_both(times):
        return "-"
    return f"{times['default'] / min(times[backend] for backend in OURS if backend in times):.2f}"


def _has_both(times: dict[str, float]) -> bool:
    return "default" in times and any(backend in times for backend in OURS)


def _memory(rows: list[dict[str, Any]]) -> str:
    parts = []
    for name, words in (("forward", "forward"), ("training", "forward and backward")):
        pairs = [(row, row.get("memory_bytes", {}).get(name, {})) for row in rows]
        found = [(_fastest(row, name, peaks), peaks.get("default")) for row, peaks in pairs]
        ratios = [ours / default for ours, default in found if ours and default]
        if ratios:
            parts.append(f"{words} {geometric_mean(ratios):.2f} times PyTorch's (worst {max(ratios):.2f})")
    return f"Peak memory of a call: {', '.join(parts)}." if parts else ""


def _decode(rows: list[dict[str, Any]]) -> list[str]:
    """A few queries over long caches: what a call takes in a CUDA graph, with keys that no cache holds."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        case, us, behind = row["case"], row["us"], row.get("after_product_us", row["us"])
        if "default" not in us:
            continue
        ratios = tuple(times["default"] / min(times[name] for name in OURS if name in times) for times in (us, behind))
        if case["mask"]:
            name = "static cache, or padding, as a bool mask"
        else:
            queries = "one query" if case["seqlen_q"] == 1 else "2 to 8 queries"
            name = f"{queries}, {case['heads'] // case['kv_heads']} for each key head, D = {case['head_dim']}"
        groups.setdefault(name, []).append(ratios)
    body = []
    for name, found in groups.items():
        of_each = [[f"{geometric_mean(r):.2f}", f"{min(r):.2f}", f"{max(r):.2f}"] for r in zip(*found)]
        body.append([name, str(len(found)), *itertools.chain(*of_each)])
    columns = [f"{kind}{of}" for kind in ("", "behind a product: ") for of in ("mean", "worst", "best")]
    words = "PyTorch's time over ours, one call after the other, and each behind a matrix product, as in a model."
    return [
        f"Decoding, batches of 1 to 64 over 1,024 to 131,072 keys: {words}",
        _table(["decoding in a CUDA graph", "number", *columns], body),
    ]


def _paged(rows: list[dict[str, Any]]) -> list[str]:
    """Pages beside rows of the same keys."""
    body = [
        [_call_of(row), *(f"{row['us'][name]:g}" for name in ("paged", "contiguous")),
         f"{row['tb_per_s']['paged']:.2f}", f"{row['of_contiguous']:.2f}"]
        for row in rows
    ]  # fmt: skip
    head = ["`kv_cache.attend`, one query", "pages, us", "contiguous, us", "pages, TB/s", "of the contiguous speed"]
    return ["Paged caches, pages in random order, in a CUDA graph.", _table(head, body)]


def _varlen(rows: list[dict[str, Any]]) -> list[str]:
    """Packed sequences: our operator and PyTorch's default for nested tensors."""
    body = []
    for row in rows:
        cells = []
        for name in ("forward", "backward"):
            rates = row["tflops"].get(name, {})
            ours, default = rates.get("varlen"), rates.get("default")
            cells += (
                [f"{ours:.0f}", f"{default:.0f} ({ours / default:.2f})" if default else "-"] if ours else ["-", "-"]
            )
        body.append([row["label"], *cells])
    head = ["packed sequences, TFLOP/s", "forward", "PyTorch's (ratio)", "backward", "PyTorch's (ratio)"]
    lines = ["`attention_varlen` and PyTorch's default for nested tensors, GPU time.", _table(head, body)]
    return [*lines, *_nested(rows)]


def _nested(rows: list[dict[str, Any]]) -> list[str]:
    """The same call by its public name, CPU and GPU together."""
    body = []
    for row in rows:
        cells = []
        for name in ("forward", "training"):
            times = row.get("nested_us", {}).get(name, {})
            if "triton" in times and "default" in times:
                ours, default = times["triton"], times["default"]
                cells += [f"{ours:,.0f}", f"{default:,.0f} ({default / ours:.2f})"]
        if cells:
            body.append([row["label"], *cells])
    head = ["nested tensors, µs", "forward", "PyTorch's (ratio)", "forward and backward", "PyTorch's (ratio)"]
    words = "`F.scaled_dot_product_attention` on nested tensors, wall clock, with and without the plugin."
    return [words, _table(head, body)] if body else []


def _overhead(rows: list[dict[str, Any]]) -> list[str]:
    names = [name for name in rows[0]["cpu_us"] if name != "off (again)"]
    body = []
    for row in rows:
        cells = [f"{row['cpu_us'][n]:.1f}" + ("*" if row["our_kernels_ran"].get(n) else "") for n in names]
        body.append([row["label"], *cells])
    head = ["call", *("plugin off" if n == "off" else f"`{n}`" if "(" in n else f"plugin on, {n}" for n in names)]
    return ["CPU microseconds per eager call on small tensors (*: our kernels ran).", _table(head, body)]


def _training(rows: list[dict[str, Any]]) -> list[str]:
    """Steps of whole models."""
    body = []
    for row in rows:
        speed, peak = row["tokens_per_second"], row["peak_memory_bytes"]
        cells = [f"{speed['stock']:,.0f}", f"{speed['plugin']:,.0f}", f"{speed['plugin'] / speed['stock']:.2f}"]
        body.append([row["label"], *cells, *(f"{peak[name] / 2**30:.1f}" for name in ("stock", "plugin"))])
    head = [
        "training",
        "tokens per second, PyTorch",
        "with the plugin",
        "ratio",
        "peak GiB, PyTorch",
        "with the plugin",
    ]
    return ["The same training with and without the plugin, weights random, losses compared.", _table(head, body)]


def _memory_by_length(rows: list[dict[str, Any]]) -> list[str]:
    """Peak memory of attention by sequence length: that of the math path, too, measured or (in brackets) computed."""
    body = []
    for row in rows:
        peaks = row["peak_memory_bytes"]
        cells = [row["label"], *(f"{peaks[name] / 2**30:.2f}" for name in ("plugin", "default"))]
        if "math" in peaks:
            cells.append(f"{peaks['math'] / 2**30:,.1f}")
        else:
            cells.append(
                f"({row['computed_bytes']['math'] / 2**30:,.0f})" if row["computed_bytes"].get("math") else "-"
            )
        body.append(cells)
    text = (
        "Peak memory of one causal attention, forward and backward, beside its inputs, GiB (batch 1, 32/8 heads, "
        "D = 128, bfloat16). In brackets: computed from the largest length measured, growing with its square."
    )
    return [text, _table(["length", "with the plugin", "PyTorch", "PyTorch's math path"], body)]


def _batch_invariance(rows: list[dict[str, Any]]) -> list[str]:
    """What the same bits in every batch cost."""
    body = [
        [row["label"], *(f"{1e3 * row['gpu_ms'][name]:.4g}" for name in ("default", "plugin", "invariant")),
         f"{row['cost']:.2f}"]
        for row in rows
    ]  # fmt: skip
    text = "`set_batch_invariant(True)`: microseconds on the GPU, and ours with it over ours without."
    return [text, _table(["forward", "PyTorch", "ours", "ours, batch-invariant", "cost"], body)]


def _deterministic(rows: list[dict[str, Any]]) -> list[str]:
    """What one order of sums costs a backward."""
    body = [
        [_call_of(row), *(f"{row['gpu_ms'][name]:.4g}" if name in row["gpu_ms"] else "-"
                                            for name in ("stock", "usual", "ordered")), f"{row['cost']:.2f}"]
        for row in rows
    ]  # fmt: skip
    text = (
        "`torch.use_deterministic_algorithms(True)`: milliseconds of a backward on the GPU, of PyTorch's default in "
        "that mode and of ours without and with it, and ours with it over ours without."
    )
    return [text, _table(["backward", "PyTorch", "ours", "ours, deterministic", "cost"], body)]


def _errors(rows: list[dict[str, Any]]) -> list[str]:
    """Errors against float64, of those of PyTorch's cuDNN kernel."""
    body = []
    for row in rows:
        ours = row["of_cudnn"].get("cuda", {})
        cells = [f"{kinds['rms']:.2f} ({kinds['largest']:.2f})" for kinds in ours.values()] or ["-"] * 4
        body.append([_call_of(row), *cells])
    text = (
        "Errors against float64 of the `cuda` backend, divided by those of PyTorch's cuDNN on the same inputs: root "
        "mean squares, and in brackets the largest."
    )
    return [text, _table(["errors", "output", "query's gradient", "key's", "value's"], body)]


def _generate(rows: list[dict[str, Any]]) -> list[str]:
    """Whole models generating text: time to the first token, and the rate of those that follow."""
    body = []
    for row in rows:
        cells = [row["label"]]
        for times in (row["prefill_ms"], row["decode_ms"]):
            if "default" not in times or "plugin" not in times:
                cells += ["-", "-", "-"]
                continue
            ratios = [f"{times[name] / times['plugin']:.2f}" if name in times else "-" for name in ("default", "math")]
            rate = row["batch"] / times["plugin"] * 1e3
            cells += [f"{times['plugin']:.1f} ms" if times is row["prefill_ms"] else f"{rate:,.0f} / s", *ratios]
        same = row["beside_default"]
        cells += [f"{same[name]['equal_tokens']:.2f}" if name in same else "-" for name in ("plugin", "math")]
        body.append(cells)
    head = ["generating", "prompt", "PyTorch / ours", "math / ours", "tokens", "PyTorch / ours", "math / ours"]
    head += ["equal tokens, ours", "math path"]
    unexplained = [row["label"] for row in rows if row["explained"] is False]
    text = (
        "transformers' `generate`, greedy, a model of Llama 7B's shape with random weights, a static cache but where "
        "one is said to grow: time of the prompt, rate of the tokens behind it, and the times of PyTorch's default and "
        "of its math path over ours. Equal tokens: the share that agrees with PyTorch's default, of ours and of "
        "PyTorch's own math path; "
    )
    if unexplained:
        text += f"logits differ by more than rounding explains in: {', '.join(unexplained)}."
    else:
        text += "tokens part where two logits are closer than what rounding does to them."
    firsts = [
        f"{times['default']:.1f} ms with PyTorch's default and {times['plugin']:.1f} with the plugin"
        for row in rows
        if {"default", "plugin"} <= (times := row.get("first_decode_ms", {})).keys()
    ]
    if firsts:
        text += (
            " A cache that grows has sizes which a process meets for the first time, and cuDNN plans for each: a token "
            f"then takes {' or '.join(firsts)}."
        )
    return [text, _table(head, body)]


def _encoder(rows: list[dict[str, Any]]) -> list[str]:
    """Padded batches through a sentence encoder, float16."""
    body = []
    for row in rows:
        rates, gpu = row["sentences_per_second"], row["gpu_ms"]
        cells = [row["label"], f"{row['tokens'] / row['batch'] / row['padded_length']:.2f}"]
        cells += [f"{rates[name]:,.0f}" for name in ("default", "plugin")]
        cells += [f"{rates['plugin'] / rates['default']:.2f}", f"{gpu['default'] / gpu['plugin']:.2f}"]
        body.append([*cells, f"{row['cosine_to_default']['plugin']:.6f}"])
    head = ["encoding, float16", "tokens / padded", "sentences / s, PyTorch", "with the plugin", "ratio", "GPU alone"]
    weights = ", ".join(dict.fromkeys(row["weights"] for row in rows))
    text = (
        f"A padded batch through a BERT encoder (weights: {weights}), with and without the plugin; the worst cosine of "
        "a sentence's two embeddings."
    )
    return [text, _table([*head, "worst cosine"], body)]


def _architectures(data: dict[str, Any]) -> list[str]:
    """Models of transformers, tiny: errors of stock and of ours relative to float64."""
    rows, arguments = data["rows"], data["arguments"]

    def cell(errors: list[float] | None) -> str:
        return "-" if errors is None else " / ".join(f"{error:.1e}" for error in errors)

    body = [[row["label"], *(cell(row[name]) for name in ("stock", "plugin", "named")), str(row["calls"]),
             "yes" if row["agrees"] else "no"] for row in rows]  # fmt: skip
    head = ["architecture", "PyTorch", "with the plugin", '`"flashbackend"`', "calls", "agrees"]
    agreeing = sum(row["agrees"] for row in rows)
    text = (
        f"{agreeing} of {len(rows)} architectures of transformers {arguments['transformers']} ({arguments['dtype']}, "
        f"{arguments['seqlen']} tokens, padded, tiny random weights) err by at most twice what PyTorch alone does: "
        "errors of output / gradients relative to float64, `examples/architectures.py`."
    )
    return [text, _table(head, body)]


def _table(head: list[str], body: list[list[str]]) -> str:
    align = ["---", *(["---:"] * (len(head) - 1))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, align, *body])


def replace_section(readme: str, text: str) -> str:
    """The README with `text` between its markers. Raises ValueError where they are missing."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README must hold {BEGIN} and {END} once each")
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """TFLOP/s by sequence length, a panel per head dim and pass: solid lines full, dashed causal."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "flashbackend"  # the same data give the same file
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["case"]["group"] == "grid"]
    dims = sorted({row["case"]["head_dim"] for row in rows})
    names = list(dict.fromkeys(name for row in rows for name in row.get("tflops", {}).get("forward", {})))
    figure, axes = plt.subplots(2, len(dims), figsize=(4.2 * len(dims), 6.4), sharex=True, squeeze=False)
    for line, name in enumerate(PASSES):
        for column, head_dim in enumerate(dims):
            axis = axes[line][column]
            for index, contender in enumerate(names):
                for causal in (False, True):
                    points = sorted(
                        (row["case"]["seqlen_k"], row["tflops"][name][contender])
                        for row in rows
                        if (row["case"]["head_dim"], row["case"]["causal"]) == (head_dim, causal)
                        and contender in row.get("tflops", {}).get(name, {})
                    )
                    if points:
                        width = 2.2 if contender in OURS else 1.2
                        label = contender if not causal else None
                        style = "--" if causal else "-"
                        axis.plot(*zip(*points), style, color=f"C{index}", lw=width, marker=".", label=label)
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
            axis.set_title(f"{name}, D = {head_dim}")
            axis.set_xlabel("sequence length" if line == 1 else "")
            axis.set_ylabel("TFLOP/s" if column == 0 else "")
    axes[0][0].legend(fontsize="small")
    figure.suptitle(f"{title} (dashed: causal)")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--check", action="store_true", help="change nothing; end with 1 if a text is stale")
    options.add_argument("--results", type=Path, default=RESULTS_DIRECTORY)
    options.add_argument("--readme", type=Path, default=README)
    options.add_argument("--details", type=Path, default=DETAILS)
    options.add_argument("--no-plot", action="store_true")
    arguments = options.parse_args(argv)
    directory = arguments.results.resolve()
    if not arguments.check and not arguments.no_plot:
        for gpu, kinds in load_results(directory).items():
            if "attention" in kinds:
                path = directory / f"{slug(gpu)}_attention.svg"
                draw(kinds["attention"]["rows"], f"Attention on {gpu}, bfloat16", path)
                say(f"wrote {path}")
    texts = {
        arguments.readme: replace_section(arguments.readme.read_text(), section(directory)),
        arguments.details: details(directory),
    }
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if arguments.check:
        for path in stale:
            say(f"{path} is stale: run python -m benchmarks.report")
        return int(bool(stale))
    for path in stale:
        path.write_text(texts[path])
    say(f"{' and '.join(str(path) for path in texts)} are up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
