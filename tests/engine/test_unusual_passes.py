"""Passes that plain DDP tolerates and few programs run: bitwise the same gradients, or an error that says why not."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from spawn import on_ranks, run_ranks
from test_equivalence import HELD
from test_units import EVERY_ROW, WITH_VALUES
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import assert_same_gradients, register
from tuned import with_settings

import ddp_hooks

Gradients = list[torch.Tensor | None]
Wrap = Callable[..., DistributedDataParallel]
# Wraps a model, runs some passes, and returns the gradients to compare.
Passes = Callable[[Wrap, int], Gradients]


def batch(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 + rank))


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def run_pass(ddp: DistributedDataParallel, rank: int) -> Gradients:
    ddp.zero_grad()
    ddp(batch(rank)).square().sum().backward()
    return gradients_of(ddp)


def gradients_of(ddp: DistributedDataParallel) -> Gradients:
    return [None if p.grad is None else p.grad.detach().clone() for p in ddp.module.parameters()]


def same_as_plain(rank: int, passes: Passes, policy: ddp_hooks.Policy | str, native: bool) -> None:
    found = []
    for hooked in (False, True):

        def wrap(model: nn.Module, hooked: bool = hooked, **options: Any) -> DistributedDataParallel:
            ddp = DistributedDataParallel(model, **options)
            if hooked:
                register(ddp, policy, native)
            return ddp

        torch.manual_seed(0)
        torch._dynamo.reset()
        found.append(passes(wrap, rank))
    for i, (plain, ours) in enumerate(zip(*found, strict=True)):
        assert (plain is None) == (ours is None), i
        if plain is not None and ours is not None:
            assert torch.equal(plain, ours), i


def group_updated(wrap: Wrap, rank: int, searches: bool = True) -> Gradients:
    """DDP is given its process group again, as after a failure; the buckets stay while DDP says they are new."""
    model = layers()
    ddp = wrap(model, find_unused_parameters=searches)
    gradients = run_pass(ddp, rank) + run_pass(ddp, rank)
    if searches or ddp._comm_hooks:  # plain DDP cannot freeze without a search
        model[0].requires_grad_(False)
    run_pass(ddp, rank)
    dist.barrier()
    ddp._update_process_group(ddp.process_group)
    model[0].requires_grad_(True)
    return gradients + run_pass(ddp, rank) + run_pass(ddp, rank)


def group_updated_without_search(wrap: Wrap, rank: int) -> Gradients:
    return group_updated(wrap, rank, searches=False)


class TwoDtypes(nn.Module):
    """Two buckets from the first pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).double())


def dry_runs_before_a_static_graph(wrap: Wrap, rank: int) -> Gradients:
    """A static graph is learnt in the first backward pass, however many forward passes there were on whatever rank."""
    gradients: Gradients = []
    for ranks in ((0, 1), (0,)):
        ddp = wrap(TwoDtypes(), static_graph=True)
        if rank in ranks:
            ddp(batch(rank))
        for _ in range(3):
            gradients += run_pass(ddp, rank)
    return gradients


def unfrozen_behind_the_engines_back(wrap: Wrap, rank: int) -> Gradients:
    """What an evaluation saw frozen is unfrozen for a pass that cannot be watched."""
    model = layers()
    ddp = wrap(model)
    run_pass(ddp, rank)
    ddp.zero_grad()
    model[0].requires_grad_(False)
    ddp(batch(rank))
    model[0].requires_grad_(True)
    ddp.forward(batch(rank)).square().sum().backward()
    return gradients_of(ddp)


class RunTwice(TwoDtypes):
    """Its first layer's gradients come in two parts, because a reentrant checkpoint runs a backward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.first, x, use_reentrant=True)
        return self.second(x.double())


def reported_twice(wrap: Wrap, rank: int) -> Gradients:
    """With a static graph a parameter may report several times; the last report counts."""
    ddp = wrap(RunTwice(), static_graph=True, bucket_cap_mb=80 / 2**20)  # keeps the second layer's bucket the first
    gradients: Gradients = []
    for _ in range(4):
        ddp.zero_grad()
        ddp(batch(rank).requires_grad_()).square().sum().backward()
        gradients += gradients_of(ddp)
    return gradients


def changed_after_its_report(wrap: Wrap, rank: int) -> Gradients:
    """What happens to a gradient when DDP has been told that it is there comes too late to be sent."""
    model = TwoDtypes()
    ddp = wrap(model, find_unused_parameters=True)  # which keeps the first layer's bucket the second

    def change(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad.add_(1)

    for parameter in model.first.parameters():
        function = parameter.expand_as(parameter).grad_fn
        assert function is not None
        accumulator = function.next_functions[0][0]
        accumulator.register_hook(lambda *_, parameter=parameter: change(parameter))
    return run_pass(ddp, rank) + run_pass(ddp, rank) + run_pass(ddp, rank)


class TwoBranches(TwoDtypes):
    """Each pass takes one of two branches, which are in the second bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return super().forward(self.branches[branch](x))


