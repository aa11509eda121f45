"""What the transports move: bytes and messages of each rank, from who contributes to what. Arithmetic alone.

csrc/layout/transports.h and csrc/transport/direct_plan.h say what is modelled here; tests compare the two. Nothing is
measured or read. Sizes are in bytes; `ranks` is the world size; a set of ranks is an int with a bit for each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from scaling import model

MOST_RANKS = 64  # beyond it nobody asks who contributes
LARGEST_AXIS = 4  # of the grid in which ranks agree
# What gains less than this on the busiest link is all-reduced.
MOST_OF_A_RING = 0.95
LEAST_GAIN = 0.1
# What an all-gather pads, at most: it takes as much of every rank as of the one with the most.
MOST_PADDING = 0.1
AT_A_TIME = 2  # messages: the threads of a gloo group
FIRST = ("broadcast", "to_owners")  # the phases of a step that wait for nothing; then come the sums

# A bucket is what lies in it, in order: (parameter, bytes).
Bucket = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Settings:
    """The part of a policy that says how gradients travel; bytes."""

    in_place_bytes: int
    pack_bytes: int
    segment_bytes: int
    min_direct_bytes: int
    element_bytes: int = 4
    direct: bool = True
    owners: bool = True
    min_owner_saving: float = 0.0


@dataclass(frozen=True, slots=True)
class Phase:
    """What each rank sends and receives, by rank, in messages that wait for nothing."""

    sent: tuple[float, ...]
    received: tuple[float, ...]
    messages: int

    @property
    def busiest(self) -> float:
        """Links carry both directions at once."""
        return max((*self.sent, *self.received), default=0.0)


@dataclass(frozen=True, slots=True)
class Traffic:
    """A step's gradients: what goes round the ring, and the two phases of what does not."""

    ranks: int
    ring_bytes: int  # handed to all-reduces
    ring_messages: int
    broadcast_bytes: int
    owner_bytes: int
    broadcast: Phase
    to_owners: Phase
    sums: Phase

    @property
    def payload_bytes(self) -> int:
        return self.ring_bytes + self.broadcast_bytes + self.owner_bytes

    @property
    def messages(self) -> int:
        return self.ring_messages + self.broadcast.messages + self.to_owners.messages + self.sums.messages

    @property
    def sent(self) -> tuple[float, ...]:
        """By rank, in the whole step."""
        return self._in_all()[0]

    @property
    def busiest_bytes(self) -> float:
        """Over the busiest direction of the busiest link, in the whole step."""
        return max(max(way) for way in self._in_all())

    def seconds(self, link: model.Link, overlapped: bool = False) -> float:
        """How long the links are busy, if all is ready at once.

        Args:
            link: what a hop and a byte cost.
            overlapped: the least there could be: a link waits for nothing but its own bytes. Otherwise the sums start
                when all that leaves before them has arrived everywhere.
        """
        ring = self.ring_messages * model.ring_hops(self.ranks) * link.hop_seconds
        if overlapped:
            return ring + self.busiest_bytes / link.bytes_per_second
        ring += self.ring_bytes * model.ring_hops(self.ranks) / self.ranks / link.bytes_per_second
        first = self.broadcast.messages + self.to_owners.messages
        busiest = max(sum(by_phase) for way in self._rows(FIRST) for by_phase in zip(*way, strict=True))
        seconds = _pipeline_seconds(busiest, first, link)
        return ring + seconds + _pipeline_seconds(self.sums.busiest, self.sums.messages, link)

    def _rows(self, phases: Sequence[str]) -> list[list[tuple[float, ...]]]:
        """What is sent and what is received, each by phase and rank."""
        return [[getattr(getattr(self, phase), way) for phase in phases] for way in ("sent", "received")]

    def _in_all(self) -> list[tuple[float, ...]]:
        ring = self.ring_bytes * model.ring_hops(self.ranks) / self.ranks
        rows = self._rows((*FIRST, "sums"))
        return [tuple(ring + sum(by_phase) for by_phase in zip(*way, strict=True)) for way in rows]


def _pipeline_seconds(busiest_bytes: float, messages: int, link: model.Link) -> float:
    """All start at once. While one message waits for its hop another one travels; the last one has no other."""
    if messages == 0:
        return 0.0
    travelling = busiest_bytes / link.bytes_per_second
    waiting = messages * link.hop_seconds / AT_A_TIME
    return max(travelling, waiting) + link.hop_seconds + travelling / messages


def known(contributors: int, ranks: int) -> int:
    """The set as far as all ranks know it; 0 in worlds in which nobody asks."""
    return 0 if ranks > MOST_RANKS else contributors


def transfers(contributors: int, ranks: int, owners: bool) -> int:
    """How often each byte crosses a link, with the transport that is taken for a known set; a ring for 0."""
    ring, count = model.ring_hops(ranks), contributors.bit_count()
    owned = ranks + count - 2
    if count == 1 and ranks > 1:
        return ranks - 1
    return owned if owners and count and owned <= (1 - LEAST_GAIN) * ring else ring


