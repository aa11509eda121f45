"""Data for the examples with text: lines of Python's own standard library, and the module that each comes from."""

from __future__ import annotations

import importlib
import inspect
import itertools
import random
import re
import zlib

import torch
from torch import Tensor

MODULES = (
    "argparse",
    "calendar",
    "difflib",
    "doctest",
    "inspect",
    "ipaddress",
    "optparse",
    "pickle",
    "smtplib",
    "statistics",
    "subprocess",
    "tarfile",
)


def tokenize(line: str, rows: int, length: int) -> list[int]:
    """Return each word's row of a table, from 1 on, padded with 0; words that share a row are told apart by others."""
    words = re.findall(r"\w+|[^\w\s]", line)
    pairs = [f"{first} {second}" for first, second in itertools.pairwise(words)]
    tokens = [1 + zlib.crc32(text.encode()) % (rows - 1) for text in [*words, *pairs]]
    return (tokens + [0] * length)[:length]


def load(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Return tokens (int64, lines x length) and the module that each line comes from (int64), shuffled."""
    lines = []
    for label, name in enumerate(MODULES):
        source = inspect.getsource(importlib.import_module(name))
        lines += [(line.strip(), label) for line in source.splitlines() if len(line.strip()) >= 30]
    random.Random(0).shuffle(lines)
    tokens = [tokenize(line, rows, length) for line, _ in lines]
    return torch.tensor(tokens), torch.tensor([label for _, label in lines])
