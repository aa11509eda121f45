"""A problem in a run, and how serious it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto


class Kind(IntEnum):
    """The kinds of problems, the most serious first."""

    APART = auto()  # the ranks train weights that nothing averages
    MARKED_TWICE = auto()  # DDP was told of a parameter's gradient when it expected none
    GRAPH_CHANGED = auto()  # a static graph was not static
    GRADIENTS_MISSING = auto()  # DDP waits for gradients that do not come
    BACKWARD_RAISED = auto()  # a backward pass has ended early
    UNEVEN = auto()  # ranks ran different numbers of steps
    STOOD_STILL = auto()  # no step ended, for a reason that is not seen
    SCRIPT_RAISED = auto()  # an error has left the script, and DDP is not the reason as far as seen
    WRAPPED_TWICE = auto()  # a part of the model is a DDP module, too
    FROZEN_LATE = auto()  # a part of the model was frozen halfway, and is sent as zeros
    FORGOTTEN = auto()  # a part of the model gets no gradient, and the run goes on

    @property
    def breaks_run(self) -> bool:
        """Whether training cannot continue, so that earlier steps say little about later ones."""
        return Kind.APART < self < Kind.SCRIPT_RAISED

    @property
    def forbids_advice(self) -> bool:
        """Whether it has to be solved before it is worth recommending a policy."""
        return self < Kind.SCRIPT_RAISED or self is Kind.WRAPPED_TWICE


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem, in whole sentences.

    Attributes:
        kind: the kind of problem, which decides the order.
        fact: one sentence that says what is wrong, and why, with names.
        change: one sentence that says what to do.
        gain: one sentence that says what that brings; empty if it is obvious.
        details: further sentences, each of which is a paragraph: on which ranks, other ways out.
    """

    kind: Kind
    fact: str
    change: str
    gain: str = ""
    details: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the sentences that open the report."""
        return " ".join(filter(None, (self.fact, self.change, self.gain)))


def open_report(steps: int, problems: Sequence[Problem], advice: str) -> str:
    """Return at most three sentences: what is wrong or that nothing is, what to change, and what that gains.

    Args:
        steps: how many were watched.
        problems: the most serious first.
        advice: on policies, two sentences at most.
    """
    if not problems:
        return f"Nothing is wrong. {advice}" if steps else advice
    return str(problems[0])


def choose_problems(found: Iterable[Problem]) -> list[Problem]:
    """Return the problems to report, the most serious first: if the run broke down, only those that matter then."""
    problems = sorted(found, key=lambda problem: problem.kind)
    is_broken = any(problem.kind.breaks_run for problem in problems)
    return [problem for problem in problems if not is_broken or problem.kind.forbids_advice]
