"""``python -m ddp_hooks doctor SCRIPT``: runs a script as it is, with plain DDP, and says what was seen."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..commands.options import add_script_to, explain_missing_launcher, parse_new_file, parse_positive, script_of
from ..ddp_methods import watch_construction
from ..groups import launched_rank
from ..hangs.activity import activity
from ..script import run_script
from ..wording import short_list
from .diagnosis import Diagnosis
from .findings import Findings
from .noticeboard import Noticeboard
from .page import draw_page
from .recorder import Recorder
from .records import RankRecord, read_word, write_word
from .standing import End, Way, read_end
from .text import describe
from .watchdog import Watchdog


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for.

    Attributes:
        script: the script or module, and its own arguments.
        as_module: whether it is a module.
        steps: how many synchronised steps are watched.
        go_on: let the run go on after them.
        json: where to write what was found, or None.
        html: where to draw it, or None.
        patience_seconds: how long no step may end before the run is taken to hang.
    """

    script: tuple[str, ...]
    as_module: bool = False
    steps: int = 30
    go_on: bool = False
    json: Path | None = None
    html: Path | None = None
    patience_seconds: float = 300.0


# So that one run in a process does not read the words of another.
_runs = count()


class _EnoughSeen(SystemExit):
    """Ends the script: all steps were watched. On every rank in the same step, from ``backward()``.

    A rank that has joined (``ddp.join()``) raises it from the end of the join block.
    """


def add_to(commands: Any) -> None:
    """Add the command to the subparsers of ``python -m ddp_hooks``."""
    defaults = Options(())
    parser = commands.add_parser(
        "doctor",
        usage="torchrun ... -m ddp_hooks doctor [--steps N] [--continue] [--json FILE]\n           [--html FILE] "
        "[--patience SECONDS] [-m] SCRIPT ...",
        help="run a script with plain DDP and say which parameters are unused, and what ddp_hooks would save",
        description="Runs a training script as it is, with plain DDP, watches its first steps, and prints which "
        "parameters are unused, frozen or zero, what a step consists of, and what ddp_hooks would save.",
        epilog="Start every rank with it, as in `torchrun --nproc-per-node 2 -m ddp_hooks doctor train.py --lr 0.1`.",
    )
    parser.add_argument(
        "--steps",
        type=parse_positive,
        metavar="N",
        default=defaults.steps,
        help="how many to watch (default: %(default)s)",
    )
    parser.add_argument(
        "--continue", dest="go_on", action="store_true", help="let the script go on after them, in place of ending it"
    )
    parser.add_argument("--json", type=parse_new_file, metavar="FILE", help="write everything to FILE, as JSON")
    parser.add_argument(
        "--html", type=parse_new_file, metavar="FILE", help="draw who used what in which step: FILE is a page by itself"
    )
    parser.add_argument(
        "--patience",
        type=_parse_seconds,
        metavar="SECONDS",
        default=defaults.patience_seconds,
        help="without a finished step for so long the run is taken to hang: names are printed, and it ends "
        f"(default: {defaults.patience_seconds:g})",
    )
    add_script_to(parser)
    parser.set_defaults(execute=lambda parsed: run(read_options(parsed)))


def read_options(parsed: argparse.Namespace) -> Options:
    """Return what was asked for; without a script the parser ends the program."""
    return Options(
        tuple(script_of(parsed)),
        parsed.as_module,
        parsed.steps,
        parsed.go_on,
        parsed.json,
        parsed.html,
        parsed.patience,
    )


def run(options: Options) -> int:
    """Run the script, and print and write what was seen.

    Args:
        options: what the command line asks for.

    Returns:
        The exit status: 0 when the steps were watched, 2 when there was nothing to watch.

    Raises:
        BaseException: what the script raised.
    """
    session = _Session(options)
    with watch_construction(session.watch):
        try:
            run_script(options.script, as_module=options.as_module)
            session.way = Way.FINISHED
        except _EnoughSeen:
            session.way = Way.STOPPED
        except SystemExit as end:
            if end.code not in (None, 0):
                session.abandon(end)
                raise
            session.way = Way.FINISHED
        except BaseException as error:
            if explain_missing_launcher("doctor", error):
                return 2
            session.abandon(error)
            raise
    session.conclude()
    return session.status()


