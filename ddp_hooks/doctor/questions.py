"""Answers common questions from what the ranks saw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..wording import describe_bytes, describe_part, short_list
from .other_hooks import OtherHook
from .records import RankRecord
from .timing import Division
from .verdicts import (
    FROZEN_AFTER,
    FROZEN_SINCE,
    NEVER,
    REMOVED,
    REPLACED,
    SOME_RANKS,
    SOMETIMES,
    ModuleVerdict,
    ParameterVerdict,
    is_inside,
    unite_names,
    without_numbers,
)

# Below this part of the bytes a hook is not worth a line.
LEAST_SAVED = 0.02
# What looking at values has to save besides to be worth it.
_LEAST_MORE = 0.05
# How much of the bytes accumulation has to spoil to be worth a word.
_LEAST_SPOILED = 0.25
_FROZEN = (FROZEN_AFTER, FROZEN_SINCE)
_UNUSED = (NEVER, SOMETIMES, SOME_RANKS, *_FROZEN)
_NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the questions, and its answer.

    Attributes:
        question: in words.
        verdict: ``yes``, ``no``, or a figure.
        reason: why.
    """

    question: str
    verdict: str
    reason: str


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that the answers follow from.

    Attributes:
        ranks: how many.
        steps: how many were watched.
        find_unused_parameters: DDP's setting.
        static_graph: DDP's setting, too.
        has_hook: a hook of this package is registered.
        parameters: what became of each.
        modules: the same by module.
        same_parameters: each rank used the same ones in every step.
        same_order: and their gradients came in the same order.
        division: how a step divides, or None.
        narrow_fraction: which part of plain DDP's bytes a narrow form holds to the bit, on every rank, or None.
        before_accumulating: the same of a single pass where several are accumulated, on the rank with the least; None
            where none are.
        records: what each rank wrote down that was heard of, by rank.
        absent: the ranks that were not.
        finished: how many steps the rank has finished that has finished most.
        saved_by_step: which part of its bytes ``skip_unused`` would save in each step; empty where that is not known.
        left_out: what some step reached with no gradient, because the loss leaves out an output: the parameters' names.
    """

    ranks: int
    steps: int
    find_unused_parameters: bool
    static_graph: bool
    has_hook: bool
    parameters: tuple[ParameterVerdict, ...]
    modules: tuple[ModuleVerdict, ...]
    same_parameters: bool
    same_order: bool
    division: Division | None
    narrow_fraction: float | None
    before_accumulating: float | None
    records: tuple[RankRecord, ...]
    absent: tuple[int, ...]
    finished: int
    left_out: frozenset[str]
    saved_by_step: tuple[float, ...]

    @property
    def can_join(self) -> bool:
        """Whether ranks may run different numbers of steps within a join block."""
        return True


class Outlook(Protocol):
    """What a policy would have made of the steps that were watched."""

    @property
    def policy(self) -> str:
        """Its name."""

    @property
    def saved_fraction(self) -> float:
        """Of plain DDP's bytes."""

    @property
    def step_seconds(self) -> float | None:
        """What a step would take, estimated; None where that is not known."""


def answer_all(facts: Facts) -> list[Answer]:
    """Answer every question; none before the first step."""
    if facts.steps == 0:
        return []
    answers = [_is_the_search_needed(facts), _is_a_static_graph_legal(facts), is_something_forgotten(facts.modules)]
    answers += _are_gradients_too_wide(facts)
    answers += _is_every_pass_to_be_sent(facts)
    if facts.division is not None:
        answers.append(_what_does_the_search_cost(facts, facts.division))
    return answers


