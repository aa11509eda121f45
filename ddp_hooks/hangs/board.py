"""Lets ranks leave messages for each other when a collective does not end, in the store of the default process group.

The process that holds the store may have ended or be stopped. A request then raises, or never returns. Requests
therefore run in a separate thread, and callers wait for an answer only for a limited time. They use a separate
connection, because another thread may be waiting for a key over the group's connection.
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

# After this time without an answer, the store counts as dead.
STORE_SECONDS = 3.0


class _Request:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.done = threading.Event()
        self.answer: Any = None


class Board:
    """A separate part of a store. Several threads may use it.

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
        """Ask a function before each request whether the store is lost, because torch logs a lot about a lost store."""
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
        """Write a message as JSON, unless a condition has become true by then; return whether it was written."""
        text = json.dumps(word)
        return self.ask(lambda store: not unless() and store.set(key, text) is None) is True

    def read(self, keys: list[str]) -> dict[str, Any] | None:
        """Return the messages that exist, by key; None if the store does not answer."""

        def read(store: Any) -> dict[str, bytes]:
            return {key: store.get(key) for key in keys if store.check([key])}

        found = self.ask(read)
        return None if found is None else {key: json.loads(text) for key, text in found.items()}

    def close(self, seconds: float = 0.0) -> None:
        """End the thread and the connection, and wait for that for a limited time; may be called again."""
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
