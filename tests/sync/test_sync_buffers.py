"""BufferSync: what each mode does to buffers, and what it sends."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from spawn import on_ranks, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks

WORLD_SIZES = [2, 3]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 2)
        self.register_buffer("table", torch.zeros(1000))

    def forward(self, x):
        return self.linear(self.norm(x)) + self.table[0]


def batch(rank, step):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank)) + rank


def buffers(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def train(ddp, rank, steps):
    for step in range(steps):
        ddp(batch(rank, step)).sum().backward()


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def _as_ddp(rank, mode):
    plain, ours = DistributedDataParallel(Model()), DistributedDataParallel(Model())
    buffer_sync = ddp_hooks.sync.BufferSync(ours, mode)
    for step in range(4):
        plain(batch(rank, step)).sum().backward()
        ours(batch(rank, step)).sum().backward()
        # DDP broadcasts before a forward, so after it every rank has its own statistics again, in both.
        assert_same(buffers(plain.module), buffers(ours.module))
        for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
        if step == 1:
            for module in (plain.module, ours.module):
                module.table.fill_(5 + rank)  # a buffer changed on purpose, on every rank differently
    stats = buffer_sync.stats()
    assert stats.forwards == 4
    assert stats.dense_bytes == 4 * sum(buffer.nbytes for buffer in ours.buffers())
    return stats


@pytest.mark.parametrize("mode", ["broadcast", "changed"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_these_modes_do_what_ddp_does(world_size, mode):
    stats = run_ranks(world_size, _as_ddp, mode)
    assert all(s == stats[0] for s in stats)
    table, norm, record = 4000, 2 * 16 + 8, 64
    if mode == "broadcast":
        assert stats[0].payload_bytes == 4 * (table + norm + record)
    else:
        # All in the first forward, the statistics in every other, the table again after it was changed.
        masks = 4 * 4
        assert stats[0].payload_bytes == 2 * table + 4 * norm + 4 * record + masks
        assert stats[0].saved_bytes > 7000
    assert stats[0].syncs == 4


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_changed_sends_nothing_when_nothing_changed(rank):
    ddp = DistributedDataParallel(Model()).eval()
    buffer_sync = ddp_hooks.sync.BufferSync(ddp, "changed")
    for step in range(5):
        ddp(batch(rank, step)).sum().backward()
    # In evaluation nothing changes: the first forward sends everything once, the others one record.
    stats = buffer_sync.stats()
    assert stats.syncs == 1
    assert stats.payload_bytes == sum(buffer.nbytes for buffer in ddp.buffers()) + 4 + 5 * 64
    # A change that no version counter sees, on a rank that is not the source, is undone all the same.
    if rank == 1:
        ddp.module.table.numpy()[7] = 3.0
    ddp(batch(rank, 9))
    assert ddp.module.table.eq(0).all()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_average(rank):
    ddp = DistributedDataParallel(Model())
    ddp_hooks.sync.BufferSync(ddp, "average")
    ddp.module.norm.running_mean.fill_(rank)
    ddp.module.norm.num_batches_tracked.fill_(10 * rank)
    ddp.eval()
    ddp(batch(rank, 0))
    world_size = dist.get_world_size()
    assert ddp.module.norm.running_mean.eq((world_size - 1) / 2).all()
    assert ddp.module.norm.num_batches_tracked.item() == 10 * (world_size - 1)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_before_eval_averages_once(rank):
    world_size = dist.get_world_size()
    ddp = DistributedDataParallel(Model())
    buffer_sync = ddp_hooks.sync.BufferSync(ddp, "before_eval")
    alone = Model()
    for step in range(3):
        ddp(batch(rank, step)).sum().backward()
        alone(batch(rank, step))
    assert_same(buffers(ddp.module), buffers(alone))  # nothing was exchanged in forwards
    means = [None] * world_size
    dist.all_gather_object(means, alone.norm.running_mean)
    assert buffer_sync.stats().syncs == 0
    assert ddp.eval() is ddp
    assert not ddp.training
    assert not ddp.module.training
    torch.testing.assert_close(ddp.module.norm.running_mean, torch.stack(means).mean(dim=0))
    assert ddp.module.norm.num_batches_tracked.item() == 3
    assert ddp_hooks.sync.verify_replicas(ddp.module.buffers(), raise_on_difference=True).in_step
    # Once: eval() again, or in evaluation already, sends nothing.
    ddp.eval()
    with torch.no_grad():
        ddp(batch(rank, 0))
    stats = buffer_sync.stats()
    assert stats.syncs == 1
    assert stats.payload_bytes == sum(buffer.nbytes for buffer in ddp.buffers()) + 64
    assert stats.forwards == 4
    assert stats.saved_bytes > 0
    assert ddp.train().training
    ddp.eval()
    assert buffer_sync.stats().syncs == 2
    # Given back: DDP's own behaviour.
    buffer_sync.remove()
    assert "train" not in vars(ddp)
    ddp.train()
    ddp.eval()
    assert buffer_sync.stats().syncs == 2
    ddp_hooks.sync.BufferSync(ddp, "never")


@on_ranks(2)
def test_before_eval_hears_of_a_compiled_module(rank):
    ddp = DistributedDataParallel(Model())
    # On one rank evaluation begins before there is anything to average: what follows is decided alike all the same.
    if rank:
        ddp.eval()
    compiled = torch.compile(ddp, backend="eager")
    buffer_sync = ddp_hooks.sync.BufferSync(compiled if rank else ddp, "before_eval")
    # Compiled on every rank, then on one only.
    for syncs, called in enumerate((compiled, ddp if rank else compiled), 1):
        ddp.module.norm.running_mean.fill_(rank)
        assert not called.eval().training
        assert not ddp.training
        assert not ddp.module.training
        assert ddp.module.norm.running_mean.eq(0.5).all()
        called.eval()
        assert buffer_sync.stats().syncs == syncs
        called.train()
        assert ddp.module.training
    # What writes the attribute itself has trained, too.
    compiled.eval()
    ddp.training = True
    ddp.eval()
    assert buffer_sync.stats().syncs == 4


@on_ranks(2)
def test_what_the_user_put_over_train_stays(rank):
    ddp = DistributedDataParallel(Model())
    calls = []

    def under(mode=True):
        calls.append("under")
        return DistributedDataParallel.train(ddp, mode)

    ddp.train = under
    buffer_sync = ddp_hooks.sync.BufferSync(ddp, "before_eval")
    ours = ddp.train

    def over(mode=True):
        calls.append("over")
        return ours(mode)

    ddp.eval()
    assert (calls, buffer_sync.stats().syncs) == (["under"], 1)
    # Removed under somebody else's, ours stays in the chain and sends nothing.
    ddp.train = over
    buffer_sync.remove()
    assert ddp.train is over
    if rank == 0:
        assert ddp.train() is ddp
        assert not ddp.eval().module.training
        assert calls == ["under", *["over", "under"] * 2]
    assert buffer_sync.stats().syncs == 1
    # Another one begins anew, and gives back what it found.
    second = ddp_hooks.sync.BufferSync(ddp, "before_eval")
    ddp.train()
    ddp.eval()
    assert (second.stats().syncs, buffer_sync.stats().syncs) == (1, 1)
    second.remove()
    second.remove()
    assert ddp.train is over


@on_ranks(2)
def test_never(rank):
    ddp = DistributedDataParallel(Model())
    buffer_sync = ddp_hooks.sync.BufferSync(ddp, "never")
    alone = Model()
    for step in range(3):
        ddp(batch(rank, step)).sum().backward()
        alone(batch(rank, step))
    assert_same(buffers(ddp.module), buffers(alone))
    stats = buffer_sync.stats()
    assert (stats.syncs, stats.payload_bytes) == (0, 0)
    assert stats.saved_bytes == stats.dense_bytes > 0


@on_ranks(2)
def test_no_sync_deepcopy_and_pickle(rank):
    ddp = DistributedDataParallel(Model())
    buffer_sync = ddp_hooks.sync.BufferSync(ddp, "before_eval")
    with ddp.no_sync():
        ddp(batch(rank, 0)).sum().backward()
    ddp(batch(rank, 1)).sum().backward()
    ddp.eval()
    assert buffer_sync.stats().syncs == 1
    ddp.train()
    for clone in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        # The copy has a BufferSync of its own and leaves the original alone.
        assert clone.buffer_hook.buffer_comm_hook_state is not buffer_sync
        clone.eval()
        assert ddp.training
        assert not clone.training
        assert buffer_sync.stats().syncs == 1
        assert clone.buffer_hook.buffer_comm_hook_state.stats().syncs == 2


@on_ranks(2)
def test_join_works_before_eval_and_is_refused_in_forwards(rank):
    ddp = DistributedDataParallel(Model())
    ddp_hooks.sync.BufferSync(ddp, "before_eval")
    with ddp.join():
        for step in range(2 + rank):
            ddp(batch(rank, step)).sum().backward()
    ddp.eval()
    assert ddp_hooks.sync.verify_replicas(ddp, gradients=False).in_step
    ddp = DistributedDataParallel(Model())
    ddp_hooks.sync.BufferSync(ddp, "broadcast")
    with ddp.join(), pytest.raises(RuntimeError, match=r"expected no ddp.join\(\).*'before_eval'"):
        ddp(batch(rank, 0))
    with pytest.raises(RuntimeError, match="switched on after the block ends"):
        ddp(batch(rank, 0))
    with ddp.join(enable=False):
        pass
    ddp(batch(rank, 0)).sum().backward()


@pytest.mark.parametrize("mode", ["broadcast", "average", "changed"])
@on_ranks(2)
def test_a_buffer_that_can_no_longer_be_written_is_an_error_on_all(rank, mode):
    ddp = DistributedDataParallel(Model())
    ddp_hooks.sync.BufferSync(ddp, mode)
    ddp.module.table.fill_(rank)
    if rank:
        ddp.module.table = torch.zeros(1).expand(1000)
        error, match = ValueError, "buffer 'table' is expanded"
    else:
        error, match = ddp_hooks.errors.RanksDisagreeError, "rank 1 refused: .*buffer 'table' is expanded"
    with pytest.raises(error, match=match):
        ddp(batch(rank, 0))
    assert ddp.module.table.eq(0).all()


# To the end of the process: who drops the last reference to a gloo group holds the GIL and waits for the group's
# threads, and one of those may want the GIL for a tensor of its last collective.
_kept_groups = []


@pytest.mark.parametrize("mode", ["broadcast", "average", "changed", "before_eval"])
@on_ranks(2)
def test_a_destroyed_group_is_named(rank, mode):
    group = dist.new_group([0, 1])
    _kept_groups.append(group)
    ddp = DistributedDataParallel(Model(), process_group=group)
    buffer_sync = ddp_hooks.sync.BufferSync(ddp, mode)
    dist.barrier()
    dist.destroy_process_group(group)
    for _ in range(2):
        with pytest.raises(ValueError, match="that is in use, received one that was destroyed; make a new one"):
            ddp(batch(rank, 0)) if mode != "before_eval" else ddp.eval()
    buffer_sync.remove()
    assert not ddp.eval().module.training


@on_ranks(2)
def test_refusals(rank):
    with pytest.raises(TypeError, match="received a Linear; wrap the model first"):
        ddp_hooks.sync.BufferSync(nn.Linear(2, 2))
    ddp = DistributedDataParallel(Model())
    with pytest.raises(ValueError, match="before_eval, never, received 'sometimes'"):
        ddp_hooks.sync.BufferSync(ddp, "sometimes")
    with pytest.raises(ddp_hooks.errors.RanksDisagreeError, match="mode='never'"):
        ddp_hooks.sync.BufferSync(ddp, "never" if rank else "changed")
    if rank == 0:
        ddp_hooks_error = ValueError
        mode = "sometimes"
    else:
        ddp_hooks_error = ddp_hooks.errors.RanksDisagreeError
        mode = "changed"
    with pytest.raises(ddp_hooks_error, match="sometimes"):
        ddp_hooks.sync.BufferSync(ddp, mode)
    assert not hasattr(ddp, "buffer_hook")
    ddp_hooks.sync.BufferSync(ddp, "changed")
    with pytest.raises(ValueError, match="without a buffer hook"):
        ddp_hooks.sync.BufferSync(ddp, "changed")
    without = DistributedDataParallel(Model(), broadcast_buffers=False)
    with pytest.raises(ValueError, match="broadcast_buffers=False; pass True, or use 'before_eval'"):
        ddp_hooks.sync.BufferSync(without, "average")
    ddp_hooks.sync.BufferSync(without, "before_eval")
    without.module.table.fill_(rank)
    without.eval()
    assert without.module.table.eq(0.5).all()
