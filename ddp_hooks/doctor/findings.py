"""The findings of a diagnosis, and how they follow from the ranks' records."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .other_hooks import OtherHook
from .problem import Kind, Problem
from .problems import find_problems
from .questions import Answer, advise, answer_all
from .records import Facts, RankRecord
from .steps import Step
from .timing import Division, PolicyTrial, divide, sum_up
from .verdicts import (
    ADDED,
    IGNORED,
    REMOVED,
    REPLACED,
    UNFROZEN,
    ModuleVerdict,
    ParameterVerdict,
    group_by_module,
    judge,
)


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of a diagnosis, which are the same on every rank.

    Attributes:
        ranks: the number of ranks.
        steps: the number of synchronised steps that were watched.
        dense_bytes: bytes that plain DDP handed over in all of these steps.
        parameters: the verdict on each parameter, in the model's order.
        modules: the same verdicts, by module.
        policies: the effect of each policy that was tried.
        division: how a step of plain DDP divides into computation and communication; None before the second step.
        answers: the answers to common questions.
        advice: the line to add, or why none helps; empty while there are problems that have to be solved first.
        notes: limits of this diagnosis.
        problems: what is wrong, the most serious first.
        heard: the ranks that have reported; all ranks, unless an error has ended the run. A parameter's pattern has one
            text for each of them.
        model: the class of the wrapped module.
        called: the script's names for the module, as far as they were found, the most telling first.
        other_hook: the registered communication hook, if it is not this package's.
    """

    ranks: int
    steps: int
    dense_bytes: int
    parameters: tuple[ParameterVerdict, ...]
    modules: tuple[ModuleVerdict, ...]
    policies: tuple[PolicyTrial, ...]
    division: Division | None
    answers: tuple[Answer, ...]
    advice: str
    notes: tuple[str, ...]
    problems: tuple[Problem, ...] = ()
    heard: tuple[int, ...] = ()
    model: str = ""
    called: tuple[str, ...] = ()
    other_hook: OtherHook | None = None

    def verdict(self, name: str) -> ParameterVerdict:
        """Return the verdict on one parameter.

        Args:
            name: as in the wrapped model.

        Raises:
            KeyError: there is no such parameter.
        """
        for one in self.parameters:
            if one.name == name:
                return one
        raise KeyError(f"expected the name of a parameter of the wrapped model, received {name!r}")

    def policy(self, name: str) -> PolicyTrial:
        """Return the effect of a policy that was tried.

        Args:
            name: the name of the policy.

        Raises:
            KeyError: it was not tried.
        """
        for one in self.policies:
            if one.policy == name:
                return one
        tried = [one.policy for one in self.policies]
        raise KeyError(f"expected one of the policies that were tried, {tried}, received {name!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return all findings as plain values, for JSON."""
        found = asdict(self)
        found["problems"] = [asdict(one) | {"kind": one.kind.name.lower()} for one in self.problems]
        return found


def find(records: Sequence[RankRecord], notes: Sequence[str] = ()) -> Findings:
    """Derive the findings from the ranks' records."""
    first = records[0]
    notes = list(notes)
    joined = {number for record in records for number in record.missed}
    ranks = [_steps_of_all(record, joined) for record in records]
    if joined:
        steps = "one step, which is" if len(joined) == 1 else f"{len(joined)} steps, which are"
        notes.append(f"some rank had joined (ddp.join()) in {steps} left out")
    count = min(map(len, ranks))
    if any(len(steps) != count for steps in ranks):
        notes.append(f"the ranks ran different numbers of steps; the first {count} of each are compared")
    ranks = [steps[:count] for steps in ranks]
    by_step = list(zip(*ranks, strict=True))
    if not all(step.looked for steps in by_step for step in steps):
        notes.append("values were not looked at in every step (memory, or a device without a scan)")
    heard = [record.rank for record in records]
    verdicts = judge(first.names, first.sizes, heard, ranks, first.units, _judge_without_steps(records))
    place = {name: number for number, name in enumerate(first.order)}
    verdicts.sort(key=lambda one: place.get(one.name, len(place)))
    if first.has_hook:
        notes.append("a hook of this package is registered, and the times are with it")
    elif first.other_hook is not None:
        notes.append(f"the times are with the script's own hook, {first.other_hook.name}")
    division = divide(by_step[: first.plain_steps])
    # Bytes by host need every rank.
    trials_by_policy = zip(*(record.trials for record in records), strict=False) if len(records) == first.ranks else ()
    tried = tuple(sum_up(trials, division) for trials in trials_by_policy)
    facts = Facts(
        len(records),
        count,
        first.find_unused_parameters,
        first.static_graph,
        first.has_hook,
        tuple(verdicts),
        tuple(group_by_module(verdicts)),
        all(len({step.received for step in steps}) <= 1 for steps in ranks),
        all(len({step.order for step in steps}) <= 1 for steps in ranks),
        division,
        tuple(records),
        tuple(rank for rank in range(first.ranks) if rank not in heard),
        max(record.standing.finished for record in records),
        frozenset(
            first.names[i] for steps in ranks for step in steps for i in array("I", step.order) if not step.received[i]
        ),
    )
    problems = find_problems(facts)
    is_broken = bool(facts.absent) or any(one.kind.breaks_run for one in problems)
    forbids_advice = is_broken or any(one.kind.forbids_advice for one in problems)
    if first.why_not_tried and first.other_hook is None and not forbids_advice:
        notes.append(f"{'not all policies were' if tried else 'no policy was'} tried, because {first.why_not_tried}")
    return Findings(
        first.ranks,
        count,
        sum(one.dense_bytes for one in verdicts) * count,
        facts.parameters,
        facts.modules,
        () if is_broken else tried,
        division,
        () if forbids_advice else tuple(answer_all(facts)),
        "" if forbids_advice else advise(facts, tried),
        tuple(notes),
        tuple(problems),
        tuple(heard),
        first.model,
        first.called,
        first.other_hook,
    )


def leave_error_to_its_module(findings: Sequence[Findings]) -> list[Findings]:
    """If one of several modules explains an error, do not report the error for the others."""
    is_found = any(problem.kind.breaks_run for one in findings for problem in one.problems)
    return [
        replace(one, problems=tuple(each for each in one.problems if each.kind is not Kind.SCRIPT_RAISED))
        if is_found
        else one
        for one in findings
    ]


def _judge_without_steps(records: Sequence[RankRecord]) -> dict[str, str]:
    """Return the verdicts, by name, that do not follow from the steps that DDP has finished."""
    verdicts = dict.fromkeys(records[0].ignored, IGNORED)
    for record in records:
        unknown = set(record.names[len(record.units) :])
        verdicts |= dict.fromkeys((name for name in record.standing.unreduced_names if name in unknown), UNFROZEN)
        for verdict, names in (
            (REPLACED, record.strangers.replaced),
            (ADDED, record.strangers.added),
            (REMOVED, record.strangers.removed),
        ):
            verdicts |= dict.fromkeys(names, verdict)
    return verdicts


def _steps_of_all(record: RankRecord, joined: set[int]) -> tuple[Step, ...]:
    missed = set(record.missed)
    numbers = (number for number in range(len(record.steps) + len(missed)) if number not in missed)
    return tuple(step for number, step in zip(numbers, record.steps, strict=True) if number not in joined)