def _is_the_search_needed(facts: Facts) -> Answer:
    question = "Is find_unused_parameters needed?"
    unused = [one for one in facts.modules if one.verdict in _UNUSED and not _is_reached(one, facts)]
    seen = f"in {_count(facts.steps, 'step')} on {_count(facts.ranks, 'rank')}"
    gone = [one for one in facts.modules if one.verdict in (REPLACED, REMOVED)]
    if gone:
        return Answer(
            question,
            "yes, as the model is wrapped",
            f"DDP holds parameters that the model no longer has ({short_names(gone)}), and would wait for their "
            "gradients",
        )
    if not unused:
        if any(one.verdict in _UNUSED for one in facts.modules):
            return Answer(question, "no", f"it is not set, and {seen} DDP did not wait for what got no gradient")
        if facts.find_unused_parameters:
            return Answer(question, "no", f"it is set, and {seen} every parameter was used; leave it out")
        return Answer(question, "no", f"it is not set, and {seen} every parameter was used")
    if all(one.verdict in _FROZEN for one in unused):
        return Answer(
            question,
            "no, if you wrap later",
            f"all that is unused ({short_names(unused)}) is frozen: freeze before wrapping, or call "
            "ddp_hooks.rebuild(ddp, find_unused_parameters=False) after freezing",
        )
    if all(one.verdict in (NEVER, *_FROZEN) for one in unused):
        return Answer(
            question,
            "yes, as the model stands",
            f"no gradient came in any step for {short_names(unused)}; freeze or remove that before wrapping, and it is "
            "not needed",
        )
    if not facts.find_unused_parameters and facts.static_graph:
        return Answer(question, "no", "static_graph=True has found out what is unused in its first step")
    return Answer(question, "yes", f"unused in some steps or on some ranks: {short_names(unused)}")


def _is_reached(module: ModuleVerdict, facts: Facts) -> bool:
    """Say whether backward reaches a part without a gradient, and would do so without the flag."""
    if facts.find_unused_parameters or module.verdict != NEVER:
        return False
    names = [one.name for one in facts.parameters if is_inside(one.name, module.name)]
    return facts.left_out.issuperset(names)


def _is_a_static_graph_legal(facts: Facts) -> Answer:
    question = "Is static_graph=True legal?"
    if facts.steps < 2:
        return Answer(question, "unknown", "that takes two steps at least")
    if facts.left_out and facts.find_unused_parameters:
        return Answer(
            question,
            "no",
            f"the loss leaves out an output, and backward comes to {short_list(sorted(facts.left_out))} without a "
            "gradient; with a static graph DDP would wait for it from the second step on",
        )
    if not facts.same_parameters:
        return Answer(question, "no", "which parameters a rank uses changes from step to step")
    if not facts.same_order:
        return Answer(
            question, "probably not", "gradients came in another order in some steps, so the graph is not the same"
        )
    return Answer(
        question, "as far as seen", f"each rank used the same parameters, in the same order, in {facts.steps} steps"
    )


def is_something_forgotten(modules: Sequence[ModuleVerdict]) -> Answer:
    """Say whether something is unused that was probably meant to be used."""
    question = "Is something unused that was probably meant to be used?"
    whole = [one for one in modules if one.verdict == NEVER and one.is_module]
    single = [one for one in modules if one.verdict == NEVER and not one.is_module]
    if whole:
        return Answer(
            question,
            "probably",
            f"no parameter of {short_names(whole)} got a gradient in any step, though all require one: look whether "
            "forward calls it, whether its output reaches the loss, and for .detach() or no_grad() behind it",
        )
    if single:
        return Answer(question, "perhaps", f"{short_names(single)} got no gradient, while the rest of its module did")
    return Answer(question, "no", "everything that requires a gradient got one in some step")


def _are_gradients_too_wide(facts: Facts) -> Iterator[Answer]:
    question = "Do gradients take more bits than they need?"
    narrow, single = facts.narrow_fraction or 0.0, facts.before_accumulating or 0.0
    if narrow >= LEAST_SAVED:
        yield Answer(
            question,
            "yes",
            f"{narrow:.0%} of their bytes are exactly numbers of half as many bits, as autocast computes them: policy "
            '"auto" sends these in half the bytes',
        )
    if single >= LEAST_SAVED and single - narrow >= _LEAST_SPOILED:
        yield Answer(
            "Does accumulation cost bytes?",
            "yes",
            f"{single:.0%} of the bytes of a single backward pass are exactly numbers of half as many bits, but "
            f"{narrow:.0%} of what several passes add up to: with fewer passes a step, "
            'of larger batches, policy "auto" could send these in half the bytes',
        )


def _is_every_pass_to_be_sent(facts: Facts) -> Iterator[Answer]:
    resent = min(record.standing.resent for record in facts.records)
    if resent and facts.finished:
        yield Answer(
            "Does every backward pass have to be sent?",
            "no",
            f"{resent} of {facts.finished} only added to gradients that no optimizer had used yet: run forward and "
            "backward of all but the last pass before each step of the optimizer under ddp.no_sync(), which has no "
            f"effect around backward() alone, and DDP sends {resent / facts.finished:.0%} less",
        )


