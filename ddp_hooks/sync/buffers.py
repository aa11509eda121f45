"""Decides when and how DDP keeps buffers, such as BatchNorm's statistics, in step."""

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
from ..serving.groups import gather_tensor, resolve_group
from ..serving.modules import uncompiled
from ..wording import did_you_mean, short
from .parameters import average_named, broadcast_named, broadcast_tensors
from .tensors import NamedTensor, check_writable, describe_layout, named_buffers
from .work import SyncReport

BufferMode = Literal["broadcast", "average", "changed", "before_eval", "never"]
_IN_FORWARD = ("broadcast", "average", "changed")
_MODES = (*_IN_FORWARD, "before_eval", "never")
# What the user called when buffers are exchanged.
_FORWARD = "a forward with a BufferSync"


@dataclass(frozen=True, slots=True)
class BufferStatistics:
    """What a :class:`BufferSync` did since it was made.

    Attributes:
        forwards: forwards in which DDP would have broadcast all buffers.
        syncs: how many times buffers were sent.
        dense_bytes: what DDP would have handed to its broadcasts.
        payload_bytes: what was handed to collectives instead.
    """

    forwards: int = 0
    syncs: int = 0
    dense_bytes: int = 0
    payload_bytes: int = 0

    @property
    def saved_bytes(self) -> int:
        """What DDP would have sent and this did not; negative if more was sent."""
        return self.dense_bytes - self.payload_bytes


class BufferSync:
    """Replaces DDP's broadcast of all buffers in every forward; collective, every rank makes one.

    Modes:
        - ``"broadcast"``: all buffers from rank 0 in every forward, as DDP does, in few messages.
        - ``"average"``: the mean over ranks in every forward, so that every rank's statistics count; integers become
          the maximum.
        - ``"changed"``: from rank 0 in every forward, but only those that changed on any rank since the last time.
          The result is that of ``"broadcast"``.
        - ``"before_eval"``: nothing in a forward; the mean over ranks once, when ``ddp.eval()`` is called after
          training, or ``.eval()`` of ``torch.compile(ddp)``. That call is then collective: every rank has to make it,
          and to have called ``.train()`` before if any has.
        - ``"never"``: every rank keeps its own.

    It works through DDP's own buffer hook, so buffers are exchanged exactly when DDP would have, before the forward:
    not inside ``no_sync``, not after a forward without a backward. ``"before_eval"`` also replaces ``ddp.train`` on
    this one object, by what calls the one that was there. Both are undone by :meth:`remove`. A copied or pickled DDP
    module keeps its own copy.

    Args:
        ddp: a DDP module, or what ``torch.compile`` made of one; alike on all ranks.
        mode: one of the above.

    Raises:
        TypeError: ``ddp`` is not a DDP module.
        ValueError: ``mode`` is unknown; it works in forwards but DDP was built not to synchronise buffers there; or
            ``ddp`` has a buffer hook already. From a forward, or from ``ddp.eval()``: the module's process group was
            destroyed; :meth:`remove` this first to go on without.
        RanksDisagreeError: mode or buffers differ between ranks, or another rank raised a ValueError.
        RanksAbsentError: a rank did not make one within the group's timeout. Also from a forward, or from
            ``ddp.eval()``, that other ranks do not come to.
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
        except Exception as error:  # whatever it is, the others must not wait
            refuse(group, "BufferSync", error)
        training = agree(group, "BufferSync", {"mode": mode}, describe_layout(buffers), words=[ddp.training])
        self.mode = mode
        self._ddp = ddp
        # Whether training since buffers were averaged; alike on all ranks, whichever of them are in training now. Not
        # ddp.training: what torch.compile(ddp) returns writes that before it calls ddp.train.
        self._has_trained = any(word[0] for word in training)
        self._statistics = BufferStatistics()
        # By name, what each buffer was after the last synchronisation; empty before the first.
        self._digests: dict[str, tuple[int, ...]] = {}
        ddp._register_buffer_comm_hook(self, _buffer_hook, _BufferCommHookLocation.PRE_FORWARD)
        # What the user put over the method of the class, and may put back, or put over ours.
        self._train_before: Callable[[bool], DistributedDataParallel] | None = vars(ddp).get("train")
        self._removed = False
        if mode == "before_eval":
            ddp.train = self._train  # type: ignore[method-assign]

    def stats(self) -> BufferStatistics:
        """Return what has been sent and saved since this was made."""
        return self._statistics

    def remove(self) -> None:
        """Give DDP its own behaviour back; does nothing the second time.

        A ``ddp.train`` that was put over this one's stays; if it calls this one's, that changes the mode and sends
        nothing.
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
            # DDP tells its own broadcast which rank is still training, but not its hook. Every rank comes here, joined
            # ones too, so every rank raises.
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
        except Exception as error:  # whatever it is, the others must not wait
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
