"""The demo: the same training with plain DDP and with ddp_hooks, side by side, to the same weights."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..wording import fill

SIZES = {"small": 2048, "medium": 3072, "large": 4096}
# Weights, gradients, momentum, DDP's buckets; for each of the two runs.
COPIES_OF_THE_MODEL = 2 * 4


@dataclass(frozen=True, slots=True)
class Options:
    """What a person chooses: ranks, steps per phase, width of a layer, samples per rank and step, and where to."""

    ranks: int = 2
    steps: int = 12
    hidden: int = SIZES["small"]
    batch_size: int = 32
    output: Path = Path("demo-output")
    timeout_seconds: float = 300.0


def find_missing_packages() -> list[str]:
    """Return which packages the demo needs and cannot import."""
    missing = []
    for module, package in (("numpy", "numpy"), ("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")):
        try:
            importlib.import_module(module)
        except ImportError:
            missing.append(package)
    return missing


def run(options: Options) -> int:
    """Train, print the table, and write demo.json and demo.png to ``options.output``.

    Returns:
        The exit status: 0 if both runs reached the same weights, 1 if not or if a rank failed, 2 if packages of the
        `demo` extra are missing or the folder cannot be written to, 130 if it was interrupted.
    """
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("\nThe demo was interrupted. Its ranks were stopped, and nothing was written.", file=sys.stderr)
        return 130


def _run(options: Options) -> int:
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
        world_size=options.ranks, steps=options.steps, hidden=options.hidden, batch_size=options.batch_size
    )
    _warn_of_little_memory(options)
    bar = ProgressBar(len(workload.PHASES) * options.steps, sys.stderr)
    bar.begin(f"starting {options.ranks} ranks")
    try:
        records = run_ranks(
            training.train,
            (settings,),
            world_size=options.ranks,
            timeout_seconds=options.timeout_seconds,
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
        return fill(
            f"Expected a folder to write demo.png and demo.json to, received {output}: {error.strerror or error}. "
            "Choose another folder with --output."
        )
    return None


def _warn_of_little_memory(options: Options) -> None:
    from . import workload

    layers = workload.LOWER_LAYERS + 1 + workload.BRANCH_LAYERS + len(workload.TASKS) / 2
    parameters = layers * options.hidden**2 + workload.VOCABULARY * workload.WORD_FEATURES
    needed = parameters * 4 * COPIES_OF_THE_MODEL * options.ranks
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > 0.8 * available:
        print(
            f"This size takes about {needed / 1e9:.0f} GB and the machine has {available / 1e9:.0f} GB; "
            "choose a smaller --size or fewer --ranks if it swaps.",
            file=sys.stderr,
        )
