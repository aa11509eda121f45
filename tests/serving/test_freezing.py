"""Freezing at any time, against an oracle without DDP and against freshly built DDP modules."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from spawn import RankFailure, on_ranks, run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel
from training import assert_same_gradients, register

import ddp_hooks
from ddp_hooks import _C

WIDTH = 16


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(8, WIDTH)]
    for _ in range(4):
        layers += [nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(WIDTH, 4))


def linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def wrap(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **{"bucket_cap_mb": 0.001, **options})


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


class Oracle:
    """What DDP ought to do, by hand: one model on each rank, gradients averaged parameter by parameter.

    A parameter that no rank used since the last step keeps its .grad; of any other, every rank's .grad counts, stale or
    not, and one that is missing counts as zeros.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.used: set[int] = set()
        for index, parameter in enumerate(model.parameters()):
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self.used.add(index))

    def reduce(self) -> None:
        world_size = dist.get_world_size()
        everybody: list[Any] = [None] * world_size
        dist.all_gather_object(everybody, self.used)
        union = set().union(*everybody)
        for index, parameter in enumerate(self.model.parameters()):
            if index in union:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / world_size
                dist.all_reduce(gradient)
                parameter.grad = gradient
        self.used.clear()


def assert_alike(ours: nn.Module, oracle: nn.Module, what: str) -> None:
    exact = dist.get_world_size() == 2
    for (name, a), b in zip(ours.named_parameters(), oracle.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), f"{what}: gradient of {name}: {a.grad} instead of {b.grad}"
        for kind, x, y in (("weight", a.detach(), b.detach()), ("gradient", a.grad, b.grad)):
            if x is None or y is None:
                continue
            if exact:
                assert torch.equal(x, y), f"{what}: {kind} of {name} differs by {(x - y).abs().max()}"
            else:
                torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)


def random_freezing(
    rank: int,
    find_unused: bool,
    bucket_view: bool,
    optimizer: str,
    policy: str,
    native: bool,
    steps: int,
    device: str = "cpu",
) -> None:
    """Freeze and unfreeze at random, alike or apart, with accumulation, and compare everything after each step."""
    model, twin = make_model().to(device), make_model().to(device)
    ddp = wrap(model, find_unused_parameters=find_unused, gradient_as_bucket_view=bucket_view)
    state = register(ddp, policy, native)
    oracle = Oracle(twin)
    optimizers = [make_optimizer(optimizer, model), make_optimizer(optimizer, twin)]
    shared, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(100 + rank)

    def draw(n: int, generator: torch.Generator) -> int:
        return int(torch.randint(n, (), generator=generator))

    for step in range(steps):
        layers = list(zip(linears(model), linears(twin), strict=True))
        for index, pair in enumerate(layers[:-1]):
            choice = draw(4, shared)
            frozen = choice == 0 or (choice == 1 and draw(2, own) == 0) or (choice == 2 and rank == index % 2)
            for layer in pair:
                layer.requires_grad_(not frozen)
                if frozen and step % 2:
                    layer.zero_grad(set_to_none=True)
        for _ in range(draw(3, shared)):
            batch = torch.randn(4, 8, generator=own).to(device)
            with ddp.no_sync():
                ddp(batch).square().mean().backward()
            twin(batch).square().mean().backward()
            if draw(2, shared):  # frozen after it accumulated something
                for layer in layers[draw(4, shared)]:
                    layer.requires_grad_(False)
        batch = torch.randn(4, 8, generator=own).to(device)
        ddp(batch).square().mean().backward()
        twin(batch).square().mean().backward()
        oracle.reduce()
        assert_alike(model, twin, f"step {step}")
        set_to_none = draw(3, shared) > 0
        for one in optimizers:
            one.step()
            if draw(5, torch.Generator().manual_seed(step)) > 0:
                one.zero_grad(set_to_none=set_to_none)
    assert state.stats().steps == steps
    assert state.stats().payload_bytes < state.stats().dense_bytes


COMBINATIONS = list(itertools.product([False, True], [False, True], ["sgd", "adamw"]))


@pytest.mark.parametrize(("find_unused", "bucket_view", "optimizer"), COMBINATIONS)
@pytest.mark.parametrize(("policy", "native"), [("skip_unused", True), ("skip_unused", False), ("skip_zeros", True)])
def test_random_freezing(find_unused: bool, bucket_view: bool, optimizer: str, policy: str, native: bool) -> None:
    run_ranks(2, random_freezing, find_unused, bucket_view, optimizer, policy, native, 15)


@pytest.mark.thorough
@pytest.mark.parametrize("find_unused", [False, True])
def test_random_freezing_on_three_ranks(find_unused: bool) -> None:
    run_ranks(3, random_freezing, find_unused, False, "sgd", "skip_unused", True, 100)


@pytest.mark.parametrize("native", [False, True])
@on_ranks(2)
def test_a_stale_gradient_of_what_is_frozen_stays(rank: int, native: bool) -> None:
    """A gradient that was there before stays, although others were accumulated under no_sync()."""
    model, twin = make_model(), make_model()
    ddp = wrap(model)
    state = register(ddp, "skip_unused", native)
    oracle = Oracle(twin)
    batch = torch.ones(4, 8) * (rank + 1)
    with ddp.no_sync():
        ddp(batch)  # only to look at
    for module in (model, twin):
        for parameter in linears(module)[1].parameters():
            parameter.requires_grad_(False)
            parameter.grad = torch.full_like(parameter, rank + 1.0)
    with ddp.no_sync():
        ddp(batch).square().mean().backward()
    twin(batch).square().mean().backward()
    for module in (model, twin):
        linears(module)[2].requires_grad_(False)  # after it accumulated something
    ddp(batch).square().mean().backward()
    twin(batch).square().mean().backward()
    oracle.reduce()
    assert_alike(model, twin, "with a stale gradient")
    assert not state.usage()["2.weight"].used_anywhere


@pytest.mark.parametrize("native", [False, True])
@on_ranks(2)
def test_a_stale_gradient_of_what_is_late(rank: int, native: bool) -> None:
    """What nobody used in a step stays; where one rank used it, what the other has left over travels, as in DDP."""

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late, self.known = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, batch: torch.Tensor, uses_late: bool) -> torch.Tensor:
            return self.known(self.late(batch) if uses_late else batch)

    torch.manual_seed(0)
    model = Chooses()
    twin = copy.deepcopy(model)
    model.late.requires_grad_(False)
    ddp = wrap(model, find_unused_parameters=True)
    register(ddp, "skip_unused", native)
    model.late.requires_grad_(True)
    plain = wrap(twin, find_unused_parameters=True)
    steps = [(True, True), (False, False), (True, False), (False, True)]
    for step, uses_late in enumerate(steps):
        batch = torch.ones(2, 4) * (rank + 1 + step)
        for module in (ddp, plain):
            if step == 1 and rank == 0:
                module.module.late.weight.grad = None  # the others keep theirs
            module(batch, uses_late[rank]).square().sum().backward()
        assert_alike(model, twin, f"step {step}")


