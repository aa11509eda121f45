"""Sends small messages between the ranks of a module, separately from what the module sends."""

from __future__ import annotations

import ctypes
import weakref
from contextlib import suppress

import torch
import torch.distributed as dist

from .. import _extension
from ..serving.absentees import naming_absent_ranks
from ..serving.agreement import Distributed
from ..serving.control_groups import open_small_group

_C = _extension.load()

_CLOSING_SECONDS = 0.5


class SideChannel:
    """A gloo group of a module's ranks, on the host. It outlives ``destroy_process_group()``.

    Creating one is collective over the module's process group.

    Args:
        ddp: the module, or anything else with a process group and a device.
        function: the public function that every rank has called.
        problem: why this rank cannot take part; None if it can.

    Raises:
        RuntimeError: on every rank, if some rank has a problem.
    """

    def __init__(self, ddp: Distributed, function: str, problem: str | None = None) -> None:
        group = open_small_group(ddp, function, problem)
        self._backend, self._keeper = group.backend, group.keeper
        self.hosts: tuple[tuple[int, ...], ...] = group.hosts  # the ranks of each
        self._function = function
        self._data_group = weakref.ref(ddp.process_group)
        self.rank: int = dist.get_rank(ddp.process_group)
        self.ranks: int = dist.get_world_size(ddp.process_group)

    def unite(self, flags: bytes) -> bytes:
        """Return the bitwise OR of every rank's bytes, which have the same length on each."""
        if self._backend is None:
            return flags
        mine = torch.frombuffer(bytearray(flags), dtype=torch.uint8)
        gathered = [torch.empty_like(mine) for _ in range(self.ranks)]
        self._gather(gathered, mine)
        united = gathered[0]
        for other in gathered[1:]:
            united = united | other
        return _bytes_of(united)

    def collect(self, own: bytes) -> list[bytes]:
        """Return every rank's bytes, which may differ in length, by rank."""
        if self._backend is None:
            return [own]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        self._gather(lengths, torch.tensor([len(own)], dtype=torch.int64))
        longest = max(1, *(int(length) for length in lengths))
        mine = torch.frombuffer(bytearray(own.ljust(longest, b"\0")), dtype=torch.uint8)
        gathered = [torch.empty_like(mine) for _ in range(self.ranks)]
        self._gather(gathered, mine)
        return [_bytes_of(tensor)[: int(length)] for tensor, length in zip(gathered, lengths, strict=True)]

    def _gather(self, gathered: list[torch.Tensor], own: torch.Tensor) -> None:
        group = self._data_group()
        if group is None:
            self._backend.allgather([gathered], [own]).wait()
            return
        with naming_absent_ranks(group, self._function):
            self._backend.allgather([gathered], [own]).wait()

    def close(self) -> None:
        """Release the group; may be called again."""
        if self._keeper is None:
            return
        # Not the last reference, which may only be dropped where nothing waits for it: the keeper's is.
        self._backend = None
        self._keeper = None
        with suppress(RuntimeError):
            _C.wait_until_groups_are_gone(_CLOSING_SECONDS)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    # Without NumPy, which torch does not require.
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())
