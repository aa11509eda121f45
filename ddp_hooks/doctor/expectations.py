"""Checks expectations by name: every rank raises an error in the first step in which one no longer holds.

A parameter is *used* if some rank accumulated a gradient into it in this synchronised step, even if the gradient is all
zeros. Gradients of ``no_sync`` passes count for the step that reduces them. A frozen parameter is not used.

At the end of a synchronised backward pass, after DDP has reduced everything and written every ``.grad``, the ranks
exchange what they used, in a small message with one byte for each parameter. All ranks therefore know the same and
raise in the same step, from ``backward()``, and DDP is ready for the next step, whether or not the error is caught.

A rank that has joined (``ddp.join()``) uses nothing. It takes part in the message, and raises at the end of its join
block. The others would wait for it in their next step, so they leave the block, too.
"""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

from ..errors import UnexpectedUseError
from ..serving.agreement import propose, settle
from ..serving.modules import find_ddp
from ..serving.parameters import ParameterIndex, Selector
from ..wording import short_list
from .gradient_watch import GradientWatch, Silence, why_not_watched
from .joining import join_block_of
from .side_channel import SideChannel


@dataclass(frozen=True, slots=True)
class _Expectation:
    """An expectation about some parameters."""

    function: str
    used: bool
    names: frozenset[str]


class ExpectationHandle:
    """An expectation, which :meth:`remove` withdraws."""

    def __init__(self, guard: _Guard, expectation: _Expectation) -> None:
        self._guard: _Guard | None = guard
        self._expectation = expectation

    def remove(self) -> None:
        """Withdraw the expectation; every rank has to call this, between two steps. May be called again."""
        if self._guard is not None:
            self._guard.forget(self._expectation)
            self._guard = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, sorted."""
        return tuple(sorted(self._expectation.names))


class _Guard(Silence):
    """Checks the expectations of one module; the module's hooks hold it."""

    def __init__(self, ddp: DistributedDataParallel, channel: SideChannel) -> None:
        self._channel = channel
        self.expectations: list[_Expectation] = []
        self._watch = GradientWatch(ddp, self)
        self._steps = 0
        # The join block that the ranks that had joined have left with an error.
        self._broken_block: object | None = None
        self._ddp = weakref.ref(ddp)
        finalizer = weakref.finalize(ddp, channel.close)
        finalizer.atexit = False

    def forget(self, expectation: _Expectation) -> None:
        self.expectations = [one for one in self.expectations if one is not expectation]
        if not self.expectations:
            self._watch.close()
            self._channel.close()
            ddp = self._ddp()
            if ddp is not None and _guards.get(ddp) is self:
                del _guards[ddp]

    def call_begins(self) -> None:
        self._refuse_to_stay("another forward pass within it")

    def join_block_ends(self) -> None:
        self._refuse_to_stay("its end without one")

    def _refuse_to_stay(self, received: str) -> None:
        block = self._block()
        if block is not None and self._broken_block is block:
            raise RuntimeError(
                "expected this rank to leave the ddp.join() block with the UnexpectedUseError, as the ranks that have "
                f"joined did, received {received}, which would wait for them; catch the error outside of the block"
            )

    def _block(self) -> object | None:
        ddp = self._ddp()
        return None if ddp is None else join_block_of(ddp)

    def step_done(self) -> None:
        self._check(bytes(self._watch.used), has_joined=False)

    def joined_step_done(self) -> None:
        # What no_sync passes have left here is not reduced.
        self._check(bytes(len(self._watch.used)), has_joined=True)

    def _check(self, here: bytes, *, has_joined: bool) -> None:
        *anywhere, somebody_has_joined = self._channel.unite(here + bytes([has_joined]))
        step, self._steps = self._steps, self._steps + 1
        used = {name for name, one in zip(self._watch.names, anywhere, strict=True) if one}
        problems = []
        for one in self.expectations:
            wrong = sorted(one.names - used if one.used else one.names & used)
            if wrong:
                problems.append(f"{one.function}: {self._describe(one, wrong, here)}")
        if problems:
            if somebody_has_joined and not has_joined:
                self._broken_block = self._block()
            raise UnexpectedUseError(
                f"{'; '.join(problems)}. This was step {step} since the first expectation; the gradients of all ranks "
                "are reduced, and .grad holds them"
            )

    def _describe(self, expectation: _Expectation, wrong: list[str], here: bytes) -> str:
        if expectation.used:
            return (
                f"expected some rank to use {short_list(sorted(expectation.names))}, but no rank had a "
                f"gradient for {short_list(wrong)}; look whether forward calls it and its output reaches the loss"
            )
        places = {name: place for place, name in enumerate(self._watch.names)}
        mine = [name for name in wrong if here[places[name]]]
        where = "this rank, too" if mine else "other ranks, not this one"
        return (
            f"expected no rank to use {short_list(sorted(expectation.names))}, but there were gradients for "
            f"{short_list(wrong)} ({where})"
        )


