"""Opens the groups over which the ranks of hosts add up on a device what few hosts use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from .. import _extension
from ..policies import Policy
from .agreement import Distributed, propose, settle
from .control_groups import ControlGroups, timeout_of
from .groups import store_of

_C = _extension.load()


def with_hosts_on_streams(
    ddp: Distributed, function: str, name: str, groups: ControlGroups, policy: Policy
) -> ControlGroups:
    """Open groups over which ranks on a device add up in hosts and then between them, if a policy asks for it.

    Collective over the module's process group, whose device and timeout they have. Like control groups, torch does not
    know them. NCCL splits the communicator of the module's group.

    Args:
        ddp: the module.
        function: the function that every rank calls.
        name: a new name, the same on every rank.
        groups: the module's control groups.
        policy: the policy, the same on every rank.

    Returns:
        The control groups, with those of hosts unless the policy does not need them.

    Raises:
        RefusedError: on every rank, if some rank could not open them.
    """
    topology = groups.topology.under(policy)
    if groups.on_streams is not None or not (topology.is_on_streams and topology.adds_up_in_hosts):
        return groups
    here = dist.get_rank(ddp.process_group)
    number, own_host = next(each for each in enumerate(topology.hosts) if here in each[1])
    position = own_host.index(here)
    opened: dict[str, Any] = {}
    on_streams, problem = None, None
    try:
        # NCCL splits no communicator that has work under way.
        torch.get_device_module(ddp.device).synchronize(ddp.device)
        opened["within"] = _open_group(ddp, f"{name}/within", number, own_host)
        opened["between"] = _open_group(ddp, f"{name}/between", position, [host[position] for host in topology.hosts])
        on_streams = _C.HostsOnStreams(hosts=topology.hosts, **opened)
    except Exception as error:
        problem = f"could not open the groups of hosts: {error}"
    settle(function, propose(ddp, function, {}, problem))
    # Connects the ranks here, and not in the backward pass that needs it first.
    try:
        for group in opened.values():
            _connect(group, ddp.device)
    except Exception as error:
        problem = f"could not connect the groups of hosts: {error}"
    settle(function, propose(ddp, function, {}, problem))
    return replace(groups, on_streams=on_streams)


def _connect(group: Any, device: torch.device) -> None:
    """Run each kind of collective that gradients will need once, and wait for the device."""
    one, each = torch.zeros(1, device=device), torch.zeros(group.size(), device=device)
    group.allreduce([one]).wait()
    group._allgather_base(each, one).wait()
    group.alltoall_base(torch.zeros_like(each), each, [], []).wait()
    torch.get_device_module(device).synchronize(device)


def _open_group(ddp: Distributed, name: str, number: int, ranks: Sequence[int]) -> Any:
    """Open one of several groups into which the ranks of the module's group are divided."""
    parent = ddp.process_group._get_backend(ddp.device)
    store = dist.PrefixStore(f"{name}/{number}", store_of(ddp.process_group))  # type: ignore[attr-defined]
    place = store, ranks.index(dist.get_rank(ddp.process_group)), len(ranks)
    if parent.name() == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout_of(ddp)
        options.group_name = f"{name}/{number}"  # type: ignore[assignment]
        everyone = dist.get_process_group_ranks(ddp.process_group)
        options.global_ranks_in_group = [everyone[rank] for rank in ranks]
        # Not what torch wraps around it with TORCH_DISTRIBUTED_DEBUG=DETAIL.
        if isinstance(parent, dist.ProcessGroupNCCL):
            options.split_from, options.split_color = parent, number
        backend = dist.ProcessGroupNCCL(*place, options)
    else:
        backend = dist.Backend._plugins[parent.name().upper()].creator_fn(*place, timeout_of(ddp))
    group = dist.ProcessGroup(*place)
    group._register_backend(ddp.device, dist.Backend.backend_type_map[parent.name()], backend)
    return group
