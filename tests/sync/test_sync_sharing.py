"""Parameters in shared memory: one host, several hosts (simulated), optimizers, and ranks that die."""

from __future__ import annotations

import contextlib
import copy
import gc
import multiprocessing
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from spawn import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks
from ddp_hooks.sync import sharing

WORLD_SIZES = [2, 3]
SHARED_MEMORY = Path("/dev/shm")


def make_model(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 8), nn.Linear(8, 8))
    model[0].weight = nn.Parameter(model[0].weight.detach().to(memory_format=torch.channels_last))
    model[4].weight = nn.Parameter(model[4].weight.detach()[::2])  # a view of a longer storage
    model[4].bias = model[3].bias  # tied
    model.register_parameter("view", nn.Parameter(model[3].weight.detach()[0]))  # a view of another parameter
    model.register_parameter("empty", nn.Parameter(torch.empty(0)))
    model.register_parameter("wide", nn.Parameter(torch.randn(3).double()))
    return model


@contextlib.contextmanager
def pretend_hosts(*hosts):
    """Let `share_parameters` believe that these groups of ranks are hosts."""
    rank = dist.get_rank()
    original = sharing.shared_memory_identity
    sharing.shared_memory_identity = lambda: next(f"host {i}" for i, ranks in enumerate(hosts) if rank in ranks)
    try:
        yield
    finally:
        sharing.shared_memory_identity = original


def assert_same(a, b):
    assert torch.equal(a.detach().contiguous(), b.detach().contiguous())


def shared_files():
    return {path for path in SHARED_MEMORY.glob(f"torch_{os.getpid()}_*")}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_one_host(rank):
    model = make_model(rank)
    expected = make_model(0)
    strides = [p.stride() for p in model.parameters()]
    own_buffer = model[1].running_mean.fill_(rank)
    shared = ddp_hooks.sync.share_parameters(model)
    world_size = dist.get_world_size()
    assert shared.hosts == (tuple(range(world_size)),)
    assert shared.writer == (rank == 0)
    assert shared.active
    # Values of rank 0; strides, ties and views as before; buffers private.
    for actual, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert_same(actual, wanted)
    assert [p.stride() for p in model.parameters()] == strides
    assert model[4].bias is model[3].bias
    assert model.view.data_ptr() == model[3].weight.data_ptr()
    assert model[1].running_mean.eq(rank).all()
    assert model[1].running_mean.data_ptr() == own_buffer.data_ptr()
    assert len({p.untyped_storage().data_ptr() for p in model.parameters() if p.numel()}) == 1
    # What one rank writes, all have.
    shared.barrier()
    with torch.no_grad():
        if rank == world_size - 1:
            model[3].weight[2, 2] = 42
    shared.barrier()
    assert model[3].weight[2, 2] == 42
    # Broadcasts and averages send nothing.
    for report in (
        ddp_hooks.sync.broadcast_parameters(model, 1, buffers=False),
        ddp_hooks.sync.average_parameters(model, buffers="ignore", weights=rank + 1),
        ddp_hooks.sync.broadcast_parameters(model, 1, buffers=False, async_op=True).wait(),
    ):
        assert (report.messages, report.payload_bytes) == (0, 0)
        assert report.tensor_bytes == shared.shared_bytes or report.tensor_bytes > 0
    report = ddp_hooks.sync.average_parameters(model)
    assert report.payload_bytes == sum(buffer.nbytes for buffer in model.buffers())
    assert model[1].running_mean.eq((world_size - 1) / 2).all()
    assert ddp_hooks.sync.verify_replicas(model, raise_on_difference=True).in_step
    with pytest.raises(ValueError, match="not shared yet"):
        ddp_hooks.sync.share_parameters(model)
    # Private again.
    shared.release()
    assert not shared.active
    assert model[3].weight[2, 2] == 42
    assert [p.stride() for p in model.parameters()] == strides
    assert model.view.data_ptr() == model[3].weight.data_ptr()
    with torch.no_grad():
        model[3].weight.fill_(rank)
    dist.barrier()
    assert model[3].weight.eq(rank).all()
    assert ddp_hooks.sync.broadcast_parameters(model).payload_bytes > 0
    shared.release()


