"""What is wrong in a run, the most serious first: what the report opens with.

A finder is a generator function that takes :class:`~ddp_hooks.doctor.questions.Facts` and yields the problems that it
sees in them. To add a diagnosis: add its kind to :class:`~ddp_hooks.doctor.problem.Kind`, at the
place that says how serious it is, and its finder to ``_FINDERS``, whose order means nothing. Finders with a subject of
their own have a module of their own. What a finder needs of each rank is in ``facts.records``, one record
of plain values for each rank that was heard of; what it needs of all together is in the other fields of ``Facts``. A
finder yields nothing where it is not certain: a wrong diagnosis is worse than none.

The report opens with at most three sentences: the fact and the change of the first problem and what the change gains,
or that nothing is wrong and the advice on policies. The first problem's details and the other problems follow, a
paragraph each. While there is a problem whose kind ``forbids_advice``, no policy is recommended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .problem import Kind, Problem
from .questions import Facts, short_names
from .verdicts import NEVER, UNFROZEN


def find_problems(facts: Facts) -> list[Problem]:
    """Return what is wrong, the most serious first."""
    found = [problem for finder in _FINDERS for problem in finder(facts)]
    return sorted(found, key=lambda problem: problem.kind)


def _find_unfrozen(facts: Facts) -> Iterator[Problem]:
    apart = [one for one in facts.modules if one.verdict == UNFROZEN]
    if apart and not facts.has_hook:
        yield Problem(
            Kind.APART,
            f"{short_names(apart)} was frozen when DDP was built and is trained now, so DDP does not average it and "
            "the ranks' weights differ.",
            "Wrap the model after unfreezing, or call ddp_hooks.register(ddp) and ddp_hooks.rebuild(ddp).",
        )


def _find_forgotten(facts: Facts) -> Iterator[Problem]:
    whole = [one for one in facts.modules if one.verdict == NEVER and one.is_module]
    if whole:
        yield Problem(
            Kind.FORGOTTEN,
            f"No parameter of {short_names(whole)} got a gradient in any step, although all of them require one.",
            "Use it in the loss if that is what you mean; otherwise freeze or remove it before wrapping.",
        )


_FINDERS: tuple[Callable[[Facts], Iterator[Problem]], ...] = (_find_unfrozen, _find_forgotten)
