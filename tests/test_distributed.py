"""torch.distributed around attention, over gloo on a CPU: what runs on each rank is in distributed_programs.py."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile

import pytest
import torch
from hooked import ROOT

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

EAGER = "ddp,fsdp,tensor_parallel,sharded_calls,context_parallel"


class Ranks:
    """Programs on so many ranks, in processes that run from here on."""

    def __init__(self, names, ranks, device="cpu"):
        self.names = names
        self.output = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - closed by finish()
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "tests" / "distributed_programs.py"), names, str(ranks), device]
        # A group of its own, so that its ranks end with it.
        self.process = subprocess.Popen(
            command, stdout=self.output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )

    def finish(self, timeout):
        """Wait, and fail with what they said if one of them failed."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = f"still running after {timeout} s"
        self.kill()
        self.output.seek(0)
        text = self.output.read()
        self.output.close()
        assert code == 0 and f"ran {self.names}" in text, f"{code}\n{text[-8000:]}"

    def kill(self):
        """End those that are left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def launch(names, ranks, device="cpu", timeout=240):
    Ranks(names, ranks, device).finish(timeout)


def test_two_ranks():
    launch(EAGER, 2)


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks(ranks):
    # The other programs have eight heads and batches of eight, which do not go over three ranks.
    launch(EAGER if ranks == 4 else "context_parallel", ranks, timeout=500)


@pytest.mark.extended
def test_compiled_tensor_parallel():
    launch("compiled_tensor_parallel", 2, timeout=500)


def test_calls_on_dtensors_that_stay_stocks(monkeypatch):
    """One rank is enough to ask: sharded sequences, different placements, dropout, uneven shards, sums to come."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

    from torch_flashbackend.integrations import dtensor

    monkeypatch.setattr(dtensor, "_register", lambda: None)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        local = torch.randn(2, 4, 6, 8)

        def on(placement):
            return DTensor.from_local(local, mesh, [placement])

        def taken(*placements, dropout_p=0.0, mask=None):
            return dtensor.local_arguments(*(on(p) for p in placements), mask, dropout_p) is not None

        for placement in (Shard(0), Shard(1), Replicate()):
            assert taken(*3 * [placement])
            assert not taken(*3 * [placement], dropout_p=0.1)
            assert not taken(*3 * [placement], mask=torch.ones(6, 6, dtype=torch.bool))  # not a DTensor: stock's error
        for placement in (Shard(2), Shard(3), Partial()):
            assert not taken(*3 * [placement])
        assert not taken(Shard(0), Replicate(), Replicate())
        sharded = 3 * [on(Shard(0))]
        monkeypatch.setattr(type(mesh), "size", lambda self, index=None: 3)
        assert dtensor.local_arguments(*sharded, None, 0.0) is None
    finally:
        dist.destroy_process_group()
