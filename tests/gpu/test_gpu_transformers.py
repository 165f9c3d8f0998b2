"""Hugging Face models on our kernels: architectures against stock and float64, sinks, generation, compiled training."""

from __future__ import annotations

import pytest
import torch
from sink_cases import MASKS, judge_sinks, sink_call

transformers = pytest.importorskip("transformers", minversion="5.0")
from examples import architectures  # noqa: E402


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_architecture_agrees_with_stock(launched, device, name, dtype):
    softcapped = "softcap" in architectures.ARCHITECTURES[name].note
    with launched(not softcapped):
        result = architectures.compare(name, device, dtype, seqlen=200)
    assert result.agrees, result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_sinks(launched, note, device, mask, dtype):
    from torch_flashbackend.sinks import attention_with_sinks

    call = sink_call(mask, dtype, device, sizes=(2, 8, 2, 200, 328, 64)).leaves()
    with launched():
        out = attention_with_sinks(
            call.query, call.key, call.value, call.sinks, call.attn_mask, 0.0, call.is_causal, enable_gqa=True
        )
        grad_out = torch.randn_like(out)
        inputs = call.inputs()
        grads = torch.autograd.grad(out, list(inputs.values()), grad_out)
    note(judge_sinks(call, {"out": out.detach(), **dict(zip(inputs, grads))}, grad_out))


def decoder(implementation, device, name="Llama", dtype=torch.float32):
    return architectures.make(architectures.ARCHITECTURES[name], implementation, device, dtype)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 3}], ids=str)
def test_generating(plugin, device, take_everything, options):
    tokens = architectures.inputs_of("text", 64, device, torch.float32)
    tokens = {name: t.flip(1) for name, t in tokens.items()}
    options = {"max_new_tokens": 8, "do_sample": False, "disable_compile": True, **options}
    plugin.disable()
    expected = decoder("eager", device).generate(**tokens, **options)
    plugin.enable()
    for implementation in ("sdpa", "flashbackend"):
        assert torch.equal(decoder(implementation, device).generate(**tokens, **options), expected)


@pytest.mark.parametrize("name", ["Llama", "gpt-oss", "T5", "ModernBERT"])
def test_compiled_training_step(plugin, launched, device, take_everything, name):
    architecture = architectures.ARCHITECTURES[name]
    inputs = architectures.inputs_of(architecture.inputs, 128, device, torch.float32)
    eager = architectures.step(decoder("flashbackend", device, name), inputs)
    model = decoder("flashbackend", device, name)
    model.forward = torch.compile(model.forward)
    with launched():
        compiled = architectures.step(model, inputs)
    for key, value in eager.items():
        torch.testing.assert_close(compiled[key], value, atol=1e-3 * value.abs().max().item() + 1e-6, rtol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(plugin, launched, device, take_everything, reentrant):
    inputs = architectures.inputs_of("text", 128, device, torch.float32)

    def gradients(model):
        model.train()
        embedded = model.get_input_embeddings()(inputs["input_ids"])
        out = model(inputs_embeds=embedded, attention_mask=inputs["attention_mask"], use_cache=False)
        out.logits.square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients(decoder("flashbackend", device))
    model = decoder("flashbackend", device)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with launched():
        results = gradients(model)
    for name, grad in expected.items():
        torch.testing.assert_close(results[name], grad, atol=1e-4 * grad.abs().max().item() + 1e-6, rtol=0)
