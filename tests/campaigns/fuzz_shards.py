"""Runs random programs with FSDP2, with and without ddp_hooks.fsdp, and compares each step.

python tests/campaigns/fuzz_shards.py --seeds 0:300            on 2 ranks, on the pretended device
python tests/campaigns/fuzz_shards.py --seeds 0:100 --ranks 4  on hosts of two ranks, for example
python tests/campaigns/fuzz_shards.py --seeds 0:300 --device cpu
python tests/campaigns/fuzz_shards.py --seeds 17:18            one program, printed

Gradients and parameters are compared bit by bit on two ranks and where hosts average, but for the sign of zeros. On
more ranks, another order of additions may round differently, so parameters stay, and gradients are compared up to that.
The exit code is 1 if anything differs. Ranks that fail or hang end the campaign; the traceback names the seed.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import conftest  # noqa: F401, makes the files of all rooms importable, also in ranks
from shard_programs import HOSTS, generate, run_seeds


def main() -> int:
    """Run what is asked for; return the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", metavar="FIRST:END", required=True)
    parser.add_argument("--ranks", type=int, choices=list(HOSTS), default=2)
    parser.add_argument("--device", choices=["pretend", "cpu"], default="pretend")
    options = parser.parse_args()
    first, end = (int(number) for number in options.seeds.split(":"))
    if end == first + 1:
        for name, value in asdict(generate(first, options.ranks, options.device)).items():
            print(f"{name}: {value}")
    begun = time.monotonic()
    try:
        done = run_seeds(range(first, end), options.ranks, options.device)
    except AssertionError as failure:
        print(str(failure)[-8000:])
        return 1
    print(f"none of {done['programs']} differs ({time.monotonic() - begun:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
