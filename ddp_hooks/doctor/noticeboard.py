"""Lets ranks leave messages for each other when DDP itself hangs, and wait for the messages of the others.

Collectives cannot be used then, because one of them is what hangs. Nothing here waits forever.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..hangs.board import Board

_POLL_SECONDS = 0.1


class Noticeboard:
    """A separate part of the default process group's store.

    Args:
        name: the same on every rank of the group, and given only once for it in a run.
        group: whose ranks leave word.
    """

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        # Another group may have a module of that name as well.
        of_group = hashlib.blake2b(repr(dist.get_process_group_ranks(group)).encode(), digest_size=8).hexdigest()
        self._board = Board(distributed_c10d._get_default_store(), f"doctor/{of_group}/{name}")

    def someone_calls(self) -> bool:
        """Return whether a rank has left a message."""
        return bool(self._board.read(["called"]))

    def leave(self, word: dict[str, Any]) -> None:
        """Leave this rank's word, and call the others."""
        self._board.leave(str(self.rank), word)
        self._board.leave("called", 1)

    def read(self, seconds: float) -> dict[int, dict[str, Any]]:
        """Return the messages of the ranks that leave one in time, by rank."""
        words: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + seconds
        while True:
            missing = [str(rank) for rank in range(self.ranks) if rank not in words]
            words |= {int(rank): word for rank, word in (self._board.read(missing) or {}).items()}
            if len(words) == self.ranks or time.monotonic() > deadline:
                return words
            time.sleep(_POLL_SECONDS)

    def claim(self) -> bool | None:
        """Say whether this rank is the first one that claims to print the words; None if nobody can be asked."""
        claims = self._board.count("claims", 1)
        return None if claims is None else claims == 1

    def note_printed(self) -> None:
        """Record that the messages have been printed."""
        self._board.leave("printed", 1)

    def wait_until_printed(self, seconds: float) -> bool:
        """Say whether some rank has printed the words in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._board.read(["printed"]):
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def close(self) -> None:
        """Release the store; may be called again."""
        self._board.close()
