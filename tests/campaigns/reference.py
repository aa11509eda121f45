"""Makes docs/reference.md out of the docstrings of what is public, for `make reference`."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ddp_hooks
from ddp_hooks import doctor, errors, fsdp, statistics, sync
from ddp_hooks.doctor import questions, timing, verdicts
from ddp_hooks.integrations import lightning, transformers

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference.md"
BEGIN = """# Reference

`make reference` writes this page from the docstrings; edit those. [Quickstart](quickstart.md) shows them in use.
"""


@dataclass(frozen=True)
class Section:
    """A heading, what stands below it before all else, the module where users find the objects, and the objects."""

    text: str
    module: str
    objects: tuple[Any, ...]


SECTIONS = {
    "Registering": Section(
        "",
        "ddp_hooks",
        (
            ddp_hooks.register,
            ddp_hooks.SkipUnusedState,
            ddp_hooks.skip_unused_hook,
            ddp_hooks.enable,
            ddp_hooks.disable,
            ddp_hooks.states,
        ),
    ),
    "Policies": Section(
        'The presets are `"auto"`, `"skip_unused"`, `"skip_zeros"` and `"allreduce"`.',
        "ddp_hooks",
        (ddp_hooks.Policy, ddp_hooks.Tuning),
    ),
    "What was sent": Section(
        "`state.stats()` returns the first of these, `state.usage()` a `ParameterUsage` by name.",
        "",
        (statistics.Statistics, statistics.ParameterUsage, statistics.UnitUsage),
    ),
    "Freezing": Section(
        "", "ddp_hooks", (ddp_hooks.freeze, ddp_hooks.unfreeze, ddp_hooks.FreezeSchedule, ddp_hooks.rebuild)
    ),
    "The doctor": Section(
        "",
        "ddp_hooks",
        (
            ddp_hooks.diagnose,
            doctor.Diagnosis,
            doctor.ShardDiagnosis,
            doctor.Findings,
            verdicts.ParameterVerdict,
            verdicts.ModuleVerdict,
            timing.PolicyTrial,
            timing.Division,
            questions.Answer,
            ddp_hooks.expect_used,
            ddp_hooks.expect_unused,
            doctor.ExpectationHandle,
        ),
    ),
    "In trainers": Section("", "", (lightning.SkipUnusedCallback, transformers.SkipUnusedCallback)),
    "Synchronising": Section(
        "In `ddp_hooks.sync`.",
        "ddp_hooks.sync",
        (
            sync.broadcast_parameters,
            sync.average_parameters,
            sync.verify_replicas,
            sync.ReplicaReport,
            sync.TensorDifference,
            sync.BufferSync,
            sync.BufferStatistics,
            sync.PeriodicModelAverager,
            sync.share_parameters,
            sync.SharedParameters,
            sync.SyncReport,
            sync.SyncWork,
        ),
    ),
    "FSDP2": Section("See [fsdp.md](fsdp.md).", "ddp_hooks.fsdp", (fsdp.register, fsdp.ShardState)),
    "Errors": Section(
        "In `ddp_hooks.errors`. All of them are RuntimeErrors.",
        "ddp_hooks.errors",
        tuple(
            thing for _, thing in sorted(vars(errors).items()) if getattr(thing, "__module__", "") == errors.__name__
        ),
    ),
}
# Users get these and make none.
RETURNED = (
    *(statistics.Statistics, statistics.ParameterUsage, statistics.UnitUsage),
    *(doctor.Diagnosis, doctor.ShardDiagnosis, doctor.Findings, doctor.ExpectationHandle),
    *(verdicts.ParameterVerdict, verdicts.ModuleVerdict, timing.PolicyTrial, timing.Division, questions.Answer),
    *(sync.ReplicaReport, sync.TensorDifference, sync.BufferStatistics),
    fsdp.ShardState,
    *(sync.SharedParameters, sync.SyncReport, sync.SyncWork),
)
# Methods that the modules of this package call, and nobody else has a use for.
INNER = {
    "Statistics": {"read", "from_dict"},
    "Diagnosis": {"conclude", "abandon", "parameters", "when_stopped", "find_with", "describe"},
    "ShardDiagnosis": {"conclude", "abandon", "find_with", "describe", "is_unfinished", "last_progress"},
}
# The same heading twice would have one anchor.
HEADINGS = {
    fsdp.register: "register for FSDP2",
    lightning.SkipUnusedCallback: "SkipUnusedCallback for Lightning",
    transformers.SkipUnusedCallback: "SkipUnusedCallback for transformers",
}
# The sections of a docstring, and what they begin with here; None leaves one out.
PARTS = {
    "Args": "Arguments:",
    "Attributes": "Attributes:",
    "Modes": "Modes:",
    "Raises": "Raises:",
    "Returns": "Returns:",
    "Source": None,
}


def make_page() -> str:
    """Return the text of the page."""
    parts = [BEGIN]
    for heading, section in SECTIONS.items():
        entries = ", ".join(f"[{heading_of(thing)}](#{anchor(heading_of(thing))})" for thing in section.objects)
        parts.append(f"- [{heading}](#{anchor(heading)}): {entries}")
    for heading, section in SECTIONS.items():
        parts.append(f"\n## {heading}\n")
        if section.text:
            parts.append(f"{section.text}\n")
        for thing in section.objects:
            parts.append(describe(thing, section.module or thing.__module__))
            if inspect.isclass(thing):
                parts += [describe_member(thing, name, member) for name, member in members(thing)]
    return wrap("\n".join(parts))


def wrap(text: str) -> str:
    """Break lines at 120 columns where that changes nothing: links have made some longer."""
    pieces = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    pieces[::2] = ["\n".join(map(wrap_item, re.split(r"\n(?=\n|- |#)", piece))) for piece in pieces[::2]]
    return re.sub(r"\n{3,}", "\n\n", "".join(pieces)).rstrip() + "\n"


def wrap_item(text: str) -> str:
    """Break the lines of a paragraph or of an item of a list, which may end in an empty line."""
    words = " ".join(text.split())
    if not words or words.startswith("#"):
        return text
    lines = textwrap.wrap(
        words,
        120,
        subsequent_indent="  " if words.startswith("- ") else "",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return re.match(r"\n*", text)[0] + "\n".join(lines) + re.search(r"\n*$", text)[0]


def heading_of(thing: Any) -> str:
    return HEADINGS.get(thing, thing.__name__)


def anchor(heading: str) -> str:
    """Return how GitHub calls a heading in links."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors() -> dict[str, str]:
    """Return where what has an entry is found, by its name; methods are `Class.method`."""
    found = {}
    for section in SECTIONS.values():
        for thing in section.objects:
            place = anchor(heading_of(thing))
            found.setdefault(thing.__name__, place)
            found[f"{section.module.rpartition('.')[2]}.{thing.__name__}"] = place
            if inspect.isclass(thing):
                for name, member in members(thing):
                    found[f"{thing.__name__}.{name}"] = anchor(f"{thing.__name__}.{name}{call_of(member)}")
    return found


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class and of its bases in this package, in their order there."""
    ours = [base for base in reversed(kind.__mro__) if base.__module__.split(".")[0] == "ddp_hooks"]
    for name in dict.fromkeys(name for base in ours for name in vars(base)):
        member = inspect.getattr_static(kind, name)
        own = isinstance(member, (property, classmethod)) or inspect.isfunction(member)
        inner = name.startswith("_") or name in INNER.get(kind.__name__, ())
        if own and not inner and not is_trainers(kind, name):
            yield name, member


def is_trainers(kind: type, name: str) -> bool:
    """Say whether a trainer calls the method, and no user."""
    return any(name in vars(base) for base in kind.__mro__[1:] if base.__module__.split(".")[0] != "ddp_hooks")


def describe(thing: Any, module: str) -> str:
    """Return the entry of a function or a class."""
    made = not (thing in RETURNED or (inspect.isclass(thing) and issubclass(thing, BaseException)))
    call = f"```text\n{fold(f'{module}.{thing.__name__}{signature(thing)}')}\n```\n\n" if made else ""
    return f"### {heading_of(thing)}\n\n{call}{markdown(thing.__doc__, thing.__name__)}\n"


def describe_member(kind: type, name: str, member: Any) -> str:
    """Return the entry of a method or a property."""
    text = markdown(inspect.unwrap(function_of(member)).__doc__, kind.__name__)
    return f"#### `{kind.__name__}.{name}{call_of(member)}`\n\n{text}\n"


def function_of(member: Any) -> Callable[..., Any]:
    return member.fget if isinstance(member, property) else getattr(member, "__func__", member)


def call_of(member: Any) -> str:
    return "" if isinstance(member, property) else signature(function_of(member))


def signature(function: Callable[..., Any]) -> str:
    """Return the parameters with their defaults; the docstring says in words what they are."""
    found = inspect.signature(function)
    shown = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in found.parameters.items()
        if name not in ("self", "cls")
    ]
    return str(found.replace(parameters=shown, return_annotation=inspect.Signature.empty))


def fold(call: str) -> str:
    """Put the arguments of a long call on lines of their own."""
    if len(call) <= 100:
        return call
    begin, _, arguments = call.removesuffix(")").partition("(")
    return f"{begin}(\n" + "".join(f"    {argument},\n" for argument in arguments.split(", ")) + ")"


def markdown(text: str | None, owner: str) -> str:
    """Turn a docstring with reStructuredText's roles and Google's sections into Markdown."""
    text = re.sub(r":\w+:`([^`]+)`", partial(link, anchors(), owner), inspect.cleandoc(text or ""))
    text = re.sub(r"(?<![\w/`])(?:docs|benchmarks|csrc)/[\w/.-]+\.\w+", link_file, text).replace("``", "`")
    lines: list[str] = []
    part: str | None = ""  # "" outside of any; None in one that is left out
    for line in text.splitlines():
        head = re.fullmatch(r"(\w+):", line)
        if head and head[1] in PARTS:
            part = PARTS[head[1]]
            lines += [part, ""] if part else []
        elif line.endswith("::"):
            part = "code"
            lines += [line[:-1], ""] if line != "Example::" else []
            lines.append("```text")
        elif part != "" and line and not line.startswith(" "):
            end_part(lines, part)
            lines.append(line)
            part = ""
        elif part == "code":
            lines += [line[4:]] if line or lines[-1] != "```text" else []
        elif part == "Returns:":
            lines[-2:] = [f"{part} {line.strip()}"] if lines[-2:] == [part, ""] else [*lines[-2:], line.strip()]
        elif part is not None:
            lines.append(item(line) if part else line)
    end_part(lines, part)
    return "\n".join(lines).strip()


def end_part(lines: list[str], part: str | None) -> None:
    """Close what a line without indentation ends."""
    while lines and not lines[-1]:
        lines.pop()
    lines += ["```", ""] if part == "code" else [""]


def item(line: str) -> str:
    """Turn a line of a section into one of a list: a new entry, or what goes on."""
    entry = re.fullmatch(r" {4}(\*{0,2}\w+(?:, \w+)*): (.*)", line)
    if entry:
        return f"- {', '.join(f'`{name}`' for name in entry[1].split(', '))}: {entry[2]}"
    return f"  {line.strip()}" if line.strip() and not line.startswith("    - ") else line.strip()


def link(places: dict[str, str], owner: str, role: re.Match[str]) -> str:
    """Turn what a role names into a link to its entry, if there is one besides that in which it stands."""
    target = role[1].removeprefix("~")
    *_, kind, name = f".{target}".split(".")
    shown = name if role[1].startswith("~") or target.startswith("ddp_hooks.integrations") else target
    for key in (f"{owner}.{name}", f"{kind}.{name}", name):
        if key in places:
            return f"``{shown}``" if key == owner else f"[``{shown}``](#{places[key]})"
    return f"``{shown}``"


def link_file(found: re.Match[str]) -> str:
    path = found[0]
    target = path.removeprefix("docs/") if path.startswith("docs/") else f"../{path}"
    return f"[{path.rpartition('/')[2]}]({target})"


if __name__ == "__main__":
    PAGE.write_text(make_page())
