"""Runs ``python -m ddp_hooks``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ddp_hooks.cli import doctor, info, run
from ddp_hooks.cli.options import CommandParser

COMMANDS = (info, run, doctor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` names (by default, those of the process) and return its exit status."""
    parser = CommandParser(
        prog="python -m ddp_hooks",
        description="A DistributedDataParallel communication hook that sends only the gradients somebody needs.",
        epilog="In a program: `state = ddp_hooks.register(ddp)`, on every rank, after wrapping the model; or "
        "`ddp_hooks.enable()` before a trainer wraps it.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    parsed = parser.parse_args(arguments)
    status: int = parsed.execute(parsed)
    return status


if __name__ == "__main__":
    sys.exit(main())