def broken_off_between_buckets(wrap: Wrap, rank: int) -> Gradients:
    """A pass breaks off when its first bucket is ready, on every rank, and the next one takes another branch."""
    model = TwoBranches()
    ddp = wrap(model, find_unused_parameters=True)

    def run(branch: int) -> Gradients:
        ddp.zero_grad()
        ddp(batch(rank), branch).square().sum().backward()
        return gradients_of(ddp)

    gradients = run(0)
    handle = model.first.weight.register_hook(break_off)
    with pytest.raises(ArithmeticError):
        run(0)
    handle.remove()
    dist.barrier()
    ddp._update_process_group(ddp.process_group)
    return gradients + run(1) + run(0)


def bucket_dropped_before_the_last(wrap: Wrap, rank: int) -> Gradients:
    """A user drops gradients whose bucket is ready; DDP makes new ones of what it has copied."""
    model = TwoDtypes()
    ddp = wrap(model, find_unused_parameters=True)  # which keeps the first layer's bucket the second

    def drop(_: torch.Tensor) -> None:
        model.second.weight.grad = None
        model.second.bias.grad = torch.full_like(model.second.bias, 7.0)

    model.first.weight.register_hook(drop)
    return run_pass(ddp, rank) + run_pass(ddp, rank)


def branch_dropped_before_the_last(wrap: Wrap, rank: int) -> Gradients:
    """The same; but ranks take different branches, so that what is looked into leaves after the last bucket only."""
    model = TwoBranches()
    ddp = wrap(model, find_unused_parameters=True)

    def drop(_: torch.Tensor) -> None:
        model.second.weight.grad = None
        model.second.bias.grad = torch.full_like(model.second.bias, 7.0)

    model.first.weight.register_hook(drop)
    gradients: Gradients = []
    for _ in range(2):
        ddp.zero_grad()
        ddp(batch(rank), rank).square().sum().backward()
        gradients += gradients_of(ddp)
    return gradients


WAYS: dict[str, tuple[ddp_hooks.Policy | str, bool]] = {
    "native": ("skip_unused", True),
    "python": ("skip_unused", False),
    "held-native": (HELD, True),
    "held-python": (HELD, False),
}


@pytest.mark.parametrize(
    ("passes", "way"),
    [
        pytest.param(passes, way, id=f"{passes.__name__}-{way}")
        for way in WAYS
        for passes in (
            broken_off_between_buckets,
            bucket_dropped_before_the_last,
            group_updated,
            group_updated_without_search,
            dry_runs_before_a_static_graph,
            unfrozen_behind_the_engines_back,
            reported_twice,
            changed_after_its_report,
        )
        # What lies in .grad until the step opens is sent as it is then.
        if (passes, way) != (changed_after_its_report, "held-native")
    ],
)
def test_same_as_plain(passes: Passes, way: str) -> None:
    run_ranks(2, same_as_plain, passes, *WAYS[way])


@pytest.mark.parametrize("opening_bytes", [0, 1 << 40])
@pytest.mark.parametrize("policy", ["skip_zeros", EVERY_ROW, WITH_VALUES], ids=["values", "rows", "both"])
@pytest.mark.parametrize("passes", [bucket_dropped_before_the_last, branch_dropped_before_the_last])
def test_dropped_while_it_is_looked_into(passes: Passes, policy: ddp_hooks.Policy | str, opening_bytes: int) -> None:
    run_ranks(2, same_as_plain, passes, with_settings(policy, opening_bytes=opening_bytes), True)


