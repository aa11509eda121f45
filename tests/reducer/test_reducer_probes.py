"""What the engine reads of DDP's Reducer, and Python of DDP, still means what it meant: one probe for each.

When a new torch comes, these tests say which member changed its meaning, at which moment. The list stands in
docs/internals/new-torch.md, too; the last tests keep list, probes and source together.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from spawn import on_ranks, run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

import ddp_hooks
from ddp_hooks import _extension
from ddp_hooks_testing import _C as testing

_C = _extension.load()
ROOT = Path(__file__).parents[2]
Values = dict[str, Any]
OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
TAKES_BATCHES = "batched_grad_copy" in OPTIONS
ALLOCATES_LAZILY = "lazy_bucket_allocation" in OPTIONS
FINALIZES_MANUALLY = hasattr(DistributedDataParallel, "finalize_backward")


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, second: bool = False) -> torch.Tensor:
        return self.second(x) if second else self.first(x)


FIRST = [0, 1]  # the parameters of `first`, as the Reducer counts
SECOND = [2, 3]


class Watched:
    """A DDP module whose Reducer is looked at whenever the engine looks at it."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        self.ddp = DistributedDataParallel(Branches() if model is None else model, **options)
        self.in_hook: list[Values] = []
        self.reached: list[Values] = []
        self.buffers: list[torch.Tensor] = []
        self.ddp.register_comm_hook(None, self._hook)

    def _hook(self, state, bucket):  # DDP compares annotations as objects
        self.in_hook.append(self.now)
        self.buffers.append(bucket.buffer())
        return allreduce_hook(dist.group.WORLD, bucket)

    @property
    def now(self) -> Values:
        return testing.probe_reducer(self.ddp.reducer)

    def forward(self, *args: Any) -> torch.Tensor:
        output = self.ddp(torch.ones(2, 4), *args)
        output.register_hook(lambda gradient: self.reached.append(self.now))
        return output

    def step(self, *args: Any) -> None:
        self.in_hook.clear()
        self.reached.clear()
        self.buffers.clear()
        self.forward(*args).sum().backward()


def mutex_(rank: int) -> None:
    watched = Watched(find_unused_parameters=True)
    assert not watched.now["mutex_"]
    watched.step()
    # Free where the engine takes it itself, held where the Reducer runs the hook.
    assert not watched.reached[0]["mutex_"]
    assert watched.in_hook[0]["mutex_"]
    assert not watched.now["mutex_"]


def params_(rank: int) -> None:
    model = Branches()
    model.first.bias.requires_grad_(False)
    watched = Watched(model)
    expected = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.second.bias.requires_grad_(False)  # afterwards: it stays
    found = watched.now["params_"]
    assert len(found) == len(expected) == 3
    assert all(a is b for a, b in zip(found, expected, strict=True))


def grad_accumulators_(rank: int) -> None:
    watched = Watched(find_unused_parameters=True)
    found = watched.now["grad_accumulators_"]
    assert len(found) == 4
    assert all("AccumulateGrad" in name and own for name, own, _ in found)

    def holders() -> list[int]:
        return [count for _, _, count in watched.now["grad_accumulators_"]]

    # By the Reducer itself and with its hook; and by whatever graph leads to the parameter, for as long as it lives.
    assert holders() == [2, 2, 2, 2]
    output = watched.forward()
    assert [count > 2 for count in holders()] == [index in FIRST for index in range(4)]
    output.sum().backward()
    del output
    assert holders() == [2, 2, 2, 2]
    # Two graphs, and one that was not made by the module.
    kept = [watched.ddp(torch.ones(2, 4)), watched.ddp.module.second.weight * 2]
    assert [count > 2 for count in holders()] == [True, True, True, False]
    kept.clear()
    assert holders() == [2, 2, 2, 2]


def process_group_(rank: int) -> None:
    group = dist.new_group([0])
    assert Watched().now["process_group_"].group_name == dist.group.WORLD.group_name
    assert Watched(process_group=group).now["process_group_"].group_name == group.group_name


