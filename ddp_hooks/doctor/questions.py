"""Answers common questions from what the ranks saw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..wording import describe_bytes, describe_part, short_list
from .other_hooks import OtherHook
from .records import Facts
from .timing import Division, PolicyTrial
from .verdicts import (
    FROZEN_AFTER,
    FROZEN_SINCE,
    NEVER,
    REMOVED,
    REPLACED,
    SOME_RANKS,
    SOMETIMES,
    ModuleVerdict,
    count,
    is_inside,
    short_names,
)

# Below this part of the bytes a hook is not worth a line.
LEAST_SAVED = 0.02
# What looking at values has to save besides to be worth it.
_LEAST_MORE = 0.05
_FROZEN = (FROZEN_AFTER, FROZEN_SINCE)
_UNUSED = (NEVER, SOMETIMES, SOME_RANKS, *_FROZEN)


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


def answer_all(facts: Facts) -> list[Answer]:
    """Answer every question; none before the first step."""
    if facts.steps == 0:
        return []
    answers = [_is_the_search_needed(facts), _is_a_static_graph_legal(facts), is_something_forgotten(facts.modules)]
    answers += _is_every_pass_to_be_sent(facts)
    if facts.division is not None:
        answers.append(_what_does_the_search_cost(facts, facts.division))
    return answers


def _is_the_search_needed(facts: Facts) -> Answer:
    question = "Is find_unused_parameters needed?"
    unused = [one for one in facts.modules if one.verdict in _UNUSED and not _is_reached(one, facts)]
    seen = f"in {count(facts.steps, 'step')} on {count(facts.ranks, 'rank')}"
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


def advise(facts: Facts, tried: Sequence[PolicyTrial]) -> str:
    """Return the line to add, or why none is worth adding, in at most two sentences."""
    if facts.has_hook:
        return "ddp_hooks is registered already; print(state.stats()) says what it saves."
    if facts.steps == 0:
        return "Nothing can be said before a step was watched."
    if facts.ranks == 1:
        return "One rank has nobody to send to, so ddp_hooks could save nothing; run the script on two at least."
    hook = facts.records[0].other_hook
    if hook is not None:
        return _compare_with(hook, facts)
    if not tried:
        return _describe_untried(facts.needless_fraction)
    by_policy = {one.policy: one for one in tried}
    chosen, auto = tried[0], by_policy.get("auto", tried[0])
    if auto.saved_fraction >= chosen.saved_fraction + _LEAST_MORE:
        chosen = auto
    saved = describe_part(max(chosen.saved_fraction, 0))
    if chosen.saved_fraction < LEAST_SAVED:
        return f"ddp_hooks is not worth adding: {chosen.policy} saved {saved} of the bytes when it was tried."
    text = f'Add after wrapping: state = ddp_hooks.register(ddp, "{chosen.policy}"). It saves {saved} of the bytes'
    if facts.division is not None and chosen.step_seconds is not None:
        gain = 1 - chosen.step_seconds / facts.division.step_seconds
        text += f" and about {max(gain, 0):.0%} of a step"
        if gain < LEAST_SAVED:
            text += ", because computing hides the sending here: it pays on a slower link"
    return f"{text}."


def _describe_untried(needless: float) -> str:
    """Say what could be saved if no policy was tried."""
    if needless < LEAST_SAVED:
        return (
            "ddp_hooks could skip next to nothing: in almost all of the bytes, some rank had a gradient that was not "
            "zero."
        )
    return (
        f"Add after wrapping: state = ddp_hooks.register(ddp). {describe_part(needless)} of the bytes held parameters "
        "that no rank used, or rows of zeros."
    )


def _compare_with(hook: OtherHook, facts: Facts) -> str:
    """Compare the script's own hook with this package's hook."""
    dense = sum(one.dense_bytes for one in facts.parameters)
    needed = (1 - facts.needless_fraction) * dense
    sends = "" if hook.step_bytes is None else f" and hands {describe_bytes(hook.step_bytes)} a step to collectives"
    text = f"The script registers a communication hook of its own, {hook.name}"
    text += f", which {hook.effect}{sends}" if hook.effect else ""
    text += f"; plain DDP hands over {describe_bytes(dense)}. "
    refused = "DDP takes one hook, so ddp_hooks.register(ddp) would be refused beside it; in its place it would"
    if facts.needless_fraction < LEAST_SAVED:
        return f"{text}{refused} skip next to nothing."
    over = f"hand over about {describe_bytes(needed)} and keep every bit"
    if hook.step_bytes is not None and needed >= hook.step_bytes:
        return f"{text}{refused} {over}."
    return f"{text}DDP takes one hook: without that one, ddp_hooks.register(ddp) would {over}."
