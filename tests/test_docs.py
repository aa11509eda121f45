"""Runs the code of the documentation, block after block, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from spawn import run_ranks
from trainers import run_launched

DOCS = Path(__file__).parent.parent / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def run_blocks(rank: int, page: str) -> int:
    namespace: dict[str, Any] = {"rank": rank}
    for number, block in enumerate(blocks(page)):
        exec(compile(block, f"{page}, block {number}", "exec", dont_inherit=True), namespace)
    return len(blocks(page))


# The counts guard against a fence that the pattern does not see.
@pytest.mark.parametrize(
    ("page", "count"),
    [("synchronising.md", 10), ("freezing.md", 9), ("anywhere.md", 4), ("doctor.md", 2), ("averages.md", 3)],
)
def test_the_code_on_the_page_runs(page: str, count: int) -> None:
    assert run_ranks(2, run_blocks, page) == [count, count]


def test_the_code_for_trainers_runs() -> None:
    assert run_launched(run_blocks, "trainers.md") == [9, 9]