def expect_autograd_hooks_(rank: int) -> None:
    watched = Watched()
    assert not watched.now["expect_autograd_hooks_"]
    with watched.ddp.no_sync():
        watched.forward(False)
        watched.forward(True)
    with torch.no_grad():
        watched.ddp(torch.ones(2, 4))
    assert not watched.now["expect_autograd_hooks_"]
    watched = Watched(find_unused_parameters=True)
    output = watched.forward()
    assert watched.now["expect_autograd_hooks_"]
    output.sum().backward()
    assert watched.reached[0]["expect_autograd_hooks_"]
    assert watched.in_hook[0]["expect_autograd_hooks_"]
    assert not watched.now["expect_autograd_hooks_"]


def require_finalize_(rank: int) -> None:
    """True once a parameter is marked ready; False in the pass that a joined rank plays along with."""
    watched = Watched(find_unused_parameters=True)
    with watched.ddp.join():
        for _ in range(1 + rank):
            watched.step()
            assert not watched.reached[0]["require_finalize_"]
            assert watched.in_hook[0]["require_finalize_"]
            assert not watched.now["require_finalize_"]
        watched.in_hook.clear()
    assert [values["require_finalize_"] for values in watched.in_hook] == ([False] if rank == 0 else [])


def find_unused_parameters_(rank: int) -> None:
    for value in (False, True):
        assert Watched(find_unused_parameters=value).now["find_unused_parameters_"] is value


def skip_all_reduce_unused_params_(rank: int) -> None:
    for value in (False, True):
        watched = Watched(find_unused_parameters=True, skip_all_reduce_unused_params=value)
        assert watched.now["skip_all_reduce_unused_params_"] is value


def unused_parameters_(rank: int) -> None:
    watched = Watched(find_unused_parameters=True)
    for second, unused in ((True, FIRST), (False, SECOND)):
        output = watched.forward(second)
        assert sorted(watched.now["unused_parameters_"]) == unused
        output.sum().backward()
        assert sorted(watched.in_hook[-1]["unused_parameters_"]) == unused
    static = Watched(static_graph=True)
    static.step(True)
    assert sorted(static.in_hook[0]["unused_parameters_"]) == FIRST  # known at the first bucket of the first pass
    static.step(True)
    assert sorted(static.reached[0]["unused_parameters_"]) == FIRST
    everything = Watched(_NoParameter(), find_unused_parameters=True)
    everything.forward()
    assert sorted(everything.now["unused_parameters_"]) == [0]
    plain = Watched()
    plain.forward(True)
    assert plain.now["unused_parameters_"] == []


class _NoParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone().requires_grad_() * 2


def local_used_map_(rank: int) -> None:
    """1 for what got a gradient here since the last pass that was reduced, on the CPU, in 32 bits."""
    watched = Watched(find_unused_parameters=True)
    with watched.ddp.no_sync():
        watched.forward(True).sum().backward()
    accumulated = watched.now["local_used_map_"]
    assert accumulated.dtype == torch.int32
    assert accumulated.device.type == "cpu"
    assert accumulated.tolist() == [0, 0, 1, 1]
    watched.step(False)
    assert watched.reached[0]["local_used_map_"].tolist() == [0, 0, 1, 1]
    assert watched.in_hook[-1]["local_used_map_"].tolist() == [1, 1, 1, 1]
    assert watched.now["local_used_map_"].tolist() == [0, 0, 0, 0]
    watched.step(False)
    assert watched.in_hook[-1]["local_used_map_"].tolist() == [1, 1, 0, 0]


def local_used_map_reduced_(rank: int) -> None:
    """False whenever a pass begins that searches the graph. True says that the map holds every rank's uses."""
    watched = Watched(find_unused_parameters=True)
    for _ in range(2):
        watched.step()
        assert not watched.reached[0]["local_used_map_reduced_"]
        assert not watched.in_hook[-1]["local_used_map_reduced_"]
        assert not watched.now["local_used_map_reduced_"]
    # With a static graph nothing sets it back, so that it can be seen: rank 1 has waited to learn what rank 0 used.
    static = Watched(static_graph=True)
    static.step(rank == 0)
    assert static.now["local_used_map_reduced_"]
    assert all(used > 0 for used in static.now["local_used_map_"].tolist())


def local_used_work_(rank: int) -> None:
    """The map's all-reduce: begun when the last bucket has been handed back, over when backward has returned."""
    watched = Watched(find_unused_parameters=True, bucket_cap_mb=1e-5)
    assert watched.now["local_used_work_"] is None
    watched.step()
    assert len(watched.in_hook) > 1
    assert all(values["local_used_work_"] is None for values in watched.in_hook)
    assert watched.now["local_used_work_"] is True
    without = Watched(nn.Linear(4, 4))
    without.step()
    assert without.now["local_used_work_"] is None


