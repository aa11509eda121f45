"""Writes the findings as one self-contained HTML page: a picture of which rank used what when, and the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from ..wording import describe_bytes
from .findings import Findings
from .problem import open_report
from .text import describe, policy_rows
from .verdicts import (
    FROZEN_AFTER,
    FROZEN_SINCE,
    MEANING,
    NEVER,
    SOME_RANKS,
    SOMETIMES,
    UNFROZEN,
    USED,
    ParameterVerdict,
)

_ROWS_SHOWN = 600
_STRIP_WIDTH = 480
_WIDEST_STEP = 14
# All lanes of a strip together, and one of them. Pixels.
_STRIP_HEIGHT = 60
_LANE_HEIGHT = 9
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2530; --paper: #fff; --rule: #dde3ea; --box: #f3f6f9; --advice: #e8f1fa;
        --used: #2f6fb2; --unused: #cd7519; --frozen: #8893a3; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dfe5ec; --paper: #14181f; --rule: #303945; --box: #1d232c; --advice: #1b2d40;
          --used: #5a9fe0; --unused: #e8a33d; --frozen: #66727f; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
       max-width: 1150px; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 600; } th.number { text-align: right; }
td, th { padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.name { font-family: ui-monospace, monospace; font-size: 13px; overflow-wrap: anywhere; min-width: 14em; }
.verdict { min-width: 9em; } summary { cursor: pointer; } details div { padding-left: 1.1em; }
.advice { background: var(--advice); border-left: 4px solid var(--used); padding: .7rem 1rem; }
pre { background: var(--box); padding: 1rem; overflow-x: auto; font-size: 13px; }
.key span { display: inline-block; width: 14px; height: 10px; margin: 0 5px 0 16px; }
.used { fill: var(--used); background: var(--used); } .unused { fill: var(--unused); background: var(--unused); }
.frozen { fill: var(--frozen); background: var(--frozen); }
svg { display: block; margin-top: 4px; }
"""
_CLASS = {"#": "used", ".": "unused", "-": "frozen"}
# What is of interest comes first.
_ORDER = (UNFROZEN, NEVER, SOME_RANKS, SOMETIMES, FROZEN_SINCE, FROZEN_AFTER)


def draw_page(findings: Sequence[Findings]) -> str:
    """Return the page, for one module or several."""
    bodies = "\n".join(_draw_one(one) for one in findings)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>ddp_hooks doctor</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{bodies}\n</body></html>\n"
    )


def _draw_one(findings: Findings) -> str:
    parts = [
        "<h1>ddp_hooks doctor</h1>",
        f"<p>Steps: {findings.steps}, ranks: {findings.ranks}, parameters: {len(findings.parameters)}, "
        f"{describe_bytes(findings.dense_bytes / max(findings.steps, 1))} of gradients a step.</p>",
        f'<p class="advice">{escape(open_report(findings.steps, findings.problems, findings.advice))}</p>',
    ]
    if findings.policies:
        parts += ["<h2>What ddp_hooks sends</h2>", '<div class="table">', *_draw_policies(findings), "</div>"]
    if findings.answers:
        parts.append('<h2>Questions</h2><div class="table"><table>')
        parts += [
            f"<tr><td>{escape(one.question)}</td><td><b>{escape(one.verdict)}</b></td><td>{escape(one.reason)}</td></tr>"
            for one in findings.answers
        ]
        parts.append("</table></div>")
    together = _steps_a_column(findings.steps)
    column = "" if together < 2 else f"<br>A column is {together} steps, and got none if one of them got none."
    parts += [
        "<h2>Who used what, when</h2>",
        '<p class="key">A lane for each rank, rank 0 at the top, from the first step on the left to the last one:'
        '<span class="used"></span>got a gradient<span class="unused"></span>got none'
        f'<span class="frozen"></span>frozen{column}</p>',
        '<div class="table">',
        *_draw_parameters(findings),
        "</div>",
        "<h2>As text</h2>",
        f"<pre>{escape(describe(findings))}</pre>",
    ]
    return "\n".join(parts)


