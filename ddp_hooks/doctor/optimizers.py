"""Finds parameters that optimizers step but no DDP module holds, so that each rank trains its own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .naming import class_name
from .replicas import Replica, read_replica

# More parameters than this are another model, which something else may keep equal.
_MOST = 64


@dataclass(frozen=True, slots=True)
class Outsiders:
    """The parameters outside of DDP modules on one rank: plain values.

    Attributes:
        names: their names, after the class of the module that holds them, for example ``ArcFace.weight``.
        replica: their contents, to compare them between ranks.
    """

    names: tuple[str, ...] = ()
    replica: Replica = Replica((), (), {})  # noqa: RUF009, it is frozen


class OptimizerWatch:
    """Looks at each optimizer when it first steps, and at the end at the parameters that it found.

    Args:
        find_insiders: returns the parameters that DDP modules have.
    """

    def __init__(self, find_insiders: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._find_insiders = find_insiders
        self._seen: set[int] = set()
        self._outsiders: dict[int, tuple[str, torch.Tensor]] = {}
        self._handle: Any = register_optimizer_step_pre_hook(self._step_begins)

    def close(self) -> None:
        """Stop looking. May be called again."""
        self._handle.remove()
        self._outsiders.clear()

    def read(self) -> Outsiders:
        """Return the parameters that belong to no DDP module now."""
        insiders = {id(one) for one in self._find_insiders()}
        found = [(name, one) for key, (name, one) in self._outsiders.items() if key not in insiders]
        if len(found) > _MOST:
            return Outsiders()
        return Outsiders(tuple(name for name, _ in found), read_replica([one for _, one in found], {}))

    def _step_begins(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        if id(optimizer) in self._seen:
            return
        self._seen.add(id(optimizer))
        insiders = {id(one) for one in self._find_insiders()}
        found = [
            one
            for group in optimizer.param_groups
            for one in group["params"]
            if id(one) not in insiders and one.requires_grad and not isinstance(one, DTensor)
        ]
        # They get names now, while the modules that hold them exist.
        for name, one in zip(_name(found), found, strict=True):
            self._outsiders[id(one)] = name, one


def _name(parameters: Sequence[torch.Tensor]) -> list[str]:
    names: dict[int, str] = {}
    wanted = {id(one) for one in parameters}
    for module in gc.get_objects() if wanted else ():
        # Training continues with any kind of object.
        with suppress(Exception):
            if isinstance(module, nn.Module):
                for name, parameter in module.named_parameters(recurse=False):
                    if id(parameter) in wanted:
                        names[id(parameter)] = f"{class_name(module)}.{name}"
    return [names.get(id(one), f"a parameter of shape {list(one.shape)}") for one in parameters]