def static_graph_(rank: int) -> None:
    for value in (False, True):
        assert Watched(static_graph=value).now["static_graph_"] is value


def num_iterations_(rank: int) -> None:
    """Forward passes that ask for a reduction, and no others."""
    watched = Watched(find_unused_parameters=True)
    assert watched.now["num_iterations_"] == 0
    for count in (1, 2):
        watched.step()
        assert watched.now["num_iterations_"] == count
    watched.forward()
    with watched.ddp.no_sync():
        watched.forward()
    with torch.no_grad():
        watched.ddp(torch.ones(2, 4))
    assert watched.now["num_iterations_"] == 3


def num_bwd_calls_(rank: int) -> None:
    watched = Watched(find_unused_parameters=True)
    for count in range(3):
        watched.forward()  # a pass that nobody differentiates
        watched.step()
        assert watched.reached[0]["num_bwd_calls_"] == count
        assert watched.in_hook[0]["num_bwd_calls_"] == count + 1
        assert watched.now["num_bwd_calls_"] == count + 1


def first_autograd_hook_called_(rank: int) -> None:
    watched = Watched(find_unused_parameters=True)
    for _ in range(2):
        watched.step()
        assert not watched.reached[0]["first_autograd_hook_called_"]
        assert watched.in_hook[0]["first_autograd_hook_called_"]
        assert not watched.now["first_autograd_hook_called_"]


