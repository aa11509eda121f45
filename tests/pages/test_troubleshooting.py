"""The texts that docs/troubleshooting.md quotes from torch and Lightning are theirs."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
FOLDER = Path(torch.__file__).parent


def quoted() -> list[str]:
    section = PAGE.read_text().split("## Errors of DDP, Lightning and FSDP2")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    texts = [text for row in rows for text in re.findall(r"`([^`]{20,})`", row)]
    assert len(texts) >= 15
    return texts


def squeeze(text: str) -> str:
    """Leave out what divides a text in a source or in a binary: quotes, spaces, line ends, and marks of formatting."""
    return re.sub(r"[^A-Za-z0-9=_,.']", "", text)


@pytest.mark.thorough
def test_quoted_texts_are_those_of_torch_and_lightning() -> None:
    names = ("nn/parallel/distributed", "multiprocessing/spawn", "utils/checkpoint", "distributed/distributed_c10d")
    sources = [FOLDER / f"{name}.py" for name in names]
    sources += (FOLDER / "distributed/fsdp/_fully_shard").glob("*.py")
    lightning = importlib.util.find_spec("lightning")
    if lightning is not None and lightning.origin is not None:
        sources.append(Path(lightning.origin).parent / "pytorch/strategies/ddp.py")
    known = [
        squeeze(re.sub(r"\\n|\"\s*\n\s*f?\"", "", source.read_text().replace("{self._state_name}", "FSDP")))
        for source in sources
    ]
    kept = squeeze("".join(map(chr, range(128)))).encode()
    dropped = bytes(byte for byte in range(256) if byte not in kept)
    known.append((FOLDER / "lib/libtorch_cpu.so").read_bytes().translate(None, dropped).decode())
    known.append(squeeze(os.strerror(errno.ECONNRESET)))
    for text in quoted():
        if "LightningModule" in text and lightning is None:
            continue
        assert any(squeeze(text) in one for one in known), (text, squeeze(text))
