"""`enable`: modules that somebody else makes get the hook, train to plain DDP's weights, and leave no trace.

There is no ``from __future__ import annotations`` here: DDP compares the annotations of a hook as objects.
"""

import copy
import gc
import inspect
import pickle
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from spawn import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import ddp_hooks
from ddp_hooks import enabling
from ddp_hooks.serving import absentees
from ddp_hooks.serving.ddp_methods import watch_construction

METHODS = ("__init__", "register_comm_hook", "_register_builtin_comm_hook")
PLAIN = {name: getattr(DistributedDataParallel, name) for name in METHODS}


class Heads(nn.Module):
    """Each rank uses a head of its own in every other step, and nobody uses one of the heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(16, 16)
        self.heads = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.trunk(x))


class Own(DistributedDataParallel):
    """A subclass that has something left to do when DDP's `__init__` is done."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, find_unused_parameters=True, **options)
        self.made_by = "a subclass"


def wrapped(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Heads(), find_unused_parameters=True, **options)


def train(ddp: nn.Module, rank: int, steps: int = 4) -> list[torch.Tensor]:
    """Train, and return every gradient and weight."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.001, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(4, 16, generator=generator), rank if step % 2 else 0).square().mean().backward()
        seen += [torch.zeros(1) if p.grad is None else p.grad.clone() for p in ddp.parameters()]
        optimizer.step()
    return seen + [p.detach().clone() for p in ddp.parameters()]


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs) > 0
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def is_plain(*methods: str) -> bool:
    return all(getattr(DistributedDataParallel, name) is PLAIN[name] for name in methods or METHODS)


_earlier: list[ddp_hooks.SkipUnusedState] = []


def begin() -> None:
    """Leave what other tests in these processes have left behind out of account."""
    torch._dynamo.reset()
    gc.collect()
    _earlier[:] = ddp_hooks.states()
    assert is_plain()


def states() -> list[ddp_hooks.SkipUnusedState]:
    return [state for state in ddp_hooks.states() if state not in _earlier]


def has_hook(ddp: DistributedDataParallel) -> bool:
    return bool(ddp._comm_hooks)


@on_ranks(2)
def test_modules_that_others_make_get_the_hook(rank: int) -> None:
    begin()
    before = wrapped()
    expected = train(before, rank)
    other = wrapped()
    registered = ddp_hooks.register(other, "skip_unused")
    train(other, rank)
    del other

    context = ddp_hooks.enable("skip_unused")
    assert inspect.signature(DistributedDataParallel.__init__) == inspect.signature(PLAIN["__init__"])
    assert states() == []  # the registered one's module is gone
    made, own = wrapped(), Own(Heads())
    served = states()
    assert [state.serves(ddp) for state, ddp in zip(served, (made, own), strict=True)] == [True, True]
    assert own.made_by == "a subclass"
    assert not has_hook(before)
    for ddp, state in zip((made, own), served, strict=True):
        assert_equal(train(ddp, rank), expected)
        saved = [each.payload_bytes for each in (state.stats(), registered.stats())]
        assert saved[0] == saved[1] < state.stats().dense_bytes
    assert ddp_hooks.register(made, "skip_unused") is served[0]
    with pytest.raises(RuntimeError, match="set_policy") as refusal:
        ddp_hooks.register(made, "skip_zeros")
    assert "ddp_hooks.states()" in str(refusal.value)
    with pytest.raises(RuntimeError, match=r"already registered .*ddp_hooks\.states\(\)"):
        ddp_hooks.SkipUnusedState(made)
    assert "in force" in repr(context)

    ddp_hooks.disable()
    assert is_plain("__init__")
    assert "ended" in repr(context)
    assert not has_hook(wrapped())
    assert_equal(train(made, rank), train(before, rank))  # those that have the hook keep it
    assert states() == served
    # Hooks through Python count, and closed ones do not.
    through_python = ddp_hooks.SkipUnusedState(before)
    before.register_comm_hook(through_python, ddp_hooks.skip_unused_hook)
    served[0].close()
    assert states() == [served[1], through_python]
    del made, own, ddp, refusal  # the error's frames hold the module
    gc.collect()
    assert is_plain()
    assert states() == [through_python]
    assert context.states == served
    assert served[1].stats().steps > 0
    ddp_hooks.disable()


@on_ranks(2)
def test_blocks_nest_and_leave_no_trace(rank: int) -> None:
    begin()
    with ddp_hooks.enable("skip_unused", rebuild_after=3) as outer:
        assert outer.policy == ddp_hooks.Policy("skip_unused", rebuild_after=3)
        with ddp_hooks.enable("skip_zeros"):
            first = wrapped()
        second = wrapped()
        made: list[DistributedDataParallel] = []
        thread = threading.Thread(target=lambda: made.append(wrapped()))
        thread.start()
        thread.join()
    assert is_plain("__init__")
    policies = [state.policy for state in states()]
    assert policies == [ddp_hooks.policies.PRESETS["skip_zeros"], outer.policy, outer.policy]
    assert [has_hook(ddp) for ddp in (first, second, *made, wrapped())] == [True] * 3 + [False]

    # Not in the order in which they began, and out of a block by an error.
    early, late = ddp_hooks.enable("skip_unused"), ddp_hooks.enable("skip_zeros")
    early.end()
    early.end()
    third = wrapped()
    assert states()[-1].policy.name == "skip_zeros"
    late.end()
    with pytest.raises(KeyError), ddp_hooks.enable():
        raise KeyError
    with ddp_hooks.enable(), ddp_hooks.enable():
        ddp_hooks.disable()
        assert not has_hook(wrapped())
    assert is_plain("__init__")

    # A module of the user's is still theirs: it can be copied, pickled, compiled; and a failed one is nobody's.
    with ddp_hooks.enable("skip_unused"):
        compiled = torch.compile(wrapped(), backend="eager")
        assert_equal(train(compiled, rank), train(third, rank))
        assert states()[-1].stats().payload_bytes < states()[-1].stats().dense_bytes
        copies = [copy.deepcopy(third), pickle.loads(pickle.dumps(third))]
        assert len(states()) == 5
        frozen = Heads().requires_grad_(False)
        with pytest.raises(RuntimeError, match="not needed when a module"):
            DistributedDataParallel(frozen)
        assert len(states()) == 5
        plain = [train(one, rank) for one in copies]
        assert_equal(*plain)


@on_ranks(2)
def test_other_wrappers_are_respected(rank: int) -> None:
    """Somebody else replaces `__init__`, too, before or after."""
    calls: list[str] = []

    def note(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, *args: Any, **options: Any) -> None:
            original(self, *args, **options)
            calls.append("theirs")

        return __init__

    with watch_construction(lambda ddp: calls.append("first")):
        DistributedDataParallel.__init__ = theirs = note(DistributedDataParallel.__init__)
        with watch_construction(lambda ddp: calls.append("second")):
            wrapped()
        # In the order in which they began, once each, though ours lies below theirs and above.
        assert calls == ["theirs", "first", "second"]
        wrapped()
        assert calls[3:] == ["theirs", "first"]
    assert DistributedDataParallel.__init__ is theirs
    wrapped()
    assert calls[5:] == ["theirs"]
    DistributedDataParallel.__init__ = PLAIN["__init__"]

    def refuse(ddp: DistributedDataParallel) -> None:
        raise ValueError("not this one")

    with watch_construction(refuse), pytest.raises(ValueError, match="not this one"):
        wrapped()
    assert is_plain("__init__")


# --- what cannot be served


def warned(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    ours = [each for each in caught if "ddp_hooks" in str(each.message)]
    assert all(each.filename == __file__ for each in ours), "a warning names the line that made the module"
    return result, [str(each.message) for each in ours]


def delayed(rank: int) -> DistributedDataParallel:
    model = Heads()
    model.heads[2].requires_grad_(False)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return DistributedDataParallel(model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=named[0][1])


def in_backward(rank: int) -> DistributedDataParallel:
    model = Heads()
    if rank == 1:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.0})
    return DistributedDataParallel(model, find_unused_parameters=True)


REFUSED: dict[str, Callable[[int], DistributedDataParallel]] = {
    "delay_all_reduce_named_params": delayed,
    "optimizer applied in backward": in_backward,
    "mixed_precision": lambda rank: wrapped(mixed_precision=_MixedPrecision()),
    "skip_all_reduce_unused_params": lambda rank: wrapped(skip_all_reduce_unused_params=rank == 0),
    "find_unused_parameters: expected True": lambda rank: DistributedDataParallel(
        Heads(), find_unused_parameters=rank == 0
    ),
}


@on_ranks(2)
def test_what_cannot_be_served_trains_as_plain_ddp(rank: int) -> None:
    begin()
    texts: list[str] = []
    for reason, make in REFUSED.items():
        with ddp_hooks.enable("skip_unused"):
            ddp, shown = warned(lambda make=make: make(rank))
        assert len(shown) == 1, (reason, shown)
        assert shown[0].startswith("ddp_hooks.enable: Heads trains as plain DistributedDataParallel. register: ")
        assert reason in shown[0]
        texts += shown
        assert "skip_unused_hook" not in [hook.__name__ for hook, _ in getattr(ddp, "_comm_hooks", [])]
    # Ranks with different policies, too.
    with ddp_hooks.enable("skip_unused" if rank else "auto"):
        ddp, shown = warned(wrapped)
    assert len(shown) == 1
    assert "policy: expected Policy(name='auto'" in shown[0]
    assert_equal(train(ddp, rank), train(wrapped(), rank))
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, [*texts, *shown])
    assert everyone[0] == everyone[1]
    assert states() == []
    with ddp_hooks.enable():
        assert warned(wrapped)[1] == []


@on_ranks(2)
def test_a_rank_without_enable_is_named_and_hangs_nobody(rank: int) -> None:
    begin()
    expected = train(wrapped(), rank)
    began = time.monotonic()
    if rank == 0:
        ddp_hooks.enable()
    ddp, shown = warned(wrapped)
    assert_equal(train(ddp, rank), expected)
    assert len(shown) == (rank == 0)
    assert rank == 1 or "but rank 1 did not; call enable() on every rank" in shown[0]
    # The ranks never get out of step, even when one of them is one module behind.
    ddp_hooks.enable()
    ddp, shown = warned(wrapped)
    assert len(shown) == 1
    assert_equal(train(ddp, rank), expected)
    assert states() == []
    ddp_hooks.disable()
    # Registered by hand on every rank it is served, whoever has enabled it.
    with ddp_hooks.enable() if rank == 0 else nullcontext():
        ddp, _ = warned(wrapped)
    state = ddp_hooks.register(ddp)
    assert_equal(train(ddp, rank), expected)
    assert state.stats().steps == 4
    assert time.monotonic() - began < 10  # nobody has lost patience


@on_ranks(2)
def test_ranks_that_enable_it_for_different_modules_hang_nobody(rank: int) -> None:
    """Each rank enables it for another module; rank 0 is slow to see that nobody came."""
    begin()
    slow = watch_construction(lambda ddp: time.sleep(0.5)) if rank == 0 else nullcontext()
    absentees.UNSURE_SECONDS = 1.0
    with slow:
        if rank == 0:
            ddp_hooks.enable()
        first, shown = warned(wrapped)
        if rank == 0:
            ddp_hooks.disable()
        else:
            ddp_hooks.enable()
        second, more = warned(wrapped)
    absentees.UNSURE_SECONDS = 5.0
    ddp_hooks.disable()
    assert len(shown + more) == 1
    assert "but rank 1 did not" in (shown + more)[0]
    assert_equal(train(first, rank), train(second, rank))
    with ddp_hooks.enable():
        # They have made as many by now.
        assert warned(wrapped)[1] == []


@on_ranks(2)
def test_enabled_on_one_rank_and_registered_on_the_other_is_refused(rank: int) -> None:
    begin()
    with ddp_hooks.enable() if rank == 0 else nullcontext():
        ddp, shown = warned(wrapped)
    assert len(shown) == (rank == 0)
    absentees.REGISTERING_SECONDS = 0.5
    if rank == 1:
        for make in (ddp_hooks.register, ddp_hooks.SkipUnusedState):
            with pytest.raises(RuntimeError, match=r"expected every rank to call it, but rank 0 did not within .*"):
                make(ddp)
    dist.barrier()
    absentees.REGISTERING_SECONDS = 10.0
    assert_equal(train(ddp, rank), train(wrapped(), rank))


@on_ranks(2)
def test_constructions_of_every_kind_are_counted_right(rank: int) -> None:
    """What the ranks know of each other before DDP's `__init__` follows what they do in it."""
    begin()
    frozen = Heads().requires_grad_(False)
    group = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2,))
    with ddp_hooks.enable():
        if rank == 1:
            for wrong in (frozen, None):
                with pytest.raises((RuntimeError, AttributeError)):
                    DistributedDataParallel(wrong)
            with pytest.raises(TypeError):
                DistributedDataParallel()
            with pytest.raises(TypeError):
                wrapped(speed=3)
        options: list[dict[str, Any]] = [{}, {"process_group": group}, {"device_mesh": mesh}, {"init_sync": False}]
        modules = [wrapped(**each) for each in options]
    assert [state.serves(ddp) for state, ddp in zip(states(), modules, strict=True)] == [True] * 4
    expected = train(wrapped(), rank)
    for ddp in modules:
        assert_equal(train(ddp, rank), expected)
    # Nothing in this construction waits for every rank.
    enabling.PATIENCE_SECONDS = 1.0
    with ddp_hooks.enable() if rank == 0 else nullcontext():
        began = time.monotonic()
        ddp, shown = warned(lambda: wrapped(init_sync=False))
    enabling.PATIENCE_SECONDS = 60.0
    assert len(shown) == (rank == 0)
    assert rank == 1 or 1.0 <= time.monotonic() - began < 10


