"""A step after one whose collectives failed, while those still write into what they were handed."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import slow_group
import torch
import torch.distributed as dist
from spawn import COLLECTIVE_TIMEOUT_SECONDS, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tuned import Tuning

import ddp_hooks

BACKEND = "failing_gloo"


class FailingWork(slow_group.SlowWork):
    def __init__(self) -> None:
        super().__init__()
        self._over: torch.futures.Future[Any] = torch.futures.Future()
        # What a future of Python's is given with `set_exception` C++ takes for its value.
        self.later = self._over.then(self._raise)

    def _raise(self, over: object) -> None:
        raise RuntimeError("failed on purpose")

    def fail(self) -> None:
        self._over.set_result(None)


class FailingGroup(slow_group.SlowGroup):
    """Gloo, whose collectives on gradients fail a little later when it is told so.

    They go on to write into their tensors: when the next step has filled a message, and before that is read.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__(inner, 0)
        self.fails = False
        self.still_written: list[torch.Tensor] = []
        self.handed: list[torch.Tensor] = []  # held, so that nobody else is given that memory
        self.names: set[str] = set()
        self.failures: list[threading.Timer] = []
        self.seconds = {"all_reduce": 0.05, "all_to_all": 0.05}  # after which they fail
        self.name_told = BACKEND

    def getBackendName(self) -> str:
        return self.name_told

    def _run_or_fail(self, name: str, tensors: list[torch.Tensor], begin: Any) -> slow_group.SlowWork:
        if tensors[0].dtype == torch.int32:  # DDP's own, of its used map
            return self._later(begin, tensors)
        if self.fails:
            work = FailingWork()
            self.names.add(name)
            self.failures.append(threading.Timer(self.seconds[name], work.fail))
            self.failures[-1].start()
            self.still_written += tensors
            return work
        for tensor in self.still_written:
            tensor.view(torch.uint8).fill_(0xFF)  # NaN, whatever it is read as
        self.handed += tensors
        return self._later(begin, tensors)

    def allreduce(self, tensors: Any, options: Any = None) -> slow_group.SlowWork:
        tensors = tensors if isinstance(tensors, list) else [tensors]
        options = dist.AllreduceOptions() if options is None else options
        return self._run_or_fail("all_reduce", tensors, lambda: self._inner.allreduce(tensors, options))

    def all_to_all_single(self, received: Any, sent: Any, received_numels: Any, sent_numels: Any, options: Any) -> Any:
        def begin() -> Any:
            return self._inner.alltoall_base(received, sent, received_numels, sent_numels, options)

        return self._run_or_fail("all_to_all", [received, sent], begin)

    alltoall_base = all_to_all_single  # as torch before 2.13 calls it


def new_failing_group(kind: Callable[[Any], Any]) -> Any:
    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return kind(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))

    name = f"{BACKEND}_{kind.__name__}".lower()
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, create, devices=["cpu"])
    return dist.new_group(backend=name)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Never next to each other, so that they are gathered into a message and do not travel in DDP's own memory.
        self.trunk = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.head(self.branches[branch](self.trunk(x)))


def step_after_failure(rank: int, policy: ddp_hooks.Policy, by_rank: list[int], expected: set[str]) -> None:
    torch.manual_seed(0)
    model = Branches()
    options: dict[str, Any] = {"find_unused_parameters": True}
    plain = DistributedDataParallel(copy.deepcopy(model), **options)
    group = new_failing_group(FailingGroup)
    ddp = DistributedDataParallel(model, process_group=group, **options)
    # Others are handed no all-to-all; and DDP, when it is made, looks for a backend behind this name.
    group.name_told = "gloo"
    state = ddp_hooks.register(ddp, policy)

    def step(ddp: DistributedDataParallel) -> None:
        ddp.zero_grad()
        ddp(torch.full((2, 4), rank + 1.0), by_rank[rank]).sum().backward()

    step(plain)
    for _ in range(2):  # with what the steps before leave behind
        step(ddp)
        group.fails = True
        with pytest.raises(RuntimeError, match="failed on purpose"):
            step(ddp)
        assert group.names == expected
        assert group.still_written
        # The first one has ended the step. If a later one came during the next step, that would fail in other words.
        for failure in group.failures:
            failure.join()
        group.fails = False
        if policy.name == "owners":
            with pytest.raises(RuntimeError, match=r"state.close\(\) and .*register(?s:.*) failed on purpose"):
                step(ddp)
            state.close()
            state = ddp_hooks.register(ddp, policy)
        step(ddp)
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)
        assert all((tensor.view(torch.uint8) == 0xFF).all() for tensor in group.still_written)
        group.still_written.clear()
    # Otherwise a step takes the memory of the one before.
    handed = []
    for _ in range(2):
        group.handed = []
        step(ddp)
        handed.append(group.handed)
    first, second = ([tensor.data_ptr() for tensor in tensors] for tensors in handed)
    assert first == second != []