@pytest.mark.parametrize("native", [False, True])
@on_ranks(2)
def test_frozen_where_others_left_a_gradient(rank: int, native: bool) -> None:
    """A rank that never unfroze an unmanaged parameter has received a gradient; it does not send that one on."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    ddp = wrap(model, find_unused_parameters=True)
    register(ddp, "skip_unused", native)
    if rank == 0:
        model[0].requires_grad_(True)
    ddp(torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad is not None
    model.zero_grad(set_to_none=False)
    if rank == 0:
        ddp_hooks.freeze(ddp, "0.*")
    ddp(torch.ones(2, 4)).sum().backward()
    assert (model[0].weight.grad is None) == (rank == 0)


def train_fresh(frozen: list[int], steps: int, find_unused: bool, rebuild: bool | None) -> tuple[nn.Module, Any]:
    """Train with layers frozen: before wrapping (`rebuild=None`), or after, with or without a new Reducer."""
    model = make_model()
    if rebuild is None:
        for index in frozen:
            linears(model)[index].requires_grad_(False)
    ddp = wrap(model, find_unused_parameters=find_unused)
    state = None
    if rebuild is not None:
        state = ddp_hooks.register(ddp, "skip_unused")
        ddp_hooks.freeze(ddp, *(linears(model)[index] for index in frozen))
        if rebuild:
            assert ddp_hooks.rebuild(ddp)
            assert not ddp_hooks.rebuild(ddp)
    optimizer = make_optimizer("sgd", model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        ddp(torch.randn(4, 8, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, state


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("rebuild", [False, True])
@on_ranks(2)
def test_same_as_built_frozen(rank: int, find_unused: bool, rebuild: bool) -> None:
    for frozen in ([0], [0, 1, 2], [1, 3], [0, 1, 2, 3, 4]):
        fresh, _ = train_fresh(frozen, 8, find_unused, None)
        ours, state = train_fresh(frozen, 8, find_unused, rebuild)
        assert_alike(ours, fresh, f"frozen {frozen}")
        trainable = sum(p.numel() * 4 for p in fresh.parameters() if p.requires_grad)
        assert state.stats().payload_bytes == 8 * trainable
        dense = trainable if rebuild else sum(p.numel() * 4 for p in fresh.parameters())
        assert state.stats().dense_bytes == 8 * dense


@pytest.mark.parametrize("policy", list(ddp_hooks.policies.PRESETS))
@on_ranks(2)
def test_unfrozen_under_any_policy(rank: int, policy: str) -> None:
    """Frozen when wrapped, unfrozen later: DDP does not know these parameters, under no policy are they forgotten."""
    model, twin = make_model(), make_model()
    oracle = Oracle(twin)
    for module in (model, twin):
        ddp_hooks.freeze(module, "0", "2")
    ddp = wrap(model)
    ddp_hooks.register(ddp, policy)
    for step in range(4):
        for module in (ddp, twin):
            if step == 1:
                ddp_hooks.unfreeze(module, "0")
            module.zero_grad()
            module(torch.ones(2, 8) * (rank + 1)).sum().backward()
        oracle.reduce()
        assert_alike(model, twin, f"step {step}")


@on_ranks(2)
def test_registered_late(rank: int) -> None:
    """A step between making the state and registering the hook leaves nothing behind."""
    ddp = wrap(make_model(), find_unused_parameters=True)
    state = ddp_hooks.SkipUnusedState(ddp, "skip_unused")
    ddp_hooks.freeze(ddp, "0")
    ddp(torch.ones(2, 8)).sum().backward()
    ddp_hooks.unfreeze(ddp, "0")
    ddp.register_comm_hook(state, ddp_hooks.skip_unused_hook)
    for _ in range(2):
        ddp(torch.ones(2, 8)).sum().backward()
    assert state.stats().payload_bytes == state.stats().dense_bytes


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("bucket_view", [False, True])
@on_ranks(2)
def test_unfrozen_after_rebuild(rank: int, find_unused: bool, bucket_view: bool) -> None:
    """What the new Reducer does not know is averaged all the same, when unfrozen on all ranks or on one."""
    model, twin = make_model(), make_model()
    ddp = wrap(model, find_unused_parameters=find_unused, gradient_as_bucket_view=bucket_view)
    state = ddp_hooks.register(ddp, "skip_unused")
    oracle = Oracle(twin)
    optimizers = [make_optimizer("sgd", model), make_optimizer("sgd", twin)]
    generator = torch.Generator().manual_seed(rank)
    for step in range(30):
        if step == 3:
            ddp_hooks.freeze(ddp, "0", "2")
            ddp_hooks.freeze(twin, "0", "2")
        if step == 5:
            assert ddp_hooks.rebuild(ddp)
        if step == 9:
            ddp_hooks.unfreeze(ddp, "0")
            ddp_hooks.unfreeze(twin, "0")
        if step == 13 and rank == 0:
            ddp_hooks.unfreeze(ddp, "2.weight")
            ddp_hooks.unfreeze(twin, "2.weight")
        if step == 17:
            for module in (ddp, twin):
                ddp_hooks.freeze(module, "0")
                ddp_hooks.freeze(module, "4")
        if step == 21:
            assert ddp_hooks.rebuild(ddp)
        if step == 25:
            for module in (ddp, twin):
                ddp_hooks.unfreeze(module, "*")
        if step % 4 == 1:
            batch = torch.randn(4, 8, generator=generator)
            with ddp.no_sync():
                ddp(batch).square().sum().backward()
            twin(batch).square().sum().backward()
        batch = torch.randn(4, 8, generator=generator)
        ddp(batch).square().sum().backward()
        twin(batch).square().sum().backward()
        oracle.reduce()
        assert_alike(model, twin, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert state.stats().steps == 30


@on_ranks(2)
def test_joined_while_unfrozen(rank: int) -> None:
    """A rank that has joined takes part in averaging what the Reducer does not know."""
    model, twin = make_model(), make_model()
    linears(model)[0].requires_grad_(False)
    ddp = wrap(model, find_unused_parameters=True)
    ddp_hooks.register(ddp, "skip_unused")
    ddp_hooks.unfreeze(ddp, "0")
    with ddp.join():
        for step in range(2 + 2 * rank):
            batch = torch.ones(4, 8) * (rank + 1 + step)
            ddp.zero_grad()
            ddp(batch).square().sum().backward()
            if step >= 2:  # alone: the average over both ranks is half of this rank's gradient
                twin.load_state_dict(model.state_dict())
                twin.zero_grad()
                twin(batch).square().sum().backward()
                for ours, alone in zip(model.parameters(), twin.parameters(), strict=True):
                    assert torch.equal(ours.grad, alone.grad / 2)


class Parts(nn.Module):
    """Weights of one number each; `never` is frozen after wrapping, so that a rebuild has something to take out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.recent, self.first, self.never = (nn.Linear(1, 1, bias=False) for _ in range(5))

    def forward(self, x: torch.Tensor, *used: str) -> torch.Tensor:
        return self.trunk(x) + sum(getattr(self, name)(x) for name in used)


@contextmanager
def unwritten_used_maps(value: int) -> Iterator[None]:
    """Have Reducers that are made meanwhile find this value where their map of used parameters will be."""
    make = DistributedDataParallel._ddp_init_helper

    def make_and_fill(ddp: DistributedDataParallel, *args: Any) -> None:
        make(ddp, *args)
        ddp.reducer._get_local_used_map().fill_(value)

    DistributedDataParallel._ddp_init_helper = make_and_fill
    try:
        yield
    finally:
        DistributedDataParallel._ddp_init_helper = make


