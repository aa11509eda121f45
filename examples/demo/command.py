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

PACKAGES = {"numpy": "numpy", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print the table, and write demo.json and demo.png.

    Returns 0 if both runs reached the same weights, 1 if not or if a rank failed, 2 if packages of the `demo` extra are
    missing or the output folder cannot be written to, and 130 if the demo was interrupted.
    """
    options = make_parser().parse_args(arguments)
    missing = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"The demo needs {' and '.join(missing)}: pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.output):
            pass  # fails now rather than after minutes of training
    except OSError as error:
        print(f"Cannot write to {options.output}: {error.strerror}. Use another --output folder.", file=sys.stderr)
        return 2
    try:
        return run(options)
    except KeyboardInterrupt:
        print("\nThe demo was interrupted. Its ranks were stopped, and nothing was written.", file=sys.stderr)
        return 130


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Trains a multi-task model on scikit-learn's digits twice from the same seed, with plain "
        "DDP(find_unused_parameters=True) and with ddp_hooks, on several processes of this machine. Prints a table and "
        "writes demo.png and demo.json.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=at_least(2), default=2, help="number of processes, at least 2")
    parser.add_argument("--steps", type=at_least(1), default=12, help="steps in each of the phases")
    parser.add_argument("--width", type=at_least(8), default=2048, help="width of the model's layers")
    parser.add_argument("--batch-size", type=at_least(1), default=32, help="samples per rank")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for demo.png and demo.json")
    return parser


def at_least(least: int) -> Any:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, received {text!r}")
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
    print(report.describe_setup(numbers), report.format_table(numbers), report.describe_outcome(numbers), sep="\n")
    json_path, png_path = options.output / "demo.json", options.output / "demo.png"
    json_path.write_text(json.dumps(numbers, indent=1) + "\n")
    picture.draw(numbers, png_path)
    print(f"\nPicture: {png_path}\nNumbers: {json_path}")
    return 0 if report.weights_agree(numbers) else 1


def run_rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Train on this rank; rank 0 leaves the numbers in the folder."""
    import torch.distributed as dist

    from . import training

    # Ranks meet in a file, so no port can be taken and no host name has to be resolved.
    store, timeout = f"file://{folder}/store", timedelta(minutes=5)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=options.ranks, timeout=timeout)
    numbers = training.train(options.steps, options.width, options.batch_size)
    if rank == 0:
        Path(folder, "numbers").write_text(json.dumps(numbers))
    dist.destroy_process_group()