TUNING = Tuning(min_direct_bytes=0, min_owner_saving=0)
CASES: list[tuple[ddp_hooks.Policy, list[int], set[str]]] = [
    # The same everywhere, two runs gathered into a message.
    (ddp_hooks.Policy("packed"), [1, 1], {"all_reduce"}),
    # A branch for each rank, which broadcasts it; beside it the others' message.
    (ddp_hooks.Policy("broadcast", tuning=TUNING), [0, 2], {"all_reduce", "all_to_all"}),
    # Two of three ranks contribute, and one of them sums.
    (ddp_hooks.Policy("owners", tuning=TUNING), [0, 0, 2], {"all_reduce", "all_to_all"}),
]


@pytest.mark.parametrize(("policy", "by_rank", "collectives"), CASES, ids=[case[0].name for case in CASES])
def test_step_after_failure(policy: ddp_hooks.Policy, by_rank: list[int], collectives: set[str]) -> None:
    run_ranks(len(by_rank), step_after_failure, policy, by_rank, collectives)


class LateWork(slow_group.SlowWork):
    """Done when it is told so."""

    def __init__(self, work: Any, result: Any) -> None:
        super().__init__()
        self._work, self._result = work, result

    def wait_for_data(self) -> None:
        """Wait until gloo has written its last. Nobody is told of that before `finish`."""
        self._work.wait()

    def finish(self) -> None:
        self.later.set_result(self._result)


class LateGroup(FailingGroup):
    """Gloo, whose collectives on gradients are back later when it is told so."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.late: list[LateWork] = []
        self.is_late = False

    def _run_or_fail(self, name: str, tensors: list[torch.Tensor], begin: Any) -> slow_group.SlowWork:
        if not self.is_late or tensors[0].dtype == torch.int32:
            return self._later(begin, tensors)
        self.late.append(LateWork(begin(), tensors))
        return self.late[-1]


class FailingHereGroup(FailingGroup):
    """Gloo, whose all-to-alls fail for this rank alone when it is told so."""

    def _run_or_fail(self, name: str, tensors: list[torch.Tensor], begin: Any) -> slow_group.SlowWork:
        work = self._later(begin, tensors)
        if not self.fails or name != "all_to_all":
            return work
        failing = FailingWork()

        def fail() -> None:
            work.wait()
            failing.fail()

        threading.Thread(target=fail).start()
        return failing


def contributions_fail_on_one_rank(rank: int) -> None:
    policy, by_rank, _ = CASES[-1]
    group = new_failing_group(FailingHereGroup)
    ddp = DistributedDataParallel(Branches(), process_group=group, find_unused_parameters=True)
    group.name_told = "gloo"
    state = ddp_hooks.register(ddp, policy)

    def step() -> None:
        ddp.zero_grad()
        ddp(torch.ones(2, 4), by_rank[rank]).sum().backward()

    step()
    assert state.stats().owner_bytes > 0
    group.fails = rank == 0
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="failed on purpose" if group.fails else r"(?i)closed|reset|broken pipe"):
        step()
    assert time.monotonic() - started < COLLECTIVE_TIMEOUT_SECONDS / 2
    # On every rank; and all have started the same collectives, so that the data group can go on.
    group.fails = False
    with pytest.raises(RuntimeError, match=r"state.close\(\) and .*register"):
        step()
    state.close()
    state = ddp_hooks.register(ddp, policy)
    step()
    for parameter in ddp.parameters():
        if parameter.grad is not None:
            total = parameter.grad.clone()
            dist.all_reduce(total)
            assert torch.equal(total, 3 * parameter.grad)


def test_contributions_fail_on_one_rank() -> None:
    """The others wait for a sum that this rank will not send, in vain, but not for long."""
    run_ranks(3, contributions_fail_on_one_rank)


def contributions_fail_during_the_next_step(rank: int) -> None:
    policy, by_rank, _ = CASES[-1]
    group = new_failing_group(FailingGroup)
    ddp = DistributedDataParallel(Branches(), process_group=group, find_unused_parameters=True)
    group.name_told = "gloo"
    ddp_hooks.register(ddp, policy)

    def step() -> None:
        ddp.zero_grad()
        ddp(torch.ones(2, 4), by_rank[rank]).sum().backward()

    step()
    group.fails = True
    group.seconds["all_to_all"] = 0.5
    with pytest.raises(RuntimeError, match="failed on purpose"):
        step()
    group.fails = False
    assert any(failure.is_alive() for failure in group.failures)
    with pytest.raises(RuntimeError, match=r"state.close\(\) and .*register(?s:.*) failed on purpose"):
        step()


def test_contributions_fail_during_the_next_step() -> None:
    """Its sums wait for those that are not going to come."""
    run_ranks(3, contributions_fail_during_the_next_step)


class TwoBuckets(nn.Module):
    """Branches in a bucket that is sent before the other one is ready, of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4).double()
        self.branches = Branches()

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches(self.trunk(x.double()).float(), branch)


