"""Where ranks leave word for each other when DDP itself has come to a halt: the store of the default process group.

Collectives are of no use then: one of them is what hangs. Nothing here waits without a bound.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_POLL_SECONDS = 0.1


class Noticeboard:
    """A part of the store that nobody else uses.

    Args:
        name: the same on every rank, and given only once in a run.
        rank: this rank in the world.
        ranks: how many there are.
    """

    def __init__(self, name: str, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        store: Any = distributed_c10d._get_default_store()
        # A connection of its own, because another thread may hold the store's while it waits for a key.
        with suppress(Exception):
            store = store.clone()
        self._store: Any = dist.PrefixStore(f"ddp_hooks/doctor/{name}", store)  # type: ignore[attr-defined]

    def someone_calls(self) -> bool:
        """Say whether a rank has left word."""
        return self._check("called")

    def leave(self, word: dict[str, Any]) -> None:
        """Leave this rank's word, and call the others."""
        with suppress(Exception):
            self._store.set(str(self.rank), json.dumps(word))
            self._store.set("called", "1")

    def read(self, seconds: float) -> dict[int, dict[str, Any]]:
        """Return the words of the ranks that leave one in time, by rank."""
        words: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + seconds
        while True:
            for rank in range(self.ranks):
                if rank not in words and self._check(str(rank)):
                    with suppress(Exception):
                        words[rank] = json.loads(self._store.get(str(rank)))
            if len(words) == self.ranks or time.monotonic() > deadline:
                return words
            time.sleep(_POLL_SECONDS)

    def note_printed(self) -> None:
        """Say that the words have been printed."""
        with suppress(Exception):
            self._store.set("printed", "1")

    def wait_until_printed(self, seconds: float) -> bool:
        """Say whether some rank has printed the words in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._check("printed"):
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _check(self, key: str) -> bool:
        # A store that went with its process raises, each kind another error.
        with suppress(Exception):
            return bool(self._store.check([key]))
        return False
