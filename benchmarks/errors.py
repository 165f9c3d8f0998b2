"""How exact: errors of outputs and gradients against float64, ours and PyTorch's kernels on the same inputs.

    python -m benchmarks.errors                       # under 1 minute on an H200, writes <gpu>_errors.json
    python -m benchmarks.errors --only "D256"
    python -m benchmarks.errors --device cpu --smoke --out /tmp/errors.json

Of each tensor, over SEEDS draws: the root mean square of the error and the largest one, each divided by the root mean
square of the exact values. Scores: "usual", of random normal tensors; "large", eight times those; "low", around -40
without exception, which makes every exponential small before its row's maximum is known.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks import contenders, harness
from benchmarks.cases import Case, Inputs, make_inputs
from benchmarks.harness import Budget, Results, say, significant

SEEDS = 3
SCORES = ("usual", "large", "low")
CONTENDERS = ("cuda", "triton", "cudnn", "flash")
TENSORS = ("out", "query", "key", "value")


def cases() -> list[Case]:
    """Two batches of four heads, 1,000 queries and keys; bfloat16, and float16 once."""
    sizes = ((64, 64), (128, 128), (192, 128), (256, 256))
    found = [
        Case("errors", 2, 4, 1000, 1000, head_dim, head_dim_v=head_dim_v, causal=causal)
        for head_dim, head_dim_v in sizes
        for causal in (True, False)
    ]
    return [*found, Case("errors", 2, 4, 1000, 1000, 128, causal=True, dtype="float16")]


def label_of(case: Case, scores: str) -> str:
    """Of a row."""
    return f"{case.label}, {scores} scores"


def draw(case: Case, device: torch.device, scores: str, seed: int) -> Inputs:
    """Tensors that require grad, whose scores are as SCORES says."""
    inputs = make_inputs(case, device, training=True, seed=seed)
    with torch.no_grad():
        if scores == "large":
            inputs.query.mul_(8.0)
        elif scores == "low":
            # One column of both that alone gives -40 after the scale.
            size = (40.0 * case.head_dim**0.5) ** 0.5
            inputs.query[..., 0], inputs.key[..., 0] = size, -size
    return inputs


def results(case: Case, inputs: Inputs, context: harness.Context) -> list[Tensor]:
    """The output and the gradients of query, key and value."""
    with context():
        out = torch.nn.functional.scaled_dot_product_attention(
            inputs.query, inputs.key, inputs.value, is_causal=case.causal
        )
        return [out.detach(), *torch.autograd.grad(out, inputs.differentiable, inputs.grad_out)]


def exact(case: Case, inputs: Inputs) -> list[Tensor]:
    """The same in float64, by PyTorch's math path."""
    doubled = (inputs.query, inputs.key, inputs.value)
    query, key, value = (tensor.detach().double().requires_grad_() for tensor in doubled)
    in_float64 = Inputs(query, key, value, None, inputs.grad_out.double())
    return results(case, in_float64, contenders.stock(contenders.STOCK_BACKENDS["math"]))


def measure_case(case: Case, scores: str, device: torch.device) -> dict[str, Any]:
    """A row of JSON: by contender and tensor, relative errors, and of ours what they are of cuDNN's."""
    sums: dict[str, dict[str, list[float]]] = {}
    refused: dict[str, str] = {}
    for seed in range(SEEDS):
        inputs = draw(case, device, scores, seed)
        expected = exact(case, inputs)
        scale = [tensor.square().mean().sqrt() for tensor in expected]
        for name in CONTENDERS:
            if name in refused:
                continue
            try:
                found = results(case, inputs, contenders.context_of(name, device))
            except RuntimeError as error:
                refused[name] = str(error).splitlines()[0][:160]
                continue
            of_tensors = sums.setdefault(name, {})
            for tensor, got, wanted, size in zip(TENSORS, found, expected, scale, strict=True):
                error = (got.double() - wanted) / size
                square, largest = of_tensors.setdefault(tensor, [0.0, 0.0])
                square += error.square().mean().item() / SEEDS
                of_tensors[tensor] = [square, max(largest, error.abs().max().item())]
    errors = {
        name: {tensor: {"rms": significant(square**0.5, 3), "largest": significant(largest, 3)}
               for tensor, (square, largest) in of_tensors.items()}
        for name, of_tensors in sums.items()
    }  # fmt: skip
    of_cudnn = {
        name: {tensor: {kind: significant(value / errors["cudnn"][tensor][kind], 3) for kind, value in kinds.items()}
               for tensor, kinds in errors[name].items()}
        for name in ("cuda", "triton")
        if name in errors and "cudnn" in errors
    }  # fmt: skip
    return {
        "label": label_of(case, scores),
        "case": case.to_json(),
        "scores": scores,
        "errors": errors,
        "of_cudnn": of_cudnn,
        "refused": refused,
    }


def main(argv: list[str] | None = None) -> int:
    """Measure and write the results file."""
    arguments = harness.parser(__doc__.splitlines()[0], budget_s=90).parse_args(argv)
    budget = Budget(arguments.budget)
    contenders.take_everything()
    device = torch.device(arguments.device)
    facts = harness.environment(arguments.device)
    data = Results(harness.results_path(arguments, facts, "errors"), "errors", facts, vars(arguments))
    wanted = list({case.smaller(): None for case in cases()}) if arguments.smoke else cases()
    pairs = [(case, scores) for case in wanted for scores in SCORES]
    asked = [pair for pair in pairs if harness.asked_for(arguments, label_of(*pair))]
    for case, scores in data.each(asked, budget, lambda pair: label_of(*pair)):
        row = measure_case(case, scores, device)
        data.add(row)
        ours = row["of_cudnn"].get("cuda", {})
        shown = ", ".join(f"{name} {kinds['rms']} (largest {kinds['largest']})" for name, kinds in ours.items())
        say(f"[{budget.used:.0f} s] {row['label']}: of cuDNN's error {shown or row['refused']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