def div_factor_(rank: int) -> None:
    """Known in the hook, unset outside; under join() it may be the number of ranks that are left."""
    watched = Watched(find_unused_parameters=True)
    assert watched.now["div_factor_"] <= 0
    watched.step()
    assert watched.reached[0]["div_factor_"] <= 0
    assert watched.in_hook[0]["div_factor_"] == 2
    assert watched.now["div_factor_"] <= 0
    found = []
    with watched.ddp.join(divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            watched.step()
            found.append(watched.in_hook[0]["div_factor_"])
    assert found == [2, 1][: 1 + rank]


def numGradHooksTriggeredMapPerIteration_(rank: int) -> None:
    """Of a static graph, from the second pass on: how often each parameter still reports."""
    watched = Watched(static_graph=True, bucket_cap_mb=1e-5)
    watched.step(True)
    for _ in range(2):
        watched.step(True)
        left = watched.reached[0]["numGradHooksTriggeredMapPerIteration_"]
        assert [left.get(i, 0) for i in range(4)] == [0, 0, 1, 1]
        left = watched.in_hook[-1]["numGradHooksTriggeredMapPerIteration_"]
        assert [left.get(i, 0) for i in range(4)] == [0, 0, 0, 0]


def has_rebuilt_bucket_(rank: int) -> None:
    """Set in the second forward pass, unless the graph is searched; that is when the buckets change."""
    watched = Watched(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_cap_mb=1e-5)
    watched.step()
    assert not watched.now["has_rebuilt_bucket_"]
    before = watched.now["buckets_"]
    watched.step()
    assert watched.reached[0]["has_rebuilt_bucket_"]
    assert len(watched.now["buckets_"]) > len(before)
    searching = Watched(find_unused_parameters=True)
    for _ in range(3):
        searching.step()
    assert not searching.now["has_rebuilt_bucket_"]


def gradient_as_bucket_view_(rank: int) -> None:
    for value in (False, True):
        watched = Watched(gradient_as_bucket_view=value, find_unused_parameters=True)
        assert watched.now["gradient_as_bucket_view_"] is value
        watched.step()
        buffers = {buffer.untyped_storage().data_ptr() for buffer in watched.buffers}
        storage = watched.ddp.module.first.weight.grad.untyped_storage().data_ptr()
        assert (storage in buffers) is value


def batched_grad_copy_(rank: int) -> None:
    if not TAKES_BATCHES:
        assert Watched().now["batched_grad_copy_"] is None
        return
    for value in (False, True):
        assert Watched(batched_grad_copy=value).now["batched_grad_copy_"] is value


def lazy_bucket_allocation_(rank: int) -> None:
    """A bucket has memory, and views of it, from its first gradient to the end of the pass."""
    if not ALLOCATES_LAZILY:
        assert Watched().now["lazy_bucket_allocation_"] is None
        return
    assert Watched().now["lazy_bucket_allocation_"] is False
    watched = Watched(lazy_bucket_allocation=True, find_unused_parameters=True)
    for _ in range(2):
        watched.step()
        assert watched.now["lazy_bucket_allocation_"] is True
        assert [bucket["gradients"] for bucket in watched.reached[0]["buckets_"]] == [None]
        (bucket,) = watched.in_hook[0]["buckets_"]
        assert [view.shape for view in bucket["bucket_views_in"]] == [p.shape for p in bucket["variables"]]
        assert [bucket["gradients"] for bucket in watched.now["buckets_"]] == [None]


def is_manual_finalization_required_(rank: int) -> None:
    """Set by the user between two passes; a pass is then under way until the user says otherwise."""
    watched = Watched(find_unused_parameters=True)
    if not FINALIZES_MANUALLY:
        assert watched.now["is_manual_finalization_required_"] is None
        return
    assert watched.now["is_manual_finalization_required_"] is False
    watched.ddp.require_manual_backward_finalization = True
    assert watched.now["is_manual_finalization_required_"] is True
    watched.step()
    assert watched.now["require_finalize_"]
    watched.ddp.finalize_backward()
    assert not watched.now["require_finalize_"]


def variable_locators_(rank: int) -> None:
    values = Watched(find_unused_parameters=True, bucket_cap_mb=1e-5).now
    assert len(values["buckets_"]) > 1
    for parameter, (bucket, place) in enumerate(values["variable_locators_"]):
        assert values["buckets_"][bucket]["variables"][place] is values["params_"][parameter]
        assert values["buckets_"][bucket]["variable_indices"][place] == parameter


def buckets_(rank: int) -> None:
    """Flat, without gaps, in the order in which the hook is called; a sparse one has nothing before its gradient."""
    model = nn.ModuleDict({"sparse": nn.Embedding(5, 4, sparse=True), "dense": nn.Linear(4, 3)})
    model.forward = lambda x: model["dense"](model["sparse"](torch.tensor([rank, 2])) + x)
    model["dense"].weight.data = model["dense"].weight.data.t().contiguous().t()  # a layout of its own
    watched = Watched(model, find_unused_parameters=True)
    sparse = [bucket for bucket in watched.now["buckets_"] if bucket["expect_sparse_gradient"]]
    assert len(sparse) == 1
    assert sparse[0]["gradients"] is None
    assert [variable is model["sparse"].weight for variable in sparse[0]["variables"]] == [True]
    watched.step()
    for bucket, buffer in zip(watched.in_hook[-1]["buckets_"], watched.buffers, strict=True):
        if bucket["expect_sparse_gradient"]:
            assert bucket["gradients"].is_sparse
            continue
        flat = bucket["gradients"]
        assert flat.data_ptr() == buffer.data_ptr()
        assert bucket["lengths"] == [variable.numel() for variable in bucket["variables"]]
        assert bucket["offsets"] == [sum(bucket["lengths"][:i]) for i in range(len(bucket["lengths"]))]
        assert flat.shape == (sum(bucket["lengths"]),)
        for view, variable, offset in zip(
            bucket["bucket_views_in"], bucket["variables"], bucket["offsets"], strict=True
        ):
            assert view.data_ptr() == flat.data_ptr() + offset * flat.element_size()
            assert view.shape == variable.shape
            assert view.stride() == variable.stride()


# By member: on how many ranks, and what asks.
REDUCER_PROBES: dict[str, tuple[int, Callable[[int], None]]] = {
    probe.__name__: (ranks, probe)
    for ranks, probe in [
        (1, mutex_),
        (1, params_),
        (1, grad_accumulators_),
        (1, process_group_),
        (1, expect_autograd_hooks_),
        (2, require_finalize_),
        (1, find_unused_parameters_),
        (1, skip_all_reduce_unused_params_),
        (1, unused_parameters_),
        (1, local_used_map_),
        (2, local_used_map_reduced_),
        (2, local_used_work_),
        (1, static_graph_),
        (1, num_iterations_),
        (1, num_bwd_calls_),
        (1, first_autograd_hook_called_),
        (2, div_factor_),
        (1, numGradHooksTriggeredMapPerIteration_),
        (1, has_rebuilt_bucket_),
        (1, gradient_as_bucket_view_),
        (1, batched_grad_copy_),
        (1, lazy_bucket_allocation_),
        (1, is_manual_finalization_required_),
        (1, variable_locators_),
        (2, buckets_),
    ]
}


def get_group_store(rank: int) -> None:
    """Ranks of a group find each other there, and no other group does."""
    group = dist.new_group([0])
    group.get_group_store().set("a", "1")
    assert group.get_group_store().get("a") == b"1"
    assert not dist.group.WORLD.get_group_store().check(["a"])


def _comm_hooks(rank: int) -> None:
    ddp = DistributedDataParallel(Branches())
    assert ddp._comm_hooks == []
    ddp.register_comm_hook(None, allreduce_hook)
    assert ddp._comm_hooks == [(allreduce_hook, None)]


def _get_ddp_logging_data(rank: int) -> None:
    ddp = DistributedDataParallel(Branches())
    assert not ddp._get_ddp_logging_data().get("comm_hook")
    ddp.register_comm_hook(None, allreduce_hook)
    assert ddp._get_ddp_logging_data()["comm_hook"] == allreduce_hook.__qualname__
    builtin = DistributedDataParallel(Branches())
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    assert builtin._get_ddp_logging_data()["comm_hook"]


def _build_params_for_reducer(rank: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.Embedding(3, 2, sparse=True))
    ddp = DistributedDataParallel(model)
    model[0].requires_grad_(False)
    parameters, sparse = ddp._build_params_for_reducer()
    assert [a is b for a, b in zip(parameters, [model[1].weight, model[2].weight], strict=True)] == [True, True]
    assert sparse == [False, True]
    names = ddp._build_debug_param_to_name_mapping(parameters)
    assert names == {0: "1.weight", 1: "2.weight"}


def _build_debug_param_to_name_mapping(rank: int) -> None:
    _build_params_for_reducer(rank)


def _ddp_init_helper(rank: int) -> None:
    """Makes a Reducer for the parameters that it is told, and a logger; the module trains on with them."""
    ddp = DistributedDataParallel(Branches())
    ddp(torch.ones(2, 4)).sum()
    ddp.module.second.requires_grad_(False)
    before = weakref.ref(ddp.reducer)
    del ddp.reducer, ddp.logger  # a Reducer that lives on would go on listening to the parameters
    assert before() is None
    parameters, sparse = ddp._build_params_for_reducer()
    ddp._ddp_init_helper(parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters), ddp.static_graph)
    assert len(testing.probe_reducer(ddp.reducer)["params_"]) == 2
    for _ in range(3):
        ddp.zero_grad()
        ddp((1 + rank) * torch.ones(2, 4)).sum().backward()
    assert ddp.module.first.weight.grad.eq(3).all()


