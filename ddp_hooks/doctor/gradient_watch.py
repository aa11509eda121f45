"""Hears of each gradient of a DDP module, and of the end of each synchronised backward pass.

It reads what passes by and changes nothing: a hook behind the accumulation of each parameter's gradient, which runs
before DDP's own, and hooks on the module's forward pass. What ends a pass is heard through callbacks of autograd's,
each queued from the one before: after all gradients, after DDP has finalised, and after whatever others do then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from .. import _extension
from ..reducer import parameters_of
from .joining import follow_join_blocks

_C = _extension.load()


class Silence:
    """A listener that does nothing; all of it is called on the thread that runs the module, or autograd's."""

    def call_begins(self) -> None:
        """The module is called, whether or not a backward pass will follow. May raise: the call then does."""

    def forward_begins(self) -> None:
        """A synchronising forward pass is about to begin."""

    def model_done(self) -> None:
        """The model's own forward pass is through; DDP's part comes."""

    def forward_done(self) -> None:
        """A synchronising forward pass is through."""

    def pass_begins(self, synchronises: bool) -> None:
        """The first gradient of a backward pass is there, and nothing was reduced yet."""

    def gradient_done(self, index: int, parameter: torch.Tensor, synchronises: bool) -> None:
        """A parameter's gradient was accumulated, and is this rank's own still."""

    def gradients_done(self) -> None:
        """All gradients of a pass are there."""

    def step_reduced(self) -> None:
        """DDP has finalised a synchronised pass."""

    def step_done(self) -> None:
        """What follows DDP's end of the pass is done, too. May raise: ``backward()`` then does."""

    def joined_step_done(self) -> None:
        """Others have ended a synchronised pass, and this rank, which has joined (``ddp.join()``), had none.

        May raise: the end of the join block then does.
        """

    def join_block_ends(self) -> None:
        """Without an error the end of a join block is reached here, where DDP waits for the others.

        May raise: the end of the join block then does.
        """


class GradientWatch:
    """Tells a listener; see the module.

    Args:
        ddp: the module; held weakly.
        listener: who is told.

    Attributes:
        parameters: those of the Reducer, in its order, and then those it does not know.
        names: of the parameters, in the wrapped model.
        reduced_count: how many the Reducer knows.
        used: a byte for each parameter: 1 if it got a gradient here since the last synchronised pass ended.
    """

    # A copy of a module copies the hooks on its forward pass; the copies hear nothing.
    _ddp: Callable[[], DistributedDataParallel | None] = staticmethod(lambda: None)
    _listener: Silence | None = None

    def __init__(self, ddp: DistributedDataParallel, listener: Silence) -> None:
        reduced, others = parameters_of(ddp)
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        parameters = [*reduced, *others]
        self.names: list[str] = [names.get(id(parameter), f"#{i}") for i, parameter in enumerate(parameters)]
        self.reduced_count: int = len(reduced)
        self.used = bytearray(len(parameters))
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._ddp = weakref.ref(ddp)
        self._listener = listener
        self._task: int | None = None  # the backward pass that is under way
        self._expects = False  # DDP will reduce the next pass
        self._unhooked = set(range(len(parameters)))
        self._handles: list[Any] = [
            ddp.register_forward_pre_hook(self._forward_begins),
            # Before other hooks, so that what they do is not counted as DDP's.
            ddp.register_forward_hook(self._forward_done, prepend=True),
            ddp.module.register_forward_hook(self._model_done),
        ]
        self._hook_parameters()
        self._stop_following: Callable[[], None] | None = follow_join_blocks(ddp, self)

    def __getstate__(self) -> dict[str, Any]:
        """Leave everything behind: a copy hears nothing."""
        return {}

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The module, while it lives."""
        return self._ddp()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters; those that are gone are left out only when the module is."""
        return [parameter for reference in self._parameters if (parameter := reference()) is not None]

    def close(self) -> None:
        """Take every hook off; may be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._listener = None
        if self._stop_following is not None:
            self._stop_following()
            self._stop_following = None

    def _hook_parameters(self) -> None:
        # A frozen parameter takes no hook; one that is unfrozen later gets it then.
        for index in list(self._unhooked):
            parameter = self._parameters[index]()
            if parameter is not None and parameter.requires_grad:
                hook = self._make_hook(index)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
                self._unhooked.discard(index)

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        used = self.used

        def gradient_done(parameter: torch.Tensor) -> None:
            listener = self._listener
            if listener is None:
                return
            task = torch._C._current_graph_task_id()
            if task != self._task:
                self._begin(task)
            used[index] = 1
            listener.gradient_done(index, parameter, self._expects)

        return gradient_done

    # --- forward

    # Where the call of the DDP module is compiled, these two stay outside of the graph, at no cost: DDP's own part
    # does, too, and the graph of the model is the same. torch.compiler.disable would import the compiler now.
    @_disable_dynamo
    def _forward_begins(self, module: torch.nn.Module, args: Any) -> None:
        if self._listener is None:
            return
        self._listener.call_begins()
        if not torch.is_grad_enabled():
            return
        if self._unhooked:
            self._hook_parameters()
        if module.require_backward_grad_sync:
            self._listener.forward_begins()

    def _model_done(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        # It would break the graph of the model's call, and an error with fullgraph=True.
        if self._listener is not None and not torch.compiler.is_compiling():
            self._listener.model_done()

    @_disable_dynamo
    def _forward_done(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._listener is None or not torch.is_grad_enabled():
            return
        self._task = None
        if module.require_backward_grad_sync:
            self._expects = True
            self._listener.forward_done()

    # --- backward

    def _begin(self, task: int) -> None:
        self._task = task
        _queue(self._gradients_done)
        if self._listener is not None:
            self._listener.pass_begins(self._expects)

    def _gradients_done(self) -> None:
        if self._listener is not None and self._expects:
            self._listener.gradients_done()
        # DDP has queued its own end behind this one; what is queued here comes after it.
        _queue(self._reduced)

    def _reduced(self) -> None:
        self._task = None
        ddp = self._ddp()
        # A pass that stopped short of some parameters, or one within another, leaves DDP waiting.
        if ddp is None or self._listener is None or not self._expects or _C.reducer_is_in_backward(ddp.reducer):
            return
        self._expects = False
        self._listener.step_reduced()
        _queue(self._done)

    def _done(self) -> None:
        listener = self._listener
        if listener is None:
            return
        try:
            listener.step_done()
        finally:
            self.used[:] = bytes(len(self.used))

    # --- join blocks

    def joined_step_done(self) -> None:
        """Tell that the others had a step in which this rank had joined."""
        if self._listener is not None:
            self._listener.joined_step_done()

    def join_block_ends(self) -> None:
        """Tell that this rank is about to wait for the others at the end of a join block."""
        if self._listener is not None:
            self._listener.join_block_ends()


def _queue(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)
