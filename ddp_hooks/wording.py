"""Checks arguments, and puts values into sentences: briefly, because a value may be a whole checkpoint."""

from __future__ import annotations

import reprlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar

import torch

Saved = TypeVar("Saved")

_LONGEST = 160
_LONGEST_NAME = 60
_SHOWN = 6
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
# The width of a terminal.
COLUMNS = 80


class _Short(reprlib.Repr):
    """A repr that shows tensors and modules by type only, and the first few elements of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = 4
        self.maxstring = self.maxother = 60

    def repr1(self, x: object, level: int) -> str:
        if isinstance(x, torch.Tensor):
            return f"a {type(x).__name__} of {str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
        if isinstance(x, (torch.nn.Module, torch.optim.Optimizer)):
            return f"a {type(x).__name__}"
        if isinstance(x, Mapping) and not isinstance(x, dict):
            x = dict(x)
        if isinstance(x, dict) and type(x) is not dict:
            return self.repr_dict(x, level)
        return super().repr1(x, level)


_short = _Short()


def short(value: object) -> str:
    """Return a repr of ``value`` that is short enough for a sentence; tensors and modules by type and shape only."""
    try:
        text = _short.repr(value)
    except Exception:
        # A failing repr must not hide the error that is being described.
        text = f"a {type(value).__name__}"
    # On one line.
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def did_you_mean(received: object, known: Iterable[str]) -> str:
    """Return a hint at the known name that is closest to the received one, to append to an error; may be empty."""
    names = {name.lower(): name for name in known}
    close = get_close_matches(received.lower(), list(names), n=1, cutoff=0.7) if isinstance(received, str) else []
    return f"; did you mean {names[close[0]]!r}?" if close else ""


def check_flag(name: str, value: object) -> None:
    """Raise if ``value`` is not a bool.

    Raises:
        TypeError: names the argument and the value.
    """
    if not isinstance(value, bool):
        raise TypeError(f"expected {name} to be True or False, received {short(value)}")


def check_int(name: str, value: object, least: int) -> None:
    """Raise if ``value`` is not an int, or is a bool, or is less than ``least``.

    Raises:
        TypeError, ValueError: names the argument, the expected values and the received one.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected {name} to be an int of at least {least}, received {short(value)}")
    if value < least:
        raise ValueError(f"expected {name} to be at least {least}, received {short(value)}")


def check_fields(what: str, received: object, required: Sequence[str], known: Iterable[str]) -> None:
    """Raise unless ``received`` is a dictionary with all ``required`` names and no unknown ones.

    Raises:
        TypeError, ValueError: names the missing and unknown fields, without their values.
    """
    if not isinstance(received, Mapping):
        raise TypeError(
            f"{what}: expected a dictionary with the fields {short_list(required)}, received {short(received)}; pass "
            "what a checkpoint has for it"
        )
    missing = [name for name in required if name not in received]
    unknown = [name for name in received if name not in set(known)]
    problems = []
    if missing:
        problems.append(f"without {short_list(missing)}")
    if unknown:
        problems.append(f"with unknown {short_list(unknown)}")
    if problems:
        raise ValueError(
            f"{what}: expected a dictionary with the fields {short_list(required)}, received one "
            f"{' and '.join(problems)}; pass what a checkpoint of this version of ddp_hooks, or of an older one, has "
            "for it"
        )


def read_fields(kind: type[Saved], saved: Mapping[str, Any], required: Sequence[str]) -> Saved:
    """Make a dataclass from a checkpoint; fields that are newer than the checkpoint take their defaults.

    Args:
        kind: the dataclass.
        saved: its fields by name.
        required: fields that every checkpoint has.

    Raises:
        TypeError, ValueError: as for :func:`check_fields`, or raised by the dataclass.
    """
    check_fields(kind.__name__, saved, required, [field.name for field in fields(kind)])  # type: ignore[arg-type]
    return kind(**saved)


def describe_bytes(count: float) -> str:
    """Return a number of bytes for people: with three digits, or exactly if it is less than a kilobyte."""
    for unit in _UNITS:
        # A number that rounds to 1,000 is shown in the next unit.
        if abs(count) < 999.5 or unit == _UNITS[-1]:
            break
        count /= 1000
    if unit == "B":
        return f"{count:.0f} B"
    digits = max(0, 2 - len(str(int(abs(count)))) + 1)
    return f"{count:,.{digits}f} {unit}"


def describe_seconds(seconds: float) -> str:
    """Return a short time for people, in milliseconds, or in microseconds if it is less than one."""
    return f"{seconds * 1e6:.0f} us" if seconds < 0.9995e-3 else f"{seconds * 1e3:,.1f} ms"


def describe_part(part: float) -> str:
    """Return a fraction as a percentage, for people; zero never has a sign."""
    text = f"{part:.1%}"
    return "0.0%" if text == "-0.0%" else text


def fill(text: str, indent: str = "", further_indent: str | None = None) -> str:
    """Wrap text for a terminal without breaking words, so that names and paths can be copied.

    Args:
        text: the text.
        indent: the indent of the first line.
        further_indent: the indent of the other lines; None for the same.
    """
    further = indent if further_indent is None else further_indent
    return textwrap.fill(
        text,
        COLUMNS,
        initial_indent=indent,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )


def short_list(names: Sequence[object]) -> str:
    """Return names in one line; if there are many, only the first few."""
    shown = [name if isinstance(name, str) and len(name) <= _LONGEST_NAME else short(name) for name in names[:_SHOWN]]
    more = len(names) - len(shown)
    return ", ".join(map(str, shown)) + (f" and {more} more" if more else "")


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return ranks by number, such as "rank 1" or "ranks 1, 3"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {short_list([str(rank) for rank in ranks])}"
