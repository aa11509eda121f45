"""The groups that a state opens: named so that ranks meet, closed when they are not needed, and never in the way."""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from spawn import RankFailure, on_ranks, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import register

import ddp_hooks
from ddp_hooks import _C
from ddp_hooks.serving import control_groups


def wrap(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(4, 4), **{"find_unused_parameters": True, **options})


def reduced(ddp: DistributedDataParallel, rank: int) -> float:
    ddp.zero_grad()
    ddp(torch.ones(2, 4) * (rank + 1)).sum().backward()
    return float(ddp.module.weight.grad[0, 0])


# --- opening


@on_ranks(2)
def test_opened_by_others_only(rank: int) -> None:
    os.environ["DDP_HOOKS_HOST"] = "one for both"  # where there is one group
    ddp = wrap()
    really_open = control_groups._open_group
    opened = []  # rank 0 may still be connecting, and would report a lost connection

    def fail(*args: Any) -> None:
        opened.append(really_open(*args))
        raise RuntimeError("no file left")

    if rank == 1:
        control_groups._open_group = fail
    with pytest.raises(ddp_hooks.errors.RefusedError, match=r"refused .*\. rank 1: could not open .*: no file left"):
        ddp_hooks.register(ddp)
    control_groups._open_group = really_open
    assert reduced(ddp, rank) == 3  # as plain DDP
    ddp_hooks.register(ddp)
    assert reduced(ddp, rank) == 3


LOST = "Gloo connectFullMesh failed with [pair.cc:553] Connection closed by peer [127.0.0.1]:17606"


class Losing:
    """Opens groups as ever, but fails as gloo does that loses a connection.

    Args:
        which: the openings of this rank that fail, counted from 0.
        connects: let the others connect first; otherwise they wait for this rank in vain.
    """

    def __init__(self, which: tuple[int, ...], connects: bool = True) -> None:
        self._open = control_groups._open_group
        self._which = which
        self._connects = connects
        self.names: list[str] = []

    def __call__(self, ddp: DistributedDataParallel, name: str, *others: Any) -> Any:
        fails = len(self.names) in self._which
        self.names.append(name.partition("/")[2].partition("/")[2])  # without the random part
        opened = self._open(ddp, name, *others) if self._connects or not fails else None
        if fails:
            raise RuntimeError(LOST)
        return opened


def opened_again(rank: int, which: tuple[int, ...], connects: bool, expected: list[list[str]]) -> None:
    os.environ["DDP_HOOKS_HOST"] = "one for all"  # where nothing is coded, and coding needs a group of its own
    # Who waits for a rank that has failed waits for half of this.
    group = dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=6))
    ddp = wrap(process_group=group)
    control_groups.LARGEST_AXIS = 2
    losing = Losing(which if rank == 1 else (), connects)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_groups, "_open_group", losing)
        state = ddp_hooks.register(ddp)
    control_groups.LARGEST_AXIS = 4
    assert losing.names == expected[rank]
    assert reduced(ddp, rank) == sum(range(1, 1 + dist.get_world_size())) * 2 / dist.get_world_size()
    assert state.stats().exchanges > 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "which", "connects", "expected"),
    [
        (2, (0,), True, [["1/all", "2/all"]] * 2),
        (2, (0, 1), True, [["1/all", "2/all", "3/all"]] * 2),
        (2, (0,), False, [["1/all", "2/all"]] * 2),
        # Along an axis: what was opened before it is opened anew, too.
        (
            4,
            (2,),
            True,
            [
                [
                    f"{attempt}/{name}"
                    for attempt in (1, 2)
                    for name in ("all", f"axis0/{2 * (rank // 2)}", f"axis1/{rank % 2}", "0/sums")
                    if (rank, attempt, name) != (1, 1, "0/sums")  # behind what it has lost
                ]
                for rank in range(4)
            ],
        ),
    ],
)
def test_a_lost_connection(ranks: int, which: tuple[int, ...], connects: bool, expected: list[list[str]]) -> None:
    """Every rank opens its groups again, under another name, those whose own connections stood included."""
    run_ranks(ranks, opened_again, which, connects, expected)


