"""Finds what is wrong in a run, the most serious first. The report opens with it.

A finder is a generator function that takes :class:`~ddp_hooks.doctor.questions.Facts` and yields the problems that it
sees in them. To add a diagnosis: add its kind to :class:`~ddp_hooks.doctor.problem.Kind`, at the
place that says how serious it is, and its finder to ``_FINDERS``, whose order means nothing. Finders with their own
subject have their own module. ``facts.records`` has one record of plain values for each rank that has reported; the
other fields of ``Facts`` concern all ranks together. A finder yields nothing unless it is certain: a wrong diagnosis is
worse than none.

The report opens with at most three sentences: the fact and the change of the first problem and what the change gains,
or that nothing is wrong and the advice on policies. The first problem's details and the other problems follow, a
paragraph each. While there is a problem whose kind ``forbids_advice``, no policy is recommended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..wording import describe_part, short_list
from .breakdowns import (
    MEND_SEVERED,
    WHY_SEVERED,
    find_broken_backward,
    find_changed_graph,
    find_error,
    find_marked_twice,
    find_missing_gradients,
    find_silent_rank,
    find_standstill,
    find_uneven,
)
from .drift import find_drifting
from .outsiders import explains_missing, find_silent_hook, find_strangers, find_unfrozen, find_unwrapped
from .problem import Kind, Problem, choose_problems
from .records import Facts
from .verdicts import FROZEN_SINCE, NEVER, in_steps, is_inside, short_names


def find_problems(facts: Facts) -> list[Problem]:
    """Return what is wrong, the most serious first."""
    # What the model no longer has cannot get a gradient.
    finders = [one for one in _FINDERS if one is not find_missing_gradients or not explains_missing(facts)]
    return choose_problems(problem for finder in finders for problem in finder(facts))


def _find_forgotten(facts: Facts) -> Iterator[Problem]:
    never = [one for one in facts.modules if one.verdict == NEVER]
    reached = [one for one in never if any(is_inside(name, one.name) for name in facts.left_out)]
    whole = [one for one in never if one.is_module]
    # Without the flag, backward does not come to an output that the loss leaves out.
    left_out = [one for one in reached if one.is_module and facts.find_unused_parameters]
    without = [one for one in reached if one not in left_out]
    if without:
        yield Problem(
            Kind.FORGOTTEN,
            f"Backward reaches {short_names(without)} and computes no gradient for it: a custom autograd function "
            f"returns None for it{', or the loss leaves out an output' if facts.find_unused_parameters else ''}.",
            "Let that function's backward() return the gradient, or freeze the parameter before wrapping.",
        )
    severed = {name for record in facts.records for name in record.standing.severed}
    cut = [
        one for one in whole if all(each.name in severed for each in facts.parameters if is_inside(each.name, one.name))
    ]
    if cut:
        yield Problem(
            Kind.FORGOTTEN,
            f"No parameter of {short_names(cut)} got a gradient in any step: {WHY_SEVERED}.",
            MEND_SEVERED,
        )
    uncalled = [one for one in whole if one not in reached and one not in cut]
    if left_out:
        yield Problem(
            Kind.FORGOTTEN,
            f"The loss leaves out what {short_names(left_out)} computes, so no gradient came of it in any step.",
            "Use it in the loss if that is what you mean; otherwise freeze it before wrapping, or keep "
            "find_unused_parameters=True, without which DDP waits for it.",
        )
    if uncalled:
        yield Problem(
            Kind.FORGOTTEN,
            f"No parameter of {short_names(uncalled)} got a gradient in any step, although all of them require one.",
            "Use it in the loss if that is what you mean; otherwise freeze or remove it before wrapping.",
        )


def _find_frozen_late(facts: Facts) -> Iterator[Problem]:
    late = [one for one in facts.parameters if one.frozen_since is not None]
    if not late or facts.has_hook:
        return
    searches = facts.find_unused_parameters or facts.static_graph
    part = sum(one.dense_bytes for one in late) / sum(one.dense_bytes for one in facts.parameters)
    names = short_names([one for one in facts.modules if one.verdict == FROZEN_SINCE])
    yield Problem(
        Kind.FROZEN_LATE,
        f"{names} is frozen since {in_steps(late)}, and DDP "
        # Only the hook of a trial has kept such a run going.
        + ("has sent zeros for it since then." if searches else "without ddp_hooks would wait for its gradients."),
        "Call ddp_hooks.rebuild(ddp) on every rank after freezing for good, or register the hook and freeze with "
        "ddp_hooks.freeze(ddp, ...).",
        f"Either saves {describe_part(part)} of the bytes.",
    )


def _find_wrapped_twice(facts: Facts) -> Iterator[Problem]:
    parts = facts.records[0].wrapped_parts
    if parts:
        yield Problem(
            Kind.WRAPPED_TWICE,
            f"The wrapped model contains other DistributedDataParallel modules ({short_list(parts)}), so their "
            "gradients are averaged and sent twice.",
            "Wrap the whole model once, and none of its parts; ddp_hooks.register(ddp) refuses it as it is.",
        )


_FINDERS: tuple[Callable[[Facts], Iterator[Problem]], ...] = (
    find_drifting,
    find_marked_twice,
    find_changed_graph,
    find_missing_gradients,
    find_broken_backward,
    find_uneven,
    find_silent_rank,
    find_standstill,
    find_unfrozen,
    find_unwrapped,
    find_strangers,
    find_silent_hook,
    _find_frozen_late,
    _find_wrapped_twice,
    find_error,
    _find_forgotten,
)
