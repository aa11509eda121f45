"""Where ranks leave word for each other when a collective does not end: the store of the default process group.

The store may have gone with the process that held it, or stand with it: a request then raises, or never comes back. So
requests are made by a thread of their own, over a connection of their own, because the group's may be in use: another
thread may wait for a key over it. Who asks waits for an answer so long and no longer.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

from .forks import apart_from_forks

T = TypeVar("T")

# A store that has not answered by then is taken for dead.
STORE_SECONDS = 3.0


class _Request:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.done = threading.Event()
        self.answer: Any = None


class Board:
    """A part of a store that nobody else uses. May be used by several threads.

    Args:
        store: the store; whoever reads and writes the same words has the same one.
        name: of the part.
    """

    def __init__(self, store: Any, name: str) -> None:
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._stuck: _Request | None = None
        self._is_lost: Callable[[], bool] = lambda: False
        self._broken = threading.Event()
        thread = threading.Thread(
            target=_serve,
            args=(store, f"ddp_hooks/{name}", self._requests, self._broken),
            name="ddp_hooks store",
            daemon=True,
        )
        thread.start()
        self._thread = thread

    def ask_before(self, is_lost: Callable[[], bool]) -> None:
        """Ask a function, before each request, whether the store has gone: torch writes much about one that has."""
        self._is_lost = is_lost

    def ask(self, function: Callable[[Any], T], seconds: float = STORE_SECONDS) -> T | None:
        """Call a function with the store.

        Args:
            function: what it raises is no answer.
            seconds: how long to wait for it.

        Returns:
            What it returned; None if the store does not answer.
        """
        if self._broken.is_set() or (self._stuck is not None and not self._stuck.done.is_set()):
            return None
        if self._is_lost():
            self._broken.set()
            return None
        request = _Request(function)
        self._requests.put(request)
        if not request.done.wait(seconds):
            self._stuck = request
            return None
        answer: T | None = request.answer
        return answer

    def count(self, key: str, more: int = 0) -> int | None:
        """Add to a counter and return it; None if the store does not answer."""
        return self.ask(lambda store: int(store.add(key, more)))

    def leave(self, key: str, word: Any, *, unless: Callable[[], bool] = lambda: False) -> bool:
        """Leave a word under a key, as JSON, unless something has come to be so by then; return whether it is there."""
        text = json.dumps(word)
        return self.ask(lambda store: not unless() and store.set(key, text) is None) is True

    def read(self, keys: list[str]) -> dict[str, Any] | None:
        """Return the words that are there, by key; None if the store does not answer."""

        def read(store: Any) -> dict[str, bytes]:
            return {key: store.get(key) for key in keys if store.check([key])}

        found = self.ask(read)
        return None if found is None else {key: json.loads(text) for key, text in found.items()}

    def close(self, seconds: float = 0.0) -> None:
        """Let the thread and the connection go, and wait for that so long; may be called again."""
        self._requests.put(None)
        self._thread.join(seconds)


def _serve(store: Any, prefix: str, requests: queue.SimpleQueue[_Request | None], broken: threading.Event) -> None:
    with suppress(Exception), apart_from_forks():
        store = store.clone()
    part: Any = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    while (request := requests.get()) is not None:
        try:
            with apart_from_forks():
                request.answer = request.function(part)
        except dist.DistError:
            # Its connection is lost, and torch would write so with every other request.
            broken.set()
        except Exception:
            pass
        request.done.set()
        del request
