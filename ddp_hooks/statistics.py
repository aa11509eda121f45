"""Reports of a hook: counters of the bytes that were sent, and the parameters that were used."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from .wording import check_fields, describe_bytes, describe_part, describe_seconds, fill, short

# Counters that every checkpoint has. Counters that were added later start at zero if they are missing.
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

# Counted outside the engine.
NOT_OF_AN_ENGINE = ("rebuilt_bytes", "accumulated_steps")


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counters since the state was made or :meth:`SkipUnusedState.reset_stats`.

    If the state has loaded a checkpoint, they include those of the run before.

    They are the same on every rank, except for seconds, the bytes of sparse gradients, ``sent_bytes``,
    ``accumulated_steps`` and ``why_uncoded``. Bytes are those of the tensors that collectives are given;
    ``sent_bytes`` estimates how many of them a rank sends.

    Attributes:
        steps: synchronised backward passes.
        skip_zeros_steps: steps in which ``skip_zeros`` was on.
        skip_zero_rows_steps: steps in which ``skip_zero_rows`` was on, and ranks exchanged which units (for example,
            rows) of some parameters they used.
        units_agreed_on: the units in those exchanges, summed over steps.
        units_sent: the units among them that some rank used.
        coded_steps: steps in which some gradients were coded.
        accumulated_steps: steps whose gradients are sums of several backward passes on this rank, all but the last
            under ``no_sync()``. Such sums have more bits than the gradients of one pass under autocast.
        buckets_whole: buckets sent whole.
        buckets_packed: buckets that were sent in part, or with parameters divided into rows.
        buckets_skipped: buckets that were not sent.
        messages: collectives that carried gradients.
        dense_bytes: bytes that plain DDP would have all-reduced, for the parameters in the module's Reducer. Bytes.
        rebuilt_bytes: bytes that plain DDP would have all-reduced for parameters that a rebuild had removed from the
            Reducer. Bytes.
        payload_bytes: gradients given to collectives of any kind, as they were sent. Bytes.
        broadcast_bytes: the part of the payload that each contributing rank sent to all others. Bytes.
        owner_bytes: the part of the payload that some ranks contributed and one of them summed. Bytes.
        coded_bytes: the part of the payload that was coded. Bytes.
        uncoded_bytes: the size of that part before it was coded. Bytes.
        sent_bytes: gradients that this rank sent. All-reduces count as in a ring, with 2 (n - 1) / n of their bytes.
            Bytes.
        mask_bytes: masks, and sizes of coded messages, given to collectives on the control group. Bytes.
        exchanges: mask exchanges.
        plan_cache_hits: steps whose reduction plan was in the cache.
        plan_cache_misses: steps whose reduction plan had to be made.
        exchange_wait_seconds: how long backward waited for agreed masks, on this rank.
        hook_seconds: other time spent in the hook on this rank: scanning, scaling, gathering, launching.
        why_uncoded: why some gradients are sent as they are although the policy's ``coded`` asks for less, as a clause;
            empty if none are, or if the reason is unknown. It is not a counter, and not part of a checkpoint.
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
    accumulated_steps: int = 0
    coded_steps: int = 0
    coded_bytes: int = 0
    uncoded_bytes: int = 0
    why_uncoded: str = field(default="", compare=False)

    @classmethod
    def read(cls, source: Any, reduced_bytes: int = 0, removed_bytes: int = 0, **others: Any) -> Statistics:
        """Copy the counters from an engine.

        Args:
            source: an object with an engine's counters.
            reduced_bytes: the size of the parameters in its Reducer. Bytes.
            removed_bytes: the size of the parameters that rebuilds have removed from it. Bytes.
            others: fields that an engine does not count. ``rebuilt_bytes`` is computed here.
        """
        counters = {f.name: getattr(source, f.name) for f in _counters() if f.name not in NOT_OF_AN_ENGINE}
        # A removed parameter that is unfrozen later counts as dense in those steps in which it has a gradient.
        missing = source.steps * (reduced_bytes + removed_bytes) - source.dense_bytes
        return cls(**counters, rebuilt_bytes=min(max(missing, 0), source.steps * removed_bytes), **others)

    def __add__(self, other: Statistics) -> Statistics:
        """Sum the counters of two stretches of a run."""
        if not isinstance(other, Statistics):
            return NotImplemented
        counters = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in _counters()}
        return Statistics(**counters, why_uncoded=other.why_uncoded)

    def __sub__(self, earlier: Statistics) -> Statistics:
        """Return the counters since ``earlier``."""
        if not isinstance(earlier, Statistics):
            return NotImplemented
        counters = {f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in _counters()}
        return Statistics(**counters, why_uncoded=self.why_uncoded)

    def to_dict(self) -> dict[str, Any]:
        """Return the counters as plain values, for checkpoints."""
        return {f.name: getattr(self, f.name) for f in _counters()}

    def to_metrics(self, *, everything: bool = False) -> dict[str, float]:
        """Return numbers for a logger.

        Args:
            everything: also return the mean per step of each counter of bytes, seconds and messages.

        Returns:
            Numbers by name: ``ddp_hooks/saved_fraction`` (:attr:`saved_fraction`), and per step
            ``ddp_hooks/payload_bytes_per_step`` and ``ddp_hooks/overhead_seconds_per_step`` (waiting for masks, and
            :attr:`hook_seconds`). All zero before the first step.
        """
        steps = max(self.steps, 1)
        metrics = {
            "saved_fraction": self.saved_fraction,
            "payload_bytes_per_step": self.payload_bytes / steps,
            "overhead_seconds_per_step": (self.exchange_wait_seconds + self.hook_seconds) / steps,
        }
        if everything:
            names = [f.name for f in fields(self) if f.name.endswith(("_bytes", "_seconds"))]
            metrics |= {f"{name}_per_step": getattr(self, name) / steps for name in (*names, "messages")}
        return {f"ddp_hooks/{name}": value for name, value in metrics.items()}

    @classmethod
    def from_dict(cls, counters: Mapping[str, Any]) -> Statistics:
        """Make statistics from the result of :meth:`to_dict`; counters newer than the checkpoint start at zero.

        Args:
            counters: the fields by name.

        Raises:
            TypeError: it is not a dictionary, or a counter is of the wrong type.
            ValueError: fields are missing or unknown, or a counter is negative or not finite.
        """
        check_fields("Statistics", counters, _FIRST_FIELDS, [counter.name for counter in _counters()])
        statistics = cls(**counters)
        for counter in _counters():
            value = getattr(statistics, counter.name)
            expected = "an int" if isinstance(counter.default, int) else "a number"
            kinds = int if isinstance(counter.default, int) else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise TypeError(f"Statistics.{counter.name}: expected {expected}, received {short(value)}")
            if not 0 <= value <= sys.float_info.max:  # nor NaN
                raise ValueError(
                    f"Statistics.{counter.name}: expected a finite number, 0 or more, received {short(value)}"
                )
        return statistics

    @property
    def _is_alone(self) -> bool:
        # With several ranks, a step either exchanges masks or sends everything.
        handed_over = self.messages + self.exchanges + self.payload_bytes + self.mask_bytes
        return self.steps > 0 and handed_over == 0

    @property
    def wrapped_bytes(self) -> int:
        """Bytes that plain DDP would have all-reduced for the model as it was wrapped, without any rebuild. Bytes."""
        return self.dense_bytes + self.rebuilt_bytes

    @property
    def saved_fraction(self) -> float:
        """The fraction of :attr:`wrapped_bytes` that was saved, less the bytes of masks; 0 before the first step.

        Also 0 on a single rank, where plain DDP sends nothing either.
        """
        if self.wrapped_bytes == 0 or self._is_alone:
            return 0.0
        return 1.0 - (self.payload_bytes + self.mask_bytes) / self.wrapped_bytes

    def __str__(self) -> str:
        """Return a summary in a few lines of at most 80 columns."""
        return "\n".join(fill(line, "", "  ") for line in self._lines())

    def _lines(self) -> Iterator[str]:
        steps = max(self.steps, 1)
        waiting, working = (describe_seconds(s / steps) for s in (self.exchange_wait_seconds, self.hook_seconds))
        if self._is_alone:
            yield f"{self.steps} steps on one rank, which has nobody to send to; per step: {working} hook time"
            return
        saved = self.saved_fraction
        part = describe_part(abs(saved))
        verdict = f"{part} more, because of masks" if saved < 0 and part != "0.0%" else f"{part} saved"
        sent = self.payload_bytes + self.mask_bytes
        plain = describe_bytes(self.wrapped_bytes)
        yield f"{self.steps} steps: sent {describe_bytes(sent)} instead of {plain} ({verdict})"
        yield (
            f"per step: {describe_bytes(self.payload_bytes / steps)} of gradients in {self.messages / steps:.1f} "
            f"messages, {describe_bytes(self.mask_bytes / steps)} of usage masks"
        )
        yield f"per step: {waiting} waiting for masks, {working} other hook time"
        yield (
            f"gradient buckets: {self.buckets_whole} sent whole, {self.buckets_packed} in part, "
            f"{self.buckets_skipped} not at all"
        )
        if self.rebuilt_bytes:
            yield (
                f"rebuild: DDP's buckets were {describe_bytes(self.rebuilt_bytes / steps)} smaller per step than the "
                "model as it was wrapped"
            )
        if self.skip_zeros_steps:
            yield f"skip_zeros: looked for all-zero gradients in {self.skip_zeros_steps} of {self.steps} steps"
        if self.skip_zero_rows_steps:
            yield (
                f"skip_zero_rows: sent {self.units_sent:,} of {self.units_agreed_on:,} rows in "
                f"{self.skip_zero_rows_steps} of {self.steps} steps"
            )
        direct = [
            f"{describe_bytes(size)} {how}"
            for size, how in (
                (self.broadcast_bytes, "sent directly by the ranks that used them"),
                (self.owner_bytes, "summed by one of the ranks that used them"),
            )
            if size
        ]
        if direct:
            yield f"transports: {', '.join(direct)}; the rest all-reduced"
        after = f"; {self.why_uncoded}" if self.why_uncoded else ""
        if self.coded_bytes:
            yield (
                f"coded: sent {describe_bytes(self.coded_bytes)} instead of {describe_bytes(self.uncoded_bytes)} in "
                f"{self.coded_steps} of {self.steps} steps{after}"
            )
        elif self.why_uncoded:
            yield f"coded: nothing, because {self.why_uncoded}"


def _counters() -> list[Field[Any]]:
    return [each for each in fields(Statistics) if each.name != "why_uncoded"]


@dataclass(frozen=True, slots=True)
class UnitUsage:
    """How many units of a parameter were used in a step. A unit is a row, several short rows, or part of a long row.

    Attributes:
        units: how many units the parameter has.
        used_here: how many have a non-zero in this rank's gradient.
        used_anywhere: how many have a non-zero on some rank. Those were sent, or all units if nearly all were used.
        used_by_rank: how many have a non-zero on each rank; None if unknown, as it is if ranks of a host add up before
            they send.
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
        used_anywhere: some rank contributed a gradient; if none did, nothing was sent.
        frozen: it does not require a gradient now, on this rank.
        units: how many of its units were used; None if it was sent or skipped as a whole.
        ranks: the ranks that used it, according to ``skip_unused``; None if unknown, as it is without that setting and
            on more than 64 ranks.
    """

    name: str
    numel: int
    used_here: bool
    used_anywhere: bool
    frozen: bool
    units: UnitUsage | None = None
    ranks: tuple[int, ...] | None = None
