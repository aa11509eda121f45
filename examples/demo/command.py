"""The demo's options, its ranks, and what it writes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

SIZES = {"small": 2048, "medium": 3072, "large": 4096}
PACKAGES = {"numpy": "numpy", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}
# After this time without an answer from another rank, gloo raises an error.
TIMEOUT = timedelta(minutes=5)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print the table, and write demo.json and demo.png.

    Args:
        arguments: the command line; the process's own by default.

    Returns:
        The exit status: 0 if both runs reached the same weights, 1 if not or if a rank failed, 2 if packages of the
        `demo` extra are missing or the output folder cannot be written to, 130 if the demo was interrupted.
    """
    options = make_parser().parse_args(arguments)
    missing = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"The demo needs {' and '.join(missing)}: pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.output):
            pass  # training takes minutes, so find out now whether its results can be written
    except OSError as error:
        print(
            f"Cannot write to {options.output}: {error.strerror}. Choose another folder with --output.", file=sys.stderr
        )
        return 2
    try:
        return run(options)
    except KeyboardInterrupt:
        print("\nThe demo was interrupted. Its ranks were stopped, and nothing was written.", file=sys.stderr)
        return 130


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Trains a multi-task model on scikit-learn's digits twice from the same seed, with plain "
        "DDP(find_unused_parameters=True) and with ddp_hooks, on several processes of this machine. Prints a table; "
        "writes demo.png and demo.json. Exits with 1 if the two runs' weights differ.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=at_least(2), default=2, help="number of processes, at least 2")
    parser.add_argument("--steps", type=at_least(1), default=12, help="steps in each of the phases")
    parser.add_argument(
        "--size",
        type=lambda text: SIZES.get(text) or at_least(8, "small, medium, large or ")(text),
        default="small",
        metavar="{" + ",".join(SIZES) + ",WIDTH}",
        help="size of the model: " + ", ".join(f"{name} = layers {width} wide" for name, width in SIZES.items()),
    )
    parser.add_argument("--batch-size", type=at_least(1), default=32, help="samples per rank")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for demo.png and demo.json")
    return parser


def at_least(least: int, names: str = "") -> Any:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected {names}an integer of at least {least}, received {text!r}")
        return int(text)

    return parse


def run(options: argparse.Namespace) -> int:
    # Imported here, because these import packages that may be missing.
    import torch.multiprocessing as mp
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

    from . import picture, report

    # Ranks read these when they start; what the user has set wins.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // options.ranks)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns if a step uses every parameter, as phase 1 does
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    print(f"starting {options.ranks} ranks", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="ddp_hooks_demo_") as folder:
        try:
            mp.spawn(run_rank, (options, folder), nprocs=options.ranks, daemon=True)
        except (ProcessRaisedException, ProcessExitedException) as failure:
            print(f"\nThe demo failed.\n{failure}", file=sys.stderr)
            return 1
        numbers = json.loads(Path(folder, "numbers").read_text())
    print(f"{report.describe_setup(numbers)}\n{report.format_table(numbers)}")
    print(f"{report.describe_outcome(numbers)}\n")
    json_path, png_path = options.output / "demo.json", options.output / "demo.png"
    json_path.write_text(json.dumps(numbers, indent=1) + "\n")
    picture.draw(numbers, png_path)
    print(f"Picture: {png_path}\nNumbers: {json_path}")
    return 0 if report.weights_agree(numbers) else 1


def run_rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Train on this rank; rank 0 leaves the numbers in the folder."""
    import torch.distributed as dist

    from . import training

    # Ranks meet in a file, so no port can be taken and no host name has to be resolved.
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=options.ranks, timeout=TIMEOUT)
    numbers = training.train(options.steps, options.size, options.batch_size)
    if rank == 0:
        Path(folder, "numbers").write_text(json.dumps(numbers))
    dist.destroy_process_group()