@pytest.mark.parametrize("views", [False, True])
@on_ranks(2)
def test_gradients_of_gradients(rank: int, views: bool) -> None:
    """DDP refuses create_graph=True; taking the gradients from it must not make that a silent zero."""
    for hooked in (False, True):
        ddp = DistributedDataParallel(layers(), gradient_as_bucket_view=views)
        if hooked:
            ddp_hooks.register(ddp)
        run_pass(ddp, rank)
        ddp.zero_grad()
        with pytest.raises(RuntimeError, match="in-place operation"):
            ddp(batch(rank)).square().sum().backward(create_graph=True)


class LeavesOutItsFirstBucket(TwoDtypes):
    """The first bucket is there with the first gradient, and nothing of it is sent."""

    breaks_off = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks_off == "forward":
            raise ArithmeticError
        output = self.first(x)
        if self.breaks_off == "outputs":
            output.register_hook(break_off)
        return output * 1


def break_off(_: torch.Tensor) -> None:
    raise ArithmeticError


def break_off_a_pass(ddp: DistributedDataParallel, rank: int, where: str) -> None:
    ddp.module.breaks_off = where
    handle = ddp.module.first.weight.register_hook(break_off)  # behind the first bucket
    with pytest.raises(ArithmeticError):
        run_pass(ddp, rank)
    handle.remove()
    ddp.module.breaks_off = ""
    ddp._update_process_group(ddp.process_group)


EVERYWHERE = [["outputs", "buckets"], ["outputs", "forward"], ["buckets", "buckets"]]


@pytest.mark.parametrize(
    ("policy", "ways"),
    # If a step opens with the first bucket, that waits for the other rank's exchange.
    [
        pytest.param("skip_unused", EVERYWHERE, id="at once"),
        pytest.param(HELD, [*EVERYWHERE, ["buckets", "forward"]], id="held"),
    ],
)
@on_ranks(2)
def test_agreement_after_passes_that_broke_off(
    rank: int, policy: ddp_hooks.Policy | str, ways: list[list[str]]
) -> None:
    """Ranks break off where they have started an exchange, have taken it up, or have not; then they agree."""
    torch.manual_seed(0)
    model = LeavesOutItsFirstBucket()
    plain = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    run_pass(plain, rank)
    for places in ways:
        for agree in ("set_policy", "rebuild", "after a forward pass"):
            ddp = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
            state = ddp_hooks.register(ddp, policy)
            run_pass(ddp, rank)
            break_off_a_pass(ddp, rank, places[rank])
            if agree == "rebuild":
                assert ddp_hooks.rebuild(ddp, find_unused_parameters=False)
                assert ddp_hooks.rebuild(ddp, find_unused_parameters=True)
            else:
                if agree == "after a forward pass":
                    ddp(batch(rank))
                state.set_policy("skip_zeros")
                assert state.policy.name == "skip_zeros"
            for _ in range(2):
                run_pass(ddp, rank)
                assert_same_gradients(ddp, plain)


