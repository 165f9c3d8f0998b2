"""The demo: train one small GPT twice from the same seed, with PyTorch's attention and then with ours, and compare.

    make demo                       # or: python examples/demo.py --steps 100 --out somewhere
    make demo DEMO_ARGS="--json benchmarks/results/nvidia_h200_demo.json"      # for the README's tables

The training script (train_gpt.py) is ordinary PyTorch and is the same file both times; the second run differs in one
environment variable, TORCH_FLASHBACKEND=1. Exits 1 if the losses do not agree, 2 if a run fails.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import torch_flashbackend

EXAMPLES = Path(__file__).resolve().parent
FIRST_STEP_TOLERANCE = 0.002  # relative; equal weights, so only the rounding of one forward pass differs
TOLERANCE = 0.02  # relative, on the mean of a window of steps; rounding grows as two trainings drift apart
ROWS = 8  # steps shown in the table
RUNS = {"stock": {}, "flashbackend": {"TORCH_FLASHBACKEND": "1"}}


class RunFailed(RuntimeError):
    """A training run ended with an error."""


def train(name: str, arguments: list[str], out: Path, steps: int, progress: Progress) -> dict:
    """Run train_gpt.py once; returns {"records": one dict per step, "stats": what ran, or None}."""
    log, stats, text = out / f"{name}.jsonl", out / f"{name}.stats.json", out / f"{name}.txt"
    log.unlink(missing_ok=True)
    command = [sys.executable, str(EXAMPLES / "run_with_stats.py"), str(stats), str(EXAMPLES / "train_gpt.py")]
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_FLASHBACKEND"} | RUNS[name]
    task = progress.add_task(name, total=steps)
    with open(text, "w") as output:
        process = subprocess.Popen(
            [*command, *arguments, "--log", str(log)], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                time.sleep(0.1)
                if log.exists():
                    progress.update(task, completed=log.read_text().count("\n"))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        tail = "\n".join(text.read_text().splitlines()[-15:])
        raise RunFailed(f"the {name} run failed with exit code {process.returncode}; the end of {text}:\n{tail}")
    progress.update(task, completed=steps)
    return {
        "records": [json.loads(line) for line in log.read_text().splitlines()],
        "stats": json.loads(stats.read_text()),
    }


def compare_losses(stock: list[dict], ours: list[dict]) -> list[dict]:
    """The two losses at the same steps: the first step by itself, then means over equal windows of steps.

    Each row: first and last step, stock, ours, difference (relative), allowed (relative), ok.
    """
    count = min(len(stock), len(ours))
    window = max(1, (count - 1) // (ROWS - 1))
    rows = []
    for last in [1, *reversed(range(count, 1, -window))]:
        span = range(max(1, last - window), last) if last > 1 else range(1)
        a, b = (sum(records[i]["loss"] for i in span) / len(span) for records in (stock, ours))
        allowed = FIRST_STEP_TOLERANCE if last == 1 else TOLERANCE
        difference = abs(a - b) / abs(a)
        rows.append(
            {
                "first": stock[span[0]]["step"],
                "last": stock[span[-1]]["step"],
                "stock": a,
                "ours": b,
                "difference": difference,
                "allowed": allowed,
                "ok": difference <= allowed,  # false for NaN
            }
        )
    return rows


def loss_table(rows: list[dict]) -> Table:
    """The comparison as a table."""
    table = Table(title="Mean loss over the same steps, same seed, same data")
    for name in ("steps", "stock", "flashbackend", "difference", "allowed"):
        table.add_column(name, justify="right")
    for row in rows:
        colour = "green" if row["ok"] else "red"
        table.add_row(
            str(row["last"]) if row["first"] == row["last"] else f"{row['first']} to {row['last']}",
            f"{row['stock']:.4f}", f"{row['ours']:.4f}",
            f"[{colour}]{row['difference']:.3%}[/]", f"{row['allowed']:.1%}",
        )  # fmt: skip
    return table


def cost_table(stock: dict, ours: dict, comparable: bool) -> Table:
    """Speed and memory of both runs, each given by its last record; the ratios only where different kernels ran."""
    table = Table(title="Cost")
    for name in ("", "stock", "flashbackend", *["ratio"] * comparable):
        table.add_column(name, justify="left" if not name else "right")
    for label, key, unit, form in (
        ("tokens per second", "tokens_per_second", 1, ",.0f"),
        ("peak memory (GiB)", "peak_memory_bytes", 2**30, ".2f"),
    ):
        a, b = stock[key], ours[key]
        if a and b:
            ratio = [f"{b / a:.2f}x"] * comparable
            table.add_row(label, format(a / unit, form), format(b / unit, form), *ratio)
    return table


def write_results(path: Path, settings: argparse.Namespace, runs: dict[str, dict], rows: list[dict]) -> None:
    """The outcome in the form of the benchmarks' results files, which benchmarks/report.py reads: kind "training"."""
    sys.path.insert(0, str(EXAMPLES.parent))
    from benchmarks import harness

    ends = {name: run["records"][-1] for name, run in zip(("stock", "plugin"), runs.values())}
    size = f"{settings.layers} layers, width {settings.width}, {settings.batch} x {settings.seqlen} tokens"
    row = {
        "label": f"GPT with document masks, {size}" + (", compiled" if settings.compile else ""),
        "tokens_per_second": {name: end["tokens_per_second"] for name, end in ends.items()},
        "peak_memory_bytes": {name: end["peak_memory_bytes"] for name, end in ends.items()},
        "loss": {"stock": rows[-1]["stock"], "plugin": rows[-1]["ours"]},
        "losses_agree": all(row["ok"] for row in rows),
        "losses": rows,
        "kernels": (runs["flashbackend"]["stats"] or {}).get("launches", {}),
    }
    arguments = {name: str(value) if isinstance(value, Path) else value for name, value in vars(settings).items()}
    results = harness.Results(path, "training", harness.environment(settings.device), arguments)
    results.add(row)
    results.finish()


