"""What a module and its ranks have to fulfil before a hook may be registered, and the groups that serve it then."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from . import _extension, agreement
from ._version import __version__
from .policies import Policy
from .wording import short

_C = _extension.load()

# A gather's hops come one after the other, and each axis takes a group of its own. With axes of 4 an exchange that
# nothing hides took about 0.8 of one gather's time on 8 ranks and 0.6 on 16; axes of 2 took a tenth less for twice the
# groups (benchmarks/results/micro_exchange_many.json).
LARGEST_AXIS = 4


def why_unsupported(ddp: DistributedDataParallel) -> str | None:
    """Say what about the module cannot be supported, and the way out; None if all is well."""
    if getattr(ddp, "_delay_all_reduce_all_params", False):
        return "delay_all_reduce_named_params delays every parameter, which leaves nothing for a hook; do not set it"
    if getattr(ddp, "_use_python_reducer", False):
        return (
            "DDP's Python reducer (compiled autograd) has no buckets for a hook; set "
            "torch._dynamo.config.optimize_ddp = True before wrapping the module"
        )
    if ddp.mixed_precision is not None:
        return "DDP(mixed_precision=...) registers a hook of its own; use torch.autocast instead"
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.module.parameters()):
        return (
            "an optimizer applied in backward makes DDP register a hook of its own; step the optimizer after backward"
        )
    if _C.reducer_has_hook(ddp.reducer):
        registered = ddp._get_ddp_logging_data().get("comm_hook")  # type: ignore[no-untyped-call]
        return f"a communication hook is registered already ({registered}), and DDP takes one"
    if ddp.device_type not in ("cpu", "cuda"):
        return f"expected parameters on the CPU or on CUDA, received some on {ddp.device_type}, without kernels for it"
    if ddp.device_type == "cuda" and not _C.has_cuda():
        return (
            "expected a build with CUDA kernels for parameters on CUDA, received one without; build ddp_hooks again "
            "with DDP_HOOKS_CUDA=1 where torch has CUDA, which says what is missing"
        )
    if _C.reducer_skips_unused_by_local_list(ddp.reducer):
        return (
            "DDP(skip_all_reduce_unused_params=True) decides from each rank's own list, keeps buckets from the hook "
            "and hangs when ranks differ; remove it, this hook does it by agreement"
        )
    if _C.reducer_is_in_backward(ddp.reducer):
        return "a backward pass is under way; make the state before backward() begins"
    return None


def find_ddp(module: nn.Module, function: str) -> DistributedDataParallel:
    """Return the DDP module, also out of the wrapper that ``torch.compile(ddp)`` returns.

    Raises:
        TypeError: there is none; says what ``function`` received.
    """
    inner = getattr(module, "_orig_mod", module) if isinstance(module, nn.Module) else module
    if isinstance(inner, DistributedDataParallel):
        return inner
    raise TypeError(
        f"{function}: expected a DistributedDataParallel module, received {type(module).__name__}; wrap the model first"
    )


def gather(ddp: DistributedDataParallel, function: str, mine: Any) -> list[Any]:
    """Gather a picklable object from every rank of the module, by rank; every rank calls ``function``.

    Raises:
        RanksDisagreeError: another rank calls another function of this package.
        RanksAbsentError: another rank calls none.
    """
    # Objects travel through the current device, which need not be the module's; two ranks may share it.
    with torch.cuda.device(ddp.device) if ddp.device_type == "cuda" else nullcontext():
        agreement.agree(ddp.process_group, function, {}, {})
        return agreement.gather_objects(ddp.process_group, mine)


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The small gloo groups that masks are exchanged over, beside whatever group gradients travel on.

    They are nobody else's: torch.distributed does not list them, so the names of other groups do not depend on them,
    nor theirs on how many groups a rank is in. They close when the last state that serves a module over them lets go.
    """

    name: str
    """The same on every rank of the module, and given only once."""
    groups: Any
    """A ``_C.ControlGroups``, which closes them."""


def new_name() -> str:
    """Make a name for control groups; the ranks use rank 0's."""
    return f"ddp_hooks/{uuid.uuid4().hex}"


def open_control_groups(ddp: DistributedDataParallel, function: str, name: str) -> ControlGroups:
    """Open the groups for the mask exchange; collective over the module's process group.

    Args:
        ddp: the module.
        function: what every rank calls.
        name: the same on every rank, and new. The ranks find each other under it, in the store of the module's group.

    Raises:
        RuntimeError: some rank could not open them; the same on every rank.
    """
    try:
        groups, error = _open_groups(ddp, name), None
    except RuntimeError as caught:
        groups, error = None, caught
    # Also so that nobody leaves, or closes them, before the last rank has connected.
    problem = None if error is None else f"could not open the groups for the mask exchange: {error}"
    agree(ddp, function, Proposal({}, problem), error)
    assert groups is not None  # a rank with an error has raised it
    return groups


def _open_groups(ddp: DistributedDataParallel, name: str) -> ControlGroups:
    group = ddp.process_group
    ranks, here = dist.get_world_size(group), dist.get_rank(group)
    if ranks == 1:
        return ControlGroups(name, _C.ControlGroups(world_size=1, all=None, axes=[]))
    everyone = _open_group(ddp, f"{name}/all", here, ranks)
    axes = []
    lengths = grid(ranks, LARGEST_AXIS)
    stride = 1
    for number, length in enumerate(lengths if len(lengths) > 1 else []):
        position = here // stride % length
        # Those that differ from this rank along the axis only; the first of them names their group.
        first = here - position * stride
        axes.append(_open_group(ddp, f"{name}/axis{number}/{first}", position, length))
        stride *= length
    return ControlGroups(name, _C.ControlGroups(world_size=ranks, all=everyone, axes=axes))


