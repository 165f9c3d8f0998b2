"""What programs do with autograd around attention. The hook takes every call, on a CPU; float64 is the measure."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hooked import counting, hooked, leave_all, sample, take_valid
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

sdpa = F.scaled_dot_product_attention


def inputs(grad=True, dtype=torch.float32):
    """query, key, value and a mask that is trained."""
    query = sample(1, 4, 5, 8, seed=1, dtype=dtype)
    key, value = sample(1, 2, 6, 8, seed=2, dtype=dtype), sample(1, 2, 6, 8, seed=3, dtype=dtype)
    bias = sample(1, 4, 5, 6, seed=4, dtype=dtype)
    return [t.requires_grad_(grad) for t in (query, key, value, bias)]


def attend(query, key, value, bias=None, **options):
    return sdpa(query, key, value, bias, enable_gqa=query.shape[1] != key.shape[1], **options)


def in_float64(function, *arguments):
    """What PyTorch's math path says in float64."""
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in arguments]
    with sdpa_kernel(SDPBackend.MATH):
        return function(*wide)


def close(actual, expected, atol=2e-5, rtol=1e-4):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol, check_dtype=False)


@pytest.fixture
def taken():
    """The hook takes every call; at least one must come."""
    with hooked(), counting() as count:
        yield count
        assert count("triton") > 0


def test_first_and_second_derivatives(taken):
    def derivatives(*tensors):
        first = torch.autograd.grad(attend(*tensors).sin().sum(), tensors, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), tensors)
        return [*first, *second]

    for ours, expected in zip(derivatives(*inputs()), in_float64(derivatives, *inputs())):
        close(ours, expected)


def test_a_gradient_penalty_through_a_model(taken):
    """As a critic is trained: the gradient by the input is part of the loss for the weights."""

    def step(x, weight):
        heads = (x @ weight).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        out = sdpa(*heads, is_causal=True)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad((grad.norm() - 1.0).square() + out.sum(), weight)

    x, weight = sample(2, 5, 8, seed=1, grad=True), sample(8, 24, seed=2).mul(0.3).requires_grad_()
    close(step(x, weight), in_float64(step, x, weight))


@pytest.mark.parametrize("wanted", [c for n in (1, 2, 3) for c in itertools.combinations(range(4), n)], ids=str)
def test_gradients_to_some_inputs_only(taken, wanted):
    tensors = inputs(grad=False)
    for index in wanted:
        tensors[index].requires_grad_()
    out = attend(*tensors)
    grads = torch.autograd.grad(out.square().sum(), [tensors[i] for i in wanted])
    everything = in_float64(lambda *t: torch.autograd.grad(attend(*t).square().sum(), t), *inputs())
    close(grads, tuple(everything[i] for i in wanted))


def test_the_same_graph_twice_and_then_freed(taken):
    tensors = inputs()
    out = attend(*tensors)
    first = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    second = torch.autograd.grad(out.sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), tensors)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_checkpoint(taken, reentrant, dropout_p):
    def run(recompute):
        torch.manual_seed(3)
        tensors = inputs()
        block = lambda *t: attend(*t, dropout_p=dropout_p).relu()  # noqa: E731
        out = checkpoint(block, *tensors, use_reentrant=reentrant) if recompute else block(*tensors)
        return [out, *torch.autograd.grad(out.square().sum(), tensors)] if not reentrant else _backward(out, tensors)

    def _backward(out, tensors):
        out.square().sum().backward()  # the reentrant kind knows no autograd.grad
        return [out, *(t.grad for t in tensors)]

    for a, b in zip(run(True), run(False)):
        assert torch.equal(a, b)


def test_saved_tensor_hooks_see_what_is_kept(taken):
    """query, key, value, mask, output and logsumexp, as stock's fused kernels keep them; nothing of size Sq x Sk."""
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor.detach().clone()

    query, key, value, _ = inputs()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = attend(query, key, value)
    shapes = sorted(tuple(t.shape) for t in packed)
    assert shapes == sorted([tuple(t.shape) for t in (query, key, value, out)] + [tuple(query.shape[:3])])
    grads = torch.autograd.grad(out.square().sum(), (query, key, value))
    close(
        grads,
        in_float64(lambda *t: torch.autograd.grad(attend(*t).square().sum(), t), query, key, value),
    )


def test_saving_on_the_cpu(taken):
    tensors = inputs()
    with torch.autograd.graph.save_on_cpu():
        out = attend(*tensors)
    close(
        torch.autograd.grad(out.sum(), tensors),
        in_float64(lambda *t: torch.autograd.grad(attend(*t).sum(), t), *tensors),
    )


@pytest.mark.parametrize("decide", [take_valid, leave_all], ids=["ours", "stock"])
@pytest.mark.parametrize("index", range(4))
def test_changing_an_input_before_backward_raises_as_with_stock(index, decide):
    if decide is leave_all and index == 3:
        pytest.skip("stock's fused kernels for a CPU take no mask that is trained")
    with hooked(decide):
        tensors = [t * 1.0 for t in inputs()]
        tensors = tensors if index == 3 else tensors[:3]
        out = attend(*tensors)
        tensors[index].mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.square().sum().backward()


def test_changing_the_output_in_place_raises_or_is_right(taken):
    tensors = inputs()
    out = attend(*tensors)
    out.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.filterwarnings("ignore:Error detected:UserWarning")
