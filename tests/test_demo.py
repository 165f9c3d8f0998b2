"""The examples on a CPU: the training script's claims, the demo's comparison, and that each example runs."""

import copy
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_gpt  # noqa: E402

TINY = ["--device", "cpu", "--seqlen", "32", "--batch", "2", "--width", "32", "--layers", "1", "--heads", "2"]
SMALL_CORPUS = ["--corpus-bytes", "65536"]


def run(script: str, *arguments: str, expect: int = 0, **environment: str) -> subprocess.CompletedProcess:
    """Run an example in a process of its own, on the CPU, the plugin off unless the environment says otherwise."""
    clean = {k: v for k, v in os.environ.items() if k not in ("TORCH_FLASHBACKEND", "TRITON_INTERPRET")}
    clean |= {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "160", **environment}
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, env=clean, capture_output=True, text=True)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def read_log(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_training_script_does_not_know_the_plugin():
    assert "flashbackend" not in (EXAMPLES / "train_gpt.py").read_text()


def test_document_mask_is_causal_and_stays_in_its_file():
    documents = torch.tensor([[0, 0, 1, 1], [2, 2, 2, 2]], dtype=torch.int32)
    mask = train_gpt.document_mask(documents)
    assert mask.shape == (2, 1, 4, 4)
    assert mask.dtype == torch.bool
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert torch.equal(mask[1, 0], torch.ones(4, 4, dtype=torch.bool).tril())


def test_a_file_does_not_change_the_predictions_in_the_next_one():
    torch.manual_seed(0)
    model = train_gpt.GPT(seqlen=16, width=32, layers=2, heads=2)
    documents = torch.tensor([[0] * 7 + [1] * 9])
    tokens = torch.randint(0, 256, (1, 16))
    other = tokens.clone()
    other[0, :7] = (tokens[0, :7] + 1) % 256
    mask = train_gpt.document_mask(documents)
    before, after = model(tokens, mask), model(other, mask)
    torch.testing.assert_close(before[0, 7:], after[0, 7:], rtol=0, atol=0)
    assert not torch.equal(before[0, :7], after[0, :7])


def test_corpus_is_deterministic_and_numbers_its_files():
    tokens, documents = train_gpt.read_corpus(200_000)
    again, _ = train_gpt.read_corpus(200_000)
    assert torch.equal(tokens, again)
    assert len(tokens) == len(documents) == 200_000
    starts = tokens == train_gpt.SEPARATOR
    assert torch.equal(starts[1:], documents[1:] != documents[:-1])
    assert starts[0]


def test_targets_stop_at_the_end_of_a_file():
    tokens = torch.arange(17, dtype=torch.uint8)
    documents = torch.tensor([0] * 5 + [1] * 12, dtype=torch.int32)
    inputs, targets, numbers = next(train_gpt.batches(tokens, documents, batch=1, seqlen=16, seed=0))
    assert inputs[0].tolist() == list(range(16))
    assert numbers[0].tolist() == [0] * 5 + [1] * 11
    assert targets[0].tolist() == [1, 2, 3, 4, -100, *range(6, 17)]


def test_training_repeats_and_learns(tmp_path):
    logs = []
    for name in ("first", "second"):
        log = tmp_path / f"{name}.jsonl"
        arguments = [*TINY, *SMALL_CORPUS, "--steps", "25", "--warmup", "5", "--log-every", "5", "--log", str(log)]
        train_gpt.main(arguments)
        logs.append(read_log(log))
    losses = [[record["loss"] for record in log] for log in logs]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] - 0.2
    assert [record["step"] for record in logs[0]] == list(range(1, 26))
    assert logs[0][0]["tokens_per_second"] is None, "the warm-up is not timed"
    assert logs[0][-1]["tokens_per_second"] > 0
    assert logs[0][-1]["peak_memory_bytes"] > 0


WRONG_NUMBERS = [[f"--{name}", "0"] for name in ("steps", "seqlen", "batch", "width", "layers", "heads", "log-every")]


@pytest.mark.parametrize("arguments", [*WRONG_NUMBERS, ["--corpus-bytes", "-1"], ["--width", "30", "--heads", "4"]])
def test_training_refuses_wrong_arguments_in_words(arguments, capsys):
    with pytest.raises(SystemExit):
        train_gpt.parse_arguments(["--device", "cpu", *arguments])
    assert arguments[0] in capsys.readouterr().err


