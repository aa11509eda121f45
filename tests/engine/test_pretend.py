"""The hook on a pretended device: everything that only asynchrony shows, without a GPU.

See tests/pretend/queues.h. The scenarios are those of the CPU; a seed decides what runs when.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import test_cuda_hook
import test_direct
import test_equivalence as on_cpu
import test_freezing
import test_units
import torch
import torch.distributed as dist
from fuzzer.campaign import run_many
from fuzzer.generate import generate
from quick import thorough
from spawn import on_ranks, run_ranks
from test_equivalence import EAGER_AUTO, PACK_ALL, SPLIT_ALL
from test_fuzz import assert_same
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Scenario, compare, register
from tuned import Tuning, with_settings

import ddp_hooks
from ddp_hooks import _C

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ddp_hooks_testing._pretend") is None,
    reason="the pretended device is built in a checkout with torch 2.13, without CUDA and sanitizers",
)

BACKEND = "cpu:gloo,pretend:pretend"


def environment(rank: int) -> dict[str, str]:
    return {"DDP_HOOKS_IMPORT_FIRST": "pretend"}


def _on_device(rank: int, seed: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    from ddp_hooks_testing import _pretend

    _pretend.seed(1000 * (seed + int(os.environ.get("DDP_HOOKS_PRETEND_SEED", "0"))) + rank, 0.3)
    result = function(rank, *args)
    _pretend.synchronize()  # throws what went wrong on the device
    return result


def run_pretended(ranks: int, seed: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    # What runs late takes long.
    options = {"timeout": 240.0, **options}
    return run_ranks(ranks, _on_device, seed, function, args, backend=BACKEND, environment=environment, **options)


def on_pretended(ranks: int, seed: int, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a test of a function, as :func:`on_ranks` does."""

    def run(ranks: int, test: Callable[..., Any], *args: Any, **options: Any) -> None:
        run_pretended(ranks, seed, test, *args, **options)

    return on_ranks(ranks, run=run, **options)


def at_once(policy: ddp_hooks.Policy | str) -> ddp_hooks.Policy:
    """Return the policy with steps that open with the first bucket; here all would be held until the last one."""
    return with_settings(policy, opening_bytes=0)


def on_device(scenario: Scenario) -> Scenario:
    scenario.device = "pretend"
    return scenario


# Others have more of what these have.
RARE = [
    on_cpu.AllUsed,
    on_cpu.BucketsAreRebuilt,
    on_cpu.BucketViews,
    on_cpu.SpecialValues,
    on_cpu.FrozenAfterWrapping,
    on_cpu.Experts,
]
# That of many parameters takes half a minute each.
FEW = [one for one in test_cuda_hook.FEW if one not in (*RARE, on_cpu.ManyTinyParameters)]


WAYS = {
    "graph-native": (at_once("skip_unused"), True),
    "values-native": ("skip_zeros", True),
    "graph-python": ("skip_unused", False),
    "auto-python": (with_settings(EAGER_AUTO, opening_bytes=3000), False),
}
PACKED = [on_cpu.StepBranches, on_cpu.MixedDtypes, on_cpu.SmallBuckets]


@pytest.mark.parametrize("scenario", [*FEW, *thorough(*RARE)])
@pytest.mark.parametrize("way", list(WAYS))
def test_same_as_plain_ddp(scenario: type[Scenario], way: str) -> None:
    run_pretended(2, 1, compare, on_device(scenario()), *WAYS[way])


@pytest.mark.parametrize("scenario", PACKED)
@pytest.mark.parametrize("policy", [at_once(PACK_ALL), SPLIT_ALL, "allreduce"])
def test_every_way_to_pack(scenario: type[Scenario], policy: ddp_hooks.Policy | str) -> None:
    run_pretended(2, 2, compare, on_device(scenario()), policy, True)