def joined_gradients(
    steps: list[tuple[str, ...]], memory: int, hook: Callable[[DistributedDataParallel], Any], made_by: str = ""
) -> dict[str, float | None]:
    """Return what a step leaves that the last rank sits out, in which rank 0 alone uses `one`.

    Before it come `steps` of all ranks.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    with unwritten_used_maps(memory):
        ddp = DistributedDataParallel(Parts(), find_unused_parameters=True)
        ddp.module.never.requires_grad_(False)
        state = hook(ddp)

        def step(*used: str) -> None:
            ddp.zero_grad()
            ddp(torch.ones(1, 1), *used).sum().backward()

        with ddp.join():
            for used in steps:
                step(*used)
            if made_by == "rebuild":
                assert ddp_hooks.rebuild(ddp)
            assert (len(_C.reducer_parameters(ddp.reducer)) == 4) == made_by.startswith("rebuild")
            if rank != last:
                step(*(["one"] if rank == 0 else []))
        del state
    return {name: None if p.grad is None else p.grad.item() for name, p in ddp.module.named_parameters()}


@pytest.mark.parametrize("made_by", ["registering", "rebuild", "rebuild_after"])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_joined_with_a_new_reducer(rank: int, made_by: str, native: bool) -> None:
    """What a rank that joins says of its last step, plain DDP's does, whether or not the Reducer was made since."""
    steps = [("one", "recent", "first"), ("recent",)]
    steps = [] if made_by == "registering" else steps[:1] + 2 * steps[1:]
    policy = ddp_hooks.Policy("test", rebuild_after=2 if made_by == "rebuild_after" else 0)
    # Where nobody has written anything, only zeros are right: nothing was used.
    plain = joined_gradients(steps, 0, lambda ddp: None)
    for memory in (2**31 - 1, -1, 1):
        ours = joined_gradients(steps, memory, lambda ddp: register(ddp, policy, native), made_by)
        if rank < dist.get_world_size() - 1:
            assert ours == plain
            assert ours["one.weight"] == pytest.approx(1 / dist.get_world_size())
            assert ours["recent.weight"] == (0 if steps else None)
            assert ours["first.weight"] is None


@pytest.mark.parametrize(("native", "after"), [(False, 3), (True, 3), (True, 1)])
@on_ranks(2)
def test_rebuilds_by_itself(rank: int, native: bool, after: int) -> None:
    policy = ddp_hooks.Policy("test", rebuild_after=after)
    ddp = wrap(make_model(), find_unused_parameters=False)
    state = register(ddp, policy, native)

    def step() -> int:
        before = state.stats().dense_bytes
        ddp.zero_grad()
        ddp(torch.ones(2, 8)).sum().backward()
        return state.stats().dense_bytes - before

    everything = sum(p.numel() * 4 for p in ddp.parameters())
    assert [step() for _ in range(6)] == [everything] * 6
    ddp_hooks.freeze(ddp, "0", "2")
    left = sum(p.numel() * 4 for p in ddp.parameters() if p.requires_grad)
    assert [step() for _ in range(after + 2)] == [everything] * after + [left] * 2
    ddp_hooks.unfreeze(ddp, "0")
    # Unmanaged gradients are counted as plain DDP would have sent them, had it known of them.
    with_first = left + sum(p.numel() * 4 for p in ddp.module[0].parameters())
    known = len(_C.reducer_parameters(ddp.reducer))
    assert [step() for _ in range(after)] == [with_first] * after
    assert len(_C.reducer_parameters(ddp.reducer)) == known + 2
    assert [step() for _ in range(2)] == [with_first] * 2
    assert state.stats().steps == 10 + 2 * after
    assert state.stats().saved_fraction > 0


class Branches(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 8, sparse=sparse)
        self.unused, self.used = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, rows: bool = False) -> torch.Tensor:
        return self.used(self.rows(torch.tensor([1, 2])) if rows else x)


@on_ranks(2)
def test_rebuilds_when_all_have_frozen(rank: int) -> None:
    """What nobody uses is frozen later, on one rank later still: it is tried again, more and more rarely."""
    ddp = DistributedDataParallel(Branches(sparse=False), find_unused_parameters=True)
    register(ddp, ddp_hooks.Policy("test", rebuild_after=2), True)
    ddp_hooks.freeze(ddp, "rows")
    known = []
    for step in range(17):
        if step == (3, 9)[rank]:
            ddp_hooks.freeze(ddp, "unused")
        ddp(torch.ones(2, 8)).sum().backward()
        known.append(len(_C.reducer_parameters(ddp.reducer)))
    # After 2 steps, then on the new Reducer after 2, after 4 more and after 8 more.
    assert known == [5] + [4] * 14 + [2] * 2


@on_ranks(2)
def test_sparse_when_late(rank: int) -> None:
    """It cannot be averaged. The rank that has it says so; the other one does not wait for it."""
    module = Branches(sparse=True)
    module.rows.weight.requires_grad_(False)
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    register(ddp, "skip_unused", True)
    module.rows.weight.requires_grad_(True)
    for who in (0, 1), (0,), ():
        loss = ddp(torch.ones(2, 8), rank in who).sum()
        if rank in who:
            with pytest.raises(RuntimeError, match=r"parameter 'rows.weight' was unfrozen .* received a sparse one"):
                loss.backward()
        else:
            loss.backward()
            assert module.rows.weight.grad is None
        ddp.zero_grad()