def always_lost(rank: int) -> tuple[str, int]:
    os.environ["DDP_HOOKS_HOST"] = "one for both"  # where there is one group
    ddp = wrap()
    losing = Losing(tuple(range(99)) if rank == 1 else ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_groups, "_open_group", losing)
        with pytest.raises(ddp_hooks.errors.RefusedError) as caught:
            ddp_hooks.register(ddp)
        with ddp_hooks.enable(), pytest.warns(UserWarning, match=r"trains as plain .* rank 1: could not open"):
            served = wrap()
        with pytest.raises(ddp_hooks.errors.RefusedError, match=r"rank 1: could not open a group for small .* closed"):
            ddp_hooks.diagnose(ddp).__enter__()
    assert (caught.value.__cause__ is not None) == (rank == 1)
    assert reduced(served, rank) == reduced(ddp, rank) == 3
    ddp_hooks.register(ddp)
    assert reduced(ddp, rank) == 3
    return str(caught.value), len(losing.names)


def test_connections_that_are_lost_again_and_again() -> None:
    """Every rank raises the same error, after as many attempts."""
    (error, openings), other = run_ranks(2, always_lost)
    assert other == (error, openings)
    assert openings == 3 * control_groups.ATTEMPTS
    assert error == (
        "register: refused on every rank. rank 1: could not open the groups for the mask exchange after "
        f"{control_groups.ATTEMPTS} attempts: {LOST}. This rank listened at the address of the process group's own "
        "gloo backend; if other hosts cannot reach it, set GLOO_SOCKET_IFNAME on each host to an interface that they "
        "can reach"
    )


def dies_while_groups_open(rank: int) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=6))
    ddp = wrap(process_group=group)
    names: list[str] = []
    really_open = control_groups._open_group

    def open_or_die(*arguments: Any) -> Any:
        if rank == 1:
            os._exit(3)
        names.append(arguments[1])
        return really_open(*arguments)

    control_groups._open_group = open_or_die
    started = time.monotonic()
    with pytest.raises(
        ddp_hooks.errors.RanksAbsentError, match=r"register: .* of waiting for rank 1, which did not call it"
    ):
        ddp_hooks.register(ddp)
    # Once, for half of the timeout; then the data group knows, and notes are looked for.
    assert len(names) == 1
    assert time.monotonic() - started < 12
    raise RuntimeError("as it should be")


@pytest.mark.thorough
def test_a_rank_that_is_gone_is_waited_for_once() -> None:
    with pytest.raises(RankFailure, match="as it should be") as caught:
        run_ranks(2, dies_while_groups_open)
    assert "died with exit code 3" in str(caught.value)


# --- names


@pytest.mark.parametrize("native", [False, True])
@on_ranks(2)
def test_in_unequal_numbers_of_groups(rank: int, native: bool) -> None:
    dist.new_group([0])  # every rank calls it, and rank 0 alone is a member
    ddp = wrap()
    register(ddp, "skip_unused", native)
    assert reduced(ddp, rank) == 3


@on_ranks(3)
def test_on_overlapping_subgroups(rank: int) -> None:
    groups = {(0, 1): dist.new_group([0, 1]), (1, 2): dist.new_group([1, 2])}
    for ranks, group in groups.items():
        if rank in ranks:
            ddp = wrap(process_group=group)
            ddp_hooks.register(ddp)
            assert reduced(ddp, rank) == 2 * sum(r + 1 for r in ranks) / 2
    # What torch makes afterwards has the names that it would have had.
    assert dist.new_group([0, 1, 2]) is not None


@on_ranks(2)
def test_after_a_group_was_destroyed(rank: int) -> None:
    first = wrap()
    ddp_hooks.register(first)
    group = dist.new_group([0, 1])
    second = wrap()
    ddp_hooks.register(second)
    dist.destroy_process_group(group)
    third = wrap()
    ddp_hooks.register(third)
    assert [reduced(ddp, rank) for ddp in (first, second, third)] == [3, 3, 3]


# --- what is left


def resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def holds_no_more_than(expected: tuple[int, int]) -> bool:
    """Wait until no more files and no more threads than ``expected`` are open; return whether that has come."""
    deadline = time.monotonic() + 5.0
    while any(found > before for found, before in zip(resources(), expected, strict=True)):
        if time.monotonic() > deadline:
            return False
        gc.collect()
        time.sleep(0.05)
    return True


