"""Policies: what counts as unused, and how what is left travels.

A policy is a value. Every rank must choose the same one; :class:`ddp_hooks.SkipUnusedState` checks that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from .wording import read_fields, short, short_list

Detector = Literal["off", "on", "adaptive"]
Average = Literal["world", "contributors"]


# What a checkpoint has to hold. Fields that came later are read with their defaults where they are missing.
_FIRST_FIELDS = (
    "name",
    "graph",
    "values",
    "in_place_bytes",
    "pack_bytes",
    "gap_fraction",
    "min_zero_fraction",
    "hold_steps",
    "first_pause_steps",
    "longest_pause_steps",
    "rebuild_after",
)


@dataclass(frozen=True, slots=True, repr=False)
class Policy:
    """How a hook decides what to send. Start from a preset, or make one: ``Policy("mine", values="on")``.

    Args:
        name: what messages and statistics call it.
        graph: use the graph detector: parameters that the Reducer found unused, or that are frozen, are not sent. Costs
            one small exchange of masks a step and reads no gradient.
        values: use the values detector: gradients that are zero on every rank are not sent. ``"on"`` costs an exchange
            of masks a bucket and a scan that stops at the first non-zero; ``"adaptive"`` probes now and then, and turns
            the detector on while it pays.
        units: look into parameters: of a gradient with rows that are zero on every rank, only the others are sent.
            ``"on"`` costs an exchange of compressed masks for each bucket with a parameter that has units, and a scan
            that stops in each unit at the first non-zero; ``"adaptive"`` samples gradients, and does it for those
            parameters for which it pays. Needs ``graph``.
        in_place_bytes: a run of used gradients of at least this many bytes travels from where it lies, in a message of
            its own; shorter ones are gathered. The default is where copying and one message more cost about the same
            on loopback (``benchmarks/results/thresholds.json``). Bytes.
        pack_bytes: gathered gradients leave when this many bytes have come together. Bytes.
        gap_fraction: unused gradients between two used runs are sent along when they make up at most this fraction of
            the runs' mean length, because one message in place is cheaper than two.
        direct: what one rank alone contributes it sends to the others, which takes half of the bytes of an all-reduce
            with everybody's zeros (docs/internals/protocol.md). Needs ``graph``, and a group of gloo or NCCL
            of at most 64 ranks; elsewhere everything is all-reduced.
        owners: what some ranks contribute and others do not, one of them sums and sends on, which takes up to a third
            less of the bytes. It also lets other ranks pass on a part of what one has too much of. Off, because sums
            leave only at the end of backward: with four hosts on two cores LayerDrop's step took 1.26 times that with
            all-reduces (benchmarks/results/who_4_hosts.json). Needs ``direct``.
        segment_bytes: such gradients travel in messages of about so much from each rank. Bytes.
        min_direct_bytes: with less than this of them in a step, or in a bucket's units, all are all-reduced. Bytes.
        average: ``"world"`` divides by the number of ranks, as DDP does; ``"contributors"`` divides each parameter's
            gradient by the number of ranks that used it in the step, so that what one of 8 ranks used is not made 8
            times as small. Gradients then differ from plain DDP's, wherever a rank leaves something out. A step in
            which some rank has a ``.grad`` of before for a parameter that it does not use now is divided by the number
            of ranks throughout (docs/averages.md, "Gradients that are kept"). Needs ``graph``.
        min_zero_fraction: with ``values="adaptive"``, the fraction of a step's bytes that all-zero gradients have to
            make up for the values detector to stay on; with ``units="adaptive"``, the fraction of a parameter's
            elements that have to be spared for it to be looked into again in the next step; to be looked into at first,
            as much of a sample of its units has to be zero, and at least an eighth. With 0 any zero keeps either on;
            where there is none they go off all the same. On a GPU at least 0.25, because there answers hold the host
            back.
        hold_steps: with ``values="adaptive"``: how many steps the values detector stays on after a step in which it
            paid. It does nothing for ``units``: a parameter is looked into for as long as each step pays.
        first_pause_steps: with ``values="adaptive"``, steps before the first probe; the pause doubles while probes find
            nothing. ``units="adaptive"`` does not wait for it: gradients are sampled from the first step on, and a
            parameter for which looking did not pay is left alone for so many steps, then for twice as many. On a GPU
            so is one that is sampled in vain, because that costs its host more.
        longest_pause_steps: the longest of these pauses, for ``values`` and for ``units``.
        min_divided_bytes: a parameter with less is one unit, that is, sent whole or not at all. Bytes.
        min_unit_bytes: rows (slices along the first dimension) shorter than this are put together to units of at least
            so much. Bytes; measured in benchmarks/results/unit_sizes.json.
        max_unit_bytes: rows longer than this are divided into equal parts, each a unit, where they can be. Bytes;
            measured likewise.
        rebuild_after: call :func:`ddp_hooks.rebuild` by itself once the same parameters have been unused for this many
            steps in a row. Where that takes nothing out, because they are not frozen on every rank, it is tried again
            after twice as many steps each time. It does nothing with ``static_graph=True``. Without ``graph``
            everything that DDP reduces counts as used, frozen or not, so that only parameters which were unfrozen and
            are unmanaged bring a rebuild about. 0 for never. Steps.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is out of range.
    """

    name: str
    graph: bool = True
    values: Detector = "off"
    units: Detector = "off"
    in_place_bytes: int = 1 << 20
    pack_bytes: int = 4 << 20
    gap_fraction: float = 1 / 128
    direct: bool = True
    owners: bool = False
    segment_bytes: int = 256 << 10
    min_direct_bytes: int = 256 << 10
    average: Average = "world"
    min_zero_fraction: float = 0.05
    hold_steps: int = 32
    first_pause_steps: int = 16
    longest_pause_steps: int = 1024
    min_divided_bytes: int = 64 << 10
    min_unit_bytes: int = 256
    max_unit_bytes: int = 64 << 10
    rebuild_after: int = 0

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        if not isinstance(self.name, str):
            raise TypeError(f"Policy.name: expected a str, received {short(self.name)}")
        for field in ("graph", "direct", "owners"):
            if not isinstance(getattr(self, field), bool):
                raise TypeError(f"Policy.{field}: expected a bool, received {short(getattr(self, field))}")
        if not isinstance(self.average, str) or self.average not in get_args(Average):
            raise ValueError(f"Policy.average: expected one of {get_args(Average)}, received {short(self.average)}")
        if self.average != "world" and not self.graph:
            raise ValueError(
                f"Policy.average: expected 'world' without the graph detector, received {short(self.average)}; set "
                "graph=True"
            )
        for field in ("values", "units"):
            value = getattr(self, field)
            if not isinstance(value, str) or value not in get_args(Detector):
                raise ValueError(f"Policy.{field}: expected one of {get_args(Detector)}, received {short(value)}")
        if self.units != "off" and not self.graph:
            raise ValueError(
                f"Policy.units: expected 'off' without the graph detector, received {short(self.units)}; set graph=True"
            )
        for field in ("gap_fraction", "min_zero_fraction"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"Policy.{field}: expected a number, received {short(value)}")
            if not 0 <= value <= 1:  # false for NaN, too
                raise ValueError(f"Policy.{field}: expected between 0 and 1, received {short(value)}")
            # Ranks compare policies as text, in which 1 and 1.0, or 0.0 and -0.0, would differ.
            object.__setattr__(self, field, float(value) + 0.0)
        for field, least in (
            ("in_place_bytes", 0),
            ("pack_bytes", 0),
            ("segment_bytes", 1),
            ("min_direct_bytes", 0),
            ("hold_steps", 0),
            ("first_pause_steps", 1),
            ("longest_pause_steps", self.first_pause_steps),
            ("min_divided_bytes", 0),
            ("min_unit_bytes", 1),
            ("max_unit_bytes", 1),
            ("rebuild_after", 0),
        ):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value >= 2**63:
                raise TypeError(f"Policy.{field}: expected an int of 64 bits, received {short(value)}")
            if value < least:
                raise ValueError(f"Policy.{field}: expected at least {least}, received {short(value)}")

    def __repr__(self) -> str:
        """Return an expression that makes this policy again: its name, and what differs from the defaults."""
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"Policy({', '.join(changed)})"

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, for checkpoints."""
        return asdict(self)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Policy:
        """Make a policy of what :meth:`to_dict` returned; fields that are newer than a checkpoint take their defaults.

        Args:
            settings: the fields by name.

        Raises:
            TypeError: it is no dictionary, or a setting is of the wrong type.
            ValueError: fields are missing or unknown, or a setting is out of range.
        """
        return read_fields(cls, settings, _FIRST_FIELDS)