def _draw_policies(findings: Findings) -> Iterator[str]:
    yield (
        '<table><tr><th>Policy</th><th class="number">Bytes a step</th><th></th><th class="number">Saved</th>'
        '<th class="number">A step takes</th></tr>'
    )
    dense = max(findings.dense_bytes // max(findings.steps, 1), 1)
    for name, size, saved, seconds in policy_rows(findings):
        width = 200 * size / dense
        yield (
            f'<tr><td>{escape(name)}</td><td class="number">{describe_bytes(size)}</td>'
            f'<td><svg width="210" height="12" role="img" aria-label="{describe_bytes(size)}">'
            f'<rect class="used" width="{width:.1f}" height="12"/></svg></td>'
            f'<td class="number">{saved}</td><td class="number">{seconds}</td></tr>'
        )
    yield "</table>"


def _draw_parameters(findings: Findings) -> Iterator[str]:
    rank_of = {verdict: place for place, verdict in enumerate(_ORDER)}
    ordered = sorted(
        findings.parameters, key=lambda one: (one.verdict == USED, rank_of.get(one.verdict, len(_ORDER)))
    )  # a stable sort: within a verdict the model's order stays
    rows = [list(row) for _, row in groupby(ordered, key=_look)]
    yield '<table><tr><th>Parameter</th><th class="number">Bytes</th><th>Verdict</th><th>Steps</th></tr>'
    for row in rows[:_ROWS_SHOWN]:
        first = row[0]
        zero = "" if not first.zero_rows else f", {first.zero_rows:.0%} of its rows zero"
        yield (
            f'<tr><td class="name">{_name(row)}</td>'
            f'<td class="number">{describe_bytes(sum(one.dense_bytes for one in row))}</td>'
            f'<td class="verdict" title="{escape(MEANING.get(first.verdict, ""))}">{escape(first.verdict)}{zero}</td>'
            f"<td>{_draw_strip(first)}</td></tr>"
        )
    yield "</table>"
    missing = sum(map(len, rows[_ROWS_SHOWN:]))
    if missing:
        yield f"<p>{missing} more parameters are in the JSON file.</p>"


def _look(one: ParameterVerdict) -> tuple[object, ...]:
    """Return the values that neighbours must share to form one row of the table."""
    return _part(one.name), one.verdict, one.pattern, round(one.zero_rows or 0.0, 2)


def _part(name: str) -> str:
    """Return the part of a model that a parameter belongs to: its layer, if layers have numbers, or its module."""
    modules = name.split(".")[:-1]
    number = next((place for place, module in enumerate(modules) if module.isdecimal()), len(modules))
    return ".".join(modules[: number + 1])


def _name(row: Sequence[ParameterVerdict]) -> str:
    if len(row) == 1:
        return escape(row[0].name)
    part = _part(row[0].name)
    summary = f"{part}.*" if part else "*"
    names = "".join(f"<div>{escape(one.name)}</div>" for one in row)
    return f"<details><summary>{escape(summary)} ({len(row)} parameters)</summary>{names}</details>"


def _draw_strip(one: ParameterVerdict) -> str:
    if not one.pattern:
        return ""
    steps = max(len(one.pattern[0]), 1)
    together = _steps_a_column(steps)
    columns = -(-steps // together)
    width = min(_STRIP_WIDTH / columns, _WIDEST_STEP)
    gap = 0.8 if width > 3 else 0
    pitch = max(min(_LANE_HEIGHT + 1, _STRIP_HEIGHT / len(one.pattern)), 2)
    lane = pitch - (1 if pitch >= 4 else 0)
    drawn: dict[str, list[str]] = {}
    for rank, pattern in enumerate(one.pattern):
        kinds = [_unite(pattern[first : first + together]) for first in range(0, steps, together)]
        start = 0
        # Where columns are too narrow to tell apart, what is alike is one piece.
        runs = [(kind, 1) for kind in kinds] if gap else [(k, len(list(run))) for k, run in groupby(kinds)]
        for kind, count in runs:
            length = count * width - gap
            drawn.setdefault(kind, []).append(
                f"M{start * width:.1f} {rank * pitch:.1f}h{length:.1f}v{lane:.1f}h-{length:.1f}z"
            )
            start += count
    height = len(one.pattern) * pitch
    label = f"{one.verdict}; some rank used it in {one.steps_used} of {steps} steps"
    paths = "".join(f'<path class="{_CLASS[kind]}" d="{"".join(pieces)}"/>' for kind, pieces in drawn.items())
    return (
        f'<svg width="{columns * width:.0f}" height="{height:.0f}" role="img" aria-label="{escape(label)}">'
        f"<title>{escape(label)}</title>{paths}</svg>"
    )


def _steps_a_column(steps: int) -> int:
    return -(-steps // _STRIP_WIDTH)


def _unite(kinds: str) -> str:
    # The exception is what one looks for.
    return next((kind for kind in ".#" if kind in kinds), "-")
