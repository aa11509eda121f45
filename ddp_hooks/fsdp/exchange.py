"""Exchanges parts of gradients between ranks: each sends each owner only the units that are not zero, coded.

There are two collectives. The first one sends *masks*, which say which units of each owner's part follow, and in how
many bytes; the second one sends those units. The sender alone chooses, so ranks need to agree on two things only: the
units, which follow from the layout, whose digest travels with the masks; and whether the second collective takes place,
which follows from every rank's total, which travels as well.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch

from .. import _extension
from ..policies import Policy
from ..serving.engine_settings import adaptive_settings
from ..statistics import Statistics

_C = _extension.load()

# The dtypes that can be scanned and added.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# The bits of a word that describe a set of parameters: all but the sign.
_BITS_OF_WORD = 62
_WORD_BYTES = 8
# Numbers of more bytes are not coded.
_MOST_CODED_ELEMENT_BYTES = 4
# The number of cached layouts: each step may have gradients of other parameters.
_KEPT = 32
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Questions:
    """The questions that a policy asks of gradients.

    Attributes:
        skip_unused: leave out parameters that have no gradient.
        zeros: read gradients, and leave out zeros.
        coded: code what is sent if this saves at least this fraction of the bytes; None if nothing is coded.
        divides: decide for each row instead of each parameter.
        always: ask in every step, however little it saves.
    """

    skip_unused: bool
    zeros: bool
    coded: float | None
    divides: bool
    always: bool

    @classmethod
    def of(cls, policy: Policy, least_coded_saving: float | None) -> Questions:
        """Read a policy; with ``coded="auto"``, coding has to save this fraction, or is left out if this is None."""
        asked = (policy.skip_zeros, policy.skip_zero_rows, policy.coded)
        return cls(
            skip_unused=policy.skip_unused,
            zeros=policy.skip_zeros != "off" or policy.skip_zero_rows != "off",
            coded={"off": None, "on": 0.0, "auto": least_coded_saving}[policy.coded],
            divides=policy.skip_zero_rows != "off",
            always="on" in asked or (policy.skip_unused and not {"adaptive", "auto"} & {*asked}),
        )

    @classmethod
    def on_device(cls, policy: Policy) -> Questions:
        """Read a policy for gradients on a device, where nothing is coded."""
        return cls.of(replace(policy, coded="off"), None)

    @property
    def any(self) -> bool:
        """Whether there is any question."""
        return self.skip_unused or self.zeros or self.coded is not None


class Looks:
    """Decides in which steps gradients are examined; the same on every rank, because totals are the same."""

    def __init__(self, policy: Policy, always: bool, *, is_on_device: bool = False) -> None:
        settings = adaptive_settings(policy, is_on_device=is_on_device)
        self._rule = _C.AdaptiveRule(settings, looks_after_pay=settings.hold_steps, starts_paused=False)
        self._always = always
        self._step = 0

    def begin_step(self) -> bool:
        """Count a step; return whether gradients are examined in it."""
        self._step += 1
        return self._always or self._rule.is_due(self._step)

    def observe(self, sent_bytes: int, dense_bytes: int) -> bool:
        """Return whether sending only the announced units saves enough to do so."""
        saved = dense_bytes - sent_bytes
        return saved > 0 if self._always else self._rule.observe(self._step, saved, dense_bytes)


class Coding:
    """Decides in which steps a rank codes what it sends. Ranks may differ: sizes tell the receiver.

    Args:
        policy: the policy.
        least_saving: the fraction of the bytes that coding has to save; None if nothing is coded.
    """

    def __init__(self, policy: Policy, least_saving: float | None) -> None:
        settings = adaptive_settings(policy, is_on_device=False, least_saving=least_saving or 0.0)
        self._rule = _C.AdaptiveRule(settings, looks_after_pay=settings.hold_steps, starts_paused=False)
        self._least_saving = least_saving
        self._step = 0

    def codes(self) -> bool:
        """Count a message; return whether it is coded."""
        self._step += 1
        return self._least_saving == 0 or (self._least_saving is not None and self._rule.is_due(self._step))

    def observe(self, coded_bytes: int, uncoded_bytes: int) -> None:
        """Learn from the size of a coded message."""
        self._rule.observe(self._step, uncoded_bytes - coded_bytes, uncoded_bytes)


@dataclass(slots=True)
class Staging:
    """Memory for messages on a device. On the CPU, the reductions of a module share it, one after another."""

    device: torch.device
    _buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def take(self, name: str, size: int) -> torch.Tensor:
        """Return memory of a size; memory taken earlier under the same name becomes invalid."""
        if self.device.type != "cpu":  # torch's allocator knows which stream still uses it
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=torch.uint8, device="cpu")
        return buffer[:size]

    def clear(self) -> None:
        """Free all memory."""
        self._buffers.clear()


class Recent(Generic[K, V]):
    """A cache of the 32 most recently used values.

    functools.lru_cache on a method would make a reference cycle, and delay the release of memory.
    """

    def __init__(self) -> None:
        self._made: dict[K, V] = {}

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key, and make it if it is missing."""
        made = self._made.pop(key, None)
        if made is None:
            made = make()
            if len(self._made) == _KEPT:
                del self._made[next(iter(self._made))]
        self._made[key] = made
        return made

    def __len__(self) -> int:
        """Return the number of cached values."""
        return len(self._made)


