"""What the doctor writes fits where it is read: 80 columns of a terminal, and a page whose drawings do not overlap."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from ddp_hooks.doctor.findings import Findings, leave_error_to_its_module
from ddp_hooks.doctor.page import draw_page
from ddp_hooks.doctor.problem import Kind, Problem
from ddp_hooks.doctor.questions import Answer
from ddp_hooks.doctor.text import describe, describe_all
from ddp_hooks.doctor.timing import PolicyTrial
from ddp_hooks.doctor.verdicts import (
    ALL_ZERO,
    FROZEN_AFTER,
    FROZEN_BEFORE,
    MEANING,
    MOSTLY_ZERO,
    NEVER,
    SOME_RANKS,
    SOMETIMES,
    USED,
    ParameterVerdict,
    group_by_module,
    short_names,
    unite_names,
)
from ddp_hooks.serving.topology import Topology

LAYER = ("attention.self.query", "attention.self.key", "attention.output.dense", "intermediate.dense", "output.dense")


def a_bert(layers: int, ranks: int, steps: int) -> Findings:
    """Return what a diagnosis of a BERT finds whose layers have met with everything that layers meet with."""
    parameters = [make("bert.embeddings.word_embeddings.weight", MOSTLY_ZERO, ranks, steps, 0.99)]
    fates = [NEVER, SOME_RANKS, SOMETIMES, FROZEN_AFTER, FROZEN_BEFORE, ALL_ZERO, USED]
    for layer in range(layers):
        names = [f"bert.encoder.layer.{layer}.{part}.{kind}" for part in LAYER for kind in ("weight", "bias")]
        parameters += [make(name, fates[layer % len(fates)], ranks, steps) for name in names]
    modules = tuple(group_by_module(parameters))
    names = ", ".join(one.name for one in modules)
    return Findings(
        ranks=ranks,
        steps=steps,
        dense_bytes=10**9,
        parameters=tuple(parameters),
        modules=modules,
        policies=(PolicyTrial("skip_unused", 7, 10**9 + 10, -1e-8, (0,) * ranks, 0, 10**9, Topology(), 1.5),),
        division=None,
        answers=(Answer("Is find_unused_parameters needed?", "yes", f"unused: {names}"),),
        advice="Add, after wrapping: a line of code that is followed by its reason, which takes some more words.",
        notes=(f"what limits a diagnosis of {names}",),
        problems=tuple(
            Problem(kind, f"Something is wrong with {names}.", "Change it.", "It trains then.", (f"rank 0: {names}",))
            for kind in (Kind.GRADIENTS_MISSING, Kind.FORGOTTEN)
        ),
    )


def make(name: str, verdict: str, ranks: int, steps: int, zero: float | None = None) -> ParameterVerdict:
    kinds = {SOMETIMES: ".#", SOME_RANKS: "#.", NEVER: ".", FROZEN_AFTER: "-", FROZEN_BEFORE: ""}.get(verdict, "#")
    pattern = tuple((kinds * steps)[rank % 2 : steps + rank % 2] for rank in range(ranks)) if kinds else ()
    return ParameterVerdict(name, 10**6, verdict, steps // 2, tuple(range(ranks)), zero, pattern)


def test_the_text_fits_in_a_terminal() -> None:
    findings = a_bert(14, 3, 60)
    lines = describe(findings).splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert all(f"{verdict}: {MEANING[verdict]}" in text for verdict in (NEVER, FROZEN_AFTER, FROZEN_BEFORE))
    assert "-0.0%" not in text
    # A name is not divided, however long it is.
    long = "module_with_a_name." * 5 + "weight"
    lines = describe(a_model_of(make(long, NEVER, 2, 4), make(long.replace("weight", "bias"), USED, 2, 4))).splitlines()
    assert f"  {long}" in lines
    assert [line for line in lines if len(line) > 80] == [f"  {long}"]


def a_model_of(*parameters: ParameterVerdict) -> Findings:
    modules = tuple(group_by_module(parameters))
    return Findings(2, 4, 10**7, parameters, modules, (), None, (), "Add nothing.", ())


def used(name: str, *patterns: str) -> ParameterVerdict:
    steps = sum("#" in step for step in zip(*patterns, strict=True))
    ranks = tuple(rank for rank, pattern in enumerate(patterns) if "#" in pattern)
    return ParameterVerdict(name, 10**6, SOME_RANKS, steps, ranks, None, patterns)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ([used("a", "#.#.", ".#.#")], "some rank used it in every step, all did in none; ranks 0, 1 did"),
        ([used("a", "####", ".#.#")], "some rank used it in every step, all did in 2 of 4 steps; ranks 0, 1 did"),
        ([used("a", "####", "....")], "some rank used it in every step, all did in none; rank 0 did"),
        ([used("a", "#.-.", "..-.")], "some rank used it in 1 of 4 steps, all did in none; rank 0 did"),
        (
            [used("a.0", "##..", "#..."), used("a.1", "####", "#...")],
            "some rank used it in 2 to 4 of 4 steps, all did in 1 of 4 steps; ranks 0, 1 did (2 parameters)",
        ),
    ],
)
def test_what_not_every_rank_used(parameters: list[ParameterVerdict], said: str) -> None:
    findings = a_model_of(*parameters, make("b.0", USED, 2, 4))
    text = " ".join(describe(findings).split())
    assert f" not used by every rank: {said} (1 of" in text
    assert "used by some ranks only" not in text + draw_page([findings])
    drawn = draw_page([findings])
    assert f"not used by every rank, {parameters[0].steps_used} of 4 steps" not in drawn


class Page(HTMLParser):
    """Notes the drawings, the rows of tables, and that every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.drawings: list[dict[str, Any]] = []
        self.rows = 0
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attributes}
        if tag == "svg":
            self.drawings.append({"width": float(named["width"]), "height": float(named["height"]), "boxes": []})
        elif tag == "path":
            number = r"(-?[\d.]+)"
            for box in re.findall(rf"M{number} {number}h{number}v{number}h-{number}z", named["d"]):
                x, y, width, height, back = map(float, box)
                assert width == back
                self.drawings[-1]["boxes"].append((x, y, x + width, y + height))
        self.rows += tag == "tr"
        if tag not in ("meta", "rect", "path", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "path"):
            assert self.open.pop() == tag