@on_ranks(3)
def test_two_hosts(rank):
    model = make_model(rank)
    with pretend_hosts((0, 1), (2,)), ddp_hooks.sync.share_parameters(model) as shared:
        assert shared.hosts == ((0, 1), (2,))
        assert shared.writer == (rank != 1)
        for actual, wanted in zip(model.parameters(), make_model(0).parameters(), strict=True):
            assert_same(actual, wanted)

        def drift():
            shared.barrier()
            if shared.writer:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(10.0 * shared.host_of(rank))
            shared.barrier()

        # A broadcast from a rank that takes no part in the collective: its host's first rank sends for it.
        drift()
        report = ddp_hooks.sync.broadcast_parameters(model, 1, buffers=False)
        assert all(parameter.eq(0).all() for parameter in model.parameters())
        assert (report.payload_bytes == 0) == (rank == 1)
        drift()
        ddp_hooks.sync.broadcast_parameters(model, 2, buffers=False)
        assert all(parameter.eq(10).all() for parameter in model.parameters())
        # The mean is over ranks; the first host has two.
        drift()
        ddp_hooks.sync.average_parameters(model, buffers="ignore")
        for parameter in model.parameters():
            torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 10 / 3))
        drift()
        report = ddp_hooks.sync.average_parameters(model, buffers="ignore", weights=[1, 2, 5], async_op=True).wait()
        for parameter in model.parameters():
            torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 50 / 8))
        assert ddp_hooks.sync.verify_replicas(model.parameters(), raise_on_difference=True).in_step
    assert not shared.active


def batch(rank, step):
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(100 * step + rank))


