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
    printed = False

    def leave(self, word: dict[str, Any]) -> None:
        self.word = word

    def read(self, seconds: float) -> dict[int, dict[str, Any]]:
        return {0: self.word}

    def note_printed(self) -> None:
        self.printed = True

    def close(self) -> None:
        pass


def watch(board: Alone) -> list[int]:
    """Return the exit codes with which the process would have ended."""
    codes: list[int] = []
    done = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        done.set()

    watchdog = Watchdog(StandsStill(), board, 0.0, end)  # type: ignore[arg-type]
    done.wait(10)
    watchdog.stop()  # waits for the thread
    return codes


def test_says_what_is_missing_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    board = Alone()
    assert watch(board) == [EXIT_CODE]
    assert "head.weight" in capsys.readouterr().err
    assert board.printed


@pytest.mark.parametrize("streams", [("stderr",), ("stdout",), ("stderr", "stdout")])
def test_ends_though_nobody_reads(streams: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an error of its own, and another rank may say it then."""
    raised: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda details: raised.append(details.exc_value))
    reading, writing = os.pipe()
    os.close(reading)
    broken = os.fdopen(writing, "w")
    broken.write("something that was not flushed yet")
    for stream in streams:
        monkeypatch.setattr(sys, stream, broken)
    board = Alone()
    assert watch(board) == [EXIT_CODE]
    monkeypatch.undo()
    with pytest.raises(BrokenPipeError):
        broken.close()
    assert raised == []
    assert board.printed == ("stderr" not in streams)


def test_ends_though_stderr_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda details: raised.append(details.exc_value))
    with open(os.devnull, "w") as closed:
        pass
    monkeypatch.setattr(sys, "stderr", closed)
    assert watch(Alone()) == [EXIT_CODE]
    monkeypatch.undo()
    assert raised == []
