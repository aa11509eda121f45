"""Judges each parameter by the watched steps, and groups the verdicts by module."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .steps import EVERYTHING, SOMETHING, Step, Units

NEVER = "never used"
SOMETIMES = "used in some steps"
SOME_RANKS = "not used by every rank"
FROZEN_BEFORE = "frozen before wrapping"
FROZEN_AFTER = "frozen after wrapping"
FROZEN_SINCE = "frozen since"
UNFROZEN = "frozen when wrapped, trained since"
ALL_ZERO = "all zero"
MOSTLY_ZERO = "mostly zero by rows"
REPLACED = "replaced after wrapping"
ADDED = "added after wrapping"
REMOVED = "removed after wrapping"
USED = "used"
IGNORED = "ignored by DDP"
FROZEN = "frozen"
NOT_SEEN = "not seen"

MEANING = {
    NEVER: "requires a gradient and got none, in any step, on any rank",
    SOMETIMES: "in some steps no rank used it",
    SOME_RANKS: "in some steps only some ranks used it",
    FROZEN_BEFORE: "DDP does not know it, and sends nothing for it",
    FROZEN_AFTER: "DDP sends zeros for it",
    FROZEN_SINCE: "some step, and DDP sends zeros for it since then",
    UNFROZEN: "DDP does not know it, and does not average it",
    REPLACED: "DDP holds the old parameter; nothing averages the new one",
    ADDED: "DDP does not know it, and does not average it",
    REMOVED: "DDP still holds it",
    ALL_ZERO: "it gets gradients, and they are zero on every rank in every step",
    MOSTLY_ZERO: "at least half of its rows are zero on every rank",
    USED: "used by every rank in every step",
    IGNORED: "left out at the user's wish",
    FROZEN: "FSDP2 sends nothing for it",
    NOT_SEEN: "no step was watched",
}
# So many steps at the end make it likely that a parameter is frozen for good.
_LEAST_FROZEN = 2
# From here on a gradient counts as mostly zero.
_MOSTLY = 0.5
_NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class ParameterVerdict:
    """The verdict on one parameter.

    Attributes:
        name: the parameter's name in the wrapped model.
        dense_bytes: bytes that plain DDP hands over for it in each step.
        verdict: a verdict from the table in docs/doctor.md.
        steps_used: the number of steps in which some rank used it.
        ranks_used: the ranks that used it in some step.
        zero_rows: the part of its rows (units) that was zero on every rank, as the mean over the steps in which it was
            used; None if values were not looked at.
        pattern: for each rank, a text with one character per step: ``#`` used, ``.`` unused, ``-`` frozen.
        frozen_since: the step, counted from 0, from which on it was frozen for good after it had been used; None if it
            was not.
    """

    name: str
    dense_bytes: int
    verdict: str
    steps_used: int
    ranks_used: tuple[int, ...]
    zero_rows: float | None
    pattern: tuple[str, ...]
    frozen_since: int | None = None

    @property
    def steps_used_by_all(self) -> int:
        """The number of steps in which every rank used it."""
        return sum(set(step) == {"#"} for step in zip(*self.pattern, strict=True))


@dataclass(frozen=True, slots=True)
class ModuleVerdict:
    """The parameters of one module, or a single parameter, with the same verdict.

    Attributes:
        name: the name of the largest module whose parameters all have this verdict, or of the parameter; "" for the
            whole model.
        verdict: their verdict.
        parameters: the number of parameters.
        dense_bytes: bytes that plain DDP hands over for them in each step.
        is_module: whether this is a whole module.
    """

    name: str
    verdict: str
    parameters: int
    dense_bytes: int
    is_module: bool


def judge(
    names: Sequence[str],
    sizes: Sequence[int],
    heard: Sequence[int],
    ranks: Sequence[Sequence[Step]],
    units: Sequence[Units],
    known: Mapping[str, str],
) -> list[ParameterVerdict]:
    """Judge each parameter.

    Args:
        names: of the parameters, those that DDP reduces first.
        sizes: their bytes.
        heard: the ranks that were heard of.
        ranks: for each rank its steps, the same number on each.
        units: the units of each parameter that DDP reduces.
        known: verdicts by name that do not follow from steps; of names that DDP does not know, too.
    """
    judged = [
        _judge_one(index, name, size, units[index] if index < len(units) else None, heard, ranks)
        for index, (name, size) in enumerate(zip(names, sizes, strict=True))
    ]
    judged = [replace(one, verdict=known.get(one.name, one.verdict)) for one in judged]
    others = known.keys() - set(names)
    return judged + [ParameterVerdict(name, 0, known[name], 0, (), None, ()) for name in known if name in others]


def _judge_one(
    index: int,
    name: str,
    size: int,
    units: Units | None,
    heard: Sequence[int],
    ranks: Sequence[Sequence[Step]],
) -> ParameterVerdict:
    received = [[bool(step.received[index]) for step in steps] for steps in ranks]
    frozen = [[bool(step.frozen[index]) for step in steps] for steps in ranks]
    pattern = tuple("".join(map(mark, *rows)) for rows in zip(received, frozen, strict=True))
    by_step = list(zip(*received, strict=True))
    steps_used = sum(any(step) for step in by_step)
    ranks_used = tuple(rank for rank, steps in zip(heard, received, strict=True) if any(steps))
    zero = [
        _zero_part(steps, index, units.count)
        for steps, here in zip(zip(*ranks, strict=True), by_step, strict=True)
        if units is not None and any(here) and all(step.looked for step in steps)
    ]
    zero_rows = sum(zero) / len(zero) if zero else None
    frozen_since = _find_freezing(pattern) if units is not None and steps_used else None
    always_frozen = all(all(steps) for steps in frozen)
    if not by_step:
        verdict = NOT_SEEN
    elif units is None:
        verdict = UNFROZEN if steps_used else FROZEN_BEFORE
    elif always_frozen and steps_used == 0:
        verdict = FROZEN_AFTER
    elif frozen_since is not None:
        verdict = FROZEN_SINCE
    elif kind := _kind_of_use(by_step):
        verdict = kind
    elif zero_rows == 1:
        verdict = ALL_ZERO
    elif zero_rows is not None and zero_rows >= _MOSTLY:
        verdict = MOSTLY_ZERO
    else:
        verdict = USED
    return ParameterVerdict(
        name, 0 if units is None else size, verdict, steps_used, ranks_used, zero_rows, pattern, frozen_since
    )


def _zero_part(steps: Sequence[Step], index: int, units: int) -> float:
    """Return the part of a parameter's units that was zero on every rank in a step."""
    used = 0
    for step in steps:
        if step.values[index] == EVERYTHING:
            return 0.0
        if step.values[index] == SOMETHING:
            used |= int.from_bytes(step.masks[index], sys.byteorder)
    return 1 - used.bit_count() / max(units, 1)