_guards: weakref.WeakKeyDictionary[DistributedDataParallel, _Guard] = weakref.WeakKeyDictionary()


def expect_used(ddp: torch.nn.Module, *what: Selector) -> ExpectationHandle:
    """Raise on every rank in the first step in which some of these parameters get no gradient on any rank.

    Call it on every rank with the same arguments, between two steps, with or without a hook of this package. It costs
    one small message per step, after backward.

    Args:
        ddp: the DDP module, or the result of ``torch.compile`` for it.
        what: patterns of parameter names, modules or parameters, as for :func:`ddp_hooks.freeze`.

    Returns:
        A handle with ``remove()``.

    Raises:
        TypeError, ValueError: an argument is wrong; the other ranks raise a RuntimeError.
        RuntimeError: on every rank, if the ranks expect different things, an expectation was withdrawn on only some
            ranks, or a backward pass is running.
        UnexpectedUseError: from ``backward()``, on every rank, if the expectation does not hold. The step has been
            reduced, and training may continue. A rank that has joined (``ddp.join()``) uses nothing and raises it at
            the end of its block; the others then leave the block, too.
    """
    return _expect("expect_used", True, ddp, what)


def expect_unused(ddp: torch.nn.Module, *what: Selector) -> ExpectationHandle:
    """Raise on every rank in the first step in which some of these parameters get a gradient on some rank.

    Arguments, errors and cost as for :func:`expect_used`.

    Args:
        ddp: as for :func:`expect_used`.
        what: as for :func:`expect_used`.

    Returns:
        A handle with ``remove()``.
    """
    return _expect("expect_unused", False, ddp, what)


def _expect(function: str, used: bool, module: torch.nn.Module, what: tuple[Selector, ...]) -> ExpectationHandle:
    ddp = find_ddp(module, function)
    names: frozenset[str] = frozenset()
    problem: Exception | None = None
    try:
        if not what:
            raise ValueError(f"{function}: expected patterns, modules or parameters, received none")
        names = frozenset(ParameterIndex(ddp.module).select(function, *what))
        ignored = sorted(names & set(ddp.parameters_to_ignore))
        if ignored:
            raise ValueError(
                f"{function}: expected parameters of DDP, received {short_list(ignored)}, which it ignores"
            )
        reason = why_not_watched(ddp, "call it between two steps, before forward or when backward() has returned")
        if reason is not None:
            raise RuntimeError(f"{function}: {reason}")
        if ddp._join_config.enable and ddp not in _guards:
            # A rank that joins would not hear of the others' passes. DDP does not say whether the block has ended.
            raise RuntimeError(
                f"{function}: expected to be called before `with ddp.join()`, received a module that a join block was "
                "begun for. DDP leaves it switched on after the block; `with ddp.join(enable=False): pass` switches "
                "it off, between two blocks"
            )
    except (TypeError, ValueError, RuntimeError) as error:
        problem = error
    guard = _guards.get(ddp)
    description = {
        "parameters": short_list(sorted(names)) + f" ({len(names)})",
        "digest": _digest(names),
        # Those without any open a channel, which the others would not come to.
        "expectations that hold (remove() takes one back on every rank)": _describe_all(guard),
    }
    settle(function, propose(ddp, function, description, None if problem is None else str(problem)), problem)
    if guard is None:
        guard = _guards[ddp] = _Guard(ddp, SideChannel(ddp, function))
    expectation = _Expectation(function, used, names)
    guard.expectations.append(expectation)
    return ExpectationHandle(guard, expectation)


def _describe_all(guard: _Guard | None) -> str:
    held = [] if guard is None else guard.expectations
    return "; ".join(f"{one.function} {short_list(sorted(one.names))} [{_digest(one.names)}]" for one in held) or "none"


def _digest(names: frozenset[str]) -> str:
    return hashlib.blake2b("\n".join(sorted(names)).encode(), digest_size=8).hexdigest()
