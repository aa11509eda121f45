"""Reports the bytes that all modules of a run sent, including modules that are gone when it ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..enabling import Enabling, MadeModule
from ..policies import Policy
from ..serving.groups import launched_rank
from ..statistics import Statistics
from ..wording import describe_bytes, describe_part, fill

_LONGEST_NAME = 28
_INDENT = "    "


class RunReport:
    """Serves every DDP module that is made between :meth:`start` and :meth:`end`, and keeps their statistics."""

    def __init__(self, policy: Policy, script: Sequence[str]) -> None:
        self._policy = policy
        self._script = list(script)
        self._enabling: Enabling | None = None
        # States keep their statistics when their modules go.
        self._made: list[MadeModule] = []

    def start(self) -> None:
        """Serve modules from now on."""
        self._enabling = Enabling(self._policy, self.add)

    def add(self, made: MadeModule) -> None:
        """Take a module into the report."""
        self._made.append(made)

    def end(self, *, failed: bool, quiet: bool, file: Path | None) -> None:
        """Stop serving new modules, and let rank 0 report.

        Args:
            failed: whether the script ended with an error. If it made no module either, nothing is printed, so that
                the error stands last.
            quiet: print nothing.
            file: where to write the report as JSON, or None.
        """
        if self._enabling is not None:
            self._enabling.end()
        # The process group may be gone by now.
        rank = self._made[0].rank if self._made else launched_rank()
        if rank != 0:
            return
        if not quiet and not (failed and not self._made):
            print(self.describe(), file=sys.stderr)
        if file is not None:
            try:
                file.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
            except OSError as error:
                print(f"ddp_hooks: the report could not be written to {file}: {error.strerror}", file=sys.stderr)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values. Bytes are those of this rank."""
        modules = [
            {
                "module": made.name,
                "world_size": made.world_size,
                "problem": made.problem,
                "policy": None if made.state is None else made.state.policy.to_dict(),
                "statistics": None if made.state is None else _to_dict(made.state.stats()),
            }
            for made in self._made
        ]
        return {
            "ddp_hooks": __version__,
            "torch": torch.__version__,
            "script": self._script,
            "policy": self._policy.to_dict(),
            "modules": modules,
            "total": _to_dict(self._total()),
        }

    def describe(self) -> str:
        """Return a table with a line for each module, at most 80 columns wide."""
        if not self._made:
            return fill(
                "ddp_hooks: this process made no DistributedDataParallel module, so no hook was registered. Processes "
                "that the script starts itself are not covered: start them with torchrun, or call ddp_hooks.enable() "
                "in them."
            )
        made_first = self._made[0]
        ranks = f"{made_first.world_size} {'rank' if made_first.world_size == 1 else 'ranks'}"
        lines = [
            f"ddp_hooks {__version__}: policy {self._policy.name!r}, {ranks}; bytes of rank 0",
            _line("module", "steps", "plain DDP", "sent", "saved"),
        ]
        for number, made in enumerate(self._made, 1):
            name = f"{number} {made.name}"
            if made.state is None:
                lines.append(_line(name, "-", "-", "-", "-"))
                text = f"trained as plain DDP: {made.problem}"
                lines.append(fill(text, _INDENT))
            else:
                lines.append(_line_of(name, made.state.stats()))
        if len(self._made) > 1:
            lines.append(_line_of("total", self._total()))
        if made_first.world_size == 1:
            lines.append("  A single rank has nobody to send to, with or without the hook.")
        return "\n".join(lines)

    def _total(self) -> Statistics:
        return sum((made.state.stats() for made in self._made if made.state is not None), Statistics())


def _to_dict(statistics: Statistics) -> dict[str, Any]:
    derived = ("wrapped_bytes", "saved_fraction", "why_uncoded")
    return {**statistics.to_dict(), **{name: getattr(statistics, name) for name in derived}}


def _line(name: str, *columns: str) -> str:
    short = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."
    steps, plain, sent, saved = columns
    return f"  {short:{_LONGEST_NAME}} {steps:>13} {plain:>12} {sent:>12} {saved:>8}"


def _line_of(name: str, statistics: Statistics) -> str:
    sent = statistics.payload_bytes + statistics.mask_bytes
    numbers = (f"{statistics.steps:,}", describe_bytes(statistics.wrapped_bytes), describe_bytes(sent))
    return _line(name, *numbers, describe_part(statistics.saved_fraction))
