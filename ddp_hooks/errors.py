"""The exceptions of this package. All are RuntimeErrors."""

from __future__ import annotations

from typing import Any


class RanksAbsentError(RuntimeError):
    """Some ranks did not call a collective function in time. The message gives their ranks in the default group."""


class RanksDisagreeError(RuntimeError):
    """Ranks called a collective function with different arguments. Nothing was exchanged and no tensor changed."""


class RefusedError(RuntimeError):
    """A rank cannot take part, or ranks differ. Every rank raises it, and nothing has changed on any rank."""


class ReplicasDifferError(RuntimeError):
    """The ranks do not hold the same model.

    Attributes:
        report: the differences, a :class:`ddp_hooks.sync.ReplicaReport`.
    """

    def __init__(self, report: Any) -> None:
        super().__init__(f"{report}\nBring them in step with broadcast_parameters or average_parameters.")
        self.report = report


class UnexpectedUseError(RuntimeError):
    """A parameter that should be used was not, or one that should be unused was used. The message names it."""
