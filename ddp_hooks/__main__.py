"""The command line: ``python -m ddp_hooks demo`` and ``python -m ddp_hooks info``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_hooks import _extension, demo


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in ``arguments`` (the process's own by default) and return its exit status."""
    parsed = _build_parser().parse_args(arguments)
    if parsed.command == "info":
        print(_extension.describe())
        return 0
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


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddp_hooks",
        description="A DistributedDataParallel communication hook that sends only the gradients somebody needs.",
        epilog="In a program: `state = ddp_hooks.register(ddp)`, on every rank, after wrapping the model.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("info", help="print versions, and why ddp_hooks does not load if it does not (exit status 1)")
    defaults = demo.Options()
    train = commands.add_parser(
        "demo",
        help="train a model twice, with plain DDP and with ddp_hooks, and compare bytes, time and weights",
        description="Train a multi-task model on scikit-learn's digits twice from the same seed, with plain "
        "DDP(find_unused_parameters=True) and with ddp_hooks, on several processes of this machine. Prints a table; "
        "writes demo.png and demo.json. Exits with 1 if the two runs' weights differ.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    train.add_argument("--ranks", type=_parse_ranks, default=defaults.ranks, help="number of processes, at least 2")
    train.add_argument("--steps", type=_parse_positive, default=defaults.steps, help="steps in each of the phases")
    train.add_argument(
        "--size",
        type=_parse_size,
        default="small",
        metavar="{" + ",".join(demo.SIZES) + ",WIDTH}",
        help="size of the model: " + ", ".join(f"{name} = layers {width} wide" for name, width in demo.SIZES.items()),
    )
    train.add_argument("--batch-size", type=_parse_positive, default=defaults.batch_size, help="samples per rank")
    train.add_argument("--output", type=Path, default=defaults.output, help="folder for demo.png and demo.json")
    train.add_argument(
        "--timeout",
        type=_parse_positive,
        default=int(defaults.timeout_seconds),
        help="seconds without a finished step after which the ranks' stacks are shown and the ranks killed",
    )
    return parser


def _parse_positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, received {text!r}")
    return int(text)


def _parse_ranks(text: str) -> int:
    ranks = _parse_positive(text)
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


if __name__ == "__main__":
    sys.exit(main())