def save_plot(runs: dict[str, dict], path: Path) -> None:
    """Both loss curves as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for (name, run), style in zip(runs.items(), ({"linewidth": 3, "alpha": 0.4}, {"linewidth": 1})):
        axes.plot([r["step"] for r in run["records"]], [r["loss"] for r in run["records"]], label=name, **style)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="train_gpt.py, same seed")
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def explain_the_call(settings: argparse.Namespace) -> str:
    """What the plugin says about the attention call that the training script makes."""
    device, dtype = settings.device, getattr(torch, settings.dtype)
    batch, heads, seqlen = settings.batch, settings.heads, settings.seqlen
    packed = torch.empty(batch, seqlen, heads, settings.width // heads, device=device, dtype=dtype)
    query, key, value = (packed.transpose(1, 2).detach().requires_grad_() for _ in range(3))
    mask = torch.ones(batch, 1, seqlen, seqlen, dtype=torch.bool, device=device)
    torch_flashbackend.enable()
    try:
        return str(torch_flashbackend.explain(query, key, value, attn_mask=mask))
    finally:
        torch_flashbackend.disable()


def check_in_interpreter(console: Console) -> bool:
    """Run the Triton kernels in Triton's interpreter and show their error; returns whether all are in bounds."""
    console.print("The Triton kernels that a GPU compiles, run here in Triton's interpreter:\n")
    with console.status("interpreting the kernels"):
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "interpreter_check.py"), "--json"],
            env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        )  # fmt: skip
    try:
        rows = json.loads(done.stdout)
    except json.JSONDecodeError:
        console.print(f"[red]the interpreter run failed[/]:\n{done.stderr[-2000:]}", markup=True)
        return False
    groups: dict[tuple[str, str, str], list[dict]] = {}
    for row in rows:
        kind = "output" if row["result"] == "output" else "gradients"
        groups.setdefault((row["case"], row["dtype"], kind), []).append(row)
    table = Table(title="Largest error against float64")
    for name in ("case", "dtype", "of the", "our kernels", "math path"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("our kernels", "math path") else "left")
    for labels, group in groups.items():
        error, stock_error = (max(row[key] for row in group) for key in ("error", "stock_error"))
        colour = "green" if all(row["ok"] for row in group) else "red"
        table.add_row(*labels, f"[{colour}]{error:.1e}[/]", f"{stock_error:.1e}")
    console.print(table)
    console.print("Allowed: twice the error of PyTorch's math path plus one rounding of the largest number.")
    return all(row["ok"] for row in rows)


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="Other arguments go to train_gpt.py: --seqlen, --batch, --width"
    )
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for logs and the plot")
    parser.add_argument("--json", type=Path, help="write the outcome there too, as the benchmarks write theirs")
    parser.add_argument("--skip-interpreter", action="store_true", help="on a CPU, leave the kernel check out")
    arguments, training = parser.parse_known_args(argv)

    sys.path.insert(0, str(EXAMPLES))
    import train_gpt

    settings = train_gpt.parse_arguments(training)
    arguments.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    on_gpu = settings.device.startswith("cuda")
    where = torch.cuda.get_device_name(settings.device) if on_gpu else "the CPU"
    console.print(f"torch {torch.__version__} on {where}. Training the same script twice: {settings.steps} steps each,")
    console.print("first as it is, then with TORCH_FLASHBACKEND=1 in its environment.\n")

    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    timing = (TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left"))
    try:
        with Progress(*columns, *timing, console=console) as progress:
            runs = {name: train(name, training, arguments.out, settings.steps, progress) for name in RUNS}
    except RunFailed as failure:
        console.print(str(failure), style="red", markup=False, highlight=False, soft_wrap=True)
        return 2

    rows = compare_losses(runs["stock"]["records"], runs["flashbackend"]["records"])
    agree = all(row["ok"] for row in rows)
    console.print()
    console.print(loss_table(rows))
    console.print("[green]The losses agree.[/]\n" if agree else "[red]The losses do not agree.[/]\n")
    console.print(cost_table(*(run["records"][-1] for run in runs.values()), comparable=on_gpu))

    stats = runs["flashbackend"]["stats"]
    console.print("\nWhat the plugin counted in the second run:")
    counted = stats["text"] if stats["calls"] or stats["traced"] else "nothing: it looks at calls on GPU tensors only"
    console.print(counted, markup=False, highlight=False, soft_wrap=True)
    console.print("\nWhy, in the plugin's own words, for the attention call of this training:")
    console.print(explain_the_call(settings), markup=False, highlight=False, soft_wrap=True)

    right = True
    if not on_gpu:
        console.print(
            "\nThis was a CPU. The plugin's kernels are for GPUs, so every call of both runs went to PyTorch's own "
            "kernel: their losses are equal, and any difference in speed is the noise of this machine. What a CPU can "
            "show is that the kernels compute the right numbers.\n"
        )
        right = arguments.skip_interpreter or check_in_interpreter(console)

    plot = arguments.out / "loss.png"
    save_plot(runs, plot)
    summary = {"agree": agree, "loss": rows} | {
        name: {**run["records"][-1], "stats": run["stats"]} for name, run in runs.items()
    }
    (arguments.out / "demo.json").write_text(json.dumps(summary, indent=2) + "\n")
    if arguments.json:
        write_results(arguments.json, settings, runs, rows)
    console.print(f"\nLoss curves: {plot.resolve()}", soft_wrap=True)
    return 0 if agree and right else 1


if __name__ == "__main__":
    sys.exit(main())