@pytest.mark.parametrize(("layers", "ranks", "steps"), [(20, 3, 60), (7, 64, 30), (7, 2, 2000), (7, 1, 1)])
def test_the_page_is_drawn_without_overlaps(layers: int, ranks: int, steps: int) -> None:
    findings = a_bert(layers, ranks, steps)
    text = draw_page([findings])
    page = Page(text)
    assert ("A column is 5 steps" in text) == (steps == 2000)
    assert all(one.name in text for one in findings.parameters)
    # A layer is a row, and so is the table of words; others belong to tables of policies and questions.
    assert layers + 1 <= page.rows <= layers + 8
    strips = [drawing for drawing in page.drawings if drawing["boxes"]]
    assert len(strips) == sum(bool(one.pattern) for one in findings.parameters[:1] + findings.parameters[1::10])
    for drawing in strips:
        boxes = drawing["boxes"]
        assert drawing["width"] <= 500
        assert drawing["height"] <= 130
        assert min(min(x, y) for x, y, _, _ in boxes) >= 0
        assert max(right for _, _, right, _ in boxes) <= drawing["width"] + 0.5
        assert max(bottom for _, _, _, bottom in boxes) <= drawing["height"] + 0.5
        lanes = sorted({(y, bottom) for _, y, _, bottom in boxes})
        assert len(lanes) == ranks
        assert all(bottom <= y + 1e-6 for (_, bottom), (y, _) in itertools.pairwise(lanes))
        for lane in lanes:
            pieces = sorted((x, right) for x, y, right, _ in boxes if y == lane[0])
            # Rounded to a tenth.
            assert all(right <= x + 0.11 for (_, right), (x, _) in itertools.pairwise(pieces))


def test_layers_of_which_the_same_is_said_are_one_line() -> None:
    adapted = [
        make(f"layers.{layer}.{part}.{name}.weight", fate, 2, 4)
        for layer in (0, 1, 2, 5)
        for part in ("query", "value")
        for name, fate in (("base", FROZEN_BEFORE), ("lora_A", USED), ("lora_B", USED))
    ]
    findings = a_model_of(*adapted, make("embed.weight", FROZEN_BEFORE, 2, 4), make("head.0.weight", NEVER, 2, 4))
    lines = describe(findings).splitlines()
    start = lines.index("Parameters")
    text = " ".join(" ".join(lines[start:]).split())
    assert "layers.{0-2,5}.query.base 4.00 MB frozen before wrapping" in text
    assert text.count("frozen before wrapping") == 3
    assert "(4 modules, 4 parameters)" in text
    assert short_names([one for one in findings.modules if one.verdict == FROZEN_BEFORE]) == (
        "layers.{0-2,5}.query.base, layers.{0-2,5}.value.base, embed"
    )
    # Nothing is said of a pair that is not there.
    assert unite_names(["a.0.b.1", "a.1.b.0"]) == "a.*.b.*"
    assert unite_names(["a.3.b"]) == "a.3.b"


def test_the_reason_of_an_error_is_said_at_its_module() -> None:
    raised = Problem(Kind.SCRIPT_RAISED, "The script ended with an error.", "Look.")
    short = Problem(Kind.GRADIENTS_MISSING, "Backward left out extra.", "Use it.")
    one = replace(a_model_of(used("a", "##", "##")), model="Generator", called=("net", "netG"))
    other = replace(one, model="Discriminator", called=("net", "netD"))
    findings = [replace(one, problems=(raised,)), replace(other, problems=(short,))]
    lines = list(describe_all(leave_error_to_its_module(findings)))
    assert lines[:3] == [
        "ddp_hooks doctor: 2 modules",
        "  1. netG (Generator): Nothing is wrong.",
        "  2. netD (Discriminator): Backward left out extra.",
    ]
    assert leave_error_to_its_module(findings[:1]) == findings[:1]
    assert list(describe_all(findings[:1])) == [describe(findings[0])]
