"""Defines a workload: a model, the steps that train it, and its size.

A workload repeats a small number of step *patterns*: pattern k has its own inputs and its own random choices, on each
rank, from fixed seeds. All variants of a round run the same pattern, so that their gradients can be compared, and an
oracle can be built for each pattern. There is no optimizer step, so weights do not change. Forward, backward and the
exchange of gradients are timed; an optimizer would cost the same for every variant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Size:
    """How large the models are; parameters for the default: about 25 million."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int
    task_heads: int
    experts: int


SIZES = {
    "tiny": Size(width=64, layers=4, heads=4, vocabulary=256, sequence=16, batch=2, task_heads=8, experts=8),
    "small": Size(width=256, layers=6, heads=4, vocabulary=2048, sequence=16, batch=1, task_heads=8, experts=16),
    "default": Size(width=512, layers=7, heads=8, vocabulary=4096, sequence=32, batch=1, task_heads=8, experts=32),
}


class Workload:
    """A model, the steps it is trained with, and what DDP has to be told about it."""

    name: str
    question: str
    # Plain DDP needs find_unused_parameters=True.
    needs_find_unused = True
    # The autograd graph is the same in every step and on every rank, so that static_graph and
    # skip_all_reduce_unused_params are legal.
    is_static = False
    patterns = 4
    # What gradients are multiplied with, as GradScaler does; differences are told without it.
    loss_scale = 1.0

    def __init__(self, size: Any) -> None:
        self.size = size

    @property
    def label(self) -> str:
        return self.name

    def build(self) -> nn.Module:
        raise NotImplementedError

    def after_wrapping(self, model: nn.Module) -> None:
        """What is done to the model once DDP holds it."""

    def loss(self, model: nn.Module, pattern: int, rank: int) -> Tensor:
        raise NotImplementedError

    def backward(self, model: nn.Module, pattern: int, rank: int) -> None:
        """One step's backward passes; `model` is the module or DDP around it."""
        self.loss(model, pattern, rank).backward()

    def _generator(self, pattern: int, rank: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * pattern + rank + 1)

    def _tokens(self, pattern: int, rank: int) -> Tensor:
        shape = (self.size.batch, self.size.sequence)
        return torch.randint(self.size.vocabulary, shape, generator=self._generator(pattern, rank))
