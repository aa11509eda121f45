"""Random programs with FSDP2, on the CPU or the pretended device, run with and without ddp_hooks.fsdp and compared."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from spawn import run_ranks
from test_fsdp import (
    MIXED,
    ON,
    POLICIES,
    Adapted,
    Block,
    Experts,
    Model,
    Stacked,
    assert_same,
    batches,
    bits,
    local,
    recover,
    shard_along_last,
)
from test_fsdp_devices import memory_that_ends_late, optimizer_of, prefetching
from test_pretend import run_pretended
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from tuned import with_settings

from ddp_hooks import fsdp
from ddp_hooks.statistics import Statistics

# Programs of one set of ranks, which then start anew.
AT_ONCE = 25
LAYERS: dict[str, Any] = {
    "block": Block,
    "recomputed": partial(Block, recomputes=True),
    "adapted": Adapted,
    "experts": Experts,
    "stacked": Stacked,
}
PRECISIONS = {
    "mixed": MIXED,
    "float32": MixedPrecisionPolicy(),
    "float16": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
    "bfloat16 sums": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "float64": MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64),
}
SETTINGS = {
    "auto": POLICIES["auto"],
    "restless": POLICIES["restless"],
    "on": ON,
    "uncoded": with_settings(POLICIES["restless"], coded="off"),
    "skip_unused": POLICIES["skip_unused"],
    "allreduce": POLICIES["allreduce"],
}
# The host of each rank.
HOSTS = {2: ((0, 1), (0, 0)), 4: ((0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 0, 0), (0, 1, 2, 3), (0, 0, 0, 1))}
# Whether each backward pass of a step synchronises.
PASSES = ((True,), (False, True), (True, True), (True, False, True), (False, False, True))


@dataclass(frozen=True)
class Step:
    """A step of training.

    Attributes:
        passes: whether each backward pass synchronises.
        frozen: the layers that are frozen from now on.
        clips: whether gradients are clipped.
        keeps: whether gradients are not set to None afterwards.
        breaks_at: None, or the layer at whose output a backward pass breaks off, before the others.
        policy: None, or what the model is registered with anew, before all of them.
    """

    passes: tuple[bool, ...]
    frozen: tuple[int, ...]
    clips: bool
    keeps: bool
    breaks_at: int | None
    policy: str | None


@dataclass(frozen=True)
class Program:
    """A model, how it is sharded, registered and trained.

    Attributes:
        differs: whether ranks may use different experts, so that FSDP2 sends zeros.
        over_hosts: None, or how the two dimensions of a mesh of hosts are reduced: by FSDP2 (`hsdp`) or by us (`mesh`).
    """

    seed: int
    ranks: int
    device: str
    layers: tuple[str, ...]
    words: int
    precision: str
    narrow_parameters: bool
    differs: bool
    hosts: tuple[int, ...]
    over_hosts: str | None
    by_columns: bool
    reshards: bool
    prefetches: bool
    sums_alone: bool
    policy: str
    steps: tuple[Step, ...]

    @property
    def is_exact(self) -> bool:
        """Whether sums have the same order with and without us."""
        return self.ranks == 2 or self.over_hosts is not None

    def chosen(self, rank: int, step: int, number: int, layer: int, count: int) -> tuple[int, ...]:
        """Return the experts of a layer that a rank uses in a pass."""
        who = rank if self.differs or count > 4 else "everyone"
        draw = random.Random(f"{self.seed} {who} {step} {number} {layer}")
        return tuple(draw.sample(range(count), draw.randint(1, 2)))


def generate(seed: int, ranks: int, device: str) -> Program:
    """Return the program of a seed."""
    draw = random.Random(f"{seed} on {ranks}")
    # By numbers of their own, so that what seeds found before these were there stays what it was.
    breaks = random.Random(f"breaks of {seed} on {ranks}")

    def chance(probability: float) -> bool:
        return draw.random() < probability

    layers = tuple(draw.choices(list(LAYERS), k=draw.randint(1, 4)))
    precision = draw.choices(list(PRECISIONS), [6, 3, 1, 1, 1])[0]
    narrow_parameters = precision in ("mixed", "bfloat16 sums") and chance(0.2)
    differs = "experts" in layers and chance(0.6)
    # FSDP2 mixes no gradients of one pass, or zeros for what is unused, with accumulated ones of another type.
    may_accumulate = "experts" not in layers or (precision == "float32" and not narrow_parameters)
    patterns = PASSES if may_accumulate else tuple(each for each in PASSES if all(each))
    frozen: tuple[int, ...] = ()
    steps = []
    for step in range(draw.randint(2, 4)):
        # If all of a layer is frozen in its first forward pass, FSDP2 never learns the type of its gradients.
        if step > 0 and chance(0.3):
            frozen = tuple(i for i in range(len(layers)) if chance(0.4))
        done = Step(
            draw.choice(patterns),
            frozen,
            clips=chance(0.3),
            keeps=chance(0.15),
            breaks_at=breaks.randrange(len(layers)) if breaks.random() < 0.15 else None,
            policy=breaks.choice(list(SETTINGS)) if breaks.random() < 0.15 else None,
        )
        steps.append(done)
    return Program(
        seed,
        ranks,
        device,
        layers,
        words=draw.choice([1, 3, 101, 101, 700]),
        precision=precision,
        narrow_parameters=narrow_parameters,
        differs=differs,
        hosts=draw.choice(HOSTS[ranks]),
        over_hosts=draw.choices([None, "mesh", "hsdp"], [4, 1, 1])[0],
        by_columns=chance(0.2),
        reshards=chance(0.8),
        prefetches=chance(0.2),
        sums_alone=chance(0.1),
        policy=draw.choices(list(SETTINGS), [4, 4, 3, 1, 1, 1])[0],
        steps=tuple(steps),
    )


class Registrations:
    """What a model is registered with, one policy after another.

    Args:
        model: the model.
        hosts: the mesh of hosts that ours averages over, if any.
    """

    def __init__(self, model: Any, hosts: DeviceMesh | None) -> None:
        self._model, self._hosts = model, hosts
        self._state: fsdp.ShardState | None = None
        self.stats: list[Statistics] = []

    def register(self, policy: str) -> None:
        self.close()
        self._state = fsdp.register(self._model, SETTINGS[policy], mesh=self._hosts)

    def close(self) -> None:
        if self._state is not None:
            self.stats.append(self._state.stats())
            self._state.close()


def make(program: Program, is_ours: bool) -> tuple[Any, Registrations | None]:
    """Return the sharded model, and what registers it."""
    shape = (program.ranks,) if program.over_hosts is None else (2, program.ranks // 2)
    mesh = init_device_mesh(program.device, shape, mesh_dim_names=("hosts", "local")[-len(shape) :])
    averages = is_ours and program.over_hosts == "mesh"
    shard: dict[str, Any] = {
        "mesh": mesh["local"] if averages else mesh,
        "mp_policy": PRECISIONS[program.precision],
        "reshard_after_forward": program.reshards,
    }
    if program.by_columns:
        shard["shard_placement_fn"] = shard_along_last
    torch.manual_seed(program.seed)
    model: Any = Model([LAYERS[kind]() for kind in program.layers], program.words).to(program.device)
    if program.narrow_parameters:
        model.bfloat16()
    for module in (*model.layers, model):
        fully_shard(module, **shard)
    model.set_reduce_scatter_unused_params(program.differs)
    model.set_force_sum_reduction_for_comms(program.sums_alone)
    if program.prefetches:
        prefetching(model)
    return model, Registrations(model, mesh if averages else None) if is_ours else None


def train(
    program: Program, model: Any, rank: int, registrations: Registrations | None
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield what this rank holds of gradients after each step, and of parameters at last."""
    optimizer = optimizer_of(model, 1e-2 if program.is_exact else 0.0)
    adapted = {i for i, kind in enumerate(program.layers) if kind == "adapted"}

    def run_pass(step: int, number: int) -> None:
        for i, layer in enumerate(model.layers):
            if hasattr(layer, "chosen"):
                count = len(layer.experts) if isinstance(layer, Experts) else 6
                layer.chosen = program.chosen(rank, step, number, i, count)
        tokens, targets = batches(rank, 10 * step + number)
        logits = model(tokens % program.words).flatten(0, 1).float()
        cross_entropy(logits, targets.to(logits.device)).backward()

    for step, done in enumerate(program.steps):
        policy = done.policy or (program.policy if step == 0 else None)
        if registrations is not None and policy is not None:
            registrations.register(policy)
        for i, layer in enumerate(model.layers):
            if i not in adapted:
                layer.requires_grad_(i not in done.frozen)
        if done.breaks_at is not None:
            with breaking_off(model.layers[done.breaks_at]), suppress(ArithmeticError):
                run_pass(step, 9)
            recover(model)
        for number, synchronises in enumerate(done.passes):
            model.set_requires_gradient_sync(synchronises)
            model.set_is_last_backward(synchronises)
            run_pass(step, number)
        if done.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        yield {n: local(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        if not done.keeps:
            optimizer.zero_grad()
    yield {name: local(parameter).detach().clone() for name, parameter in model.named_parameters()}
    if registrations is not None:
        registrations.close()


@contextmanager
def breaking_off(layer: nn.Module) -> Iterator[None]:
    """Have a backward pass raise when it reaches the output of a layer."""

    def raise_error(_: torch.Tensor) -> None:
        raise ArithmeticError

    def watch(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        output.register_hook(raise_error)

    handle = layer.register_forward_hook(watch)
    yield
    handle.remove()


def compare(program: Program, rank: int) -> Counter[str]:
    """Train both; return what ours did."""
    os.environ["DDP_HOOKS_HOST"] = f"host {program.hosts[rank]}"
    found = []
    for is_ours in (False, True):
        model, registrations = make(program, is_ours)
        trained = train(program, model, rank, registrations)
        found.append([{name: one.cpu() + 0.0 for name, one in each.items()} for each in trained])
    precision = torch.finfo(torch.bfloat16).eps if program.precision == "bfloat16 sums" else None
    for step, (plain, ours) in enumerate(zip(*found, strict=True)):
        if program.is_exact:
            assert plain.keys() == ours.keys()
            differing = [name for name in plain if not torch.equal(bits(plain[name]), bits(ours[name]))]
            assert not differing, f"step {step}: {differing}"
        else:
            assert_same(ours, plain, f"step {step}", precision)
    assert registrations is not None
    stats = registrations.stats
    return Counter(
        programs=1,
        that_send_less=int(any(each.payload_bytes < each.dense_bytes for each in stats)),
        that_look=int(any(each.exchanges > 0 for each in stats)),
        that_find_zeros=int(any(each.buckets_packed + each.buckets_skipped > 0 for each in stats)),
    )


def run_programs(rank: int, programs: list[Program]) -> Counter[str]:
    """Compare some programs of one device; raise for the first one that differs."""
    on_pretended = programs[0].device == "pretend"
    done: Counter[str] = Counter()
    with memory_that_ends_late() if on_pretended else nullcontext():
        for program in programs:
            if on_pretended:
                from ddp_hooks_testing import _pretend

                _pretend.seed(1000 * program.seed + rank, 0.3)
            try:
                done += compare(program, rank)
            except Exception as error:
                raise AssertionError(f"seed {program.seed} on {program.ranks} ranks: {program}") from error
            if on_pretended:
                _pretend.synchronize()
    return done


def run_seeds(seeds: range, ranks: int, device: str) -> Counter[str]:
    """Run the programs of some seeds; return what they did."""
    done: Counter[str] = Counter()
    for first in range(seeds.start, seeds.stop, AT_ONCE):
        programs = [generate(seed, ranks, device) for seed in range(first, min(first + AT_ONCE, seeds.stop))]
        timeout = 20.0 * len(programs) + 60
        if device == "pretend":
            found = run_pretended(ranks, first, run_programs, programs, timeout=timeout)
        else:
            found = run_ranks(ranks, run_programs, programs, timeout=timeout)
        done += found[0]
        print(f"{dict(done)} up to seed {programs[-1].seed}", flush=True)
    return done
