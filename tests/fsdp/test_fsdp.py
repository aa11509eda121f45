"""Modules with fully_shard train as with plain FSDP2, to the bit, and send less."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from spawn import on_ranks, run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    _get_gradient_divide_factors as torch_divide_factors,
)
from torch.distributed.tensor import Shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from tuned import Tuning, with_settings

import ddp_hooks
from ddp_hooks import Policy, fsdp
from ddp_hooks.errors import RefusedError
from ddp_hooks.fsdp import exchange
from ddp_hooks.fsdp.hosts import divisor_before_hosts

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="FSDP2 of this torch is refused"
)

# So that small models fall into units, too.
FINE = Tuning(min_divided_bytes=0, min_unit_bytes=64)
ON = Policy("on", skip_zeros="on", skip_zero_rows="on", coded="on", tuning=FINE)
POLICIES = {
    "auto": with_settings(ddp_hooks.policies.PRESETS["auto"], tuning=FINE),
    "restless": with_settings(
        ddp_hooks.policies.PRESETS["auto"],
        name="restless",
        tuning=Tuning(min_divided_bytes=0, hold_steps=1, first_pause_steps=1, longest_pause_steps=2),
    ),
    "on": ON,
    "skip_unused": ddp_hooks.policies.PRESETS["skip_unused"],
    "skip_zeros": ddp_hooks.policies.PRESETS["skip_zeros"],
    "allreduce": ddp_hooks.policies.PRESETS["allreduce"],
}
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIDTH = 24


class Block(nn.Module):
    """A layer of a few parameters of odd sizes, recomputed in backward if asked."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 37)
        self.down = nn.Linear(37, WIDTH, bias=False)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            return checkpoint(self._transform, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self._transform(x)

    def _transform(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Adapted(Block):
    """A layer that is frozen, and beside it what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.low = nn.Linear(WIDTH, 3, bias=False)
        self.high = nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.high(self.low(x))


class Experts(nn.Module):
    """Several layers; each step uses the chosen ones only."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.never = nn.Linear(WIDTH, 5)
        self.chosen: tuple[int, ...] = (0,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(self.experts[i](x) for i in self.chosen)  # type: ignore[no-any-return]


class Stacked(nn.Module):
    """Experts in one parameter: the gradients of those that are not chosen are zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, WIDTH, WIDTH) / 8)
        self.chosen: tuple[int, ...] = (0,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(x @ self.weight[i] for i in self.chosen)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, layers: list[nn.Module], words: int = 101) -> None:
        super().__init__()
        self.words = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """How a model is made, sharded and trained."""

    layers: Callable[[], list[nn.Module]]
    mixed: MixedPrecisionPolicy = MIXED
    sends_unused: bool = False
    chosen: Callable[[int, int, int], tuple[int, ...]] | None = None  # of rank, step and layer
    passes: int = 1
    clips: bool = True
    shard: dict[str, Any] | None = None
    prepare: Callable[[nn.Module], None] | None = None

    def make(self) -> nn.Module:
        torch.manual_seed(7)
        model = Model(self.layers())
        for layer in model.layers:
            fully_shard(layer, mp_policy=self.mixed, **(self.shard or {}))
        fully_shard(model, mp_policy=self.mixed, **(self.shard or {}))
        model.set_reduce_scatter_unused_params(self.sends_unused)  # type: ignore[attr-defined]
        if self.prepare is not None:
            self.prepare(model)
        return model


def by_rank_and_step(rank: int, step: int, layer: int) -> tuple[int, ...]:
    return ((rank + step + layer) % 4, (rank * step) % 4)


def by_step(rank: int, step: int, layer: int) -> tuple[int, ...]:
    return ((step + layer) % 4,)


def blocks(count: int = 3, recomputes: bool = False) -> list[nn.Module]:
    return [Block(recomputes) for _ in range(count)]


def experts() -> list[nn.Module]:
    return [Block(), Experts(), Experts()]


def shard_along_last(parameter: nn.Parameter) -> Shard | None:
    """Every other matrix by columns, where ranks can have as many each."""
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 6 == 0 else None


CASES = {
    "dense": Case(blocks),
    "float32": Case(blocks, MixedPrecisionPolicy()),
    "float16": Case(blocks, MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)),
    "bfloat16 sums": Case(blocks, MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "float64": Case(blocks, MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)),
    "several passes": Case(blocks, passes=3),
    "recomputed": Case(partial(blocks, recomputes=True)),
    "adapters": Case(lambda: [Adapted(), Adapted(), Block()]),
    "unused here and there": Case(experts, sends_unused=True, chosen=by_rank_and_step),
    "unused everywhere": Case(experts, sends_unused=True, chosen=by_step),
    "left out everywhere": Case(experts, chosen=by_step),
    "unused in float32": Case(experts, MixedPrecisionPolicy(), sends_unused=True, chosen=by_rank_and_step),
    # With other types plain FSDP2 cannot: zeros for what is unused are not of the type of sums.
    "unused in several passes": Case(
        experts, MixedPrecisionPolicy(), sends_unused=True, chosen=by_rank_and_step, passes=2
    ),
    "stacked experts": Case(lambda: [Stacked(), Stacked()], chosen=by_rank_and_step),
    "by columns": Case(blocks, shard={"shard_placement_fn": shard_along_last}),
    "sums alone": Case(blocks, prepare=lambda model: model.set_force_sum_reduction_for_comms(True)),
    "kept whole": Case(blocks, shard={"reshard_after_forward": False}),
}


def batches(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(101, (4, 3), generator=draw), torch.randint(11, (12,), generator=draw)


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def train(case: Case, model: nn.Module, rank: int, steps: range, optimizer: Any = None) -> Iterator[dict[str, Any]]:
    """Yield after each step what this rank holds of gradients, and at last of parameters."""
    # On three ranks sums are rounded in another order now and then; at one place it can be seen how far that goes.
    stands = dist.get_world_size() > 2
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.0 if stands else 1e-2)
    for step in steps:
        for number in range(case.passes):
            is_last = number == case.passes - 1
            model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            for i, layer in enumerate(model.layers):  # type: ignore[arg-type]
                if case.chosen is not None and hasattr(layer, "chosen"):
                    layer.chosen = case.chosen(rank, step + 7 * number, i)
            tokens, targets = batches(rank, case.passes * step + number)
            cross_entropy(model(tokens).flatten(0, 1).float(), targets).backward()
        if case.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        yield {n: None if p.grad is None else local(p.grad).clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    yield {name: local(parameter).detach().clone() for name, parameter in model.named_parameters()}


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() > 0 else 0.0


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def assert_same(ours: dict[str, Any], plain: dict[str, Any], what: str, precision: float | None = None) -> None:
    assert ours.keys() == plain.keys()
    for name, expected in plain.items():
        received = ours[name]
        assert (received is None) == (expected is None), f"{what}: {name}"
        if expected is not None and dist.get_world_size() > 2:
            epsilon = torch.finfo(received.dtype).eps if precision is None else precision
            precise_to = dist.get_world_size() * epsilon * max(largest(expected), 1e-3)
            assert torch.allclose(received, expected, 0, precise_to), f"{what}: {name}"
        elif expected is not None:
            assert received.dtype == expected.dtype, f"{what}: {name}"
            assert torch.equal(bits(received), bits(expected)), f"{what}: {name}"


# --- the same as plain FSDP2


def compare_all(rank: int, names: list[str], policies: list[str], steps: int) -> dict[str, dict[str, Any]]:
    sent: dict[str, dict[str, Any]] = {}
    for name in names:
        case = CASES[name]
        plain = list(train(case, case.make(), rank, range(steps)))
        for policy in policies:
            model = case.make()
            state = fsdp.register(model, POLICIES[policy])
            for step, (ours, expected) in enumerate(zip(train(case, model, rank, range(steps)), plain, strict=True)):
                precision = torch.finfo(torch.bfloat16).eps if name == "bfloat16 sums" else None
                assert_same(ours, expected, f"{name}, {policy}, step {step}", precision)
            stats = state.stats()
            assert stats.steps == steps
            sent.setdefault(name, {})[policy] = stats
            state.close()
    return sent


@pytest.mark.parametrize(
    ("world_size", "policies"),
    [
        (2, ["on"]),
        pytest.param(2, ["restless", "auto", "on"], marks=pytest.mark.thorough),
        pytest.param(3, ["on", "restless"], marks=pytest.mark.thorough),
    ],
)
def test_gradients_are_those_of_plain_fsdp2(world_size: int, policies: list[str]) -> None:
    by_rank = run_ranks(world_size, compare_all, list(CASES), policies, 4)
    for sent in by_rank:

        def part(name: str, policy: str = "on", sent: dict[str, Any] = sent) -> float:
            return sent[name][policy].payload_bytes / sent[name][policy].dense_bytes  # type: ignore[no-any-return]

        for name in ("dense", "float16", "recomputed", "by columns", "sums alone", "kept whole"):
            # Messages are small here; and rows of the embedding that were not looked up are left out.
            assert 0.2 < part(name) <= 0.5, name
            assert 0 < sent[name]["on"].coded_bytes < sent[name]["on"].uncoded_bytes
        assert sent["float64"]["on"].coded_bytes == 0
        # Sums of several passes have more bits, but for what one of them alone contributes.
        assert part("several passes") > 1.1 * part("dense")
        # What was not looked up is left out.
        assert 0.6 < part("float32") < 0.9
        assert part("unused everywhere") < 0.3
        assert part("unused here and there") < 0.4
        assert part("unused in float32") < 0.8
        assert part("stacked experts") < 0.3


def compare_on_a_slow_link(rank: int, *arguments: Any) -> dict[str, dict[str, Any]]:
    os.environ["DDP_HOOKS_LINK_MBITS"] = "1000"  # where coding pays, whatever this machine has
    return compare_all(rank, *arguments)


@pytest.mark.thorough
def test_fifty_steps() -> None:
    names = ["dense", "unused here and there", "adapters"]
    for sent in run_ranks(2, compare_on_a_slow_link, names, ["auto"], 50):
        assert sent["dense"]["auto"].payload_bytes < 0.5 * sent["dense"]["auto"].dense_bytes


def test_policies() -> None:
    names = ["unused here and there", "stacked experts", "dense"]
    for sent in run_ranks(2, compare_all, names, ["skip_unused", "skip_zeros", "allreduce"], 3):
        unused, stacked, dense = (sent[name] for name in names)
        assert unused["skip_unused"].payload_bytes < 0.75 * unused["skip_unused"].dense_bytes
        # Without reading gradients, zeros are not seen, and nothing is coded.
        assert stacked["skip_unused"].payload_bytes == stacked["skip_unused"].dense_bytes
        assert unused["skip_zeros"].coded_bytes == 0 < unused["skip_zeros"].payload_bytes
        # Uncoded it goes straight to owners, and there is no exchange.
        assert all(stats["allreduce"].payload_bytes == stats["allreduce"].dense_bytes for stats in sent.values())
        assert all(stats["allreduce"].exchanges == 0 for stats in sent.values())
        assert dense["skip_unused"].exchanges == dense["skip_unused"].buckets_whole


# --- when it is asked


def test_looks_that_do_not_pay_are_paused() -> None:
    policy = Policy("x", skip_zeros="adaptive", tuning=Tuning(hold_steps=2, first_pause_steps=3, longest_pause_steps=6))
    looks = exchange.Looks(policy, always=False)

    def run(steps: int, sent: int) -> list[int]:
        asked = []
        for step in range(steps):
            if looks.begin_step():
                looks.observe(sent, 100)
                asked.append(step)
        return asked

    assert run(24, 99) == [0, 4, 11, 18]  # pauses of 3, 6 and 6 steps
    assert run(5, 50) == [1, 2, 3, 4]
    assert run(8, 99) == [0, 1, 5]  # two more steps, then a pause of 3


def test_what_is_looked_for() -> None:
    def asked(name: str, least_saving: float | None = 0.1) -> tuple[bool | float | None, ...]:
        questions = exchange.Questions.of(ddp_hooks.policies.resolve(name), least_saving)
        return questions.skip_unused, questions.zeros, questions.coded, questions.always

    assert asked("auto") == (True, True, 0.1, False)
    assert asked("auto", least_saving=None) == (True, True, None, False)
    assert asked("skip_unused") == (True, False, None, True)
    assert asked("skip_zeros") == (True, True, None, True)
    assert asked("allreduce") == (False, False, None, False)


# --- zeros with signs, and what is no number


class Given(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def reduce_with_and_without(gradient: torch.Tensor, mesh: Any = None) -> list[torch.Tensor]:
    """Return what plain FSDP2 and ours reduce a gradient to, on the host."""
    results = []
    for policy in (None, ON):
        model = fully_shard(Given(len(gradient)).to(gradient.device), mesh=mesh)
        if policy:
            fsdp.register(model, policy)
        model(gradient).backward()
        results.append(local(model.weight.grad).cpu().clone())
    return results


def reduce_special_numbers(rank: int) -> None:
    zeros = 0
    specials = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-45, -1e-40, 1.5, 1 / 3, 3e38])
    for seed in range(8):
        draw = torch.Generator().manual_seed(100 * seed + rank)
        # Stretches of one number each, so that there are units of every kind.
        gradient = specials[torch.randint(len(specials), (60,), generator=draw)].repeat_interleave(16)
        plain, ours = reduce_with_and_without(gradient)
        same = plain.view(torch.int32) == ours.view(torch.int32)
        near = (plain - ours).abs() <= (1e-6 * plain.abs() if dist.get_world_size() > 2 else 0)
        assert bool((same | (near & (plain != 0)) | (plain.isnan() & ours.isnan())).all())
        zeros += int((plain == 0).sum())
    assert zeros > 0


def test_special_numbers() -> None:
    for world_size in (2, 3):
        run_ranks(world_size, reduce_special_numbers)


# --- the state


def use_state(rank: int, folder: str) -> None:
    case = CASES["unused here and there"]
    model = case.make()
    state = fsdp.register(model, ON)
    assert fsdp.register(model, ON) is state
    assert repr(state) == "ShardState(policy='on', attached)"
    with pytest.raises(RuntimeError, match="registered with"):
        fsdp.register(model, "skip_unused")
    # Without hosts they would never be averaged.
    with pytest.raises(RuntimeError, match="registered with mesh=None"):
        fsdp.register(model, ON, mesh=init_device_mesh("cpu", (1, 2)))
    assert state.usage() == {}
    assert state.stats().steps == 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    list(train(case, model, rank, range(1), optimizer))
    usage = state.usage()
    assert usage.keys() == dict(model.named_parameters()).keys()
    for layer in (1, 2):
        chosen = [set(by_rank_and_step(other, 0, layer)) for other in range(2)]
        for expert in range(4):
            one = usage[f"layers.{layer}.experts.{expert}.weight"]
            assert one.ranks == tuple(other for other in range(2) if expert in chosen[other])
            assert one.used_here == (rank in one.ranks)
            assert one.used_anywhere == bool(one.ranks)
            assert one.numel == WIDTH * WIDTH
            assert not one.frozen
    never = usage["layers.1.never.weight"]
    assert never.ranks == ()
    assert not never.used_anywhere
    assert "saved" in str(state.stats())
    state.reset_stats()
    assert state.stats().payload_bytes == 0

    # A checkpoint of torch's, into a module of its own.
    saved = get_state_dict(model, optimizer)
    dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=folder)
    other = case.make()
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    state_of_other = fsdp.register(other, ON)
    optimizer_of_other = torch.optim.AdamW(other.parameters(), lr=1e-2)
    list(train(case, other, rank, range(1), optimizer_of_other))
    loaded = dict(zip(("model", "optimizer"), get_state_dict(other, optimizer_of_other), strict=True))
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        other,
        optimizer_of_other,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    before = state.stats()
    for ours, expected in zip(
        train(case, other, rank, range(1, 3), optimizer_of_other),
        train(case, model, rank, range(1, 3), optimizer),
        strict=True,
    ):
        assert_same(ours, expected, "after a checkpoint")
    assert (state.stats() - before).payload_bytes > 0
    assert state_of_other.stats().steps == 3

    # Closed, it is plain FSDP2; and may be registered anew.
    state.close()
    state.close()
    assert repr(state) == "ShardState(policy='on', closed)"
    steps = state.stats().steps
    list(train(case, model, rank, range(3, 4), optimizer))
    assert state.stats().steps == steps
    assert (state.stats().skip_zeros_steps, state.stats().skip_zero_rows_steps) == (steps, steps)
    again = fsdp.register(model, "skip_unused", skip_zero_rows="on", min_unit_bytes=3)
    assert again is not state
    assert again.policy.tuning.min_unit_bytes == 3
    list(train(case, model, rank, range(4, 5), optimizer))
    assert again.stats().steps == 1
    assert (again.stats().skip_zeros_steps, again.stats().skip_zero_rows_steps) == (0, 1)


def test_state_and_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, use_state, str(tmp_path))


def recover(model: Any) -> None:
    """Make a model train on after a pass that failed."""
    model.zero_grad()  # FSDP2 would add what it has not reduced to the next pass
    model.reset_iter_state()
    model.zero_grad()


@on_ranks(2)
def test_different_gradients_are_an_error_by_name(rank: int) -> None:
    # Without zeros for what is unused, plain FSDP2 would add one expert's gradient to another's.
    case = Case(experts, chosen=lambda rank, step, layer: (rank,))
    model = case.make()
    fsdp.register(model, "auto")
    with pytest.raises(RuntimeError, match=r"rank 0 has no gradient of layers\.2\.experts\.1\.weight") as caught:
        list(train(case, model, rank, range(1)))
    assert "set_reduce_scatter_unused_params(True)" in str(caught.value)
    # What the message says helps, without making anything anew.
    recover(model)
    model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    sure = Case(experts, chosen=case.chosen, sends_unused=True)
    for ours, plain in zip(train(sure, model, rank, range(2)), train(sure, sure.make(), rank, range(2)), strict=True):
        assert_same(ours, plain, "after an error")


@on_ranks(2)
def test_different_layers_are_an_error_by_name(rank: int) -> None:
    # Plain FSDP2 mixes up what ranks have of layers of one kind, without a word.
    class Skipping(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens)
            for i, layer in enumerate(self.layers):
                x = x if i == rank else layer(x)
            return self.head(x)  # type: ignore[no-any-return]

    model = Skipping(blocks())
    for layer in model.layers:
        fully_shard(layer, mp_policy=MIXED)
    fully_shard(model, mp_policy=MIXED)
    fsdp.register(model, "auto")
    with pytest.raises(RuntimeError, match=rf"different modules, this one the module of layers\.{1 - rank}\.norm"):
        model(batches(rank, 0)[0]).sum().backward()


# --- over hosts


def shard_over_hosts(case: Case, mesh: Any, ours: bool, replicates: bool = False) -> nn.Module:
    """Make the case's model for a mesh of hosts x ranks of a host, for FSDP2 alone or for register(mesh=...)."""
    if replicates:
        from torch.distributed._composable.replicate_with_fsdp import replicate

        # Alone it needs a mesh of one dimension.
        over = {"mesh": mesh["local"] if ours else mesh["hosts"]}
        apply: Any = replicate
    else:
        over = {"mesh": mesh["local"] if ours else mesh}
        apply = fully_shard
    torch.manual_seed(7)
    model = Model(case.layers())
    for layer in model.layers:
        apply(layer, mp_policy=case.mixed, **over)
    apply(model, mp_policy=case.mixed, **over)
    model.set_reduce_scatter_unused_params(case.sends_unused)  # type: ignore[operator]
    return model


def average_over_hosts(rank: int, shape: tuple[int, int], replicates: bool, names: list[str]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("hosts", "local"))
    sent = {}
    for name in names:
        case = CASES[name]
        plain = list(train(case, shard_over_hosts(case, mesh, False, replicates), rank, range(3)))
        for policy in ("on", "restless", "allreduce") if name == "dense" else ("on", "restless"):
            model = shard_over_hosts(case, mesh, True, replicates)
            state = fsdp.register(model, POLICIES[policy], mesh=mesh)
            assert fsdp.register(model, POLICIES[policy], mesh=mesh) is state
            for step, (ours, expected) in enumerate(zip(train(case, model, rank, range(3)), plain, strict=True)):
                assert_same(ours, expected, f"{name}, {policy}, step {step}")
            sent[name, policy] = state.host_stats()
            if name == "unused here and there" and policy == "on":
                usage = state.usage()
                assert not usage["layers.1.never.weight"].used_anywhere
                ranks = range(shape[0] * shape[1])
                chosen = set().union(*(by_rank_and_step(other, 2, 1) for other in ranks))
                for expert in range(4):
                    one = usage[f"layers.1.experts.{expert}.weight"]
                    assert one.used_anywhere == (expert in chosen)
                    assert one.ranks is None
                # In a step in which the ranks of a host do not tell each other.
                for each in state._served:
                    each.reduce_scatter.exchange._looks.begin_step = lambda: False  # type: ignore[method-assign]
                list(train(case, model, rank, range(2, 3)))
                usage = state.usage()
                assert all(usage[f"layers.1.experts.{expert}.weight"].used_anywhere for expert in chosen)
            state.close()
    return sent


AVERAGED = ["dense", "unused here and there", "stacked experts"]
AVERAGED_TOO = ["float32", "several passes", "adapters"]


@pytest.mark.parametrize(
    ("shape", "replicates", "names"),
    [
        ((2, 2), False, AVERAGED),
        ((2, 1), True, AVERAGED + AVERAGED_TOO),
        pytest.param((2, 2), False, AVERAGED + AVERAGED_TOO, marks=pytest.mark.thorough),
        pytest.param((2, 1), False, AVERAGED + AVERAGED_TOO, marks=pytest.mark.thorough),
        pytest.param((3, 1), True, AVERAGED + AVERAGED_TOO, marks=pytest.mark.thorough),
    ],
)
def test_averages_over_hosts(shape: tuple[int, int], replicates: bool, names: list[str]) -> None:
    for sent in run_ranks(shape[0] * shape[1], average_over_hosts, shape, replicates, names):

        def part(name: str, policy: str = "on", sent: dict[Any, Any] = sent) -> float:
            return sent[name, policy].payload_bytes / sent[name, policy].dense_bytes  # type: ignore[no-any-return]

        assert part("dense", "allreduce") == 1
        # Gradients of one rank came from bfloat16, sums did not.
        assert part("dense") < (0.85 if shape[1] == 1 else 1.001)
        assert part("unused here and there") < 0.9
        assert part("stacked experts") < 0.8


def swap_between_two_hosts(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("hosts", "local"))
    numbers = torch.randn(3, 1600, generator=torch.Generator().manual_seed(rank))
    # A half of either, which is several units; the other one is zeros.
    numbers[:, 768:] = 0
    first, second = numbers[0].bfloat16().float(), numbers[1]
    zeros = torch.zeros(1600)
    gradients = {
        "bfloat16 on both": first,
        "bfloat16 on one": first if rank == 0 else zeros,
        "float32 on one": second if rank == 1 else zeros,
        "on neither": zeros,
        "float32 on both": second,
        "no numbers": first * float("nan") if rank == 0 else second,
    }
    sent = {}
    for name, gradient in gradients.items():
        model = fully_shard(Given(1600), mesh=mesh["local"])
        state = fsdp.register(model, ON, mesh=mesh)
        model(gradient).backward()
        both = [torch.empty_like(gradient) for _ in range(2)]
        dist.all_gather(both, gradient)
        received = local(model.weight.grad)
        expected = (both[0] + both[1]) / 2
        assert bool(((bits(received) == bits(expected)) | (received.isnan() & expected.isnan())).all()), name
        stats = state.host_stats()
        assert stats.dense_bytes == 6400
        sent[name] = stats.payload_bytes
    return sent


def test_two_hosts_swap_what_they_have() -> None:
    first, second = run_ranks(2, swap_between_two_hosts)
    few, many = first["bfloat16 on both"], first["float32 on both"]
    assert few < 0.5 * 768 * 4 < many < 768 * 4
    # Nothing comes back to whom it is from.
    assert (first["bfloat16 on one"], second["bfloat16 on one"]) == (few, 0)
    assert (first["float32 on one"], second["float32 on one"]) == (0, second["float32 on both"])
    assert (first["on neither"], second["on neither"]) == (0, 0)


def average_large_numbers(rank: int, shape: tuple[int, int], device: str = "cpu") -> None:
    mesh = init_device_mesh(device, shape, mesh_dim_names=("hosts", "local"))
    half = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    draw = torch.Generator().manual_seed(rank)
    # Several of them add up to more than float16 holds, 65504; and small ones, which lose digits when divided.
    ranks = shape[0] * shape[1]
    large = 120000.0 / ranks  # all are divided by 2 first
    gradient = torch.cat([torch.full((480,), large) + rank, torch.rand(480, generator=draw) * 1e-6]).to(device)
    results = []
    for policy in (None, ON, POLICIES["allreduce"]):
        model = fully_shard(Given(960).to(device), mesh=mesh if policy is None else mesh["local"], mp_policy=half)
        if policy is not None:
            fsdp.register(model, policy, mesh=mesh)
        model(gradient).backward()
        results.append(local(model.weight.grad).cpu().clone())
    hsdp, *ours = results
    assert bool(hsdp.isfinite().all())
    for each in ours:
        assert torch.equal(each, hsdp)


def test_float16_over_hosts_holds_what_hsdp_holds() -> None:
    for shape in ((2, 1), (3, 1), (2, 2), (4, 1)):
        run_ranks(shape[0] * shape[1], average_large_numbers, shape)


def test_divisors_are_those_of_fsdp2() -> None:
    for local_ranks in range(1, 20):
        for hosts in range(1, 20):
            every = _get_gradient_divide_factors(local_ranks, hosts)
            of_host = _get_gradient_divide_factors(local_ranks, None)
            before = divisor_before_hosts(torch.float16, local_ranks, hosts)
            assert of_host[0] * before == every[0]
            assert (hosts / before) * of_host[1] == pytest.approx(every[1])
            assert divisor_before_hosts(torch.float32, local_ranks, hosts) == 1


def _get_gradient_divide_factors(local_ranks: int, hosts: int | None) -> tuple[float, float]:
    """Return what torch divides float16 gradients by, before and after."""

    class Group:
        def __init__(self, ranks: int) -> None:
            self.size = lambda: ranks

    over = None if hosts is None else Group(hosts)
    return torch_divide_factors(Group(local_ranks), over, torch.float16)[:2]  # type: ignore[return-value]


# --- what pages say


# --- what is refused


@on_ranks(2)
def test_refusals(rank: int) -> None:
    linear = nn.Linear(8, 8)
    for module, error, message in (
        (linear, TypeError, "fully_shard first"),
        (DistributedDataParallel(copy.deepcopy(linear)), TypeError, r"use ddp_hooks\.register"),
        (3, TypeError, "received a int"),
    ):
        with pytest.raises(error, match=message):
            fsdp.register(module)  # type: ignore[arg-type]
    first = FullyShardedDataParallel(copy.deepcopy(linear), device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match="FSDP1"):
        fsdp.register(first)

    def refuses(
        message: str, policy: Any = "auto", prepare: Callable[[Any], None] | None = None, **settings: Any
    ) -> None:
        model = fully_shard(copy.deepcopy(linear))
        if prepare is not None:
            prepare(model)
        with pytest.raises((RefusedError, ValueError, TypeError), match=message):
            fsdp.register(model, policy, **settings)
        # Nothing has changed.
        model(torch.ones(2, 8)).sum().backward()

    refuses("one of allreduce", "nothing")
    refuses("rebuild_after=0", rebuild_after=3)
    refuses("the ranks disagree: policy", "auto" if rank == 0 else "skip_unused")
    refuses("rank 1: ValueError|one of allreduce", "auto" if rank == 0 else "nothing")

    def forget_attribute(model: Any) -> None:
        if rank == 1:
            del model._get_fsdp_state()._fsdp_param_groups[0].fsdp_params[0]._module_info

    odd = fully_shard(copy.deepcopy(linear))
    forget_attribute(odd)
    with pytest.raises(RefusedError, match=r"has no _module_info of a parameter"):
        fsdp.register(odd)

    class Own(type(odd._get_fsdp_state()._fsdp_param_groups[0]._reduce_scatter_comm)):  # type: ignore[misc]
        pass

    refuses(
        r"custom reduce-scatter is already set \(Own\)", prepare=lambda model: model.set_custom_reduce_scatter(Own())
    )

    if torch.__version__ >= "2.12":
        from torch.distributed._composable.replicate_with_fsdp import replicate

        with pytest.raises(RefusedError, match="replicate"):
            fsdp.register(replicate(copy.deepcopy(linear), mesh=init_device_mesh("cpu", (2,))))


@pytest.mark.thorough
@on_ranks(2, timeout=300)
def test_compiled_blocks(rank: int) -> None:
    def prepare(model: nn.Module) -> None:
        for layer in model.layers:  # type: ignore[union-attr]
            layer.compile(backend="aot_eager")

    case = Case(blocks, prepare=prepare)
    plain = list(train(case, case.make(), rank, range(3)))
    model = case.make()
    state = fsdp.register(model, ON)
    for ours, expected in zip(train(case, model, rank, range(3)), plain, strict=True):
        assert_same(ours, expected, "compiled")
    assert 0 < state.stats().payload_bytes < 0.51 * state.stats().dense_bytes
