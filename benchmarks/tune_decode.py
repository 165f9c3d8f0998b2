"""Measure ways to run the decoding kernel on this GPU, for ``_DECODE`` in ``kernels/triton/tiles.py`` and the rules of
``kernels/triton/decode_plan.py``: which tile, how many splits, and who adds up what they leave.

    python -m benchmarks.tune_decode --out benchmarks/results/tune_decode.json [--only D128] [--budget 70]
    python -m benchmarks.tune_decode --judge benchmarks/results/tune_decode.json

The second line measures nothing: it shows what the rules choose for each call of a file, beside the best of the file.

Every call is a CUDA graph over more keys and values than the L2 cache holds, replayed in turn with the others and with
PyTorch's default kernel. A variant is a tile, a number of splits and a merge ("last": the last program to arrive,
"launch": a launch of its own, "none": one split, "left": as "launch", but nobody merges: what merging costs). What the
rules choose is always among them.
Variants are compiled in parallel first (Triton's cache on disk hands them over).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks import cases, contenders, decode
from benchmarks.harness import Results, compile_all, environment, significant
from torch_flashbackend.kernels.triton import attention, decode_plan
from torch_flashbackend.kernels.triton.decode_plan import DecodeOptions, DecodePlan
from torch_flashbackend.kernels.triton.launch import device_target
from torch_flashbackend.kernels.triton.tiles import SHARED_MEMORY, DecodeTile, decode_tiles

MULTIPROCESSORS = 132
MULTIPROCESSOR_SHARED = 233472
LARGEST_CALL = 20 * 2**30

# (keys, warps, stages, most query rows in a tile) by head_dim, for 2 bytes per element. What differs: bytes on their
# way in each program, and how many programs a multiprocessor has room for.
FEW_ROWS = {
    64: [(128, 4, 3, 16), (128, 4, 4, 16), (256, 4, 3, 16), (64, 4, 4, 16)],
    128: [(128, 4, 3, 16), (64, 4, 4, 16), (64, 4, 2, 16), (32, 4, 4, 16)],
    256: [(32, 4, 3, 16), (32, 4, 4, 16), (64, 8, 3, 16), (64, 4, 3, 16)],
}
MANY_ROWS = {
    64: [(128, 4, 4, 16), (128, 4, 3, 32), (256, 8, 3, 32), (64, 4, 4, 32)],
    128: [(128, 4, 3, 16), (64, 4, 4, 16), (128, 8, 3, 32), (64, 4, 4, 32)],
    256: [(32, 4, 4, 16), (64, 8, 3, 16), (32, 4, 3, 32), (64, 8, 3, 32)],
}
TILES_OF_GROUP = {4: 4, 32: 4, 1: 3, 8: 2}
"""How many of the first of them are measured for each number of query heads that share a key head."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to run a call."""

    tile: tuple[int, int, int, int]
    splits: int
    merge: str = "none"

    @property
    def tile_name(self) -> str:
        keys, warps, stages, rows = self.tile
        return f"{keys}x{warps}x{stages}m{rows}"

    @property
    def name(self) -> str:
        return f"{self.tile_name} {self.splits} {self.merge}"

    def decode_tile(self, rows: int) -> DecodeTile:
        """The tile as the plan of a call with so many rows that share keys has it."""
        return DecodeTile(max(16, min(self.tile[3], decode_plan._power_of_two(rows))), *self.tile[:3], 1)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Plans that are made meanwhile are of this variant."""
        replaced = {
            "decode_tiles": lambda *of_call: (self.decode_tile(of_call[-1]),),
            "merges_by_launch": lambda *_: self.merge in ("launch", "left"),
        }
        before = {name: getattr(decode_plan, name) for name in replaced}
        try:
            for name, value in replaced.items():
                setattr(decode_plan, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(decode_plan, name, value)

    def plan(self, query, key, value, target=None) -> DecodePlan:
        out = torch.empty_like(query)
        scale = query.size(3) ** -0.5
        call = attention._Call(query, key, value, None, 0.0, False, scale, (query, key, value, out), False, target)
        with self.in_place():
            return DecodePlan(call, query, key, value, None, scale, out, None, DecodeOptions(num_splits=self.splits))


def chosen_cases(only: str) -> list[cases.Case]:
    """Those that decide, the most wanted first."""
    found = [
        cases.Case("decode", batch, 32, 1, length, head_dim, kv_heads=kv_heads, training=False)
        for kv_heads in (8, 1, 32, 4)
        for head_dim in (128, 64, 256)
        for batch in (1, 8, 64)
        for length in (1024, 8192, 65536)
    ]
    found.insert(0, dataclasses.replace(found[0], seqlen_k=128))  # one tile: what every call takes
    found += [cases.Case("decode", batch, 32, 8, length, 128, kv_heads=kv_heads, training=False)
              for kv_heads in (8, 4) for batch, length in ((1, 1024), (1, 8192), (8, 8192))]  # fmt: skip
    return [item for item in found if item.bytes <= LARGEST_CALL and any(t in item.label for t in only.split(","))]


def chosen(case: cases.Case) -> Variant:
    """What the rules choose on an H200."""
    rows, pairs = case.heads // case.kv_heads * case.seqlen_q, case.batch * case.kv_heads
    tiles = decode_tiles("sm_90", 2, case.head_dim, rows)
    tile, splits = decode_plan.choose(tiles, pairs, rows, case.seqlen_k, 4 * case.head_dim, case.head_dim,
                                      MULTIPROCESSORS)  # fmt: skip
    units, block_r = pairs * -(-rows // tile.block_m), min(tile.block_m, decode_plan._power_of_two(rows))
    by_launch = decode_plan.merges_by_launch(units, splits, block_r, case.head_dim, MULTIPROCESSORS)
    merge = "none" if splits == 1 else "launch" if by_launch else "last"
    return Variant((tile.block_n, tile.num_warps, tile.num_stages, tile.block_m), splits, merge)


def variants_of(case: cases.Case) -> list[Variant]:
    """Programs for about one half, one, two and three waves of the multiprocessors, and both ways to merge."""
    rows = case.heads // case.kv_heads * case.seqlen_q
    tiles = (FEW_ROWS if rows <= 16 else MANY_ROWS)[case.head_dim][: TILES_OF_GROUP.get(rows, 3)]
    found = []
    for number, tile in enumerate(tiles):
        units = case.batch * case.kv_heads * -(-rows // max(16, min(tile[3], rows)))
        key_tiles = -(-case.seqlen_k // tile[0])
        wanted = {min(key_tiles, max(1, round(MULTIPROCESSORS * waves // units))) for waves in (0.5, 1, 2, 3)}
        wanted = {-(-key_tiles // -(-key_tiles // splits)) for splits in wanted}
        if units == 1 or (units == 2 and rows > 16):
            wanted |= {splits for splits in (8, 16) if splits <= key_tiles}
        wanted = sorted(wanted)
        for splits in wanted:
            found += [Variant(tile, splits, merge) for merge in (("none",) if splits == 1 else ("last", "launch"))]
        if number == 0 and rows in (4, 32):
            most = [splits for splits in wanted if splits * units <= MULTIPROCESSORS] or wanted[:1]
            if most[-1] > 1:
                found.append(Variant(tile, most[-1], "left"))
    return list(dict.fromkeys([*found, chosen(case)]))


def compile_one(arguments) -> str | None:
    """In a worker process, without the GPU: fills Triton's disk cache. A text says why a variant is none."""
    case, variant, target = arguments
    torch.set_num_threads(1)
    try:
        dtype = cases.DTYPES[case.dtype]
        query, key = (torch.empty(case.batch, heads, rows, case.head_dim, dtype=dtype, device="meta")
                      for heads, rows in ((case.heads, case.seqlen_q), (case.kv_heads, case.seqlen_k)))  # fmt: skip
        for launch in variant.plan(query, key, key, target).launches:
            if launch.compile(target).metadata.shared > SHARED_MEMORY["sm_90"]:
                return f"{case.label} {variant.name}: too much shared memory"
    except Exception as error:
        return f"{case.label} {variant.name}: {type(error).__name__} {str(error)[:160]}"
    return None


