"""What the command line's parsers have in common: how they refuse, and options of several commands."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are as wide as its help: the terminal."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and end the process with status 2."""
        self.print_usage(sys.stderr)
        width = shutil.get_terminal_size().columns - 2  # as argparse does for its help
        text = textwrap.fill(f"{self.prog}: error: {message}", width, break_long_words=False, break_on_hyphens=False)
        self.exit(2, f"{text}\n")


def parse_positive(text: str) -> int:
    """Read a number from 1 on.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, received {text!r}")
    return int(text)


def parse_new_file(text: str) -> Path:
    """Read the path of a file that can be written: now, and not after hours of training. It may exist.

    Raises:
        argparse.ArgumentTypeError: it cannot be written; says why.
    """
    path = Path(text)
    folder = path.parent
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file to write, received the folder {text!r}")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, received {text!r}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file that may be written, received {text!r}")
    # The script may change the current folder.
    return path.absolute()


def add_script_to(parser: argparse.ArgumentParser) -> None:
    """Let a parser take a script and the script's own arguments, after all options of ours; see :func:`script_of`."""
    parser.add_argument("-m", dest="as_module", action="store_true", help="SCRIPT is a module's name, as for python -m")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="what to run, and its arguments")
    parser.set_defaults(refuse=parser.error)


def script_of(parsed: argparse.Namespace) -> list[str]:
    """Return the script and its arguments; end the process with a sentence if there is none."""
    script: list[str] = list(parsed.script)
    if script[:1] == ["--"]:
        del script[0]
    if not script:
        parsed.refuse("expected a script to run, or -m and a module, received neither")
    return script