def _get_local_used_map(rank: int) -> None:
    """How many ranks used each parameter in the last pass; a rank that has joined sends it as it is."""
    assert DistributedDataParallel(nn.Linear(4, 4)).reducer._get_local_used_map() is None
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True)
    used = ddp.reducer._get_local_used_map()
    ddp(torch.ones(2, 4), rank == 1).sum().backward()
    assert (used.tolist(), used.dtype) == ([1, 1, 1, 1], torch.int32)
    used.fill_(5)
    sent = torch.ones(4, dtype=torch.int32)
    if rank == 0:
        ddp._match_unused_params_allreduce()
    else:
        dist.all_reduce(sent)
        assert sent.tolist() == [6] * 4
    dist.barrier()


def _has_rebuilt_buckets(rank: int) -> None:
    """DDP's own note that it need not ask the Reducer any more; a new Reducer wants it False."""
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    for expected in (False, True):
        ddp(torch.ones(2, 4)).sum().backward()
        assert bool(ddp._has_rebuilt_buckets) is expected


def _static_graph_delay_allreduce_enqueued(rank: int) -> None:
    """DDP's own note that the first pass of a static graph has asked for its reduction."""
    ddp = DistributedDataParallel(nn.Linear(4, 4), static_graph=True)
    assert not ddp._static_graph_delay_allreduce_enqueued
    ddp(torch.ones(2, 4)).sum().backward()
    assert ddp._static_graph_delay_allreduce_enqueued


