"""PyTorch's attention modules with the hook on: every form of their masks, training and inference, copies of them."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from hooked import counting, hooked, run_python, sample
from torch import nn

BATCH, LENGTH, KEYS, WIDTH, HEADS = 2, 6, 7, 16, 4


def padding(keys=KEYS):
    mask = torch.zeros(BATCH, keys, dtype=torch.bool)
    mask[1, keys - 2 :] = True  # True: not to be seen
    return mask


def as_float(mask):
    return torch.zeros(mask.shape).masked_fill(mask, -torch.inf)


CAUSAL = torch.ones(LENGTH, KEYS, dtype=torch.bool).triu(1)
# One mask for each head of each batch.
OWN = torch.stack([CAUSAL.roll(i, 1) & CAUSAL for i in range(BATCH * HEADS)])
MASKS = {
    "none": {},
    "bool": {"attn_mask": CAUSAL},
    "float": {"attn_mask": as_float(CAUSAL)},
    "per head": {"attn_mask": OWN},
    "per head, float": {"attn_mask": as_float(OWN)},
    "padding": {"key_padding_mask": padding()},
    "padding, float": {"key_padding_mask": as_float(padding())},
    "both": {"attn_mask": CAUSAL, "key_padding_mask": padding()},
    "both, per head": {"attn_mask": OWN, "key_padding_mask": padding()},
}
FORMS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "other widths": {"kdim": 12, "vdim": 20},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "no bias": {"bias": False},
    "dropout": {"dropout": 0.3},
}


def run_attention(form, mask, need_weights=False, training=True):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, HEADS, **FORMS[form]).train(training)
    query, key, value = (
        sample(BATCH, length, width, seed=seed)
        for seed, (length, width) in enumerate(((LENGTH, WIDTH), (KEYS, layer.kdim), (KEYS, layer.vdim)))
    )
    inputs = [query, key, value] if layer.batch_first else [t.transpose(0, 1) for t in (query, key, value)]
    torch.manual_seed(1)
    out, weights = layer(*inputs, need_weights=need_weights, **MASKS[mask])
    if not training:
        return [out.detach(), weights]
    grads = torch.autograd.grad(out.square().sum(), list(layer.parameters()))
    return [out.detach(), weights, *grads]


@pytest.mark.parametrize("form", [f for f in FORMS if f != "dropout"])
@pytest.mark.parametrize("mask", MASKS)
def test_multihead_attention(form, mask):
    expected = run_attention(form, mask)
    with hooked(), counting() as count:
        torch.testing.assert_close(run_attention(form, mask), expected)
        assert count("triton") == 1


def test_multihead_attention_with_weights_or_dropout():
    expected = run_attention("plain", "both", need_weights=True)
    with hooked(), counting() as count:
        torch.testing.assert_close(run_attention("plain", "both", need_weights=True), expected)
        assert count("triton") == 0  # it multiplies and normalises by itself
        first, second = run_attention("dropout", "both"), run_attention("dropout", "both")
        torch.testing.assert_close(first, second)
        assert count("triton") == 2


@pytest.mark.parametrize("mask", ["none", "padding"])
def test_the_inference_fast_path_is_left_alone(mask):
    """One fused operator of PyTorch's, which calls no attention that could be hooked."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    x = sample(BATCH, KEYS, WIDTH)
    with torch.no_grad():
        expected = layer(x, x, x, need_weights=False, **MASKS[mask])[0]
        with hooked(), counting() as count, torch.profiler.profile() as profile:
            torch.testing.assert_close(layer(x, x, x, need_weights=False, **MASKS[mask])[0], expected)
        assert any("_native_multi_head_attention" in event.name for event in profile.events())
        assert count("triton") == 0
    # With gradients the same module goes through F.scaled_dot_product_attention.
    with hooked(), counting() as count:
        torch.testing.assert_close(layer(x, x, x, need_weights=False, **MASKS[mask])[0], expected)
        assert count("triton") == 1


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2), lambda model, x: model(x, src_key_padding_mask=padding(x.shape[1]))


def causal_encoder():
    model, _ = encoder()
    mask = nn.Transformer.generate_square_subsequent_mask(KEYS)
    return model, lambda model, x: model(x, mask=mask, is_causal=True)


def decoder():
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True, norm_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(KEYS)
    return nn.TransformerDecoder(layer, 2), lambda model, x: model(x, x.roll(1, 0), tgt_mask=mask, tgt_is_causal=True)


def whole():
    torch.manual_seed(0)
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 32, dropout=0.0, batch_first=True)
    return model, lambda model, x: model(x, x.roll(1, 0), src_key_padding_mask=padding(x.shape[1]))