@pytest.mark.parametrize("own_state", [False, True])
@on_ranks(2)
def test_rebuilds_in_a_wrapper(rank: int, own_state: bool) -> None:
    """A hook of the user's around ours stays where it is, by itself and by hand."""
    ddp, plain = (wrap(make_model(), find_unused_parameters=True) for _ in range(2))
    inner = ddp_hooks.SkipUnusedState(ddp, ddp_hooks.Policy("test", rebuild_after=2))
    heard = [0]

    def wrapper(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations as objects
        heard[0] += 1
        return ddp_hooks.skip_unused_hook(state["inner"] if own_state else state, bucket)

    state = {"inner": inner} if own_state else inner
    ddp.register_comm_hook(state, wrapper)

    def step() -> tuple[int, int]:
        before, heard[0] = inner.stats().dense_bytes, 0
        for each in (ddp, plain):
            each.zero_grad()
            each(torch.full((2, 8), 1.0 + rank)).sum().backward()
        for name, parameter in ddp.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
        return inner.stats().dense_bytes - before, heard[0]

    def freeze(name: str) -> int:
        ddp_hooks.freeze(ddp, name)
        plain.module.get_submodule(name).requires_grad_(False)
        return sum(p.numel() * 4 for p in ddp.parameters() if p.requires_grad)

    everything = sum(p.numel() * 4 for p in ddp.parameters())
    # A timer that fires for nothing must not harm, either.
    assert [step()[0] for _ in range(3)] == [everything] * 3
    left = freeze("0")
    steps = [step() for _ in range(4)]
    assert [dense for dense, _ in steps] == [everything] * 2 + [left] * 2
    assert all(calls for _, calls in steps)
    left = freeze("2")
    assert ddp_hooks.rebuild(ddp)
    dense, calls = step()
    assert dense == left
    assert calls
    assert ddp._comm_hooks == [(wrapper, state)]


@on_ranks(2)
def test_usage_is_known_after_a_rebuild(rank: int) -> None:
    """Also right after it, and by name: the new Reducer counts its parameters anew."""
    ddp = wrap(make_model(), find_unused_parameters=True)
    state = ddp_hooks.register(ddp, ddp_hooks.Policy("test", rebuild_after=2))
    names = {name for name, _ in ddp.module.named_parameters()}
    ddp_hooks.freeze(ddp, "2")

    def step() -> set[str]:
        ddp(torch.ones(2, 8)).sum().backward()
        ddp.zero_grad()
        usage = state.usage()
        assert set(usage) == names
        assert all(name == one.name and one.used_here == one.used_anywhere for name, one in usage.items())
        return {name for name, one in usage.items() if not one.used_anywhere}

    everything = sum(p.numel() * 4 for p in ddp.parameters())
    assert [step() for _ in range(2)] == [{"2.weight", "2.bias"}] * 2
    assert state.stats().dense_bytes == 2 * everything
    assert len(_C.reducer_parameters(ddp.reducer)) == len(names) - 2
    assert step() == {"2.weight", "2.bias"}
    ddp_hooks.unfreeze(ddp, "2")
    ddp_hooks.freeze(ddp, "0")
    before = state.usage()
    assert ddp_hooks.rebuild(ddp)
    assert {name: one.used_anywhere for name, one in state.usage().items()} == {
        name: one.used_anywhere for name, one in before.items()
    }
    assert step() == {"0.weight", "0.bias"}


def strided_tensors() -> list[torch.Tensor]:
    gc.collect()
    found = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    return [tensor for tensor in found if tensor.layout == torch.strided]  # those that are sparse have no storage


@on_ranks(2)
def test_buckets_are_given_back(rank: int) -> None:
    earlier = strided_tensors()  # of tests before; held, so that no other gets the identity of one
    known = set(map(id, earlier))
    model = nn.Sequential(nn.Linear(500, 500), nn.Linear(500, 500), nn.Linear(500, 4))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    ddp_hooks.register(ddp, "skip_unused")
    ddp(torch.ones(2, 500)).sum().backward()
    ddp_hooks.freeze(ddp, model[0], keep_gradients=True)
    kept = model[0].weight.grad.clone()
    ddp_hooks.rebuild(ddp)
    assert torch.equal(model[0].weight.grad, kept)
    layout = _C.reducer_layout(ddp.reducer)
    assert sum(bucket.numel for bucket in layout.buckets) == sum(p.numel() for p in model[1:].parameters())
    sizes = [tensor.untyped_storage().nbytes() for tensor in strided_tensors() if id(tensor) not in known]
    assert max(sizes) <= 500 * 501 * 4


# --- static graphs


@on_ranks(2)
def test_static_graph(rank: int) -> None:
    """Frozen later than in the first step, in which a static graph is learnt."""
    model, twin = make_model(), make_model()
    ddp = wrap(model, static_graph=True)
    state = ddp_hooks.register(ddp, "skip_unused")
    oracle = Oracle(twin)
    generator = torch.Generator().manual_seed(rank)
    for step in range(8):
        if step in (2, 5):
            for module in (ddp, twin):
                (ddp_hooks.freeze if step == 2 else ddp_hooks.unfreeze)(module, "0", "4.bias")
        batch = torch.randn(4, 8, generator=generator)
        for module in (ddp, twin):
            module.zero_grad()
            module(batch).square().sum().backward()
        oracle.reduce()
        assert_alike(model, twin, f"step {step}")
    assert state.stats().payload_bytes < state.stats().dense_bytes


# --- declared in advance


class Depth(nn.Module):
    """Stochastic depth: blocks are left out, known before the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, kept: set[int]) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for index, block in enumerate(self.blocks):
            if index in kept:
                x = x + torch.tanh(block(x))
        return self.last(x)


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("bucket_view", [False, True])
@on_ranks(2)
def test_declared_unused(rank: int, find_unused: bool, once: bool, bucket_view: bool) -> None:
    torch.manual_seed(0)
    model, twin = Depth(), Depth()
    twin.load_state_dict(model.state_dict())
    ddp = wrap(model, find_unused_parameters=find_unused, gradient_as_bucket_view=bucket_view)
    state = ddp_hooks.register(ddp, "skip_unused")
    oracle = Oracle(twin)
    optimizers = [make_optimizer("sgd", model), make_optimizer("sgd", twin)]
    generator = torch.Generator().manual_seed(rank)
    sent = 0
    for step in range(20):
        kept = {index for index in range(5) if int(torch.randint(2, (), generator=generator))}
        left_out = [model.blocks[index] for index in range(5) if index not in kept]
        batch = torch.randn(4, 8, generator=generator)
        if once:
            if left_out:
                state.declare_unused(*left_out)
            ddp(batch, kept).square().sum().backward()
        else:
            with state.unused(*left_out):
                output = ddp(batch, kept)
            output.square().sum().backward()
        twin(batch, kept).square().sum().backward()
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, kept)
        size = sum(p.numel() * 4 for p in (*model.first.parameters(), *model.last.parameters()))
        sent += size + sum(p.numel() * 4 for i in set().union(*everybody) for p in model.blocks[i].parameters())
        oracle.reduce()
        assert_alike(model, twin, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert state.stats().payload_bytes == sent


class Keeping(nn.Module):
    """Keeps what every branch made of the last batch, and with it their graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branches = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, batch: torch.Tensor, branch: int) -> torch.Tensor:
        self.kept = [branch(self.trunk(batch)) for branch in self.branches]
        return self.branches[branch](self.trunk(batch))


@pytest.mark.parametrize(("native", "bucket_view"), [(True, False), (True, True), (False, False)])
@on_ranks(2)
def test_declared_in_a_graph_that_was_kept(rank: int, native: bool, bucket_view: bool) -> None:
    """The Reducer waits for what is declared rightly and counts as used; it is told at the end."""
    torch.manual_seed(0)
    model = Keeping()
    twin = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    ddp = wrap(model, gradient_as_bucket_view=bucket_view)
    state = register(ddp, "skip_unused", native)
    for branch in (rank, 0, rank):
        state.declare_unused(*[other for i, other in enumerate(model.branches) if i != branch])
        for module in (ddp, twin):
            module.zero_grad()
            module(torch.full((2, 8), 1.0 + rank), branch).sum().backward()
        for ours, plain in zip(model.parameters(), twin.module.parameters(), strict=True):
            expected = torch.zeros_like(plain) if plain.grad is None else plain.grad
            assert torch.equal(ours.grad, expected)


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, batch: torch.Tensor, uses_a: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return self.b(batch) + (self.a(batch) if uses_a else 0), self.c(batch)


@on_ranks(2)
def test_declared_and_gone_back_from_in_parts(rank: int) -> None:
    """The Reducer waits for the other output as well when the first one's pass is over."""
    torch.manual_seed(0)
    model = TwoOutputs()
    twin = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    ddp = wrap(model)
    state = register(ddp, "skip_unused", True)
    batch = torch.full((2, 8), 1.0 + rank)
    kept = ddp(batch, True)
    sum(output.sum() for output in kept).backward(retain_graph=True)
    model.zero_grad()
    with state.unused("a"):
        outputs = ddp(batch, False)
    for output in outputs:
        output.sum().backward()
    sum(output.sum() for output in twin(batch, False)).backward()
    for ours, plain in zip(model.parameters(), twin.module.parameters(), strict=True):
        expected = torch.zeros_like(plain) if plain.grad is None else plain.grad
        assert torch.equal(ours.grad, expected)


