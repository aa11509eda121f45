"""What a synchronisation does on this rank: its messages, now or under way, and what it reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .messages import Message, StagingBuffers, run
from .tensors import NamedTensor


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one synchronisation did on this rank.

    Attributes:
        tensors: how many tensors are in step now.
        tensor_bytes: how many bytes they hold.
        messages: how many data collectives this rank took part in.
        payload_bytes: what this rank handed to them. Less than ``tensor_bytes`` if memory is shared, more if half
            precision is averaged in float32.
    """

    tensors: int
    tensor_bytes: int
    messages: int
    payload_bytes: int


class SyncWork:
    """A synchronisation under way; what the functions return with ``async_op=True``.

    The tensors must be neither read nor written before :meth:`wait` has returned. They are written there, all of them
    after the last message has arrived: if waiting fails, none has changed.
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
        """Wait for the messages, write the tensors, and return what was sent."""
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
    """Say what these messages bring in step."""
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
    """Send the messages, now or with ``async_op`` under way.

    Args:
        tensors: what is in step afterwards.
        messages: what brings it there.
        barrier_group: the ranks that wait for each other at the end; None if nobody has to.
        async_op: return work to wait for.
    """
    report = report_on(tensors, messages)
    if async_op:
        return SyncWork(messages, report, barrier_group)
    run(messages)
    if barrier_group is not None:
        # The other ranks of the host have the new values as soon as its first rank has, and must not read before.
        dist.barrier(barrier_group)
    return report