class _Session:
    """The modules that a run has made, each with its diagnosis.

    Attributes:
        way: how the script ends.
    """

    def __init__(self, options: Options) -> None:
        self.way = Way.GOES_ON
        self._options = options
        self._open: dict[str, Diagnosis] = {}  # by a name that is the same on every rank of the module's group
        self._concluded: list[Findings] = []
        self._watchdog: Watchdog | None = None
        self._error: BaseException | None = None
        self._rank = launched_rank()

    def watch(self, ddp: DistributedDataParallel) -> None:
        """Begin to watch a module that was just made; every rank makes it."""
        if self._concluded and not self._open:
            return  # the run goes on by itself
        diagnosis = Diagnosis(ddp).__enter__()
        self._rank = dist.get_rank()
        recorder = diagnosis.recorder
        assert recorder is not None  # it was entered
        ranks = dist.get_process_group_ranks(ddp.process_group)
        of_group = ",".join(map(str, ranks))
        number = sum(name.startswith(f"{of_group}/") for name in self._open)
        self._open[f"{of_group}/{number}"] = diagnosis
        recorder.on_step = self._make_counter()
        diagnosis.when_stopped(activity.remark(lambda: _remark(recorder)))
        if self._watchdog is None:
            world = dist.group.WORLD
            assert world is not None  # DDP has found a process group
            self._watchdog = Watchdog(self, Noticeboard(f"run {next(_runs)}", world), self._options.patience_seconds)

    def _make_counter(self) -> Callable[[int], None]:
        def step_ended(steps: int) -> None:
            if steps < self._options.steps:
                return
            if not self._options.go_on:
                raise _EnoughSeen(0)
            self.way = Way.STOPPED
            self.conclude()

        return step_ended

    def conclude(self) -> None:
        """Put together what the ranks saw; every rank comes here at the same point."""
        # While it waits for the others, this rank answers those that do not come.
        for diagnosis in self._open.values():
            self._concluded.append(diagnosis.conclude(End(self.way)))
        self._stop_looking()
        if self._open and self._rank == 0:
            self._report(self._concluded, sys.stdout)
        self._open = {}

    def abandon(self, error: BaseException) -> None:
        """Say what ranks saw before the error: those that end with one now, and those that go on and are asked."""
        self._error = error
        if self._watchdog is not None and self._open:
            self._watchdog.explain()
        self._stop_looking()
        for diagnosis in self._open.values():
            self._concluded.append(diagnosis.abandon(error, ends_process=True))
        self._open = {}

    def status(self) -> int:
        """Return the exit status."""
        if self._concluded:
            return 0
        if self._rank == 0:
            print("ddp_hooks doctor: the script made no DistributedDataParallel module", file=sys.stderr)
        return 2

    def _stop_looking(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None

    # --- what the watchdog asks for

    def seconds_stood(self) -> float:
        """Return for how long no step of any module has ended."""
        recorders = self._recorders()
        return time.monotonic() - max(one.last_progress for one in recorders) if recorders else 0.0

    def is_in_step(self) -> bool:
        """Say whether a step of some module has begun and not ended."""
        return any(recorder.is_unfinished() for recorder in self._recorders())

    def make_word(self) -> dict[str, Any]:
        """Return what this rank has seen until now."""
        return dict(write_word(self._describe()))

    def tell(self, words: Mapping[int, dict[str, Any]]) -> None:
        """Print what follows from what some ranks have seen."""
        others = [read_word(word) for rank, word in words.items() if rank != self._rank]
        findings = [
            self._open[name].find_with([other[name] for other in others if name in other], own)
            for name, own in self._describe().items()
        ]
        self._report(findings, sys.stderr)

    def _recorders(self) -> list[Recorder]:
        return [one.recorder for one in list(self._open.values()) if one.recorder is not None]

    def _describe(self) -> dict[str, RankRecord]:
        end = End(self.way) if self._error is None else read_end(self._error)
        return {name: diagnosis.describe(end) for name, diagnosis in list(self._open.items())}

    # --- telling

    def _report(self, findings: Sequence[Findings], stream: TextIO) -> None:
        lines = []
        for number, one in enumerate(findings):
            if len(findings) > 1:
                lines.append(f"\n--- module {number + 1} of {len(findings)}")
            lines.append(describe(one))
        if self.way is Way.STOPPED and not self._options.go_on:
            steps = f"{self._options.steps} step{'' if self._options.steps == 1 else 's'}"
            lines.append(f"\nStopped your script after {steps}; --continue lets it go on.")
        print("\n".join(lines), file=stream, flush=True)
        if self._options.json is not None:
            found = {"version": 1, "diagnoses": [one.to_dict() for one in findings]}
            _write(self._options.json, json.dumps(found, indent=1) + "\n")
        if self._options.html is not None:
            _write(self._options.html, draw_page(findings))


def _remark(recorder: Recorder) -> list[str]:
    missing = recorder.missing() if recorder.is_unfinished() else []
    return [f"no gradient yet of {short_list(missing)}"] if missing else []


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
        print(f"wrote {path}", flush=True)
    except OSError as error:
        print(f"ddp_hooks doctor: could not write {path}: {error.strerror}", file=sys.stderr, flush=True)


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, received {text!r}")
    return seconds
