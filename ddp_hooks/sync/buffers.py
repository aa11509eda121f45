"""Synchronises the buffers of a DDP module, such as BatchNorm's statistics, in several ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from .. import _C
from ..serving.agreement import RECORD_BYTES, agree, refuse
from ..serving.control_groups import open_host_group
from ..serving.groups import gather_tensor, resolve_group
from ..serving.modules import uncompiled
from ..wording import did_you_mean, short
from .parameters import average_named, broadcast_named, broadcast_tensors
from .tensors import NamedTensor, check_writable, describe_layout, named_buffers, on_their_device
from .work import SyncReport

BufferMode = Literal["broadcast", "average", "changed", "before_eval", "never"]
_IN_FORWARD = ("broadcast", "average", "changed")
_MODES = (*_IN_FORWARD, "before_eval", "never")
# The function that errors name when buffers are exchanged.
_FORWARD = "a forward with a BufferSync"


@dataclass(frozen=True, slots=True)
class BufferStatistics:
    """Counters of a :class:`BufferSync` since it was made.

    Attributes:
        forwards: forward passes in which DDP would have broadcast all buffers.
        syncs: the number of times buffers were sent.
        dense_bytes: bytes that DDP would have broadcast.
        payload_bytes: bytes that collectives were given instead.
    """

    forwards: int = 0
    syncs: int = 0
    dense_bytes: int = 0
    payload_bytes: int = 0

    @property
    def saved_bytes(self) -> int:
        """Bytes saved compared with DDP; negative if more was sent."""
        return self.dense_bytes - self.payload_bytes


class BufferSync:
    """Replaces DDP's broadcast of all buffers in every forward pass. Collective: every rank makes one.

    Modes:
        - ``"broadcast"``: broadcasts all buffers from rank 0 in every forward pass, as DDP does, but in a few messages.
        - ``"average"``: averages buffers over ranks in every forward pass, so that every rank's statistics count.
          Integers take the maximum.
        - ``"changed"``: like ``"broadcast"``, but sends only buffers that have changed on some rank since the last
          time. On a device, the host waits for the buffers to look at them, in every forward pass.
        - ``"before_eval"``: sends nothing in forward passes, and averages once when ``ddp.eval()`` is called after
          training, or ``.eval()`` of ``torch.compile(ddp)``. That call is then collective: every rank must make it, and
          must have called ``.train()`` before if any rank has.
        - ``"never"``: every rank keeps its own buffers.

    It uses DDP's buffer hook, so buffers are exchanged when DDP would have exchanged them: before forward passes, but
    not inside ``no_sync``, and not after a forward pass without a backward pass. ``"before_eval"`` also wraps
    ``ddp.train`` on this object. :meth:`remove` undoes both. A copied or pickled DDP module keeps its own copy.

    If the module's process group serves only devices, as with NCCL, the modes of forward passes open a small gloo group
    beside it, so that the host does not wait for the device.

    Args:
        ddp: a DDP module, or the result of ``torch.compile`` for one; the same on all ranks.
        mode: one of the modes above.

    Raises:
        TypeError: ``ddp`` is not a DDP module.
        ValueError: ``mode`` is unknown, or works in forward passes but DDP does not synchronise buffers there; or
            ``ddp`` already has a buffer hook. Forward passes and ``ddp.eval()`` also raise it if the module's process
            group was destroyed; call :meth:`remove` first to go on without it.
        RuntimeError: the ranks could not open the gloo group.
        RanksDisagreeError: mode or buffers differ between ranks, or another rank raised a ValueError.
        RanksAbsentError: some rank did not make one within the group's timeout. Forward passes and ``ddp.eval()`` also
            raise it if other ranks do not call them.
    """

    def __init__(self, ddp: torch.nn.Module, mode: BufferMode = "broadcast") -> None:
        ddp = uncompiled(ddp)
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(
                f"BufferSync: expected a DistributedDataParallel module, received {short(ddp)}; wrap the model first, "
                "on every rank"
            )
        group = resolve_group(ddp.process_group)
        try:
            buffers = named_buffers(ddp)
            if not isinstance(mode, str) or mode not in _MODES:
                raise ValueError(
                    f"expected mode to be one of {', '.join(_MODES)}, received {short(mode)}"
                    f"{did_you_mean(mode, _MODES)}"
                )
            if mode in _IN_FORWARD and not ddp.broadcast_buffers:
                raise ValueError(
                    f"expected DDP to synchronise buffers for mode {mode!r}, but it was made with "
                    "broadcast_buffers=False; pass True, or use 'before_eval'"
                )
            if hasattr(ddp, "buffer_hook"):
                raise ValueError("expected a DDP module without a buffer hook; remove() the BufferSync it has")
            check_writable(buffers)
        except Exception as error:  # any error must reach the other ranks, which wait
            refuse(group, "BufferSync", error)
        with on_their_device(buffers):
            training = agree(group, "BufferSync", {"mode": mode}, describe_layout(buffers), words=[ddp.training])
        if mode in _IN_FORWARD:
            open_host_group(ddp, "BufferSync")
        self.mode = mode
        self._ddp = ddp
        # Whether the module has trained since buffers were averaged; the same on all ranks, whatever their modes. Not
        # ddp.training, which the result of torch.compile(ddp) sets before it calls ddp.train.
        self._has_trained = any(word[0] for word in training)
        self._statistics = BufferStatistics()
        # Each buffer after the last synchronisation, by name; empty before the first.
        self._digests: dict[str, tuple[int, ...]] = {}
        ddp._register_buffer_comm_hook(self, _buffer_hook, _BufferCommHookLocation.PRE_FORWARD)
        # The method that the user put on the object, and may put back or wrap around ours.
        self._train_before: Callable[[bool], DistributedDataParallel] | None = vars(ddp).get("train")
        self._removed = False
        if mode == "before_eval":
            ddp.train = self._train  # type: ignore[method-assign]

    def stats(self) -> BufferStatistics:
        """Return the counters since this object was made."""
        return self._statistics

    def remove(self) -> None:
        """Restore DDP's own behaviour. May be called again.

        A wrapper of ``ddp.train`` that was added later stays. If it calls the one of this object, that sets the mode
        and sends nothing.
        """
        self._removed = True
        hook = getattr(self._ddp, "buffer_hook", None)
        if hook is not None and hook.buffer_comm_hook_state is self:
            del self._ddp.buffer_hook
        if vars(self._ddp).get("train") == self._train:
            if self._train_before is None:
                del self._ddp.train
            else:
                self._ddp.train = self._train_before  # type: ignore[assignment, method-assign]

    def _train(self, mode: bool = True) -> DistributedDataParallel:
        self._has_trained = self._has_trained or mode or self._ddp.training
        leaves_training = self._has_trained and not mode
        if self._train_before is None:
            type(self._ddp).train(self._ddp, mode)  # type: ignore[no-untyped-call]
        else:
            self._train_before(mode)
        if leaves_training and not self._removed:
            self._average(named_buffers(self._ddp), "ddp.eval() with a BufferSync")
            self._has_trained = False
        return self._ddp

    @torch.no_grad()
    def _before_forward(self, buffers: list[NamedTensor]) -> None:
        self._statistics = replace(
            self._statistics,
            forwards=self._statistics.forwards + 1,
            dense_bytes=self._statistics.dense_bytes + sum(named.tensor.nbytes for named in buffers),
        )
        if self.mode not in _IN_FORWARD:
            return
        if self._ddp._join_config.enable:
            # DDP tells its own broadcast which rank is still training, but not its hook. All ranks get here, including
            # joined ones, so all of them raise.
            raise RuntimeError(
                f"BufferSync: expected no ddp.join() with mode {self.mode!r}, because a rank that has joined has stale "
                "buffers; use 'before_eval', or remove() before joining. DDP leaves join switched on after "
                "the block ends; `with ddp.join(enable=False): pass` switches it off"
            )
        group = self._ddp.process_group
        if self.mode == "broadcast":
            report = broadcast_named(_FORWARD, lambda: buffers, 0, group, {"mode": self.mode})
            assert isinstance(report, SyncReport)
            self._count(report)
        elif self.mode == "average":
            self._average(buffers, _FORWARD)
        else:
            self._broadcast_changed(buffers, group)

    def _average(self, buffers: list[NamedTensor], function: str) -> None:
        report = average_named(function, lambda: buffers, self._ddp.process_group, arguments={"mode": self.mode})
        assert isinstance(report, SyncReport)
        self._count(report)

    def _broadcast_changed(self, buffers: list[NamedTensor], group: dist.ProcessGroup) -> None:
        try:
            check_writable(buffers)
            digests = self._hash(buffers)
        except Exception as error:  # any error must reach the other ranks, which wait
            refuse(group, _FORWARD, error)
        changed_here = [self._digests.get(label) != digest for label, digest in digests.items()]
        words = agree(group, _FORWARD, {"mode": self.mode}, describe_layout(buffers), words=[any(changed_here)])
        control_bytes = RECORD_BYTES
        changed: list[NamedTensor] = []
        if any(word[0] for word in words):
            mask = torch.tensor(changed_here, dtype=torch.uint8, device="cpu")
            changed_anywhere = gather_tensor(group, mask).any(dim=0).tolist()
            control_bytes += len(changed_here)
            changed = [named for named, is_changed in zip(buffers, changed_anywhere, strict=True) if is_changed]
        report = broadcast_tensors(changed, 0, group)
        self._digests = digests | self._hash(changed)
        self._count(report, control_bytes)

    @staticmethod
    def _hash(buffers: list[NamedTensor]) -> dict[str, tuple[int, ...]]:
        digests = _C.hash_tensors([named.tensor for named in buffers]).tolist()
        return {named.label: tuple(digest) for named, digest in zip(buffers, digests, strict=True)}

    def _count(self, report: SyncReport, control_bytes: int = RECORD_BYTES) -> None:
        self._statistics = replace(
            self._statistics,
            syncs=self._statistics.syncs + (report.messages > 0),
            payload_bytes=self._statistics.payload_bytes + report.payload_bytes + control_bytes,
        )


def _buffer_hook(state: BufferSync, buffers: Mapping[str, torch.Tensor]) -> None:
    state._before_forward([NamedTensor("buffer", name, buffer.detach()) for name, buffer in buffers.items()])
