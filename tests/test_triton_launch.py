"""What a launch hands to Triton's C launcher: pointers or tensor maps in the kernel's order, then what is fixed."""

from __future__ import annotations

import collections
import contextlib
import random

import pytest
import torch

pytest.importorskip("triton")

from torch_flashbackend.kernels import KernelUnavailable
from torch_flashbackend.kernels.triton import attention, decode_plan, launch, tiles


@pytest.fixture
def launched(monkeypatch):
    """Launches end in this list, as (kernel, stream, arguments): nothing is compiled, and no GPU is touched."""
    calls = []

    def load(self, device):
        self.device_index = 0
        self._run = lambda stream, arguments: calls.append((self.name, stream, arguments))
        for _, tensor_map in self._maps:
            tensor_map._encode = lambda pointer: ("map", pointer)
        self._arguments = self._packer()
        return self

    monkeypatch.setattr(launch.Launch, "load", load)
    monkeypatch.setattr(launch, "_bind_context", lambda index: None)
    monkeypatch.setattr(launch, "_current_device", lambda: 0)
    monkeypatch.setattr(launch, "_current_stream", lambda index: 77)
    attention._plans.clear()
    yield calls
    attention._plans.clear()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("dtype", "allow_tf32"), [(torch.bfloat16, False), (torch.float32, False), (torch.float32, True)], ids=str
)
def test_arguments_of_a_forward(launched, dtype, allow_tf32, masked):
    """Tensor maps for half types and for float32 that is split into those, pointers for TF32."""
    query, key, value, out = (torch.empty(2, 3, length, 64, dtype=dtype) for length in (40, 50, 50, 40))
    logsumexp = torch.empty(2, 3, 40)
    mask = torch.ones(40, 50, dtype=torch.bool)[None, None] if masked else None
    for tensors in ((query, key, value, out), (query.clone(), key.clone(), value.clone(), out.clone())):
        query, key, value, out = tensors
        attention.forward(query, key, value, mask, None, 0.0, False, 0.125, out, logsumexp, allow_tf32)
        name, stream, arguments = launched.pop()
        assert (name, stream) == ("attention_forward", 77)

        def streamed(tensor):
            if allow_tf32:
                return [tensor.data_ptr()]
            return [("map", tensor.data_ptr()), *tensor.shape, *tensor.stride()]

        expected = [query.data_ptr(), *streamed(key), *streamed(value), mask.data_ptr() if masked else None]
        expected += [None, None, out.data_ptr(), logsumexp.data_ptr(), None]  # no lists of the mask's tiles, no seed
        assert list(arguments[: len(expected)]) == expected
        rest = arguments[len(expected) :]
        assert rest[:8] == (*query.stride(), *key.stride())
        assert 0.125 not in arguments and pytest.approx(0.125 * 1.4426950408889634) in rest


def test_a_stream_of_another_device_than_the_current(launched, monkeypatch):
    monkeypatch.setattr(launch, "_current_device", lambda: 1)
    entered = []

    class Device:
        def __init__(self, index):
            entered.append(index)

        def __enter__(self):
            monkeypatch.setattr(launch, "_current_stream", lambda index: 88)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(torch.cuda, "device", Device)
    query = torch.empty(1, 1, 32, 16, dtype=torch.float16)
    attention.forward(query, query, query, None, None, 0.0, False, 1.0, torch.empty_like(query), None, False)
    assert entered == [0] and [call[:2] for call in launched] == [("attention_forward", 88)]


@pytest.mark.parametrize("by_launch", [False, True])
def test_arguments_of_decoding(launched, monkeypatch, by_launch):
    """Pointers in the kernel's order, as many programs as splits and key heads; a launch or counters to merge by."""
    monkeypatch.setattr(decode_plan, "merges_by_launch", lambda *_: by_launch)
    decode_plan.choose.cache_clear()
    query, key, value, out = (torch.empty(2, heads, length, 64, dtype=torch.float16)
                              for heads, length in ((6, 1), (3, 5000), (3, 5000), (6, 1)))  # fmt: skip
    mask = torch.ones(2, 1, 1, 5000, dtype=torch.bool)
    attention.forward(query, key, value, mask, None, 0.0, False, 0.125, out, None, False)
    attention.forward(query, key, value, None, None, 0.0, False, 0.125, out, None, False)
    (plain,) = (plan for key_, plan in attention._plans.items() if plan.launch._description[2]["MASK"] == 0)
    for attn_mask in (mask, None):
        name, stream, arguments = launched.pop(0)
        assert (name, stream) == ("attention_decode", 77)
        assert list(arguments[:3]) == [query.data_ptr(), key.data_ptr(), value.data_ptr()]
        assert arguments[3] == (None if attn_mask is None else attn_mask.data_ptr())
        assert arguments[4:10] == (None,) * 6  # no sinks, slopes, lengths or pages
        assert arguments[10:12] == (out.data_ptr(), None)
        assert arguments[12] is not None and (arguments[13] is None) == by_launch
        assert arguments[14:18] == query.stride()
        if by_launch:  # over what the first has left, a program for each of the two rows of a key head
            name, stream, merge = launched.pop(0)
            assert (name, stream) == ("merge_splits", 77)
            assert merge[:6] == (None, None, None, out.data_ptr(), None, arguments[12])
            assert plain.merge._grid == 6 * 2
    assert plain.splits > 1 and plain.launch._grid == plain.splits * 6 and not launched
    decode_plan.choose.cache_clear()


