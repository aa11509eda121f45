"""Broadcasts and averages against the obvious loop over tensors, and what happens when ranks differ."""

from __future__ import annotations

import contextlib
import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import thorough
from spawn import on_ranks, run_ranks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks
from ddp_hooks import sync
from ddp_hooks.sync import messages

WORLD_SIZES = [2, 3]


class Zoo(nn.Module):
    """Parameters and buffers of many kinds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def rand(*shape):
            return torch.randn(*shape, generator=generator)

        self.plain = nn.Parameter(rand(3, 4))
        self.scalar = nn.Parameter(rand(()))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.channels_last = nn.Parameter(rand(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.transposed = nn.Parameter(rand(4, 3).t())
        self.strided = nn.Parameter(rand(6, 6)[::2, ::3])
        self.tied = self.plain
        self.wide = nn.Parameter(rand(5).double())
        self.narrow = nn.Parameter(rand(7).half())
        self.brain = nn.Parameter(rand(7).bfloat16())
        self.frozen = nn.Parameter(rand(2), requires_grad=False)
        self.complex = nn.Parameter(torch.complex(rand(3), rand(3)))
        self.register_buffer("mean", rand(4))
        self.register_buffer("count", torch.tensor(seed + 1))
        self.register_buffer("mask", torch.arange(4) % 2 == seed % 2)
        self.register_buffer("bytes", torch.full((3,), seed, dtype=torch.uint8))
        self.register_buffer("local", rand(2), persistent=False)


def everything(module):
    return [*module.parameters(), *module.buffers()]


def gather(tensor):
    """Every rank's version of a tensor, by the obvious means."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, tensor.detach().clone())
    return gathered


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    bits_a = actual.detach().contiguous().view(-1).view(torch.uint8)
    bits_b = expected.detach().contiguous().view(-1).view(torch.uint8)
    assert torch.equal(bits_a, bits_b)


def assert_alike_everywhere(tensors):
    for tensor in tensors:
        for other in gather(tensor):
            assert_same_bits(tensor, other)


# --- broadcast


def _broadcast(rank, src, async_op):
    module = Zoo(rank)
    strides = [tensor.stride() for tensor in everything(module)]
    pointers = [tensor.data_ptr() for tensor in everything(module)]
    result = ddp_hooks.sync.broadcast_parameters(module, src, async_op=async_op)
    report = result.wait() if async_op else result
    expected = Zoo(src)
    for actual, wanted in zip(everything(module), everything(expected), strict=True):
        assert_same_bits(actual, wanted)
    assert strides == [tensor.stride() for tensor in everything(module)]
    assert pointers == [tensor.data_ptr() for tensor in everything(module)]
    assert module.tied is module.plain
    nbytes = sum(tensor.nbytes for tensor in everything(module))
    assert report.tensors == len(everything(module))
    assert report.payload_bytes == report.tensor_bytes == nbytes
    # One for each of float32, float64, float16, bfloat16, complex64, int64, bool, uint8.
    assert report.messages == 8


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_broadcast_gives_everyone_the_bits_of_the_source(world_size, async_op):
    run_ranks(world_size, _broadcast, world_size - 1, async_op)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_sources_of_tensors(rank):
    # The common mistake `dist.broadcast(model.parameters(), 0)`, made to work.
    for make in (lambda m: m.parameters(), lambda m: list(m.parameters()), lambda m: m.state_dict().values()):
        module = Zoo(rank)
        ddp_hooks.sync.broadcast_parameters(make(module))
        for actual, wanted in zip(module.parameters(), Zoo(0).parameters(), strict=True):
            assert_same_bits(actual, wanted)
    tensor = torch.full((4, 4), float(rank))
    ddp_hooks.sync.broadcast_parameters(tensor)
    assert_same_bits(tensor, torch.zeros(4, 4))

    module = Zoo(rank)
    before = copy.deepcopy(module)
    ddp_hooks.sync.broadcast_parameters(module, buffers=False)
    for actual, wanted in zip(module.buffers(), before.buffers(), strict=True):
        assert_same_bits(actual, wanted)

    # As a DDP module: alike by name with a plain module, and without what DDP ignores.
    inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["1.bias"])
    ddp = DistributedDataParallel(inner)
    with torch.no_grad():
        for parameter in inner.parameters():
            parameter.fill_(rank)
    report = ddp_hooks.sync.broadcast_parameters(ddp)
    assert report.tensors == 3
    assert inner[0].weight.eq(0).all()
    assert inner[1].bias.eq(rank).all()
    ddp_hooks.sync.broadcast_parameters(ddp.module if rank else inner)
    assert inner[1].bias.eq(0).all()


