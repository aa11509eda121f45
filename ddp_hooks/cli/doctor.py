"""``python -m ddp_hooks doctor SCRIPT`` runs a script unchanged, with plain DDP, and reports what the doctor finds."""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..doctor.children import Children, follow
from ..doctor.diagnosis import Diagnosis
from ..doctor.findings import Findings, leave_error_to_its_module
from ..doctor.noticeboard import Noticeboard
from ..doctor.optimizers import OptimizerWatch
from ..doctor.page import draw_page
from ..doctor.recorder import Recorder
from ..doctor.records import read_word, write_word
from ..doctor.shards import ShardDiagnosis
from ..doctor.standing import End, Way, read_end, read_place
from ..doctor.text import describe_all
from ..doctor.watchdog import Watchdog
from ..errors import RefusedError
from ..fsdp.param_groups import watch_first_forward
from ..hangs.activity import activity
from ..serving.ddp_methods import watch_construction
from ..serving.groups import launched_rank
from ..wording import fill, short_list
from .options import add_script_to, explain_missing_launcher, parse_new_file, parse_positive, script_of
from .script import run_script


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command.

    Attributes:
        script: the script or module, and its own arguments.
        as_module: whether it is a module.
        steps: how many synchronised steps to watch.
        only_watch: whether to try no policies in them.
        go_on: let the run continue after them.
        json: where to write the findings as JSON, or None.
        html: where to write them as a page, or None.
        patience_seconds: how long no step may end before the run counts as hung.
    """

    script: tuple[str, ...]
    as_module: bool = False
    steps: int = 48
    only_watch: bool = False
    go_on: bool = False
    json: Path | None = None
    html: Path | None = None
    patience_seconds: float = 300.0


# Keeps several runs in one process apart.
_runs = count()
# The word of a child process that has made no module.
_NOTHING = "nothing"


class _EnoughSeen(SystemExit):
    """Ends the script when all steps were watched. ``backward()`` raises it in the same step on every rank.

    On a rank that has joined (``ddp.join()``), the end of the join block raises it.
    """


def add_to(commands: Any) -> None:
    """Add the command to the subparsers of ``python -m ddp_hooks``."""
    defaults = Options(())
    parser = commands.add_parser(
        "doctor",
        usage="torchrun ... -m ddp_hooks doctor [--steps N] [--only-watch] [--continue]\n           [--json FILE] "
        "[--html FILE] [--patience SECONDS] [-m] SCRIPT ...",
        help="run a script and say which parameters are unused, and what ddp_hooks saves",
        description="Runs a training script as it is, watches its first steps, tries policies in some of them, and "
        "prints which parameters are unused, frozen or zero, what a step consists of, and what ddp_hooks saves.",
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
        "--only-watch",
        action="store_true",
        help="try no policies; by default, the last three quarters of the steps run with the hook",
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
    """Return the options; if there is no script, the parser exits."""
    return Options(
        tuple(script_of(parsed)),
        parsed.as_module,
        parsed.steps,
        parsed.only_watch,
        parsed.go_on,
        parsed.json,
        parsed.html,
        parsed.patience,
    )


def run(options: Options) -> int:
    """Run the script, then print and write the findings.

    Returns:
        The exit status: 0 if steps were watched, 2 if there was nothing to watch.

    Raises:
        BaseException: raised by the script.
    """
    session = _Session(options)
    script = ["-m", options.script[0]] if options.as_module else [options.script[0]]
    try:
        with follow(partial(_run_in_child, options), script, _repeat(options), _end_with_children) as children:
            _watch(session, lambda: run_script(options.script, as_module=options.as_module))
            return session.status() and _status_of(children)
    except BaseException as error:
        if explain_missing_launcher("doctor", error):
            return 2
        if isinstance(error, Exception) and not session.has_seen() and launched_rank() == 0:
            said = read_end(error).error
            text = f"ddp_hooks doctor: the script ended with an error before it had a module to watch: {said}"
            print(fill(text), file=sys.stderr, flush=True)
        raise


def _run_in_child(options: Options, call: Callable[[], object]) -> str:
    """Watch a call in a process that the script has started; return a word that says how it ended."""
    session = _Session(options)
    _watch(session, call)
    return session.way.value if session.has_seen() else _NOTHING


def _watch(session: _Session, call: Callable[[], object]) -> None:
    """Watch the modules that a call makes, and report.

    Raises:
        BaseException: raised by the call.
    """
    with watch_construction(session.watch), watch_first_forward(session.watch_sharded):
        try:
            call()
            session.way = Way.FINISHED
        except _EnoughSeen:
            session.way = Way.STOPPED
        except SystemExit as end:
            if end.code not in (None, 0):
                session.abandon(end)
                raise
            session.way = Way.FINISHED
        except BaseException as error:
            session.abandon(error)
            raise
    session.conclude()


def _end_with_children(children: Children) -> None:
    """Stop the script when the processes that it started were stopped and it has waited for all of them."""
    if children.are_gone() and Way.STOPPED.value in children.said():
        raise _EnoughSeen(0)


def _status_of(children: Children) -> int:
    """Return the exit status if this process made no module; say why if no other process made one either."""
    words = children.said()
    if any(word != _NOTHING for word in words):
        return 0
    if launched_rank() == 0:
        print(fill(f"ddp_hooks doctor: {_explain_nothing(children)}"), file=sys.stderr)
    return 2


def _explain_nothing(children: Children) -> str:
    if _exists("torch.distributed.fsdp", "FullyShardedDataParallel"):
        return (
            "the script uses FullyShardedDataParallel (FSDP1), which is not watched. The doctor watches "
            "DistributedDataParallel and fully_shard (FSDP2)."
        )
    text = "the script made no DistributedDataParallel module, and ran none with fully_shard"
    others = sorted(set(children.commands))
    if not others and _exists("torch.nn.parallel", "DataParallel"):
        return (
            f"{text}. It uses torch.nn.DataParallel, which averages nothing between processes: wrap the model in "
            "torch.nn.parallel.DistributedDataParallel instead."
        )
    if not others and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return (
            f"{text}. If its ranks are to train one model, wrap it: ddp = "
            "torch.nn.parallel.DistributedDataParallel(model), and call ddp(...) in training."
        )
    if not others:
        return f"{text}."
    return (
        f"{text}, in this process. It started other programs ({short_list(others)}): if the training runs there, start "
        "the script with the doctor there, as in `torchrun ... -m ddp_hooks doctor train.py`, or put `with "
        "ddp_hooks.diagnose(ddp) as diagnosis:` around its training loop."
    )


def _exists(module: str, kind: str) -> bool:
    """Say whether there is an object of a class, of a module that need not be imported."""
    found = getattr(sys.modules.get(module), kind, None)
    return found is not None and any(isinstance(one, found) for one in gc.get_objects())


def _repeat(options: Options) -> list[str]:
    """Return the arguments for Python that run a script under this command."""
    repeated = ["-m", "ddp_hooks", "doctor"]
    repeated += ["--steps", str(options.steps), "--patience", f"{options.patience_seconds:g}"]
    repeated += [name for name, given in (("--only-watch", options.only_watch), ("--continue", options.go_on)) if given]
    for name, path in (("--json", options.json), ("--html", options.html)):
        if path is not None:
            repeated += [name, str(path)]
    return repeated


@contextmanager
def _hold_off_termination() -> Iterator[None]:
    """Let SIGTERM wait until the block has ended: a launcher sends it to the others as soon as a rank is gone."""
    original = signal.getsignal(signal.SIGTERM)
    # What was not put there by Python cannot be put back by it.
    if original is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, original)
        if came:
            signal.raise_signal(signal.SIGTERM)


class _Session:
    """The modules of a run, each with its diagnosis.

    Attributes:
        way: how the script ends.
    """

    def __init__(self, options: Options) -> None:
        self.way = Way.GOES_ON
        self._options = options
        # By a name that every rank of the module's group has in common.
        self._open: dict[str, Diagnosis | ShardDiagnosis] = {}
        self._concluded: list[Findings] = []
        self._watchdog: Watchdog | None = None
        self._optimizers: OptimizerWatch | None = None
        self._error: BaseException | None = None
        self._has_reported = False
        self._rank = launched_rank()
        self._process = os.getpid()

    def watch(self, ddp: DistributedDataParallel) -> None:
        """Begin to watch a module that was just made. Every rank makes it."""
        if not self._watches():
            return
        diagnosis = Diagnosis(ddp, 0 if self._options.only_watch else self._options.steps).__enter__()
        self._rank = dist.get_rank()
        recorder = diagnosis.recorder
        assert recorder is not None  # it was entered
        self._add(",".join(map(str, dist.get_process_group_ranks(ddp.process_group))), diagnosis)
        recorder.on_step = self._make_counter()
        if self._optimizers is None:
            self._optimizers = OptimizerWatch(self._find_parameters)
        diagnosis.when_stopped(activity.remark(lambda: _remark(recorder)))

    def watch_sharded(self, module: nn.Module) -> None:
        """Begin to watch a module with fully_shard when its first forward pass begins. Every rank runs that."""
        if not self._watches():
            return
        self._rank = dist.get_rank()
        diagnosis = ShardDiagnosis(module, self._make_counter())
        try:
            diagnosis.__enter__()
        except RefusedError as error:
            if self._rank == 0:
                print(fill(f"ddp_hooks doctor: {error}"), file=sys.stderr, flush=True)
            return
        self._add("shards", diagnosis)

    def _add(self, kind: str, diagnosis: Diagnosis | ShardDiagnosis) -> None:
        number = sum(name.startswith(f"{kind}/") for name in self._open)
        self._open[f"{kind}/{number}"] = diagnosis
        if self._watchdog is None:
            world = dist.group.WORLD
            assert world is not None  # the module has found a process group
            self._watchdog = Watchdog(self, Noticeboard(f"run {next(_runs)}", world), self._options.patience_seconds)

    def _watches(self) -> bool:
        # Not if the run continues by itself, nor in a process that was forked from the watching one.
        goes_on = self._concluded and not self._open
        return not goes_on and os.getpid() == self._process

    def has_seen(self) -> bool:
        """Say whether there was a module to watch."""
        return bool(self._concluded)

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
        """Combine the observations of all ranks. Every rank calls it at the same point."""
        # While this rank waits for the others, it answers ranks that will not come.
        for diagnosis in self._open.values():
            if isinstance(diagnosis, ShardDiagnosis) or self._optimizers is None:
                self._concluded.append(diagnosis.conclude(End(self.way)))
            else:
                # They are told with one of the modules.
                outsiders = self._optimizers.read() if not self._concluded else None
                self._concluded.append(diagnosis.conclude(End(self.way), outsiders))
        self._stop_looking()
        if self._concluded and self._rank == 0 and not self._has_reported:
            self._has_reported = True
            self._report(self._concluded, sys.stdout)
        self._open = {}

    def abandon(self, error: BaseException) -> None:
        """Report what ranks saw before the error, both those that end with one and those that go on."""
        self._error = error
        if self._watchdog is not None and self._open:
            with _hold_off_termination():
                self._watchdog.explain()
        self._stop_looking()
        for diagnosis in self._open.values():
            self._concluded.append(diagnosis.abandon(error, ends_process=True))
        self._open = {}

    def status(self) -> int:
        """Return the exit status: 0 if there was a module."""
        return 0 if self._concluded else 2

    def _find_parameters(self) -> Iterator[torch.Tensor]:
        for diagnosis in list(self._open.values()):
            if isinstance(diagnosis, Diagnosis):
                yield from diagnosis.parameters()

    def _stop_looking(self) -> None:
        if self._optimizers is not None:
            self._optimizers.close()
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None

    # --- answers for the watchdog

    def seconds_stood(self) -> float:
        """Return how long ago a step of any module last ended. Seconds."""
        watched = self._watched()
        return time.monotonic() - max(one.last_progress for one in watched) if watched else 0.0

    def is_in_step(self) -> bool:
        """Say whether a step of some module has begun and not ended."""
        return any(one.is_unfinished() for one in self._watched())

    def make_word(self) -> dict[str, Any]:
        """Return the observations of this rank so far."""
        return dict(write_word(self._describe()))

    def tell(self, words: Mapping[int, dict[str, Any]]) -> None:
        """Print the findings from the observations of some ranks."""
        others = [read_word(word) for rank, word in words.items() if rank != self._rank]
        findings = [
            self._open[name].find_with([other[name] for other in others if name in other], own)
            for name, own in self._describe(has_asked=True).items()
        ]
        self._report(findings, sys.stderr)

    def _watched(self) -> list[Recorder | ShardDiagnosis]:
        every = list(self._open.values())
        return [
            watched
            for one in every
            if (watched := one if isinstance(one, ShardDiagnosis) else one.recorder) is not None
        ]

    def _describe(self, *, has_asked: bool = False) -> dict[str, Any]:
        if self._error is not None:
            end = read_end(self._error)
        else:
            end = read_place(activity.thread) if self.way is Way.GOES_ON else End(self.way)
        end = replace(end, has_asked=has_asked)
        return {name: diagnosis.describe(end) for name, diagnosis in list(self._open.items())}

    # --- telling

    def _report(self, findings: Sequence[Findings], stream: TextIO) -> None:
        findings = leave_error_to_its_module(findings)
        lines = list(describe_all(findings))
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
