"""What each rank of tests/test_distributed.py and tests/gpu/test_gpu_distributed.py runs; one function per test.

python distributed_programs.py NAME RANKS DEVICE     starts RANKS processes: gloo on a CPU, NCCL on GPUs
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

HEADS, HEAD_DIM, WIDTH, LENGTH = 8, 64, 64, 16
# The Hopper kernels take half precision alone, and the portable ones run what is left.
DTYPES = {"cpu": [torch.float32], "cuda": [torch.float32, torch.bfloat16]}
# Of a result's norm. Sums in another order, and in half precision a rounding of each step on the way; a part that is
# missing, counted twice or not summed errs by more than a tenth.
TOLERANCE = {("cpu", torch.float32): 1e-5, ("cuda", torch.float32): 1e-4, ("cuda", torch.bfloat16): 0.05}
# What a rank waits for the others before it gives up.
PATIENCE = datetime.timedelta(seconds=60)


class Block(nn.Module):
    """Causal self-attention with as many heads as its projections have rows for."""

    def __init__(self) -> None:
        super().__init__()
        # Without biases: the key's has no gradient but rounding.
        self.query, self.key, self.value = (nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False) for _ in range(3))
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x):
        heads = (p(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for p in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


def model(device, dtype):
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(device, dtype)


def batch(device, dtype, size=8):
    return torch.randn(size, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).to(device, dtype)


@contextlib.contextmanager
def on(device):
    """The plugin, taking every call that it can."""
    import torch_flashbackend
    from torch_flashbackend import decisions, policy

    if device == "cpu":
        from hooked import hooked

        with hooked():
            yield
        return
    verdict = policy.Verdict(True, "test", "taken for a test")
    with mock.patch.object(policy, "judge", lambda problem, backend: verdict):
        decisions.forget()
        torch_flashbackend.enable()
        try:
            yield
        finally:
            torch_flashbackend.disable()
            decisions.forget()


def took() -> int:
    """How many calls ours has had since the last question."""
    from torch_flashbackend import stats

    counts = stats()
    total = sum(counts.total(backend, kind) for backend in ("cuda", "triton") for kind in ("calls", "traced"))
    stats.reset_stats()
    return total


def close(actual, expected, what=""):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (what, actual.dtype, actual.shape)
    tolerance = TOLERANCE[expected.device.type, expected.dtype]
    difference, norm = ((actual.double() - expected.double()).norm().item(), expected.double().norm().item())
    assert difference <= tolerance * norm, f"{what}: {difference:.3g} of {norm:.3g}, {tolerance} of it is allowed"


def gradients_alone(device, dtype):
    """Of the whole batch, on one rank, without the plugin."""
    alone = model(device, dtype)
    alone(batch(device, dtype)).square().mean().backward()
    return {name: p.grad for name, p in alone.named_parameters()}


def ddp(rank, ranks, device):
    for dtype in DTYPES[device]:
        expected = gradients_alone(device, dtype)
        wrapped = nn.parallel.DistributedDataParallel(model(device, dtype))
        with on(device):
            took()
            wrapped(batch(device, dtype).chunk(ranks)[rank]).square().mean().backward()
            assert took() == 2
        for name, parameter in wrapped.module.named_parameters():
            close(parameter.grad, expected[name], name)


def fsdp(rank, ranks, device):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (ranks,))
    for dtype in DTYPES[device]:
        expected = gradients_alone(device, dtype)
        sharded = model(device, dtype)
        for block in sharded:
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        with on(device):
            took()
            sharded(batch(device, dtype).chunk(ranks)[rank]).square().mean().backward()
            assert took() == 2
        for name, parameter in sharded.named_parameters():
            close(parameter.grad.full_tensor(), expected[name], name)


def tensor_parallel(rank, ranks, device):
    """Heads over ranks; attention itself on plain tensors, and on DTensors, without a collective of its own."""
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(device, (ranks,))
    for dtype in DTYPES[device]:
        expected = gradients_alone(device, dtype)
        for local in (True, False):
            parallel = model(device, dtype)
            plan = {name: ColwiseParallel(use_local_output=local) for name in ("query", "key", "value")}
            for block in parallel:
                parallelize_module(block, mesh, {**plan, "out": RowwiseParallel()})
            with on(device):
                took()
                with CommDebugMode() as communication:
                    loss = parallel(batch(device, dtype)).square().mean()
                assert took() == 2
                counts = communication.get_comm_counts()
                # Each block sums its output once.
                assert sum(counts.values()) == 2, counts
                with CommDebugMode() as communication:
                    loss.backward()
                # Each of the three projections sums the gradient of its input, if that is wanted.
                counts = {str(name): count for name, count in communication.get_comm_counts().items()}
                assert not any("all_gather" in name for name in counts), counts
            for name, parameter in parallel.named_parameters():
                grad = parameter.grad
                close(grad.full_tensor() if hasattr(grad, "full_tensor") else grad, expected[name], name)


def sharded_calls(rank, ranks, device):
    """Every placement of batch and heads, masks, grouped heads: values, gradients, and no collective in attention."""
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh(device, (ranks,))
    for dtype in DTYPES[device]:
        generator = torch.Generator().manual_seed(2)

        def random(*shape, dtype=dtype, generator=generator):
            return torch.randn(shape, generator=generator).to(device, dtype)

        query, key, value = random(4, 8, 9, 16), random(4, 4, 11, 16), random(4, 4, 11, 16)
        masks = {"none": None}
        if dtype == torch.float32:  # in half precision the masks are the same kernels' business
            masks |= {
                "bool": random(4, 1, 9, 11) > -1.0,
                "float": random(1, 8, 9, 11),
                "shared float": random(1, 1, 9, 11),
            }
        for name, mask in masks.items():
            one_mask(device, mesh, (query, key, value), name, mask)
        # The same operator with other flags, at sizes not met so far: what it gives is described anew each time.
        query, key, value = (t[:, :, :7] for t in (query, key, value))
        with on(device):
            for wanted in ([True, False, False], [False, True, True], [True, True, True]):
                inputs = [leaf(t, mesh, Shard(1)) for t in (query, key, value)]
                for tensor, wants in zip(inputs, wanted):
                    tensor.requires_grad_(wants)
                grads = run(inputs, None)[1:]
                full = run([leaf(t) for t in (query, key, value)], None)[1:]
                for grad, expected_grad in zip(grads, [g for g, wants in zip(full, wanted) if wants]):
                    close(grad.full_tensor(), expected_grad, f"gradients wanted: {wanted}")
    for backend in ("triton", "cuda"):
        a_backend_by_name(mesh, [t.to(DTYPES[device][-1]) for t in (query, key, value)], backend)


def a_backend_by_name(mesh, tensors, backend):
    """The operators' last argument, which is not there where it is the default, changes nothing for the others."""
    from torch.distributed.tensor import Shard

    forward, backward = (
        getattr(torch.ops.flashbackend, name).default for name in ("attention_forward", "attention_backward")
    )
    results = []
    with torch.no_grad():
        for placement in (None, Shard(1)):
            inputs = [leaf(t, mesh, placement) for t in tensors]
            out, logsumexp = forward(*inputs, None, None, 0.0, False, 0.25, "query", backend)
            wanted = [True, True, True, False]
            grads = backward(out, *inputs, None, out, logsumexp, None, 0.0, False, 0.25, wanted, backend)
            results.append([t.full_tensor() if placement else t for t in (out, logsumexp, *grads[:3])])
    for name, whole, sharded in zip(("out", "logsumexp", "query", "key", "value"), *results):
        close(sharded, whole, f"{name} by {backend}")


