"""Finds parameters that DDP does not average because it does not know them, and hooks that average nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..wording import short_list
from .gradient_watch import Unreduced
from .problem import Kind, Problem
from .records import Facts
from .replicas import find_drift, list_drift
from .standing import Unfinished
from .verdicts import ADDED, REMOVED, REPLACED, UNFROZEN, ModuleVerdict, short_names


def find_unfrozen(facts: Facts) -> Iterator[Problem]:
    """Find parameters that were frozen when DDP was built and have been trained since."""
    apart = [one for one in facts.modules if one.verdict == UNFROZEN]
    alone = max(dict(record.standing.unreduced).get(Unreduced.UNKNOWN.value, 0) for record in facts.records)
    # The hook averages it if something else is used, too.
    if not apart or (facts.has_hook and not alone):
        return
    drift = facts.find_drift()
    differ = "" if drift is None else f"; {drift}"
    alone_too = (
        f"In {alone} backward pass{'' if alone == 1 else 'es'} nothing that DDP knows was used; "
        "ddp_hooks.register(ddp) raises there without the rebuild."
        if alone
        else "Until the rebuild, the hook of ddp_hooks averages it after each backward pass."
    )
    yield Problem(
        Kind.APART,
        f"{short_names(apart)} {_be(apart)} frozen when DDP was built and trained later, so DDP does not average "
        f"{_it(apart)}{differ}.",
        "Wrap the model after unfreezing, or call ddp_hooks.register(ddp) after wrapping and ddp_hooks.rebuild(ddp) "
        "after unfreezing.",
        details=(alone_too, *list_drift(drift)),
    )


def find_strangers(facts: Facts) -> Iterator[Problem]:
    """Find parameters that were added after the model was wrapped."""
    replaced = [one for one in facts.modules if one.verdict == REPLACED]
    added = [one for one in facts.modules if one.verdict == ADDED]
    removed = [one for one in facts.modules if one.verdict == REMOVED]
    if replaced:
        # Those without a name are most likely the ones that were replaced.
        removed = [one for one in removed if not one.name.startswith("#")]
    held = [f"DDP still holds {short_names(removed)}, which the model no longer has."] if removed else []
    if replaced:
        fact = f"{short_names(replaced)} {_be(replaced)} replaced after wrapping: DDP holds the old parameters"
        fact += ", waits for their gradients" if _waits(facts) else ""
        fact += ", and nothing averages the new ones."
        held.append(
            "A new layer replaces parameters, and so does load_state_dict(..., assign=True); without assign=True it "
            "copies into those that are there."
        )
    elif added:
        fact = f"{short_names(added)} came after wrapping, so DDP does not know {_it(added)} and does not average "
        fact += f"{_it(added)}."
    elif removed:
        fact = f"{short_names(removed)} is no longer part of the model, but DDP still holds it"
        fact += " and waits for its gradient." if _waits(facts) else "."
    else:
        return
    details = []
    if replaced or added:
        details += held
        if replaced and added:
            details.append(f"{short_names(added)} came after wrapping, too.")
        details.append(
            "If the new parameters began with other values on each rank, call "
            "ddp_hooks.sync.broadcast_parameters(ddp) once. An optimizer that was made before the change does not know "
            "them either."
        )
    if fact.startswith("the whole model"):
        fact = f"T{fact[1:]}"
    yield Problem(
        Kind.GRADIENTS_MISSING if _waits(facts) else Kind.APART if replaced or added else Kind.FORGOTTEN,
        fact,
        "Wrap the model after that change, or call ddp_hooks.register(ddp) after wrapping and ddp_hooks.rebuild(ddp) "
        "after the change.",
        details=tuple(details),
    )


def explains_missing(facts: Facts) -> bool:
    """Return whether DDP waits only for parameters that the model no longer has."""
    for record in facts.records:
        gone = {*record.strangers.replaced, *record.strangers.removed}
        if any(name not in gone and not name.startswith("#") for name in record.standing.missing):
            return False
    return _waits(facts)


def _waits(facts: Facts) -> bool:
    """Return whether DDP waits for the gradient of a parameter that the model no longer has."""
    return any(
        record.standing.unfinished is Unfinished.SHORT
        and {*record.strangers.replaced, *record.strangers.removed} & set(record.standing.missing)
        for record in facts.records
    )


def find_unwrapped(facts: Facts) -> Iterator[Problem]:
    """Find what optimizers step beside the DDP modules, where ranks train it apart."""
    found = [record.outsiders for record in facts.records]
    if facts.absent or len(found) < 2 or len({one.names for one in found}) > 1:
        return
    drift = find_drift(found[0].names, [one.replica for one in found])
    # A rank that has joined is behind.
    if drift is None or drift.is_rounding or any(record.missed for record in facts.records):
        return
    one = len(drift.names) == 1
    yield Problem(
        Kind.APART,
        f"An optimizer steps {short_list(drift.names)}, which {'is' if one else 'are'} in no DistributedDataParallel "
        f"module, so DDP does not average {'it' if one else 'them'}; the ranks' values differ by up to "
        f"{drift.largest:.2g}.",
        "If every rank should have the same values, make what holds them a part of the wrapped model, or wrap it, too.",
    )


def find_silent_hook(facts: Facts) -> Iterator[Problem]:
    """Find a communication hook that sends nothing."""
    hook = facts.records[0].other_hook
    if hook is None or hook.sends:
        return
    yield Problem(
        Kind.APART,
        f"The script registers the communication hook {hook.name}, which sends nothing, so DDP averages nothing.",
        "Take it out; it is meant for measuring what a step takes without sending.",
        details=list_drift(facts.find_drift()),
    )


def _be(of: Sequence[ModuleVerdict]) -> str:
    return "was" if len(of) == 1 else "were"


def _it(of: Sequence[ModuleVerdict]) -> str:
    return "it" if len(of) == 1 else "them"
