"""What a hook reports: counters of what was sent, and which parameters were used."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from .wording import describe_bytes, describe_part, fill, read_fields, short

# What a checkpoint has to hold. Counters that came later start at zero where they are missing.
_FIRST_FIELDS = (
    "steps",
    "skip_zeros_steps",
    "buckets_whole",
    "buckets_packed",
    "buckets_skipped",
    "messages",
    "dense_bytes",
    "payload_bytes",
    "mask_bytes",
    "exchanges",
    "plan_cache_hits",
    "plan_cache_misses",
    "exchange_wait_seconds",
    "hook_seconds",
)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counters since the state was made or :meth:`SkipUnusedState.reset_stats`.

    With those of the run before, where the state has loaded a checkpoint.

    All but the seconds, the bytes of sparse gradients and ``sent_bytes`` are the same on every rank. Bytes are those of
    tensors that are handed to collectives; what crosses a link depends on how they travel, which ``sent_bytes`` counts.

    Attributes:
        steps: synchronised backward passes.
        skip_zeros_steps: steps in which ``skip_zeros`` was on.
        skip_zero_rows_steps: steps in which ``skip_zero_rows`` was, so that ranks agreed on the units (rows, say) of
            some parameters.
        units_agreed_on: units that were agreed on, summed over those steps.
        units_sent: how many of them some rank used.
        narrow_steps: steps in which ``narrow`` was on, so that ranks agreed on how wide the units of some parameters
            are.
        units_narrow: how many of the units that were sent were narrow.
        buckets_whole: buckets sent whole.
        buckets_packed: buckets that were sent in part.
        buckets_skipped: buckets that were not sent.
        messages: collectives that carried gradients.
        dense_bytes: what plain DDP would have handed to its all-reduces, with the parameters that the module's Reducer
            has at the time. Bytes.
        rebuilt_bytes: what it would have handed over besides, had no rebuild taken parameters out of the module's
            Reducer that were in it before. Bytes.
        payload_bytes: the gradients that travelled, however they did. Bytes.
        broadcast_bytes: so many of them each rank that contributed sent to all others. Bytes.
        owner_bytes: so many of them some ranks contributed and one of these summed. Bytes.
        narrow_bytes: so many of them hold numbers in half of their width. Bytes.
        sent_bytes: what this rank sent of gradients: of all-reduces what a ring would send, 2 (n - 1) / n of their
            bytes, otherwise as it was. Bytes.
        mask_bytes: what was handed to the control group to agree on usage masks. Bytes.
        exchanges: mask exchanges.
        plan_cache_hits: steps whose reduction plan was known already.
        plan_cache_misses: steps whose reduction plan had to be made.
        exchange_wait_seconds: how long backward stood still for agreed masks, on this rank.
        hook_seconds: what the hook costs this rank besides, in time: scanning, scaling, gathering, launching.
    """

    steps: int = 0
    skip_zeros_steps: int = 0
    buckets_whole: int = 0
    buckets_packed: int = 0
    buckets_skipped: int = 0
    messages: int = 0
    dense_bytes: int = 0
    payload_bytes: int = 0
    mask_bytes: int = 0
    exchanges: int = 0
    plan_cache_hits: int = 0
    plan_cache_misses: int = 0
    exchange_wait_seconds: float = 0.0
    hook_seconds: float = 0.0
    skip_zero_rows_steps: int = 0
    units_agreed_on: int = 0
    units_sent: int = 0
    broadcast_bytes: int = 0
    owner_bytes: int = 0
    sent_bytes: int = 0
    rebuilt_bytes: int = 0
    narrow_steps: int = 0
    units_narrow: int = 0
    narrow_bytes: int = 0

    @classmethod
    def read(cls, source: Any, reduced_bytes: int = 0, removed_bytes: int = 0) -> Statistics:
        """Copy the counters from an engine.

        Args:
            source: an object with the same attributes but ``rebuilt_bytes``, which is worked out here.
            reduced_bytes: of the parameters in its Reducer. Bytes.
            removed_bytes: of those that rebuilds have taken out of it. Bytes.
        """
        counters = {field.name: getattr(source, field.name) for field in fields(cls) if field.name != "rebuilt_bytes"}
        # What was taken out and is unfrozen later counts as dense in those steps in which it has a gradient.
        missing = source.steps * (reduced_bytes + removed_bytes) - source.dense_bytes
        return cls(**counters, rebuilt_bytes=min(max(missing, 0), source.steps * removed_bytes))

    def __add__(self, other: Statistics) -> Statistics:
        """Sum the counters of two stretches of a run."""
        if not isinstance(other, Statistics):
            return NotImplemented
        return Statistics(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __sub__(self, earlier: Statistics) -> Statistics:
        """Return the counters of the stretch of a run since ``earlier``."""
        if not isinstance(earlier, Statistics):
            return NotImplemented
        return Statistics(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})

    def to_dict(self) -> dict[str, Any]:
        """Return the counters as plain values, for checkpoints."""
        return asdict(self)

    def to_metrics(self) -> dict[str, float]:
        """Return what a logger draws as curves: the fraction saved, and counters for each step.

        Returns:
            Numbers by name: ``ddp_hooks/saved_fraction``, ``ddp_hooks/saved_of_wrapped_fraction``, and of dense,
            payload and mask bytes, messages, and the seconds of :attr:`exchange_wait_seconds` and :attr:`hook_seconds`
            the mean of a step. All zero before the first step.
        """
        steps = max(self.steps, 1)
        return {
            "ddp_hooks/saved_fraction": self.saved_fraction,
            "ddp_hooks/saved_of_wrapped_fraction": self.saved_of_wrapped_fraction,
            "ddp_hooks/dense_bytes_per_step": self.dense_bytes / steps,
            "ddp_hooks/payload_bytes_per_step": self.payload_bytes / steps,
            "ddp_hooks/mask_bytes_per_step": self.mask_bytes / steps,
            "ddp_hooks/messages_per_step": self.messages / steps,
            "ddp_hooks/exchange_wait_seconds_per_step": self.exchange_wait_seconds / steps,
            "ddp_hooks/hook_seconds_per_step": self.hook_seconds / steps,
        }

    @classmethod
    def from_dict(cls, counters: Mapping[str, Any]) -> Statistics:
        """Make statistics of what :meth:`to_dict` returned; counters newer than a checkpoint start at zero.

        Args:
            counters: the fields by name.

        Raises:
            TypeError: it is no dictionary, or a counter is of the wrong type.
            ValueError: fields are missing or unknown, or a counter is negative or not finite.
        """
        statistics = read_fields(cls, counters, _FIRST_FIELDS)
        for field in fields(cls):
            value = getattr(statistics, field.name)
            expected = "an int" if isinstance(field.default, int) else "a number"
            kinds = int if isinstance(field.default, int) else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise TypeError(f"Statistics.{field.name}: expected {expected}, received {short(value)}")
            if not 0 <= value <= sys.float_info.max:  # nor NaN
                raise ValueError(f"Statistics.{field.name}: expected from 0 on and finite, received {short(value)}")
        return statistics

    @property
    def _is_alone(self) -> bool:
        # Ranks that are several have to agree in some step, or send everything.
        handed_over = self.messages + self.exchanges + self.payload_bytes + self.mask_bytes
        return self.steps > 0 and handed_over == 0

    @property
    def saved_fraction(self) -> float:
        """The fraction of plain DDP's bytes that were not sent, masks counted against us; 0 before the first step.

        Also 0 where there is one rank only: plain DDP has nobody to send to either.
        """
        if self.dense_bytes == 0 or self._is_alone:
            return 0.0
        return 1.0 - (self.payload_bytes + self.mask_bytes) / self.dense_bytes

    @property
    def wrapped_bytes(self) -> int:
        """What plain DDP would have handed over for the model as it was wrapped, which it cannot rebuild. Bytes."""
        return self.dense_bytes + self.rebuilt_bytes

    @property
    def saved_of_wrapped_fraction(self) -> float:
        """As :attr:`saved_fraction`, of :attr:`wrapped_bytes`: what rebuilds have spared counts as saved, too."""
        if self.wrapped_bytes == 0 or self._is_alone:
            return 0.0
        return 1.0 - (self.payload_bytes + self.mask_bytes) / self.wrapped_bytes

    def __str__(self) -> str:
        """Return a summary of a few lines, none longer than 80 columns."""
        steps = max(self.steps, 1)
        hook = f"hook {self.hook_seconds / steps * 1e6:.0f} us"
        if self._is_alone:
            return fill(
                f"{self.steps} steps of one rank, which has nobody to send to, with the hook or without; {hook} a step",
                "",
                "  ",
            )
        lines = [
            f"{self.steps} steps: sent {describe_bytes(self.payload_bytes)} of {describe_bytes(self.dense_bytes)} "
            f"({describe_part(self.saved_fraction)} saved)",
            f"a step: {describe_bytes(self.payload_bytes / steps)} in {self.messages / steps:.1f} messages; waited "
            f"{self.exchange_wait_seconds / steps * 1e6:.0f} us for masks, {hook} besides",
            f"buckets: {self.buckets_whole} whole, {self.buckets_packed} in part, {self.buckets_skipped} skipped",
            f"masks: {self.exchanges} exchanges of {self.mask_bytes:,} bytes in all; plans: "
            f"{self.plan_cache_hits} from the cache, {self.plan_cache_misses} made",
        ]
        if self.rebuilt_bytes:
            lines.insert(
                1,
                f"of the model as it was wrapped, before rebuilds: {describe_bytes(self.wrapped_bytes)} "
                f"({describe_part(self.saved_of_wrapped_fraction)} saved)",
            )
        if self.skip_zeros_steps:
            lines.append(f"skip_zeros: on in {self.skip_zeros_steps} of {self.steps} steps")
        transports = [
            f"{describe_bytes(size)} {how}"
            for size, how in (
                (self.broadcast_bytes, "broadcast by those who have them"),
                (self.owner_bytes, "summed by owners"),
            )
            if size
        ]
        if transports:
            lines.append(f"transports: {', '.join(transports)}, the rest all-reduced")
        if self.skip_zero_rows_steps:
            lines.append(
                f"skip_zero_rows: on in {self.skip_zero_rows_steps} of {self.steps} steps, {self.units_sent:,} of "
                f"{self.units_agreed_on:,} units (rows, say) sent"
            )
        if self.narrow_bytes:
            lines.append(
                f"narrow: on in {self.narrow_steps} of {self.steps} steps, {describe_bytes(self.narrow_bytes)} sent in "
                "place of twice as much"
            )
        return "\n".join(fill(line, "", "  ") for line in lines)


@dataclass(frozen=True, slots=True)
class UnitUsage:
    """How many units of a parameter took part in a step. A unit is a row, several short ones, or a part of a long one.

    Attributes:
        units: how many it has.
        used_here: how many hold a non-zero in this rank's gradient.
        used_anywhere: how many do on some rank; those were sent, or all of them if they are nearly all.
        used_by_rank: how many do on each rank; None where nobody knows.
    """

    units: int
    used_here: int
    used_anywhere: int
    used_by_rank: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ParameterUsage:
    """How one parameter took part in the last step.

    Attributes:
        name: its name in the wrapped module.
        numel: its number of elements.
        used_here: this rank contributed a gradient (a non-zero one, if ``skip_zeros`` was on).
        used_anywhere: some rank did; if not, nothing of it was sent.
        frozen: it does not require a gradient now, on this rank.
        units: how many of its units were used, if the ranks agreed on them; None where it was sent or left as a whole.
        ranks: those that used it, as ``skip_unused`` sees it; None where nobody knows: without that setting, and on
            more than 64 ranks.
    """

    name: str
    numel: int
    used_here: bool
    used_anywhere: bool
    frozen: bool
    units: UnitUsage | None = None
    ranks: tuple[int, ...] | None = None
