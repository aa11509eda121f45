"""One thing that is wrong, and how serious it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, auto


class Kind(IntEnum):
    """What can be wrong, the most serious first."""

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
        """Whether training cannot go on: what was seen before says little about how it would."""
        return Kind.APART < self < Kind.SCRIPT_RAISED

    @property
    def forbids_advice(self) -> bool:
        """Whether it has to go before it is worth talking about policies."""
        return self < Kind.SCRIPT_RAISED or self is Kind.WRAPPED_TWICE


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, in whole sentences.

    Attributes:
        kind: which; decides what comes first.
        fact: one sentence: what is wrong, and why, by name.
        change: one sentence: the way out.
        gain: one sentence: what that brings; empty where it is plain.
        details: further sentences, each a paragraph of its own: on which ranks, other ways out.
    """

    kind: Kind
    fact: str
    change: str
    gain: str = ""
    details: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the sentences with which it is told first."""
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
