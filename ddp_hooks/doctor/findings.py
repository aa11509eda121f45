"""The findings of a diagnosis, and how they follow from the ranks' records."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from ..wording import did_you_mean
from .other_hooks import OtherHook
from .prediction import dense_bytes, predict
from .problem import Kind, Problem
from .problems import find_problems
from .questions import Answer, Facts, advise, answer_all
from .recorder import Step, slots_of
from .records import RankRecord
from .timing import Division, divide, estimate, put_together
from .traffic import unite
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
class PolicyOutlook:
    """The effect that a policy would have had on the watched steps.

    Attributes:
        policy: the policy's name.
        payload_bytes: bytes of gradients that it would hand to collectives in all steps.
        payload_bytes_by_step: these bytes in each step.
        broadcast_bytes: the part of these bytes that ranks with the gradients would send directly to the others.
        narrow_bytes: the part of these bytes that would be sent in a narrow form.
        sent_bytes: bytes of gradients that each rank would send in all steps, as in ``state.stats().sent_bytes``.
        exact: whether the hook would send exactly this; for ``auto``, this is what it sends once it has settled.
        saved_fraction: the fraction of plain DDP's bytes that would be saved.
        step_seconds: the estimated time of a step; None with one rank.
    """

    policy: str
    payload_bytes: int
    payload_bytes_by_step: tuple[int, ...]
    broadcast_bytes: int
    narrow_bytes: int
    sent_bytes: tuple[int, ...]
    exact: bool
    saved_fraction: float
    step_seconds: float | None


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of a diagnosis, which are the same on every rank.

    Attributes:
        ranks: the number of ranks.
        steps: the number of synchronised steps that were watched.
        dense_bytes: bytes that plain DDP handed over in all of these steps.
        parameters: the verdict on each parameter, in the model's order.
        modules: the same verdicts, by module.
        policies: the effect that each policy would have had.
        narrow_fraction: the part of the dense bytes, in parameters with several units, that a narrow form holds exactly
            on every rank (bfloat16 or float16 for float32, float32 for float64); None if values were not looked at.
        division: how a step divides into computation and communication; None before the second step.
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
    policies: tuple[PolicyOutlook, ...]
    narrow_fraction: float | None
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

    def policy(self, name: str) -> PolicyOutlook:
        """Return the effect that a policy would have had.

        Args:
            name: of a preset.

        Raises:
            KeyError: its effect is unknown.
        """
        for one in self.policies:
            if one.policy == name:
                return one
        known = [one.policy for one in self.policies]
        raise KeyError(f"expected one of {', '.join(known)}, received {name!r}{did_you_mean(name, known)}")

    def to_dict(self) -> dict[str, Any]:
        """Return all findings as plain values, for JSON."""
        found = asdict(self)
        found["problems"] = [asdict(one) | {"kind": one.kind.name.lower()} for one in self.problems]
        return found


def find(records: Sequence[RankRecord], layouts: Sequence[Any], notes: Sequence[str] = ()) -> Findings:
    """Derive the findings from the ranks' records.

    Args:
        records: each rank's, with the same parameters.
        layouts: the bucket layouts (``_C.LayoutOfBuckets``), which are the same on every rank.
        notes: known limits of the diagnosis.
    """
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
    slots = [slots_of(layout) for layout in layouts]
    by_step = list(zip(*ranks, strict=True))
    united = [unite(steps, layouts[steps[0].layout], slots[steps[0].layout]) for steps in by_step]
    dense = [dense_bytes(step.layout) for step in united]
    unmanaged = {i: size for i, size in enumerate(first.sizes) if i >= first.reduced_count}
    # One rank sends nothing.
    predictions = predict(united, unmanaged, first.world) if united and len(records) == first.world.ranks > 1 else {}
    if predictions and "skip_zeros" not in predictions:
        notes.append("values were not looked at in every step (memory, or a device without a scan): skip_unused only")
    heard = [record.rank for record in records]
    verdicts = judge(first.names, first.sizes, first.reduced_count, heard, ranks, united, _judge_without_steps(records))
    place = {name: number for number, name in enumerate(first.order)}
    verdicts.sort(key=lambda one: place.get(one.name, len(place)))
    if first.has_hook:
        notes.append("a hook of this package is registered, so the times are with it, and none is estimated")
    elif first.other_hook is not None:
        notes.append(f"the times are with the script's own hook, {first.other_hook.name}, and none is estimated")
    times = [put_together(steps, sizes) for steps, sizes in zip(by_step, dense, strict=True)]
    searches = [max(step.search_seconds for step in steps) for steps in by_step]
    division = (
        divide(times, searches, len(records), fmean(record.copy_seconds_per_byte for record in records))
        if len(times) > 1
        else None
    )
    is_hooked = first.has_hook or first.other_hook is not None
    if division is not None and is_hooked:
        # What was sent is not what plain DDP sends.
        division = replace(division, bytes_per_second=None)
    total = sum(map(sum, dense))
    outlooks = tuple(
        PolicyOutlook(
            name,
            one.total.payload_bytes,
            tuple(sum(part.payload_bytes for part in step) for step in one.by_step),
            one.total.broadcast_bytes,
            one.total.narrow_bytes,
            one.total.sent_bytes,
            one.exact,
            1 - one.total.payload_bytes / total if total else 0.0,
            None if division is None or is_hooked else estimate(times, one.by_step, division),
        )
        for name, one in predictions.items()
    )
    looked = total > 0 and all(step.looked for step in united)
    narrow = sum(step.narrow_elements(i) * step.slots[i].element_bytes for step in united for i in step.divisible)
    single = [record.before_accumulating for record in records if record.before_accumulating is not None]
    facts = Facts(
        len(records),
        count,
        first.find_unused_parameters,
        first.static_graph,
        first.has_hook,
        tuple(verdicts),
        tuple(group_by_module(verdicts)),
        _same_every_step(ranks),
        _same_order(ranks),
        division,
        narrow / total if looked else None,
        min(single, default=None),
        tuple(records),
        tuple(rank for rank in range(first.world.ranks) if rank not in heard),
        max(record.standing.finished for record in records),
        frozenset(
            first.names[i] for steps in ranks for step in steps for i in array("I", step.order) if not step.received[i]
        ),
        tuple(
            1 - sent / max(size, 1)
            for one in outlooks
            if one.policy == "skip_unused"
            for sent, size in zip(one.payload_bytes_by_step, map(sum, dense), strict=True)
        ),
    )
    problems = find_problems(facts)
    is_broken = bool(facts.absent) or any(one.kind.breaks_run for one in problems)
    forbids_advice = is_broken or any(one.kind.forbids_advice for one in problems)
    if is_broken:
        outlooks = ()
    return Findings(
        first.world.ranks,
        count,
        total,
        facts.parameters,
        facts.modules,
        outlooks,
        facts.narrow_fraction,
        division,
        () if forbids_advice else tuple(answer_all(facts)),
        "" if forbids_advice else advise(facts, outlooks, total / max(count, 1)),
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
        unknown = set(record.names[record.reduced_count :])
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


def _same_every_step(ranks: Sequence[Sequence[Step]]) -> bool:
    return all(len({step.received for step in steps}) <= 1 for steps in ranks)


def _same_order(ranks: Sequence[Sequence[Step]]) -> bool:
    return all(len({step.order for step in steps}) <= 1 for steps in ranks)
