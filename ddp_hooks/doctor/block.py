"""The part that the diagnoses of DDP modules and of modules with fully_shard share."""

from __future__ import annotations

from types import TracebackType
from typing import Any, TypeVar

from .findings import Findings
from .side_channel import SideChannel
from .standing import End
from .text import describe

T = TypeVar("T")


class Block:
    """A ``with`` block in which a module is watched, and which leaves findings."""

    _findings: Findings | None = None
    _channel: SideChannel | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop watching, and derive the findings.

        After any exception, Ctrl-C and sys.exit() included, other ranks may not leave the block, so they are not asked.
        """
        if error is None:
            self.conclude()
        else:
            self.abandon(error)

    def conclude(self, end: End | None = None) -> Findings:
        """Stop watching, and derive the findings from what all ranks saw."""
        raise NotImplementedError

    def abandon(self, error: BaseException, *, ends_process: bool = False) -> Findings:
        """Stop watching, and derive the findings from what this rank saw."""
        raise NotImplementedError

    @property
    def findings(self) -> Findings:
        """The findings.

        Raises:
            RuntimeError: the block has not ended yet.
        """
        if self._findings is None:
            raise RuntimeError("diagnose: expected the block to have ended; read the findings after it")
        return self._findings

    def __str__(self) -> str:
        """Return the report as text for a terminal."""
        return "a diagnosis that has not ended" if self._findings is None else describe(self._findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the findings as plain values, for JSON.

        Raises:
            RuntimeError: the block has not ended yet.
        """
        return self.findings.to_dict()


def require_entered(part: T | None) -> T:
    """Return a part that entering the block makes; raise a RuntimeError if the block was not entered."""
    if part is None:
        raise RuntimeError("diagnose: expected a block, as in `with ddp_hooks.diagnose(model) as diagnosis:`")
    return part
