"""Runs random training programs with plain DDP and with the hook, and compares everything after every step.

python tests/campaigns/fuzz.py --seed 17 --ranks 2            one program, printed, with the first difference
python tests/campaigns/fuzz.py --seeds 0:5000 --ranks 2       many, in one set of ranks
python tests/campaigns/fuzz.py --minutes 60                   as many as fit, on 2 ranks and now and then 3
python tests/campaigns/fuzz.py --program small.json           a program that was kept
python tests/campaigns/fuzz.py --seeds 0:1000 --device pretend   on the device in tests/pretend/
python tests/campaigns/fuzz.py --seeds 0:1000 --device cuda   on a GPU that all ranks share

What fails is made small and printed, with the command that runs it again. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from fuzzer.campaign import Tally, Verdict, judge, run_many
from fuzzer.generate import generate
from fuzzer.program import Program
from fuzzer.shrink import shrink

# For ddp_hooks_testing, which holds the pretended device. Last, so that what is tested is the installed package.
sys.path.append(str(Path(__file__).resolve().parents[2]))


def main() -> int:
    options = _arguments()
    if options.program:
        return _one(Program.from_json(_read(options.program)), options)
    if options.seed is not None:
        return _one(generate(options.seed, options.ranks, options.device), options)
    return _many(options)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, help="run the program of this seed")
    what.add_argument("--seeds", metavar="FIRST:END", help="run the programs of these seeds")
    what.add_argument("--minutes", type=float, help="run programs for so long")
    what.add_argument("--program", metavar="FILE", help="run a program in JSON; - for standard input")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--until-failure", action="store_true", help="stop at the first program that fails")
    parser.add_argument("--device", choices=["cpu", "pretend", "cuda"], default="cpu")
    parser.add_argument("--shrink-seconds", type=float, default=60.0, help="how long to make a failing program smaller")
    parser.add_argument("--keep", type=Path, help="a folder for the programs that fail")
    return parser.parse_args()


def _read(path: str) -> str:
    return sys.stdin.read() if path == "-" else Path(path).read_text()


def _one(program: Program, options: argparse.Namespace) -> int:
    print(program)
    verdict = judge(program)
    print(f"{verdict.kind}\n{verdict.report}".rstrip())
    if verdict.kind == "same":
        return 0
    _show_small(program, verdict, options)
    return 1


def _many(options: argparse.Namespace) -> int:
    started = time.monotonic()
    until = None
    if options.minutes is not None:
        until = started + 60 * options.minutes
        first = random.SystemRandom().randrange(10**9)
        # Three ranks share two cores badly, and find little that two do not.
        programs = (generate(seed, 3 if seed % 10 == 0 else 2, options.device) for seed in itertools.count(first))
    else:
        first, end = (int(number) for number in options.seeds.split(":"))
        programs = (generate(seed, options.ranks, options.device) for seed in range(first, end))

    def failed(program: Program, verdict: Verdict) -> None:
        print(f"\nseed {program.seed} on {program.ranks} ranks {verdict.kind}: {verdict.report.strip()[:4000]}")
        _show_small(program, verdict, options)

    next_line = [started + 10]

    def progress(tally: Tally) -> None:
        if time.monotonic() >= next_line[0]:
            next_line[0] = time.monotonic() + 10
            print(f"{tally}, {(time.monotonic() - started) / tally.programs:.2f} s each", flush=True)

    tally = run_many(
        _from_seed(programs, first),
        until=until,
        on_failure=failed,
        on_progress=progress,
        until_failure=options.until_failure,
    )
    print(f"{tally}; {time.monotonic() - started:.0f} s from seed {first}")
    return 1 if tally.bad else 0


def _from_seed(programs: Iterator[Program], first: int) -> Iterator[Program]:
    print(f"from seed {first}", flush=True)
    return programs


def _show_small(program: Program, verdict: Verdict, options: argparse.Namespace) -> None:
    small, small_verdict = program, verdict
    if options.shrink_seconds > 0:
        small, small_verdict = shrink(program, verdict, seconds=options.shrink_seconds)
    print(f"\nmade small:\n{small}\n{small_verdict.kind}: {small_verdict.report.strip()[-4000:]}")
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        (options.keep / f"{verdict.kind.replace(' ', '_')}_{program.seed}_{program.ranks}.json").write_text(
            small.to_json()
        )
    device = "" if program.options.device == "cpu" else f" --device {program.options.device}"
    print(f"again, in full: python tests/campaigns/fuzz.py --seed {program.seed} --ranks {program.ranks}{device}")
    print(f"again, small: echo '{small.to_json()}' | python tests/campaigns/fuzz.py --program -", flush=True)


if __name__ == "__main__":
    sys.exit(main())