class TestDemo:
    """The comparison of two runs, and the whole demo at a tiny size."""

    @pytest.fixture
    def demo(self):
        pytest.importorskip("rich")
        import demo

        return demo

    @staticmethod
    def records(losses):
        return [{"step": i + 1, "loss": loss} for i, loss in enumerate(losses)]

    @pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 30, 300])
    def test_equal_losses_agree_at_any_length(self, demo, count):
        losses = self.records([5.0 - 0.01 * i for i in range(count)])
        rows = demo.compare_losses(losses, copy.deepcopy(losses))
        assert all(row["ok"] for row in rows)
        assert (rows[0]["first"], rows[0]["last"]) == (1, 1)
        assert rows[-1]["last"] == count
        for before, after in itertools.pairwise(rows):
            assert after["first"] == before["last"] + 1, "every step counts, and once"
        assert len(rows) <= 2 * demo.ROWS

    def test_a_wrong_first_step_is_seen(self, demo):
        stock = [5.0 - 0.01 * i for i in range(30)]
        ours = [stock[0] * 1.01, *stock[1:]]
        assert not demo.compare_losses(self.records(stock), self.records(ours))[0]["ok"]

    def test_a_training_that_drifts_away_is_seen(self, demo):
        stock = [5.0 - 0.01 * i for i in range(30)]
        ours = [loss * (1 + 0.002 * i) for i, loss in enumerate(stock)]
        rows = demo.compare_losses(self.records(stock), self.records(ours))
        assert rows[0]["ok"]
        assert not rows[-1]["ok"]

    def test_a_loss_that_is_not_a_number_is_never_equal(self, demo):
        stock = [5.0] * 10
        rows = demo.compare_losses(self.records(stock), self.records([5.0] * 9 + [float("nan")]))
        assert not rows[-1]["ok"]

    def test_demo_runs_on_a_cpu_and_says_that_calls_went_to_pytorch(self, tmp_path):
        pytest.importorskip("matplotlib")
        arguments = [*TINY, *SMALL_CORPUS, "--steps", "12", "--log-every", "4", "--warmup", "4"]
        results = tmp_path / "results" / "cpu_demo.json"
        arguments += ["--json", str(results), "--skip-interpreter"]
        text = run("demo.py", "--out", str(tmp_path), *arguments, FLASHBACKEND_COMMIT="abc").stdout
        assert "The losses agree." in text
        assert "This was a CPU" in text
        assert (tmp_path / "loss.png").stat().st_size > 1000
        summary = json.loads((tmp_path / "demo.json").read_text())
        assert summary["agree"]
        assert summary["stock"]["stats"] is None, "the first run must not have the plugin on"
        assert summary["flashbackend"]["stats"] is not None
        data = json.loads(results.read_text())
        assert data["complete"] and data["environment"]["commit"] == "abc" and data["arguments"]["seqlen"] == 32
        (row,) = data["rows"]
        assert row["losses_agree"] and row["kernels"] == {} and row["loss"]["stock"] == row["loss"]["plugin"] > 0
        assert set(row["tokens_per_second"]) == set(row["peak_memory_bytes"]) == {"stock", "plugin"}
        sys.path.insert(0, str(ROOT))
        from benchmarks import report

        assert "| GPT with document masks, 1 layers, width 32, 2 x 32 tokens |" in report.section(results.parent)

    def test_demo_reports_a_run_that_fails(self, tmp_path):
        failed = run("demo.py", "--out", str(tmp_path), *TINY, "--corpus-bytes", "40", "--steps", "3", expect=2)
        assert "the corpus holds" in re.sub(r"\s+", " ", failed.stdout + failed.stderr)


def test_run_with_stats_keeps_arguments_exit_code_and_script_unchanged(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nassert __name__ == '__main__'\nprint(sys.argv[1:])\nsys.exit(7)\n")
    stats = tmp_path / "stats.json"
    done = run("run_with_stats.py", str(stats), str(script), "--flag", "value", expect=7)
    assert done.stdout.strip() == "['--flag', 'value']"
    assert json.loads(stats.read_text()) is None


def test_one_line_example_explains_its_call():
    text = run("one_line.py").stdout
    assert "loss" in text
    assert "stock" in text


def test_huggingface_example_runs_or_says_what_it_needs():
    text = run("huggingface.py").stdout
    assert "largest difference" in text or "needs the package `transformers`" in text


def test_kernels_in_the_interpreter_are_as_exact_as_the_math_path():
    pytest.importorskip("triton")
    rows = json.loads(run("interpreter_check.py", "--json", "--quick", TRITON_INTERPRET="1").stdout)
    assert rows
    assert all(row["ok"] for row in rows), rows
