"""``python -m ddp_hooks info`` prints versions, and why the package does not load."""

from __future__ import annotations

import argparse
from typing import Any

from ddp_hooks import _extension


def add_to(commands: Any) -> None:
    """Describe the command to an argument parser's ``add_subparsers()``."""
    parser = commands.add_parser(
        "info",
        help="print versions; if ddp_hooks does not load, say why",
        description="Prints the versions of ddp_hooks, torch and Python. If ddp_hooks does not load, says why and "
        "what to do, and exits with status 1.",
    )
    parser.set_defaults(execute=_execute)


def _execute(parsed: argparse.Namespace) -> int:
    del parsed
    print(_extension.describe())
    return 0