def test_anomaly_mode_names_the_call_and_finds_nothing_where_nothing_is(taken):
    tensors = inputs()
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        attend(*tensors).sum().backward()
        assert all(torch.isfinite(t.grad).all() for t in tensors)
        broken = attend(*tensors)
        with pytest.raises(RuntimeError, match=r"_AttentionBackward.*returned nan values"):
            broken.backward(torch.full_like(broken, torch.nan))


def test_hooks_on_inputs_outputs_and_nodes(taken):
    tensors = inputs()
    seen = []
    tensors[0].register_hook(lambda grad: seen.append("query") or grad * 2.0)
    out = attend(*tensors)
    out.register_hook(lambda grad: seen.append("out"))
    out.grad_fn.register_prehook(lambda grads: seen.append("node"))
    out.sum().backward()
    assert seen == ["out", "node", "query"]
    expected = in_float64(lambda *t: torch.autograd.grad(attend(*t).sum(), t[0]), *inputs())
    close(tensors[0].grad, 2.0 * expected[0])


def test_batched_gradients(taken):
    query, key, value, _ = inputs()
    out = attend(query, key, value)
    batch = sample(3, *out.shape, seed=8)
    grads = torch.autograd.grad(out, (query, key, value), batch, is_grads_batched=True, retain_graph=True)
    for index in range(3):
        one = torch.autograd.grad(out, (query, key, value), batch[index], retain_graph=True)
        close([g[index] for g in grads], list(one))


def test_under_inference_mode_and_no_grad(taken):
    tensors = inputs()
    expected = in_float64(attend, *tensors)
    with torch.no_grad():
        out = attend(*tensors)
        assert not out.requires_grad
        close(out, expected.detach())
    with torch.inference_mode():
        out = attend(*tensors)
        assert out.is_inference()
        close(out, expected.detach())


# torch.func: stock's operations, whatever the hook would do.

TRANSFORMS = {
    "grad": lambda f, q: torch.func.grad(lambda x: f(x).square().sum())(q),
    "grad and value": lambda f, q: torch.func.grad_and_value(lambda x: f(x).square().sum())(q)[0],
    "vjp": lambda f, q: torch.func.vjp(f, q)[1](torch.ones_like(f(q)))[0],
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (torch.ones_like(q),))[1],
    "linearize": lambda f, q: torch.func.linearize(f, q)[1](torch.ones_like(q)),
    "jacrev": lambda f, q: torch.func.jacrev(f)(q),
    "jacfwd": lambda f, q: torch.func.jacfwd(f)(q),
    "hessian": lambda f, q: torch.func.hessian(lambda x: f(x).square().sum())(q),
    "grad of grad": lambda f, q: torch.func.grad(
        lambda x: torch.func.grad(lambda y: f(y).sin().sum())(x).square().sum()
    )(q),
    "vmap": lambda f, q: torch.vmap(f)(torch.stack((q, 2.0 * q))),
    "vmap of grad": lambda f, q: torch.vmap(torch.func.grad(lambda x: f(x).square().sum()))(torch.stack((q, 2.0 * q))),
    "grad of vmap": lambda f, q: torch.func.grad(lambda x: torch.vmap(f)(torch.stack((x, 2.0 * x))).square().sum())(q),
    "functionalize": lambda f, q: torch.func.functionalize(f)(q),
    "autograd.functional.hessian": lambda f, q: torch.autograd.functional.hessian(lambda x: f(x).square().sum(), q),
    "autograd.functional.jvp": lambda f, q: torch.autograd.functional.jvp(f, q, torch.ones_like(q))[1],
    "autograd.functional.vhp": lambda f, q: torch.autograd.functional.vhp(
        lambda x: f(x).square().sum(), q, torch.ones_like(q)
    )[1],
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch has no batching rule for the CPU's kernel, and says so
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("masked", [False, True])
def test_transforms(name, masked):
    query, key, value, bias = inputs(grad=False)
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    bias = bias if masked else None

    def function(x, to=lambda t: t):
        return sdpa(x, to(key), to(value), None if bias is None else to(bias))

    expected = in_float64(lambda q: TRANSFORMS[name](lambda x: function(x, torch.Tensor.double), q), query)
    with hooked():
        function(query)
        close(TRANSFORMS[name](function, query), expected)


def test_nested_derivatives_of_a_wrong_call_raise_what_stock_raises():
    query, key, value, _ = inputs(grad=False)

    def function(x):
        return torch.func.grad(lambda y: sdpa(y, key[..., :7], value).sum())(x).sum()

    with pytest.raises(RuntimeError) as expected:
        torch.func.grad(function)(query)
    with hooked(), pytest.raises(RuntimeError) as raised:
        torch.func.grad(function)(query)
    assert str(raised.value) == str(expected.value)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_functional_calls_of_modules():
    """Per-sample gradients by vmap of grad of functional_call."""
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    batch = sample(3, 5, 8)

    def loss(parameters, x):
        out = torch.func.functional_call(layer, parameters, (x[None], x[None], x[None]), {"need_weights": False})
        return out[0].square().sum()

    with hooked():
        each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, batch)
    for index in range(3):
        layer.zero_grad()
        loss(dict(layer.named_parameters()), batch[index]).backward()
        close({n: g[index] for n, g in each.items()}, {n: p.grad for n, p in layer.named_parameters()})
