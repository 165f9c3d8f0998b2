"""PyTorch's modules and a vision transformer of timm on our kernels; mixed precision, streams, threads, copies."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from test_modules import FORMS, HEADS, KEYS, MASKS, WIDTH
from torch import nn

from common import in_threads

pytestmark = pytest.mark.cuda_only


def agree(make, call, inputs, dtype, launched, factor=3.0):
    """Output and gradients of a module: ours err from float64 by at most `factor` times stock's error."""
    import torch_flashbackend

    def run(dtype):
        torch.manual_seed(0)
        module = make().to("cuda", dtype)
        out = call(module, *(t.to("cuda", dtype) for t in inputs))
        grads = torch.autograd.grad(out.double().square().sum(), [p for p in module.parameters() if p.requires_grad])
        return [out.detach().double(), *(g.double() for g in grads)]

    torch_flashbackend.disable()
    truth, stock = run(torch.float64), run(dtype)
    torch_flashbackend.enable()
    with launched():
        ours = run(dtype)
    floor = 4 * torch.finfo(dtype).eps
    for expected, theirs, result in zip(truth, stock, ours):
        scale = expected.abs().max()
        limit = factor * max((theirs - expected).abs().max(), floor * scale)
        assert (result - expected).abs().max() <= limit


@pytest.mark.parametrize("form", [f for f in FORMS if f != "dropout"])
@pytest.mark.parametrize("mask", MASKS)
def test_multihead_attention(plugin, launched, take_everything, form, mask):
    options = {
        name: (m if m.dtype == torch.bool else m.float()).cuda() for name, m in MASKS[mask].items()
    }  # fmt: skip

    def call(layer, query, key, value):
        if not layer.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        masks = {n: m if m.dtype == torch.bool else m.to(query.dtype) for n, m in options.items()}
        return layer(query, key, value, need_weights=False, **masks)[0]

    generator = torch.Generator().manual_seed(0)
    widths = (WIDTH, FORMS[form].get("kdim", WIDTH), FORMS[form].get("vdim", WIDTH))
    inputs = [torch.randn(2, n, w, generator=generator) for n, w in zip((6, KEYS, KEYS), widths)]
    agree(lambda: nn.MultiheadAttention(WIDTH, HEADS, **FORMS[form]), call, inputs, torch.float32, launched)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_transformer(plugin, launched, take_everything, dtype):
    mask = nn.Transformer.generate_square_subsequent_mask(120).cuda()

    def call(model, x):
        return model(x, x.roll(1, 0), tgt_mask=mask.to(x.dtype), tgt_is_causal=True)

    inputs = [torch.randn(2, 120, 64, generator=torch.Generator().manual_seed(0))]
    make = lambda: nn.Transformer(64, 4, 1, 1, 128, dropout=0.0, batch_first=True)  # noqa: E731
    agree(make, call, inputs, dtype, launched)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_vision_transformer(plugin, launched, take_everything, dtype):
    timm = pytest.importorskip("timm")
    make = lambda: timm.create_model("vit_tiny_patch16_224", img_size=96, depth=2, num_classes=10)  # noqa: E731
    inputs = [torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))]
    agree(make, lambda model, x: model(x), inputs, dtype, launched)


def test_sentence_encoder(plugin, launched, take_everything):
    """Pooled embeddings of a BERT, as sentence-transformers makes them; random weights."""
    pytest.importorskip("sentence_transformers")
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    torch.manual_seed(0)
    model = transformers.BertModel(config).to("cuda").eval()
    tokens = torch.randint(0, 1000, (3, 60), device="cuda")
    padding = torch.ones_like(tokens)
    padding[1, 40:] = 0

    def embed():
        with torch.no_grad():
            states = model(tokens, attention_mask=padding).last_hidden_state
        kept = padding[..., None].to(states.dtype)
        return F.normalize((states * kept).sum(1) / kept.sum(1), dim=-1)

    plugin.disable()
    expected = embed()
    plugin.enable()
    with launched():
        result = embed()
    assert (result * expected).sum(-1).min() > 1 - 1e-5


def test_mixed_precision_training(plugin, launched, take_everything):
    def train():
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
        for seed in range(3):
            optimizer.zero_grad()
            x = torch.randn(2, 100, 64, generator=torch.Generator().manual_seed(seed)).cuda()
            with torch.autocast("cuda", torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 256.0
        return [p.detach() for p in model.parameters()]

    plugin.disable()
    expected = train()
    plugin.enable()
    with launched():
        result = train()
    for ours, theirs in zip(result, expected):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-2)


def test_streams_and_threads(plugin, launched, take_everything):
    """Each thread on its own stream, several lengths at once: every answer is that of the same call alone."""
    calls = {}
    for index in range(4):
        generator = torch.Generator().manual_seed(index)
        shape = (2, 4, 128 + 40 * index, 64)
        calls[index] = [torch.randn(shape, generator=generator).to("cuda", torch.float16) for _ in range(3)]
    with launched():
        expected = {index: F.scaled_dot_product_attention(*qkv, is_causal=True) for index, qkv in calls.items()}
    torch.cuda.synchronize()
    wrong = []

    def work(index):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(30):
                out = F.scaled_dot_product_attention(*calls[index], is_causal=True)
                if not torch.equal(out, expected[index]):
                    wrong.append(index)

    in_threads(work, len(calls))
    assert not wrong


def test_copies_of_models_and_named_kernels(plugin, launched, take_everything):
    torch.manual_seed(0)
    model = nn.TransformerDecoderLayer(64, 4, 128, dropout=0.0, batch_first=True).cuda()
    x = torch.randn(2, 100, 64, device="cuda")
    with launched():
        expected = model(x, x)
        assert torch.equal(copy.deepcopy(model)(x, x), expected)
        with torch.profiler.profile() as profile:
            model(x, x).sum().backward()
            torch.cuda.synchronize()
    names = {event.name for event in profile.events()}
    assert {"flashbackend::attention_forward", "flashbackend::attention_backward"} <= names
    assert any("attention_forward" in n and "::" not in n for n in names), sorted(names)


def test_memory_snapshots_show_where_attention_allocates(plugin, launched, take_everything):
    torch.cuda.memory._record_memory_history(max_entries=1000)
    try:
        query = torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.float16, requires_grad=True)
        with launched():
            F.scaled_dot_product_attention(query, query, query).sum().backward()
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    frames = [f for trace in snapshot["device_traces"] for event in trace for f in event.get("frames", [])]
    assert any("torch_flashbackend" in frame["filename"] for frame in frames)
