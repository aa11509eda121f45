"""Policies decide which gradients are not sent, and how the others travel.

A policy is a value. Every rank must choose the same one; :class:`ddp_hooks.SkipUnusedState` checks that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, fields, replace
from functools import wraps
from typing import Any, Literal, TypeVar, get_args

from .wording import check_fields, did_you_mean, read_fields, short

When = Literal["off", "on", "adaptive"]
Coded = Literal["off", "on", "auto"]
Settings = TypeVar("Settings", bound="type[Policy | Tuning]")


# Fields that every checkpoint has. Fields that were added later take their defaults if they are missing.
_FIRST_FIELDS = ("name", "skip_unused", "skip_zeros", "skip_zero_rows", "rebuild_after", "tuning")
_FIRST_FIELDS_OF_TUNING = (
    "in_place_bytes",
    "pack_bytes",
    "direct",
    "owners",
    "segment_bytes",
    "min_zero_fraction",
    "min_unit_bytes",
    "max_unit_bytes",
)


def _names(kind: type[Policy] | type[Tuning]) -> list[str]:
    return [field.name for field in fields(kind)]


def _naming_unknown_fields(kind: Settings) -> Settings:
    """Let a dataclass suggest a known field when it is given an unknown one."""
    original = kind.__init__

    @wraps(original)
    def __init__(self: Any, *args: Any, **values: Any) -> None:
        unknown = [name for name in values if name not in _names(kind)]
        if unknown:
            raise TypeError(f"{kind.__name__}: {_describe_unknown(unknown, {kind.__name__: _names(kind)})}")
        original(self, *args, **values)

    kind.__init__ = __init__  # type: ignore[method-assign]
    return kind


def _describe_unknown(unknown: Sequence[str], known: Mapping[str, Sequence[str]]) -> str:
    """Suggest a known field for each unknown one, or list the known fields of each class if none is close."""
    names = [name for names in known.values() for name in names]
    suggestions = [did_you_mean(name, names) for name in unknown]
    kinds = " or ".join(f"ddp_hooks.{kind}" for kind in known)
    received = ", ".join(f"{short(name)}{suggestion}" for name, suggestion in zip(unknown, suggestions, strict=True))
    lists = "" if all(suggestions) else "; " + "; ".join(f"{kind} has {', '.join(known[kind])}" for kind in known)
    return f"expected fields of {kinds}, received {received}{lists}"


def _check_flag(settings: Policy | Tuning, name: str) -> None:
    value = getattr(settings, name)
    if not isinstance(value, bool):
        raise TypeError(f"{type(settings).__name__}.{name}: expected a bool, received {short(value)}")


def _check_int(settings: Policy | Tuning, name: str, least: int) -> None:
    value = getattr(settings, name)
    if isinstance(value, bool) or not isinstance(value, int) or value >= 2**63:
        raise TypeError(f"{type(settings).__name__}.{name}: expected a 64-bit int, received {short(value)}")
    if value < least:
        raise ValueError(f"{type(settings).__name__}.{name}: expected at least {least}, received {short(value)}")


@_naming_unknown_fields
@dataclass(frozen=True, slots=True, repr=False)
class Tuning:
    """Thresholds of a policy. The defaults were chosen by measurement; few programs gain from other values.

    A *unit* is a row of a gradient (a slice along the first dimension), several short rows, or a part of a long one. A
    parameter of less than 64 KiB is one unit, so it is sent whole or not at all.

    Args:
        in_place_bytes: a run of used gradients with at least this many bytes is sent from where it lies, in a message
            of its own. Shorter runs are gathered. On a GPU, only the single run of a bucket is sent so; several are
            gathered, whatever their length, so that a bucket takes at most one all-reduce. Bytes.
        pack_bytes: gathered gradients are sent once they reach this many bytes. Bytes.
        direct: a rank that alone contributes a gradient sends it straight to the others, which takes half the bytes of
            an all-reduce (docs/internals/protocol.md, "Who contributes"). This requires ``skip_unused``, a gloo or NCCL
            group of at most 64 ranks, and one rank per host; otherwise everything is all-reduced. Hosts with equally
            many ranks count as ranks here, after their ranks have added up: on CPUs over gloo, and on GPUs with
            ``owners=True``. Hosts differ in hostname or the kernel's boot id, or in the variable ``DDP_HOOKS_HOST``.
        owners: if only some ranks contribute a gradient, one of them sums it and sends the sum to all, which saves up
            to half of the bytes. Requires ``direct``. ``None`` stands for True on CPUs, and for False on GPUs, where it
            takes more collectives and launches, and nobody has measured whether that pays. On GPUs, ``True`` also lets
            the ranks of a host add up what few hosts contribute, each rank a share, before it leaves the host.
        segment_bytes: roughly how much each rank puts into one such message. Bytes.
        min_zero_fraction: how much zeros must save for an adaptive setting to stay on. For ``skip_zeros``, this is the
            fraction of a step's bytes in gradients that are entirely zero. For ``skip_zero_rows``, it is the fraction
            of a parameter's elements in zero units; the setting turns on when a sample of the units has that fraction
            of zeros, and at least an eighth. With 0, any zero is enough. On a GPU the value is at least 0.25, because
            the host waits for each answer.
        min_unit_bytes: rows shorter than this are combined into units of at least this size. Bytes.
        max_unit_bytes: rows longer than this are divided into equal units if possible. Bytes.
        report_hang_after: how long a rank waits for others before it prints to standard error which ranks are missing
            and where they are (docs/troubleshooting.md, "My training hangs"); 0 for never. The environment variable
            ``DDP_HOOKS_REPORT_HANG_AFTER`` overrides it. Seconds.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is out of range.
    """

    in_place_bytes: int = 1 << 20
    pack_bytes: int = 4 << 20
    direct: bool = True
    owners: bool | None = None
    segment_bytes: int = 256 << 10
    min_zero_fraction: float = 0.05
    min_unit_bytes: int = 256
    max_unit_bytes: int = 64 << 10
    report_hang_after: float = 10.0

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        _check_flag(self, "direct")
        if self.owners is not None:
            _check_flag(self, "owners")
        fraction = self.min_zero_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
            raise TypeError(f"Tuning.min_zero_fraction: expected a number, received {short(fraction)}")
        if not 0 <= fraction <= 1:  # false for NaN, too
            raise ValueError(f"Tuning.min_zero_fraction: expected a number from 0 to 1, received {short(fraction)}")
        # Ranks compare policies as text, and would take 1 and 1.0, or 0.0 and -0.0, for different values.
        object.__setattr__(self, "min_zero_fraction", float(fraction) + 0.0)
        seconds = self.report_hang_after
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise TypeError(f"Tuning.report_hang_after: expected a number of seconds, received {short(seconds)}")
        if not 0 <= seconds < float("inf"):
            raise ValueError(
                f"Tuning.report_hang_after: expected a finite number, 0 or more, received {short(seconds)}"
            )
        object.__setattr__(self, "report_hang_after", float(seconds) + 0.0)
        for name, least in (
            ("in_place_bytes", 0),
            ("pack_bytes", 0),
            ("segment_bytes", 1),
            ("min_unit_bytes", 1),
            ("max_unit_bytes", 1),
        ):
            _check_int(self, name, least)

    def __repr__(self) -> str:
        """Return an expression that makes these settings: those that differ from the defaults."""
        return _expression(self)


@_naming_unknown_fields
@dataclass(frozen=True, slots=True, repr=False)
class Policy:
    """How a hook decides what to send. Start from a preset, or make one: ``Policy("mine", skip_zeros="on")``.

    Args:
        name: a name for messages and statistics.
        skip_unused: do not send parameters that are frozen, or that no rank used in the step. This costs one small mask
            exchange per step, and reads no gradient.
        skip_zeros: do not send gradients that are zero on every rank. ``"on"`` costs a mask exchange for each bucket
            and a scan that stops at the first non-zero. ``"adaptive"`` looks occasionally, and skips while it pays.
        skip_zero_rows: do not send rows that are zero on every rank. ``"on"`` costs an exchange of compressed masks for
            each bucket with such a parameter, and a scan that stops at the first non-zero of each row. ``"adaptive"``
            samples gradients, and skips rows of those parameters for which it pays. Requires ``skip_unused``.
        coded: send gradients in fewer bits between hosts. Every bit arrives. A float32 gradient usually takes 86% of
            its bytes, and 36% if it was computed in bfloat16 under ``torch.autocast``. ``"auto"`` codes while it saves
            enough for the speed of the hosts' network interfaces (docs/several-machines.md). ``"on"`` codes whatever
            it saves. The hook codes gradients of 32 or 16 bits, on the CPU and over gloo, if every rank has its own
            host or all hosts have the same number of ranks. Otherwise neither setting has an effect, and
            ``print(state.stats())`` says why. With gradients on another device, ``"on"`` is refused. Under FSDP2,
            numbers of 64 bits are not coded. Requires ``skip_unused`` and ``direct``.
        rebuild_after: call :func:`ddp_hooks.rebuild` once the same parameters have been unused for this many steps in a
            row; 0 for never. If that removes nothing, because some rank has not frozen them, the next attempt comes
            after twice as many steps. It does nothing with ``static_graph=True``; without ``skip_unused`` it only adds
            parameters that were unfrozen after wrapping. Steps.
        tuning: thresholds, whose defaults were chosen by measurement.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is out of range.
    """

    name: str
    skip_unused: bool = True
    skip_zeros: When = "off"
    skip_zero_rows: When = "off"
    coded: Coded = "off"
    rebuild_after: int = 0
    tuning: Tuning = Tuning()

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        if not isinstance(self.name, str):
            raise TypeError(f"Policy.name: expected a str, received {short(self.name)}")
        _check_flag(self, "skip_unused")
        for name, choices in (
            ("skip_zeros", get_args(When)),
            ("skip_zero_rows", get_args(When)),
            ("coded", get_args(Coded)),
        ):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in choices:
                raise ValueError(
                    f"Policy.{name}: expected one of {choices}, received {short(value)}{did_you_mean(value, choices)}"
                )
        for name in ("skip_zero_rows", "coded"):
            value = getattr(self, name)
            if value != "off" and not self.skip_unused:
                raise ValueError(
                    f"Policy.{name}: expected 'off' with skip_unused=False, received {short(value)}; "
                    "set skip_unused=True"
                )
        _check_int(self, "rebuild_after", 0)
        if not isinstance(self.tuning, Tuning):
            raise TypeError(f"Policy.tuning: expected a ddp_hooks.Tuning, received {short(self.tuning)}")

    def __repr__(self) -> str:
        """Return an expression that makes this policy: its name, and the settings that differ from the defaults."""
        return _expression(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, for checkpoints; ``tuning`` is a dictionary of its own."""
        # Without the constants that a test may have set (serving/engine_settings.py).
        return {**asdict(self), "tuning": {name: getattr(self.tuning, name) for name in _names(Tuning)}}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Policy:
        """Make a policy from the result of :meth:`to_dict`; fields newer than the checkpoint take their defaults.

        Args:
            settings: the fields by name.

        Raises:
            TypeError: it is not a dictionary, or a setting is of the wrong type.
            ValueError: fields are missing or unknown, or a setting is out of range.
        """
        check_fields("Policy", settings, _FIRST_FIELDS, _names(cls))
        tuning = read_fields(Tuning, settings["tuning"], _FIRST_FIELDS_OF_TUNING)
        return cls(**{**settings, "tuning": tuning})