@on_ranks(2)
def test_long_tensors_go_alone_and_short_ones_share_messages(rank):
    messages.MESSAGE_BYTES = 1000
    try:
        tensors = [torch.full((n,), float(rank)) for n in (10, 300, 200, 40, 60, 1)]
        report = ddp_hooks.sync.broadcast_parameters(tensors, 1)
    finally:
        messages.MESSAGE_BYTES = 8 * 1024 * 1024
    # 40 | 1200 | 800 160 | 240 4: longer than a message goes alone, the others fill messages in order.
    assert report.messages == 4
    assert all(tensor.eq(1).all() for tensor in tensors)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from([torch.float32, torch.float16, torch.int64])), max_size=30)
)
def test_messages_hold_every_tensor_once_and_are_not_too_long(kinds):
    tensors = [torch.empty(numel, dtype=dtype) for numel, dtype in kinds]
    limit = 800
    original, messages.MESSAGE_BYTES = messages.MESSAGE_BYTES, limit
    try:
        parts = messages.split(tensors)
    finally:
        messages.MESSAGE_BYTES = original
    assert all(len({tensor.dtype for tensor in part}) == 1 for part in parts)
    assert all(len(part) == 1 or sum(tensor.nbytes for tensor in part) <= limit for part in parts)
    for dtype in {tensor.dtype for tensor in tensors}:
        wanted = [id(tensor) for tensor in tensors if tensor.dtype == dtype and tensor.numel()]
        assert [id(tensor) for part in parts if part[0].dtype == dtype for tensor in part] == wanted
        # No two neighbours would have fitted in one message.
        lengths = [sum(tensor.nbytes for tensor in part) for part in parts if part[0].dtype == dtype]
        firsts = [part[0].nbytes for part in parts if part[0].dtype == dtype]
        assert all(length + first > limit for length, first in zip(lengths, firsts[1:], strict=False))


@on_ranks(3)
def test_process_groups(rank):
    group = dist.new_group([1, 2])
    tensor = torch.tensor([float(rank)])
    if rank == 0:
        with pytest.raises(ValueError, match="process group that this rank is in"):
            ddp_hooks.sync.broadcast_parameters(tensor, process_group=group)
    else:
        # src counts within the group.
        ddp_hooks.sync.broadcast_parameters(tensor, 1, process_group=group)
        assert tensor.item() == 2
        ddp_hooks.sync.average_parameters(tensor.fill_(rank), process_group=group)
        assert tensor.item() == 1.5


# --- average


