"""Runs somebody's script in this process as if it had been started itself.

What that means is what a script can see of how it was started: ``sys.argv``, ``sys.path[0]``, the module ``__main__``
(in which pickle and multiprocessing look for its classes), the exit status and the traceback of what it raises.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import runpy
import sys
import zipfile
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any


def run_script(arguments: Sequence[str], *, as_module: bool) -> None:
    """Run a script as ``python SCRIPT ARGUMENTS`` would, or a module as ``python -m MODULE ARGUMENTS`` would.

    It is the last thing that a process does: ``sys.argv``, ``sys.path`` and ``__main__`` remain the script's, because
    what it leaves behind, threads and exit handlers for instance, belongs to it.

    Args:
        arguments: the script (a file, or a folder or archive with a ``__main__.py``) or the module's name, and then the
            script's own arguments.
        as_module: whether a module is named.

    Raises:
        ValueError: nothing is named.
        SystemExit: the script asked for it, or cannot be opened or found, which is told as Python tells it.
        BaseException: what the script raised. If nobody catches it, ``sys.excepthook`` shows it without the frames that
            led to the script.
    """
    if not arguments:
        raise ValueError("run_script: expected a script or a module to run, received nothing")
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    named = os.fspath(arguments[0])
    sys.modules["__main__"] = main
    try:
        if as_module:
            sys.argv = ["-m", *arguments[1:]]
            _run_main_module(named, alter_argv=True)
        else:
            sys.argv = [named, *arguments[1:]]
            if os.path.isdir(named) or zipfile.is_zipfile(named):
                _put_first_in_path(os.path.abspath(named))
                _run_main_module("__main__", alter_argv=False)
            else:
                _run_file(named, main)
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook = functools.partial(_show, sys.excepthook, main.__dict__)
        raise


def _run_main_module(name: str, *, alter_argv: bool) -> None:
    # What `python -m` itself calls.
    runpy._run_module_as_main(name, alter_argv=alter_argv)  # type: ignore[attr-defined]


def _run_file(named: str, main: ModuleType) -> None:
    path = os.path.abspath(named)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        python = sys.orig_argv[0] if sys.orig_argv else "python"
        print(f"{python}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    _put_first_in_path(os.path.dirname(os.path.realpath(path)))
    main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _put_first_in_path(folder: str) -> None:
    # Python has put there what it found this package's command with: the current folder.
    if sys.flags.safe_path:
        return
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    sys.path.insert(0, folder)


def _show(
    show: Callable[[type[BaseException], BaseException, TracebackType | None], Any],
    namespace: dict[str, Any],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """Show an error from the script's first frame on."""
    first = traceback
    while first is not None and first.tb_frame.f_globals is not namespace:
        first = first.tb_next
    if first is None and not isinstance(error, SyntaxError):
        first = traceback
    # The default hook shows what hangs on the error, whatever it is handed.
    error.__traceback__ = first
    show(kind, error, first)