@on_pretended(2, 5)
def test_nothing_is_coded_on_a_device(rank: int) -> None:
    """Refused, because nothing is coded on a device; and nothing is, if it depends."""
    ddp = DistributedDataParallel(nn.Linear(300, 300).to("pretend"))
    with pytest.raises(RuntimeError, match=r"coded='on' was set for gradients on pretend.*set coded='auto' or 'off'"):
        ddp_hooks.register(ddp, coded="on")
    state = ddp_hooks.register(ddp, "auto")
    with pytest.raises(RuntimeError, match="coded='on' was set for gradients on pretend"):
        state.set_policy("auto", coded="on")
    ddp(torch.ones(2, 300, device="pretend")).sum().backward()
    assert state.stats().coded_bytes == 0
    assert state.stats().why_uncoded == "only gradients on the CPU are coded, over gloo"


FREEZING = {
    "gradients": (True, False, "sgd", "skip_unused", True),
    "views": (False, True, "adamw", "skip_unused", True),
    "python": (True, True, "sgd", "skip_unused", False),
    "values": (False, False, "adamw", "skip_zeros", True),
}


# test_same_as_plain_ddp sends by value there, too.
@pytest.mark.parametrize("way", ["views", *thorough("values", "gradients", "python")])
def test_random_freezing(way: str) -> None:
    run_pretended(2, 5, test_freezing.random_freezing, *FREEZING[way], 12, "pretend")


UNITS = [
    test_units.Rows,
    test_units.ManyBuckets,
    test_units.OnOneRank,
    test_units.Views,
]


@pytest.mark.parametrize("scenario", UNITS)
@pytest.mark.parametrize(
    "policy", [at_once(test_units.EVERY_ROW), test_units.ADAPTIVE, at_once(test_units.WITH_VALUES)]
)
def test_units_of_rows(scenario: type[Scenario], policy: ddp_hooks.Policy) -> None:
    run_pretended(2, 3, compare, on_device(scenario()), policy, True)


DIRECT = [test_units.OnOneRank, test_units.RankBuckets, on_cpu.StepBranches]


@pytest.mark.parametrize("scenario", [*DIRECT[:1], *thorough(*DIRECT[1:])])
def test_every_transport(scenario: type[Scenario]) -> None:
    """On three ranks some contribute and others do not: broadcast, and summed by owners."""
    run_pretended(3, 3, compare, on_device(scenario()), at_once(test_direct.DIRECT_ROWS), True)


# With these seeds streams rest often, and for up to 15 ms, on either of two ranks.
RESTING = (37, 86, 349, 372)


