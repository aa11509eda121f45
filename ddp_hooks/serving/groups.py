"""Resolves process groups, and gathers small messages from their ranks."""

from __future__ import annotations

import os
import pickle
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..wording import short


def resolve_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the process group that an argument means; ``None`` means the default group.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        TypeError: ``process_group`` is something else.
        ValueError: this rank is not in ``process_group``, or it was destroyed.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "expected an initialized process group, found none; call torch.distributed.init_process_group first"
        )
    group: object = dist.group.WORLD if process_group is None else process_group
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("expected a process group that this rank is in; call it only on members of the group")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"expected process_group to be a process group or None, received {short(group)}; for ranks, pass "
            "torch.distributed.new_group(ranks); for a DeviceMesh, pass its .get_group()"
        )
    try:
        rank = dist.get_rank(group)
    except ValueError as error:
        raise ValueError(
            "expected a process group that is in use, received one that was destroyed; make a new one, or pass None "
            "for the default group"
        ) from error
    if rank < 0:
        raise ValueError("expected a process group that this rank is in; call it only on members of the group")
    return group


def launched_rank() -> int:
    """Return the rank that a launcher gave this process; 0 if it gave none, or no number."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def is_in_use(group: dist.ProcessGroup) -> bool:
    """Say whether the group has not been destroyed."""
    try:
        dist.get_rank(group)
    except ValueError:
        return False
    return True


def check_in_use(group: dist.ProcessGroup) -> None:
    """Raise a ValueError if the group was destroyed."""
    if not is_in_use(group):
        raise ValueError(
            "expected a process group that is in use, received one that was destroyed; make a new one, and wrap the "
            "module again over it"
        )


def store_of(group: dist.ProcessGroup) -> Any:
    """Return the store of a process group, or the default group's store if it has none."""
    try:
        store = group.get_group_store()
    except RuntimeError:
        store = None
    # A group that is written in Python may have no store.
    return distributed_c10d._get_default_store() if store is None else store


# Beside groups of devices only, over which small messages would hold up the host: a group of the same ranks on it, if
# they have opened one (control_groups.py). It lasts as long as the other, so that all ranks agree on which to use.
host_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()


def control_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device for small messages: the CPU if the group supports it, otherwise the current accelerator.

    As for torch's object collectives, the current device must be a different one on each rank, unless
    ``init_process_group`` was given a ``device_id``.

    Raises:
        ValueError: the group was destroyed.
    """
    check_in_use(group)
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    if group.bound_device_id is not None:
        return group.bound_device_id
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def gather_tensor(group: dist.ProcessGroup, own: torch.Tensor) -> torch.Tensor:
    """Gather a small host tensor of the same dtype and shape from every rank.

    Args:
        group: the process group.
        own: this rank's tensor on the host, of any dtype that the backend supports.

    Returns:
        A host tensor whose first dimension is the rank.
    """
    on_host = host_groups.get(group)
    device = torch.device("cpu") if on_host else control_device(group)
    flat = own.contiguous().reshape(-1).to(device)
    gathered = torch.empty(dist.get_world_size(group), flat.numel(), dtype=flat.dtype, device=device)
    if on_host:
        on_host.backend.allgather([list(gathered)], [flat]).wait()
    else:
        dist.all_gather(list(gathered), flat, group=group)
    return gathered.cpu().view(-1, *own.shape)


def gather_objects(group: dist.ProcessGroup, own: object) -> list[object]:
    """Gather a picklable object from every rank, like torch's function, but without numpy."""
    data = pickle.dumps(own)
    sizes = [int(size) for size in gather_tensor(group, torch.tensor([len(data)], device="cpu"))]
    padded = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
    gathered = gather_tensor(group, padded)
    return [pickle.loads(bytes(row[:size].tolist())) for row, size in zip(gathered, sizes, strict=True)]