def obvious_mean(tensor, weights):
    versions = gather(tensor)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.stack([v.to(torch.int64) for v in versions]).max(dim=0).values.to(tensor.dtype)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    total = sum(v.to(wide) * w for v, w in zip(versions, weights, strict=True))
    return (total / sum(weights)).to(tensor.dtype)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("weighting", ["none", "own", "all"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_average_is_the_mean_and_bitwise_alike(rank, weighting, async_op):
    world_size = dist.get_world_size()
    weights = {"none": None, "own": float(rank + 1), "all": [rank + 1.0 for rank in range(world_size)]}[weighting]
    true_weights = [1.0] * world_size if weights is None else [r + 1.0 for r in range(world_size)]
    module = Zoo(rank)
    expected = [obvious_mean(tensor, true_weights) for tensor in everything(module)]
    strides = [tensor.stride() for tensor in everything(module)]
    result = ddp_hooks.sync.average_parameters(module, weights=weights, async_op=async_op)
    if async_op:
        result.wait()
    for actual, wanted in zip(everything(module), expected, strict=True):
        if actual.is_floating_point() or actual.is_complex():
            torch.testing.assert_close(actual.detach(), wanted)
        else:
            assert_same_bits(actual, wanted)
    assert strides == [tensor.stride() for tensor in everything(module)]
    assert_alike_everywhere(everything(module))


@on_ranks(3)
def test_average_accumulates_in_float_and_integers_are_exact(rank):
    # In float16 the sum of three overflows, and in bfloat16 small differences vanish.
    half = torch.full((3,), 60000.0, dtype=torch.float16)
    eight_bits = torch.full((4,), 2.0 * rank).to(torch.float8_e4m3fn)
    brain = torch.tensor([256.0, 257.0, 260.0], dtype=torch.bfloat16)[rank : rank + 1]
    report = ddp_hooks.sync.average_parameters([half, brain, eight_bits])
    assert half.eq(60000).all()
    assert eight_bits.float().eq(2).all()
    assert_same_bits(brain, torch.tensor([(256.0 + 256 + 260) / 3]).bfloat16())
    assert report.payload_bytes == 4 * (3 + 1 + 4)
    # Integers beyond what a float64 holds.
    big = torch.tensor([2**62 + rank])
    ddp_hooks.sync.average_parameters(big)
    assert big.item() == 2**62 + 2


@on_ranks(2)
def test_two_ranks_that_are_alike_stay_as_they_are(rank):
    same = torch.randn(1000, generator=torch.Generator().manual_seed(7))
    before = same.clone()
    ddp_hooks.sync.average_parameters(same)
    assert_same_bits(same, before)
    ddp_hooks.sync.average_parameters(same, weights=5)
    assert_same_bits(same, before)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_a_rank_of_weight_zero_has_no_influence(rank):
    tensor = torch.tensor([float("nan") if rank == 0 else 5.0 * rank])
    ddp_hooks.sync.average_parameters(tensor, weights=0 if rank == 0 else 10)
    assert tensor.item() == (5.0 if dist.get_world_size() == 2 else 7.5)


@on_ranks(2)
def test_buffers_are_averaged_broadcast_or_ignored(rank):
    for treatment in ("average", "broadcast", "ignore"):
        module = nn.BatchNorm1d(4)
        module.running_mean.fill_(rank)
        module.num_batches_tracked.fill_(10 * rank)
        ddp_hooks.sync.average_parameters(module, buffers=treatment)
        mean = {"average": 0.5, "broadcast": 0.0, "ignore": float(rank)}[treatment]
        count = {"average": 10, "broadcast": 0, "ignore": 10 * rank}[treatment]
        assert module.running_mean.eq(mean).all()
        assert module.num_batches_tracked.item() == count


# --- edges


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_empty_modules_and_autograd(rank):
    for module in (nn.Module(), nn.Sequential()):
        report = ddp_hooks.sync.broadcast_parameters(module)
        assert (report.tensors, report.messages, report.payload_bytes) == (0, 0, 0)
    assert ddp_hooks.sync.average_parameters(nn.ReLU()).messages == 0
    empty = torch.empty(3, 0)
    assert ddp_hooks.sync.average_parameters([empty]).messages == 0
    # Autograd sees the write, as after any in-place change.
    parameter = nn.Parameter(torch.ones(3))
    loss = (parameter**2).sum()
    ddp_hooks.sync.broadcast_parameters([parameter])
    if rank == 0:
        loss.backward()  # the source is only read
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@on_ranks(2)
def test_the_default_device_is_the_users(rank):
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1 + rank)
    ddp = nn.parallel.DistributedDataParallel(module)
    x = torch.randn(2, 4)
    ddp_hooks.sync.BufferSync(ddp, "changed")
    ddp(x).sum().backward()
    with torch.device("meta"):
        ddp(x)
        differences = ddp_hooks.sync.verify_replicas(module.parameters(), optimizer=optimizer).differences
        assert {d.name: d.max_abs_differences for d in differences} == {"group 0: lr": (0.0, pytest.approx(1.0))}
        module[0].bias.data.fill_(rank)
        ddp_hooks.sync.PeriodicModelAverager(1).average_parameters(module.parameters())
        assert module[0].bias.eq((dist.get_world_size() - 1) / 2).all()
        with ddp_hooks.sync.share_parameters(module):
            ddp_hooks.sync.broadcast_parameters(module)
    assert ddp_hooks.sync.verify_replicas(module, raise_on_difference=True, gradients=False).in_step
    assert all(parameter.device.type == "cpu" for parameter in module.parameters())


@on_ranks(1)
def test_a_world_of_one_changes_nothing(rank):
    module = Zoo(3)
    before = copy.deepcopy(module)
    ddp_hooks.sync.broadcast_parameters(module)
    ddp_hooks.sync.average_parameters(module, weights=17)
    assert ddp_hooks.sync.verify_replicas(module, raise_on_difference=True).in_step
    for actual, wanted in zip(everything(module), everything(before), strict=True):
        assert_same_bits(actual, wanted)


def test_without_a_process_group_the_error_says_what_to_do():
    with pytest.raises(RuntimeError, match="init_process_group"):
        ddp_hooks.sync.broadcast_parameters(nn.Linear(2, 2))


# --- ranks that differ


def _expect_disagreement(function, before, module, *patterns):
    with pytest.raises(ddp_hooks.errors.RanksDisagreeError) as caught:
        function()
    for pattern in patterns:
        assert pattern in str(caught.value), str(caught.value)
    for actual, wanted in zip(module.parameters(), before.parameters(), strict=True):
        assert_same_bits(actual, wanted)


def _lacks_a_parameter(rank, name):
    function = getattr(ddp_hooks.sync, name)
    last = dist.get_world_size() - 1
    others = "rank 0" if last == 1 else "ranks 0, 1"
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=rank != last))
    before = copy.deepcopy(module)
    _expect_disagreement(
        lambda: function(module),
        before,
        module,
        f"parameter '1.bias' is float32 [3] on cpu on {others}, missing on rank {last}",
        "no tensor changed",
    )
    module = nn.Linear(3, 4 if rank == 0 else 5)
    before = copy.deepcopy(module)
    _expect_disagreement(lambda: function(module), before, module, "[4, 3]", "[5, 3]", "parameter 'weight'")
    module = nn.Linear(3, 4).to(torch.float64 if rank == 0 else torch.float32)
    before = copy.deepcopy(module)
    _expect_disagreement(lambda: function(module), before, module, "float64 [4, 3]", "float32 [4, 3]")
    # Same names in another order.
    module = nn.Module()
    for child in ("a", "b") if rank == 0 else ("b", "a"):
        module.register_parameter(child, nn.Parameter(torch.ones(2)))
    before = copy.deepcopy(module)
    _expect_disagreement(lambda: function(module), before, module, "different orders: position 0 is")
    # The group still works.
    dist.barrier()


