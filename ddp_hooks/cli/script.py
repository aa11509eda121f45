"""Runs a script in this process as if Python had been started with it.

A script sees no difference in ``sys.argv``, ``sys.path[0]``, the module ``__main__`` (in which pickle and
multiprocessing look for its classes), its exit status and the tracebacks of its exceptions.
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

    Call it last in a process: ``sys.argv``, ``sys.path`` and ``__main__`` remain the script's, because its threads and
    exit handlers may still use them.

    Args:
        arguments: the script (a file, or a folder or archive with a ``__main__.py``) or the module's name, and then the
            script's own arguments.
        as_module: whether the first argument is a module's name.

    Raises:
        ValueError: there is no argument.
        SystemExit: the script raised it, or cannot be found or opened, which is reported as Python does.
        BaseException: raised by the script. If nobody catches it, ``sys.excepthook`` shows it without the frames that
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
    # `python -m` calls the same function.
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
    # Python has put the current folder there, to find this package's command.
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
    """Show an error, beginning with the script's first frame."""
    first = traceback
    while first is not None and first.tb_frame.f_globals is not namespace:
        first = first.tb_next
    if first is None and not isinstance(error, SyntaxError):
        first = traceback
    # The default hook shows the traceback of the error itself, not the one that it is given.
    error.__traceback__ = first
    show(kind, error, first)
