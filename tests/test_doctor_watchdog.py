"""The doctor's watchdog by itself: a run that stands still ends, whoever is left to read why."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import pytest

from ddp_hooks.doctor.watchdog import EXIT_CODE, Watchdog


class StandsStill:
    last_progress = float("-inf")
    finished = 0

    def missing(self) -> list[str]:
        return ["head.weight"]


class Alone:
    """A board that one rank reads."""

    rank, ranks = 0, 1

    def leave(self, word: dict[str, Any]) -> None:
        self.word = word

    def read(self, seconds: float) -> dict[int, dict[str, Any]]:
        return {0: self.word}

    def note_printed(self) -> None:
        pass


def watch() -> list[int]:
    """Return the exit codes with which the process would have ended."""
    codes: list[int] = []
    done = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        done.set()

    Watchdog(StandsStill(), Alone(), 0.0, end)  # type: ignore[arg-type]
    done.wait(10)
    return codes


def test_says_what_is_missing_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert watch() == [EXIT_CODE]
    assert "head.weight" in capsys.readouterr().err


# The thread goes on, as no process's would.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_ends_though_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    broken = os.fdopen(writing, "w")
    monkeypatch.setattr(sys, "stderr", broken)
    assert watch() == [EXIT_CODE]
    monkeypatch.undo()
    with pytest.raises(BrokenPipeError):
        broken.close()