def travel(buckets: Sequence[Bucket], contributors: Sequence[int], ranks: int, settings: Settings) -> Traffic:
    """One step's gradients.

    Args:
        buckets: all of one dtype.
        contributors: of each parameter, the ranks that use it, whether or not everybody knows.
        ranks: the world size.
        settings: with `direct` off, what is used by anybody is all-reduced.
    """
    found = [known(who, ranks) if settings.direct else 0 for who in contributors]
    used = {i for i, who in enumerate(contributors) if who}
    direct = _choose(buckets, found, ranks, settings)
    ownership = _share_out(buckets, {i: found[i] for i in direct}, ranks, settings)
    runs = [[size for _, size in _stretches(bucket, dict.fromkeys(used - direct, 1))] for bucket in buckets]
    broadcast, to_owners, sums = ownership.phases(settings.element_bytes)
    return Traffic(
        ranks,
        sum(map(sum, runs)),
        _ring_messages(runs, settings),
        ownership.assigned(summed=False) * settings.element_bytes,
        ownership.assigned(summed=True) * settings.element_bytes,
        broadcast,
        to_owners,
        sums,
    )


def _choose(buckets: Sequence[Bucket], found: Sequence[int], ranks: int, settings: Settings) -> set[int]:
    """Choose the parameters that leave the all-reduces, by what the busiest rank sends: as without a measurement."""
    sizes = {i: size // settings.element_bytes for bucket in buckets for i, size in bucket if size}
    ring_hops = model.ring_hops(ranks)
    candidates = {
        i for i, who in enumerate(found) if i in sizes and who and transfers(who, ranks, settings.owners) < ring_hops
    }
    alone = {i for i in candidates if found[i].bit_count() == 1}

    def ring(chosen: set[int]) -> float:
        return ring_hops / ranks * sum(sizes[i] for i in chosen)

    def busiest(chosen: set[int]) -> int:
        return _share_out(buckets, {i: found[i] for i in chosen}, ranks, settings).most_sent

    def are_enough(chosen: set[int]) -> bool:
        return sum(sizes[i] for i in chosen) * settings.element_bytes >= settings.min_direct_bytes

    direct, sent = set[int](), ring(candidates)
    if alone and are_enough(alone) and busiest(alone) <= MOST_OF_A_RING * ring(alone):
        direct, sent = alone, busiest(alone) + ring(candidates - alone)
    # All-reduces of whole parameters copy nothing.
    most = (1 - 2 * settings.min_owner_saving) * sent
    if candidates > alone and are_enough(candidates) and busiest(candidates) <= most:
        direct = candidates
    return direct


def _stretches(bucket: Bucket, marks: dict[int, int]) -> list[tuple[int, int]]:
    """Neighbours with the same mark put together, as (mark, bytes); those without one left out."""
    found: list[tuple[int, int]] = []
    before = None
    for parameter, size in bucket:
        mark = marks.get(parameter) if size else before
        if mark is not None and size:
            if mark == before:
                found[-1] = (mark, found[-1][1] + size)
            else:
                found.append((mark, size))
        before = mark
    return found


def _ring_messages(runs: Sequence[Sequence[int]], settings: Settings) -> int:
    """Long runs by themselves, the others packed; gaps that travel along are left out."""
    messages = packed = 0
    for bucket in runs:
        for run in bucket:
            if run >= settings.in_place_bytes:
                messages += 1
            else:
                packed += run
        if packed and packed >= settings.pack_bytes:
            messages, packed = messages + 1, 0
    return messages + (packed > 0)


def _share_out(buckets: Sequence[Bucket], found: dict[int, int], ranks: int, settings: Settings) -> Ownership:
    ownership = Ownership(ranks, max(1, settings.segment_bytes // settings.element_bytes))
    for bucket in buckets:
        for who, size in _stretches(bucket, found):
            ownership.add(who, size // settings.element_bytes)
    return ownership


class Ownership:
    """Who owns what, in segments; sizes are in elements."""

    def __init__(self, ranks: int, segment: int) -> None:
        self._ranks = ranks
        self._segment = segment
        self._sent = [0] * ranks
        self._alone: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]  # (contributors, elements)
        self._summed: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]

    def add(self, contributors: int, length: int) -> None:
        """Give a stretch, segment by segment, to those of its contributors who have least to send."""
        members = [rank for rank in range(self._ranks) if contributors >> rank & 1]
        while length > 0:
            part = min(length, self._segment)
            length -= part
            owner = min(members, key=self._sent.__getitem__)
            for rank in members:
                self._sent[rank] += part * (self._ranks - 1 if rank == owner else 1)
            (self._alone if len(members) == 1 else self._summed)[owner].append((contributors, part))

    @property
    def most_sent(self) -> int:
        """By the rank that sends most."""
        return max(self._sent)

    def assigned(self, summed: bool) -> int:
        return sum(part for parts in (self._summed if summed else self._alone) for _, part in parts)

    def phases(self, element_bytes: int) -> tuple[Phase, Phase, Phase]:
        """What one rank alone has, what goes to owners, and the sums that come from them."""
        everyone = (1 << self._ranks) - 1
        to_owners = _Ledger(self._ranks)
        for owner in range(self._ranks):
            for contributors, part in self._summed[owner]:
                to_owners.move(contributors & everyone & ~(1 << owner), 1 << owner, part)
        for_all = []
        for parts in (self._alone, self._summed):
            ledger = _Ledger(self._ranks)
            messages = list(itertools.zip_longest(*map(self._cut, parts), fillvalue=0))
            for owned in messages:
                sent = [max(owned)] * self._ranks if is_gathered(owned) else owned
                for owner, part in enumerate(sent):
                    ledger.move(1 << owner, everyone & ~(1 << owner), part)
            for_all.append((ledger, len(messages)))
        (broadcast, alone), (sums, summed) = for_all
        return (
            broadcast.close(alone, element_bytes),
            to_owners.close(summed, element_bytes),
            sums.close(summed, element_bytes),
        )

    def _cut(self, parts: Sequence[tuple[int, int]]) -> list[int]:
        """What a rank owns of each message: at most a segment."""
        messages: list[int] = []
        for _, part in parts:
            if messages and messages[-1] + part <= self._segment:
                messages[-1] += part
            else:
                messages.append(part)
        return messages


def is_gathered(owned: Sequence[int]) -> bool:
    """Say whether an all-gather brings to all what each rank owns of a message; otherwise an all-to-all does."""
    ranks = len(owned)
    return ranks > 2 and ranks * max(owned) <= (1 + MOST_PADDING) * sum(owned)


class _Ledger:
    def __init__(self, ranks: int) -> None:
        self._ranks = range(ranks)
        self._sent = [0] * ranks
        self._received = [0] * ranks

    def move(self, senders: int, receivers: int, elements: int) -> None:
        """Every sender sends to every receiver."""
        for rank in self._ranks:
            if senders >> rank & 1:
                self._sent[rank] += receivers.bit_count() * elements
            if receivers >> rank & 1:
                self._received[rank] += senders.bit_count() * elements

    def close(self, messages: int, element_bytes: int) -> Phase:
        return Phase(
            tuple(float(elements * element_bytes) for elements in self._sent),
            tuple(float(elements * element_bytes) for elements in self._received),
            messages,
        )


def random_transfers(ranks: int, density: float, owners: bool) -> tuple[float, float]:
    """Transfers of a byte where each rank contributes to each unit with one probability: ours, and the union's ring."""
    ours = 0.0
    for count in range(1, ranks + 1):
        likely = math.comb(ranks, count) * density**count * (1 - density) ** (ranks - count)
        ours += likely * transfers(known((1 << count) - 1, ranks), ranks, owners)
    return ours, (1 - (1 - density) ** ranks) * model.ring_hops(ranks)


# --- agreeing


def axes(ranks: int) -> list[int]:
    """The grid in which ddp_hooks agrees: axes of up to `LARGEST_AXIS` where the number of ranks has such divisors."""
    if ranks <= LARGEST_AXIS:
        return [ranks]
    divisor = next((d for d in range(LARGEST_AXIS, 1, -1) if ranks % d == 0), 0)
    divisor = divisor or next(d for d in range(2, ranks + 1) if ranks % d == 0)
    return [divisor] if divisor == ranks else [divisor, *axes(ranks // divisor)]


def mask_bytes(parameters: int) -> int:
    """A mask message: a bit a parameter, one for `join()` and one for gradients left over."""
    return model.MASK_HEADER_BYTES + 8 * -(-(parameters + 2) // 64)


def agree_seconds(
    parameters: int, ranks: int, gather: model.Exchange, link: model.Link, who: bool = True
) -> tuple[float, float]:
    """How long agreeing takes where nothing hides it, and what each rank sends for it.

    Where it is asked who, a rank hands on all messages that it has; otherwise it ORs them.
    """
    message, seconds, sent = mask_bytes(parameters), 0.0, 0
    for length in axes(ranks):
        seconds += model.grid_seconds([length], message, gather, link)
        sent += (length - 1) * message
        if who and ranks <= MOST_RANKS:
            message *= length
    return seconds, sent


# --- steps


@dataclass(frozen=True, slots=True)
class Host:
    """What a step takes beside its links: constant, because at this rate a link is never idle once it has begun."""

    exposed_seconds: float  # before the first bucket leaves and after the last one is back
    hook_seconds_per_byte: float
    hook_seconds: float = 0.0


def step_seconds(
    scheme: str, traffic: Traffic, host: Host, link: model.Link, agree: float = 0.0, overlapped: bool = False
) -> float:
    """One step under plain DDP, the oracle or ddp_hooks (`ours`), from what it hands over."""
    seconds = host.exposed_seconds + traffic.seconds(link, overlapped)
    if scheme != "oracle":  # the map of used parameters that follows the last bucket
        seconds += model.ring_hops(traffic.ranks) * link.hop_seconds
    if scheme == "ours":
        seconds += agree + host.hook_seconds + host.hook_seconds_per_byte * traffic.payload_bytes
    return seconds
