"""What a module and its ranks have to fulfil before a hook may be registered."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import _extension
from ._version import __version__
from .policies import Policy

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
    registered = ddp._get_ddp_logging_data().get("comm_hook")  # type: ignore[no-untyped-call]
    if registered:
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


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The small gloo groups that masks are exchanged over, beside whatever group gradients travel on."""

    all: Any
    """Every rank of the module's process group."""
    axes: tuple[Any, ...]
    """For each axis of the grid of ranks, those that differ from this one along it only; or just ``all``."""


def make_control_groups(ddp: DistributedDataParallel) -> ControlGroups:
    """Open the groups for the mask exchange; collective over the module's process group."""
    ranks = dist.get_process_group_ranks(ddp.process_group)
    everyone = _open_group(ddp, ranks, "ddp_hooks_control")
    axes = grid(len(ranks), LARGEST_AXIS)
    if len(axes) == 1:
        return ControlGroups(everyone, (everyone,))
    here = ranks.index(dist.get_rank())
    groups = []
    stride = 1
    for number, length in enumerate(axes):
        first = here - here // stride % length * stride
        members = [ranks[first + i * stride] for i in range(length)]
        groups.append(_open_group(ddp, members, f"ddp_hooks_control_axis_{number}"))
        stride *= length
    return ControlGroups(everyone, tuple(groups))


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


def _open_group(ddp: DistributedDataParallel, ranks: list[int], description: str) -> Any:
    # Only the members call it, so that modules on different subgroups of the world do not wait for each other.
    return dist.new_group(
        ranks=ranks,
        backend="gloo",
        timeout=_timeout_of(ddp),
        use_local_synchronization=True,
        group_desc=description,
    )


def _timeout_of(ddp: DistributedDataParallel) -> timedelta | None:
    """Return the data group's timeout, so that a lost rank is noticed as soon here as there."""
    options = getattr(ddp.process_group._get_backend(ddp.device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


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


def agree(group: Any, description: dict[str, str], problem: str | None) -> None:
    """Raise on every rank if any rank has a problem or describes itself differently."""
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (description, problem), group=group)
    problems = [f"rank {rank}: {answer[1]}" for rank, answer in enumerate(answers) if answer[1] is not None]
    if problems:
        raise RuntimeError(f"ddp_hooks: this DistributedDataParallel module cannot be served: {'; '.join(problems)}")
    differences = []
    for key, expected in answers[0][0].items():
        for rank, (received, _) in enumerate(answers):
            if received[key] != expected:
                differences.append(f"{key}: expected {expected} as on rank 0, received {received[key]} on rank {rank}")
    if differences:
        raise RuntimeError(
            f"ddp_hooks: the ranks disagree: {'; '.join(differences)}. Pass the same module and policy on every rank"
        )
