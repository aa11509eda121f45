"""The demo's options, and what it does from the first line to the last."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

SIZES = {"small": 2048, "medium": 3072, "large": 4096}
# Weights, gradients, momentum, DDP's buckets; for each of the two runs.
COPIES_OF_THE_MODEL = 2 * 4
# What fits in a terminal.
COLUMNS = 80


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print the table, and write demo.json and demo.png.

    Args:
        arguments: the command line; the process's own by default.

    Returns:
        The exit status: 0 if both runs reached the same weights, 1 if not or if a rank failed, 2 if packages of the
        `demo` extra are missing or the folder cannot be written to, 130 if it was interrupted.
    """
    try:
        return _run(_make_parser().parse_args(arguments))
    except KeyboardInterrupt:
        print("\nThe demo was interrupted. Its ranks were stopped, and nothing was written.", file=sys.stderr)
        return 130


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Trains a multi-task model on scikit-learn's digits twice from the same seed, with plain "
        "DDP(find_unused_parameters=True) and with ddp_hooks, on several processes of this machine. Prints a table; "
        "writes demo.png and demo.json. Exits with 1 if the two runs' weights differ.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=_parse_ranks, default=2, help="number of processes, at least 2")
    parser.add_argument("--steps", type=_parse_positive, default=12, help="steps in each of the phases")
    parser.add_argument(
        "--size",
        type=_parse_size,
        default="small",
        metavar="{" + ",".join(SIZES) + ",WIDTH}",
        help="size of the model: " + ", ".join(f"{name} = layers {width} wide" for name, width in SIZES.items()),
    )
    parser.add_argument("--batch-size", type=_parse_positive, default=32, help="samples per rank")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for demo.png and demo.json")
    parser.add_argument(
        "--timeout",
        type=_parse_positive,
        default=300,
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
    if text in SIZES:
        return SIZES[text]
    if not text.isdecimal() or int(text) < 8:
        raise argparse.ArgumentTypeError(
            f"expected {', '.join(SIZES)} or the width of a layer, at least 8, received {text!r}"
        )
    return int(text)


def find_missing_packages() -> list[str]:
    """Return which packages the demo needs and cannot import."""
    missing = []
    for module, package in (("numpy", "numpy"), ("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")):
        try:
            importlib.import_module(module)
        except ImportError:
            missing.append(package)
    return missing


def _run(options: argparse.Namespace) -> int:
    missing = find_missing_packages()
    if missing:
        print(
            f"The demo needs {' and '.join(missing)}: pip install {' '.join(missing)}",
            file=sys.stderr,
        )
        return 2
    problem = _find_problem_of_output(options.output)
    if problem is not None:
        print(problem, file=sys.stderr)
        return 2
    # Only now: these import what may be missing.
    import ddp_hooks

    from . import picture, report, training, workload
    from .progress import ProgressBar
    from .ranks import RankFailure, count_threads, run_ranks

    settings = training.Settings(
        world_size=options.ranks, steps=options.steps, hidden=options.size, batch_size=options.batch_size
    )
    _warn_of_little_memory(options)
    bar = ProgressBar(len(workload.PHASES) * options.steps, sys.stderr)
    bar.begin(f"starting {options.ranks} ranks")
    try:
        records = run_ranks(
            training.train,
            (settings,),
            world_size=options.ranks,
            timeout_seconds=options.timeout,
            show_progress=bar.advance,
        )
    except RankFailure as failure:
        bar.close()
        print(f"\nThe demo failed.\n{failure}", file=sys.stderr)
        return 1
    bar.close()
    numbers = report.summarize(settings, records, count_threads(options.ranks), ddp_hooks.__version__)
    json_path, png_path = options.output / "demo.json", options.output / "demo.png"
    print(f"{report.describe_setup(numbers)}\n{report.format_table(numbers)}\n{report.describe_outcome(numbers)}\n")
    try:
        json_path.write_text(json.dumps(numbers, indent=1) + "\n")
        picture.draw(numbers, png_path)
    except OSError as error:
        print(f"The results could not be written to {options.output}: {error}.", file=sys.stderr)
        return 1
    print(f"Picture: {png_path}\nNumbers: {json_path}")
    return 1 if numbers["problems"] else 0


def _find_problem_of_output(output: Path) -> str | None:
    """Make the folder, and say why nothing can be written to it; before minutes of training, not after."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        text = (
            f"Expected a folder to write demo.png and demo.json to, received {output}: {error.strerror or error}. "
            "Choose another folder with --output."
        )
        # No word is divided, so that a path can be copied.
        return textwrap.fill(text, COLUMNS, break_long_words=False, break_on_hyphens=False)
    return None


def _warn_of_little_memory(options: argparse.Namespace) -> None:
    from . import workload

    layers = workload.LOWER_LAYERS + 1 + workload.BRANCH_LAYERS + len(workload.TASKS) / 2
    parameters = layers * options.size**2 + workload.VOCABULARY * workload.WORD_FEATURES
    needed = parameters * 4 * COPIES_OF_THE_MODEL * options.ranks
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > 0.8 * available:
        print(
            f"This size takes about {needed / 1e9:.0f} GB and the machine has {available / 1e9:.0f} GB; "
            "choose a smaller --size or fewer --ranks if it swaps.",
            file=sys.stderr,
        )
