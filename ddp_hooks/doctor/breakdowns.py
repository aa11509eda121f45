"""Why a run broke down: what DDP waits for, what it was told twice, and which ranks ran other steps than others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from ..wording import describe_ranks, short_list
from .gradient_watch import CHECKPOINT
from .problem import Kind, Problem
from .questions import Facts
from .records import RankRecord
from .standing import End, Standing, Unfinished, Way
from .verdicts import ParameterVerdict, group_by_module

_NAMES_SHOWN = 8


class Rank(Protocol):
    """What a rank says of how a module stands there, wrapped by DDP or with fully_shard."""

    @property
    def rank(self) -> int:
        """Which one it is."""

    @property
    def order(self) -> tuple[str, ...]:
        """The names of all parameters, in the model's order."""

    @property
    def standing(self) -> Standing:
        """What has become of its backward passes."""

    @property
    def end(self) -> End:
        """How what was watched has ended there."""


class Seen(Protocol):
    """What the ranks that were heard of say, together."""

    @property
    def records(self) -> Sequence[Rank]:
        """What each says, by rank."""

    @property
    def absent(self) -> Sequence[int]:
        """The ranks that said nothing."""

    @property
    def can_join(self) -> bool:
        """Whether ranks may run different numbers of steps within a join block."""


_Rank = TypeVar("_Rank", bound=Rank)


def find_marked_twice(facts: Facts) -> Iterator[Problem]:
    """Tell apart why DDP raised "Expected to mark a variable ready only once"."""
    found = _select(
        facts.records,
        lambda record: (
            record.standing.unfinished is Unfinished.RAISED
            and not record.static_graph
            and bool(record.standing.twice or record.standing.unexpected)
        ),
    )
    if not found:
        return
    standing = found[0].standing
    names = _everywhere([standing.unexpected or standing.twice], facts)
    flag = found[0].find_unused_parameters
    details = ['DDP\'s own error is "Expected to mark a variable ready only once".', *_places(found)]
    if standing.nested_in:
        function = standing.nested_in[0]
        what = (
            "checkpoints with use_reentrant=True"
            if CHECKPOINT in standing.nested_in
            else f"{function}, which calls backward() in its own backward()"
        )
        why = (
            f"find_unused_parameters=True does not see what is within {what}, and takes it for unused"
            if standing.unexpected
            else f"it is within several {what}, which tell DDP of it once each"
        )
        others = ["Or wrap with static_graph=True, if every step uses the same parameters."]
        if flag:
            others.append("Or leave find_unused_parameters out, if every parameter is used in every step.")
        yield Problem(
            Kind.MARKED_TWICE,
            f"Backward raised at {names}: {why}.",
            "Pass use_reentrant=False to torch.utils.checkpoint.checkpoint (in transformers: "
            'gradient_checkpointing_kwargs={"use_reentrant": False}).'
            if CHECKPOINT in standing.nested_in
            else "Wrap with static_graph=True, or leave find_unused_parameters out.",
            details=(*others[: 2 if CHECKPOINT in standing.nested_in else 0], *details),
        )
    elif standing.unexpected and standing.reaches_nothing:
        yield Problem(
            Kind.MARKED_TWICE,
            "Backward raised because DDP found nothing in what forward returned that leads to a parameter, and took "
            "all of them for unused.",
            "Return tensors from forward, in tuples, lists, dicts or dataclasses, and compute the loss from them.",
            details=tuple(details),
        )
    elif standing.unexpected and standing.forwards > 1:
        yield Problem(
            Kind.MARKED_TWICE,
            f"Backward raised at {names}: there were {standing.forwards} forward passes before it, and "
            "find_unused_parameters=True knows only what the last one used.",
            "Make one forward pass of them (with the inputs concatenated, or both calls within the module's "
            "forward()), or call backward() after each, all but the last one under ddp.no_sync().",
            details=tuple(details),
        )
    elif standing.unexpected:
        yield Problem(
            Kind.MARKED_TWICE,
            f"Backward raised at {names}: the loss uses it past DDP's forward pass (such as ddp.module.part(...), or a "
            "parameter in the loss), where find_unused_parameters=True does not see it and takes it for unused.",
            "Use it within the wrapped module's forward(), and return what comes of it.",
            details=tuple(details),
        )
    elif standing.passes > 1:
        yield Problem(
            Kind.MARKED_TWICE,
            f"Backward raised at {names}: {standing.passes} backward passes of one step went through it, and DDP "
            "expects each gradient once.",
            "Add the losses up and call backward() once.",
            details=(
                "Or call ddp(...) and backward() for each loss, all but the last one under ddp.no_sync().",
                *details,
            ),
        )