def run(inputs, mask, enable_grad=True):
    out = F.scaled_dot_product_attention(*inputs, mask, enable_gqa=True)
    if not enable_grad:
        return [out]
    wanted = [t for t in (*inputs, mask) if t is not None and t.requires_grad]
    return [out, *torch.autograd.grad(out.square().sum(), wanted)]


def leaf(tensor, mesh=None, placement=None):
    """A leaf like it, distributed over the mesh if there is one; what has one entry is not sharded."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    if tensor is None:
        return None
    if placement is not None:
        if placement.is_shard() and tensor.shape[placement.dim] == 1:
            placement = Replicate()
        tensor = distribute_tensor(tensor.clone(), mesh, [placement])
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def one_mask(device, mesh, tensors, name, mask):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    expected = run([leaf(t) for t in tensors], leaf(mask))
    for placement in (Replicate(), Shard(0), Shard(1)):
        inputs = [leaf(t, mesh, placement) for t in tensors]
        sharded_mask = leaf(mask, mesh, placement)
        with on(device):
            took()
            with CommDebugMode() as communication:
                out = F.scaled_dot_product_attention(*inputs, sharded_mask, enable_gqa=True)
                grad_out = torch.ones_like(out)
                torch.autograd.grad(out, inputs, grad_out)
            assert sum(communication.get_comm_counts().values()) == 0, (name, placement)
            assert took() == 1, (name, placement)
            assert tuple(out.placements) == (placement,)
            results = run(inputs, sharded_mask)
            with torch.no_grad():
                results += run(inputs, sharded_mask, False)
        for result, wanted in zip(results, [*expected, expected[0]]):
            close(result.full_tensor(), wanted, f"mask {name}, {placement}")


def compiled_tensor_parallel(rank, ranks, device):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    x = batch(device, torch.float32)
    expected = model(device, torch.float32)(x)
    parallel = model(device, torch.float32)
    mesh = init_device_mesh(device, (ranks,))
    plan = {name: ColwiseParallel() for name in ("query", "key", "value")}
    for block in parallel:
        parallelize_module(block, mesh, {**plan, "out": RowwiseParallel()})
    with on(device):
        took()
        close(torch.compile(parallel, backend="aot_eager", fullgraph=True)(x).detach(), expected.detach())
        assert took() > 0


def context_parallel(rank, ranks, device):
    """PyTorch's ring attention, the sequence over the ranks: its own collectives, our kernels in the kernel hook."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import context_parallel as parallel
    from torch.distributed.tensor.experimental._attention import _cp_options, context_parallel_unshard
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh(device, (ranks,))
    length, dtype = 64 * ranks, torch.float16 if device == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(2, 4, length, 64, generator=generator).to(device, dtype) for _ in range(3)]

    def attend(query, key, value, is_causal):
        if device == "cuda":
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        # What the function ends in on a GPU; on a CPU it ends elsewhere, which the ring does not know.
        sharded = (DTensor.from_local(t, mesh, [Shard(2)]) for t in (query, key, value))
        return torch.ops.aten._scaled_dot_product_flash_attention(*sharded, 0.0, is_causal)[0].to_local()

    choices = [SDPBackend.FLASH_ATTENTION]
    if device == "cuda":
        choices += [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    for backend in choices:
        for is_causal in (False, True):
            wide = [t.double().requires_grad_() for t in whole]
            with sdpa_kernel(SDPBackend.MATH):
                truth = F.scaled_dot_product_attention(*wide, is_causal=is_causal)
                truth_grads = torch.autograd.grad(truth.square().sum(), wide)
            buffers = [t.clone() for t in whole]
            _cp_options.enable_load_balance = is_causal  # the ring takes it for causal attention alone
            # Ours count as flash: with another backend chosen first, it must be among those that are left.
            chosen = sdpa_kernel([backend, SDPBackend.FLASH_ATTENTION], set_priority=True)
            with ring_kernels(device), chosen, parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
                leaves = [t.detach().requires_grad_() for t in buffers]
                out = attend(*leaves, is_causal)
                grads = torch.autograd.grad(out.square().sum(), leaves)
                out, *grads = context_parallel_unshard(mesh, [out.detach(), *grads], [2] * 4)
            for result, expected in zip([out, *grads], [truth, *truth_grads]):
                # Each rank's part is rounded to half precision before the parts are added.
                error = ((result.double() - expected).norm() / expected.norm()).item()
                assert error <= 4 * torch.finfo(dtype).eps, (backend, is_causal, error)


@contextlib.contextmanager
def ring_kernels(device):
    """Our kernels behind stock's operators; forward and backward must have come at least once."""
    if device == "cuda":
        from torch_flashbackend import ops

        with on(device):
            ops.reset_launch_counts()
            yield
            names = " ".join(ops.launch_counts())
        assert "forward" in names and "backward" in names, names
        return
    from hooked import hooked

    with hooked(kernel_key="CPU"), torch.profiler.profile() as profile:
        yield
    names = {event.name for event in profile.events()}
    assert {"flashbackend::attention_forward", "flashbackend::attention_backward"} <= names, names


def _rank(rank, name, ranks, device, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    options = {"rank": rank, "world_size": ranks, "timeout": PATIENCE}
    if device == "cuda":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **options)
    try:
        for one in name.split(","):
            globals()[one](rank, ranks, device)
            dist.barrier()
    finally:
        dist.destroy_process_group()


def main() -> None:
    import socket

    name, ranks, device = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (name, ranks, device, port), nprocs=ranks)
    print("ran", name)


if __name__ == "__main__":
    main()
