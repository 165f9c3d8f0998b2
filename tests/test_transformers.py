"""attn_implementation="flashbackend" in Hugging Face transformers, and models behind "sdpa", on a CPU."""

from __future__ import annotations

import contextlib
import pickle
import sys
import warnings
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hooked import ROOT, counting, hooked, run_python, sample

import torch_flashbackend
from torch_flashbackend.integrations import on_import
from torch_flashbackend.integrations import transformers as integration

transformers = pytest.importorskip("transformers", minversion="5.0")
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
from examples import architectures  # noqa: E402


@pytest.fixture(autouse=True)
def _registered():
    transformers.logging.set_verbosity_error()
    integration.register()
    yield
    torch_flashbackend.disable()


def llama(implementation="flashbackend", **options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**architectures.GROUPED, "num_hidden_layers": 1, **options})
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=implementation).eval()


def padded_batch(length=12):
    return architectures.inputs_of("text", length, "cpu", torch.float32)


# Registration.


def test_enabling_neither_imports_transformers_nor_forgets_it():
    """Whichever comes first, in a process of its own; the module ends up with its own loader."""
    out = run_python("""
        import sys, torch, torch_flashbackend
        torch_flashbackend.enable()
        assert "transformers" not in sys.modules
        def ours():
            waiting = [f for f in sys.meta_path if type(f).__module__.startswith("torch_flashbackend")]
            return [finder for finder in waiting if finder.name.startswith("transformers")]
        assert len(ours()) == 1
        import transformers.modeling_utils as models
        assert not ours()
        from importlib.machinery import SourceFileLoader
        assert type(models.__loader__) is type(models.__spec__.loader) is SourceFileLoader
        import inspect
        assert "class AttentionInterface" in inspect.getsource(models)
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
        assert "flashbackend" in models.ALL_ATTENTION_FUNCTIONS and "flashbackend" in masks
        print("waited")
    """)
    assert out.strip() == "waited"
    out = run_python("""
        import transformers.modeling_utils as models
        import torch_flashbackend
        assert "flashbackend" not in models.ALL_ATTENTION_FUNCTIONS
        torch_flashbackend.enable()
        assert "flashbackend" in models.ALL_ATTENTION_FUNCTIONS
        print("at once")
    """)
    assert out.strip() == "at once"


def test_disabling_before_transformers_is_imported_leaves_no_finder(monkeypatch):
    before = list(sys.meta_path)
    monkeypatch.setattr(integration, "MODELS", "no_such_module_of_transformers")
    torch_flashbackend.enable()
    waiting = [finder.name for finder in sys.meta_path if finder not in before]
    assert "no_such_module_of_transformers" in waiting  # another may wait for nested tensors
    torch_flashbackend.disable()
    assert sys.meta_path == before


def test_a_module_that_is_imported_by_somebody_else(tmp_path, monkeypatch):
    (tmp_path / "waited_for.py").write_text("VALUE = 1\n")
    (tmp_path / "broken_one.py").write_text("raise ValueError('mine')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    calls = []
    on_import.when_imported("waited_for", lambda: calls.append(sys.modules["waited_for"].VALUE))
    with pytest.raises(ImportError):
        import waited_for_not  # noqa: F401
    assert not calls
    import waited_for

    assert calls == [1] and waited_for.__spec__.loader is waited_for.__loader__
    assert Path(waited_for.__file__).parent == tmp_path
    on_import.when_imported("waited_for", lambda: calls.append(2))
    assert calls == [1, 2]
    # An error of the module is its own, and the next attempt is waited for again.
    call = lambda: calls.append(3)  # noqa: E731
    on_import.when_imported("broken_one", call)
    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            import broken_one  # noqa: F401
    on_import.cancel(call)
    assert calls == [1, 2] and not [f for f in sys.meta_path if isinstance(f, on_import._Finder)]


def test_an_interface_that_has_changed_is_a_warning(monkeypatch):
    monkeypatch.setattr(integration, "register", lambda: {}["gone"])
    with pytest.warns(RuntimeWarning, match='"flashbackend" is not available with transformers'):
        torch_flashbackend.enable()
    assert torch_flashbackend.is_enabled()


def test_the_name_is_accepted_wherever_it_is_given():
    model = llama()
    assert model.config._attn_implementation == integration.ALIAS
    assert "flash" not in integration.ALIAS and "sdpa" not in integration.ALIAS
    other = llama("sdpa")
    other.set_attn_implementation("flashbackend")
    assert other.config._attn_implementation == integration.ALIAS
    other.set_attn_implementation("eager")
    assert other.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="not supported"):
        llama("flashback")
    tokens = padded_batch()
    for copy in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copy(**tokens).logits, model(**tokens).logits)


def test_a_model_that_computes_attention_itself_is_refused():
    with pytest.raises(ValueError, match="does not use transformers' attention interface"):
        transformers.FalconForCausalLM._from_config(
            transformers.FalconConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2),
            attn_implementation="flashbackend",
        )


# Architectures.


@contextlib.contextmanager
def by_the_hook(device):
    with hooked():
        yield


@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_architecture_agrees_with_stock(name):
    """Forward and backward, with the call hook taking every call as on a GPU; on a CPU the math path stands in."""
    result = architectures.compare(name, using=by_the_hook)
    assert result.agrees, result
    # Soft-capped scores are nobody's kernel.
    assert (result.calls > 0) == ("softcap" not in architectures.ARCHITECTURES[name].note)


# Arguments of the interface.


class Attention(torch.nn.Module):
    is_causal = True


