"""The Hopper kernel for the gradient of an additive bias: values against float64, repetition, neighbouring memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common import block_pattern, gradient_for, simple_call

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.cuda_only,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (compute capability 9.0)"),
]
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
KERNEL, TRITONS = "flash_bias_gradient", "attention_backward_mask"


@pytest.fixture
def check_bias(check_call):
    """Judges a call whose mask requires a gradient, which `kernel` must compute; None: it falls off on the way."""
    from torch_flashbackend import ops

    def run(call, kernel: str | None = KERNEL) -> dict[str, Tensor]:
        ops.reset_launch_counts()
        results = check_call(call)
        counts = ops.launch_counts()
        launched = {name for name in (KERNEL, TRITONS) if counts.get(name)}
        assert launched == ({kernel} if kernel else set()), f"{call.describe()}: {counts}"
        return results

    return run


def bias(*shape: int, dtype: torch.dtype = BFLOAT, seed: int = 5) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def with_bias(mask: Tensor, batch: int, heads: int, length: int, *sizes: int, **options):
    return simple_call(batch, heads, length, *sizes, attn_mask=mask, mask_grad=True, **options)


def check_kernel(call, target: Tensor | None = None, parts: int = 2) -> None:
    """The kernel alone, on statistics from float64, against float64: errors element by element.

    parts: of how many float32 numbers a logsumexp is the sum. target: where the gradient is to be.
    """
    from torch_flashbackend.kernels.cuda import bias_gradient

    mask, scale, grad_out = call.attn_mask, call.softmax_scale, gradient_for(call)
    group = call.query.size(1) // call.key.size(1)
    query, key, value, grad = (t.double() for t in (call.query, call.key, call.value, grad_out))
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    scores = query @ key.mT * scale + mask.double()
    exact = scores.logsumexp(-1)
    seen = exact.isfinite()
    probabilities = torch.where(seen[..., None], (scores - exact[..., None]).exp(), 0.0)
    grad_probabilities = grad @ value.mT
    delta = (probabilities * grad_probabilities).sum(-1)
    sizes = [dim for dim in range(2) if mask.size(dim) != scores.size(dim)]
    expected = probabilities * (grad_probabilities - delta[..., None])
    magnitude = probabilities * (grad_probabilities.abs() + delta.abs()[..., None])
    if sizes:  # a sum over no dimension is one over all
        expected, magnitude = (terms.sum(sizes, keepdim=True) for terms in (expected, magnitude))

    high = exact.float()
    low = torch.where(seen, exact - high, 0.0).float()
    logsumexp = torch.stack((high, low)) if parts == 2 else high
    if target is None:
        target = torch.empty(mask.shape, dtype=mask.dtype, device="cuda")
    target.fill_(torch.nan)
    inputs = grad_out, call.query, call.key, call.value, mask, logsumexp
    bias_gradient.plan(*inputs, scale)(*inputs, delta.float(), target)
    rounding = torch.finfo(mask.dtype).eps / 2
    allowed = rounding * expected.abs() + 1e-4 * magnitude + 2.0**-25
    error = (target.double() - expected).abs()
    assert (error <= allowed).all(), (
        f"{call.describe()}: {(error / allowed).nan_to_num(torch.inf).max():.3g} of allowed"
    )


@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
@pytest.mark.parametrize("mask_dtype", ["query", "float32"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_tile_and_many(head_dim, mask_dtype, dtype):
    mask_dtype = SINGLE if mask_dtype == "float32" else dtype
    for batch, heads, length in ((1, 1, 128), (3, 2, 256), (2, 2, 1024), (2, 3, 520), (2, 1, 3000)):
        mask = bias(1, heads, length, length, dtype=mask_dtype)
        check_kernel(with_bias(mask, batch, heads, length, length, head_dim, dtype=dtype))


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_head_dim(head_dim):
    for mask_dtype in (BFLOAT, SINGLE):
        check_kernel(with_bias(bias(1, 3, 200, 328, dtype=mask_dtype), 2, 3, 200, 328, head_dim))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(128, 64), (64, 128), (192, 128), (16, 80)])
def test_value_head_dim_of_its_own(head_dim, head_dim_v):
    check_kernel(with_bias(bias(1, 2, 200, 256), 2, 2, 200, 256, head_dim, head_dim_v=head_dim_v))


@pytest.mark.parametrize("mask_dtype", [BFLOAT, SINGLE], ids=str)
@pytest.mark.parametrize("shape", [(1, 4), (3, 4), (1, 1), (3, 1)], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_who_shares_the_bias(shape, kv_heads, mask_dtype):
    """Batches, heads, both or nobody; enough tiles that the kernel takes a bias that twelve heads share."""
    lengths = (1048, 1048) if shape == (1, 1) else (200, 392)
    check_kernel(with_bias(bias(*shape, *lengths, dtype=mask_dtype), 3, 4, *lengths, 64, kv_heads=kv_heads))


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed"])
def test_strides(layout):
    part = bias(2, 4, 328, 520)[:, :, :300, :256]
    check_kernel(with_bias(part, 2, 4, 300, 256, 64, layout=layout if layout != "packed" else "bshd"))
    swapped = bias(4, 300, 2, 256).permute(2, 0, 1, 3)
    check_kernel(with_bias(swapped, 2, 4, 300, 256, 64))
    check_kernel(with_bias(bias(1, 4, 300, 256).expand(2, -1, -1, -1), 2, 4, 300, 256, 64))
    check_kernel(with_bias(bias(2, 1, 256, 256).expand(-1, 4, -1, -1), 2, 4, 256, 256, 64, layout=layout))


def test_a_logsumexp_in_one_part():
    check_kernel(with_bias(bias(1, 4, 300, 256), 2, 4, 300, 256, 64), parts=1)


@pytest.mark.parametrize("dtype", [BFLOAT, SINGLE], ids=str)
def test_patterns_of_hidden_and_lowest(dtype):
    """-inf and finfo.min in blocks, rows without a key included."""
    for seed in range(9):
        shape = ((1, 2), (2, 2), (2, 1))[seed % 3]
        mask = block_pattern((*shape, 264, 392), dtype, seed, block=(16, 64, 128)[seed % 3], device="cuda")
        check_kernel(with_bias(mask, 2, 2, 264, 392, (64, 128)[seed % 2]))


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.7])
def test_scale(scale):
    check_kernel(with_bias(bias(1, 2, 256, 256), 2, 2, 256, 256, 64, scale=scale))


@pytest.mark.parametrize(("rows", "keys"), [(129, 136), (2, 136), (127, 8), (250, 1000)])
def test_nothing_is_written_outside(rows, keys):
    """The gradient's neighbours in memory keep their values."""
    for dtype in (BFLOAT, SINGLE):
        call = with_bias(bias(1, 2, rows, keys, dtype=dtype), 2, 2, rows, keys, 64)
        memory = torch.full((call.attn_mask.numel() + 2 * 4096,), 7.0, device="cuda", dtype=dtype)
        check_kernel(call, memory[4096:-4096].view(call.attn_mask.shape))
        assert (memory[:4096] == 7).all() and (memory[-4096:] == 7).all()


