"""Keeps the CPU parameters of all ranks of a host in one block of shared memory."""

from __future__ import annotations

import os
import pickle
import socket
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.multiprocessing.reductions import StorageWeakRef

from ..serving.absentees import naming_absent_ranks
from ..serving.agreement import agree, refuse
from ..serving.endpoints import Endpoint, find_endpoint, group_by_host, torch_listens_for
from ..serving.groups import gather_objects, resolve_group
from ..wording import short
from .messages import MESSAGE_BYTES, BroadcastMessage, run, split
from .tensors import NamedTensor, check_writable, describe_layout, named_buffers, named_parameters, unwrap

# The alignment of storages in the shared block: a cache line, which is enough for any dtype.
_ALIGNMENT_BYTES = 64


def shared_memory_identity() -> str:
    """Return a string that is equal in processes that see the same shared memory."""
    try:
        # Containers on one machine share the kernel, but usually not the mount of shared memory.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/dev/shm').st_dev}"
    except OSError:
        return socket.gethostname()


class SharedParameters:
    """The parameters of a module in shared memory, as :func:`share_parameters` returns them.

    It is also a context manager, which releases them at the end of its block.

    Attributes:
        process_group: the ranks that take part.
        hosts: the ranks (in the group) on each host. Only the first rank of each host takes part in collectives.
        writer: whether this rank is the first of its host, whose optimizer should step.
        shared_bytes: the size of the host's shared block.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        hosts: tuple[tuple[int, ...], ...],
        block: torch.Tensor,
        parameters: Sequence[torch.nn.Parameter],
        leader_group: dist.ProcessGroup | None,
    ) -> None:
        self.process_group = process_group
        self.hosts = hosts
        self.writer = dist.get_rank(process_group) in _first_ranks(hosts)
        self.shared_bytes = block.numel()
        # A group of the first ranks of all hosts; None on other ranks, and if there is only one host.
        self.leader_group = leader_group
        # Weak, so that the memory is freed with the module.
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._block = StorageWeakRef(block.untyped_storage())  # type: ignore[no-untyped-call]
        self._address = block.data_ptr()
        self._was_released = False
        _registry[self._address] = self

    @property
    def active(self) -> bool:
        """Whether the shared block is still in use."""
        return _registry.get(self._address) is self and not self._block.expired()  # type: ignore[no-untyped-call]

    def host_of(self, rank: int) -> int:
        """Return the position in ``hosts`` of a rank of the group."""
        return next(host for host, ranks in enumerate(self.hosts) if rank in ranks)

    def barrier(self) -> None:
        """Wait for all ranks. Afterwards, every rank of a host sees everything that its ranks wrote before."""
        self._barrier("SharedParameters.barrier")

    def _barrier(self, function: str) -> None:
        with naming_absent_ranks(self.process_group, function):
            dist.barrier(self.process_group)

    @torch.no_grad()
    def release(self) -> None:
        """Give every rank private copies of its parameters. Collective; call it before the group is destroyed."""
        # Skipped if the memory is gone; on another rank, an optimizer, for example, may still hold it.
        if self._was_released:
            return
        self._was_released = True
        self._barrier("SharedParameters.release")
        private: torch.Tensor | None = None
        for reference in self._parameters:
            parameter = reference()
            # The module may be gone, or its parameters may have moved.
            if parameter is None or parameter.untyped_storage().data_ptr() != self._address:
                continue
            if private is None:
                private = _bytes_of(parameter.untyped_storage()).clone()
            _point_to(parameter, private.untyped_storage(), parameter.storage_offset())
        if _registry.get(self._address) is self:
            del _registry[self._address]
        # No rank may go on, and perhaps write, while another rank is still copying.
        self._barrier("SharedParameters.release")
        if self.leader_group is not None:
            dist.destroy_process_group(self.leader_group)

    def __enter__(self) -> SharedParameters:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error on this rank, other ranks may never reach the barrier.
        if kind is None:
            self.release()


# By the address of the shared block.
_registry: dict[int, SharedParameters] = {}


def share_parameters(module: torch.nn.Module, *, process_group: dist.ProcessGroup | None = None) -> SharedParameters:
    """Move the parameters of ``module`` into one block of shared memory on each host. Collective.

    All ranks of a host then use the same memory. The parameters take the values of rank 0. Buffers and gradients stay
    private to each rank. Broadcasting or averaging these parameters becomes a barrier within a host, and only the first
    rank of each host takes part in collectives across hosts.

    *Optimizers*: all ranks of a host would update the same memory, so only one of them may step::

        loss.backward()                # DDP gives every rank the same gradients
        if shared.writer:
            optimizer.step()
        shared.barrier()               # before anybody reads the new parameters

    If all ranks step, each applies the update, at the same time, with unpredictable results. Only the writer needs
    momentum and other optimizer state.

    The block is a named shared storage of torch. ``torch_shm_manager`` removes it when the last rank of the host is
    gone, however it ended.

    Args:
        module: a module or a DDP module whose parameters are on the CPU.
        process_group: the ranks that take part; the default group if ``None``.

    Returns:
        A handle, which is the same on all ranks except for ``writer``.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: parameters are not on the CPU, are already shared, or cannot be written; or a buffer is a view of a
            parameter.
        RanksDisagreeError: parameters or their memory layouts differ between ranks, or another rank raised one of the
            errors above.
        RanksAbsentError: some rank did not call it within the group's timeout.
        RuntimeError: shared memory was unavailable on some rank. Nothing has changed on any rank.
    """
    group = resolve_group(process_group)
    try:
        parameters, placement = _place(module)
    except Exception as error:  # any error must reach the other ranks, which wait
        refuse(group, "share_parameters", error)
    agree(group, "share_parameters", {}, placement.layout)

    rank = dist.get_rank(group)
    hosts = group_by_host(gather_objects(group, shared_memory_identity()))
    ranks_here = next(ranks for ranks in hosts if rank in ranks)
    block: torch.Tensor | None = None
    handles: dict[int, bytes] = {}
    problem: str | None = None
    if rank == ranks_here[0]:
        try:
            block, handles = _create_block(placement.block_bytes, ranks_here[1:])
        except (OSError, RuntimeError) as error:
            problem = f"could not create {placement.block_bytes} bytes of shared memory: {error}"
    handle = gather_objects(group, handles)[ranks_here[0]].get(rank)  # type: ignore[attr-defined]
    if handle is not None:
        try:
            block = pickle.loads(handle)
        except (OSError, RuntimeError) as error:
            problem = f"could not open the shared memory of rank {ranks_here[0]}: {error}"
    problems = gather_objects(group, problem)
    if any(problems) or block is None:
        lines = [f"rank {other} {text}" for other, text in enumerate(problems) if text is not None]
        raise RuntimeError(
            "share_parameters: " + "; ".join(lines) + ". No parameter changed. Is there enough room in /dev/shm?"
        )

    is_leader = rank == ranks_here[0]
    leader_group = None
    if len(hosts) > 1:
        endpoints = [Endpoint(*each) for each in gather_objects(group, tuple(find_endpoint(group)))]  # type: ignore[misc]
        with torch_listens_for(group, endpoints):
            leader_group = _group_of_leaders(group, hosts, is_leader)
    if is_leader:
        placement.fill(block)
        if leader_group is not None:
            run([BroadcastMessage(part, 0, leader_group) for part in split(torch.split(block, MESSAGE_BYTES))])
    dist.barrier(group)
    with torch.no_grad():
        for parameter, start in zip(parameters, placement.starts, strict=True):
            offset = start // parameter.element_size() + parameter.storage_offset()
            _point_to(parameter, block.untyped_storage(), offset)
    return SharedParameters(group, hosts, block, parameters, leader_group)


def _group_of_leaders(
    group: dist.ProcessGroup, hosts: tuple[tuple[int, ...], ...], is_leader: bool
) -> dist.ProcessGroup | None:
    leaders = [dist.get_global_rank(group, first) for first in _first_ranks(hosts)]
    # The name of a group that only its ranks make depends on how many groups they are in, which may differ.
    everyone_is_here = dist.get_world_size(group) == dist.get_world_size()
    if not (everyone_is_here or is_leader):
        return None
    made = dist.new_group(leaders, backend="gloo", use_local_synchronization=not everyone_is_here)
    return made if is_leader else None


def partition(
    tensors: Sequence[NamedTensor], group: dist.ProcessGroup
) -> tuple[list[NamedTensor], dict[SharedParameters, list[NamedTensor]]]:
    """Separate tensors in shared memory from other tensors.

    Raises:
        ValueError: a tensor is shared among the ranks of another group.
    """
    private: list[NamedTensor] = []
    shared: dict[SharedParameters, list[NamedTensor]] = {}
    for named in tensors:
        handle = _find(named.tensor) if _registry else None
        if handle is None:
            private.append(named)
            continue
        if dist.get_process_group_ranks(handle.process_group) != dist.get_process_group_ranks(group):
            raise ValueError(
                f"expected the process group over which {named.label} is shared, with ranks "
                f"{dist.get_process_group_ranks(handle.process_group)}, received one with ranks "
                f"{dist.get_process_group_ranks(group)}; pass process_group=shared.process_group, or release() first"
            )
        shared.setdefault(handle, []).append(named)
    return private, shared


def _find(tensor: torch.Tensor) -> SharedParameters | None:
    if tensor.device.type != "cpu":
        return None
    address = tensor.untyped_storage().data_ptr()
    handle = _registry.get(address)
    if handle is not None and not handle.active:
        # The module is gone, and another tensor has its address.
        del _registry[address]
        return None
    return handle


@dataclass(frozen=True, slots=True)
class _Placement:
    """The places of the parameters' storages in the shared block.

    Whole storages move, so that strides, views of each other and ties are kept.
    """

    storages: tuple[torch.UntypedStorage, ...]
    storage_starts: tuple[int, ...]
    starts: tuple[int, ...]  # for each parameter, the offset of its storage
    block_bytes: int
    layout: dict[str, str]

    def fill(self, block: torch.Tensor) -> None:
        for storage, start in zip(self.storages, self.storage_starts, strict=True):
            block[start : start + storage.nbytes()].copy_(_bytes_of(storage))


def _place(module: torch.nn.Module) -> tuple[list[torch.nn.Parameter], _Placement]:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"expected a module or a DDP module, received {type(module).__name__} ({short(module)}); "
            "pass the model itself"
        )
    named = named_parameters(module)
    check_writable(named)
    by_name = dict(unwrap(module).named_parameters())
    layout = describe_layout(named)
    starts: list[int] = []
    # By address; an empty storage has no address, and needs no space.
    placed: dict[int, tuple[torch.UntypedStorage, int]] = {}
    block_bytes = 0
    for parameter in named:
        if parameter.tensor.device.type != "cpu":
            raise ValueError(
                f"expected parameters on the CPU, but {parameter.label} is on {parameter.tensor.device}: "
                "ranks can share only the memory of their host"
            )
        if _find(parameter.tensor) is not None:
            raise ValueError(f"expected parameters that are not shared yet, but {parameter.label} is; release() first")
        storage = parameter.tensor.untyped_storage()
        if storage.data_ptr() not in placed:
            placed[storage.data_ptr()] = (storage, block_bytes)
            block_bytes += -(-storage.nbytes() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        start = placed[storage.data_ptr()][1]
        starts.append(start)
        layout[parameter.label] += (
            f", strides {list(parameter.tensor.stride())}, element {parameter.tensor.storage_offset()} "
            f"of the {storage.nbytes()} bytes at {start}"
        )
    for buffer in named_buffers(module):
        storage = buffer.tensor.untyped_storage()
        if buffer.tensor.device.type == "cpu" and storage.nbytes() > 0 and storage.data_ptr() in placed:
            raise ValueError(
                f"expected buffers with memory of their own, but {buffer.label} is a view of a parameter: "
                "replace it with a .clone()"
            )
    placement = _Placement(
        storages=tuple(storage for storage, _ in placed.values()),
        storage_starts=tuple(start for _, start in placed.values()),
        starts=tuple(starts),
        block_bytes=block_bytes,
        layout=layout,
    )
    return [by_name[parameter.name] for parameter in named], placement


def _first_ranks(hosts: Sequence[Sequence[int]]) -> list[int]:
    return [ranks[0] for ranks in hosts]


def _create_block(block_bytes: int, peers: Sequence[int]) -> tuple[torch.Tensor, dict[int, bytes]]:
    """Allocate shared memory, and pickle a tensor for each peer that opens it; each may be unpickled once."""
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    # By name rather than by file descriptor, which would need a socket of its own.
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        block = torch.empty(max(block_bytes, 1), dtype=torch.uint8, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
        return block, {peer: bytes(ForkingPickler.dumps(block)) for peer in peers}
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _point_to(parameter: torch.nn.Parameter, storage: torch.UntypedStorage, offset: int | torch.SymInt) -> None:
    moved = torch.empty(0, dtype=parameter.dtype, device="cpu")
    parameter.data = moved.set_(storage, offset, parameter.shape, parameter.stride())