def inputs(length=12, heads=4, kv_heads=2):
    return sample(2, heads, length, 8), sample(2, kv_heads, length, 8, seed=1), sample(2, kv_heads, length, 8, seed=2)


def expected_of(query, key, value, mask):
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    return F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2)


def test_the_window_is_honoured_where_no_mask_says_it():
    query, key, value = inputs()
    distance = torch.arange(12)[:, None] - torch.arange(12)
    call = integration.attention_forward
    causal = (distance >= 0) & (distance < 4)
    torch.testing.assert_close(
        call(Attention(), query, key, value, sliding_window=4)[0], expected_of(query, key, value, causal)
    )
    both = distance.abs() < 4
    torch.testing.assert_close(
        call(Attention(), query, key, value, sliding_window=4, is_causal=False)[0], expected_of(query, key, value, both)
    )
    # One query of a decoder is at the last key.
    one = query[:, :, -1:]
    torch.testing.assert_close(
        call(Attention(), one, key, value, sliding_window=4)[0], expected_of(one, key, value, causal[-1:])
    )
    # A mask says all that there is to say.
    mask = sample(2, 1, 12, 12, seed=5) > -1.0
    torch.testing.assert_close(
        call(Attention(), query, key, value, mask, sliding_window=4)[0], expected_of(query, key, value, mask)
    )


def test_the_first_tokens_of_a_static_cache_see_nothing_behind_them():
    query, key, value = inputs()
    out = integration.attention_forward(Attention(), query[:, :, :5], key, value)[0]
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    torch.testing.assert_close(out, expected_of(query[:, :, :5], key[:, :, :5], value[:, :, :5], causal))


@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_a_position_bias_is_added_and_gets_its_gradient(mask):
    query, key, value = inputs()
    bias = sample(1, 4, 12, 12, seed=4, grad=True)
    attn_mask = None if mask is None else sample(2, 1, 12, 12, seed=5) > -1.0
    seen = torch.ones(12, 12, dtype=torch.bool).tril() if attn_mask is None else attn_mask
    whole = torch.where(seen, bias, torch.finfo(torch.float32).min)
    if mask == "float":
        attn_mask = torch.zeros(attn_mask.shape).masked_fill(~attn_mask, torch.finfo(torch.float32).min)
    out = integration.attention_forward(Attention(), query, key, value, attn_mask, position_bias=bias)[0]
    expected = expected_of(query, key, value, whole)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), bias), torch.autograd.grad(expected.square().sum(), bias)
    )


def test_softcap_is_computed_and_said_once(monkeypatch):
    monkeypatch.setattr(integration, "_warned", set())
    query, key, value = inputs()
    scores = query @ key.repeat_interleave(2, 1).mT * 8**-0.5
    scores = (0.5 * torch.tanh(scores / 0.5)).masked_fill(~torch.ones(12, 12, dtype=torch.bool).tril(), -torch.inf)
    with pytest.warns(RuntimeWarning, match="softcap runs in plain PyTorch"):
        out = integration.attention_forward(Attention(), query, key, value, softcap=0.5)[0]
    torch.testing.assert_close(out, (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration.attention_forward(Attention(), query, key, value, softcap=0.5)


def test_what_would_be_wrong_to_leave_out_is_refused():
    query, key, value = inputs()
    for name in ("indices", "block_indices"):
        with pytest.raises(NotImplementedError, match=name):
            integration.attention_forward(Attention(), query, key, value, **{name: torch.zeros(1)})


def test_runs_on_with_the_plugin_off_and_where_only_a_block_chooses():
    query, key, value = inputs()
    expected = integration.attention_forward(Attention(), query, key, value)[0]
    with hooked(), counting() as count:
        torch.testing.assert_close(integration.attention_forward(Attention(), query, key, value)[0], expected)
        assert count("triton") == 1
    with torch_flashbackend.sdpa_backend("math"):
        torch.testing.assert_close(integration.attention_forward(Attention(), query, key, value)[0], expected)


# What models do around attention.


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("implementation", ["sdpa", "flashbackend"])
def test_generating(implementation, options):
    tokens = padded_batch()
    # Padded on the left, as for generating.
    tokens = {name: t.flip(1) for name, t in tokens.items()}
    options = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True, **options}
    expected = llama("eager").generate(**tokens, **options)
    model = llama(implementation)
    with hooked(), counting() as count:
        assert torch.equal(model.generate(**tokens, **options), expected)
        assert count("triton") > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    tokens = padded_batch()

    def gradients(model):
        model.train()
        embedded = model.get_input_embeddings()(tokens["input_ids"])
        out = model(inputs_embeds=embedded, attention_mask=tokens["attention_mask"], use_cache=False)
        out.logits.square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    expected = gradients(llama("sdpa"))
    model = llama("flashbackend")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with hooked(), counting() as count:
        torch.testing.assert_close(gradients(model), expected)
        assert count("triton") == 2


def test_adapters():
    peft = pytest.importorskip("peft")
    tokens = padded_batch()
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, r=4)

    def run(implementation):
        model = llama(implementation)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config)
        out = model(**tokens).logits
        out.square().sum().backward()
        return out.detach(), [p.grad for p in model.parameters() if p.requires_grad]

    expected = run("sdpa")
    with hooked(), counting() as count:
        torch.testing.assert_close(run("flashbackend"), expected)
        assert count("triton") == 1


def test_compiled_in_one_graph():
    tokens = padded_batch()
    model = llama()
    expected = model(**tokens, use_cache=False).logits
    with hooked(), counting() as count:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(**tokens, use_cache=False).logits, expected)
        assert count("triton") > 0