PRESETS: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        # The baseline: the same engine sends everything.
        Policy("allreduce", skip_unused=False),
        Policy("skip_unused"),
        Policy("skip_zeros", skip_zeros="on", skip_zero_rows="on"),
        Policy("auto", skip_zeros="adaptive", skip_zero_rows="adaptive", coded="auto"),
    )
}


def resolve(policy: Policy | str, settings: Mapping[str, Any] | None = None, function: str | None = None) -> Policy:
    """Return the policy with some settings changed. Every function that takes a policy and settings calls this.

    Args:
        policy: a preset's name, or a policy.
        settings: fields of :class:`Policy` or of :class:`Tuning` to set differently.
        function: the function that the user called, with which errors begin.

    Raises:
        TypeError: ``policy`` is neither a policy nor a name, a field does not exist, or a value is of the wrong type.
        ValueError: no preset has that name, or a value is out of range.
    """
    try:
        return _resolve(policy, settings or {})
    except (TypeError, ValueError) as error:
        raise type(error)(str(error) if function is None else f"{function}: {error}") from None


def _resolve(policy: Policy | str, settings: Mapping[str, Any]) -> Policy:
    found = _find(policy)
    _check_names(settings)
    of_tuning = {name: settings[name] for name in settings if name in _names(Tuning)}
    if len(of_tuning) < len(settings):
        found = replace(found, **{name: settings[name] for name in settings if name not in of_tuning})
    return replace(found, tuning=replace(found.tuning, **of_tuning)) if of_tuning else found


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Read settings from the command line.

    Args:
        texts: assignments such as ``rebuild_after=100``, each to a field of :class:`Policy` (except ``tuning``) or of
            :class:`Tuning`. Values are written as in Python, but without quotes.

    Returns:
        The values by name, for :func:`resolve`, which checks them.

    Raises:
        TypeError: the field does not exist.
        ValueError: the value is missing or of the wrong type.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"expected NAME=VALUE, received {short(text)}")
        _check_names([name])
        settings[name] = _parse(name, value)
    return settings


