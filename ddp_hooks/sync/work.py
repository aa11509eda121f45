"""Carries out a synchronisation on this rank, at once or asynchronously, and reports on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .messages import Message, StagingBuffers, run
from .tensors import NamedTensor


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The result of a synchronisation on this rank.

    Attributes:
        tensors: the number of synchronised tensors.
        tensor_bytes: their size.
        messages: the number of data collectives that this rank took part in.
        payload_bytes: bytes that this rank gave to them. Less than ``tensor_bytes`` if memory is shared, and more if
            half precision is averaged in float32.
    """

    tensors: int
    tensor_bytes: int
    messages: int
    payload_bytes: int


class SyncWork:
    """A synchronisation under way, which functions return with ``async_op=True``.

    Do not read or write the tensors before :meth:`wait` has returned. It writes all of them after the last message has
    arrived; if it fails, none has changed. With a process group that puts collectives on a device's stream, as NCCL
    does, :meth:`wait` returns before the messages have arrived, and cannot fail with them: if one fails, the tensors
    hold anything, and NCCL ends the process.
    """

    def __init__(
        self, messages: Sequence[Message], report: SyncReport, barrier_group: dist.ProcessGroup | None
    ) -> None:
        self._messages = list(messages)
        self._report = report
        self._barrier_group = barrier_group
        self._buffers = StagingBuffers()
        for message in self._messages:
            message.launch(self._buffers)

    @torch.no_grad()
    def wait(self) -> SyncReport:
        """Wait for the messages, write the tensors, and return a report."""
        for message in self._messages:
            message.wait()
        for message in self._messages:
            message.commit(self._buffers)
        self._messages.clear()
        if self._barrier_group is not None:
            dist.barrier(self._barrier_group)
            self._barrier_group = None
        return self._report


def report_on(tensors: Sequence[NamedTensor], messages: Sequence[Message]) -> SyncReport:
    """Return a report on some messages."""
    return SyncReport(
        tensors=len(tensors),
        tensor_bytes=sum(named.tensor.nbytes for named in tensors),
        messages=len(messages),
        payload_bytes=sum(message.payload_bytes for message in messages),
    )


def carry_out(
    tensors: Sequence[NamedTensor],
    messages: Sequence[Message],
    barrier_group: dist.ProcessGroup | None,
    async_op: bool,
) -> SyncReport | SyncWork:
    """Send the messages, and wait for them unless ``async_op`` is set.

    Args:
        tensors: the tensors that will be synchronised.
        messages: the messages that synchronise them.
        barrier_group: the ranks that wait for each other at the end, or None.
        async_op: return work to wait for.
    """
    report = report_on(tensors, messages)
    if async_op:
        return SyncWork(messages, report, barrier_group)
    run(messages)
    if barrier_group is not None:
        # Other ranks of the host share the memory of its first rank, and must not read it before that rank is done.
        dist.barrier(barrier_group)
    return report