@pytest.mark.parametrize("function", ["broadcast_parameters", "average_parameters"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_with_other_tensors_get_an_error_everywhere(world_size, function):
    run_ranks(world_size, _lacks_a_parameter, function)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_ranks_with_other_arguments_get_an_error_everywhere(rank):
    module = nn.Linear(2, 2)
    before = copy.deepcopy(module)
    _expect_disagreement(
        lambda: ddp_hooks.sync.broadcast_parameters(module, rank), before, module, "src=0", "src=1", "rank 1 called"
    )
    _expect_disagreement(
        lambda: ddp_hooks.sync.average_parameters(module, buffers="average" if rank else "ignore"),
        before,
        module,
        "buffers='ignore'",
    )
    _expect_disagreement(
        lambda: ddp_hooks.sync.average_parameters(module, weights=3 if rank else None), before, module, "weights=None"
    )
    other = ddp_hooks.sync.average_parameters if rank else ddp_hooks.sync.broadcast_parameters
    _expect_disagreement(lambda: other(module), before, module, "average_parameters(", "broadcast_parameters(")
    other = ddp_hooks.sync.verify_replicas if rank else ddp_hooks.sync.broadcast_parameters
    _expect_disagreement(lambda: other(module), before, module, "verify_replicas(", "broadcast_parameters(")


def without_memory(tensor, left_bytes=0):
    tensor.untyped_storage().resize_(left_bytes)
    return tensor


def make_fake(tensor):
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_bad_input_on_one_rank_is_an_error_on_all(rank):
    expanded = torch.zeros(1).expand(4)
    conjugate = torch.full((2,), 1 + 2j).conj()
    cases = [
        (TypeError, "received int at position 0", [3]),
        (TypeError, "received int (3); pass the model itself", 3),
        (TypeError, ".values()", {"weight": torch.zeros(2)}),
        (ValueError, "make it dense", [torch.zeros(2, 2).to_sparse()]),
        (ValueError, "expanded (strides [0])", [expanded]),
        (ValueError, "meta device", [torch.zeros(2, device="meta")]),
        (ValueError, "uninitialized parameter", nn.LazyLinear(3)),
        (ValueError, "tensor '1' is a lazy conjugate: make it .resolve_conj()", [torch.ones(2), conjugate]),
        (ValueError, "lazily negated: make it .resolve_neg()", [conjugate.imag]),
        (ValueError, "tensor '0' needs 16 bytes, but its storage has 0", [without_memory(torch.ones(4))]),
        (ValueError, "needs 20 bytes, but its storage has 16", [without_memory(torch.ones(6).view(2, 3)[:, :2], 16)]),
        (ValueError, "is a FakeTensor, which holds no elements", [make_fake(torch.ones(4))]),
        (ValueError, ".int_repr()", [torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)]),
    ]
    for kind, text, source in cases:
        # Rank 1 alone has bad input; the others, with good input, learn of it.
        if rank == 1:
            with pytest.raises(kind) as caught:
                ddp_hooks.sync.broadcast_parameters(source)
            assert text in str(caught.value), str(caught.value)
        else:
            with pytest.raises(ddp_hooks.errors.RanksDisagreeError, match=f"rank 1 refused: {kind.__name__}") as caught:
                ddp_hooks.sync.broadcast_parameters(torch.ones(2))
            assert text in str(caught.value), str(caught.value)
    # What is needed is enough.
    cut_off = [without_memory(torch.ones(6).view(2, 3)[:, :2], 20), without_memory(torch.ones(4))[4:]]
    assert ddp_hooks.sync.broadcast_parameters(cut_off).payload_bytes == 16
    linear = nn.Linear(2, 2)
    for arguments, text in [
        ({"src": 9}, "rank of the process group"),
        ({"src": -1}, "rank of the process group"),
    ]:
        with pytest.raises(ValueError, match=text):
            ddp_hooks.sync.broadcast_parameters(linear, **arguments)
    for arguments, text in [
        ({"weights": -1}, "not negative"),
        ({"weights": float("nan")}, "finite"),
        ({"weights": [1.0]}, "one weight for each"),
        ({"weights": 0}, "positive, finite sum"),
        ({"buffers": "sum"}, "average, broadcast, ignore"),
    ]:
        with pytest.raises(ValueError, match=text):
            ddp_hooks.sync.average_parameters(linear, **arguments)
    # On every rank, before anything is sent; the source could have read it.
    plain = torch.full((2,), float(rank))
    for function in (ddp_hooks.sync.broadcast_parameters, ddp_hooks.sync.average_parameters):
        with pytest.raises(ValueError, match="lazy conjugate"):
            function([conjugate, plain])
        assert plain.eq(rank).all()
    with torch.inference_mode():
        made_there = torch.zeros(2)
    with pytest.raises(ValueError, match=r"inference_mode.*\.clone\(\)"):
        ddp_hooks.sync.broadcast_parameters([made_there, plain])
    with torch.inference_mode():
        ddp_hooks.sync.broadcast_parameters([made_there])
    for name in ("uint64", "int1", "uint7", "bits8", "float4_e2m1fn_x2"):
        without_mean = torch.zeros(8, dtype=torch.uint8).view(getattr(torch, name))
        with pytest.raises(ValueError, match=f"tensor '0' is {name}; broadcast it instead"):
            ddp_hooks.sync.average_parameters(without_mean)
        assert ddp_hooks.sync.broadcast_parameters(without_mean).payload_bytes == 8
    for name in ("uint16", "uint32", "bool", "float8_e4m3fn", "complex32"):
        averaged = torch.zeros(8, dtype=torch.uint8).view(getattr(torch, name))
        assert ddp_hooks.sync.average_parameters(averaged).messages == 1
    dist.barrier()


# --- failure in the middle


class BrokenConnection(RuntimeError):
    pass


@pytest.mark.parametrize("function", ["broadcast_parameters", "average_parameters"])
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("world_size", [2, *thorough(3)])
@on_ranks()
def test_failure_in_the_middle_leaves_no_tensor_half_written(rank, function, async_op):
    """The last rank's third message fails; the others run into the timeout of a group of their own."""
    last = dist.get_world_size() - 1
    group = dist.new_group(timeout=timedelta(seconds=2))
    tensors = [torch.full((200,), float(rank)) for _ in range(8)]
    wanted = 0.0 if function == "broadcast_parameters" else sum(range(last + 1)) / (last + 1)
    collective = "broadcast" if function == "broadcast_parameters" else "all_reduce"
    original, calls = getattr(dist, collective), 0

    def breaking(*args, **kwargs):
        nonlocal calls
        calls += 1
        if rank == last and calls == 3:
            raise BrokenConnection
        return original(*args, **kwargs)

    def call():
        result = getattr(ddp_hooks.sync, function)(tensors, process_group=group, async_op=async_op)
        if async_op:
            result.wait()

    messages.MESSAGE_BYTES = 1024
    setattr(dist, collective, breaking)
    try:
        if rank == 0 and function == "broadcast_parameters":
            # A source may or may not notice that nobody listens, and has nothing to write either way.
            with contextlib.suppress(RuntimeError):
                call()
        else:
            with pytest.raises(RuntimeError):
                call()
    finally:
        setattr(dist, collective, original)
        messages.MESSAGE_BYTES = 8 * 1024 * 1024
    values = [set(tensor.tolist()) for tensor in tensors]
    # No tensor is written in part.
    assert all(value in ({float(rank)}, {wanted}) for value in values), values
    if async_op:
        assert all(value == {float(rank)} for value in values), values
    # Where the process group works, calling again repairs everything.
    getattr(ddp_hooks.sync, function)(tensors)
    assert_alike_everywhere(tensors)


def test_a_message_is_written_only_after_it_has_arrived():
    """The same guarantee, seen without a process group: a failing wait leaves the tensor alone."""

    log = []

    class Message:
        payload_bytes = 4

        def __init__(self, fails):
            self.fails = fails

        def launch(self, buffers):
            log.append("launch")

        def wait(self):
            if self.fails:
                raise BrokenConnection

        def commit(self, buffers):
            log.append("commit")

    with pytest.raises(BrokenConnection):
        messages.run([Message(False), Message(True), Message(False), Message(False)])
    assert log == ["launch", "launch", "commit", "launch"]
    log.clear()
    report = ddp_hooks.sync.SyncReport(1, 4, 1, 4)
    work = sync.SyncWork([Message(False), Message(True)], report, None)
    with pytest.raises(BrokenConnection):
        work.wait()
    assert log == ["launch", "launch"]
