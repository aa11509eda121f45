"""The errors that have names of their own. All of them are RuntimeErrors."""

from __future__ import annotations

from typing import Any


class RanksAbsentError(RuntimeError):
    """A collective function waited for ranks that did not call it; the message names them, as ranks of the world."""


class RanksDisagreeError(RuntimeError):
    """The ranks asked for different things; nothing was exchanged and no tensor changed."""


class RefusedError(RuntimeError):
    """A rank cannot take part, or the ranks differ; every rank raises it, and nothing has changed on any."""


class ReplicasDifferError(RuntimeError):
    """The ranks do not hold the same model.

    Attributes:
        report: what differs, a :class:`ddp_hooks.sync.ReplicaReport`.
    """

    def __init__(self, report: Any) -> None:
        super().__init__(f"{report}\nBring them in step with broadcast_parameters or average_parameters.")
        self.report = report


class UnexpectedUseError(RuntimeError):
    """A parameter that was expected to be used was not, or the other way round; the message names it."""