def _set_static_graph(rank: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    ddp.reducer._set_static_graph()
    assert testing.probe_reducer(ddp.reducer)["static_graph_"]
    ddp.logger._set_static_graph()
    assert ddp._get_ddp_logging_data()["static_graph"]


def _set_comm_hook_name(rank: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    ddp.logger._set_comm_hook_name("somebody's")
    assert ddp._get_ddp_logging_data()["comm_hook"] == "somebody's"


def _register_comm_hook(rank: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    called = []

    def hook(state, bucket):
        called.append(state)
        return allreduce_hook(dist.group.WORLD, bucket)

    dist._register_comm_hook(ddp.reducer, "state", hook)
    ddp(torch.ones(2, 4)).sum().backward()
    assert called == ["state"]


def _delay_all_reduce_all_params(rank: int) -> None:
    """True where DDP left itself nothing to reduce; it then has no Reducer, or refuses to be made at all."""
    assert DistributedDataParallel(nn.Linear(4, 4))._delay_all_reduce_all_params is False


def _use_python_reducer(rank: int) -> None:
    assert DistributedDataParallel(nn.Linear(4, 4))._use_python_reducer is False


def _in_backward_optimizers(rank: int) -> None:
    model = nn.Linear(4, 4)
    assert not any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters())
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    assert all(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters())


def parameters_to_ignore(rank: int) -> None:
    model = Branches()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["second.weight"])
    ddp = DistributedDataParallel(model)
    names = [name for name, _ in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore]
    assert names == ["first.weight", "first.bias", "second.bias"]
    assert len(testing.probe_reducer(ddp.reducer)["params_"]) == 3


def require_backward_grad_sync(rank: int) -> None:
    """What a forward hook on the module sees of it, and of the Reducer, which has been told of the outputs by then."""
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True)
    seen = []
    ddp.register_forward_hook(
        lambda module, args, output: seen.append(
            (module.require_backward_grad_sync, testing.probe_reducer(module.reducer)["expect_autograd_hooks_"])
        )
    )
    with ddp.no_sync():
        ddp(torch.ones(2, 4))
    ddp(torch.ones(2, 4)).sum().backward()
    assert seen == [(False, False), (True, True)]


def _join_config(rank: int) -> None:
    """DDP leaves it as the last join block had it."""
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    assert not ddp._join_config.enable
    with ddp.join():
        assert ddp._join_config.enable
        ddp(torch.ones(2, 4)).sum().backward()
    assert ddp._join_config.enable
    with ddp.join(enable=False):
        assert not ddp._join_config.enable


def join_hook(rank: int) -> None:
    """What a rank that has joined does for each pass of the others; and whether that one is reduced, behind it."""
    seen: list[bool] = []

    class Followed(DistributedDataParallel):
        def join_hook(self, **options):
            hook = super().join_hook(**options)
            main = hook.main_hook

            def follow():
                main()
                seen.append(self.require_forward_param_sync)

            hook.main_hook = follow
            return hook

    ddp = Followed(nn.Linear(4, 4))
    with ddp.join():
        for step in range(1 + 2 * rank):
            with ddp.no_sync() if step == 1 else nullcontext():
                ddp(torch.ones(2, 4)).sum().backward()
    assert seen == ([] if rank else [False, True])


def find_tensors(rank: int) -> None:
    a, b, c, d = (torch.ones(1, requires_grad=True) for _ in range(4))
    found = list(_find_tensors({"x": [a, (b, {"y": c})], "z": 3, "w": d}))
    assert len(found) == 4
    assert all(any(tensor is one for one in found) for tensor in (a, b, c, d))


def mixed_precision(rank: int) -> None:
    assert DistributedDataParallel(nn.Linear(4, 4)).mixed_precision is None


def require_manual_backward_finalization(rank: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    assert getattr(ddp, "require_manual_backward_finalization", None) is (False if FINALIZES_MANUALLY else None)


def settings_of_ddp(rank: int) -> None:
    """What DDP remembers of how it was made."""
    model = nn.Linear(4, 4)
    ddp = DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False)
    assert ddp.module is model
    assert ddp.find_unused_parameters is True
    assert ddp.static_graph is False
    assert ddp.broadcast_buffers is False
    assert ddp.device_type == "cpu"
    assert torch.device(ddp.device) == torch.device("cpu")
    assert ddp.process_group is dist.group.WORLD
    assert ddp.process_group._get_backend(torch.device("cpu")).options._timeout.total_seconds() > 0