def _find_freezing(pattern: Sequence[str]) -> int | None:
    """Return the step from which on every rank has a parameter frozen; None if none has, or only in the last step."""
    since = max(len(steps.rstrip("-")) for steps in pattern)
    return since if since <= len(pattern[0]) - _LEAST_FROZEN else None


def mark(here: bool, frozen: bool) -> str:
    """Return the character for a step in a pattern."""
    return "#" if here else "-" if frozen else "."


def judge_patterns(name: str, dense_bytes: int, pattern: tuple[str, ...]) -> ParameterVerdict:
    """Judge a parameter by what each rank did in each step alone, as under FSDP2."""
    by_step = [[character == "#" for character in step] for step in zip(*pattern, strict=True)]
    ranks_used = tuple(rank for rank, steps in enumerate(pattern) if "#" in steps)
    verdict = FROZEN if set().union(*pattern) == {"-"} else _kind_of_use(by_step) or USED
    return ParameterVerdict(name, dense_bytes, verdict, sum(map(any, by_step)), ranks_used, None, pattern)


def _kind_of_use(by_step: Sequence[Sequence[bool]]) -> str:
    """Say what is special about who used a parameter in which step; nothing if every rank did in every one."""
    steps_used = sum(map(any, by_step))
    if steps_used == 0:
        return NEVER
    if any(any(step) and not all(step) for step in by_step):
        return SOME_RANKS
    return SOMETIMES if steps_used < len(by_step) else ""


def group_by_module(verdicts: Sequence[ParameterVerdict]) -> list[ModuleVerdict]:
    """Put parameters with the same verdict together, under the largest module that has no other ones.

    Returns:
        In the order of the parameters' names in the model.
    """
    kinds: dict[str, set[str]] = {}
    for one in verdicts:
        for module in _modules_around(one.name):
            kinds.setdefault(module, set()).add(one.verdict)
    groups: dict[tuple[str, str], list[ParameterVerdict]] = {}
    for one in verdicts:
        whole = [module for module in _modules_around(one.name) if kinds[module] == {one.verdict}]
        # The outermost comes first.
        groups.setdefault((whole[0] if whole else one.name, one.verdict), []).append(one)
    names = {one.name for one in verdicts}
    return [
        ModuleVerdict(name, verdict, len(some), sum(one.dense_bytes for one in some), name not in names)
        for (name, verdict), some in groups.items()
    ]


def in_steps(frozen: Sequence[ParameterVerdict]) -> str:
    """Return a clause that says since which step parameters are frozen."""
    steps = sorted({one.frozen_since for one in frozen if one.frozen_since is not None})
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def is_inside(name: str, module: str) -> bool:
    """Return whether a parameter is part of a module, or has that name itself; "" is the whole model."""
    return not module or name == module or name.startswith(f"{module}.")


def without_numbers(name: str) -> str:
    """Return a name with a mark in place of each number that is a part of it."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def unite_names(names: Sequence[str]) -> str:
    """Return names that differ in numbers only as one, as in ``layers.{0-3,6}.attention``."""
    columns = [list(dict.fromkeys(column)) for column in zip(*(name.split(".") for name in names), strict=True)]
    varying = sum(len(column) > 1 for column in columns)
    # The numbers of two places would say too much: not every pair of them need be there.
    return ".".join(
        column[0] if len(column) == 1 else f"{{{_ranges(sorted(map(int, column)))}}}" if varying == 1 else "*"
        for column in columns
    )


def short_names(of: Sequence[ModuleVerdict]) -> str:
    """Return the names of modules in one line, the first few of many."""
    alike: dict[str, list[str]] = {}
    for one in of:
        alike.setdefault(without_numbers(one.name), []).append(one.name)
    names = [unite_names(some) or "the whole model" for some in alike.values()]
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _modules_around(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]


def count(number: int, what: str) -> str:
    """Return a number of things in words."""
    return f"{number} {what}{'' if number == 1 else 's'}"