@pytest.mark.parametrize("then", ["forward", "set_policy", "rebuild", "close", "gone"])
@on_ranks(2)
def test_told_that_a_pass_broke_off(rank: int, then: str) -> None:
    """Whoever waits for a bucket hears that nothing will come of it."""
    futures = []

    def keep(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations as objects
        futures.append(ddp_hooks.skip_unused_hook(state, bucket))
        return futures[-1]

    ddp = DistributedDataParallel(LeavesOutItsFirstBucket(), find_unused_parameters=True)
    state = ddp_hooks.SkipUnusedState(ddp, HELD)
    ddp.register_comm_hook(state, keep)
    break_off_a_pass(ddp, rank, "buckets")
    assert len(futures) == 1
    assert not futures[0].done()
    if then == "forward":
        ddp(batch(rank))
    elif then == "set_policy":
        state.set_policy("auto")
    elif then == "rebuild":
        ddp_hooks.rebuild(ddp, find_unused_parameters=False)
    elif then == "close":
        state.close()
    else:
        del ddp, state
        gc.collect()
    assert futures[0].done()
    with pytest.raises(RuntimeError, match=r"broke off before its gradients were averaged; .* repeat the step"):
        futures[0].wait()


@pytest.mark.thorough
@on_ranks(2)
def test_declared_for_long(rank: int) -> None:
    """Declaring the same parameters in every step costs no memory."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.ModuleList(nn.Linear(2, 2) for _ in range(50))
            self.used = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    ddp = DistributedDataParallel(Model())
    state = ddp_hooks.register(ddp, "skip_unused")

    def resident_bytes_after(steps: int) -> int:
        for _ in range(steps):
            with state.unused(ddp.module.unused):
                output = ddp(batch(rank))
            output.sum().backward()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_bytes_after(300)
    # A hook for each parameter and step would be 100 * 1000 * 48 bytes.
    assert resident_bytes_after(1000) - before < 2_000_000


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, both: bool) -> list[torch.Tensor]:
        x = self.trunk(x)
        return [self.b(x), self.a(x)] if both else [self.b(x)]


@pytest.mark.parametrize("then", ["goes on", "closed", "to some"])
@on_ranks(2)
def test_output_left_out_under_no_sync(rank: int, then: str) -> None:
    """What reports without a gradient is not used, although a placeholder stands in its place since the step before."""
    torch.manual_seed(0)
    plain, ddp = (DistributedDataParallel(TwoHeads(), find_unused_parameters=True) for _ in range(2))
    ddp.module.load_state_dict(plain.module.state_dict())
    state = ddp_hooks.register(ddp, "skip_unused")
    for each in (plain, ddp):
        each(batch(rank), False)[0].sum().backward()
        with each.no_sync():
            each(batch(rank), True)[0].sum().backward()
        if then == "closed" and each is ddp:
            state.close()
        to = [*each.module.trunk.parameters(), *each.module.b.parameters()] if then == "to some" else None
        each(batch(rank), False)[0].sum().backward(inputs=to)
    assert_same_gradients(ddp, plain)
    if then == "goes on":
        assert not state.usage()["a.weight"].used_anywhere


@on_ranks(2)
def test_hook_after_ours(rank: int) -> None:
    """Whoever comes after the hook is handed the parameters, which the Reducer looks up once and for all."""
    model = layers()
    ddp = DistributedDataParallel(model)
    state = ddp_hooks.register(ddp)
    for _ in range(2):
        run_pass(ddp, rank)
    state.close()
    handed = []

    def collect(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        handed.extend(bucket.parameters())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    # DDP reads annotations, which here would be strings.
    ddp.register_comm_hook(None, lambda _, bucket: collect(bucket))
    run_pass(ddp, rank)
    assert {id(parameter) for parameter in handed} == {id(parameter) for parameter in model.parameters()}


@on_ranks(2)
def test_second_state(rank: int) -> None:
    """A state that was made and never registered leaves the module to the next."""
    ddp = DistributedDataParallel(layers())
    first = ddp_hooks.SkipUnusedState(ddp)
    second = ddp_hooks.register(ddp)
    ddp.module[0].requires_grad_(False)
    for _ in range(2):
        run_pass(ddp, rank)
    assert ddp_hooks.rebuild(ddp)
    run_pass(ddp, rank)
    assert second.stats().steps == 3
    assert first.stats().steps == 0
    assert "detached" in repr(first)


@on_ranks(2)
def test_trained_on_without_its_wrapper(rank: int) -> None:
    """A state that is kept does not stand in the model's way."""
    model = layers()
    ddp = DistributedDataParallel(model)
    state = ddp_hooks.register(ddp)
    for _ in range(2):
        run_pass(ddp, rank)
    del ddp
    gc.collect()
    model.zero_grad()
    model(batch(rank)).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert state.stats().steps == 2


@on_ranks(2)
def test_statistics_from_a_callback(rank: int) -> None:
    """Buckets complete inside a later call of the hook, and with them what was chained to their futures."""
    model = TwoDtypes()
    ddp = DistributedDataParallel(model)
    state = ddp_hooks.SkipUnusedState(ddp, "skip_zeros")
    seen = []

    def look(future):  # type: ignore[no-untyped-def]
        seen.append((state.stats().steps, len(state.usage())))
        return future.value()

    def skip_and_look(state, bucket):  # type: ignore[no-untyped-def]
        return ddp_hooks.skip_unused_hook(state, bucket).then(look)

    ddp.register_comm_hook(state, skip_and_look)
    for _ in range(3):
        ddp.zero_grad()
        (ddp(batch(rank)) * 0).sum().backward()
    assert len(seen) >= 3
