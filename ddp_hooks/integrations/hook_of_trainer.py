"""Registers the hook on the module that a trainer trains. Trainers wrap a model for each run, or keep the wrapper."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal

from torch.nn.parallel import DistributedDataParallel

from ..hooks import SkipUnusedState, origin_of, register
from ..policies import Policy
from ..serving.agreement import propose
from ..statistics import Statistics
from ..wording import short

Log = bool | Literal["everything"]


class HookOfTrainer:
    """The hook of one trainer. It may have several states in turn, and continues their statistics.

    Args:
        policy: as for :func:`ddp_hooks.register`.
        settings: fields of the policy to set differently.
        log: whether a logger is told of the statistics, and of all of them or of three numbers.

    Raises:
        TypeError: ``log`` is something else.

    Attributes:
        state: the state of the module that was registered last; None before.
        log: as above.
    """

    def __init__(self, policy: Policy | str, settings: Mapping[str, Any], log: Log) -> None:
        if not isinstance(log, bool) and log != "everything":
            raise TypeError(
                f"SkipUnusedCallback: expected log to be True, False or 'everything', received {short(log)}"
            )
        self.log = log
        self.state: SkipUnusedState | None = None
        self._policy = policy
        self._settings = dict(settings)
        self._saved: dict[str, Any] = {}  # of a checkpoint, until it is known which module goes on with it
        self._logged = Statistics()
        self._resets = 0  # of the state, when these were read

    def register(self, ddp: DistributedDataParallel) -> None:
        """Register the hook on a module, unless it already serves this module, and load statistics of a checkpoint.

        Every rank has to call this. If each host has its own folder, only the ranks of the first host may have read
        a checkpoint; the others then load rank 0's.

        Args:
            ddp: the module that will be trained.

        Raises:
            TypeError, ValueError, RuntimeError: as for :func:`ddp_hooks.register`.
        """
        saved = self._saved
        if self.state is None or not self.state.serves(ddp):
            saved = self.state_dict()
            self.state = register(ddp, self._policy, **self._settings)
            self._resets, _ = origin_of(self.state)
        self._saved = {}
        first = propose(ddp, "register", {}, own=saved)[0].own
        if first:
            try:
                self.state.load_state_dict(saved or first)
            except (TypeError, ValueError) as error:
                # Statistics are no reason to keep anybody from a checkpoint.
                warnings.warn(f"ddp_hooks: the statistics in the checkpoint were ignored. {error}", stacklevel=2)
            self._resets, self._logged = origin_of(self.state)

    def state_dict(self) -> dict[str, Any]:
        """Return what the state saves; empty before the first registration."""
        return self._saved if self._saved or self.state is None else self.state.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the statistics of a checkpoint at the next call of :meth:`register`.

        Args:
            state_dict: what :meth:`state_dict` returned.
        """
        self._saved = state_dict

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the steps since the last call.

        Returns:
            As :meth:`Statistics.to_metrics`; empty if there was no step, or nothing is to be logged.
        """
        if self.state is None or not self.log:
            return {}
        resets, start = origin_of(self.state)
        now = self.state.stats()
        # After a reset, or a checkpoint that somebody else has loaded, counters are not those of before.
        since = now - (self._logged if resets == self._resets else start)
        self._logged, self._resets = now, resets
        return since.to_metrics(everything=self.log == "everything") if since.steps else {}
