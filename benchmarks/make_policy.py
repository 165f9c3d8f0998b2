r"""Turns results of the benchmarks into a policy: which measured calls our kernels do faster.

    cd benchmarks/results
    python -m benchmarks.make_policy \
        nvidia_h200_{decode,varlen,attention{,_again},special{,_masks,_halves,_short}}.json

Writes torch_flashbackend/policies/<gpu>.json, which policy.py reads. Its ratios are eager times, CPU and GPU together:
what PyTorch's default takes, divided by what ours takes, for the forward without gradients and for forward plus
backward. Of decoding the ratio is the smaller one of two, the other being that of times in a CUDA graph, behind other
work, where servers and compiled programs do it: an eager step of 30 us may be 10 on the GPU. Of packed sequences they
are GPU times: there, whichever kernel runs, nested tensors take milliseconds of Python, and who calls the kernels by
another name does not. Standard library only; it never runs a kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import OURS, RESULTS_FORMAT, ROOT, by_backend, say, slug

POLICIES = ROOT / "torch_flashbackend" / "policies"
KINDS = ("attention", "special", "decode", "varlen")
REFUSED = 1e9  # stands for infinity: PyTorch's default does not take the call at all
MEASURED = ("forward", "training")
CASE_FIELDS = ("head_dim", "head_dim_v", "batch", "heads", "kv_heads", "seqlen_q", "seqlen_k")


def load(path: Path) -> dict[str, Any]:
    """A results file of one of KINDS. Raises ValueError for anything else."""
    data = json.loads(path.read_text())
    if data.get("format") != RESULTS_FORMAT or data.get("kind") not in KINDS:
        raise ValueError(
            f"{path}: kind {data.get('kind')!r} format {data.get('format')!r}; a policy is made of "
            f"{' and '.join(KINDS)} results of format {RESULTS_FORMAT}"
        )
    return data


def ratio(row: dict[str, Any], name: str, backend: str) -> float | None:
    """Default's time over a backend's for "forward" or "training"; None when that was not measured there."""
    times = _packed_times(row, name) if row["policy_case"] == "packed" else row.get("eager_us", {}).get(name, {})
    if backend not in times:
        return None
    if "default" not in times:
        return REFUSED if "default" in row.get("refused", {}) else None
    in_graph = row.get("after_product_us", {}) if name == "forward" else {}  # of decoding alone
    both = [each for each in (times, in_graph) if backend in each and "default" in each]
    return round(min(each["default"] / each[backend] for each in both), 3)


def _packed_times(row: dict[str, Any], name: str) -> dict[str, float]:
    """GPU time of our operator, whose kernels are Triton's, and of PyTorch's default, where both were measured."""
    passes = [row["ms"].get(part, {}) for part in (("forward",) if name == "forward" else ("forward", "backward"))]
    if not all("varlen" in times and "default" in times for times in passes):
        return {}
    return {ours: sum(times[theirs] for times in passes) for ours, theirs in (("triton", "varlen"), ("default",) * 2)}


def policy_rows(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The policy's rows for a measured row, one for each backend of ours that was measured there."""
    if "error" in row:
        return []
    row, made = by_backend(row), []
    for backend in OURS:
        kernels = row.get("our_kernels", {}).get(backend, ())
        if backend == "cuda" and "us" in row and "flash_decode" not in kernels:
            continue  # decoding, measured on the kernel of many queries: routing never gives it such a step
        forward, training = ratio(row, "forward", backend), ratio(row, "training", backend)
        if forward is None and training is None:
            continue
        case = row["case"]
        facts = {"backend": backend, "case": row["policy_case"], "causal": case["causal"], "dtype": case["dtype"]}
        made.append({**facts, **{f: case[f] for f in CASE_FIELDS}, "forward": forward, "training": training})
    return made


def make_policy(files: list[Path]) -> dict[str, Any]:
    """The policy of one GPU. Raises ValueError for files of different GPUs or torch versions.

    What is measured for one call and backend in several files counts as the last of them says; what is measured
    several times in one (two masks, say, that are one kind of call) as the worst of it does.
    """
    loaded = [load(path) for path in files]
    first = loaded[0]["environment"]
    for path, data in zip(files, loaded, strict=True):
        for fact in ("gpu", "sm_count", "torch"):
            if data["environment"].get(fact) != first.get(fact):
                raise ValueError(f"{path}: {fact} is {data['environment'].get(fact)!r}, not {first.get(fact)!r}")
    found: dict[tuple, dict[str, Any]] = {}
    for data in loaded:
        for call, made in _worst_of_each_call(data["rows"]).items():
            found.setdefault(call, made).update((f, made[f]) for f in MEASURED if made[f] is not None)
    if not found:
        raise ValueError("no row holds an eager time of ours")
    rows = sorted(found.values(), key=_order)
    return {
        "gpu": first["gpu"],
        "sm_count": first.get("sm_count"),
        "architecture": first.get("architecture"),
        "source": ", ".join(_relative(path) for path in files),
        "commit": ", ".join(dict.fromkeys(str(data["environment"].get("commit"))[:12] for data in loaded)),
        "torch": first["torch"],
        "triton": first.get("triton"),
        "rows": rows,
    }


def _worst_of_each_call(rows: list[dict[str, Any]]) -> dict[tuple, dict[str, Any]]:
    """The policy's rows for those of a file, by what they measure."""
    found: dict[tuple, dict[str, Any]] = {}
    for made in (made for row in rows for made in policy_rows(row)):
        worst = found.setdefault(tuple(value for field, value in made.items() if field not in MEASURED), made)
        for field in MEASURED:
            worst[field] = min((r[field] for r in (worst, made) if r[field] is not None), default=None)
    return found


def _order(row: dict[str, Any]) -> tuple:
    work = row["batch"] * row["heads"] * row["seqlen_q"] * row["seqlen_k"] * row["head_dim"]
    return row["backend"], row["case"], row["causal"], row["dtype"], row["head_dim"], row["head_dim_v"], work


def _relative(path: Path) -> str:
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def text_of(policy: dict[str, Any]) -> str:
    """JSON with one row per line, so that a change of a policy reads well as a diff."""
    head = {key: value for key, value in policy.items() if key != "rows"}
    lines = ",\n".join("  " + json.dumps(row) for row in policy["rows"])
    return json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + lines + "\n ]\n}\n"


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("results", nargs="+", type=Path)
    options.add_argument("--out", type=Path, default=None, help="default: torch_flashbackend/policies/<gpu>.json")
    arguments = options.parse_args(argv)
    try:
        policy = make_policy(arguments.results)
    except ValueError as error:
        say(str(error))
        return 1
    path = arguments.out or POLICIES / f"{slug(policy['gpu'])}.json"
    path.write_text(text_of(policy))
    faster = sum(max(row["forward"] or 0.0, row["training"] or 0.0) >= 1.02 for row in policy["rows"])
    say(f"{path}: {len(policy['rows'])} rows, ours ahead in {faster} of them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