def grid(ranks: int, largest_axis: int) -> list[int]:
    """Arrange ranks in a grid, for gathers along its axes in place of one over all ranks.

    Args:
        ranks: how many, at least 1.
        largest_axis: how long an axis may be, where the number of ranks has a divisor that allows it. Otherwise an axis
            is as long as the smallest divisor.

    Returns:
        The lengths of the axes; their product is the number of ranks.
    """
    if ranks <= largest_axis:
        return [ranks]
    divisors = [*range(largest_axis, 1, -1), *range(largest_axis + 1, ranks + 1)]
    divisor = next(length for length in divisors if ranks % length == 0)
    return [divisor] if divisor == ranks else [divisor, *grid(ranks // divisor, largest_axis)]


def _open_group(ddp: DistributedDataParallel, name: str, rank: int, ranks: int) -> Any:
    store = dist.PrefixStore(name, _store_of(ddp.process_group))  # type: ignore[attr-defined]
    group = dist.ProcessGroupGloo(store, rank, ranks, timeout=_timeout_of(ddp))
    # What torch's own groups are told, for its flight recorder.
    group.options.group_name = name  # type: ignore[assignment]
    return group


def _store_of(group: Any) -> Any:
    try:
        store = group.get_group_store()
    except RuntimeError:
        store = None
    # A group that was written in Python may have no store of its own.
    return distributed_c10d._get_default_store() if store is None else store


def _timeout_of(ddp: DistributedDataParallel) -> timedelta:
    """Return the data group's timeout, so that a lost rank is noticed as soon here as there."""
    try:
        options = getattr(ddp.process_group._get_backend(ddp.device), "options", None)
    except RuntimeError:
        options = None
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else dist.constants.default_pg_timeout


def describe(
    policy: Policy, ddp: DistributedDataParallel, reduced: list[torch.Tensor], late: list[torch.Tensor]
) -> dict[str, str]:
    """Describe what every rank has to have in common: `reduced` are the Reducer's parameters, `late` the others."""
    return {
        "ddp_hooks": __version__,
        "torch": torch.__version__,
        "policy": repr(policy),
        "world size": str(dist.get_world_size(ddp.process_group)),
        "parameters": f"{len(reduced)} of {sum(parameter.numel() for parameter in reduced)} elements",
        "parameters frozen when wrapped": f"{len(late)} of {sum(parameter.numel() for parameter in late)} elements",
        "find_unused_parameters": str(ddp.find_unused_parameters),
        "static_graph": str(ddp.static_graph),
        "device": ddp.device_type,
    }


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one rank brings to a function that every rank calls.

    Attributes:
        description: what every rank has to have in common, by a name for it.
        problem: why this rank cannot take part, or None.
        own: what else the others need to know, of the function's own.
    """

    description: Mapping[str, str]
    problem: str | None
    own: Any = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, which other versions of this package can read, too."""
        return {"description": dict(self.description), "problem": self.problem, "own": self.own}

    @classmethod
    def read(cls, function: str, rank: int, received: Any) -> Proposal:
        """Read what a rank sent.

        Raises:
            RuntimeError: it is something else.
        """
        if isinstance(received, dict) and set(received) == {"description", "problem", "own"}:
            described, problem = received["description"], received["problem"]
            texts = isinstance(described, dict) and all(isinstance(t, str) for item in described.items() for t in item)
            if texts and (problem is None or isinstance(problem, str)):
                return cls(**received)
        raise RuntimeError(
            f"{function}: expected a description of the module from every rank, received {short(received)} from rank "
            f"{rank}, which may run another version of ddp_hooks. Install the same one on every rank"
        )


def agree(ddp: DistributedDataParallel, function: str, proposal: Proposal, error: Exception | None = None) -> list[Any]:
    """Exchange proposals; raise on every rank if any rank has a problem or describes itself differently.

    Args:
        ddp: the module whose ranks take part.
        function: what every rank calls.
        proposal: this rank's.
        error: what to raise here if the problem is this rank's own.

    Returns:
        What each rank brought of its own, by rank.
    """
    return check(function, gather(ddp, function, proposal.to_dict()), error)


def check(function: str, received: Sequence[Any], error: Exception | None = None) -> list[Any]:
    """Raise if any rank's proposal has a problem or describes itself differently; the same on every rank.

    Args:
        function: what every rank calls.
        received: each rank's :meth:`Proposal.to_dict`.
        error: as for :func:`agree`.

    Returns:
        What each rank brought of its own, by rank.
    """
    proposals = [Proposal.read(function, rank, each) for rank, each in enumerate(received)]
    ranks_by_problem: dict[str, list[int]] = {}
    for rank, each in enumerate(proposals):
        if each.problem is not None:
            ranks_by_problem.setdefault(each.problem, []).append(rank)
    if ranks_by_problem and error is not None:
        raise error
    if ranks_by_problem:
        problems = [
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {problem}"
            for problem, ranks in ranks_by_problem.items()
        ]
        raise RuntimeError(f"{function}: refused on every rank. {'; '.join(problems)}")
    differences = []
    for key in dict.fromkeys(key for each in proposals for key in each.description):
        expected = proposals[0].description.get(key, "nothing")
        for rank, each in enumerate(proposals):
            received_there = each.description.get(key, "nothing")
            if received_there != expected:
                differences.append(f"{key}: expected {expected} as on rank 0, received {received_there} on rank {rank}")
    if differences:
        raise RuntimeError(
            f"{function}: the ranks disagree: {'; '.join(differences)}. Pass the same module and policy on every rank"
        )
    return [each.own for each in proposals]