class Tables(nn.Module):
    """Tables with few rows in use, in buckets of their own; the last one's gradient is there first."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(64, 64) for _ in range(5))

    def forward(self, rows: torch.Tensor, x: torch.Tensor | float = 1.0) -> torch.Tensor:
        for table in self.tables:
            x = torch.tanh(x + table(rows))
        return x


def dropped_within_backward(rank: int, policy: ddp_hooks.Policy, users: int) -> None:
    """A gradient that somebody drops while its rows are under way: what takes its memory stays what it is.

    `users` ranks look up each row.
    """
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Tables().to("pretend"), bucket_cap_mb=0.001)
    register(ddp, policy, True)
    late, *_, early = ddp.parameters()
    taken = []

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None
        taken.append(torch.full_like(parameter, 7.0))

    # The first one's rows leave with the third bucket if masks are there by then, and this is the fourth.
    for parameter in list(ddp.parameters())[2:]:
        parameter.register_post_accumulate_grad_hook(lambda _: time.sleep(0.02))
    list(ddp.parameters())[1].register_post_accumulate_grad_hook(lambda _: drop(early))
    for step in range(6):
        # Its gradient is there after the module's, whose last bucket is then under way.
        before = torch.ones((), device="pretend", requires_grad=True) * 1
        before.register_hook(lambda _: drop(late))
        # Far from each other, so that they are packed.
        rows = [first + step + (rank + i) % dist.get_world_size() for first in (0, 30) for i in range(users)]
        ddp(torch.tensor(rows, device="pretend"), before).square().mean().backward()
        ddp.zero_grad()
    assert len(taken) == 12
    assert all(bool((tensor == 7).all()) for tensor in taken)


@pytest.mark.parametrize(
    ("policy", "ranks", "users"),
    [
        (at_once(test_units.EVERY_ROW), 2, 1),
        (test_units.EVERY_ROW, 2, 1),
        (at_once(test_direct.DIRECT_ROWS), 2, 1),
        (at_once(test_direct.DIRECT_ROWS), 3, 2),
    ],
    ids=["rows", "held rows", "broadcast", "by owner"],
)
def test_dropped_within_backward(policy: ddp_hooks.Policy, ranks: int, users: int) -> None:
    for seed in RESTING[:1]:
        # Both stretches of a table are a message.
        run_pretended(ranks, seed, dropped_within_backward, with_settings(policy, pack_bytes=1000), users)


def waits_within_backward(rank: int, policy: ddp_hooks.Policy) -> None:
    from ddp_hooks_testing import _pretend

    ddp = DistributedDataParallel(Tables().to("pretend"), bucket_cap_mb=0.001)
    state = register(ddp, policy, True)
    first_of_group = 100
    seen = []

    def look(_: torch.Tensor) -> None:
        seen.append({stream: count for stream, count in _pretend.passed().items() if stream >= first_of_group})

    *_, last = reversed(list(ddp.parameters()))
    last.register_post_accumulate_grad_hook(look)
    for step in range(6):
        ddp.zero_grad()
        loss = ddp(torch.tensor([step + rank, 30 + step + rank], device="pretend")).square().mean()
        before = {stream: count for stream, count in _pretend.passed().items() if stream >= first_of_group}
        messages = state.stats().messages
        loss.backward()
        assert state.stats().messages > messages
        assert seen[-1] == before


@pytest.mark.parametrize("policy", [test_units.EVERY_ROW, test_direct.DIRECT_ROWS], ids=lambda policy: policy.name)
def test_backward_waits_for_no_message(policy: ddp_hooks.Policy) -> None:
    """What computes gradients goes on while rows travel."""
    run_pretended(2, RESTING[0], waits_within_backward, with_settings(at_once(policy), pack_bytes=1000))


def gradients_of_many_streams(rank: int, policy: ddp_hooks.Policy) -> None:
    """Accumulators that were made on different streams, as a rebuild may find them: each accumulates on its own.

    Plain DDP is right on the CPU alone.
    """
    found = []
    for device in ("cpu", "pretend"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8))).to(device)
        held = []
        for layer in model[::2] if device == "pretend" else ():
            with torch.Stream(device=device):
                held += [p.expand_as(p).grad_fn.next_functions[0][0] for p in layer.parameters()]
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.003)
        if device == "pretend":
            register(ddp, policy, True)
        gradients = []
        for step in range(6):
            batch = torch.full((2, 16), 0.1 * (step + rank)).to(device)
            with ddp.no_sync():  # so that there is something to add to
                ddp(batch).sum().backward()
            ddp(batch).square().sum().backward()
            gradients.append([p.grad.clone() for p in ddp.parameters()])
            ddp.zero_grad()
        found.append(gradients)
    for plain, ours in zip(*found, strict=True):
        for a, b in zip(plain, ours, strict=True):
            torch.testing.assert_close(a, b.cpu())


@pytest.mark.parametrize("seed", [*RESTING[:2], *thorough(*RESTING[2:])])
@pytest.mark.parametrize("policy", [PACK_ALL, at_once(test_units.EVERY_ROW)])
def test_gradients_of_many_streams(seed: int, policy: ddp_hooks.Policy) -> None:
    run_pretended(2, seed, gradients_of_many_streams, policy)


@pytest.mark.parametrize("policy", [at_once(PACK_ALL), test_units.EVERY_ROW], ids=lambda policy: policy.name)
@on_pretended(2, RESTING[0])
def test_copied_back(rank: int, policy: ddp_hooks.Policy) -> None:
    """A group that copies to the host, on a stream of the user's own: what it copies back is waited for there.

    Collectives are done before anybody asks for that, so that completions run in the thread that trains.
    """
    from ddp_hooks_testing import _pretend

    _pretend.finish_host_collectives_at_once(True)
    group = dist.new_group(backend="cpu:gloo,pretend:pretend_host")
    found = []
    for device in ("cpu", "pretend"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8))).to(device)
        stream = torch.Stream(device="pretend")
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            ddp = DistributedDataParallel(model, bucket_cap_mb=0.003, process_group=group)
            if device == "pretend":
                register(ddp, policy, True)
            gradients = []
            for step in range(4):
                ddp(torch.full((2, 16), 0.1 * (step + rank)).to(device)).square().sum().backward()
                gradients.append([p.grad.cpu() for p in ddp.parameters()])
                ddp.zero_grad()
        found.append(gradients)
    for plain, ours in zip(*found, strict=True):
        for a, b in zip(plain, ours, strict=True):
            torch.testing.assert_close(a, b)


class Branches(nn.Module):
    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, size) for size in sizes)

    def forward(self, x: torch.Tensor, used: Sequence[int]) -> torch.Tensor:
        return torch.cat([self.branches[index](x) for index in used], 1)


def moving_gradients(rank: int, device: str, policy: ddp_hooks.Policy, users: int) -> list[torch.Tensor]:
    """Train on a stream, then on another, and let go of everything; `users` ranks look up each row.

    The host does not wait for the device, not even for what it reads at the end, before all is gone. Futures of a group
    that copies to the host record nothing, as those of one on streams do; but owners sum on streams only.
    """
    torch.manual_seed(0)
    owners_sum = dist.get_world_size() > 2
    backend = "pretend" if owners_sum else "pretend_host"
    group = dist.new_group(backend=f"cpu:gloo,pretend:{backend}")
    first, second = (torch.Stream(device="pretend") for _ in range(2))
    freezes = policy.name == PACK_ALL.name  # so that what is left is not one stretch, which would need no packing
    with first:
        module = Tables().to(device)
        if freezes and device == "cpu":
            for index in (1, 3):
                module.tables[index].requires_grad_(False)
        ddp = DistributedDataParallel(module, process_group=group)
        if device == "pretend":
            register(ddp, policy, True)
            if freezes:
                ddp_hooks.freeze(ddp, "tables.1", "tables.3")
    found = []
    for step in range(4):
        if step == 2:  # buckets are what they will be, and messages as many
            second.wait_stream(first)
        with first if step < 2 else second:
            rows = [8 * step + (rank + i) % dist.get_world_size() for i in range(users)]
            ddp(torch.tensor(rows, device=device)).square().mean().backward()
            found += [p.grad for p in ddp.parameters() if p.grad is not None]
            ddp.zero_grad()
    del ddp, module
    gc.collect()
    first.wait_stream(second)
    with first:
        return [gradient.cpu() for gradient in found]


def moves(rank: int, policy: ddp_hooks.Policy, users: int) -> None:
    cpu, pretend = (moving_gradients(rank, device, policy, users) for device in ("cpu", "pretend"))
    for plain, ours in zip(cpu, pretend, strict=True):
        torch.testing.assert_close(plain, ours)


@pytest.mark.parametrize(
    ("policy", "ranks", "users"),
    [
        (PACK_ALL, 2, 2),
        (test_units.EVERY_ROW, 2, 2),
        (test_direct.DIRECT_ROWS, 2, 1),
        (test_direct.DIRECT_ROWS, 3, 2),
    ],
    ids=["packed", "rows", "broadcast", "by owner"],
)
def test_training_moves_to_another_stream(policy: ddp_hooks.Policy, ranks: int, users: int) -> None:
    """What messages are put together in belongs to the first stream, which does not wait for the last step."""
    run_pretended(ranks, 6, moves, at_once(policy), users)


def rebuilt(rank: int, by: str, backend: str) -> None:
    """Train on one stream, then on another, where the Reducer is made anew after a step."""
    group = dist.new_group(backend=f"cpu:gloo,pretend:{backend}")
    first, second = (torch.Stream(device="pretend") for _ in range(2))
    found = []
    for device in ("cpu", "pretend"):
        torch.manual_seed(0)
        with first:
            module = Branches([64, 16, 64]).to(device)
            ddp = DistributedDataParallel(module, process_group=group, find_unused_parameters=device == "cpu")
            if device == "pretend":
                register(ddp, ddp_hooks.Policy("rebuilt", rebuild_after=1 if by == "rebuild_after" else 0), True)
        gradients = []
        for step in range(6):
            if step == 2:  # buckets are what they will be
                ddp_hooks.freeze(ddp, "branches.1")
                second.wait_stream(first)
            with first if step < 2 else second:
                ddp.zero_grad()
                used = [0, 1, 2] if step < 2 else [0, 2]
                ddp(torch.full((2, 4), 0.1 * (step + rank)).to(device), used).square().sum().backward()
                if step == 3 and device == "pretend":
                    if by == "rebuild":
                        ddp_hooks.rebuild(ddp)
                    assert len(_C.reducer_parameters(ddp.reducer)) == 4
                gradients += [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
        with second:
            second.wait_stream(first)
            found.append([gradient.cpu() for gradient in gradients])
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(plain, ours)


@pytest.mark.parametrize(("by", "backend"), [("rebuild", "pretend"), ("rebuild_after", "pretend_host")])
def test_rebuilt_on_another_stream(by: str, backend: str) -> None:
    """Gradients are still read from buckets that a rebuild drops; their memory belongs to the first stream."""
    run_pretended(2, 8, rebuilt, by, backend)


@on_pretended(2, 8)
def test_unfrozen_on_another_stream(rank: int) -> None:
    """Backward runs on another stream than forward, on which gradients are accumulated, and on which it averages them.

    The Reducer is made anew with the parameter, and puts a view of its bucket in the place of that gradient.
    """
    forwards, backwards = (torch.Stream(device="pretend") for _ in range(2))
    found = []
    for device in ("cpu", "pretend"):
        torch.manual_seed(0)
        with forwards:
            module = Branches([64, 16, 64]).to(device)
            module.branches[1].requires_grad_(device == "cpu")
            ddp = DistributedDataParallel(module, gradient_as_bucket_view=True)
            if device == "pretend":
                state = register(ddp, ddp_hooks.Policy("unfrozen", rebuild_after=2), True)
                ddp_hooks.unfreeze(ddp, "branches.1")
        for step in range(3):
            with forwards:
                ddp.zero_grad()
                loss = ddp(torch.full((2, 4), 0.1 * (step + rank)).to(device), [0, 1, 2]).square().sum()
            backwards.wait_stream(forwards)
            with backwards:
                loss.backward()
        with backwards:
            found.append([p.grad.cpu() for p in ddp.parameters() if p.grad is not None])
    assert state.stats().steps == 3
    assert len(_C.reducer_parameters(ddp.reducer)) == 6
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(plain, ours)


@on_pretended(2, 7)
def test_a_gap_that_is_sent_along(rank: int) -> None:
    """Its content is put aside, and put back on the stream of the message's completion."""
    found = []
    for device in ("cpu", "pretend"):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Branches([64, 1, 64]).to(device), find_unused_parameters=True)
        if device == "pretend":
            tuning = Tuning(in_place_bytes=0, gap_fraction=0.5)
            register(ddp, ddp_hooks.Policy("gaps", tuning=tuning), True)
        for step in range(4):
            ddp.zero_grad()
            ddp(torch.full((2, 4), 0.1 * (step + rank)).to(device), [0, 2]).square().sum().backward()
        found.append([p.grad.cpu() for p in ddp.parameters() if p.grad is not None])
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(plain, ours)


