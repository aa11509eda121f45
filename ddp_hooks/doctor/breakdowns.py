"""Finds why a run broke down: what DDP waits for, what it was told twice, and which ranks ran different steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..hangs.stack import BACKWARD
from ..wording import describe_ranks, short_list
from .gradient_watch import CHECKPOINT
from .problem import Kind, Problem
from .records import Facts, RankRecord, ShardFacts, ShardRecord
from .standing import Standing, Unfinished, Way
from .verdicts import ParameterVerdict, group_by_module

_NAMES_SHOWN = 8


# Modules that are wrapped by DDP, and modules with fully_shard.
Rank = RankRecord | ShardRecord
Seen = Facts | ShardFacts


def find_marked_twice(facts: Facts) -> Iterator[Problem]:
    """Find why DDP raised "Expected to mark a variable ready only once"."""
    found = [
        one
        for one in facts.records
        if one.standing.unfinished is Unfinished.RAISED
        and not one.static_graph
        and (one.standing.twice or one.standing.unexpected)
    ]
    if not found:
        return
    standing = found[0].standing
    names = _everywhere([standing.unexpected or standing.twice], facts)
    more: list[str] = []  # other ways out
    if standing.nested_in:
        is_checkpoint = CHECKPOINT in standing.nested_in
        what = (
            "checkpoints with use_reentrant=True"
            if is_checkpoint
            else f"{standing.nested_in[0]}, which calls backward() in its own backward()"
        )
        why = (
            f"find_unused_parameters=True does not see what is within {what}, and takes it for unused"
            if standing.unexpected
            else f"it is within several {what}, which tell DDP of it once each"
        )
        fact = f"Backward raised at {names}: {why}."
        change = "Wrap with static_graph=True, or leave find_unused_parameters out."
        if is_checkpoint:
            change = (
                "Pass use_reentrant=False to torch.utils.checkpoint.checkpoint (in transformers: "
                'gradient_checkpointing_kwargs={"use_reentrant": False}).'
            )
            more.append("Or wrap with static_graph=True, if every step uses the same parameters.")
            if found[0].find_unused_parameters:
                more.append("Or leave find_unused_parameters out, if every parameter is used in every step.")
    elif standing.unexpected and standing.reaches_nothing:
        fact = (
            "Backward raised because DDP found nothing in what forward returned that leads to a parameter, and took "
            "all of them for unused."
        )
        change = "Return tensors from forward, in tuples, lists, dicts or dataclasses, and compute the loss from them."
    elif standing.unexpected and standing.forwards > 1:
        fact = (
            f"Backward raised at {names}: there were {standing.forwards} forward passes before it, and "
            "find_unused_parameters=True knows only what the last one used."
        )
        change = (
            "Make one forward pass of them (with the inputs concatenated, or both calls within the module's "
            "forward()), or call backward() after each, all but the last one under ddp.no_sync()."
        )
    elif standing.unexpected:
        fact = (
            f"Backward raised at {names}: the loss uses it past DDP's forward pass (such as ddp.module.part(...), or a "
            "parameter in the loss), where find_unused_parameters=True does not see it and takes it for unused."
        )
        change = "Use it within the wrapped module's forward(), and return what comes of it."
    elif standing.passes > 1:
        fact = (
            f"Backward raised at {names}: {standing.passes} backward passes of one step went through it, and DDP "
            "expects each gradient once."
        )
        change = "Add the losses up and call backward() once."
        more.append("Or call ddp(...) and backward() for each loss, all but the last one under ddp.no_sync().")
    else:
        return
    more += ['DDP\'s own error is "Expected to mark a variable ready only once".', _place(found)]
    yield Problem(Kind.MARKED_TWICE, fact, change, details=tuple(more))


def find_changed_graph(facts: Facts) -> Iterator[Problem]:
    """Find a static graph that was not static."""
    static = [one for one in facts.records if one.static_graph]
    missing = [one for one in static if one.standing.unfinished is Unfinished.SHORT]
    extra = [one for one in static if one.standing.unfinished is Unfinished.RAISED and one.standing.unexpected]
    if not (found := missing or extra):
        return
    names = _everywhere([one.standing.missing if missing else one.standing.unexpected for one in found], facts)
    before, now = ("reached", "did not") if missing else ("did not use", "did")
    yield Problem(
        Kind.GRAPH_CHANGED,
        f"static_graph=True is set, but the graph changed: the first step {before} {names}, and the backward pass "
        f"after {count_steps(found[0].standing.finished)} {now}.",
        "Wrap without static_graph=True, and with find_unused_parameters=True instead.",
        details=_missing_by_rank(missing) if missing else (_place(extra),),
    )


WHY_SEVERED = (
    "it runs within checkpoints with use_reentrant=True, and those compute no gradients if none of their inputs "
    "requires one"
)
MEND_SEVERED = (
    "Pass use_reentrant=False to torch.utils.checkpoint.checkpoint (in transformers: "
    'gradient_checkpointing_kwargs={"use_reentrant": False}), or let an input require a gradient (in transformers: '
    "model.enable_input_require_grads())."
)


def find_missing_gradients(facts: Facts) -> Iterator[Problem]:
    """Find what a backward pass left out that DDP waits for."""
    found = [one for one in facts.records if not one.static_graph and one.standing.unfinished is Unfinished.SHORT]
    if not found:
        return
    first = found[0].standing
    left_out = {name for record in found for name in record.standing.missing}
    if moved := [one for one in found[0].moved if one[0] in left_out]:
        yield Problem(
            Kind.GRADIENTS_MISSING,
            f"{_everywhere([[name for name, _ in moved]], facts)} was cast or moved after wrapping ({moved[0][1]}), "
            f"which cuts a parameter off from DDP, so DDP waits for its gradients after {count_steps(first.finished)}.",
            "Cast and move the model before wrapping; for less precision use torch.autocast.",
            details=_standings(facts),
        )
        return
    severed = bool(left_out) and left_out <= {name for record in found for name in record.standing.severed}
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
            details=(
                "Or wrap with find_unused_parameters=True, if it is frozen in some steps only.",
                *_standings(facts),
            ),
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
        change = (
            "Let the loss depend on it (add 0 * output.sum()), or freeze it before wrapping: what forward returned "
            "depends on it, but backward did not come to it, as with backward(inputs=...) or a loss of gradients only."
        )
    elif differ or sometimes:
        change = "Wrap with find_unused_parameters=True, so that every rank takes part for every parameter."
    else:
        change = (
            "Use it in the loss; or freeze or remove it before wrapping; or wrap with find_unused_parameters=True if "
            "it is used in other steps."
        )
    if severed:
        fact = f"{fact[:-1]}: {WHY_SEVERED}."
        change, differ, sometimes = MEND_SEVERED, False, False
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
    """Find a backward pass that has raised, whether or not the script caught the error."""
    found = [
        one
        for one in facts.records
        if one.standing.unfinished is Unfinished.RAISED
        and not (one.standing.twice or one.standing.unexpected or one.end.lost)
    ]
    if not found:
        return
    first = found[0]
    is_caught = first.end.left != "backward"
    names = _everywhere([first.standing.missing], facts)
    if not is_caught and "Encountered gradient which is undefined" in first.end.error:
        yield Problem(
            Kind.BACKWARD_RAISED,
            f"A backward pass raised on {_ranks(found)} after {count_steps(first.standing.finished)}, because a "
            "parameter got a gradient under no_sync(), and has none any more in the synchronised pass, which does not "
            "use it.",
            "Call zero_grad() only after the synchronised pass, before the first one under no_sync().",
            details=(f"DDP's own error is {first.end.error}.", *_standings(facts)),
        )
        return
    if is_caught:
        change = (
            "Do not go on with this module after an error in backward(): mend what raises"
            + (f" ({first.standing.raised_with})" if first.standing.raised_with else "")
            + ", or wrap the model again, on every rank."
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
    """Find ranks that wait in a step that other ranks do not run."""
    if any(map(_is_broken, facts.records)):
        return
    waits = [record for record in facts.records if _is_in_step(record)]
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
    if all(record.end.way is Way.GOES_ON for record in others):
        first = others[0]
        name = first.end.waits_in
        where = f"waits in {name}" if name else "is not in a step"
        place = f" ({first.end.place})" if first.end.place else ""
        yield Problem(
            Kind.UNEVEN,
            f"{_capital(_ranks(waits))} {_do(waits, 'wait')} in the step after {steps} for {_ranks(others)}, which "
            f"{where}{place}.",
            f"Call {name} on every rank or on none: look for a condition on the rank, or on its data, around it."
            if name
            else f"Look at what {_ranks(others)} {_do(others, 'do')} there: no rank goes on before each of them runs "
            "this step.",
            details=_standings(facts),
        )
        return
    ended = all(record.end.way is not Way.GOES_ON for record in others)
    where = "has come to the end of its script" if ended else "runs no step"
    how = ""
    if early := [one for one in others if one.standing.early_breaks > waits[0].standing.early_breaks]:
        how = f" (on {_ranks(early)} backward raised {early[0].standing.raised_with}, and the script caught it)"
    elif failed := [one for one in others if one.standing.failed_forwards > waits[0].standing.failed_forwards]:
        how = f" ({_ranks(failed)} caught an error that a forward pass raised)"
    elif idle := [one for one in others if _idle(one.standing) > _idle(waits[0].standing)]:
        how = f" (on {_ranks(idle)} no backward pass followed some forward pass)"
    join = ", or train within `with ddp.join():`" if facts.can_join else ""
    yield Problem(
        Kind.UNEVEN,
        f"The ranks ran different numbers of backward passes: {_ranks(waits)} {_do(waits, 'wait')} in the step after "
        f"{steps} "
        f"for {_ranks(others)}, which {where}{how}.",
        f"Give every rank the same number of batches{join}; skip a batch, or stop early, on every rank or on none.",
        details=_standings(facts),
    )


def find_standstill(facts: Seen) -> Iterator[Problem]:
    """Say what is known of a run that has ended within a step, or stood still, for none of the reasons above."""
    stood = [record for record in facts.records if record.end.way is Way.GOES_ON]
    in_step = [record for record in facts.records if _is_in_step(record)]
    if not stood or facts.absent or any(map(_is_broken, facts.records)):
        return
    if len(in_step) == len(facts.records):
        if len({record.standing.finished for record in in_step}) > 1:
            return
        where = f"every rank is within the step after {count_steps(in_step[0].standing.finished)}"
        change = "Look at where each rank stands: a rank may wait in a collective of its own that others do not call."
        own = [record for record in in_step if record.end.waits_in not in ("", BACKWARD, "forward")]
        if own and len(own) < len(in_step):
            name = own[0].end.waits_in
            where += f", and {_ranks(own)} {_do(own, 'wait')} in {name} there"
            change = (
                f"Call {name} on every rank or on none: look for a condition on the rank, or on its data, around it."
            )
    elif not in_step and not any(record.end.way is Way.RAISED for record in facts.records):
        by_place: dict[str, list[Rank]] = {}
        for record in stood:
            by_place.setdefault(_stand(record), []).append(record)
        where = " and ".join(f"{_ranks(some)} {_do(some, place)}" for place, some in by_place.items())
        change = "Let every rank call the same collectives in the same order: look for a condition on the rank."
        if any(record.end.waits_in == "forward" for record in stood):
            change = (
                "Call ddp(...) on every rank or on none, also in an evaluation, because its forward pass broadcasts "
                "buffers; on one rank evaluate with ddp.module(...)."
            )
    else:
        return
    yield Problem(Kind.STOOD_STILL, f"No step has ended for a long time: {where}.", change, details=_standings(facts))


def find_silent_rank(facts: Facts) -> Iterator[Problem]:
    """Find ranks that did not answer, if nothing else breaks the run."""
    asked = any(record.end.has_asked for record in facts.records)
    raised = any(record.end.way is Way.RAISED and not record.end.lost for record in facts.records)
    if not asked or not facts.absent or raised or any(map(_is_broken, facts.records)):
        return
    waits = [one for one in facts.records if one.end.lost or _is_in_step(one) or one.end.waits_in]
    if not waits:
        return
    absent = describe_ranks(facts.absent)
    one = len(facts.absent) == 1
    yield Problem(
        Kind.UNEVEN,
        f"{_capital(absent)} left no word while {_ranks(waits)} waited for {'it' if one else 'them'} after "
        f"{count_steps(waits[0].standing.finished)}: {'it was' if one else 'they were'} killed, crashed, or "
        f"{'is' if one else 'are'} in a call that does not return.",
        "Look at the last lines that "
        f"{'it' if one else 'they'} printed, and at the exit code: -9 often means that the host ran out of memory.",
        details=(
            *_standings(facts),
            'If it printed "Received data size doesn\'t match expected size" (gloo), the ranks were in different '
            "collectives: look for one that is called on some ranks only, or in another order.",
        ),
    )


def find_error(facts: Seen) -> Iterator[Problem]:
    """Find an error that has ended the script outside of a step."""
    raised = [record for record in facts.records if record.end.way is Way.RAISED]
    if raised:
        first = raised[0]
        where = {"backward": "in backward ", "forward": "in the forward pass "}.get(first.end.left, "")
        yield Problem(
            Kind.SCRIPT_RAISED,
            f"The script ended with an error {where}on {_ranks(raised)}, after "
            f"{count_steps(first.standing.finished)}: {first.end.error}.",
            "No parameter had been reached by then, so look for what raised in the loss."
            if first.end.left == "backward"
            else "Every step that had begun was finished, so look for the reason in the script.",
        )


def count_steps(steps: int) -> str:
    """Return a number of finished steps in words."""
    return f"{steps} finished step{'' if steps == 1 else 's'}"


def _idle(standing: Standing) -> int:
    """Return how many forward passes no backward pass has followed."""
    begun = standing.unfinished is not Unfinished.NONE
    return standing.idle_forwards + max(standing.forwards - begun, 0)


def _is_in_step(record: Rank) -> bool:
    standing = record.standing
    # What has lost the connection was in its step until then.
    is_lost = record.end.lost and standing.unfinished is Unfinished.RAISED
    return standing.in_forward or standing.unfinished in (Unfinished.RUNS, Unfinished.WAITS) or is_lost


def _is_broken(record: Rank) -> bool:
    """Say whether a backward pass has gone wrong on a rank by itself."""
    unfinished = record.standing.unfinished
    return unfinished is Unfinished.SHORT or (unfinished is Unfinished.RAISED and not record.end.lost)


def _do(some: Sequence[Rank], verb: str) -> str:
    """Return a verb as it follows some ranks; its first word has no ending."""
    if len(some) > 1:
        return verb
    first, _, rest = verb.partition(" ")
    first = {"are": "is", "do": "does"}.get(first, f"{first}s")
    return f"{first} {rest}".rstrip()


def _stand(record: Rank) -> str:
    """Say where a rank stands that is not in a step, to follow several ranks."""
    place = f" ({record.end.place})" if record.end.place else ""
    return (f"wait in {record.end.waits_in}" if record.end.waits_in else "are between two steps") + place


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


def _place(records: Sequence[Rank]) -> str:
    return f"It was so on {_ranks(records)}, after {count_steps(records[0].standing.finished)}."


def _missing_by_rank(records: Sequence[RankRecord]) -> tuple[str, ...]:
    lines = []
    for record in records:
        names, more = record.standing.missing, len(record.standing.missing) - _NAMES_SHOWN
        shown = ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
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
    place = f" ({record.end.place})" if record.end.place else ""
    if standing.unfinished in (Unfinished.RUNS, Unfinished.WAITS):
        return f"in backward after {steps}{place}"
    waits_in = record.end.waits_in
    if standing.in_forward:
        within = "" if waits_in in ("", BACKWARD, "forward") else f"in {waits_in} "
        return f"{within}in forward after {steps}{place}"
    where = f"waits in {waits_in}" if waits_in and waits_in != BACKWARD else "not in a step"
    return f"{where}, after {steps}{place}"
