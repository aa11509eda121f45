"""Argument parsing that several commands share."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from ddp_hooks.wording import did_you_mean, fill

# Environment variables that torchrun, Slurm, Open MPI and other MPIs set for the processes that they start.
_GIVEN_BY_LAUNCHERS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
# Environment variables that torchrun sets.
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class CommandParser(argparse.ArgumentParser):
    """A parser that wraps its errors to the terminal and suggests options or commands that may have been meant."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and end the process with status 2."""
        self.print_usage(sys.stderr)
        width = shutil.get_terminal_size().columns - 2  # as argparse does for its help
        message = f"{self.prog}: error: {message}{self._suggest(message)}"
        text = textwrap.fill(message, width, break_long_words=False, break_on_hyphens=False)
        self.exit(2, f"{text}\n")

    def _suggest(self, message: str) -> str:
        choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if choice is not None:
            return did_you_mean(choice[1], re.findall(r"\w+", choice[2]))
        option = re.match(r"unrecognized arguments: (\S+)", message)
        return "" if option is None else did_you_mean(option[1], self._known_options())

    def _known_options(self) -> list[str]:
        commands = [
            command
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
            for command in action.choices.values()
        ]
        return [option for parser in (self, *commands) for option in parser._option_string_actions]


def parse_positive(text: str) -> int:
    """Read a positive integer.

    Raises:
        argparse.ArgumentTypeError: the text is something else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, received {text!r}")
    return int(text)


def parse_new_file(text: str) -> Path:
    """Read the path of an output file, and check now, not after hours of training, that it can be written.

    Raises:
        argparse.ArgumentTypeError: it cannot be written; the message says why.
    """
    path = Path(text)
    folder = path.parent
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file to write, received the folder {text!r}")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, received {text!r}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a writable file, received {text!r}")
    # The script may change the current folder.
    return path.absolute()


def add_script_to(parser: argparse.ArgumentParser) -> None:
    """Add a script and its arguments to a parser, after all other options; see :func:`script_of`."""
    parser.add_argument("-m", dest="as_module", action="store_true", help="SCRIPT is a module name, as for python -m")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="the script to run and its arguments"
    )
    parser.set_defaults(refuse=parser.error)


def script_of(parsed: argparse.Namespace) -> list[str]:
    """Return the script and its arguments; if there are none, exit with an error."""
    script: list[str] = list(parsed.script)
    if script[:1] == ["--"]:
        del script[0]
    if not script:
        parsed.refuse("expected a script to run, or -m and a module, received neither")
    return script


def explain_missing_launcher(command: str, error: BaseException) -> bool:
    """Explain how to start a script that failed because no launcher started it as one of several ranks.

    Returns:
        Whether that was the reason, and was printed.
    """
    started = any(name in os.environ for name in _GIVEN_BY_LAUNCHERS) or dist.is_initialized()
    if started or not _misses_a_rank(error):
        return False
    original = sys.orig_argv
    begins = [i for i, pair in enumerate(itertools.pairwise(original)) if pair == ("-m", "ddp_hooks")]
    line = shlex.join(original[begins[0] :]) if begins else f"-m ddp_hooks {command} SCRIPT ..."
    text = (
        f"ddp_hooks {command}: the script expects to be one of several ranks, but no launcher started it. Start it "
        f"with torchrun, for example: torchrun --nproc-per-node 2 {line} (it raised {type(error).__name__}: {error})"
    )
    print(fill(text), file=sys.stderr)
    return True


def _misses_a_rank(error: BaseException) -> bool:
    if isinstance(error, KeyError):
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        # Only if os.environ raised it, and no other dictionary.
        return trace is not None and trace.tb_frame.f_globals.get("__name__") == "os" and error.args[0] in _LAUNCHED
    # The message of init_process_group().
    found = re.search(r"environment variable (\w+) expected, but not set", str(error))
    return isinstance(error, ValueError) and found is not None and found[1] in _LAUNCHED
