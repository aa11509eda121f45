"""The doctor's watchdog by itself: a run that stands still ends, whoever is left to read why."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from ddp_hooks.doctor.watchdog import EXIT_CODE, Watchdog


class StandsStill:
    def __init__(self, is_in_step: bool = True, seconds: float = float("inf")) -> None:
        self._is_in_step, self._seconds = is_in_step, seconds

    def seconds_stood(self) -> float:
        return self._seconds

    def is_in_step(self) -> bool:
        return self._is_in_step

    def make_word(self) -> dict[str, Any]:
        return {"missing": "head.weight"}

    def tell(self, words: Mapping[int, dict[str, Any]]) -> None:
        print(words[0]["missing"], file=sys.stderr, flush=True)


class Alone:
    """A board that one rank reads."""

    rank, ranks = 0, 1
    printed = False

    def leave(self, word: dict[str, Any]) -> None:
        self.word = word

    def claim(self) -> bool | None:
        return True

    def read(self, seconds: float) -> dict[int, dict[str, Any]]:
        return {0: self.word}

    def note_printed(self) -> None:
        self.printed = True

    def close(self) -> None:
        pass


def watch(
    board: Alone, run: StandsStill | None = None, patience_seconds: float = 0.0, seconds: float = 10
) -> list[int]:
    """Return the exit codes with which the process would have ended."""
    codes: list[int] = []
    done = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        done.set()

    watchdog = Watchdog(run or StandsStill(), board, patience_seconds, end)  # type: ignore[arg-type]
    done.wait(seconds)
    watchdog.stop()  # waits for the thread
    return codes


class Called(Alone):
    """A board on which another rank has called, and has printed."""

    words = 0

    def someone_calls(self) -> bool:
        return True

    def leave(self, word: dict[str, Any]) -> None:
        self.words += 1
        self.word = word


@pytest.mark.parametrize("is_in_step", [True, False])
def test_answers_once_and_ends_only_within_a_step(is_in_step: bool) -> None:
    board = Called()
    codes = watch(board, StandsStill(is_in_step, 100.0), patience_seconds=1000, seconds=1.6)
    assert codes == ([EXIT_CODE] if is_in_step else [])
    assert board.words == 1
    assert not board.printed


class Deserted(Called):
    """A board on which another rank has called, and whose store is gone since."""

    def claim(self) -> bool | None:
        return None


def test_leaves_it_to_whoever_has_called(capsys: pytest.CaptureFixture[str]) -> None:
    run = StandsStill(False, 0.0)
    watchdog = Watchdog(run, Deserted(), 1000.0, lambda code: None)  # type: ignore[arg-type]
    watchdog.explain()
    assert "head.weight" in capsys.readouterr().err
    watchdog.stop()
    board = Deserted()
    watchdog = Watchdog(run, board, 1000.0, lambda code: None)  # type: ignore[arg-type]
    while not board.words:
        time.sleep(0.05)
    watchdog.explain()
    assert "head.weight" not in capsys.readouterr().err
    watchdog.stop()


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