@pytest.mark.parametrize("seed", range(20))
def test_choice_of_a_tile_and_splits(seed):
    """No more programs than tiles of keys; enough for a GPU where there are; none too many where all have work."""
    rng = random.Random(seed)
    pairs, rows, keys = rng.choice([1, 3, 8, 100, 3000]), rng.choice([1, 4, 8, 32, 64, 200]), rng.randint(1, 200_000)
    head_dim, multiprocessors = rng.choice([64, 128, 256]), rng.choice([16, 108, 132])
    choices = tiles.decode_tiles("sm_90", 2, head_dim, rows)
    tile, splits = decode_plan.choose(choices, pairs, rows, keys, 4 * head_dim, head_dim, multiprocessors)
    key_tiles = -(-keys // tile.block_n)
    units = pairs * -(-rows // tile.block_m)
    assert tile in choices and 1 <= splits <= key_tiles
    assert splits == 1 or units * splits <= 3 * multiprocessors
    if key_tiles >= 4 * multiprocessors >= 8 * units:
        assert units * splits >= 0.7 * multiprocessors


def test_a_launch_of_its_own_merges_what_the_last_program_would_read_for_long():
    def by_launch(units: int, splits: int, rows: int) -> bool:
        return decode_plan.merges_by_launch(units, splits, rows, 128, 132)

    assert not by_launch(8, 4, 4) and not by_launch(32, 8, 1)  # few results, of few rows
    assert by_launch(8, 16, 4) and by_launch(1, 4, 32) and by_launch(32, 4, 8)
    assert not by_launch(64, 4, 32) and by_launch(64, 8, 32)  # the last programs of many merge side by side


def test_a_growing_cache_compiles_nothing_new(launched):
    """Lengths change sizes and strides, and of what a kernel is compiled for at most whether its last tile is whole.

    Now and then another tile or merge becomes the best; each is compiled once.
    """
    described = collections.defaultdict(set)
    for length in range(2000, 2064):
        query, key = (torch.empty(1, heads, rows, 64, dtype=torch.float16) for heads, rows in ((4, 1), (2, length)))
        attention.forward(query, key, key, None, None, 0.0, False, 1.0, torch.empty_like(query), None, False)
        (plan,) = attention._plans.values()
        _, types, constants, divisors, tile = plan.launch._description
        kind = (*types.items(), *constants.items(), *sorted(divisors.items()))
        described[tile, constants["MERGE"]].add(kind)
        attention._plans.clear()
    assert len(described) <= 2 and all(len(kinds) <= 2 for kinds in described.values())


@pytest.mark.parametrize("queries", [1, 16, 17])
@pytest.mark.parametrize("logsumexp", [False, True])
def test_which_kernel_runs(launched, queries, logsumexp):
    query, key = (torch.empty(1, 2, length, 64, dtype=torch.float16) for length in (queries, 100))
    statistics = torch.empty(1, 2, queries) if logsumexp else None
    attention.forward(query, key, key, None, None, 0.0, False, 1.0, torch.empty_like(query), statistics, False)
    assert launched[0][0] == ("attention_decode" if queries <= 16 and not logsumexp else "attention_forward")


@pytest.fixture
def on_a_gpu_without_a_compiler(monkeypatch):
    """Calls on a CPU are compiled for a GPU that is not there."""
    from triton.backends.compiler import GPUTarget

    monkeypatch.setattr(launch, "device_target", lambda device: GPUTarget("cuda", 80, 32))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launch, "_loaded", {})
    attention._plans.clear()
    yield
    attention._plans.clear()


def forward():
    query, key, value, out = (torch.empty(1, 2, 40, 64, dtype=torch.bfloat16) for _ in range(4))
    attention.forward(query, key, value, None, None, 0.0, False, 0.125, out, None, False)


@pytest.mark.parametrize("error", [RuntimeError("ptxas died"), OSError(28, "No space left on device")], ids=str)
def test_what_triton_cannot_compile_is_a_kernel_unavailable(on_a_gpu_without_a_compiler, monkeypatch, error):
    def broken(*arguments):
        raise error

    monkeypatch.setattr(launch, "compile_kernel", broken)
    with pytest.raises(KernelUnavailable, match=r"ptxas died|No space left"):
        forward()


def test_no_folder_for_tritons_cache_is_a_kernel_unavailable(on_a_gpu_without_a_compiler, monkeypatch, tmp_path):
    """Triton writes what it compiles to its cache, and cannot do without: a home that is read-only, say."""
    from triton import knobs

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "file" / "cache"))
    with pytest.raises(KernelUnavailable, match="Not a directory"):
        forward()


def test_a_corrupt_file_in_tritons_cache_is_a_kernel_unavailable(on_a_gpu_without_a_compiler, monkeypatch, tmp_path):
    from triton import knobs

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    with pytest.raises(KernelUnavailable):  # compiled and kept; it cannot be loaded without a GPU
        forward()
    kept = [path for path in tmp_path.rglob("*.json") if "__grp__" not in path.name]
    assert kept
    for path in kept:
        path.write_text(path.read_text()[:40])
    attention._plans.clear()
    with pytest.raises(KernelUnavailable, match=r"Triton could not compile attention_forward: .*char"):
        forward()


def test_no_memory_to_load_a_kernel_is_said_as_such(on_a_gpu_without_a_compiler, monkeypatch):
    """It may be there the next time, so it is no KernelUnavailable, after which nobody asks again."""

    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(launch, "compile_kernel", full)
    with pytest.raises(torch.OutOfMemoryError):
        forward()
