"""Finds ranks that train apart, and why: passes that DDP did not reduce, and steps that did not wait for it."""

from __future__ import annotations

from collections.abc import Iterator

from ..wording import short_list
from .gradient_watch import Unreduced
from .problem import Kind, Problem
from .records import Facts, RankRecord
from .replicas import list_drift
from .verdicts import ADDED, REPLACED, UNFROZEN


def find_drifting(facts: Facts) -> Iterator[Problem]:
    """Compare the replicas; where no pass was reduced at all, there is no need to."""
    drift = facts.find_drift()
    cause = _find_cause(facts)
    if any(one.verdict in (UNFROZEN, REPLACED, ADDED) for one in facts.modules):
        return  # that says it all
    # A second backward pass may also break the step after it.
    raised = any(record.end.left == "backward" and _is_late(record) for record in facts.records)
    if cause is not None and (drift is not None or facts.finished == 0 or raised):
        fact, change = cause
        differ = "" if drift is None else f"; {drift}"
        yield Problem(Kind.APART, f"{fact}{differ}.", change, details=list_drift(drift))
    elif drift is not None and not facts.finished and not drift.is_rounding:
        called = min(record.standing.forwards for record in facts.records)
        how = (
            f"its forward pass ran {_times(called)}, and no backward() followed that reached a parameter"
            if called
            else "it was never called in training"
        )
        yield Problem(
            Kind.APART,
            f"DDP averages nothing: {how}; {drift}.",
            "Call loss.backward(): torch.autograd.grad() and torch.func.grad() do not tell DDP of gradients."
            if called
            else "Call the DistributedDataParallel module itself, ddp(...), in training, and then backward().",
            details=list_drift(drift),
        )
    elif drift is not None and drift.since is not None and not drift.is_rounding and facts.finished:
        hook = facts.records[0].other_hook
        if hook is not None and not hook.averages:
            return  # it leaves them apart
        averaged = ", although DDP averaged every gradient" if not any(_unreduced(facts)) else ""
        if hook is not None:
            averaged = f"; gradients go through the hook {hook.name}"
        at_first = drift.since == (0, 0)
        yield Problem(
            Kind.APART,
            f"{str(drift).capitalize()}{averaged}.",
            "Load weights before wrapping, or on every rank, and do not pass init_sync=False."
            if at_first
            else "Look for what changes weights on some ranks only: a step of the optimizer that one rank skips, "
            "another learning rate, gradients that are changed after backward(), weights that are loaded or reset.",
            details=list_drift(drift),
        )


def _find_cause(facts: Facts) -> tuple[str, str] | None:
    """Return what is wrong, and what to do."""
    unreduced = _unreduced(facts)
    calls = max(record.standing.inner_calls for record in facts.records)
    past, late = unreduced.get(Unreduced.PAST_DDP.value, 0), unreduced.get(Unreduced.AFTERWARDS.value, 0)
    kept = unreduced.get(Unreduced.NO_SYNC.value, 0)
    moved = facts.records[0].moved
    if moved and unreduced.get(Unreduced.UNKNOWN.value, 0):
        return (
            f"DDP averages nothing for {short_list([one for one, _ in moved])}, cast or moved after wrapping "
            f"({moved[0][1]}), which cuts a parameter off from DDP",
            "Cast and move the model before wrapping; for less precision use torch.autocast.",
        )
    if past or (late and calls):
        how = (
            "the wrapped module was called itself (ddp.module(...))"
            if calls
            else "a part or a method of the wrapped module was called (ddp.module.part(...))"
        )
        averaged = "averages nothing" if facts.finished == 0 else "does not average all gradients"
        count = past or late
        return (
            f"DDP {averaged}: for {_passes(count)} {how} and not DDP",
            "Call the DistributedDataParallel module itself, ddp(...), in training; what it calls belongs in its "
            "forward().",
        )
    if late:
        return (
            f"DDP does not average the gradients of {_passes(late)} that came after it had finished the one that "
            "belongs to its forward pass",
            "Add the losses up and call backward() once, or call ddp(...) and backward() in turn, once each.",
        )
    early = facts.records[0].standing.stepped_early
    if early:
        return (
            f"Parameters change while backward runs, before DDP has averaged their gradients ({short_list(early)}): "
            "an optimizer steps in hooks of the parameters",
            "Step the optimizer after backward() has returned.",
        )
    behind = max(record.standing.left_behind for record in facts.records)
    if kept and behind:
        return (
            "DDP averages nothing, because the forward pass before every backward pass ran under no_sync()"
            if facts.finished == 0
            else f"DDP averages nothing in the passes before {behind} steps of the optimizer, because all of them ran "
            "under no_sync()",
            "Leave the last forward and backward pass before each optimizer.step() outside of no_sync(), those of an "
            "epoch's end included.",
        )
    return None


def _unreduced(facts: Facts) -> dict[str, int]:
    """Return how many passes DDP did not reduce, on the rank with most of them."""
    unreduced: dict[str, int] = {}
    for record in facts.records:
        for why, count in record.standing.unreduced:
            unreduced[why] = max(unreduced.get(why, 0), count)
    return unreduced


def _is_late(record: RankRecord) -> bool:
    return {why for why, _ in record.standing.unreduced} == {Unreduced.AFTERWARDS.value}


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _passes(count: int) -> str:
    return f"{count} backward pass{'' if count == 1 else 'es'}"