class Recomputed(nn.Module):
    """Its middle layer enters a graph only within backward, where nobody could have seen it before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = torch.utils.checkpoint.checkpoint(self.middle, self.first(batch), use_reentrant=True)
        return self.last(hidden)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("wrong_ranks", [(0,), (0, 1)])
@pytest.mark.parametrize("what", [("first",), ("last",), ("blocks.3",), ("*",)], ids=lambda what: what[0])
@on_ranks(2)
def test_declared_wrongly(rank: int, native: bool, wrong_ranks: tuple[int, ...], what: tuple[str, ...]) -> None:
    """What was declared unused and is used after all gets plain DDP's gradient, wherever in the pass it comes."""
    plain, ddp = (wrap(Depth(), find_unused_parameters=search) for search in (True, False))
    plain.load_state_dict(ddp.state_dict())
    state = register(ddp, "skip_unused", native)
    for step in range(4):
        declared = ("blocks.1", "blocks.2", "blocks.4", *(what if rank in wrong_ranks and step % 2 else ()))
        batch = torch.ones(2, 8) * (rank + 1)
        for module, declares in ((plain, False), (ddp, True)):
            module.zero_grad()
            with state.unused(*declared) if declares else nullcontext():
                output = module(batch, {0, 3})
            # One is also used outside of the forward pass, and may then report before the outputs are reached.
            (output.sum() + module.module.blocks[3].weight.sum()).backward()
        assert_same_gradients(ddp, plain)


def declared_and_recomputed(rank: int, native: bool) -> None:
    ddp = wrap(Recomputed(), find_unused_parameters=False)
    state = register(ddp, "skip_unused", native)
    for _ in range(2):
        ddp(torch.ones(2, 8)).sum().backward()
    named = pytest.raises(RuntimeError, match=r"parameter 'middle\.\w+' was declared unused but received a gradient")
    with state.unused("middle"), named:
        ddp(torch.ones(2, 8)).sum().backward()
    # Another rank may be in its error already.
    raise SystemExit


@pytest.mark.parametrize("native", [False, True])
def test_declared_and_recomputed(native: bool) -> None:
    with pytest.raises(RankFailure, match="SystemExit") as caught:
        run_ranks(2, declared_and_recomputed, native)
    assert str(caught.value).count("raise SystemExit") == 2


@on_ranks(2)
def test_declarations_not_found(rank: int) -> None:
    ddp = wrap(Depth())
    state = ddp_hooks.register(ddp, "skip_unused")
    with pytest.raises(ValueError, match=r"received 'block\.7', which matches none"), state.unused("block.7"):
        pass


@pytest.mark.parametrize("find_unused", [False, True])
@on_ranks(2)
def test_everything_frozen(rank: int, find_unused: bool) -> None:
    model = make_model()
    ddp = wrap(model, find_unused_parameters=find_unused)
    state = ddp_hooks.register(ddp, "skip_unused")
    ddp(torch.ones(2, 8)).sum().backward()
    ddp_hooks.freeze(ddp, "*")
    # Without an input that requires a gradient there is nothing to differentiate; autograd says so.
    with pytest.raises(RuntimeError, match="does not require grad"):
        ddp(torch.ones(2, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="frozen on every rank"):
        ddp_hooks.rebuild(ddp)
    before = state.stats().payload_bytes
    batch = torch.ones(2, 8, requires_grad=True)
    ddp(batch).sum().backward()
    assert batch.grad is not None
    assert all(parameter.grad is None for parameter in model.parameters())
    assert state.stats().payload_bytes == before
    ddp_hooks.unfreeze(ddp, "*")
    ddp(torch.ones(2, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("find_unused", [False, True])
@on_ranks(2)
def test_frozen_on_one_rank(rank: int, find_unused: bool) -> None:
    """The other rank's gradient arrives, and the frozen rank gets it too, as plain DDP with a graph search does."""
    model = make_model()
    ddp = wrap(model, find_unused_parameters=find_unused)
    ddp_hooks.register(ddp, "skip_unused")
    if rank == 0:
        ddp_hooks.freeze(ddp, "0")
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.ones(2, 8)).sum().backward()
        twin = make_model()
        twin(torch.ones(2, 8)).sum().backward()
        assert torch.equal(model[0].weight.grad, twin[0].weight.grad / 2)


@on_ranks(2)
def test_frozen_critic_on_one_rank(rank: int) -> None:
    """Backward through a module that is frozen for the moment reduces nothing, as ever, and needs no other rank."""
    ddp = wrap(make_model())
    ddp_hooks.register(ddp, "skip_unused")
    for _ in range(3):
        if rank == 0:
            ddp.requires_grad_(False)
            batch = torch.ones(2, 8, requires_grad=True)
            ddp(batch).sum().backward()
            ddp.requires_grad_(True)
        ddp(torch.ones(2, 8)).sum().backward()


@on_ranks(2)
def test_loss_uses_parameters(rank: int) -> None:
    """Some parameters report before backward reaches the module's outputs; frozen ones are marked all the same."""
    model, twin = make_model(), make_model()
    ddp = wrap(model)
    ddp_hooks.register(ddp, "skip_unused")
    oracle = Oracle(twin)
    for step in range(4):
        for module in (ddp, twin):
            (ddp_hooks.freeze if step % 2 else ddp_hooks.unfreeze)(module, "0", "4.bias")
            module.zero_grad()
            penalty = sum(p.square().sum() for p in module.parameters() if p.requires_grad)
            (module(torch.ones(2, 8) * (rank + 1)).sum() + 0.1 * penalty).backward()
        oracle.reduce()
        assert_alike(model, twin, f"step {step}")


@on_ranks(2)
def test_unfrozen_before_compiling(rank: int) -> None:
    """A compiled forward pass cannot be watched, and must not meet what an older one left behind."""
    model, twin = make_model(), make_model()
    ddp = wrap(model, find_unused_parameters=True, bucket_cap_mb=25)
    ddp_hooks.register(ddp, "skip_unused")
    oracle = Oracle(twin)
    modules: list[nn.Module] = [ddp, twin]
    for step in range(6):
        if step == 1:
            for module in (ddp, twin):
                ddp_hooks.freeze(module, "0")
        if step == 3:
            for module in (ddp, twin):
                ddp_hooks.unfreeze(module, "0")
            modules[0] = torch.compile(ddp, backend="aot_eager")
        for module in modules:
            module.zero_grad()
            module(torch.ones(2, 8) * (rank + 1)).sum().backward()
        oracle.reduce()
        assert_alike(model, twin, f"step {step}")


@on_ranks(1)
def test_alone(rank: int) -> None:
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        ddp = wrap(make_model(), **options)
        ddp_hooks.register(ddp, "skip_unused")
        ddp(torch.ones(2, 8)).sum().backward()
        ddp_hooks.freeze(ddp, "0")
        for _ in range(3):
            ddp(torch.ones(2, 8)).sum().backward()
            assert ddp.module[0].weight.grad is None
        ddp_hooks.rebuild(ddp)
        ddp_hooks.unfreeze(ddp, "0")
        for _ in range(2):
            ddp(torch.ones(2, 8)).sum().backward()
            assert ddp.module[0].weight.grad is not None


# --- helpers


def refused(function: Callable[[], Any], kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        function()


def test_freeze_and_unfreeze() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model(torch.ones(2, 2)).sum().backward()
    assert ddp_hooks.freeze(model, "0.*", eval_norms=True) == ("0.weight", "0.bias")
    assert model[0].weight.grad is None
    assert not model[0].bias.requires_grad
    assert model[1].training
    assert ddp_hooks.freeze(model, model[1].weight, keep_gradients=True, eval_norms=True) == ("1.weight",)
    assert model[1].weight.grad is not None
    assert model[1].training, "one of its parameters is still trained"
    ddp_hooks.freeze(model, model[1], eval_norms=True)
    assert not model[1].training
    assert ddp_hooks.unfreeze(model, "*", train_norms=True) == tuple(dict(model.named_parameters()))
    assert model[1].training
    assert all(parameter.requires_grad for parameter in model.parameters())
    # One without parameters goes with what lies beside it.
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)), nn.Linear(2, 2))
    ddp_hooks.freeze(model, "0.0.weight", "1", eval_norms=True)
    assert model[0][1].training
    ddp_hooks.freeze(model, "0", eval_norms=True)
    assert not model[0][1].training
    ddp_hooks.unfreeze(model, model[0][0], train_norms=True)
    assert model[0][1].training
    refused(lambda: ddp_hooks.freeze(model, "encoder.*"), ValueError, r"'encoder\.\*', which matches none")
    refused(lambda: ddp_hooks.freeze(model, nn.Linear(2, 2)), ValueError, "a Linear, which matches none")
    refused(lambda: ddp_hooks.freeze(model), ValueError, "received none")
    refused(lambda: ddp_hooks.unfreeze(model, 3), TypeError, "received 3")  # type: ignore[arg-type]


