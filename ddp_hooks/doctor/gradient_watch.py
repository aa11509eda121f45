"""Observes each gradient of a DDP module, and how each backward pass ends.

It changes nothing. It uses a hook after the accumulation of each parameter's gradient, which runs before DDP's own
hook, and hooks on the module's forward pass. Callbacks of autograd, each queued from the one before, tell when a pass
ends: after all gradients, after DDP has finalised, and after whatever others do then.

Once all gradients have arrived, the Reducer knows whether DDP reduces the pass. Before that, this is a guess: DDP
reduces it if its forward pass ran and none of its backward passes has ended since, or if its forward pass is running.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.autograd.function import BackwardCFunction
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointFunction

from .. import _extension
from ..serving.modules import parameters_of
from .joining import follow_join_blocks

_C = _extension.load()

# The frames of a custom function's backward in the engine.
_APPLIES = {
    BackwardCFunction.apply.__code__,
    getattr(BackwardCFunction, "apply_boxed", BackwardCFunction.apply).__code__,
}
_RUN_BACKWARD = torch.autograd.backward.__code__
CHECKPOINT = f"{CheckpointFunction.__module__}.{CheckpointFunction.__qualname__}"


class Unreduced(Enum):
    """Why DDP does not reduce a backward pass."""

    NO_SYNC = "no_sync"  # the forward pass was under no_sync()
    PAST_DDP = "past DDP"  # DDP's forward pass was not called for it
    AFTERWARDS = "afterwards"  # DDP had finished the backward pass that belongs to its forward pass
    UNKNOWN = "unknown"  # none of the parameters that got a gradient is one of DDP's


class Silence:
    """A listener that does nothing. Its methods run in the thread that runs the module, or in a thread of autograd."""

    def call_begins(self) -> None:
        """The module is called, whether or not a backward pass will follow. The call raises what this raises."""

    def forward_begins(self) -> None:
        """A synchronising forward pass is about to begin."""

    def model_done(self) -> None:
        """The model's own forward pass has ended. DDP's part follows."""

    def forward_done(self) -> None:
        """A synchronising forward pass has ended."""

    def pass_begins(self, synchronises: bool) -> None:
        """The first gradient of a backward pass has arrived, and nothing has been reduced yet."""

    def gradient_done(self, index: int, parameter: torch.Tensor, synchronises: bool) -> None:
        """Backward has reached a parameter. Its gradient, if it got one, has not been reduced yet."""

    def gradients_done(self) -> None:
        """All gradients of a pass have arrived."""

    def pass_left(self, why: Unreduced) -> None:
        """A pass that DDP does not reduce has ended. ``backward()`` raises what this raises."""

    def pass_broke(self) -> None:
        """The next pass begins, but the last one has not ended, so it has raised."""

    def step_reduced(self) -> None:
        """DDP has finalised a synchronised pass."""

    def step_done(self) -> None:
        """The callbacks that follow DDP's end of the pass have run. ``backward()`` raises what this raises."""

    def joined_step_done(self) -> None:
        """Other ranks have ended a synchronised pass, and this rank has joined (``ddp.join()``).

        The end of the join block raises what this raises.
        """

    def join_block_ends(self) -> None:
        """Without an error, this rank has reached the end of a join block, where DDP waits for the others.

        The end of the join block raises what this raises.
        """