PRESETS: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        # Everything is sent, by the same engine: the baseline.
        Policy("allreduce", graph=False),
        Policy("skip_unused"),
        Policy("skip_zeros", values="on", units="on"),
        Policy("auto", values="adaptive", units="adaptive"),
    )
}


def resolve(policy: Policy | str, settings: Mapping[str, Any] | None = None) -> Policy:
    """Return the policy, or the preset of that name; what everything that takes a policy and settings calls.

    Args:
        policy: a preset's name, or a policy.
        settings: fields of :class:`Policy` to set differently.

    Raises:
        TypeError: neither a policy nor a name; or a policy has no such field, or a value is of the wrong type.
        ValueError: no preset has that name, or a value is out of range.
    """
    found = _find(policy)
    if not settings:
        return found
    _check_names(settings)
    return replace(found, **settings)


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Read settings from the command line.

    Args:
        texts: each as ``rebuild_after=100``: a field of :class:`Policy` and its value, as in Python but without quotes.

    Returns:
        The values by name, for :func:`resolve`, which checks them.

    Raises:
        TypeError: a policy has no such field.
        ValueError: there is no value, or none of the field's type.
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
    default = next(field.default for field in fields(Policy) if field.name == name)
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{name}: expected true or false, received {short(text)}")
        return text.lower() == "true"
    for kind, expected in ((int, "an int"), (float, "a number")):
        if isinstance(default, kind):
            try:
                return kind(text)
            except ValueError:
                raise ValueError(f"{name}: expected {expected}, received {short(text)}") from None
    return text


def _check_names(names: Iterable[str]) -> None:
    known = [field.name for field in fields(Policy)]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise TypeError(
            f"policy: expected fields of ddp_hooks.Policy as settings ({', '.join(known)}), received "
            f"{short_list(unknown)}"
        )


def _find(policy: Policy | str) -> Policy:
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise TypeError(f"policy: expected a ddp_hooks.Policy or the name of a preset, received {short(policy)}")
    if policy not in PRESETS:
        raise ValueError(
            f"policy: expected one of {', '.join(PRESETS)}, or a ddp_hooks.Policy, received {short(policy)}"
        )
    return PRESETS[policy]
