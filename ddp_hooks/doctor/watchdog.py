"""Reports on a run that hangs or dies: ranks leave messages about what they have seen, and one of them prints a report.

It looks at the run in the thread of :mod:`ddp_hooks.hangs`, which itself finds the ranks that others wait for.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from ..hangs import watcher
from .noticeboard import Noticeboard

# How long ranks wait for each other's word, and for one of them to print them.
WORD_SECONDS = 5.0
_PRINT_SECONDS = 2 * WORD_SECONDS
# So long a rank that has answered another one's call may go on waiting in a step, which nobody will end.
_LAST_SECONDS = 10.0
EXIT_CODE = 1
# What writing raises when the pipe to a launcher that was killed is broken, or the program has closed the stream.
_NOBODY_READS = (OSError, ValueError)


class Run(Protocol):
    """What is watched."""

    def seconds_stood(self) -> float:
        """Return the seconds since the last step ended."""

    def is_in_step(self) -> bool:
        """Return whether a step has begun and not ended."""

    def make_word(self) -> dict[str, Any]:
        """Return what this rank has seen, as JSON takes it."""

    def tell(self, words: Mapping[int, dict[str, Any]]) -> None:
        """Print what follows from the words of some ranks, by rank."""


class Watchdog:
    """Looks at the run beside it.

    Args:
        run: what is watched.
        board: where ranks leave word.
        patience_seconds: how long a run may stand still.
        end: ends the process with a code; another one in tests.
    """

    def __init__(
        self,
        run: Run,
        board: Noticeboard,
        patience_seconds: float,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._run = run
        self._board = board
        self._patience = patience_seconds
        self._end = end
        self._has_answered = False
        self._claimed = threading.Lock()
        self._looks = threading.RLock()
        self._stop_listening = watcher.listen(self._look)

    def stop(self) -> None:
        """Stop looking; may be called again, and from within a look."""
        self._stop_listening()
        # What has begun to explain ends the process.
        if self._looks.acquire(timeout=_PRINT_SECONDS):
            self._looks.release()
        self._board.close()

    def explain(self) -> None:
        """Leave word, and have one rank print what all of them have left; returns when that is done."""
        if not self._claimed.acquire(blocking=False):
            # The other thread of this process is at it.
            self._board.wait_until_printed(_PRINT_SECONDS)
            return
        own = self._run.make_word()
        self._board.leave(own)
        is_first = self._board.claim()
        if is_first is None and self._has_answered:
            return  # whoever has called has this rank's word, and has gone with the store when it had printed
        if is_first is False and self._board.wait_until_printed(_PRINT_SECONDS):
            return
        words = self._board.read(WORD_SECONDS)
        words[self._board.rank] = own
        try:
            self._run.tell(words)
        except _NOBODY_READS:
            return  # the others wait for this rank in vain, and say it themselves
        self._board.note_printed()

    def _look(self) -> None:
        stood = self._run.seconds_stood()
        if stood > self._patience:
            with self._looks:
                try:
                    self._stop_listening()
                    self.explain()
                    with suppress(*_NOBODY_READS):
                        sys.stdout.flush()
                finally:
                    self._end(EXIT_CODE)
        elif self._has_answered:
            # Whoever has called is gone, and with it what a step waits for. Nothing else is ended.
            if stood > _LAST_SECONDS and self._run.is_in_step():
                self._end(EXIT_CODE)
        elif self._board.someone_calls():
            self._has_answered = True
            self._board.leave(self._run.make_word())
