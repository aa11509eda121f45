"""The scaling model: pure arithmetic from measured constants to a step's time and traffic.

docs/internals/scaling.md explains it. Nothing is measured or read here. All times are in seconds, all sizes in bytes;
`ranks` is the world size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tools.grids import grids

EXCHANGES = ("all_reduce_bor", "all_gather", "grid")
SCHEMES = ("plain", "ours", "oracle")
MASK_HEADER_BYTES = 48  # six words; docs/internals/protocol.md


@dataclass(frozen=True, slots=True)
class Link:
    """What a message costs: each hop `hop_seconds`, each byte that a rank must send 1 / `bytes_per_second`."""

    hop_seconds: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Exchange:
    """What agreeing on masks costs: each collective once, and each hop of it."""

    call_seconds: float
    hop_seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    """One rank's step, measured where nothing is sent.

    `ready` is how far backward has come, in seconds from its start, when so many bytes of gradients are in their
    bucket: points from (0, 0) on, both coordinates ascending, the last one (all bytes, all of backward).
    """

    forward_seconds: float
    ready: tuple[tuple[float, float], ...]
    bucket_bytes: tuple[float, ...]
    finish_seconds_per_byte: float  # copying what was reduced into .grad
    unused_seconds_per_byte: float  # filling unused slices with zeros; not paid by the oracle
    hook_seconds: float  # a step's cost in the hook, apart from
    hook_seconds_per_byte: float  # dividing and gathering what is sent

    @property
    def dense_bytes(self) -> float:
        return sum(self.bucket_bytes)

    def seconds_until(self, gradient_bytes: float) -> float:
        """How long backward takes to produce the first `gradient_bytes` of gradients."""
        for (before, start), (after, end) in zip(self.ready, self.ready[1:], strict=False):
            if gradient_bytes <= after:
                return start + (end - start) * (gradient_bytes - before) / (after - before)
        return self.ready[-1][1]


@dataclass(frozen=True, slots=True)
class Prediction:
    step_seconds: float
    mask_wait_seconds: float
    wire_bytes: float  # that a rank sends in a step, headers not counted


def ring_hops(ranks: int) -> int:
    return 2 * (ranks - 1)


def all_reduce_seconds(ranks: int, message_bytes: float, link: Link) -> float:
    """A ring: 2 (n - 1) hops, each with an n-th of the message."""
    if ranks == 1:
        return 0.0
    return ring_hops(ranks) * (link.hop_seconds + message_bytes / ranks / link.bytes_per_second)


def grid_seconds(grid: Sequence[int], mask_bytes: float, exchange: Exchange, link: Link) -> float:
    """An all_gather in each dimension, one after the other."""
    hops = sum(extent - 1 for extent in grid)
    return len(grid) * exchange.call_seconds + hops * (exchange.hop_seconds + mask_bytes / link.bytes_per_second)


def best_grid(ranks: int, mask_bytes: float, exchange: Exchange, link: Link) -> tuple[int, ...]:
    """The cheapest; one dimension, a plain all_gather, where that is cheapest or `ranks` is prime."""
    return min([(ranks,), *grids(ranks)], key=lambda grid: grid_seconds(grid, mask_bytes, exchange, link))


def mask_bytes(parameters: int) -> int:
    """What travels for a mask: a bit a parameter and one for `join()`, in whole words, and the header."""
    return MASK_HEADER_BYTES + 8 * -(-(parameters + 1) // 64)


def exchange_seconds(
    method: str, ranks: int, message_bytes: float, exchanges: dict[str, Exchange], link: Link
) -> float:
    """How long ranks take to agree, when nothing hides it.

    Args:
        method: one of `EXCHANGES`; ``grid`` takes the cheapest grid and the constants of ``all_gather``.
    """
    if ranks == 1:
        return 0.0
    if method == "all_reduce_bor":
        bor = exchanges["all_reduce_bor"]
        per_hop = bor.hop_seconds + message_bytes / ranks / link.bytes_per_second
        return bor.call_seconds + ring_hops(ranks) * per_hop
    gather = exchanges["all_gather"]
    grid = (ranks,) if method == "all_gather" else best_grid(ranks, message_bytes, gather, link)
    return grid_seconds(grid, message_bytes, gather, link)


def exchange_wire_bytes(
    method: str, ranks: int, message_bytes: float, exchanges: dict[str, Exchange], link: Link
) -> float:
    """What a rank sends to agree."""
    if method == "all_reduce_bor":
        return ring_hops(ranks) * message_bytes / ranks
    grid: tuple[int, ...] = (ranks,)
    if method == "grid":
        grid = best_grid(ranks, message_bytes, exchanges["all_gather"], link)
    return sum(extent - 1 for extent in grid) * message_bytes


def used_by_bucket(bucket_bytes: Sequence[float], fraction_unused: float) -> list[float]:
    """What is sent of each bucket when the parameters next to the input are frozen: those come last."""
    left = (1.0 - fraction_unused) * sum(bucket_bytes)
    used = []
    for size in bucket_bytes:
        used.append(max(0.0, min(size, left)))
        left -= size
    return used


def predict(
    scheme: str, ranks: int, fraction_unused: float, step: Step, link: Link, exchange: float = 0.0, search: bool = True
) -> Prediction:
    """One step under plain DDP, ddp_hooks (`ours`) or the oracle.

    A bucket is ready when backward has produced its last used gradient; buckets leave in order; the link serves one
    after the other. ddp_hooks does not send before the masks are agreed on: backward stands still at the first bucket
    for what is left of the exchange, which began with backward. After backward, bucket after bucket is waited for and
    copied back into .grad; the step ends with the last.

    Args:
        exchange: seconds that the mask exchange takes.
        search: DDP runs with `find_unused_parameters` and so reduces one small map more at the end; the oracle never
            does.
    """
    used = used_by_bucket(step.bucket_bytes, fraction_unused)
    produced = sum(used)
    backward = step.forward_seconds  # the clock when backward begins
    if scheme != "oracle":
        backward += step.unused_seconds_per_byte * (step.dense_bytes - produced)
    wait = hook = link_free = passed = sent = 0.0
    arrivals = []
    for index, (dense, needed) in enumerate(zip(step.bucket_bytes, used, strict=True)):
        passed += dense
        ready = backward + step.seconds_until(min(passed, produced)) + wait + hook
        if scheme == "ours":
            if index == 0:
                wait = max(0.0, backward + exchange - ready)
                hook = step.hook_seconds
                ready += wait + hook
            cost = step.hook_seconds_per_byte * needed
            hook += cost
            ready += cost
        payload = dense if scheme == "plain" else needed
        if payload > 0:
            link_free = max(ready, link_free) + all_reduce_seconds(ranks, payload, link)
            sent += payload
        arrivals.append((link_free if payload > 0 else 0.0, needed))
    done = backward + step.seconds_until(produced) + wait + hook
    if search and scheme != "oracle" and ranks > 1:
        arrivals.append((max(link_free, done) + ring_hops(ranks) * link.hop_seconds, 0.0))
    for arrival, needed in arrivals:
        done = max(done, arrival) + step.finish_seconds_per_byte * needed
    return Prediction(done, wait, sent * ring_hops(ranks) / ranks)


def smallest_that_pays(
    ranks: int, step: Step, link: Link, exchange: float, tolerance: float = 0.0, search: bool = True
) -> float | None:
    """The smallest fraction unused, in steps of 0.005, from which on ddp_hooks takes less than plain DDP; None: never.

    Args:
        tolerance: what counts as paying: a step shorter by more than this share.
    """

    def pays(fraction: float) -> bool:
        ours = predict("ours", ranks, fraction, step, link, exchange, search).step_seconds
        return ours < (1.0 - tolerance) * predict("plain", ranks, fraction, step, link, search=search).step_seconds

    smallest = None
    for two_hundredths in range(199, -1, -1):
        if not pays(two_hundredths / 200):
            break
        smallest = two_hundredths / 200
    return smallest


def at_rate(link: Link, rate_bytes_per_second: float, efficiency: float) -> Link:
    """The same hops over a link of another rate."""
    return replace(link, bytes_per_second=efficiency * rate_bytes_per_second)


def fit_plane(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Find a, b of seconds = a x + b y that have the least sum of squared relative errors, neither negative.

    Args:
        points: (x, y, seconds) with seconds > 0.
    """
    rows = [(x / t, y / t) for x, y, t in points]
    xx, xy, yy = (math.fsum(a * b for a, b in pairs) for pairs in _products(rows))
    x1, y1 = math.fsum(x for x, _ in rows), math.fsum(y for _, y in rows)
    determinant = xx * yy - xy * xy
    if determinant > 1e-12 * xx * yy:
        a, b = (x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant
        if a >= 0 and b >= 0:
            return a, b
    # On the border one of them is zero; take the better border.
    candidates = [(x1 / xx if xx else 0.0, 0.0), (0.0, y1 / yy if yy else 0.0)]
    return min(candidates, key=lambda ab: sum((1 - ab[0] * x - ab[1] * y) ** 2 for x, y in rows))


def _products(rows: Sequence[tuple[float, float]]) -> tuple[list[tuple[float, float]], ...]:
    return [(x, x) for x, _ in rows], list(rows), [(y, y) for _, y in rows]