class Recorded:
    """A graph of these calls, one for each set of tensors; replay_times takes it. The graphs of a row share a pool."""

    def __init__(self, calls: list, pool, context=contextlib.nullcontext) -> None:
        self.calls = calls
        self.graph = None
        with context():
            if not torch.cuda.is_available():
                return
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                calls[0]()
                stream.synchronize()
                # torch.cuda.graph would collect garbage each time, longer than all that is measured.
                self.graph = torch.cuda.CUDAGraph()
                self.graph.capture_begin(pool=pool)
                for call in calls:
                    call()
                self.graph.capture_end()

    def run(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            for call in self.calls:
                call()


def sets_of(case: cases.Case, buffer: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(query, key, value) for as many calls as exceed the L2 cache; keys and values are parts of the buffer."""
    device = buffer.device
    number = 2
    if device.type == "cuda":
        number = max(1, min(decode.MOST_SETS, math.ceil(decode.KEPT_BYTES / case.bytes)))
    shape = case.batch, case.kv_heads, case.seqlen_k, case.head_dim
    size = math.prod(shape)
    parts = [buffer[first : first + size].view(shape) for first in range(0, 2 * number * size, size)]
    query = torch.randn(case.batch, case.heads, case.seqlen_q, case.head_dim, device=device).to(buffer.dtype)
    return [(query, parts[2 * i], parts[2 * i + 1]) for i in range(number)]


def programs_of(plan: DecodePlan) -> int | None:
    """How many programs of this kernel a multiprocessor has room for."""
    compiled = getattr(plan.launch, "compiled", None)
    if compiled is None:
        return None
    threads = 32 * compiled.metadata.num_warps
    registers = 65536 // (threads * -(-compiled.n_regs // 8) * 8)
    return min(registers, MULTIPROCESSOR_SHARED // (compiled.metadata.shared + 1024))


def measure(case: cases.Case, variants: list[Variant], buffer: torch.Tensor, rounds: int) -> dict:
    device = buffer.device
    sets = sets_of(case, buffer)
    grouped = case.kv_heads != case.heads
    out = torch.empty_like(sets[0][0])
    recorded, failed, facts = {}, {}, {}
    with contenders.stock(None)():
        expected = F.scaled_dot_product_attention(*sets[-1], enable_gqa=grouped).float()  # what a replay leaves
    calls = [lambda s=s: F.scaled_dot_product_attention(*s, enable_gqa=grouped) for s in sets]
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    recorded["default"] = Recorded(calls, pool, contenders.stock(None))
    for variant in variants:
        try:
            plan = variant.plan(*sets[0])
            if variant.merge == "left":
                plan.merge = None
            out.fill_(math.nan)
            item = Recorded([lambda s=s, plan=plan: plan(*s, None, out) for s in sets], pool)
            item.run()
            if variant.merge != "left" and not torch.allclose(out.float(), expected, atol=2e-2, rtol=2e-2):
                failed[variant.name] = f"differs by {(out.float() - expected).abs().max().item()}"
                continue
        except Exception as error:
            failed[variant.name] = f"{type(error).__name__} {str(error)[:160]}"
            continue
        recorded[variant.name] = item
        facts[variant.name] = dataclasses.asdict(variant) | {"tile": variant.tile_name, "programs": programs_of(plan)}
    times = decode.replay_times(recorded, device, rounds)
    stock = times.pop("default")
    return {
        "label": case.label, "case": case.to_json(), "sets": len(sets), "bytes": case.bytes,
        "default_us": significant(stock, 4),
        "variants": [facts[name] | {"us": significant(us, 4)} for name, us in
                     sorted(times.items(), key=lambda item: item[1])],
        "failed": failed,
    }  # fmt: skip


def regime(row: dict) -> tuple:
    """What a tile may be chosen by: head_dim, rows that share keys, and whether calls have a split for everybody."""
    case = row["case"]
    rows = case["heads"] // case["kv_heads"] * case["seqlen_q"]
    many = case["batch"] * case["kv_heads"] * max(1, rows // 16) > MULTIPROCESSORS
    return case["head_dim"], "16 rows" if rows <= 16 else "more rows", "many" if many else "few"


def usual_variants(row: dict) -> list[dict]:
    """Those that compute the result as the kernel does now; older files have others too."""
    return [v for v in row["variants"]
            if v["merge"] != "left" and v.get("stream_query", True) and v.get("dependent", True)]  # fmt: skip


def judgement(rows: list[dict]) -> list[str]:
    """A table: each call's microseconds by PyTorch's default, by the best variant and by what the rules choose.

    Of choices that were not measured, "~" and the nearest number of splits with the same tile and merge; then means.
    """
    lines = ["| call | default | best | | rule | | rule / best | rule / default |", "|---|---|---|---|---|---|---|---|"]
    ratios: dict[tuple, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        usual = usual_variants(row)
        if not usual:
            continue
        case = cases.Case(**row["case"])
        best, rule = min(usual, key=lambda v: v["us"]), chosen(case)
        alike = [v for v in usual if v["tile"] == rule.tile_name and v["merge"] == rule.merge]
        label = row["label"].removeprefix("decode: ")
        shown = f"| {label} | {row['default_us']} | {best['tile']} {best['splits']} {best['merge']} | {best['us']} |"
        if not alike:
            lines.append(f"{shown} {rule.name} | not measured | | |")
            continue
        nearest = min(alike, key=lambda v: abs(math.log(v["splits"] / rule.splits)))
        note = "" if nearest["splits"] == rule.splits else f"~{nearest['splits']} "
        ratio = nearest["us"] / best["us"], nearest["us"] / row["default_us"]
        ratios[regime(row)].append(ratio)
        lines.append(f"{shown} {rule.name} | {note}{nearest['us']} | {ratio[0]:.2f} | {ratio[1]:.2f} |")
    for key, found in sorted(ratios.items(), key=str):
        means = [math.exp(sum(map(math.log, of)) / len(of)) for of in zip(*found, strict=True)]
        worst = [max(of) for of in zip(*found, strict=True)]
        lines.append(f"{key}, {len(found)} calls: {means[0]:.3f} of the best (at most {worst[0]:.2f}), "
                     f"{means[1]:.3f} of the default (at most {worst[1]:.3f})")  # fmt: skip
    return lines


def summary(rows: list[dict]) -> list[str]:
    """For each regime: by tile and merge, the geometric mean of its best time over the best of all, and the worst."""
    ratios: dict[tuple, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        usual = usual_variants(row)
        if not usual:
            continue
        least = min(v["us"] for v in usual)
        for name in {v["tile"] for v in usual}:
            ratios[regime(row)][f"tile {name}"].append(min(v["us"] for v in usual if v["tile"] == name) / least)
        for merge in {v["merge"] for v in usual}:
            found = min(v["us"] for v in usual if v["merge"] == merge)
            ratios[regime(row)][f"merge {merge}"].append(found / least)
        ratios[regime(row)]["default"].append(row["default_us"] / least)
    lines = []
    for key, of_name in sorted(ratios.items(), key=str):
        shown = sorted((math.exp(sum(map(math.log, found)) / len(found)), name, max(found), len(found))
                       for name, found in of_name.items())  # fmt: skip
        lines.append(f"{key}: " + "; ".join(f"{name} {mean:.3f} (worst {worst:.2f}, {count} cases)"
                                            for mean, name, worst, count in shown))  # fmt: skip
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--judge", metavar="FILE", help="show the rules' choices for the calls of this file")
    parser.add_argument("--only", default="", help="cases whose label has one of these texts, separated by commas")
    parser.add_argument("--budget", type=float, default=70.0, help="seconds of measuring after which no case is begun")
    options = parser.parse_args(argv)
    if options.judge:
        print(*judgement(json.loads(Path(options.judge).read_text())["rows"]), sep="\n")
        return 0
    if not options.out:
        parser.error("--out or --judge")
    device = torch.device(options.device)
    work = chosen_cases(options.only)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        target = device_target(device)
        kinds = {}
        for case in work:
            for variant in variants_of(case):
                key = (case.head_dim, case.heads // case.kv_heads * case.seqlen_q, variant.tile, variant.merge != "left"
                       and variant.merge)  # fmt: skip
                kinds.setdefault(key, (case, variant, target))
        compile_all(compile_one, list(kinds.values()))
    else:
        work = [dataclasses.replace(case.smaller(), dtype="float16", seqlen_k=300) for case in work[:3]]
    began = time.monotonic()
    largest = max(max(2, math.ceil(decode.KEPT_BYTES / case.bytes)) * case.bytes for case in work)
    buffer = torch.empty(int(largest) // 2, dtype=cases.DTYPES[work[0].dtype], device=device).normal_()
    results = Results(Path(options.out), "tune_decode", environment(options.device), vars(options))
    left = []
    gc.disable()
    for case in work:
        if time.monotonic() - began > options.budget:
            left.append(case.label)
            continue
        variants = variants_of(case)
        cuda = device.type == "cuda"
        row = measure(case, variants if cuda else variants[:3], buffer, options.rounds if cuda else 1)
        results.add(row)
        shown = "  ".join(
            f"{v['tile']} {v['splits']} {v['merge']} {v['us']}" for v in row["variants"][:8])  # fmt: skip
        print(f"{row['label']}: default {row['default_us']}  {shown}"
              + (f"  failed: {row['failed']}" if row["failed"] else ""), flush=True)  # fmt: skip
    print(f"measured in {time.monotonic() - began:.0f} s", *summary(results.data["rows"]),
          *judgement(results.data["rows"]), sep="\n", flush=True)  # fmt: skip
    results.finish(left)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