def resources_at_rest() -> tuple[int, int]:
    """Return what is open once it has not changed for half a second.

    These processes ran other tests before, whose groups close by and by. And threads that are
    started once are no leak: torch's on the first pass, and what watches the default group on the
    first registration. So these come first.
    """
    ddp = wrap()
    reduced(ddp, dist.get_rank())
    register(ddp, "skip_unused", False).close()
    del ddp
    gc.collect()
    found, since = resources(), time.monotonic()
    deadline = since + 30.0
    while time.monotonic() < min(since + 0.5, deadline):
        time.sleep(0.05)
        if (now := resources()) != found:
            found, since = now, time.monotonic()
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("native", [False, True])
@on_ranks(2)
def test_wrapped_again_and_again(rank: int, native: bool) -> None:
    before = resources_at_rest()
    model = nn.Linear(4, 4)
    for _ in range(40):
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        state = register(ddp, "skip_unused", native)
        reduced(ddp, rank)
        del ddp, state
    assert holds_no_more_than(before)


@on_ranks(2)
def test_closes_with_the_module(rank: int) -> None:
    before = resources_at_rest()
    ddp = wrap()
    state = ddp_hooks.register(ddp, "skip_unused")
    reduced(ddp, rank)
    assert resources() > before
    del ddp
    assert holds_no_more_than(before)
    assert state.stats().steps == 1
    with pytest.raises(RuntimeError, match="module no longer exists"):
        state.usage()


@on_ranks(2)
def test_shared_by_wrappers_of_one_model(rank: int) -> None:
    model = nn.Linear(4, 4)
    first = DistributedDataParallel(model, find_unused_parameters=True)
    state = ddp_hooks.register(first)
    open_before = resources_at_rest()[0]
    second = DistributedDataParallel(model, find_unused_parameters=True)
    other = ddp_hooks.register(second)
    assert resources()[0] == open_before
    # In turn, and with the first one gone.
    for step in range(4):
        assert reduced((first, second)[step % 2], rank) == 3
    state.close()
    assert reduced(second, rank) == 3
    assert other.stats().steps == 3
    # On one rank alone there is nothing to share.
    lone = nn.Linear(4, 4)
    kept = [DistributedDataParallel(lone, find_unused_parameters=True)]
    states = [ddp_hooks.register(kept[0])]
    if rank == 0:
        states[0] = kept[0] = None  # type: ignore[call-overload]
        gc.collect()
    third = DistributedDataParallel(lone, find_unused_parameters=True)
    ddp_hooks.register(third)
    assert reduced(third, rank) == 3


def fail(gradient: torch.Tensor) -> None:
    raise FloatingPointError("nan in a gradient")


class FailsOnDemand(nn.Linear):
    """Its backward pass fails between its output and its first gradient, if it is to."""

    fails = False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        output = super().forward(batch)
        if self.fails:
            output.register_hook(fail)
        return output * 1


@pytest.mark.thorough
@on_ranks(4)
def test_dropped_by_its_own_worker(rank: int) -> None:
    """A completion holds the last reference to the group in whose worker it runs."""
    control_groups.LARGEST_AXIS = 2
    ddp = DistributedDataParallel(FailsOnDemand(4, 4), find_unused_parameters=True)
    state = ddp_hooks.register(ddp)
    reduced(ddp, rank)
    if rank == 0:
        ddp.module.fails = True
        with pytest.raises(FloatingPointError):
            reduced(ddp, rank)
        assert state._service.engine.has_early_exchange()
        del ddp, state
        gc.collect()
    dist.barrier()
    if rank > 0:
        state._service.engine.finish_exchanges(state._service.engine.exchanges_started() + 1)
    # A worker that joins itself takes the process with it, a moment later.
    time.sleep(1)
    dist.barrier()
    control_groups.LARGEST_AXIS = 4


# --- closing


@pytest.mark.parametrize("native", [False, True])
@on_ranks(2)
def test_closed(rank: int, native: bool) -> None:
    """The module trains on as plain DDP, with everything that the user has set on it."""
    seen: list[str] = []
    ddp = wrap(bucket_cap_mb=0.001)
    ddp.module.weight.register_hook(lambda gradient: seen.append("tensor"))
    ddp.module.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    before = resources_at_rest()
    state = register(ddp, "skip_unused", native)
    assert reduced(ddp, rank) == 3
    sent = state.stats()
    state.close()
    state.close()  # does nothing
    assert holds_no_more_than(before)
    assert not _C.reducer_has_hook(ddp.reducer)
    assert ddp._comm_hooks == []
    assert not ddp._forward_hooks
    assert not ddp._forward_pre_hooks
    for _ in range(2):
        assert reduced(ddp, rank) == 3
    assert seen == ["tensor", "accumulated"] * 3
    assert state.stats() == sent
    # Closed for good; another one takes its place, and goes on with its statistics if it is told to.
    again = register(ddp, "auto", native)
    assert again is not state
    assert reduced(ddp, rank) == 3
    assert again.stats().steps == 1
    with again.unused("weight"):
        again.close()
    third = register(ddp, "skip_unused", native)
    third.load_state_dict(state.state_dict())
    assert reduced(ddp, rank) == 3
    assert third.stats().steps == sent.steps + 1
    assert state.stats() == sent