@on_ranks(3)
def test_ranks_that_enabled_it_more_often_and_less_often_meet_to_register(rank: int) -> None:
    """With three, the sum of how often they did may be thrice what one of them did."""
    enabling.PATIENCE_SECONDS = 0.5
    for turn in range(2):
        with ddp_hooks.enable() if rank + turn < 2 else nullcontext():
            warned(wrapped)
    ddp = wrapped()
    assert ddp_hooks.register(ddp).serves(ddp)
    train(ddp, rank)


def test_bad_policies_are_refused_at_the_call() -> None:
    for call, kind, text in (
        (lambda: ddp_hooks.enable("fast"), ValueError, "expected one of allreduce, .* received 'fast'"),
        (lambda: ddp_hooks.enable(None), TypeError, "received None"),
        (lambda: ddp_hooks.enable(speed=3), TypeError, r"ddp_hooks\.Tuning, received 'speed'"),
        (lambda: ddp_hooks.enable(rebuild_after=-1), ValueError, "rebuild_after: expected at least 0, received -1"),
    ):
        with pytest.raises(kind, match=text):
            call()
    assert is_plain()


# --- hooks that the user registers afterwards


def halve(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(4), async_op=True).get_future()
    return work.then(lambda done: done.value()[0])


@on_ranks(2)
def test_a_hook_that_is_registered_later_takes_the_place(rank: int) -> None:
    begin()
    plain = wrapped()
    plain.register_comm_hook(None, halve)
    expected = train(plain, rank)
    built_in = wrapped()
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    expected_of_built_in = train(built_in, rank)

    with ddp_hooks.enable("skip_unused"):
        ddp, other, third = wrapped(), wrapped(), wrapped()
    first, *_ = states()
    with pytest.raises(TypeError):
        ddp.register_comm_hook(None, "no hook")
    with pytest.raises(TypeError):
        ddp.register_comm_hook(None)
    assert first.serves(ddp), "nothing was registered, so nothing is replaced"
    _, shown = warned(lambda: ddp.register_comm_hook(state=None, hook=halve))
    assert shown == [
        "ddp_hooks.enable: another communication hook (halve) is being registered with Heads; it replaces the hook of "
        "ddp_hooks"
    ]
    assert not first.serves(ddp)
    assert_equal(train(ddp, rank), expected)
    assert warned(lambda: other._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS))[1] != []
    assert_equal(train(other, rank), expected_of_built_in)
    # Once is enough.
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(None, halve)
    # Where the hook was asked for by name, it stays.
    asked_for = wrapped()
    state = ddp_hooks.register(asked_for)
    with pytest.raises(RuntimeError, match="can only be called once"):
        asked_for.register_comm_hook(None, halve)
    assert state.serves(asked_for)
    # Also where it came with every module before.
    with ddp_hooks.enable("skip_unused"):
        again, anew, closed = wrapped(), wrapped(), wrapped()
    ddp_hooks.register(again, "skip_unused")
    for each in (anew, closed):
        next(state for state in states() if state.serves(each)).close()
    ddp_hooks.register(anew)
    for each in (again, anew):
        with pytest.raises(RuntimeError, match="can only be called once"):
            each.register_comm_hook(None, halve)
    # In a backward pass nothing changes hands.
    refused: list[str] = []

    def too_late(gradient: torch.Tensor) -> None:
        with pytest.raises(RuntimeError) as error:
            third.register_comm_hook(None, halve)
        refused.append(str(error.value))

    handle = third.module.trunk.weight.register_hook(too_late)
    third(torch.ones(2, 16), 0).sum().backward()
    handle.remove()
    assert "backward" in refused[0]
    assert states()[0].serves(third)
    # What is kept for the modules goes with the last of them.
    assert not is_plain("register_comm_hook")
    gone = weakref.ref(third)
    third = handle = None
    gc.collect()
    assert gone() is None
    assert is_plain()
    closed.register_comm_hook(None, halve)
