"""Finds parameters that were added to a model after it was wrapped, so that its DDP module does not know them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .. import _extension
from ..serving.modules import reducible_parameters

_C = _extension.load()


@dataclass(frozen=True, slots=True)
class Strangers:
    """Names, in the order of the model.

    Attributes:
        replaced: DDP holds another parameter, which had this name.
        added: DDP holds no parameter with this name, and this one has a gradient.
        removed: DDP holds a parameter that the model no longer has, and that was not replaced. If its name is unknown,
            it is called by its number, as in ``#3``.
    """

    replaced: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class StrangerWatch:
    """Looks for added parameters at intervals, and listens for their gradients.

    Each look reads the names of all parameters. The calls with the numbers 1, 2, 4, 8 and so on look.

    Attributes:
        trained: the names of added parameters that have got a gradient.
    """

    def __init__(self) -> None:
        self.trained: set[str] = set()
        self._calls = 0
        self._heard: dict[int, torch.Tensor] = {}
        self._handles: list[Any] = []

    def call_begins(self, ddp: DistributedDataParallel) -> None:
        """Look if this is due. Called before the module runs."""
        self._calls += 1
        if self._calls & (self._calls - 1):
            return
        for name, parameter in _find_strangers(ddp).items():
            if parameter.requires_grad and parameter.is_leaf and id(parameter) not in self._heard:
                self._heard[id(parameter)] = parameter
                hook = self._make_hook(name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Remove all hooks; may be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._heard.clear()

    def read(self, ddp: DistributedDataParallel, held: dict[int, str]) -> Strangers:
        """Return the current findings.

        Args:
            ddp: the module.
            held: the names that parameters had when watching began, by identity.
        """
        present = {id(parameter) for _, parameter in ddp.module.named_parameters(remove_duplicate=False)}
        gone = [
            held.get(id(p), f"#{i}") for i, p in enumerate(_C.reducer_parameters(ddp.reducer)) if id(p) not in present
        ]
        strangers = _find_strangers(ddp)
        # The name of a parameter that was replaced before watching began is unknown.
        is_nameless = any(name.startswith("#") for name in gone)
        replaced = [name for name in strangers if name in gone or is_nameless]
        added = [
            name
            for name, parameter in strangers.items()
            if name not in replaced and (name in self.trained or parameter.grad is not None)
        ]
        removed = [name for name in gone if name not in strangers]
        return Strangers(tuple(replaced), tuple(added), tuple(removed))

    def _make_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def gradient_done(parameter: torch.Tensor) -> None:
            self.trained.add(name)

        return gradient_done


def _find_strangers(ddp: DistributedDataParallel) -> dict[str, torch.Tensor]:
    known = {id(parameter) for parameter in _C.reducer_parameters(ddp.reducer)}
    # These include parameters that were frozen when the module was wrapped.
    known.update(id(parameter) for parameter in getattr(ddp, "_module_parameters", ()))
    return {name: parameter for name, parameter in reducible_parameters(ddp).items() if id(parameter) not in known}
