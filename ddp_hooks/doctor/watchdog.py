"""Ends a run that stands still or dies because ranks used different parameters, and names these before.

It looks at the run in the thread of :mod:`ddp_hooks.hangs`, which tells by itself which ranks others wait for.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ..hangs import watcher
from ..hangs.activity import activity
from ..wording import short_list
from .noticeboard import Noticeboard
from .recorder import Recorder
from .text import describe_unfinished

# How long ranks wait for each other's word, and for rank 0 to print them.
WORD_SECONDS = 5.0
_PRINT_SECONDS = 2 * WORD_SECONDS
EXIT_CODE = 1
# What writing raises when the pipe to a launcher that was killed is broken, or the program has closed the stream.
_NOBODY_READS = (OSError, ValueError)


class Watchdog:
    """Looks at the run beside it.

    Args:
        recorder: what this rank writes down.
        board: where ranks leave word.
        patience_seconds: how long a run may stand still.
        end: ends the process with a code; another one in tests.
    """

    def __init__(
        self,
        recorder: Recorder,
        board: Noticeboard,
        patience_seconds: float,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._recorder = recorder
        self._board = board
        self._patience = patience_seconds
        self._end = end
        self._claimed = threading.Lock()
        self._looks = threading.RLock()
        self._ends = [activity.remark(self._remark), watcher.listen(self._look)]

    def stop(self) -> None:
        """Look no more; may be called again, and from within a look."""
        self._stop_looking()
        # What has begun to explain ends the process.
        if self._looks.acquire(timeout=_PRINT_SECONDS):
            self._looks.release()
        self._board.close()

    def _stop_looking(self) -> None:
        for end in self._ends:
            end()

    def explain(self, reason: str) -> None:
        """Put together what every rank misses, and print it on rank 0, or here if rank 0 does not.

        Args:
            reason: what has happened to this rank, in a few words.
        """
        if not self._claimed.acquire(blocking=False):
            # The other thread of this process is at it.
            self._board.wait_until_printed(_PRINT_SECONDS)
            return
        self._stop_looking()
        own = {"reason": reason, "missing": self._recorder.missing(), "steps": self._recorder.finished}
        self._board.leave(own)
        if self._board.rank != 0 and self._board.wait_until_printed(_PRINT_SECONDS):
            return
        words = self._board.read(WORD_SECONDS) or {self._board.rank: own}
        lines = [describe_unfinished({rank: word["missing"] for rank, word in words.items()})]
        lines += [
            f"  rank {rank}: {word['reason']}, after {word['steps']} finished steps" for rank, word in words.items()
        ]
        silent = [str(rank) for rank in range(self._board.ranks) if rank not in words]
        if silent:
            lines.append(f"  no word from rank {', '.join(silent)}: ended, or busy elsewhere")
        try:
            print("\n".join(lines), file=sys.stderr, flush=True)
        except _NOBODY_READS:
            return  # the others wait for rank 0 in vain, and say it themselves
        self._board.note_printed()

    def _remark(self) -> list[str]:
        missing = self._recorder.missing() if self._recorder.is_unfinished() else []
        return [f"no gradient yet of {short_list(missing)}"] if missing else []

    def _look(self) -> None:
        stood = time.monotonic() - self._recorder.last_progress
        if stood > self._patience:
            reason = f"no step has ended for {stood:.0f} s"
        elif self._board.someone_calls():
            reason = f"waiting, for {stood:.0f} s"
        else:
            return
        with self._looks:
            try:
                self.explain(reason)
                with suppress(*_NOBODY_READS):
                    sys.stdout.flush()
            finally:
                self._end(EXIT_CODE)
