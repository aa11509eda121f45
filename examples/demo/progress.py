"""A progress bar: drawn in place on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from typing import TextIO

WIDTH = 30
# In a log a line for every step would bury the rest.
LINES_IN_A_LOG = 8


class ProgressBar:
    """Counts ``total`` steps on ``stream``; knows by itself whether a person watches."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total = total
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._done = 0
        self._title = ""
        self._start = time.monotonic()
        self._first_step = self._start
        self._length = 0

    def begin(self, title: str) -> None:
        """Show ``title`` before anything is done."""
        self._title = title
        self._draw(always=True)

    def advance(self, title: str) -> None:
        """Count one step; a new ``title`` is always shown."""
        is_new = title != self._title
        self._title = title
        self._done += 1
        if self._done == 1:
            self._first_step = time.monotonic()
        stride = max(1, self._total // LINES_IN_A_LOG)
        self._draw(always=is_new or self._done % stride == 0 or self._done == self._total)

    def close(self) -> None:
        """End the line, so that what follows starts on its own."""
        if self._is_terminal:
            self._stream.write("\n")
            self._stream.flush()

    def _draw(self, always: bool) -> None:
        now = time.monotonic()
        done = self._done
        text = f"{done:3d} of {self._total} steps"
        # The first step pays for starting the ranks and says nothing about the others.
        if 1 < done < self._total:
            left = (now - self._first_step) / (done - 1) * (self._total - done)
            text += f", about {left:.0f} s left"
        else:
            text += f", {now - self._start:.0f} s"
        text += f"  {self._title}"
        if self._is_terminal:
            filled = WIDTH * done // self._total
            line = f"[{'#' * filled}{'.' * (WIDTH - filled)}] {text}"
            self._stream.write("\r" + line.ljust(self._length))
            self._length = len(line)
        elif always:
            self._stream.write(text.strip() + "\n")
        self._stream.flush()
