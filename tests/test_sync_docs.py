"""Runs the code of docs/synchronising.md, block after block, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

from spawn import run_ranks

PAGE = Path(__file__).parent.parent / "docs" / "synchronising.md"


def blocks():
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


def _run_blocks(rank):
    namespace = {"rank": rank}
    for number, block in enumerate(blocks()):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), namespace)
    return len(blocks())


def test_the_code_on_the_page_runs():
    assert run_ranks(2, _run_blocks) == [9, 9]