def _module_parameters(rank: int) -> None:
    """The parameters that DDP found when it was built, frozen ones included."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    assert {id(parameter) for parameter in ddp._module_parameters} == {
        id(parameter) for parameter in model.parameters()
    }


PYTHON_PROBES: dict[str, tuple[int, Callable[[int], None]]] = {
    ("_find_tensors" if probe is find_tensors else probe.__name__): (ranks, probe)
    for ranks, probe in [
        (1, _comm_hooks),
        (1, _module_parameters),
        (1, _get_ddp_logging_data),
        (1, _build_params_for_reducer),
        (1, _build_debug_param_to_name_mapping),
        (2, _ddp_init_helper),
        (2, _get_local_used_map),
        (1, _has_rebuilt_buckets),
        (1, get_group_store),
        (1, _static_graph_delay_allreduce_enqueued),
        (1, _set_static_graph),
        (1, _set_comm_hook_name),
        (1, _register_comm_hook),
        (1, _delay_all_reduce_all_params),
        (1, _use_python_reducer),
        (1, _in_backward_optimizers),
        (1, parameters_to_ignore),
        (1, require_backward_grad_sync),
        (1, _join_config),
        (2, join_hook),
        (1, find_tensors),
        (1, mixed_precision),
        (1, require_manual_backward_finalization),
        (1, settings_of_ddp),
    ]
}


@pytest.mark.parametrize("member", REDUCER_PROBES)
def test_member_of_the_reducer(member: str) -> None:
    ranks, probe = REDUCER_PROBES[member]
    run_ranks(ranks, probe)


@pytest.mark.parametrize("name", PYTHON_PROBES)
def test_name_in_ddp(name: str) -> None:
    ranks, probe = PYTHON_PROBES[name]
    run_ranks(ranks, probe)


@on_ranks(1)
def test_private_hook(rank: int) -> None:
    """A private member: the hook, of whatever kind, until it is taken out."""
    built_in, native, python = (DistributedDataParallel(nn.Linear(4, 4)) for _ in range(3))
    assert not any(_C.reducer_has_hook(ddp.reducer) for ddp in (built_in, native, python))
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    state = ddp_hooks.register(native)
    python.register_comm_hook(None, allreduce_hook)
    assert all(_C.reducer_has_hook(ddp.reducer) for ddp in (built_in, native, python))
    state.close()
    assert not _C.reducer_has_hook(native.reducer)
    native.register_comm_hook(None, allreduce_hook)


def listed_under(heading: str) -> set[str]:
    """The names in the first column of the table under a heading of the page."""
    page = (ROOT / "docs" / "internals" / "new-torch.md").read_text()
    section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE))


def test_what_is_read_of_the_reducer_is_probed_and_listed() -> None:
    source = (ROOT / "csrc" / "reducer" / "reducer_view.cpp").read_text()
    read = set(re.findall(r"&(?:Members|Scope)::(\w+_)\b", source))
    assert len(read) > 15
    assert set(REDUCER_PROBES) == read
    assert listed_under("What is read of the Reducer") == read


def test_what_is_read_of_buckets_is_probed() -> None:
    source = (ROOT / "csrc" / "reducer" / "reducer_view.cpp").read_text()
    read = set(re.findall(r"\bbucket\.(\w+)", source))
    probed = set(re.findall(r'entry\["(\w+)"\]', (ROOT / "csrc" / "testing" / "reducer_probes.cpp").read_text()))
    assert len(read) > 4
    assert read <= probed


def test_what_is_read_of_ddp_is_probed_and_listed() -> None:
    read = set()
    for path in (ROOT / "ddp_hooks").rglob("*.py"):
        text = path.read_text()
        read |= set(re.findall(r"\b(?:_?ddp|module|reducer|logger|dist)\.(_[a-z]\w*)", text))
        read |= set(
            re.findall(
                r"\b(_find_tensors|_in_backward_optimizers|parameters_to_ignore|mixed_precision|join_hook)\b", text
            )
        )
        read |= set(re.findall(r'getattr\(ddp, "(\w+)"', text))
    assert len(read) > 10
    # Buffers synchronise through hooks of DDP that tests/sync/test_sync_buffers.py tests.
    read -= {"_register_buffer_comm_hook", "_C"}
    assert read <= set(PYTHON_PROBES), read - set(PYTHON_PROBES)
    assert listed_under("What is read of DDP in Python") == set(PYTHON_PROBES)