@pytest.mark.filterwarnings("ignore:.*nested.*:UserWarning")
@pytest.mark.parametrize("make", [encoder, causal_encoder, decoder, whole])
@pytest.mark.parametrize("training", [True, False])
def test_transformer_layers(make, training):
    def run():
        model, call = make()
        model.train(training)
        x = sample(BATCH, KEYS, WIDTH)
        if not training:
            with torch.no_grad():
                return [call(model, x)]
        out = call(model, x)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), list(model.parameters()))]

    expected = run()
    with hooked(), counting() as count:
        torch.testing.assert_close(run(), expected, atol=2e-5, rtol=1e-4)
        # The encoder's inference has a fast path of its own.
        assert (count("triton") > 0) == (training or make in (decoder, whole))


def test_vision_transformer():
    timm = pytest.importorskip("timm", exc_type=ImportError)

    def run():
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5)
        out = model(sample(2, 3, 32, 32))
        return [out.detach(), *torch.autograd.grad(out.square().sum(), list(model.parameters()))]

    expected = run()
    with hooked(), counting() as count:
        torch.testing.assert_close(run(), expected, atol=2e-5, rtol=1e-4)
        assert count("triton") == 2


def test_mixed_precision_training():
    """Autocast, scaled gradients, unscaled for clipping, one step: as with stock, within bfloat16's rounding."""

    def train():
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for seed in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(sample(BATCH, KEYS, WIDTH, seed=seed)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return [p.detach() for p in model.parameters()]

    expected = train()
    with hooked(), counting() as count:
        torch.testing.assert_close(train(), expected, atol=4e-3, rtol=4e-2)
        assert count("triton") == 2


def test_a_float_mask_is_cast_by_autocast_as_stocks_is():
    query, key, value = (sample(1, 2, 8, 16, seed=i) for i in range(3))
    mask = sample(8, 8, seed=5)
    with torch.autocast("cpu", torch.bfloat16):
        expected = nn.functional.scaled_dot_product_attention(query, key.bfloat16(), value, mask)
        with hooked(), counting() as count:
            out = nn.functional.scaled_dot_product_attention(query, key.bfloat16(), value, mask)
            assert count("triton") == 1
    assert out.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    # Without autocast, several dtypes are stock's error.
    with hooked(), pytest.raises(RuntimeError, match="dtype"):
        nn.functional.scaled_dot_product_attention(query, key.bfloat16(), value)


def test_copies_of_models_and_of_results():
    model, call = decoder()
    x = sample(BATCH, KEYS, WIDTH)
    with hooked(), counting() as count:
        expected = call(model, x)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
            assert torch.equal(call(other, x), expected)
        assert count("triton") == 16
        result = pickle.loads(pickle.dumps(expected.detach()))
        assert torch.equal(result, expected) and type(result) is torch.Tensor


def test_the_profiler_and_the_flop_counter_name_what_runs():
    query, key, value = (sample(1, 2, 8, 16, seed=i, grad=True) for i in range(3))
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as stock:
        nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()
    with hooked():
        for _ in range(3):  # a call that is remembered shows the same
            with torch.profiler.profile() as profile:
                nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()
            names = {event.name for event in profile.events()}
            assert {"flashbackend::attention_forward", "flashbackend::attention_backward"} <= names
            with FlopCounterMode(display=False) as ours:
                nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()
            # Forward and backward; stock's kernel for a CPU is not counted at all.
            assert ours.get_total_flops() == 7 * 2 * 2 * 8 * 8 * 16 >= stock.get_total_flops()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers(method):
    """Data loaders and pools inherit the plugin (fork), or switch it on by the environment (spawn)."""
    out = run_python(
        """
        import torch, torch_flashbackend, multiprocessing
        import torch.nn.functional as F
        from hooked import hooked, counting, sample
        qkv = [sample(1, 2, 8, 16, seed=i) for i in range(3)]

        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                with hooked() if not torch_flashbackend.is_enabled() else counting():
                    return index, torch_flashbackend.is_enabled(), F.scaled_dot_product_attention(*qkv).sum()

        if __name__ == "__main__":
            expected = F.scaled_dot_product_attention(*qkv).sum()
            torch_flashbackend.enable()
            loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork")
            for index, enabled, result in loader:
                assert enabled.all()
                torch.testing.assert_close(result, expected[None])
            print("ran")
        """
        if method == "fork"
        else """
        import torch, torch_flashbackend
        from concurrent.futures import ProcessPoolExecutor
        import multiprocessing
        torch_flashbackend.enable()
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            assert pool.submit(torch_flashbackend.is_enabled).result() is True
        print("ran")
        """,
        **({"TORCH_FLASHBACKEND": "1"} if method == "spawn" else {}),
    )
    assert out.strip() == "ran"
