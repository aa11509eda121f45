"""Words that were given up for those of the field stay away: in code, comments and documentation.

Texts are read, none is imported. Each pattern has a made-up text that it has to find, and what may be said is listed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("csrc", "ddp_hooks", "ddp_hooks_testing", "tests", "benchmarks", "docs", "examples")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")
SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".py", ".pyi", ".md", ".sh"}
# What was measured is not written anew.
MEASURED = ("benchmarks/results/", "benchmarks/figures/")
# By the word to say instead: the pattern of those that were given up, and texts in which it has to be found.
GIVEN_UP = {
    "ReductionPlan": (
        r"WirePlan|wire_plan|\bwire plans?\b",
        ["WirePlanner planner;", "make_wire_plan(layout)", "the wire plan"],
    ),
    "transport/": (
        r"csrc/wire\b|bindings/wire\b|[\"`]wire/",
        ["see csrc/wire", '#include "wire/launch.h"', "csrc/bindings/wire.cpp"],
    ),
    "detectors/": (
        r"csrc/values\b|bindings/values\b|[\"`]values/",
        ["csrc/values/units_of_step.h", '#include "values/values_probe.h"'],
    ),
    "UnusedParameters": (
        r"\bAbsence\b|\babsence\.(?:h|cpp)\b|\breducer/absence\b|& absence\b|`absence`|"
        r"\bmark_absent\b|\babsent_\b",
        ["Absence absence_;", "reducer/absence.h", "& absence", "mark_absent()", "absent_.set(i)"],
    ),
    "detached bucket view": (
        r"\b[Vv]acan(?:t|cy)\b|\b[Vv]acat(?:e|es|ed|ing)(?:_\w+)?\b|\bis_vacant\b|\bBucketSlots\b|\bbucket_slots\b",
        ["vacant slots", "the slots are vacated", "views_.vacate_all()", "slots.is_vacant(i)", "BucketSlots& slots"],
    ),
    "BackwardPrologue": (r"\b[Pp]relude_?\b", ["std::unique_ptr<Prelude> prelude;", "engine/prelude.h"]),
    "copy_into_bucket_early": (
        r"\b(?:bring|brought)_(?:sums|early)\b|\bsums_are_due\b",
        ["void bring_sums();", "step.brought_early"],
    ),
    "unready_parameters": (r"\boverdue\b", ["the overdue ones"]),
    "unannounced": (r"\bunheard\b", ["if (step.unheard)"]),
    "piggybacked": (r"\bbeside_(?:(?:size|words)_?)?(?!\w)|\bbeside\(\)", ["beside_size_", "exchange->beside()"]),
    "bit-sliced counters": (
        r"\bagreement/planes\b|`planes`|\b\w+_planes\b|\bbit.planes\b|\[planes\]|"
        r"\bplanes (?:of|say|tell|travel|with)\b|mask's planes",
        ["words_of_planes(bits)", "`planes` say who", "beyond planes tell who is alone", "the mask's planes"],
    ),
    "broadcast": (
        r"\bkSpread\b|\bTransport\.SPREAD\b|\bspread_(?:bytes|elements|units)\b|\*spread\*|\b[Ss]preads\b|"
        r"\b(?:is|are|be|was|were) \[?spread\b(?! (?:over|across|evenly|among))",
        ["Transport::kSpread", "*spread*: it sends", "it spreads them", "units are spread", "is [spread](x)"],
    ),
    "mark_used_map_reduced": (
        r"\bsettle_used_map\b|\bused_map_(?:is_)?settled\b|\bmap (?:of used parameters )?was settled",
        ["reducer_.settle_used_map(used)", "where the map of used parameters was settled"],
    ),
    "unmanaged": (
        r"\b[Ll]ate\*? (?:gradient|parameter)s?\b|\blate_(?:gradient|parameter)s?\b|\bmay_be_late\b|\bis \*late\*|"
        r"\[late\]\(",
        ["late gradients", "Late parameters", "knows(late_parameters)", "is *late*: it", "[late](freezing.md)"],
    ),
    "unfreeze": (r"\b[Tt]haw(?:s|ed|ing)?\b", ["thaw(model)", "thawed"]),
    "load balancer": (
        r"\b(?:class|struct|const) (?:Deal|Hand|Pile)\b|\b(?:Deal|Hand|Pile)&|\bstd::vector<(?:Deal|Hand|Pile)>|"
        r"\b(?:the|a|its) pile\b",
        ["struct Hand {", "const Deal& deal", "std::vector<Hand> hands", "takes from the pile"],
    ),
    "the order of speech": (
        r"(?i)\bof\s+(?:(?://|#)\s*)?which\b(?! (?:buckets|gradients|has)\b)|\bbe\s+(?:(?://|#)\s*)?it\b|"
        r"\blikewise\b|\bbears\b|\b(?:is|be) rid of\b",
        [
            "a mask, of which",
            "words of\n  // which",
            "a gradient, be it zero",
            "Likewise here",
            "bears",
            "is rid of it",
        ],
    ),
}
FINE = [
    "units evenly spread over the slice",
    "their times spread",
    "layers are spread evenly",
    "workers of the group that are late",
    "late workers end the process",
    "comes too late",
    "a later gradient",
    "model.fit_plane(points)",
    "two planes in a figure",
    "workloads.make('unheard_of')",
    "Hand a JSON-serialisable result to whoever started this rank",
    "in the absence of a GPU",
    "a value beside it",
    "bytes on the wire",
    "values/DDP",
    "memory is given back",
    "which units of which gradients travel",
]


def found_in(text: str) -> list[str]:
    return [
        f"{text[: match.start()].count(chr(10)) + 1}: {match.group()!r}, say {word}"
        for word, (pattern, _) in GIVEN_UP.items()
        for match in re.finditer(pattern, text)
    ]


def test_nobody_says_what_was_given_up() -> None:
    files = [ROOT / page for page in PAGES]
    for folder in FOLDERS:
        files += [file for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES]
    names = {file.relative_to(ROOT).as_posix(): file for file in files if file != Path(__file__)}
    read = {name: file.read_text() for name, file in names.items() if not name.startswith(MEASURED)}
    assert len(read) > 200
    assert [f"{name}:{found}" for name, text in sorted(read.items()) for found in found_in(text)] == []


@pytest.mark.parametrize("word", GIVEN_UP)
def test_each_is_found_in_a_made_up_text(word: str) -> None:
    _, samples = GIVEN_UP[word]
    for sample in samples:
        assert f"say {word}" in "\n".join(found_in(f"one line\n{sample}\n")), sample


@pytest.mark.parametrize("text", FINE)
def test_what_may_be_said(text: str) -> None:
    assert found_in(text) == []