def _parse(name: str, text: str) -> Any:
    default = next(field.default for field in _all_fields() if field.name == name)
    if isinstance(default, Tuning):
        raise ValueError("tuning: expected one of its fields, as in pack_bytes=1000000")
    if isinstance(default, bool) or default is None:
        values = {"true": True, "false": False, **({"none": None} if default is None else {})}
        if text.lower() not in values:
            raise ValueError(f"{name}: expected {' or '.join(values)}, received {short(text)}")
        return values[text.lower()]
    for kind, expected in ((int, "an int"), (float, "a number")):
        if isinstance(default, kind):
            try:
                return kind(text)
            except ValueError:
                raise ValueError(f"{name}: expected {expected}, received {short(text)}") from None
    return text


def _all_fields() -> tuple[Field[Any], ...]:
    return (*fields(Policy), *fields(Tuning))


def _check_names(names: Iterable[str]) -> None:
    known = {kind.__name__: _names(kind) for kind in (Policy, Tuning)}
    unknown = [name for name in names if not any(name in fields for fields in known.values())]
    if unknown:
        raise TypeError(_describe_unknown(unknown, known))


def _expression(settings: Policy | Tuning) -> str:
    changed = [
        f"{field.name}={getattr(settings, field.name)!r}"
        for field in fields(settings)
        if getattr(settings, field.name) != field.default
    ]
    return f"{type(settings).__name__}({', '.join(changed)})"


def _find(policy: Policy | str) -> Policy:
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise TypeError(f"expected a ddp_hooks.Policy or the name of a preset, received {short(policy)}")
    if policy not in PRESETS:
        raise ValueError(
            f"expected one of {', '.join(PRESETS)}, or a ddp_hooks.Policy, received {short(policy)}"
            f"{did_you_mean(policy, PRESETS)}"
        )
    return PRESETS[policy]
