"""``python -m ddp_hooks demo``: the options of :mod:`ddp_hooks.demo`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ddp_hooks import demo

from .options import parse_positive


def add_to(commands: Any) -> None:
    """Describe the command to an argument parser's ``add_subparsers()``."""
    defaults = demo.Options()
    parser = commands.add_parser(
        "demo",
        help="train a model twice, with plain DDP and with ddp_hooks, and compare bytes, time and weights",
        description="Trains a multi-task model on scikit-learn's digits twice from the same seed, with plain "
        "DDP(find_unused_parameters=True) and with ddp_hooks, on several processes of this machine. Prints a table; "
        "writes demo.png and demo.json. Exits with 1 if the two runs' weights differ.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=_parse_ranks, default=defaults.ranks, help="number of processes, at least 2")
    parser.add_argument("--steps", type=parse_positive, default=defaults.steps, help="steps in each of the phases")
    parser.add_argument(
        "--size",
        type=_parse_size,
        default="small",
        metavar="{" + ",".join(demo.SIZES) + ",WIDTH}",
        help="size of the model: " + ", ".join(f"{name} = layers {width} wide" for name, width in demo.SIZES.items()),
    )
    parser.add_argument("--batch-size", type=parse_positive, default=defaults.batch_size, help="samples per rank")
    parser.add_argument("--output", type=Path, default=defaults.output, help="folder for demo.png and demo.json")
    parser.add_argument(
        "--timeout",
        type=parse_positive,
        default=int(defaults.timeout_seconds),
        help="seconds without a finished step after which the ranks' stacks are shown and the ranks killed",
    )
    parser.set_defaults(execute=_execute)


def _execute(parsed: argparse.Namespace) -> int:
    return demo.run(
        demo.Options(
            ranks=parsed.ranks,
            steps=parsed.steps,
            hidden=parsed.size,
            batch_size=parsed.batch_size,
            output=parsed.output,
            timeout_seconds=parsed.timeout,
        )
    )


def _parse_ranks(text: str) -> int:
    ranks = parse_positive(text)
    if ranks < 2:
        raise argparse.ArgumentTypeError("expected at least 2 ranks, since a single one has nobody to send to")
    return ranks


def _parse_size(text: str) -> int:
    if text in demo.SIZES:
        return demo.SIZES[text]
    if not text.isdecimal() or int(text) < 8:
        raise argparse.ArgumentTypeError(
            f"expected {', '.join(demo.SIZES)} or the width of a layer, at least 8, received {text!r}"
        )
    return int(text)