@on_ranks(2)
def test_closed_within_backward(rank: int) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_cap_mb=1e-5)
    state = ddp_hooks.register(ddp)
    refused: list[str] = []

    def close(gradient: torch.Tensor) -> None:
        try:
            state.close()
        except RuntimeError as error:
            refused.append(str(error))

    ddp.module[0].weight.register_hook(close)
    for _ in range(2):
        ddp(torch.ones(2, 4)).sum().backward()
    assert len(refused) == 2
    assert state.stats().steps == 2

    def close_and_go_on(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations as objects
        close(bucket.buffer())  # while DDP holds its lock
        return ddp_hooks.skip_unused_hook(state, bucket)

    ddp = DistributedDataParallel(nn.Linear(4, 4))
    state = ddp_hooks.SkipUnusedState(ddp)
    ddp.register_comm_hook(state, close_and_go_on)
    ddp(torch.ones(2, 4)).sum().backward()
    assert len(refused) == 3
    assert all("rank 0: a backward pass is under way" in text for text in refused)
    assert state.stats().steps == 1


class FrozenFirst(nn.Module):
    """Of two dtypes each a layer that is frozen when the module is wrapped, so that DDP does not know it."""

    def __init__(self) -> None:
        super().__init__()
        self.known = nn.Linear(4, 4)
        self.late = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).double()]).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        single, double = self.late
        return self.known(x) + single(x) + double(x.double()).float()


def at_the_end_of_backward(parameter: nn.Parameter, act: Callable[[], None]) -> None:
    """Call ``act`` in the next pass that uses the parameter, when unmanaged gradients are all that is still to come.

    What is queued from within a callback comes in the order in which the callbacks do, and before the last bucket.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def report(gradient: torch.Tensor) -> None:
        handle.remove()
        queue(lambda: queue(act))

    handle = parameter.register_hook(report)


@pytest.mark.parametrize("moment", ["refused", "gone", "while it averages"])
@on_ranks(2)
def test_closed_at_the_end_of_backward(rank: int, moment: str) -> None:
    """By another thread, when the Reducer has finalised and this rank still owes the others its unmanaged gradients."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(FrozenFirst())
    state = ddp_hooks.register(ddp)
    ddp.module.late.requires_grad_(True)
    engine = state._service.engine
    outcomes: list[str] = []

    def close() -> None:
        time.sleep(0.3 if moment == "while it averages" else 0.0)
        try:
            if moment == "refused":
                state.close()
            else:  # as when the module goes
                state._service._control_groups = None
                engine.close(remove_hook=False, dying=True)
            outcomes.append("closed")
        except RuntimeError as error:
            outcomes.append(str(error))

    thread = threading.Thread(target=close)

    def act() -> None:
        if moment == "while it averages" and rank == 1:
            time.sleep(1.0)  # rank 0 waits for the first of two messages meanwhile
            return
        thread.start()
        if moment != "while it averages":
            thread.join()

    at_the_end_of_backward(ddp.module.known.weight, act)
    ddp(torch.full((2, 4), rank + 1.0)).sum().backward()
    if thread.ident is not None:
        thread.join()
        expected = "received a call during a backward pass" if moment == "refused" else "closed"
        assert [expected in outcome for outcome in outcomes] == [True]
    assert ddp.module.known.weight.grad.eq(3).all()
    # Of a module that has gone, nobody takes care.
    late = 2 * (rank + 1) if moment == "gone" else 3
    assert all(layer.weight.grad.eq(late).all() for layer in ddp.module.late)
    if moment == "refused":
        state.close()
        assert not _C.reducer_has_hook(ddp.reducer)