class GradientWatch:
    """Tells a listener what happens to the gradients of a module, which it holds weakly.

    Attributes:
        parameters: the parameters of the Reducer, in its order, and then those that it does not know.
        names: the names of the parameters in the wrapped model.
        reduced_count: the number of parameters that the Reducer knows.
        used: a byte for each parameter: 1 if it got a gradient here since the last synchronised pass ended.
        held: the identity of each gradient that existed when the pass began, by parameter.
        forwards: the number of synchronising forward passes since the last synchronised pass ended.
        idle_forwards: the number of earlier synchronising forward passes without a backward pass of their own.
        failed_forwards: the number of DDP's forward passes in grad mode that have raised.
        inner_calls: how often something other than DDP called the wrapped model in grad mode.
        resent: the number of synchronised passes that added to averaged gradients which nobody had used yet.
        nested_in: the names of custom autograd functions whose own backward passes have reached parameters.
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
        self._kinds = [(parameter.dtype, parameter.device.type) for parameter in parameters]
        self._ddp = weakref.ref(ddp)
        self._listener = listener
        self.held: dict[int, tuple[int, int]] = {}
        self.forwards = self.idle_forwards = self.failed_forwards = 0
        self.inner_calls = self.resent = 0
        # Of a parameter, what tells whether it or its gradient has changed since DDP averaged that.
        self._averaged: tuple[int, tuple[int, int], int] | None = None
        self.nested_in: set[str] = set()
        self._task: int | None = None  # which graph task the last gradient came in
        self._tasks: set[int] = set()  # those of the pass, one for each call of the engine within another
        self._running: set[int] = set()  # those that have not ended
        self._forward: torch.nn.Module | None = None  # DDP, while its forward pass runs
        self._expects = False  # DDP will reduce the next pass
        self._has_finished = False  # DDP has finalised some pass
        self._is_finished = False  # DDP has finalised within this pass
        self._is_late = False  # and one of its parameters was reached after that
        self._is_left = False  # the listener knows that DDP does not reduce this pass
        self._why_not = Unreduced.PAST_DDP
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
        """The parameters that still exist, which are all of them while the module exists."""
        return [parameter for reference in self._parameters if (parameter := reference()) is not None]

    def some_parameters(self, indices: Iterable[int]) -> list[torch.Tensor]:
        """Return a few of the parameters without reading the others."""
        return [parameter for i in indices if (parameter := self._parameters[i]()) is not None]

    def find_moved(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each parameter whose type or device has changed since watching began, and the change."""
        for name, before, reference in zip(self.names, self._kinds, self._parameters, strict=True):
            parameter = reference()
            if parameter is not None and (now := (parameter.dtype, parameter.device.type)) != before:
                yield (
                    name,
                    ", ".join(
                        f"from {str(old).removeprefix('torch.')} to {str(new).removeprefix('torch.')}"
                        for old, new in zip(before, now, strict=True)
                        if old != new
                    ),
                )

    def close(self) -> None:
        """Remove all hooks. May be called again."""
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
                self._enter(task, index)
            gradient = parameter.grad
            # An output that the loss leaves out leads here with an undefined gradient, and .grad stays what it was.
            if gradient is not None and (index not in self.held or self.held[index] != _identify(gradient)):
                used[index] = 1
            if self._is_finished and index < self.reduced_count:
                self._is_late = True
            listener.gradient_done(index, parameter, self._expects)

        return gradient_done

    @property
    def runs_backward(self) -> bool:
        """Whether a backward pass has begun and not ended: it runs, or it has raised."""
        return bool(self._running)

    @property
    def runs_forward(self) -> bool:
        """Whether DDP's forward pass has begun, in grad mode, and not ended: it runs, or it has raised."""
        return self._forward is not None

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
        self._notice_break()
        self.failed_forwards += self._forward is not None
        if self._unhooked:
            self._hook_parameters()
        self._forward = module
        if module.require_backward_grad_sync:
            self.forwards += 1
            self._listener.forward_begins()

    def _model_done(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        # It would break the graph of the model's call, and an error with fullgraph=True.
        if self._listener is None or torch.compiler.is_compiling():
            return
        if self._forward is None:
            self.inner_calls += torch.is_grad_enabled()
        self._listener.model_done()

    @_disable_dynamo
    def _forward_done(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._forward = None
        if self._listener is None or not torch.is_grad_enabled():
            return
        self._task = None
        self._tasks.clear()
        if module.require_backward_grad_sync:
            self._expects = True
            self._listener.forward_done()
        else:
            self._why_not = Unreduced.NO_SYNC

    # --- backward

    def _enter(self, task: int, first: int) -> None:
        self._task = task
        if task in self._tasks:
            return  # back in it, from a call of the engine within
        outer = _find_outer_function()
        if outer is not None:
            self.nested_in.add(outer)
        begins = not self._tasks
        if begins and outer is None:
            self._notice_break()
        self._tasks.add(task)
        self._running.add(task)
        _queue(partial(self._gradients_done, task, outer is not None))
        if self._forward is not None and self._forward.require_backward_grad_sync:
            self._expects = True  # a backward pass within the forward pass: the Reducer was prepared by hand
        if not begins:
            return
        self._is_finished = self._is_late = self._is_left = False
        if self._averaged is not None and self._expects and self._averaged[0] != first:
            self.resent += self._averaged == self._read_averaged(self._averaged[0])
        self._averaged = None
        self.held = {
            index: _identify(parameter.grad)
            for index, reference in enumerate(self._parameters)
            # Whether the one that was reached just now had a gradient before, nobody knows.
            if index != first and (parameter := reference()) is not None and parameter.grad is not None
        }
        if self._listener is not None:
            self._listener.pass_begins(self._expects)

    def _gradients_done(self, task: int, is_nested: bool) -> None:
        self._running.discard(task)
        ddp = self._ddp()
        if ddp is None or self._listener is None:
            return
        # In the first pass of a static graph the Reducer does not say so, and does nothing before the whole pass ends.
        learns_graph = self._expects and ddp.static_graph and not self._has_finished
        if learns_graph and is_nested:
            return
        if learns_graph or _C.reducer_is_in_backward(ddp.reducer):
            if self._expects:
                self._listener.gradients_done()
            # DDP has queued its own end behind this one; what is queued here comes after it.
            _queue(self._reduced)
        elif not self._is_left and (self._is_late or not self._is_finished):
            self._is_left = True
            self._listener.pass_left(Unreduced.UNKNOWN if self._expects else self._why_not)
        if not is_nested:
            self._task = None
            self._tasks.clear()

    def _reduced(self) -> None:
        ddp = self._ddp()
        # A pass that stopped short of some parameters, or one within another, leaves DDP waiting.
        if ddp is None or self._listener is None or not self._expects or _C.reducer_is_in_backward(ddp.reducer):
            return
        self._expects = False
        self._is_finished = self._has_finished = True
        self._why_not = Unreduced.AFTERWARDS
        self.idle_forwards += max(self.forwards - 1, 0)
        self.forwards = 0
        self._listener.step_reduced()
        _queue(self._done)

    def _done(self) -> None:
        listener = self._listener
        if listener is None:
            return
        index = self.used.find(1, 0, self.reduced_count)
        self._averaged = self._read_averaged(index) if index >= 0 else None
        try:
            listener.step_done()
        finally:
            self.used[:] = bytes(len(self.used))

    def _read_averaged(self, index: int) -> tuple[int, tuple[int, int], int] | None:
        parameter = self._parameters[index]()
        if parameter is None or parameter.grad is None:
            return None
        return index, _identify(parameter.grad), parameter._version

    def _notice_break(self) -> None:
        if self._running:
            self._running.clear()
            self._tasks.clear()
            if self._listener is not None:
                self._listener.pass_broke()

    # --- join blocks

    def joined_step_done(self) -> None:
        """Tell the listener of a step of other ranks in which this rank had joined."""
        if self._listener is not None:
            self._listener.joined_step_done()

    def join_block_ends(self) -> None:
        """Tell the listener that this rank is about to wait for the others at the end of a join block."""
        if self._listener is not None:
            self._listener.join_block_ends()


def why_not_watched(ddp: DistributedDataParallel, way_out: str) -> str | None:
    """Return why a module cannot be watched; None if it can.

    Args:
        ddp: the module.
        way_out: what to do if a backward pass is running.
    """
    if getattr(ddp, "_delay_all_reduce_all_params", False):
        return "delay_all_reduce_named_params delays every parameter, so DDP has no buckets; do not set it"
    if getattr(ddp, "_use_python_reducer", False):
        return "DDP's Python reducer (compiled autograd) has no buckets; set torch._dynamo.config.optimize_ddp = True"
    if _C.reducer_is_in_backward(ddp.reducer):
        return f"a backward pass is under way; {way_out}"
    return None


def _identify(gradient: torch.Tensor) -> tuple[int, int]:
    """Return a value that changes if something is added to a gradient, or if another one takes its place."""
    return gradient._cdata, gradient._version


def _find_outer_function() -> str | None:
    """Return the name of the custom function whose backward has called the engine; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    is_in_engine = False
    while frame is not None:
        if frame.f_code is _RUN_BACKWARD:
            is_in_engine = True
        elif is_in_engine and frame.f_code in _APPLIES:
            function = frame.f_locals["self"]._forward_cls
            return f"{function.__module__}.{function.__qualname__}"
        frame = frame.f_back
    return None


def _queue(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)