@on_ranks(3)
def test_one_optimizer_a_host_trains_as_one_a_rank(rank):
    """DDP with one writing rank a host takes the same steps as DDP with an optimizer on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 8))
    usual = DistributedDataParallel(copy.deepcopy(model))
    with pretend_hosts((0, 2), (1,)):
        shared = ddp_hooks.sync.share_parameters(model)
    ours = DistributedDataParallel(model)
    usual_optimizer = torch.optim.Adam(usual.parameters())
    optimizer = torch.optim.Adam(ours.parameters())
    for step in range(3):
        usual_optimizer.zero_grad()
        usual(batch(rank, step)).square().mean().backward()
        usual_optimizer.step()

        optimizer.zero_grad()
        ours(batch(rank, step)).square().mean().backward()
        if shared.writer:
            optimizer.step()
        shared.barrier()
        for a, b in zip(usual.parameters(), ours.parameters(), strict=True):
            assert_same(a, b)
    assert bool(optimizer.state) == shared.writer
    shared.release()


@on_ranks(2)
def test_memory_goes_with_the_module(rank):
    gc.collect()  # of what earlier tests left in cycles, on every rank
    dist.barrier()
    before = shared_files()
    model = make_model()
    shared = ddp_hooks.sync.share_parameters(model)
    if shared.writer:
        assert len(shared_files()) == len(before) + 1
    del model
    gc.collect()
    dist.barrier()
    assert not shared.active
    assert shared_files() == before
    # Its address may serve another tensor now, which must not be taken for shared.
    assert ddp_hooks.sync.broadcast_parameters(torch.ones(1000)).payload_bytes == 4000


@on_ranks(2)
def test_first_ranks_of_hosts_meet_whatever_groups_they_are_in(rank):
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    for weight in (1, 2):
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, weight + rank)
        with pretend_hosts([0], [1]):
            shared = ddp_hooks.sync.share_parameters(model)
        assert len(shared.hosts) == 2
        assert (model.weight == weight).all()
        shared.release()


@on_ranks(2)
def test_every_rank_waits_where_one_still_holds_the_memory(rank):
    model = nn.Linear(2, 2)
    shared = ddp_hooks.sync.share_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if shared.writer else None
    del model
    gc.collect()
    assert shared.active == (optimizer is not None)
    shared.release()
    shared.release()
    assert not shared.active
    assert ddp_hooks.sync.broadcast_parameters(torch.ones(1000)).payload_bytes == 4000


@on_ranks(2)
def test_refusals(rank):
    with pytest.raises(TypeError, match="received list"):
        ddp_hooks.sync.share_parameters([torch.ones(2)])
    with pytest.raises(ValueError, match="meta device"):
        ddp_hooks.sync.share_parameters(nn.Linear(2, 2, device="meta"))
    module = nn.Linear(2, 2)
    module.weight.data.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="parameter 'weight' needs 16 bytes, but its storage has 0"):
        ddp_hooks.sync.share_parameters(module)
    module = nn.Linear(2, 2)
    module.register_buffer("view", module.weight.detach()[0])
    with pytest.raises(ValueError, match="buffer 'view' is a view of a parameter"):
        ddp_hooks.sync.share_parameters(module)
    # Memory layouts have to be alike too, because it is the same memory.
    module = nn.Conv2d(2, 2, 2)
    if rank:
        module.to(memory_format=torch.channels_last)
    pointers = [p.data_ptr() for p in module.parameters()]
    with pytest.raises(ddp_hooks.errors.RanksDisagreeError, match=r"parameter 'weight' is .*strides"):
        ddp_hooks.sync.share_parameters(module)
    # Shared on one rank only: seen before anything is sent.
    module = nn.Linear(2, 2)
    shared = ddp_hooks.sync.share_parameters(module)
    if rank:
        module.weight.data = module.weight.detach().clone()
    with pytest.raises(ddp_hooks.errors.RanksDisagreeError, match=r"\(shared\) on rank 0"):
        ddp_hooks.sync.broadcast_parameters(module)
    shared.release()
    assert ddp_hooks.sync.broadcast_parameters(module).payload_bytes == 24
    # No room: an error everywhere, and nothing has changed.
    module = nn.Conv2d(2, 2, 2)
    pointers = [p.data_ptr() for p in module.parameters()]
    original = sharing._create_block
    sharing._create_block = _no_room
    try:
        with pytest.raises(RuntimeError, match=r"rank 0 could not create .* No space left.*/dev/shm"):
            ddp_hooks.sync.share_parameters(module)
    finally:
        sharing._create_block = original
    assert pointers == [p.data_ptr() for p in module.parameters()]
    # An empty module has nothing to share, and that is fine.
    empty = ddp_hooks.sync.share_parameters(nn.ReLU())
    assert empty.shared_bytes <= 64
    empty.release()


def _no_room(block_bytes, peers):
    raise OSError("No space left on device")


@on_ranks(3)
def test_a_group_that_is_not_everybody(rank):
    pair = dist.new_group([0, 1])
    if rank == 2:
        return
    module = nn.Linear(2, 2)
    shared = ddp_hooks.sync.share_parameters(module, process_group=pair)
    single = dist.new_group([rank], use_local_synchronization=True)
    with pytest.raises(ValueError, match="expected the process group over which parameter 'weight' is shared"):
        ddp_hooks.sync.broadcast_parameters(module, process_group=single)
    assert ddp_hooks.sync.average_parameters(module, process_group=pair).payload_bytes == 0
    shared.release()


def _share_and_wait(rank, world_size, store_file, ready):
    dist.init_process_group(
        "gloo", store=dist.FileStore(store_file, world_size), rank=rank, world_size=world_size,
        timeout=timedelta(seconds=30),
    )  # fmt: skip
    module = nn.Linear(100, 100)
    shared = ddp_hooks.sync.share_parameters(module)
    ready.send((len(shared_files()), shared.shared_bytes))
    time.sleep(60)


@pytest.mark.thorough
def test_shared_memory_is_removed_when_ranks_are_killed(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=_share_and_wait, args=(rank, 2, str(tmp_path / "store"), theirs), daemon=True)
        process.start()
        processes.append(process)
        pipes.append(ours)
    try:
        assert all(pipe.poll(60) for pipe in pipes)
        assert [pipe.recv()[0] for pipe in pipes] == [1, 0]  # one block, which rank 0 has made
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
            process.join(10)
        deadline = time.monotonic() + 20
        while list(SHARED_MEMORY.glob(f"torch_{processes[0].pid}_*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not list(SHARED_MEMORY.glob(f"torch_{processes[0].pid}_*"))
    finally:
        for process in processes:
            process.kill()
