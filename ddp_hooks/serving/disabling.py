"""The environment variable that disables the hook: scripts run unchanged, with plain DDP."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ..errors import RefusedError
from ..statistics import ParameterUsage, Statistics
from ..wording import describe_ranks

VARIABLE = "DDP_HOOKS_DISABLE"

_has_warned = False


def is_disabled() -> bool:
    """Say whether the variable is set to anything but 0."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def warn_of_it() -> None:
    """Warn that the hook is disabled, once per process."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            f"ddp_hooks: {VARIABLE} is set, so no hook is registered: gradients are reduced as they are without "
            "ddp_hooks, statistics stay empty, and rebuild(), close() and state.unused() do nothing",
            stacklevel=5,
        )


def check_alike(function: str, disabled: Sequence[bool]) -> None:
    """Raise on every rank if the variable is set on some ranks only.

    Raises:
        RefusedError: it is set on some ranks only.
    """
    if any(disabled) and not all(disabled):
        on = describe_ranks([rank for rank, value in enumerate(disabled) if value])
        off = describe_ranks([rank for rank, value in enumerate(disabled) if not value])
        raise RefusedError(
            f"{function}: refused on every rank. The environment variable {VARIABLE} is set on {on} but not on {off}; "
            "set it on every rank or on none"
        )


class DisabledService:
    """Takes the place of a :class:`ddp_hooks.serving.service.Service`, and leaves the module alone.

    Args:
        ddp: the module.
        state: its state. It lives as long as the module, as it would if DDP had the hook.
    """

    ended = f"whose module no longer exists, and which {VARIABLE} had turned off"

    def __init__(self, ddp: DistributedDataParallel, state: object) -> None:
        self._ddp = weakref.ref(ddp)
        self.state = weakref.ref(state)
        _states[ddp] = state

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The module; None if it is gone."""
        return self._ddp()

    topology = None

    @property
    def engine(self) -> DisabledService:
        """The object that averages buckets, in case the hook is registered with DDP in spite of the variable."""
        return self

    def run(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket as DDP's own hook does."""
        ddp = self._ddp()
        return allreduce_hook(None if ddp is None else ddp.process_group, bucket)  # type: ignore[arg-type]

    def agree_to_close(self) -> None:
        """Do nothing; there is nothing to close."""

    def close(self) -> None:
        """Do nothing."""

    def change_policy(self, policy: object, problem: str | None) -> None:
        """Do nothing."""

    def register_again(self, policy: object, problem: str | None) -> None:
        """Do nothing."""

    def statistics(self) -> Statistics:
        """Return empty ones."""
        return Statistics()

    def reset_statistics(self) -> None:
        """Do nothing."""

    def usage(self) -> dict[str, ParameterUsage]:
        """Return nothing, as before the first step."""
        return {}

    @contextmanager
    def unused(self, *what: object) -> Iterator[None]:
        """Do nothing."""
        yield

    def declare_unused(self, *what: object) -> None:
        """Do nothing."""


_states: weakref.WeakKeyDictionary[DistributedDataParallel, object] = weakref.WeakKeyDictionary()


def disabled_service(ddp: DistributedDataParallel) -> DisabledService | None:
    """Return what takes the place of the module's service; None if it was registered without the variable."""
    service = getattr(_states.get(ddp), "_service", None)
    return service if isinstance(service, DisabledService) else None