def pass_that_fails(rank: int, policy: ddp_hooks.Policy) -> None:
    """Scans are under way when a pass ends, and nobody asks for their answers any more."""
    ddp = DistributedDataParallel(Tables().to("pretend"), bucket_cap_mb=0.001)
    state = register(ddp, policy, True)
    ddp(torch.tensor([rank], device="pretend")).square().mean().backward()

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("on every rank")

    next(ddp.parameters()).register_hook(fail)
    with pytest.raises(ArithmeticError):
        ddp(torch.tensor([rank], device="pretend")).square().mean().backward()
    del ddp, state
    gc.collect()


@pytest.mark.parametrize("policy", [test_units.EVERY_ROW, test_units.WITH_VALUES], ids=lambda policy: policy.name)
def test_a_pass_that_fails(policy: ddp_hooks.Policy) -> None:
    run_pretended(2, RESTING[0], pass_that_fails, at_once(policy))


class TwoBuckets(nn.Module):
    """A parameter for each use, of float64 in a bucket that comes after that of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 64).double()
        self.first = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        return self.first[used](self.last(x.double()).float())


@on_pretended(3, 1)
def test_nothing_is_sent_after_what_could_not_be(rank: int) -> None:
    """Of a sum by an owner two collectives follow each other; the other ranks may have put both on their streams."""
    from ddp_hooks_testing import _pretend

    ddp = DistributedDataParallel(TwoBuckets().to("pretend"), find_unused_parameters=True)
    tuning = Tuning(owners=True, min_direct_bytes=0, min_owner_saving=0)
    state = register(ddp, ddp_hooks.Policy("owners", tuning=tuning), True)

    def step() -> int:
        ddp.zero_grad()
        before = _pretend.counts()["collectives"]
        ddp(torch.ones(2, 4, device="pretend"), min(rank, 1)).sum().backward()
        return int(_pretend.counts()["collectives"] - before)

    per_step = step()
    assert per_step >= 4
    assert state.stats().owner_bytes > 0
    for number in range(1, per_step + 1):
        before = _pretend.counts()["collectives"]
        _pretend.fail_collective(number)
        with pytest.raises(RuntimeError, match="failed on purpose"):
            step()
        assert _pretend.counts()["collectives"] - before == number - 1
        _pretend.synchronize()  # nothing orders the next step with what is under way of this one


def used_map(rank: int) -> None:
    """Where the engine has told the Reducer that its map is reduced, whoever reads it finds it so."""
    ddp = DistributedDataParallel(Branches([4] * 3).to("pretend"), find_unused_parameters=True)
    register(ddp, "skip_unused", True)
    for step in range(8):
        ddp(torch.ones(1, 4, device="pretend"), [step % 3]).sum().backward()
        found = ddp.reducer._get_local_used_map().cpu().tolist()
        assert found == [2 * (parameter // 2 == step % 3) for parameter in range(6)]


def test_used_map() -> None:
    for seed in RESTING:
        run_pretended(2, seed, used_map)


@pytest.mark.parametrize("programs", [2, *thorough(12)])
def test_random_programs(programs: int) -> None:
    """A seed draws what each program does, and the order in which the device runs it: fuzz.py --device pretend."""
    run_many((generate(seed, 2, "pretend") for seed in range(programs)), on_failure=assert_same)


@on_pretended(1, 0)
def test_lazy_conjugates(rank: int) -> None:
    """Torch's fallback would copy them to copy them, without end."""
    numbers = torch.randn(4, dtype=torch.complex64)
    assert torch.equal(numbers.to("pretend").conj().clone().cpu(), numbers.conj())
    assert torch.equal(numbers.to("pretend").conj().imag.clone().cpu(), numbers.conj().imag)