def late_messages(rank: int, policy: ddp_hooks.Policy, by_rank: list[int], where: str, when: str) -> None:
    """A pass breaks off, and what it has sent comes back after the next one, or before that has sent anything.

    Or after a pass of plain DDP, when the hook has been taken away.
    """
    torch.manual_seed(0)
    model = TwoBuckets()
    # So that gradients are the buckets that messages are put back into.
    options: dict[str, Any] = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    plain = DistributedDataParallel(copy.deepcopy(model), **options)
    group = new_failing_group(LateGroup)
    ddp = DistributedDataParallel(model, process_group=group, **options)
    group.name_told = "gloo"
    state = ddp_hooks.register(ddp, policy)

    def step(ddp: DistributedDataParallel, branch: int, scale: float = 1) -> None:
        ddp.zero_grad(set_to_none=False)  # so that autograd adds to what lies in the buckets
        ddp(torch.full((2, 4), rank + scale), branch).sum().backward()

    for module in (ddp, plain):
        step(module, by_rank[rank])

    def break_off(_: torch.Tensor) -> None:
        raise ArithmeticError

    def queue_error(_: torch.Tensor) -> None:
        # In front of the Reducer's own callback.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: break_off(_))

    # Between two buckets, or when all have left.
    handle = (
        model.trunk.weight.register_hook(break_off)
        if where == "between"
        else model.branches.head.bias.register_hook(queue_error)
    )
    group.is_late = True
    with pytest.raises(ArithmeticError):
        step(ddp, by_rank[rank], 5)
    assert group.late
    # A bucket of what everyone used is summed where it lies, and the next step would run into that, as with plain DDP.
    for work in group.late:
        work.wait_for_data()
    group.is_late = False
    handle.remove()
    ddp._update_process_group(group)
    finished: list[LateWork] = []

    def finish(_: torch.Tensor | None = None) -> None:
        finished.extend(group.late)
        while group.late:
            group.late.pop().finish()

    if when == "accumulated":
        # Gradients lie in the buckets then.
        for module, then in ((plain, lambda: None), (ddp, finish)):
            module.zero_grad(set_to_none=False)
            with module.no_sync():
                module(torch.full((2, 4), rank + 2.0), 1).sum().backward()
                then()
            module(torch.full((2, 4), rank + 3.0), 1).sum().backward()
    else:
        step(plain, 1)
        if when == "closed":
            state.close()
        if when == "within":
            # The last gradient of the bucket that is sent first; the others lie there.
            model.branches.trunk.weight.register_hook(finish)
        step(ddp, 1)
    assert bool(finished) == (when in ("within", "accumulated"))
    finish()
    dist.barrier()
    time.sleep(0.2)  # sums that follow come back as well
    for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad)
    assert (state.stats().owner_bytes > 0) == (policy.name == "owners")


@pytest.mark.parametrize("where", ["between", "behind"])
@pytest.mark.parametrize("when", ["after", "within", "accumulated", "closed"])
@pytest.mark.parametrize(("policy", "by_rank"), [pytest.param(*case[:2], id=case[0].name) for case in CASES])
def test_late_messages_of_a_pass_that_broke_off(
    policy: ddp_hooks.Policy, by_rank: list[int], where: str, when: str
) -> None:
    run_ranks(len(by_rank), late_messages, policy, by_rank, where, when)
