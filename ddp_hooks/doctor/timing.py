"""Divides a step into computation and communication, and says what policies have come to.

DDP sends buckets one after the other, from the first gradient on. If communication takes longer than computation, the
link is busy from then to the end of the step, in proportion to the bytes. Therefore, if a policy sends a fraction
``f`` of plain DDP's bytes::

    step(policy) = max(computation, step - (1 - f) * (step - first gradient))

Sending slows computation down if both share cores, so computation is the lesser of plain DDP's and the policy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from ..serving.topology import Topology
from ..statistics import Statistics
from .steps import Step


@dataclass(frozen=True, slots=True)
class Division:
    """How a step of plain DDP divides: medians over the steps except the first, which warms up.

    Attributes:
        step_seconds: the time of a step, as a mean over the ranks.
        compute_seconds: the time until the slowest rank has all its gradients.
        exposed_seconds: the rest, in which communication is not hidden by computation.
        sending_seconds: the time from the slowest rank's first gradient to the end.
        search_seconds: the time between the model's forward pass and the end of DDP's, on the slowest rank; 0 if
            it was not timed.
    """

    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    sending_seconds: float
    search_seconds: float


def divide(steps: Sequence[Sequence[Step]]) -> Division | None:
    """Return how the steps divide; None if there are fewer than two.

    Args:
        steps: for each step, what each rank recorded.
    """
    steady = steps[1:]
    if not steady:
        return None
    step_seconds = median(fmean(one.seconds for one in step) for step in steady)
    computed = median(max(one.gradients_seconds for one in step) for step in steady)
    begun = median(max(one.begun_seconds for one in step) for step in steady)
    search_seconds = median(max(one.search_seconds for one in step) for step in steady)
    compute_seconds = min(computed, step_seconds)
    return Division(
        step_seconds,
        compute_seconds,
        step_seconds - compute_seconds,
        step_seconds - min(begun, compute_seconds),
        search_seconds,
    )


def estimate(division: Division, sent_fraction: float, compute_seconds: float) -> float:
    """Return the time of a step in which the busiest host sends a fraction of plain DDP's bytes. Seconds."""
    sent = division.step_seconds - (1 - sent_fraction) * division.sending_seconds
    return max(min(division.compute_seconds, compute_seconds), sent)


@dataclass(frozen=True, slots=True)
class Trial:
    """The steps in which a rank tried a policy, without those in which it warmed up: plain values.

    Attributes:
        policy: the policy's name.
        counted: the hook's counters over these steps.
        computed: for each step, the time until this rank had all its gradients. Seconds.
        topology: the hosts of the module's ranks.
    """

    policy: str
    counted: Statistics
    computed: tuple[float, ...]
    topology: Topology


@dataclass(frozen=True, slots=True)
class PolicyTrial:
    """A policy's effect in the steps in which it was tried, without those in which it warmed up.

    Attributes:
        policy: the policy's name.
        steps: the number of steps.
        step_bytes: bytes of gradients and masks that a rank handed to collectives in a step, as a mean. Bytes.
        saved_fraction: the fraction of plain DDP's bytes that was saved, as in ``state.stats().saved_fraction``.
        sent_bytes: gradients that each rank sent in these steps, as in ``state.stats().sent_bytes``. Bytes.
        link_bytes: gradients that the busiest host sent to other hosts in a step, as a mean; with one host, those that
            the busiest rank sent. Bytes.
        plain_link_bytes: the same for plain DDP. Bytes.
        topology: the hosts of the ranks.
        step_seconds: the estimated time of a step; None if plain DDP's steps were not timed.
    """

    policy: str
    steps: int
    step_bytes: int
    saved_fraction: float
    sent_bytes: tuple[int, ...]
    link_bytes: int
    plain_link_bytes: int
    topology: Topology
    step_seconds: float | None


def sum_up(trials: Sequence[Trial], division: Division | None) -> PolicyTrial:
    """Return what a policy has come to.

    Args:
        trials: the trials of this policy, by rank.
        division: how a step of plain DDP divides, if that is known.
    """
    counted, ranks = trials[0].counted, len(trials)
    computed = median(max(step) for step in zip(*(one.computed for one in trials), strict=False))
    sent, topology = tuple(one.counted.sent_bytes for one in trials), trials[0].topology
    # A host sends as often as the next rank in a ring is on another one; ranks that add up first each send their share.
    leaving = [sum((rank + 1) % ranks not in host for rank in host) for host in topology.hosts]
    crossings = max([1, *leaving])
    plain_bytes = crossings * 2 * (ranks - 1) / ranks * counted.wrapped_bytes
    link_bytes: float = crossings * max(sent)
    if topology.adds_up_in_hosts:
        # On a device, what many hosts use still goes round a ring.
        all_reduced = counted.payload_bytes - counted.broadcast_bytes - counted.owner_bytes
        ring = 2 * (ranks - 1) / ranks * all_reduced if topology.is_on_streams else 0
        link_bytes = crossings * ring + max(sum(sent[rank] - ring for rank in host) for host in topology.hosts)
    return PolicyTrial(
        trials[0].policy,
        counted.steps,
        round(counted.wrapped_bytes * (1 - counted.saved_fraction) / counted.steps),
        counted.saved_fraction,
        sent,
        round(link_bytes / counted.steps),
        round(plain_bytes / counted.steps),
        topology,
        None if division is None else estimate(division, link_bytes / max(plain_bytes, 1), computed),
    )