def digest_of(text: str) -> int:
    """Return a digest of 56 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


@dataclass(frozen=True, slots=True)
class Announcement:
    """The information that a rank sends with its masks."""

    digest: int
    used: frozenset[int]
    included: frozenset[int]
    sent_bytes: int = 0


# The digest of a rank whose host holds gradients of different parameters.
DIFFERS_IN_HOST = -1
# If ranks exchange no digests, such a rank repeats this in place of its gradients: 16 bits that are a NaN in every
# dtype, but not one that arithmetic makes.
_DIFFERS_IN_HOST_WORD = -11


class LayoutsDiffer(Exception):
    """The ranks hold gradients of different parameters.

    Attributes:
        announced: what they announced.
        ranks: the ranks in FSDP2's process group; None for all of them.
    """

    def __init__(self, announced: Sequence[Announcement], ranks: Sequence[int] | None = None) -> None:
        super().__init__()
        self.announced, self.ranks = announced, ranks


def fill_as_different(flat: torch.Tensor) -> None:
    """Replace gradients, so that :meth:`Exchange.sum_in_full` raises wherever they arrive."""
    flat.view(torch.int16).fill_(_DIFFERS_IN_HOST_WORD)


class Exchange:
    """Sums parts over the ranks of a process group or of a gloo group of ours, and counts bytes and time.

    On a device, gradients are put on the current stream. The host waits for the answer of a scan and for masks only.

    Args:
        parameter_count: the number of parameters in the parts.
        most_mask_bytes: the largest size of a layout's masks, so that ranks with different layouts send equal sizes.
        policy: the policy.
        questions: what the policy asks of gradients.
        staging: memory for messages.

    Attributes:
        statistics: the bytes that this rank sent, and those that it would have sent in full.
        announced: the announcements of the last sum, if ranks exchanged masks.
    """

    def __init__(
        self,
        parameter_count: int,
        most_mask_bytes: int,
        policy: Policy,
        questions: Questions,
        staging: Staging,
    ) -> None:
        self._questions, self._staging = questions, staging
        is_on_device = staging.device.type != "cpu"
        self._looks = Looks(policy, questions.always, is_on_device=is_on_device)
        self._coding = Coding(policy, questions.coded)
        self._set_words = -(-parameter_count // _BITS_OF_WORD)
        self._words = 3 + 2 * self._set_words
        self._row_bytes = -(-(self._words * _WORD_BYTES + most_mask_bytes) // _WORD_BYTES) * _WORD_BYTES
        # Units of parts that travel unchanged, by number of elements.
        self._wholes: Recent[int, Any] = Recent()
        self.statistics = Statistics()
        self.announced: list[Announcement] | None = None

    def begin(self, dense_bytes: int, is_served: bool) -> bool:
        """Count a sum; return whether ranks exchange masks for it, the same on every rank."""
        self.announced = None
        self.count(steps=1, dense_bytes=dense_bytes)
        return is_served and self._questions.any and self._looks.begin_step()

    def sum(
        self,
        group: Any,
        output: torch.Tensor,
        flat: torch.Tensor,
        units: Any,
        own: Announcement,
        order: Sequence[int],
        full_bytes: int,
        *,
        known_zero: Sequence[bool] = (),
        times: int = 1,
    ) -> bool:
        """Let each rank send only units that are not zero, and sum its own part, after :meth:`begin`.

        Args:
            group: the ranks, the same as last time.
            output: receives the sum of this rank's part.
            flat: a part for each rank, or one for all, which may be ``output``.
            units: the units of a part.
            own: what this rank tells the others. This method fills in ``sent_bytes``.
            order: the order in which contributions are added up, the same on every rank that holds the sum.
            full_bytes: the bytes that a rank would send in full.
            known_zero: for each stretch of a part, whether it is known to be zero.
            times: how often as many bytes are going to be sent, before the sum is where it should be.

        Returns:
            False on every rank, if this does not save enough. Then nothing was sent.

        Raises:
            LayoutsDiffer: on every rank.
        """
        received = self._exchange(
            group, flat, units, own, known_zero, lambda most_bytes: self._looks.observe(times * most_bytes, full_bytes)
        )
        if received is None:
            return False
        elements, masks = received
        start = time.perf_counter()
        units.sum(output, flat, elements.to(output.dtype), masks, group.rank(), order)
        is_sent = any(each.sent_bytes for each in self.announced or ())
        self.count(
            hook_seconds=time.perf_counter() - start,
            buckets_packed=int(is_sent),
            buckets_skipped=int(not is_sent),
        )
        return True

    def sum_in_full(self, group: Any, output: torch.Tensor, flat: torch.Tensor, order: Sequence[int]) -> None:
        """Send each rank its part unchanged, and sum this rank's.

        Raises:
            LayoutsDiffer: on every rank that receives a part which a rank has filled as different.
        """
        whole = self._wholes.get(output.numel(), lambda: _C.ShardUnits([(output.numel(), output.numel())]))
        received = self._staging.take("received", flat.nbytes).view(flat.dtype)
        _all_to_all(group, received, flat)
        start = time.perf_counter()
        # The first words, because such a rank may send fewer.
        words = received.view(torch.int16).view(group.size(), output.nbytes // 2)[:, :64]
        differ = (words == _DIFFERS_IN_HOST_WORD).all(1).tolist()
        if any(differ):
            digests = [DIFFERS_IN_HOST if each else 0 for each in differ]
            raise LayoutsDiffer([Announcement(digest, frozenset(), frozenset()) for digest in digests])
        masks = torch.full((group.size(), whole.mask_bytes), 255, dtype=torch.uint8, device="cpu")
        whole.sum(output, flat, received, masks, group.rank(), order)
        sent_bytes = flat.nbytes - flat.nbytes // group.size()
        self.count(
            hook_seconds=time.perf_counter() - start,
            messages=1,
            payload_bytes=sent_bytes,
            sent_bytes=sent_bytes,
            buckets_whole=1,
        )

    def gather(self, group: Any, flat: torch.Tensor, part: torch.Tensor, units: Any, own: Announcement) -> None:
        """Send this rank's part to all ranks, and write all parts to ``flat``."""
        received = self._exchange(group, part, units, own, (), lambda most_bytes: True)
        assert received is not None
        units.unpack(flat, *received, group.rank())
        flat.view(group.size(), -1)[group.rank()] = part

    def count(self, **counters: float) -> None:
        """Add to the statistics."""
        now = {name: getattr(self.statistics, name) + more for name, more in counters.items()}
        self.statistics = replace(self.statistics, **now)

    def _exchange(
        self,
        group: Any,
        flat: torch.Tensor,
        units: Any,
        own: Announcement,
        known_zero: Sequence[bool],
        pays: Callable[[int], bool],
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Send each rank units of its part, if that pays, given the bytes of the rank that would send the most.

        Returns:
            The received elements and masks, in the order of ranks, or None if nothing was sent.
        """
        start = time.perf_counter()
        ranks, rank = group.size(), group.rank()
        message = torch.zeros(ranks, self._row_bytes, dtype=torch.uint8, device="cpu")
        head, masks = message.view(torch.int64)[:, : self._words], message[:, self._words * _WORD_BYTES :]
        units_sent = units.choose(masks, flat, rank, self._questions.zeros, known_zero)
        uncoded_sizes = [count * flat.element_size() for count in units.sent_elements(masks)]
        coded = self._encode(units, flat, masks, rank, uncoded_sizes)
        sizes = uncoded_sizes if coded is None else coded[1]
        words = [own.digest, 0, sum(sizes), *self._to_words(own.used), *self._to_words(own.included)]
        head[:] = torch.tensor(words, dtype=torch.int64, device="cpu")
        head[:, 1] = torch.tensor(sizes, dtype=torch.int64, device="cpu")
        received = torch.empty_like(message)
        packed = time.perf_counter()
        _all_to_all(group, received, message)
        self.count(
            hook_seconds=packed - start,
            exchange_wait_seconds=time.perf_counter() - packed,
            exchanges=1,
            mask_bytes=self._row_bytes * (ranks - 1),
        )
        rows = received.view(torch.int64)[:, : self._words].tolist()
        announced = [self._read(words) for words in rows]
        if any(each.digest != own.digest for each in announced):
            raise LayoutsDiffer(announced)
        self.announced = announced
        if not pays(max(each.sent_bytes for each in announced)):
            return None
        self.count(units_agreed_on=len(units) * (ranks - 1), units_sent=units_sent)
        received_masks = received[:, self._words * _WORD_BYTES :]
        if not any(each.sent_bytes for each in announced):
            return flat.new_empty(0), received_masks
        if coded is None:
            start = time.perf_counter()
            content = self._staging.take("sent", sum(sizes))
            units.write(content, flat, masks, rank, False)
            self.count(hook_seconds=time.perf_counter() - start)
        else:
            content = coded[0]
            self.count(coded_steps=1, coded_bytes=sum(sizes), uncoded_bytes=sum(uncoded_sizes))
        received_sizes = [words[1] for words in rows]
        message = self._staging.take("received", sum(received_sizes))
        _all_to_all(group, message, content, received_sizes, sizes)
        self.count(messages=1, payload_bytes=sum(sizes), sent_bytes=sum(sizes))
        counts = units.sent_elements(received_masks)
        if received_sizes == [count * flat.element_size() for count in counts]:
            return message.view(flat.dtype), received_masks
        start = time.perf_counter()
        elements = self._staging.take("elements", sum(counts) * flat.element_size()).view(flat.dtype)
        _C.decode_messages(elements, message, received_sizes, counts)
        self.count(hook_seconds=time.perf_counter() - start)
        return elements, received_masks

    def _encode(
        self, units: Any, flat: torch.Tensor, masks: torch.Tensor, own: int, uncoded_sizes: Sequence[int]
    ) -> tuple[torch.Tensor, list[int]] | None:
        """Code what the masks say; return the messages and their sizes, or None if they should not be coded."""
        may_code = any(uncoded_sizes) and flat.element_size() <= _MOST_CODED_ELEMENT_BYTES
        if not may_code or not self._coding.codes():
            return None
        counts = units.sent_elements(masks)
        room = self._staging.take("sent", sum(_C.most_coded_bytes(count, flat) for count in counts))
        sizes = units.write(room, flat, masks, own, True)
        self._coding.observe(sum(sizes), sum(uncoded_sizes))
        return room[: sum(sizes)], sizes

    def _to_words(self, indices: frozenset[int]) -> list[int]:
        mask = sum(1 << i for i in indices)
        return [mask >> _BITS_OF_WORD * i & (1 << _BITS_OF_WORD) - 1 for i in range(self._set_words)]

    def _read(self, words: Sequence[int]) -> Announcement:
        def indices(masks: Sequence[int]) -> frozenset[int]:
            mask = sum(each << _BITS_OF_WORD * i for i, each in enumerate(masks))
            return frozenset(i for i in range(mask.bit_length()) if mask >> i & 1)

        sets = words[3:]
        return Announcement(words[0], indices(sets[: self._set_words]), indices(sets[self._set_words :]), words[2])


def _all_to_all(
    group: Any,
    received: torch.Tensor,
    sent: torch.Tensor,
    received_sizes: Sequence[int] = (),
    sent_sizes: Sequence[int] = (),
) -> None:
    # torch's function takes no groups that it does not know, and torch is about to rename the methods.
    start = getattr(group, "all_to_all_single", None) or group.alltoall_base
    work = start(received, sent, list(received_sizes), list(sent_sizes))
    if work is not None:
        work.wait()
