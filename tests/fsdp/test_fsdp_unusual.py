"""Unusual ways to train with fully_shard, beside plain FSDP2: the same gradients, to the bit on two ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from spawn import RankFailure, run_ranks
from test_fsdp import MIXED, ON, POLICIES, WIDTH, Block, Experts, Model, assert_same, batches, local, recover
from test_fsdp_registration import served
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

from ddp_hooks import fsdp
from ddp_hooks.fsdp import param_groups

pytestmark = served

FLOAT32 = MixedPrecisionPolicy()
Losses = Callable[[], torch.Tensor]


class Way:
    """A way to train: how a model is made and sharded, and what a step does. Each kind is a subclass.

    Attributes:
        ranks: on how many it runs.
        settings: of ``fully_shard``.
    """

    ranks: tuple[int, ...] = (2, 3)
    settings: dict[str, Any] = {}
    mixed: MixedPrecisionPolicy = MIXED
    sends_unused = False
    precision: float | None = None  # of sums on three ranks, if less than gradients have
    mesh_shape: tuple[int, ...] = ()  # over which it is sharded, if not over all ranks

    def build(self) -> nn.Module:
        return Model([Block(), Block()])

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self._mesh = mesh

    def mesh(self) -> dict[str, Any]:
        if self._mesh is None and self.mesh_shape:
            self._mesh = init_device_mesh("cpu", self.mesh_shape, mesh_dim_names=("hosts", "local"))
        return {} if self._mesh is None else {"mesh": self._mesh}

    def shard(self, model: Any) -> None:
        for layer in model.layers:
            fully_shard(layer, mp_policy=self.mixed, **self.mesh(), **self.settings)
        fully_shard(model, mp_policy=self.mixed, **self.mesh(), **self.settings)

    def make(self) -> Any:
        torch.manual_seed(5)
        model = self.build()
        self.shard(model)
        model.set_reduce_scatter_unused_params(self.sends_unused)  # type: ignore[operator]
        return model

    def loss(self, model: Any, rank: int, number: int) -> torch.Tensor:
        tokens, targets = batches(rank, number)
        return cross_entropy(model(tokens).flatten(0, 1).float(), targets)

    def step(self, model: Any, rank: int, step: int) -> None:
        self.loss(model, rank, step).backward()

    def between(self, model: Any, state: Any, step: int) -> None:
        """What comes before a step; the state is None in plain FSDP2."""


class Offloaded(Way):
    settings = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


class NeverResharded(Way):
    settings = {"reshard_after_forward": False}


class ReshardedByDefault(Way):
    settings = {"reshard_after_forward": None}


class ReshardedToTwo(Way):
    ranks = (4,)
    settings = {"reshard_after_forward": 2}


class SmallerThanTheWorld(Way):
    """Parameters with fewer rows than there are ranks, so that some hold nothing of them."""

    class Thin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.randn(1, WIDTH))
            self.two = nn.Parameter(torch.randn(2, WIDTH))
            self.single = nn.Parameter(torch.randn(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.one + (x @ self.two.T).sum(-1, keepdim=True) * self.single

    def build(self) -> nn.Module:
        return Model([self.Thin(), Block()])


class Tied(Way):
    def build(self) -> nn.Module:
        model = Model([Block(), Block()], words=11)
        model.head.weight = model.words.weight
        return model

    def loss(self, model: Any, rank: int, number: int) -> torch.Tensor:
        tokens, targets = batches(rank, number)
        return cross_entropy(model(tokens % 11).flatten(0, 1).float(), targets)


class FrozenInBetween(Way):
    """Frozen and unfrozen after registering, one parameter and a whole layer."""

    def between(self, model: Any, state: Any, step: int) -> None:
        model.layers[0].requires_grad_(step % 3 != 1)
        model.layers[1].up.bias.requires_grad_(step % 2 == 0)


class FrozenInBetweenWithZeros(FrozenInBetween):
    sends_unused = True


class SeveralForwards(Way):
    def step(self, model: Any, rank: int, step: int) -> None:
        sum(self.loss(model, rank, 3 * step + i) for i in range(3)).backward()  # type: ignore[union-attr]


class SeveralBackwards(Way):
    """Two backward passes through graphs that were made before; shards add up what comes of each."""

    def step(self, model: Any, rank: int, step: int) -> None:
        losses = [self.loss(model, rank, 2 * step + i) for i in range(2)]
        for loss in losses:
            loss.backward()


class MixedAccumulation(Way):
    """Passes with and without synchronisation in turns, and with gradients that were not set to None before."""

    mixed = FLOAT32

    def step(self, model: Any, rank: int, step: int) -> None:
        for number, synchronises in enumerate(
            ((True,), (False, True), (True, False, True), (False, False, True))[step]
        ):
            model.set_requires_gradient_sync(synchronises)
            model.set_is_last_backward(synchronises)
            self.loss(model, rank, 4 * step + number).backward()


class MixedAccumulationInBfloat16(MixedAccumulation):
    mixed = MIXED


class NotResharded(MixedAccumulation):
    def step(self, model: Any, rank: int, step: int) -> None:
        model.set_reshard_after_backward(step % 2 == 0)
        super().step(model, rank, step)


class TwoTypes(Way):
    """Nested modules with types of their own."""

    precision = torch.finfo(torch.bfloat16).eps  # of the sums of one of them

    def shard(self, model: Any) -> None:
        over = self.mesh()
        fully_shard(model.layers[0].up, **over, mp_policy=MixedPrecisionPolicy(torch.float32, torch.float64))
        fully_shard(model.layers[0], **over, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fully_shard(
            model.layers[1], **over, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32, torch.float32)
        )
        fully_shard(model, **over, mp_policy=FLOAT32)

    def build(self) -> nn.Module:
        class Casting(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.norm(x)
                y = torch.relu(self.up(y).to(x.dtype))
                return x + self.down(y)

        return Model([Casting(), Block()])


class Bfloat16Throughout(Way):
    mixed = FLOAT32

    def build(self) -> nn.Module:
        return super().build().bfloat16()


class DividedByRanks(Way):
    def make(self) -> Any:
        model = super().make()
        model.set_gradient_divide_factor(float(dist.get_world_size()))
        return model


class DividedOtherwise(Way):
    """By another number, which gloo cannot do but in two steps."""

    def make(self) -> Any:
        model = super().make()
        model.set_force_sum_reduction_for_comms(True)
        model.set_gradient_divide_factor(7.0)
        return model


class DividedInFloat16(Way):
    mixed = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    precision = torch.finfo(torch.float16).eps

    def make(self) -> Any:
        model = super().make()
        model.set_gradient_divide_factor(6.0)
        return model


class SetAfterRegistering(Way):
    """What may be set at any time."""

    def between(self, model: Any, state: Any, step: int) -> None:
        model.set_force_sum_reduction_for_comms(step % 2 == 1)
        model.set_reduce_scatter_unused_params(step % 3 == 2)
        if step == 2 and hasattr(model, "set_separate_reduce_scatter_group"):
            model.set_separate_reduce_scatter_group(True)
        if step == 1 and hasattr(model, "set_reduce_scatter_max_input_buffers"):
            model.set_reduce_scatter_max_input_buffers(2)


class ThrowsInBackward(Way):
    """A pass that fails on every rank, halfway, and after it one that works."""

    class Throwing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("on purpose")

    class Layer(Block):
        throws = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(ThrowsInBackward.Throwing.apply(x) if self.throws else x)

    def build(self) -> nn.Module:
        return Model([Block(), self.Layer(), Block()])

    def step(self, model: Any, rank: int, step: int) -> None:
        if step % 2 == 1:
            model.layers[1].throws = True
            with pytest.raises(ValueError, match="on purpose"):
                self.loss(model, rank, 100 + step).backward()
            model.layers[1].throws = False
            recover(model)
        self.loss(model, rank, step).backward()


def close(model: nn.Module) -> None:
    """Close the state of a module, if it has one."""
    if isinstance(state := param_groups.find(model)[0].owner, fsdp.ShardState):
        state.close()


class ClosedInBetween(Way):
    def between(self, model: Any, state: Any, step: int) -> None:
        if state is not None and step == 2:
            state.close()


class ClosedWithinAccumulation(Way):
    mixed = FLOAT32

    def step(self, model: Any, rank: int, step: int) -> None:
        model.set_requires_gradient_sync(False)
        self.loss(model, rank, 2 * step).backward()
        model.set_requires_gradient_sync(True)
        if step == 2:
            close(model)
        self.loss(model, rank, 2 * step + 1).backward()


class ClosedBetweenForwardAndBackward(Way):
    def step(self, model: Any, rank: int, step: int) -> None:
        loss = self.loss(model, rank, step)
        if step == 2:
            close(model)
        loss.backward()


class Grouped(Way):
    """Several modules in one group."""

    def shard(self, model: Any) -> None:
        fully_shard(list(model.layers), mp_policy=self.mixed, **self.mesh())
        fully_shard(model, mp_policy=self.mixed, **self.mesh())


class LossInChunks(Way):
    """The head runs after the root, chunk by chunk with a backward pass each, and is grouped with what does not run."""

    class Headless(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.layers[0](self.words(tokens))  # type: ignore[no-any-return]

    def build(self) -> nn.Module:
        return self.Headless([Block(), Block()])

    def shard(self, model: Any) -> None:
        fully_shard([model.layers[1], model.head], mp_policy=self.mixed, **self.mesh())
        fully_shard(model, mp_policy=self.mixed, **self.mesh())

    def step(self, model: Any, rank: int, step: int) -> None:
        tokens, targets = batches(rank, step)
        hidden = model(tokens)
        apart = hidden.detach().requires_grad_()
        for rows, wanted in zip(apart.flatten(0, 1).split(4), targets.split(4), strict=True):
            cross_entropy(model.head(rows).float(), wanted).backward()
        hidden.backward(apart.grad)


class TensorParallel(Way):
    """Sharded over one dimension of a mesh, while the other splits the layers themselves."""

    ranks = (4,)
    mesh_shape = (2, 2)
    mixed = FLOAT32

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    def build(self) -> nn.Module:
        return Model([self.Pair(), self.Pair()])

    def shard(self, model: Any) -> None:
        mesh = self.mesh()["mesh"]
        for layer in model.layers:
            parallelize_module(layer, mesh["local"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(layer, mesh=mesh["hosts"], mp_policy=self.mixed)
        fully_shard(model, mesh=mesh["hosts"], mp_policy=self.mixed)

    def step(self, model: Any, rank: int, step: int) -> None:
        self.loss(model, rank // 2, step).backward()


class ForwardsForNothing(Way):
    def step(self, model: Any, rank: int, step: int) -> None:
        with torch.no_grad():
            self.loss(model, rank, 50 + step)
        model.eval()
        self.loss(model, rank, 60 + step)  # its graph is dropped
        model.train()
        self.loss(model, rank, step).backward()


class KeptGraph(Way):
    settings = {"reshard_after_forward": False}

    def step(self, model: Any, rank: int, step: int) -> None:
        loss = self.loss(model, rank, step)
        loss.backward(retain_graph=True)
        loss.backward()


class OptimizedInBackward(Way):
    """What reads gradients as soon as they are reduced."""

    def make(self) -> Any:
        model = super().make()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: local(p).data.sub_(local(p.grad), alpha=1e-3))
        return model


class HookOfTheUser(Way):
    def make(self) -> Any:
        model = super().make()
        for layer in model.layers:
            layer.set_all_reduce_hook(lambda shard: shard.mul_(0.5))
        return model


class OverHosts(Way):
    """HSDP as torch does it; only its reduce-scatters are served."""

    ranks = (4,)
    mesh_shape = (2, 2)


class OverHostsAccumulating(OverHosts):
    def step(self, model: Any, rank: int, step: int) -> None:
        for number in range(3):
            model.set_requires_all_reduce(number == 2)
            self.loss(model, rank, 3 * step + number).backward()


class Alone(Way):
    """Each rank shards for itself."""

    ranks = (2,)

    def mesh(self) -> dict[str, Any]:
        return {"mesh": init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("a", "b"))["b"]}


class UnusedInAccumulation(Way):
    mixed = FLOAT32
    sends_unused = True

    def build(self) -> nn.Module:
        return Model([Experts(), Block()])

    def step(self, model: Any, rank: int, step: int) -> None:
        for number in range(2):
            model.set_requires_gradient_sync(number == 1)
            model.layers[0].chosen = ((rank + step + number) % 4,)
            self.loss(model, rank, 2 * step + number).backward()


WAYS: list[type[Way]] = [
    each for each in list(globals().values()) if isinstance(each, type) and issubclass(each, Way) and each is not Way
]
# Those that make sense where register averages over hosts, in place of HSDP.
WAYS_OVER_HOSTS: list[type[Way]] = [
    *(Offloaded, NeverResharded, SmallerThanTheWorld, Tied, FrozenInBetween, FrozenInBetweenWithZeros),
    *(SeveralForwards, SeveralBackwards, MixedAccumulation, MixedAccumulationInBfloat16, TwoTypes, Bfloat16Throughout),
    *(DividedOtherwise, DividedInFloat16, Grouped, ForwardsForNothing, OptimizedInBackward, UnusedInAccumulation),
]


def follow(way: Way, model: Any, rank: int, steps: int, state: Any) -> Iterator[dict[str, Any]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if dist.get_world_size() > 2 else 0.1)
    for step in range(steps):
        way.between(model, state, step)
        way.step(model, rank, step)
        yield {n: None if p.grad is None else local(p.grad).clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    yield {name: local(parameter).detach().clone() for name, parameter in model.named_parameters()}


def compare(rank: int, names: list[str], policies: list[str], over_hosts: bool = False) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "local")) if over_hosts else None
    for name in names:
        kind = next(each for each in WAYS if each.__name__ == name)
        way = kind(mesh)
        steps = 4
        plain = list(follow(way, way.make(), rank, steps, None))
        for policy in policies:
            way = kind(None if mesh is None else mesh["local"])
            model = way.make()
            state = fsdp.register(model, POLICIES[policy], mesh=mesh)
            for step, (ours, expected) in enumerate(zip(follow(way, model, rank, steps, state), plain, strict=True)):
                assert_same(ours, expected, f"{name}, {policy}, step {step}", way.precision)
            assert name == "Alone" or state.stats().payload_bytes < state.stats().dense_bytes, name
            state.close()


@pytest.mark.parametrize(
    ("world_size", "share"), [(2, 2), *(pytest.param(n, 1, marks=pytest.mark.thorough) for n in (2, 3, 4))]
)
def test_ways_to_train(world_size: int, share: int) -> None:
    names = [way.__name__ for way in WAYS if world_size in way.ranks][::share]
    run_ranks(world_size, compare, names, ["restless"] if world_size == 2 else ["on"])


@pytest.mark.thorough
def test_ways_to_train_over_hosts() -> None:
    run_ranks(4, compare, [way.__name__ for way in WAYS_OVER_HOSTS], ["on"], True)


# --- ends


def end_in_backward(rank: int, how: str) -> None:
    class Ending(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            if rank == 1 and how == "dies":
                os._exit(3)
            if rank == 1 and how == "raises":
                raise ValueError("on purpose")
            if rank == 1 and how == "sleeps":
                time.sleep(4)
            return gradient

    class Layer(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(Ending.apply(x))

    way = Way()
    way.build = lambda: Model([Block(), Layer(), Block()])  # type: ignore[method-assign]
    model = way.make()
    fsdp.register(model, ON)
    way.step(model, rank, 0)


@pytest.mark.parametrize("how", ["dies", "raises", pytest.param("sleeps", marks=pytest.mark.thorough)])
def test_a_rank_that_does_not_come_is_an_error(how: str) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(3, end_in_backward, how, collective_timeout=2)
    text = str(caught.value)
    assert "hung" not in text
    for rank in (0, 2):
        part = text.split(f"--- rank {rank} ")[1].split("---")[0]
        assert "RuntimeError" in part
        assert "Timed out" in part or "onnection" in part
