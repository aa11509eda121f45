"""Follows a script that starts its ranks itself, with multiprocessing or by running the script again.

``torch.multiprocessing.spawn``, and everything else that starts a ``multiprocessing.Process``, gets another target,
which watches the original target while it calls it. A subprocess that runs the same script again, as Lightning does, is
run under the same command.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# Processes that are not ranks: workers of data loaders, pools, managers.
_HELPERS = ("torch.utils.data", "multiprocessing", "concurrent", "joblib", "datasets")


@dataclass(frozen=True, slots=True)
class _Watched:
    """The target of a watched process; it is pickled.

    Attributes:
        target: the original target.
        run: watches a function while it calls it, and returns a message about how it ended.
        words: the file to which a process writes that message.
    """

    target: Callable[..., object]
    run: Callable[[Callable[[], object]], str]
    words: Path

    def __call__(self, *args: Any, **options: Any) -> None:
        word = self.run(partial(self.target, *args, **options))
        with suppress(OSError), self.words.open("a") as file:
            file.write(f"{word}\n")


@dataclass(slots=True)
class Children:
    """The processes that were followed.

    Attributes:
        commands: the other programs that the script has started.
    """

    words: Path
    commands: list[str] = field(default_factory=list)
    processes: list[BaseProcess] = field(default_factory=list)

    def said(self) -> list[str]:
        """Return the messages that processes have written."""
        with suppress(OSError):
            return self.words.read_text().split()
        return []

    def are_gone(self) -> bool:
        """Return whether there were processes and all of them have ended."""
        return bool(self.processes) and not any(map(_is_alive, self.processes))


@contextmanager
def follow(
    run: Callable[[Callable[[], object]], str],
    script: Sequence[str],
    insertion: Sequence[str],
    when_joined: Callable[[Children], None],
) -> Iterator[Children]:
    """Follow the processes that a script starts within this block.

    Args:
        run: as of a process that was started; can be pickled.
        script: what Python was given to run it: a file, or ``-m`` and a module.
        insertion: what comes before that where it is started again.
        when_joined: called by the process that has started others when it has waited for one of them; may raise.
    """
    with tempfile.TemporaryDirectory(prefix="ddp_hooks_doctor_") as folder:
        children = Children(Path(folder, "words"))
        start, join, begin = BaseProcess.start, BaseProcess.join, subprocess.Popen.__init__
        owner = os.getpid()
        # The script may change the current folder.
        started = list(script) if script[0] == "-m" else [os.path.realpath(script[0])]

        def start_watched(self: BaseProcess) -> None:
            target = getattr(self, "_target", None)
            if target is not None and not _is_helper(target):
                self._target = _Watched(target, run, children.words)  # type: ignore[attr-defined]
                children.processes.append(self)
            start(self)

        def join_watched(self: BaseProcess, timeout: float | None = None) -> None:
            join(self, timeout)
            if os.getpid() == owner and any(self is one for one in children.processes):
                when_joined(children)

        def begin_watched(self: Any, args: Any, *more: Any, **options: Any) -> None:
            if isinstance(args, (list, tuple)) and args:
                command = [os.fsdecode(one) for one in args]
                if command[0] == sys.executable and _runs(command[1:], started):
                    args = [command[0], *insertion, *command[1:]]
                else:
                    children.commands.append(os.path.basename(command[0]))
            begin(self, args, *more, **options)

        BaseProcess.start, BaseProcess.join = start_watched, join_watched  # type: ignore[method-assign]
        subprocess.Popen.__init__ = begin_watched  # type: ignore[method-assign]
        try:
            yield children
        finally:
            BaseProcess.start, BaseProcess.join = start, join  # type: ignore[method-assign]
            subprocess.Popen.__init__ = begin  # type: ignore[method-assign]


def _is_helper(target: object) -> bool:
    name = getattr(target, "__module__", None) or type(target).__module__
    return name.split(".")[0] in _HELPERS or any(name.startswith(f"{one}.") for one in _HELPERS)


def _is_alive(process: BaseProcess) -> bool:
    try:
        return process.is_alive()
    except ValueError:
        return False  # the script has closed it


def _runs(arguments: Sequence[str], script: Sequence[str]) -> bool:
    if script[0] == "-m":
        return list(arguments[: len(script)]) == list(script)
    return bool(arguments) and os.path.realpath(arguments[0]) == script[0]