def find_changed_graph(facts: Facts) -> Iterator[Problem]:
    """Find a static graph that was not static."""
    missing = _select(facts.records, lambda one: one.static_graph and one.standing.unfinished is Unfinished.SHORT)
    extra = _select(
        facts.records,
        lambda one: one.static_graph and one.standing.unfinished is Unfinished.RAISED and bool(one.standing.unexpected),
    )
    change = "Wrap without static_graph=True, and with find_unused_parameters=True instead."
    if missing:
        names = _everywhere([record.standing.missing for record in missing], facts)
        yield Problem(
            Kind.GRAPH_CHANGED,
            f"static_graph=True is set, but the graph changed: the first step reached {names}, and the backward pass "
            f"after {count_steps(missing[0].standing.finished)} did not.",
            change,
            details=_missing_by_rank(missing),
        )
    elif extra:
        names = _everywhere([record.standing.unexpected for record in extra], facts)
        yield Problem(
            Kind.GRAPH_CHANGED,
            f"static_graph=True is set, but the graph changed: the first step did not use {names}, and the backward "
            f"pass after {count_steps(extra[0].standing.finished)} did.",
            change,
            details=tuple(_places(extra)),
        )


def find_missing_gradients(facts: Facts) -> Iterator[Problem]:
    """Find what a backward pass left out that DDP waits for."""
    found = _select(facts.records, lambda one: not one.static_graph and one.standing.unfinished is Unfinished.SHORT)
    if not found:
        return
    first = found[0].standing
    sets = {record.standing.missing for record in found}
    names = _everywhere([record.standing.missing for record in found], facts)
    differ = len(sets) > 1 or (len(found) < len(facts.records) and not facts.absent)
    sometimes = any(record.standing.finished for record in found)
    flag = found[0].find_unused_parameters
    frozen = all(record.standing.frozen and not record.standing.missing for record in found)
    if frozen:
        yield Problem(
            Kind.GRADIENTS_MISSING,
            f"{_everywhere([record.standing.frozen for record in found], facts)} was frozen after wrapping, and DDP "
            f"waits for its gradients after {count_steps(first.finished)}.",
            "Freeze before wrapping, or call ddp_hooks.rebuild(ddp) on every rank after freezing; or register the "
            "hook, ddp_hooks.register(ddp), and freeze with ddp_hooks.freeze(ddp, ...).",
            details=_standings(facts),
        )
        return
    when = f"after {count_steps(first.finished)}" if first.finished else "in its first step"
    fact = (
        f"The ranks use different parameters: {when}, backward left out {names} on {_ranks(found)}, and DDP waits for "
        "the gradients."
        if differ
        else f"{when[0].upper()}{when[1:]}, backward left out {names}, and DDP waits for the gradients."
    )
    if flag:
        change = "Let backward() reach all that forward returned: it was cut short, as by backward(inputs=...)."
    elif differ or sometimes:
        change = "Wrap with find_unused_parameters=True, so that every rank takes part for every parameter."
    else:
        change = (
            "Use it in the loss; or freeze or remove it before wrapping; or wrap with find_unused_parameters=True if "
            "it is used in other steps."
        )
    gain = "" if flag else "ddp_hooks.register(ddp) then sends only what some rank used."
    yield Problem(
        Kind.GRADIENTS_MISSING,
        fact,
        change,
        gain if differ or sometimes else "",
        details=(
            *(_missing_by_rank(facts.records) if differ else ()),
            *_standings(facts),
            *(
                ('DDP then refuses the next forward pass: "Expected to have finished reduction in the prior ...".',)
                if any(record.end.way is not Way.GOES_ON for record in found)
                else ()
            ),
        ),
    )


def find_broken_backward(facts: Seen) -> Iterator[Problem]:
    """Find a backward pass that has raised, whether or not somebody has caught that."""
    found = _select(
        facts.records,
        lambda one: (
            one.standing.unfinished is Unfinished.RAISED and not (one.standing.twice or one.standing.unexpected)
        ),
    )
    if not found:
        return
    first = found[0]
    is_caught = first.end.left != "backward"
    names = _everywhere([first.standing.missing], facts)
    if is_caught:
        change = (
            "Do not go on with this module after an error in backward(): mend what raises, or wrap the model again, on "
            "every rank."
        )
    else:
        change = f"Mend what raised: {first.end.error}."
    yield Problem(
        Kind.BACKWARD_RAISED,
        f"A backward pass raised on {_ranks(found)} after {count_steps(first.standing.finished)}"
        + (", and the script caught the error" if is_caught else "")
        + (", so DDP waits for gradients that it will not get." if first.standing.missing else "."),
        change,
        details=(
            *((f"No gradient had come of {names} by then.",) if names else ()),
            "Unused parameters are not the reason.",
            *_standings(facts),
        ),
    )


