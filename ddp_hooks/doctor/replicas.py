"""Compares the ranks' parameters when the report is made, and finds out since when they differ.

Each rank contributes a hash and a few elements of each parameter, and the elements that it has kept at the beginnings
of backward passes. The comparison therefore needs only the exchange in which records are collected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from .. import _extension
from ..wording import short_list

_C = _extension.load()

# The number of elements of a parameter that show by how much replicas differ.
_ELEMENTS = 16
# From here on a difference, relative to the larger of two elements, is no rounding. Hosts of different kinds may round
# differently.
_LEAST_DIFFERENCE = 1e-4


@dataclass(frozen=True, slots=True)
class Replica:
    """The contents of one rank's parameters.

    Attributes:
        hashes: a hash of each parameter; None if it cannot be read.
        elements: some elements of each parameter.
        samples: some elements of some parameters at the beginnings of backward passes, by the number of finished steps
            and of passes that were not reduced.
    """

    hashes: tuple[int | None, ...]
    elements: tuple[tuple[float, ...], ...]
    samples: Mapping[tuple[int, int], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Drift:
    """The differences between replicas.

    Attributes:
        names: the parameters that differ.
        compared: the number of parameters that were compared.
        largest: the largest difference of the elements that were compared.
        is_rounding: whether all differences are as small as those of rounding.
        since: how many steps had finished, and how many passes that were not reduced, when replicas were first seen
            to differ; None if they did not yet when the last backward pass began.
    """

    names: tuple[str, ...]
    compared: int
    largest: float
    is_rounding: bool
    since: tuple[int, int] | None

    def __str__(self) -> str:
        """Return a clause that says how much differs."""
        amount = f", by up to {self.largest:.2g}" if self.largest else ""
        return f"the replicas differ in {len(self.names)} of {self.compared} parameters{amount}"


def read_replica(parameters: Sequence[torch.Tensor], samples: Mapping[tuple[int, int], torch.Tensor]) -> Replica:
    """Read the parameters once, in place."""
    hashes: list[int | None] = [None] * len(parameters)
    elements: list[tuple[float, ...]] = [()] * len(parameters)
    for index, parameter in enumerate(parameters):
        # A report is made with any kind of parameter.
        with suppress(Exception):
            flat = parameter.detach()
            if flat.is_complex():
                flat = torch.view_as_real(flat)
            flat = flat.contiguous().view(-1)
            hashes[index] = int(_C.hash_tensors([flat])[0, 0])
            elements[index] = tuple(flat[:: max(1, -(-len(flat) // _ELEMENTS))].double().tolist())
    kept = {key: tuple(sample.double().tolist()) for key, sample in samples.items()}
    return Replica(tuple(hashes), tuple(elements), kept)


def find_drift(names: Sequence[str], replicas: Sequence[Replica]) -> Drift | None:
    """Compare the ranks' parameters; None if all that could be compared are the same."""
    compared, differ, largest, is_rounding = 0, [], 0.0, True
    for index, name in enumerate(names):
        hashes = {replica.hashes[index] for replica in replicas}
        compared += None not in hashes
        if None in hashes or len(hashes) == 1:
            continue
        differ.append(name)
        for elements in zip(*(replica.elements[index] for replica in replicas), strict=False):
            difference = max(elements) - min(elements)
            # What is not a number is no rounding.
            if not difference <= _LEAST_DIFFERENCE * max(map(abs, elements)):
                is_rounding = False
            largest = max(largest, difference)
    if not differ:
        return None
    keys = sorted(set.intersection(*(set(replica.samples) for replica in replicas)))
    apart = [key for key in keys if len({repr(replica.samples[key]) for replica in replicas}) > 1]
    return Drift(tuple(differ), compared, largest, is_rounding, apart[0] if apart else None)


def list_drift(drift: Drift | None) -> tuple[str, ...]:
    """Return sentences that say which parameters differ, and what to do about it."""
    if drift is None:
        return ()
    since = ""
    if drift.since is not None and drift.since[0]:
        since = f", first seen after {drift.since[0]} finished step{'' if drift.since[0] == 1 else 's'}"
    return (
        f"Not the same on every rank{since}: {short_list(drift.names)}.",
        "Weights that have drifted apart stay apart: start again, or call "
        "ddp_hooks.sync.broadcast_parameters(ddp) once.",
    )