@on_ranks(2)
def test_closed_after_an_error_at_the_end_of_backward(rank: int) -> None:
    """What is not called any more keeps nobody from closing."""
    ddp = DistributedDataParallel(FrozenFirst())
    state = ddp_hooks.register(ddp)
    ddp.module.late.requires_grad_(True)

    def fail() -> None:
        raise RuntimeError("on purpose")

    at_the_end_of_backward(ddp.module.known.weight, fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        ddp(torch.ones(2, 4)).sum().backward()
    state.close()


@pytest.mark.parametrize("replaced", [False, True])
@on_ranks(1)
def test_rebuild_goes_while_it_runs(rank: int, replaced: bool) -> None:
    """What is called to rebuild lives as long as its call, also when that closes the engine, as a rebuild does."""

    class Token:
        pass

    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    state = ddp_hooks.register(ddp, ddp_hooks.Policy("test", rebuild_after=1))
    ddp.module[0].requires_grad_(False)
    engine = state._service.engine
    lived: list[bool] = []

    def set_rebuild(rebuild: Callable[[], None]) -> None:
        engine.set_callbacks(rebuild=rebuild, tell_unregistered=lambda: None, explain=lambda said: "")

    def rebuild(token: Token) -> None:
        alive = weakref.ref(token)
        del token  # the partial has it still
        if replaced:
            set_rebuild(lambda: None)
        else:
            engine.close(remove_hook=True, dying=True)
        lived.append(alive() is not None)

    token = Token()
    gone = weakref.ref(token)
    set_rebuild(functools.partial(rebuild, token))
    del token
    ddp(torch.ones(2, 4)).sum().backward()
    assert lived == [True]
    assert gone() is None


def on_one_rank_only(rank: int) -> None:
    ddp = wrap()
    if rank == 0:
        with pytest.raises(
            ddp_hooks.errors.RanksAbsentError, match=r"register: .* of waiting for rank 1, which did not call it"
        ):
            ddp_hooks.register(ddp)
    else:
        time.sleep(6)


@pytest.mark.thorough
def test_on_one_rank_only() -> None:
    with pytest.raises(RankFailure) as caught:  # the barrier at the end of each test finds a broken group
        run_ranks(2, on_one_rank_only, collective_timeout=2.0)
    assert "DID NOT RAISE" not in str(caught.value)
    assert "AssertionError" not in str(caught.value)
    assert "on_one_rank_only" not in str(caught.value)


@on_ranks(2)
def test_in_different_functions(rank: int) -> None:
    ddp = wrap()
    ddp_hooks.register(ddp)
    for ours, theirs in (("rebuild", "set_policy"), ("rebuild", "average_parameters"), ("set_policy", "register")):
        calls = {
            "rebuild": lambda: ddp_hooks.rebuild(ddp),
            "set_policy": lambda: state(ddp).set_policy("auto"),
            "average_parameters": lambda: ddp_hooks.sync.average_parameters(ddp),
            "register": lambda: ddp_hooks.register(ddp),
        }
        with pytest.raises(ddp_hooks.errors.RanksDisagreeError, match="expected the same call") as caught:
            calls[ours if rank == 0 else theirs]()
        assert ours in str(caught.value)
        assert theirs in str(caught.value)
    assert reduced(ddp, rank) == 3


def state(ddp: DistributedDataParallel) -> ddp_hooks.SkipUnusedState:
    return ddp._comm_hooks[0][1]  # type: ignore[no-any-return]


def timeouts(rank: int, seconds: float) -> tuple[float, float]:
    """Return how long the module's control group waits for connections, and for messages."""
    asked = []

    class Recorded(dist.ProcessGroupGloo):
        def __init__(self, *arguments: Any) -> None:
            asked.append(arguments[-1]._timeout.total_seconds())
            super().__init__(*arguments)

    group = dist.new_group([0, 1], timeout=timedelta(seconds=seconds))
    ddp = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "ProcessGroupGloo", Recorded)
        devices = [dist.ProcessGroupGloo.create_default_device()]
        opened = control_groups._open_group(ddp, "timeouts", rank, 2, devices)
    # A rank that closes its group while the other one still connects is one that has lost the connection.
    dist.barrier(group)
    return asked[0] * 5, opened.options._timeout.total_seconds()


@pytest.mark.parametrize(("seconds", "to_connect"), [(1800, 60), (60, 30), (15, 10), (5, 4.5)])
def test_connections_are_given_up_before_the_data_group_gives_up(seconds: float, to_connect: float) -> None:
    """A rank that lost one waits for the others on that group meanwhile."""
    assert run_ranks(2, timeouts, seconds) == [pytest.approx((to_connect, seconds))] * 2