def _what_does_the_search_cost(facts: Facts, division: Division) -> Answer:
    question = "What does the search of the graph cost?"
    searches = facts.find_unused_parameters and not facts.static_graph
    if not division.search_seconds:
        if not searches:
            return Answer(question, "nothing", "DDP does not search here")
        return Answer(
            question,
            "not timed",
            "its beginning is the end of the model's own call, which is not seen where the call is compiled or "
            "backward runs within it",
        )
    cost = f"{division.search_seconds * 1e3:.2f} ms a step"
    part = division.search_seconds / division.step_seconds if division.step_seconds else 0.0
    where = f"{part:.1%} of a step, between the model's forward pass and the end of DDP's"
    if searches:
        return Answer(question, cost, f"{where}; and an all-reduce of what was used at the end of each step")
    return Answer(question, "nothing", f"DDP does not search here (what it does in its place takes {cost})")


def advise(facts: Facts, outlooks: Sequence[Outlook], dense_bytes: float) -> str:
    """Return the line to add, or why none is worth adding, in at most two sentences.

    Args:
        facts: what was seen.
        outlooks: what each policy would have made of it; none where one rank sends nothing.
        dense_bytes: what plain DDP hands over in a step. Bytes.
    """
    if facts.has_hook:
        return "ddp_hooks is registered already; print(state.stats()) says what it saves."
    if facts.steps == 0:
        return "Nothing can be said before a step was watched."
    if not outlooks:
        return "One rank has nobody to send to, so ddp_hooks could save nothing; run the script on two at least."
    by_policy = {one.policy: one for one in outlooks}
    chosen, best = by_policy["skip_unused"], max(outlooks, key=lambda one: one.saved_fraction)
    if "auto" in by_policy and by_policy["auto"].saved_fraction >= chosen.saved_fraction + _LEAST_MORE:
        chosen = by_policy["auto"]
    hook = facts.records[0].other_hook
    if hook is not None:
        return _compare_with(hook, chosen if chosen.saved_fraction >= LEAST_SAVED else best, dense_bytes)
    if chosen.saved_fraction < LEAST_SAVED:
        return (
            "ddp_hooks is not worth adding: the best policy"
            + (f", {best.policy}," if best.saved_fraction >= 0.0005 else "")
            + f" saves {describe_part(max(best.saved_fraction, 0))} of the bytes."
        )
    text = (
        f'Add after wrapping: state = ddp_hooks.register(ddp, "{chosen.policy}"). It saves '
        f"{describe_part(chosen.saved_fraction)} of the bytes"
    )
    if facts.division is not None and chosen.step_seconds is not None:
        gain = 1 - chosen.step_seconds / facts.division.step_seconds
        text += f" and about {max(gain, 0):.0%} of a step"
        if gain < LEAST_SAVED:
            text += ", because computing hides the sending here: it pays on a slower link"
    return f"{text}."


def _compare_with(hook: OtherHook, ours: Outlook, dense_bytes: float) -> str:
    """Compare the script's own hook with this package's hook."""
    payload = (1 - ours.saved_fraction) * dense_bytes
    sends = "" if hook.step_bytes is None else f" and hands {describe_bytes(hook.step_bytes)} a step to collectives"
    text = f"The script registers a communication hook of its own, {hook.name}"
    text += f", which {hook.effect}{sends}" if hook.effect else ""
    text += f"; plain DDP hands over {describe_bytes(dense_bytes)}. "
    ours_text = f'ddp_hooks.register(ddp, "{ours.policy}")'
    if ours.saved_fraction < LEAST_SAVED:
        return (
            f"{text}DDP takes one hook, so ddp_hooks.register(ddp) would be refused beside it; in its place it would "
            f"save {describe_part(max(ours.saved_fraction, 0))} of plain DDP's bytes, and is not worth it."
        )
    if hook.step_bytes is not None and payload >= hook.step_bytes:
        return (
            f"{text}DDP takes one hook, so {ours_text} would be refused beside it; in its place it would hand over "
            f"{describe_bytes(payload)}, and keep every bit."
        )
    return (
        f"{text}DDP takes one hook: without that one, {ours_text} would hand over {describe_bytes(payload)} and "
        "keep every bit."
    )


def short_names(of: Sequence[ModuleVerdict]) -> str:
    """Return the names of modules in one line, the first few of many."""
    alike: dict[str, list[str]] = {}
    for one in of:
        alike.setdefault(without_numbers(one.name), []).append(one.name)
    names = [unite_names(some) or "the whole model" for some in alike.values()]
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
