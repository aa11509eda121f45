"""Writes the findings as text for a terminal, at most 80 columns wide, unless a single name needs more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..wording import describe_bytes, describe_part, describe_ranks, describe_seconds, fill
from .naming import choose_names
from .problem import open_report
from .verdicts import (
    FROZEN_SINCE,
    MEANING,
    MOSTLY_ZERO,
    SOME_RANKS,
    SOMETIMES,
    USED,
    ModuleVerdict,
    ParameterVerdict,
    count,
    in_steps,
    is_inside,
    unite_names,
    without_numbers,
)

if TYPE_CHECKING:
    from .findings import Findings
    from .timing import Division, PolicyTrial

_WIDEST_NAME = 30
_LINES_SHOWN = 40


def describe(findings: Findings) -> str:
    """Return the report on one module."""
    lines = _wrap(
        f"ddp_hooks doctor: {count(findings.steps, 'step')} on {_describe_heard(findings)}"
        + (
            f", {count(len(findings.parameters), 'parameter')}, "
            f"{describe_bytes(findings.dense_bytes // findings.steps)} of gradients a step"
            if findings.steps
            else ""
        ),
        indent="",
    )
    lines += ["", *_wrap(open_report(findings.steps, findings.problems, findings.advice), indent="")]
    for number, problem in enumerate(findings.problems):
        if number:
            lines += [
                "",
                *_wrap(" ".join(filter(None, ("Also:", problem.fact, problem.change, problem.gain))), indent=""),
            ]
        for detail in problem.details:
            lines += _wrap(detail)
    if findings.steps:
        lines += ["", "Parameters", *_parameter_lines(findings)]
    if findings.answers:
        lines += ["", "Questions"]
        for answer in findings.answers:
            lines += _wrap(f"{answer.question} {answer.verdict[:1].upper()}{answer.verdict[1:]}: {answer.reason}.")
    if findings.division is not None and findings.advice:
        lines += ["", "A step", *_step_lines(findings.division)]
    # While replicas differ, policies do not matter.
    if findings.policies and findings.advice:
        lines += ["", "What ddp_hooks sends", *_policy_lines(findings)]
    if findings.problems and findings.advice:
        lines += ["", *_wrap(findings.advice, indent="")]
    for note in findings.notes:
        lines += _wrap(f"Note: {note}.", indent="")
    return "\n".join(lines)


def describe_all(findings: Sequence[Findings]) -> Iterator[str]:
    """Return the report on several modules: first a line for each, in the order in which they were wrapped."""
    if len(findings) == 1:
        yield describe(findings[0])
        return
    names = choose_names([one.called for one in findings])
    labels = [_label(one, name) for one, name in zip(findings, names, strict=True)]
    yield f"ddp_hooks doctor: {len(findings)} modules"
    for number, (label, one) in enumerate(zip(labels, findings, strict=True)):
        fact = one.problems[0].fact if one.problems else "Nothing is wrong." if one.steps else "No step was watched."
        yield from _wrap(f"{number + 1}. {label}: {fact}")
    for number, (label, one) in enumerate(zip(labels, findings, strict=True)):
        yield f"\n--- module {number + 1} of {len(findings)}: {label}"
        yield describe(one)


def _label(findings: Findings, name: str | None) -> str:
    if not name:
        return findings.model
    return f"{name} ({findings.model})" if findings.model else name


def _describe_heard(findings: Findings) -> str:
    if findings.ranks > len(findings.heard) > 0:
        return f"{describe_ranks(findings.heard)} of {findings.ranks}"
    return count(findings.ranks, "rank")


def _parameter_lines(findings: Findings) -> Iterator[str]:
    # Layers that differ in their numbers only are one line, if the same is said of them.
    alike: dict[tuple[str, str], list[ModuleVerdict]] = {}
    for one in findings.modules:
        if one.verdict != USED:
            alike.setdefault((_verdict(one, findings), without_numbers(one.name)), []).append(one)
    rows = [
        (
            unite_names([one.name for one in some]) or "(the whole model)",
            f"{verdict}{_count_parts(some)}",
            describe_bytes(sum(one.dense_bytes for one in some)),
        )
        for (verdict, _), some in alike.items()
    ]
    used = [one for one in findings.parameters if one.verdict == USED]
    if used:
        size = sum(one.dense_bytes for one in used)
        rows.append((f"({len(used)} of {len(findings.parameters)})", MEANING[USED], describe_bytes(size)))
    shown = rows[: _LINES_SHOWN - 1] + rows[-1:] if len(rows) > _LINES_SHOWN else rows
    # A longer name stands on a line of its own.
    lengths = [len(row[0]) for row in shown]
    widths = [max([n for n in lengths if n <= _WIDEST_NAME], default=0), max(len(row[2]) for row in shown)]
    further = " " * (2 + widths[0] + 2 + widths[1] + 2)
    for number, (name, verdict, size_text) in enumerate(shown):
        if number == len(shown) - 1 and len(rows) > len(shown):
            yield f"  ... and {len(rows) - len(shown)} more"
        if len(name) > widths[0]:
            yield f"  {name}"
            name = ""
        yield from fill(verdict, f"  {name:<{widths[0]}}  {size_text:>{widths[1]}}  ", further).splitlines()


def _verdict(group: ModuleVerdict, findings: Findings) -> str:
    members = _members(group, findings.parameters)
    text = group.verdict
    if group.verdict in (SOMETIMES, SOME_RANKS):
        some = _in_steps([one.steps_used for one in members], findings.steps)
        text += f": some rank used it {some}"
    if group.verdict == SOME_RANKS:
        everyone = _in_steps([one.steps_used_by_all for one in members], findings.steps)
        ranks = sorted({rank for one in members for rank in one.ranks_used})
        text += f", all did {everyone}; {describe_ranks(ranks)} did"
    if group.verdict == FROZEN_SINCE:
        text += f" {in_steps(members)}: DDP sends zeros for it since then"
    elif group.verdict == MOSTLY_ZERO:
        zero = [one.zero_rows for one in members if one.zero_rows is not None]
        text += f": {describe_part(sum(zero) / len(zero))} of its rows, on every rank"
    elif group.verdict in MEANING and group.verdict not in (SOMETIMES, SOME_RANKS):
        text += f": {MEANING[group.verdict]}"
    return text


def _count_parts(groups: Sequence[ModuleVerdict]) -> str:
    parameters = count(sum(one.parameters for one in groups), "parameter")
    if len(groups) > 1 and groups[0].is_module:
        return f" ({len(groups)} modules, {parameters})"
    return f" ({parameters})" if len(groups) > 1 or groups[0].is_module else ""


def _members(group: ModuleVerdict, parameters: Sequence[ParameterVerdict]) -> list[ParameterVerdict]:
    return [one for one in parameters if one.verdict == group.verdict and is_inside(one.name, group.name)]


def _in_steps(counts: Sequence[int], steps: int) -> str:
    least, most = min(counts), max(counts)
    if most == 0:
        return "in none"
    if least == steps:
        return "in every step"
    return f"in {least if least == most else f'{least} to {most}'} of {steps} steps"


def _step_lines(division: Division) -> Iterator[str]:
    part = division.exposed_seconds / division.step_seconds if division.step_seconds else 0.0
    yield f"  {division.step_seconds * 1e3:.1f} ms in all"
    yield f"  {division.compute_seconds * 1e3:.1f} ms of computing, until the slowest rank has its gradients"
    yield f"  {division.exposed_seconds * 1e3:.1f} ms ({part:.0%}) of sending that no computing hides"


def _policy_lines(findings: Findings) -> Iterator[str]:
    yield f"  {'policy':<12} {'bytes a step':>12} {'saved':>7} {'a step takes':>13}"
    for name, size, saved, seconds in policy_rows(findings):
        yield f"  {name:<12} {describe_bytes(size):>12} {saved:>7} {seconds:>13}"
    tried = " and ".join(f"{one.policy} in {count(one.steps, 'step')}" for one in findings.policies)
    yield from _wrap(
        f"Bytes, with masks, were measured: {tried} of this run. Times follow from them and from plain DDP's step, "
        "without what the hook itself takes."
    )
    yield from host_lines(findings.policies)


def host_lines(tried: Sequence[PolicyTrial]) -> Iterator[str]:
    """Yield what crosses between hosts with each of at least one policy; nothing with one host."""
    topology = tried[0].topology
    hosts = len(topology.hosts)
    if hosts < 2:
        return
    sent = [("plain DDP", tried[0].plain_link_bytes), *((one.policy, one.link_bytes) for one in tried)]
    each = " and ".join(f"{describe_bytes(size)} with {name}" for name, size in sent)
    yield from _wrap(f"Between the {hosts} hosts, the busiest one sent this much in a step: {each}.")
    if topology.counts_bytes and topology.can_add_up and not topology.is_on_streams:
        # What all of H hosts contribute crosses each one's link 2 (H - 1) / H times.
        growth = (2 * hosts - 1) / (2 * hosts - 2)
        yield from _wrap(
            f"More ranks on each host would not change that, if they use the same layers and rows. On {2 * hosts} "
            f"hosts, each would send {growth:.2f} times as much of what every rank uses."
        )
    elif not topology.counts_bytes:
        yield from _wrap(
            "Ranks of a host could add up first, so that each byte crosses once: that takes equally many ranks on each "
            "host, and CPUs and gloo; or on GPUs owners=True, for what few hosts use."
        )


def policy_rows(findings: Findings) -> Iterator[tuple[str, int, str, str]]:
    """Yield a row for plain DDP and for each policy: its name, bytes per step, the part saved, and a step's time."""
    plain = "" if findings.division is None else describe_seconds(findings.division.step_seconds)
    yield "plain DDP", findings.dense_bytes // max(findings.steps, 1), "", plain
    for one in findings.policies:
        seconds = "" if one.step_seconds is None else f"~{describe_seconds(one.step_seconds)}"
        yield one.policy, one.step_bytes, describe_part(one.saved_fraction), seconds


def _wrap(text: str, indent: str = "  ") -> list[str]:
    return fill(text, indent, f"{indent}  ").splitlines()