def find_uneven(facts: Seen) -> Iterator[Problem]:
    """Find ranks that wait in a step which others do not run."""
    if any(record.standing.unfinished in (Unfinished.SHORT, Unfinished.RAISED) for record in facts.records):
        return
    waits = _select(facts.records, lambda one: _is_in_step(one.standing))
    others = [record for record in facts.records if record not in waits]
    if not waits or not others:
        return
    raised = [record for record in others if record.end.way is Way.RAISED]
    steps = count_steps(waits[0].standing.finished)
    if raised:
        yield Problem(
            Kind.UNEVEN,
            f"{_capital(_ranks(raised))} ended with an error ({raised[0].end.error}) while {_ranks(waits)} waited for "
            f"it in the step after {steps}.",
            "Mend that error; the other ranks are only waiting.",
            details=_standings(facts),
        )
        return
    ended = all(record.end.way is not Way.GOES_ON for record in others)
    where = "has come to the end of its script" if ended else "runs no step"
    how = ""
    if failed := [one for one in others if one.standing.failed_forwards > waits[0].standing.failed_forwards]:
        how = f" ({_ranks(failed)} caught an error that a forward pass raised)"
    elif idle := [one for one in others if _idle(one.standing) > _idle(waits[0].standing)]:
        how = f" (on {_ranks(idle)} no backward pass followed some forward pass, or it raised and was caught)"
    join = ", or train within `with ddp.join():`" if facts.can_join else ""
    yield Problem(
        Kind.UNEVEN,
        f"The ranks ran different numbers of backward passes: {_ranks(waits)} waits in the step after {steps} "
        f"for {_ranks(others)}, which {where}{how}.",
        f"Give every rank the same number of batches{join}; skip a batch on every rank or on none.",
        details=_standings(facts),
    )


def find_standstill(facts: Seen) -> Iterator[Problem]:
    """Say what is known of a run that has ended within a step, or stood still, for none of the reasons above."""
    found = _select(facts.records, lambda one: one.standing.unfinished in (Unfinished.RUNS, Unfinished.WAITS))
    stood = [record for record in facts.records if record.end.way is Way.GOES_ON]
    if len(found) < len(facts.records) or not found:
        return
    if stood and len({record.standing.finished for record in found}) == 1:
        yield Problem(
            Kind.STOOD_STILL,
            f"No step has ended for a long time: every rank is within the backward pass after "
            f"{count_steps(found[0].standing.finished)}.",
            "Look at where each rank stands: a rank may wait in a collective of its own that others do not call.",
            details=_standings(facts),
        )


def count_steps(steps: int) -> str:
    """Return a number of finished steps in words."""
    return f"{steps} finished step{'' if steps == 1 else 's'}"


def _idle(standing: Standing) -> int:
    """Return how many forward passes no backward pass has followed."""
    begun = standing.unfinished is not Unfinished.NONE
    return standing.idle_forwards + max(standing.forwards - begun, 0)


def _is_in_step(standing: Standing) -> bool:
    return standing.in_forward or standing.unfinished in (Unfinished.RUNS, Unfinished.WAITS)


def _select(records: Sequence[_Rank], condition: Callable[[_Rank], bool]) -> list[_Rank]:
    return [record for record in records if condition(record)]


def _ranks(records: Sequence[Rank]) -> str:
    return describe_ranks([record.rank for record in records])


def _capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


def _everywhere(names: Sequence[Sequence[str]], facts: Seen) -> str:
    """Return all of the names in one line, each once, and modules in place of all of their parameters."""
    some = set().union(*names)
    modules = group_by_module(
        [ParameterVerdict(name, 0, str(name in some), 0, (), None, ()) for name in facts.records[0].order]
    )
    return short_list([one.name or "the whole model" for one in modules if one.verdict == "True"])


def _places(records: Sequence[Rank]) -> list[str]:
    return [f"It was so on {_ranks(records)}, after {count_steps(records[0].standing.finished)}."]


def _missing_by_rank(records: Sequence[RankRecord]) -> tuple[str, ...]:
    lines = []
    for record in records:
        names = record.standing.missing
        shown = ", ".join(names[:_NAMES_SHOWN]) + (f" and {len(names) - _NAMES_SHOWN} more" if names[8:] else "")
        lines.append(f"rank {record.rank}: {shown or 'none: it has all of its gradients'}")
    return tuple(lines)


def _standings(facts: Seen) -> tuple[str, ...]:
    lines = [f"rank {record.rank}: {_describe(record)}" for record in facts.records]
    if facts.absent:
        lines.append(f"no word from {describe_ranks(facts.absent)}: ended, or busy elsewhere")
    return tuple(lines)


def _describe(record: Rank) -> str:
    standing = record.standing
    steps = count_steps(standing.finished)
    if record.end.way is Way.RAISED:
        return f"ended after {steps} with {record.end.error}"
    if record.end.way is not Way.GOES_ON:
        return f"ended after {steps}"
    if standing.unfinished in (Unfinished.RUNS, Unfinished.WAITS):
        return f"in backward after {steps}"
    if standing.in_forward:
        return f"in forward after {steps}"
    return f"not in a step, after {steps}"
