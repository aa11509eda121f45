"""Moves many tensors in a few large messages, and writes to tensors only after their message has arrived whole.

A message is a run of tensors of one dtype and device, at most ``MESSAGE_BYTES`` long unless a single tensor is longer.
Messages arrive in a staging buffer, which is then copied to the tensors, so that a broken connection never leaves a
tensor half written. On a link that is slower than memory, the transfer hides the copy. Between ranks that share two
cores it does not; benchmarks/sync_cost.py measures its cost. A rank that only sends needs no copy for a tensor that
fills a message alone.

Before they build messages, all ranks must agree on the tensors' dtypes, shapes, order and devices, which determine the
messages (see serving/agreement.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from .. import _C

# Long enough to make a message's latency negligible, and short enough for two messages to stay in a shared cache. Of 4,
# 8, 12 and 16 MiB, with two to four messages in flight, none was better.
MESSAGE_BYTES = 8 * 1024 * 1024
_IN_FLIGHT = 2


class Message(Protocol):
    """One collective over a run of tensors."""

    payload_bytes: int

    def launch(self, buffers: StagingBuffers) -> None:
        """Start the collective."""

    def wait(self) -> None:
        """Wait until the collective has finished on this rank."""

    def commit(self, buffers: StagingBuffers) -> None:
        """Write the received values to the tensors."""


def split(
    tensors: Sequence[torch.Tensor], wire_dtype: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype
) -> list[list[torch.Tensor]]:
    """Group tensors of the same dtype and device into messages, without empty tensors.

    Args:
        tensors: any tensors, in an order that all ranks agree on.
        wire_dtype: returns the dtype in which tensors of a given dtype travel.

    Returns:
        The tensors of each message, in the order in which messages are sent.
    """
    messages: list[list[torch.Tensor]] = []
    # The message that is being filled, and its length, for each dtype and device.
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], int]] = {}
    for tensor in tensors:
        tensor_bytes = tensor.numel() * wire_dtype(tensor.dtype).itemsize
        if tensor_bytes == 0:
            continue
        key = (tensor.dtype, tensor.device)
        message, message_bytes = filling.get(key, ([], MESSAGE_BYTES))
        if message_bytes + tensor_bytes > MESSAGE_BYTES:
            message, message_bytes = [], 0
            messages.append(message)
        message.append(tensor)
        filling[key] = (message, message_bytes + tensor_bytes)
    return messages


def cut(staging: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Cut a flat staging buffer into contiguous views, one for each tensor, with the tensor's shape."""
    if len(tensors) == 1:
        return [staging.view(tensors[0].shape)]
    pieces = torch.split(staging, [tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


class StagingBuffers:
    """Staging buffers that are reused from message to message.

    New memory would cost as much as the transfer, because the kernel clears and maps each page on first touch.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a flat, uninitialised buffer."""
        needed_bytes = numel * dtype.itemsize
        for i, buffer in enumerate(self._free):
            if buffer.device == device and buffer.numel() >= needed_bytes:
                del self._free[i]
                break
        else:
            buffer = torch.empty(max(needed_bytes, MESSAGE_BYTES), dtype=torch.uint8, device=device)
        return buffer[:needed_bytes].view(dtype)

    def restore(self, staging: torch.Tensor) -> None:
        """Take back what :meth:`take` returned."""
        self._free.append(torch.empty(0, dtype=torch.uint8, device=staging.device).set_(staging.untyped_storage()))


class _StagedMessage:
    """The common part of broadcasts and reductions: tensors, their staging buffer and its collective."""

    def __init__(self, tensors: list[torch.Tensor], wire_dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        self.tensors = tensors
        self._wire_dtype = wire_dtype
        self._group = group
        self._numel = sum(tensor.numel() for tensor in tensors)
        self._staging: torch.Tensor | None = None
        self._work: dist.Work | None = None
        self.payload_bytes = self._numel * wire_dtype.itemsize

    def _stage(self, buffers: StagingBuffers) -> torch.Tensor:
        self._staging = buffers.take(self._numel, self._wire_dtype, self.tensors[0].device)
        return self._staging

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()

    def commit(self, buffers: StagingBuffers) -> None:
        if self._staging is not None:
            self.receive(self._staging)
            buffers.restore(self._staging)
            self._staging = None

    def receive(self, staging: torch.Tensor) -> None:
        """Copy the staging buffer to the tensors."""
        _C.scatter_tensors(staging, self.tensors)


class BroadcastMessage(_StagedMessage):
    """Sends tensors of one dtype from one rank to all others. Any dtype works, because they travel as bytes."""

    def __init__(self, tensors: list[torch.Tensor], src: int, group: dist.ProcessGroup) -> None:
        super().__init__(tensors, tensors[0].dtype, group)
        self._src = src
        self.sends = dist.get_rank(group) == src

    def launch(self, buffers: StagingBuffers) -> None:
        first = self.tensors[0]
        if not self.sends:
            wire = self._stage(buffers)
        elif len(self.tensors) == 1 and first.is_contiguous() and not first.is_conj() and not first.is_neg():
            wire = first.view(-1)
        else:
            wire = self._stage(buffers)
            _C.gather_tensors(wire, self.tensors)
        self._work = dist.broadcast(wire.view(torch.uint8), group=self._group, group_src=self._src, async_op=True)

    def receive(self, staging: torch.Tensor) -> None:
        if not self.sends:
            super().receive(staging)


class MeanMessage(_StagedMessage):
    """Averages real floating-point tensors of one dtype over the ranks of a group.

    Args:
        tensors: tensors of one dtype and device.
        wire_dtype: the dtype in which they are summed.
        factor: this rank's share of the mean; the shares of all ranks add up to one. ``None`` means equal shares: the
            sum is then divided, which rounds once less.
        group: the process group.
    """

    def __init__(
        self, tensors: list[torch.Tensor], wire_dtype: torch.dtype, factor: float | None, group: dist.ProcessGroup
    ) -> None:
        super().__init__(tensors, wire_dtype, group)
        self._factor = factor

    def launch(self, buffers: StagingBuffers) -> None:
        staging = self._stage(buffers)
        if self._factor == 0:
            # Not multiplied: a NaN on a rank with weight zero must not spoil the mean.
            staging.zero_()
        else:
            _C.gather_tensors(staging, self.tensors)
            if self._factor is not None:
                staging.mul_(self._factor)
        self._work = dist.all_reduce(staging, group=self._group, async_op=True)

    def receive(self, staging: torch.Tensor) -> None:
        divisor = dist.get_world_size(self._group) if self._factor is None else 1
        _C.scatter_tensors(staging, self.tensors, divisor)


class MaximumMessage(_StagedMessage):
    """Replaces integer or bool tensors of one dtype by their maximum over the ranks of a group."""

    def __init__(self, tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        super().__init__(tensors, torch.int64, group)

    def launch(self, buffers: StagingBuffers) -> None:
        staging = self._stage(buffers)
        _C.gather_tensors(staging, self.tensors)
        self._work = dist.all_reduce(staging, op=dist.ReduceOp.MAX, group=self._group, async_op=True)


def run(messages: Sequence[Message]) -> None:
    """Send all messages, a few at a time.

    If a collective fails on the host, the tensors of earlier messages have been written, and all others are unchanged.
    No tensor is written in part.
    """
    buffers = StagingBuffers()
    in_flight: deque[Message] = deque()

    def finish_oldest() -> None:
        message = in_flight.popleft()
        message.wait()
        message.commit(buffers)

    for message in messages:
        if len(in_flight) == _IN_FLIGHT:
            finish_oldest()
        message.launch(buffers)
        in_flight.append(message)
    while in_flight:
        finish_oldest()
