"""What was found as one HTML page that needs nothing else: a picture of who used what in which step, and the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from .findings import Findings
from .text import describe, megabytes
from .verdicts import FROZEN_AFTER, MEANING, NEVER, SOME_RANKS, SOMETIMES, THAWED, USED, ParameterVerdict

_ROWS_SHOWN = 600
_STRIP_WIDTH = 480
_LANE_HEIGHT = 7
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1d2530; background: #fff; margin: 2rem auto; max-width: 1150px;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; font-weight: 600; }
td, th { padding: 3px 10px 3px 0; border-bottom: 1px solid #e4e8ee; vertical-align: middle; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.name { font-family: ui-monospace, monospace; font-size: 13px; word-break: break-all; }
.advice { background: #eef4fb; border-left: 4px solid #2f6fb2; padding: .7rem 1rem; }
pre { background: #f5f7fa; padding: 1rem; overflow-x: auto; font-size: 13px; }
.key span { display: inline-block; width: 14px; height: 10px; margin: 0 5px 0 16px; }
.used { fill: #2f6fb2; background: #2f6fb2; } .unused { fill: #e9b44c; background: #e9b44c; }
.frozen { fill: #c9d1dc; background: #c9d1dc; }
"""
_CLASS = {"#": "used", ".": "unused", "-": "frozen"}
# What is of interest comes first.
_ORDER = (THAWED, NEVER, SOME_RANKS, SOMETIMES, FROZEN_AFTER)


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
        f"<p>{findings.steps} steps on {findings.ranks} ranks, {len(findings.parameters)} parameters, "
        f"{megabytes(findings.dense_bytes / max(findings.steps, 1))} of gradients a step.</p>",
        f'<p class="advice">{escape(findings.advice)}</p>',
    ]
    if findings.policies:
        parts += ["<h2>What would be sent</h2>", *_draw_policies(findings)]
    if findings.answers:
        parts.append("<h2>Questions</h2><table>")
        parts += [
            f"<tr><td>{escape(one.question)}</td><td><b>{escape(one.verdict)}</b></td><td>{escape(one.reason)}</td></tr>"
            for one in findings.answers
        ]
        parts.append("</table>")
    parts += [
        "<h2>Who used what, when</h2>",
        '<p class="key">A lane for each rank, from the first step on the left to the last on the right:'
        '<span class="used"></span>got a gradient<span class="unused"></span>got none'
        '<span class="frozen"></span>frozen</p>',
        *_draw_parameters(findings),
        "<h2>As text</h2>",
        f"<pre>{escape(describe(findings))}</pre>",
    ]
    return "\n".join(parts)


def _draw_policies(findings: Findings) -> Iterator[str]:
    yield "<table><tr><th>Policy</th><th>Bytes a step</th><th></th><th>Saved</th><th>A step takes</th></tr>"
    steps = max(findings.steps, 1)
    plain = "" if findings.division is None else f"{findings.division.step_seconds * 1e3:.1f} ms"
    rows = [("plain DDP", findings.dense_bytes, "", plain)]
    for one in findings.policies:
        seconds = "" if one.step_seconds is None else f"about {one.step_seconds * 1e3:.1f} ms"
        name = one.policy if one.exact else f"{one.policy} (once it has settled)"
        rows.append((name, one.payload_bytes, f"{one.saved_fraction:.1%}", seconds))
    for name, size, saved, seconds in rows:
        width = 200 * size / max(findings.dense_bytes, 1)
        yield (
            f'<tr><td>{escape(name)}</td><td class="number">{megabytes(size / steps)}</td>'
            f'<td><svg width="210" height="12" role="img" aria-label="{megabytes(size / steps)}">'
            f'<rect class="used" width="{width:.1f}" height="12"/></svg></td>'
            f'<td class="number">{saved}</td><td class="number">{seconds}</td></tr>'
        )
    yield "</table>"


def _draw_parameters(findings: Findings) -> Iterator[str]:
    rank_of = {verdict: place for place, verdict in enumerate(_ORDER)}
    ordered = sorted(
        findings.parameters, key=lambda one: (one.verdict == USED, rank_of.get(one.verdict, len(_ORDER)))
    )  # a stable sort: within a verdict the model's order stays
    yield "<table><tr><th>Parameter</th><th>Bytes</th><th>Verdict</th><th>Steps</th></tr>"
    for one in ordered[:_ROWS_SHOWN]:
        zero = "" if not one.zero_rows else f", {one.zero_rows:.0%} of its rows zero"
        yield (
            f'<tr><td class="name">{escape(one.name)}</td><td class="number">{megabytes(one.dense_bytes)}</td>'
            f'<td title="{escape(MEANING.get(one.verdict, ""))}">{escape(one.verdict)}{zero}</td>'
            f"<td>{_draw_strip(one)}</td></tr>"
        )
    yield "</table>"
    if len(ordered) > _ROWS_SHOWN:
        yield f"<p>{len(ordered) - _ROWS_SHOWN} more are in the JSON file.</p>"


def _draw_strip(one: ParameterVerdict) -> str:
    if not one.pattern:
        return ""
    steps = max(len(one.pattern[0]), 1)
    width = min(_STRIP_WIDTH / steps, 14)
    gap = 0.8 if width > 3 else 0
    pieces = []
    for rank, pattern in enumerate(one.pattern):
        start = 0
        # Where steps are too narrow to tell apart, what is alike is one piece.
        runs = [(kind, 1) for kind in pattern] if gap else [(k, len(list(run))) for k, run in groupby(pattern)]
        for kind, count in runs:
            pieces.append(
                f'<rect class="{_CLASS[kind]}" x="{start * width:.1f}" y="{rank * (_LANE_HEIGHT + 1)}" '
                f'width="{max(count * width - gap, 0.5):.1f}" height="{_LANE_HEIGHT}"/>'
            )
            start += count
    height = len(one.pattern) * (_LANE_HEIGHT + 1)
    label = f"{one.verdict}, {one.steps_used} of {steps} steps"
    return (
        f'<svg width="{steps * width:.0f}" height="{height}" role="img" aria-label="{escape(label)}">'
        f"<title>{escape(label)}</title>{''.join(pieces)}</svg>"
    )