def test_schedule() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))

    def frozen() -> list[bool]:
        return [not layer.weight.requires_grad for layer in model]

    schedule = ddp_hooks.FreezeSchedule(model, {1: "0", 2: ["1", "0"]}, {3: "0"})
    seen = []
    for _ in range(4):
        schedule.step()
        seen.append(frozen())
    assert seen == [[False] * 3, [True, False, False], [True, True, False], [False, True, False]]
    ddp_hooks.unfreeze(model, "*")
    resumed = ddp_hooks.FreezeSchedule(model, {1: "0", 2: ["1", "0"]}, {3: "0"})
    resumed.load_state_dict(schedule.state_dict())
    assert frozen() == [False, True, False]
    assert resumed.step() == ()
    refused(lambda: ddp_hooks.FreezeSchedule(model, {-1: "0"}), ValueError, "received -1")
    refused(lambda: ddp_hooks.FreezeSchedule(model, {1: "7"}), ValueError, "matches none")


NOT_WITHOUT = (
    r"freeze: expected .* ddp_hooks\.register\(ddp\) first, .* find_unused_parameters=True, or freeze before wrapping"
)


@on_ranks(2)
def test_freezing_without_a_hook_is_refused(rank: int) -> None:
    """What plain DDP would wait for in vain is refused, and nothing has changed; the way out works."""

    def steps(ddp: DistributedDataParallel) -> None:
        for _ in range(3):
            ddp(torch.ones(2, 8)).sum().backward()

    def trainable(ddp: DistributedDataParallel) -> list[bool]:
        return [parameter.requires_grad for parameter in ddp.parameters()]

    # What it is about.
    plain = wrap(make_model())
    plain.module[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        steps(plain)

    ddp = wrap(make_model())
    steps(ddp)
    before = trainable(ddp)
    gradient = ddp.module[0].weight.grad
    refused(lambda: ddp_hooks.freeze(ddp, "0"), RuntimeError, NOT_WITHOUT)
    refused(lambda: ddp_hooks.freeze(torch.compile(ddp), "0"), RuntimeError, NOT_WITHOUT)
    schedule = ddp_hooks.FreezeSchedule(ddp, {0: "0"}, {0: "2"})
    refused(schedule.step, RuntimeError, NOT_WITHOUT)
    refused(lambda: schedule.load_state_dict({"next_step": 1}), RuntimeError, NOT_WITHOUT)
    assert trainable(ddp) == before
    assert ddp.module[0].weight.grad is gradient

    # Nothing of it is trained then, as a discriminator in its generator's pass, so DDP waits for nothing; or it is
    # unfrozen before the next pass that is reduced.
    for _ in range(2):
        ddp_hooks.freeze(ddp, "*")
        ddp(torch.ones(2, 8, requires_grad=True)).sum().backward()
        ddp_hooks.unfreeze(ddp, "*")
        steps(ddp)
    with ddp.no_sync():
        ddp_hooks.freeze(ddp, "0")
        ddp_hooks.unfreeze(ddp, "0")
    passing = ddp_hooks.FreezeSchedule(ddp, {0: "0"}, {2: "0"})
    passing.load_state_dict({"next_step": 5})
    assert trainable(ddp) == before

    # With a hook, however it is registered, also one that is made and not registered yet.
    state = ddp_hooks.register(ddp)
    assert schedule.step() == ("2.weight", "2.bias", "0.weight", "0.bias")
    steps(ddp)
    ddp_hooks.unfreeze(ddp, "*")
    state.close()
    refused(lambda: ddp_hooks.freeze(ddp, "0"), RuntimeError, NOT_WITHOUT)
    state = ddp_hooks.SkipUnusedState(ddp)
    ddp_hooks.freeze(ddp, "0")
    around = type(state)  # a hook around ours, whose state is not ours
    ddp.register_comm_hook((state, around), hook_around)
    ddp_hooks.freeze(ddp, "2")
    steps(ddp)

    # With a search; where nothing is frozen that DDP waits for; and for the model, where nobody knows who wraps it.
    searching = wrap(make_model(), find_unused_parameters=True)
    ddp_hooks.freeze(searching, "0")
    steps(searching)
    model = make_model()
    model[0].requires_grad_(False)
    wrapped = wrap(model)
    assert ddp_hooks.freeze(wrapped, "0") == ("0.weight", "0.bias")
    steps(wrapped)
    refused(lambda: ddp_hooks.freeze(wrapped, "0", "2"), RuntimeError, NOT_WITHOUT)
    ddp_hooks.freeze(model, "2")
    # A static graph is learned in the first pass.
    static = wrap(make_model(), static_graph=True)
    ddp_hooks.freeze(static, "0")
    steps(static)
    refused(lambda: ddp_hooks.freeze(static, "2"), RuntimeError, NOT_WITHOUT)


def hook_around(pair, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations as objects
    return ddp_hooks.skip_unused_hook(pair[0], bucket)


@pytest.mark.parametrize("views", [False, True])
@on_ranks(2)
def test_frozen_under_a_hook_around(rank: int, views: bool) -> None:
    """A hook around ours that returns other memory than the bucket's; what is frozen stays as it is."""
    ddp = wrap(make_model(), gradient_as_bucket_view=views)
    state = ddp_hooks.SkipUnusedState(ddp)
    around = fp16_compress_wrapper(ddp_hooks.skip_unused_hook)
    ddp.register_comm_hook(state, around)
    for step in range(4):
        ddp(torch.ones(2, 8)).sum().backward()
        assert (ddp.module[0].weight.grad is None) == (step > 1), step
        assert ddp.module[2].weight.grad is not None
        ddp.zero_grad()
        if step == 1:
            ddp_hooks.freeze(ddp, "0")


@pytest.mark.parametrize("search", [False, True])
@on_ranks(2)
def test_gradients_across_a_rebuild(rank: int, search: bool) -> None:
    """What a rebuild takes out of the Reducer travels if it was accumulated since the last step, and else never."""
    ddp = wrap(make_model(), find_unused_parameters=search)
    plain = wrap(make_model(), find_unused_parameters=True)
    ddp_hooks.register(ddp, "skip_unused")
    models = ddp.module, plain.module
    for model in models:
        # Of before DDP: each rank has its own, and nobody uses it.
        model[0].weight.grad = torch.full_like(model[0].weight, 1.0 + rank)

    def freeze(*names: str) -> None:
        ddp_hooks.freeze(ddp, *names, keep_gradients=True)
        for name in names:
            plain.module.get_submodule(name).requires_grad_(False)

    def step(synchronises: bool = True) -> None:
        for each in (ddp, plain):
            with nullcontext() if synchronises else each.no_sync():
                each(torch.full((2, 8), 1.0 + rank)).sum().backward()
        assert_same_gradients(ddp, plain, exact=False)

    step()
    freeze("2")
    step()
    if rank == 0:
        for model in models:
            model[2].weight.grad = None
    assert ddp_hooks.rebuild(ddp)
    step()  # the second rank's old gradient of "2" stays its own
    step(synchronises=False)
    freeze("4")
    assert ddp_hooks.rebuild(ddp)
    step()  # what "4" has accumulated is averaged
    step()


@pytest.mark.parametrize("rebuilds", [False, True])
@pytest.mark.parametrize("search", [False, True])
@on_ranks(2)
def test_accumulated_before_a_change(rank: int, search: bool, rebuilds: bool) -> None:
    """What was accumulated under no_sync travels in the next step, also if that leaves it out, and only then.

    Whether the Reducer was made anew before it, or the hook taken off and registered again.
    """
    plain, ddp = (wrap(TwoHeads(), find_unused_parameters=s) for s in (True, search))
    ddp.module.load_state_dict(plain.module.state_dict())
    state = ddp_hooks.register(ddp)
    batch = torch.full((2, 8), 1.0 + rank)

    def run(head: str) -> None:
        other = "b" if head == "a" else "a"
        with state.unused(f"{other}.*"):
            ddp(batch, head).sum().backward()
        plain(batch, head).sum().backward()

    run("a")
    with ddp.no_sync(), plain.no_sync():
        run("a")
    ddp_hooks.freeze(ddp, "trunk")
    plain.module.trunk.requires_grad_(False)
    plain.zero_grad(set_to_none=False)
    ddp.zero_grad(set_to_none=False)
    with ddp.no_sync(), plain.no_sync():
        run("a")
    if rebuilds:
        assert ddp_hooks.rebuild(ddp)
    else:
        state.close()
        state = ddp_hooks.register(ddp, "skip_unused")
    for _ in range(2):
        run("b")
        for name in ("a", "b"):
            ours, theirs = (each.module.get_submodule(name).weight.grad for each in (ddp, plain))
            torch.testing.assert_close(ours, theirs, msg=name)
    gathered = [torch.empty_like(ours) for _ in range(2)]
    dist.all_gather(gathered, ddp.module.a.weight.grad)
    assert gathered[0].equal(gathered[1])


def step_alike(ddp: nn.Module, plain: nn.Module, batch: torch.Tensor, head: str) -> None:
    """Run a step of both, and compare all gradients."""
    for each in (ddp, plain):
        each(batch, head).sum().backward()
    assert_same_gradients(ddp, plain, exact=False)


@on_ranks(2)
def test_late_before_another_hook(rank: int) -> None:
    """The same for what the Reducer does not know, even if it is frozen again by then."""
    for frozen in (False, True):
        plain, ddp = (wrap(TwoHeads(), find_unused_parameters=True) for _ in range(2))
        ddp.module.load_state_dict(plain.module.state_dict())
        state = ddp_hooks.register(ddp, "skip_unused")
        batch = torch.full((2, 8), 1.0 + rank)
        models = ddp.module, plain.module
        for model in models:
            model.a.requires_grad_(False)
        assert ddp_hooks.rebuild(ddp)
        for model in models:
            model.a.requires_grad_(True)
        for each in (ddp, plain):
            with each.no_sync():
                each(batch, "ab"[rank]).sum().backward()
        for model in models:
            model.a.requires_grad_(not frozen)
        state.close()
        ddp_hooks.register(ddp, "skip_unused")
        for _ in range(2):
            step_alike(ddp, plain, batch, "b")


@pytest.mark.parametrize("again", [False, True])
@on_ranks(2)
def test_closed_after_new_buckets(rank: int, again: bool) -> None:
    """DDP makes its buckets anew in the forward pass after the first step; what the hook had taken out stays out."""

    class Both(TwoHeads):
        def forward(self, batch: torch.Tensor, head: str, fails: str = "") -> torch.Tensor:
            return sum(super(Both, self).forward(batch, name) for name in head)

    plain, ddp = (wrap(Both(), find_unused_parameters=s) for s in (True, False))
    ddp.module.load_state_dict(plain.module.state_dict())
    state = ddp_hooks.register(ddp, "skip_unused")
    batch = torch.full((2, 8), 1.0 + rank)
    with state.unused("b"):
        ddp(batch, "a").sum().backward()
    plain(batch, "a").sum().backward()
    with ddp.no_sync(), plain.no_sync():
        for each in (ddp, plain):
            each(batch, "a").sum().backward()
    state.close()
    if again:
        ddp_hooks.register(ddp, "skip_unused")
    for _ in range(2):
        step_alike(ddp, plain, batch, "ab")


@on_ranks(2)
def test_left_over_of_another_hook(rank: int) -> None:
    """What a step without the hook has taken up is nobody's to send again."""
    plain, ddp = (wrap(TwoHeads(), find_unused_parameters=True) for _ in range(2))
    ddp.module.load_state_dict(plain.module.state_dict())
    state = ddp_hooks.register(ddp)
    batch = torch.full((2, 8), 1.0 + rank)
    for again in (False, True):
        for each in (plain, ddp):
            with each.no_sync():
                each(batch, "a").sum().backward()
            if each is ddp:
                state.close()
            each(batch, "b").sum().backward()
        state = ddp_hooks.register(ddp, "skip_unused" if again else "auto")
        step_alike(ddp, plain, batch, "b")


@on_ranks(2)
def test_gradients_of_before(rank: int) -> None:
    """What was frozen when the model was wrapped, and stays so, keeps the gradient that it had."""
    model = make_model()
    model[0].requires_grad_(False)
    model[0].weight.grad = torch.full_like(model[0].weight, 1.0 + rank)
    ddp = wrap(model)
    ddp_hooks.register(ddp)
    for _ in range(2):
        ddp(torch.ones(2, 8)).sum().backward()
    assert model[0].weight.grad.eq(1.0 + rank).all()


@on_ranks(2)
def test_rebuild_while_evaluating(rank: int) -> None:
    """What a callback of an evaluation has rebuilt trains on."""
    ddp, plain = wrap(make_model()), wrap(make_model())
    ddp_hooks.register(ddp)
    for step in range(3):
        for each in (ddp, plain):
            each.zero_grad()
            each(torch.full((2, 8), 1.0 + rank)).sum().backward()
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            if ours.requires_grad:
                torch.testing.assert_close(ours.grad, theirs.grad)
        with torch.inference_mode():
            ddp_hooks.freeze(ddp, str(2 * step), keep_gradients=True)
            if step < 2:
                assert ddp_hooks.rebuild(ddp)


@on_ranks(2)
def test_rebuild_errors(rank: int) -> None:
    ddp = wrap(make_model())
    refused(lambda: ddp_hooks.rebuild(ddp), RuntimeError, "received one without")
    refused(lambda: ddp_hooks.rebuild(make_model()), TypeError, "received Sequential")  # type: ignore[arg-type]
    ddp_hooks.register(ddp)
    refused(
        lambda: ddp_hooks.rebuild(ddp, find_unused_parameters=rank == 0),
        RuntimeError,
        "find_unused_parameters: expected True as on rank 0, received False on rank 1",
    )
    assert ddp_hooks.rebuild(ddp, find_unused_parameters=True)
    ddp(torch.ones(2, 8)).sum().backward()


# --- what a declaration, a failed pass or a late unfreeze must not break


class TwoHeads(nn.Module):
    """Fails on demand: in its forward pass, or in its backward pass before the first gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, batch: torch.Tensor, head: str, fails: str = "") -> torch.Tensor:
        if fails == "forward":
            raise FloatingPointError("a bad batch")
        output = getattr(self, head)(torch.tanh(self.trunk(batch)))
        if fails == "backward":
            output.register_hook(raise_error)
        return output * 1


def raise_error(gradient: torch.Tensor) -> None:
    raise FloatingPointError("nan in a gradient")


def two_heads(native: bool) -> tuple[DistributedDataParallel, DistributedDataParallel, ddp_hooks.SkipUnusedState]:
    """Return plain DDP with a search, the same model with the hook and without one, and the state."""
    torch.manual_seed(0)
    plain = wrap(TwoHeads(), find_unused_parameters=True)
    ddp = wrap(TwoHeads(), find_unused_parameters=False)
    ddp.load_state_dict(plain.state_dict())
    return plain, ddp, register(ddp, "skip_unused", native)


@pytest.mark.parametrize("native", [False, True])
@on_ranks(2)
def test_hooks_of_the_user_stay(rank: int, native: bool) -> None:
    plain, ddp, state = two_heads(native)
    seen: dict[DistributedDataParallel, list[str]] = {plain: [], ddp: []}
    for module, events in seen.items():
        weight = module.module.a.weight
        weight.register_hook(lambda gradient, events=events: events.append("first") or gradient * 2)
        weight.register_hook(lambda gradient, events=events: events.append("second") or gradient + 1)
        weight.register_post_accumulate_grad_hook(lambda parameter, events=events: events.append("accumulated"))
    for step in range(6):
        head = "ab"[step % 2]
        for module in (plain, ddp):
            module.zero_grad()
            with state.unused("ba"[step % 2]) if module is ddp else nullcontext():
                loss = module(torch.ones(2, 8) * (rank + 1), head).sum()
            loss.backward()
        assert_same_gradients(ddp, plain)
    assert seen[ddp] == seen[plain] == ["first", "second", "accumulated"] * 3


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("fails", "where"), [("forward", (0, 1)), ("forward", (1,)), ("backward", (0, 1))])
@on_ranks(2)
def test_failed_and_run_again(rank: int, native: bool, fails: str, where: tuple[int, ...]) -> None:
    """A batch that failed on every rank is skipped; one whose backward failed on one rank is run again there."""
    plain, ddp, state = two_heads(native)
    ddp_hooks.freeze(plain, "trunk.bias")
    ddp_hooks.freeze(ddp, "trunk.bias")
    for step in range(6):
        head, other = ("a", "b") if step % 2 else ("b", "a")
        for module in (plain, ddp):
            module.zero_grad()
            if step > 1 and rank in where:
                if module is ddp:
                    # Of the batch that failed, not of the next one.
                    state.declare_unused(head if fails == "forward" else other)
                with pytest.raises(FloatingPointError):
                    module(torch.ones(2, 8), head, fails).sum().backward()
            if module is ddp:
                state.declare_unused(other)
            module(torch.ones(2, 8) * (rank + 1 + step), head).sum().backward()
        assert_same_gradients(ddp, plain)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
@on_ranks(2)
def test_late_in_every_dtype(rank: int, native: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    early, late = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).to(dtype) for _ in range(2))
    late.load_state_dict(early.state_dict())
    plain = wrap(early, find_unused_parameters=True)
    late[0].requires_grad_(False)
    ddp = wrap(late, find_unused_parameters=True)
    state = register(ddp, "skip_unused", native)
    ddp_hooks.unfreeze(ddp, "0")
    for step in range(2):
        for module in (plain, ddp):
            module.zero_grad()
            output = module((torch.ones(2, 8) * (rank + 1 + step)).to(dtype))
            (output.abs() if dtype.is_complex else output).sum().backward()
        assert_same_gradients(ddp, plain)
    # What plain DDP would have sent, and the masks.
    stats = state.stats()
    assert stats.dense_bytes == 2 * sum(p.numel() * p.element_size() for p in late.parameters())
    assert stats.payload_bytes == stats.dense_bytes


@pytest.mark.parametrize("native", [False, True])
@on_ranks(2)
def test_changed_between_forward_and_backward(rank: int, native: bool) -> None:
    """A policy may change there, and a checkpoint may be loaded; a rebuild is refused on every rank."""
    plain, ddp, state = two_heads(native)
    saved = state.state_dict()
    changes = [
        lambda: state.set_policy("skip_zeros"),
        lambda: state.load_state_dict(saved),
        lambda: state.set_policy("auto"),
        lambda: refused(lambda: ddp_hooks.rebuild(ddp), RuntimeError, "still awaits its backward pass"),
    ]
    for step, change in enumerate(changes * 2):
        batch = torch.ones(2, 8) * (rank + 1 + step)
        for module in (plain, ddp):
            module.zero_grad()
            with state.unused("b") if module is ddp else nullcontext():
                output = module(batch, "a")
            if module is ddp:
                if step == 3:
                    ddp_hooks.freeze(ddp, "a.bias")
                change()
                ddp_hooks.unfreeze(ddp, "a.bias")
            output.sum().backward()
        assert_same_gradients(ddp, plain)
    # On one rank alone it is every rank's error.
    output = ddp(batch, "a") if rank == 0 else None
    refused(lambda: ddp_hooks.rebuild(ddp), RuntimeError, r"refused on every rank\. rank 0: a forward pass still")
    del output
    assert ddp_hooks.rebuild(ddp, find_unused_parameters=True)
