"""Two GPUs in one process: calls on cuda:1 while cuda:0 is current, from the main thread and from fresh ones."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from common import check, expect, gradient_for, in_threads, results_of, simple_call

pytestmark = [
    pytest.mark.cuda_only,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
BACKENDS = ("triton", "cuda")
DEVICES = ("cuda:0", "cuda:1")
THREADS = 4


@pytest.fixture(params=BACKENDS)
def kernels(request):
    if request.param == "cuda" and any(torch.cuda.get_device_capability(device) != (9, 0) for device in DEVICES):
        pytest.skip("needs Hopper GPUs (compute capability 9.0)")
    return request.param


def test_forward_and_backward_from_threads(plugin, launched, note, kernels):
    """A length that all threads share, and one of each thread's own, whose plan is made there: on both devices."""
    lengths = [256, *(320 + 64 * index for index in range(THREADS))]
    calls, gradients, expected, found = {}, {}, {}, []
    for device in DEVICES:
        for length in lengths:
            call = simple_call(1, 4, length, head_dim=64, kv_heads=2, is_causal=True, device=device, seed=length)
            calls[device, length], gradients[device, length] = call, gradient_for(call)
            expected[device, length] = expect(call, gradients[device, length])
    for device in DEVICES:
        torch.cuda.synchronize(device)

    def work(index):
        with plugin.sdpa_backend(kernels):
            for length in (lengths[1 + index], lengths[0]):
                for device in ("cuda:1", "cuda:0", "cuda:1"):
                    results = results_of(calls[device, length], gradients[device, length])
                    found.append((device, length, results))
                    assert torch.cuda.current_device() == 0

    with torch.cuda.device(0), launched():
        in_threads(work, THREADS)
        assert torch.cuda.current_device() == 0
    assert len(found) == 6 * THREADS
    for device, length, results in found:
        assert all(str(result.device) == device for result in results.values())
        note(check(results, expected[device, length], None, f"{device}, length {length}, from a thread"))


def test_the_first_thing_that_a_thread_does(plugin, launched, kernels):
    """A new thread has no CUDA context. What it finds as the current device afterwards is what it would have found."""
    calls = [simple_call(1, 4, 300 + 20 * index, head_dim=64, device="cuda:1", seed=index) for index in range(THREADS)]
    torch.cuda.synchronize("cuda:1")
    outputs, current = {}, {}

    def work(index):
        call = calls[index]
        with plugin.sdpa_backend(kernels):
            outputs[index] = F.scaled_dot_product_attention(call.query, call.key, call.value)
        current[index] = torch.cuda.current_device()

    with torch.cuda.device(0), launched():
        in_threads(work, THREADS)
    assert set(current.values()) == {0}
    with torch.cuda.device(1), plugin.sdpa_backend(kernels):
        for index, call in enumerate(calls):
            assert torch.equal(outputs[index], F.scaled_dot_product_attention(call.query, call.key, call.value))


def random(*shape, dtype=torch.bfloat16, grad=False, seed=0):
    generator = torch.Generator(device="cuda:1").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda:1", dtype=dtype).requires_grad_(grad)


def with_gradients(function, *inputs):
    out = function()
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)]


def masked(plugin, floating):
    query, key, value = (random(2, 4, 200, 64, grad=True, seed=seed) for seed in range(3))
    mask = random(2, 1, 200, 200, seed=3, grad=floating)
    inputs = [query, key, value, *([mask] if floating else [])]
    given = mask if floating else mask > -0.5
    return with_gradients(lambda: F.scaled_dot_product_attention(query, key, value, given), *inputs)


def dropped(plugin):
    torch.manual_seed(3)
    query, key, value = (random(2, 4, 200, 64, grad=True, seed=seed) for seed in range(3))
    return with_gradients(lambda: F.scaled_dot_product_attention(query, key, value, dropout_p=0.3), query, key, value)


def decoding(plugin):
    query, key = random(1, 8, 1, 64), random(1, 2, 5000, 64, seed=1)
    return [F.scaled_dot_product_attention(query, key, key, enable_gqa=True)]


def packed(plugin):
    query, key, value = (random(700, 4, 64, grad=True, seed=seed) for seed in range(3))
    ends = torch.tensor([0, 300, 420, 700], device="cuda:1", dtype=torch.int32)
    return with_gradients(
        lambda: plugin.attention_varlen(query, key, value, ends, ends, 300, 300, is_causal=True), query, key, value
    )


def cached(plugin):
    from torch_flashbackend import kv_cache

    query, new = random(2, 1, 8, 64), [random(2, 1, 2, 64, seed=seed) for seed in (1, 2)]
    caches = [random(2, 600, 2, 64, seed=seed) for seed in (3, 4)]
    lengths = torch.tensor([500, 333], device="cuda:1", dtype=torch.int32)
    return [kv_cache.attend(query, *caches, *new, cache_seqlens=lengths, causal=True), *caches]


def by_the_operators_name(plugin, backend):
    """Autograd's threads have their device set; whoever calls the operator may not."""
    query, key, value, grad_out = (random(1, 4, 256, 64, seed=seed) for seed in range(4))
    operators = torch.ops.flashbackend
    out, logsumexp = operators.attention_forward(
        query, key, value, None, None, 0.0, True, 0.125, "query", backend
    )  # fmt: skip
    gradients = operators.attention_backward(
        grad_out, query, key, value, None, out, logsumexp, None, 0.0, True, 0.125, [True, True, True, False], backend
    )
    return [out, logsumexp, *gradients[:3]]


def by_stocks_operators(plugin):
    """What the kernel hook takes: aten's own operators, whose kernels have a device guard in C++ and ours must too."""
    query, key, value = (random(1, 4, 256, 64, grad=True, seed=seed) for seed in range(3))
    aten = torch.ops.aten
    return with_gradients(
        lambda: aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0], query, key, value
    )


PROGRAMS = {
    "bool mask": (lambda plugin: masked(plugin, False), "triton"),
    "bias with gradient": (lambda plugin: masked(plugin, True), "triton"),
    "dropout": (dropped, "triton"),
    "decoding": (decoding, "triton"),
    "packed": (packed, None),
    "cached": (cached, None),
    "operators, triton": (lambda plugin: by_the_operators_name(plugin, "triton"), None),
    "operators, cuda": (lambda plugin: by_the_operators_name(plugin, "cuda"), None),
    "stock's operators": (by_stocks_operators, None),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_on_another_device_than_the_current(plugin, launched, take_everything, name):
    """The same, whichever device is current, and from a thread too. Gradients may be summed in another order."""
    program, backend = PROGRAMS[name]

    def run():
        if backend is None:
            return program(plugin)
        with plugin.sdpa_backend(backend):
            return program(plugin)

    with torch.cuda.device(1), launched():
        expected = run()
    with torch.cuda.device(0), launched():
        found = [run()]
        assert torch.cuda.current_device() == 0

        def work():
            found.append(run())
            assert torch.cuda.current_device() == 0

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    torch.cuda.synchronize("cuda:1")
    assert len(found) == 2
    for results in found:
        for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
            assert result.device == wanted.device == torch.device("cuda:1")
            error = (result.double() - wanted.double()).norm() / wanted.double().norm()
            assert error < 1e-3, (name, index, error)