# ---------------------------------------------------------------------------------------------------- within a backward


@pytest.mark.parametrize("mask_dtype", [BFLOAT, SINGLE], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_all_gradients(check_bias, head_dim, mask_dtype):
    for seed, (batch, heads, kv_heads) in enumerate(((2, 4, 4), (3, 4, 2))):
        mask = block_pattern((1, heads, 512, 512), mask_dtype, seed, device="cuda")
        check_bias(with_bias(mask, batch, heads, 512, 512, head_dim, kv_heads=kv_heads))


def test_large_scores_keep_what_rounding_cut_off(check_bias):
    """Rows whose scores are all -1e9: logsumexp comes in two parts."""
    check_bias(with_bias(torch.full((1, 2, 256, 256), -1e9, device="cuda"), 2, 2, 256, 256, 64))


def test_what_the_copy_engine_cannot_walk_is_tritons(check_bias):
    check_bias(with_bias(bias(1, 4, 100, 100), 2, 4, 100, 100, 64), TRITONS)
    check_bias(with_bias(bias(1, 4, 136, 129)[..., 1:], 2, 4, 136, 128, 64), TRITONS)
    check_bias(with_bias(bias(1, 4, 136, 1), 2, 4, 136, 128, 64), TRITONS)


@pytest.mark.parametrize("dtype", [BFLOAT, SINGLE], ids=str)
@pytest.mark.parametrize("shape", [(1, 4), (3, 1), (3, 4), (1, 1)], ids=str)
def test_a_bias_with_one_row(check_bias, shape, dtype):
    """Its gradient is summed with those of keys and values."""
    for length, head_dim, kv_heads in ((136, 64, 4), (1000, 128, 2)):
        mask = bias(*shape, 1, length, dtype=dtype)
        mask[..., length // 3 : length // 2] = -torch.inf
        check_bias(with_bias(mask, 3, 4, 264, length, head_dim, kv_heads=kv_heads), None)


def gradients(call, grad_out) -> Tensor:
    """Of the bias alone."""
    import torch_flashbackend.ops  # noqa: F401  defines the operators

    forward, backward = torch.ops.flashbackend.attention_forward, torch.ops.flashbackend.attention_backward
    inputs = call.query, call.key, call.value, call.attn_mask
    options = None, 0.0, False, call.softmax_scale
    out, logsumexp = forward(*inputs, *options, "query")
    return backward(grad_out, *inputs, out, logsumexp, *options, [True, True, True, True])[3]


def test_nan_behind_a_hidden_key_stays_there():
    """A column's keys are NaN, and the bias hides them from everyone."""
    mask = bias(1, 2, 256, 256)
    mask[..., 77] = -torch.inf
    call = with_bias(mask, 2, 2, 256, 256, 64)
    call.key[:, :, 77] = torch.nan
    found = gradients(call, gradient_for(call))
    assert found.isfinite().all() and found.any()
    assert not found[..., 77].any()


@pytest.mark.parametrize("dtype", [BFLOAT, SINGLE], ids=str)
def test_results_repeat(dtype):
    """A difference between two runs would be a race. The machine is full, and tiles follow each other in a block."""
    call = with_bias(bias(1, 8, 2048, 2048, dtype=dtype), 3, 8, 2048, 2048, 128)
    grad_out = gradient_for(call)
    first = gradients(call, grad_out)
    for _ in range(20):
        assert torch.equal(gradients(call, grad_out), first)


def test_a_captured_graph_reads_the_bias_of_each_replay():
    call = with_bias(bias(1, 2, 256, 256), 2, 2, 256, 256, 64)
    grad_out = gradient_for(call)
    gradients(call, grad_out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(call, grad_out)
    for seed in range(3):
        call.attn_mask.copy_(bias(1, 2, 256, 256, seed=seed))
        expected = gradients(call, grad_out)
        graph.replay()
        assert torch.equal(captured, expected)


def test_no_gradient_of_the_size_of_the_scores(plugin):
    """Beside dBias, a training step with a bias takes no more memory than one whose bias needs no gradient."""
    batch, heads, length = 4, 4, 2048
    call = with_bias(bias(1, heads, length, length), batch, heads, length, length, 64).leaves(True)
    grad_out = gradient_for(call)

    def peak(needed: bool) -> int:
        leaves = [tensor for name, tensor in call.differentiable().items() if needed or tensor is not call.attn_mask]

        def step():
            with plugin.sdpa_backend("triton"):
                return torch.autograd.grad(call.run(), leaves, grad_out)

        step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = step()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before

    peak(True)
    assert peak(True) - peak(False) <= call.attn_mask.numel() * 2 + (1 << 21)
