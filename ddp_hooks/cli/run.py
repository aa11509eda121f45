"""``python -m ddp_hooks run`` runs a script with the hook, without changing it."""

from __future__ import annotations

import argparse
from typing import Any

from ddp_hooks.cli import run_report
from ddp_hooks.cli.script import run_script
from ddp_hooks.hangs import watcher
from ddp_hooks.policies import PRESETS, parse_settings, resolve
from ddp_hooks.serving.ddp_methods import watch_construction_from_its_beginning

from .options import add_script_to, explain_missing_launcher, parse_new_file, script_of


def add_to(commands: Any) -> None:
    """Describe the command to an argument parser's ``add_subparsers()``."""
    parser = commands.add_parser(
        "run",
        usage="torchrun ... -m ddp_hooks run [--policy NAME] [--set NAME=VALUE]\n           [--report FILE] [--quiet] "
        "[--watch] [-m] SCRIPT ...",
        help="run a training script with ddp_hooks enabled, and print what was saved",
        description="Calls ddp_hooks.enable(), then runs a training script as if it had been started directly: each "
        "DistributedDataParallel module that it makes gets the hook. At the end, rank 0 prints the statistics to "
        "standard error.",
        epilog="Start every rank with it, as in `torchrun --nproc-per-node 2 -m ddp_hooks run train.py --lr 0.1`.",
    )
    parser.add_argument("--policy", choices=sorted(PRESETS), default="auto", help="what to skip (default: auto)")
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        metavar="NAME=VALUE",
        default=[],
        help="set a field of the policy or of its tuning, as in `--set rebuild_after=100`; may be repeated",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="register no hook: train with plain DDP, and only name the ranks that others wait for",
    )
    parser.add_argument("--quiet", action="store_true", help="print no statistics")
    parser.add_argument("--report", type=parse_new_file, metavar="FILE", help="write the statistics to FILE, as JSON")
    add_script_to(parser)
    parser.set_defaults(execute=_execute)


def _execute(parsed: argparse.Namespace) -> int:
    script = script_of(parsed)
    try:
        policy = resolve(parsed.policy, parse_settings(parsed.settings))
    except (TypeError, ValueError) as error:
        parsed.refuse(f"argument --set: {error}")
    watcher.begin(policy.tuning.report_hang_after)
    if parsed.watch:
        return _watch(script, as_module=parsed.as_module)
    report = run_report.RunReport(policy, script)
    report.start()
    failed = False
    try:
        run_script(script, as_module=parsed.as_module)
    except BaseException as error:
        failed = not (isinstance(error, SystemExit) and error.code in (None, 0))
        if explain_missing_launcher("run", error):
            return 2
        raise
    finally:
        # Also if the script raises, or leaves by sys.exit().
        report.end(failed=failed, quiet=parsed.quiet, file=parsed.report)
    return 0


def _watch(script: list[str], *, as_module: bool) -> int:
    with watch_construction_from_its_beginning(watcher.watch_construction):
        try:
            run_script(script, as_module=as_module)
        except BaseException as error:
            if explain_missing_launcher("run", error):
                return 2
            raise
    return 0
