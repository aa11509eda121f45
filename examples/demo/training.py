"""Trains the same model twice, step by step in turn: once with plain DDP and once with ddp_hooks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.statistics import ParameterUsage

from . import workload

SEED = 20
LEARNING_RATE = 0.02
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-3
BYTES_PER_ELEMENT = 4


@dataclass(frozen=True, slots=True)
class Settings:
    """What to train; the same on every rank."""

    world_size: int
    steps: int
    hidden: int
    batch_size: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of both runs, seen by one rank. Times in seconds, sizes in bytes handed to collectives by a rank.

    ``used_bytes`` is how much of each parameter group some rank used; ``rows`` is how many rows of the table of words
    were sent, or None if the table was sent whole.
    """

    plain_seconds: float
    plain_bytes: int
    plain_loopback_bytes: int | None
    hooks_seconds: float
    hooks_dense_bytes: int
    hooks_payload_bytes: int
    hooks_mask_bytes: int
    hooks_loopback_bytes: int | None
    used_here: tuple[bool, ...]
    used_anywhere: tuple[bool, ...]
    frozen: tuple[bool, ...]
    used_bytes: tuple[int, ...]
    rows: int | None


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """One phase of both runs, seen by one rank.

    ``weights_difference`` is the largest absolute difference between the two runs' weights when the phase ends, over
    all ranks; ``ranks_alike`` says whether every rank holds bitwise the same weights, in either run.
    """

    steps: tuple[StepRecord, ...]
    plain_accuracy: tuple[float, ...]
    hooks_accuracy: tuple[float, ...]
    weights_difference: float
    ranks_alike: bool


@dataclass(frozen=True, slots=True)
class RankRecord:
    """Everything a rank brings home; sizes of the parameter groups, and of the table of words, in bytes."""

    phases: tuple[PhaseRecord, ...]
    parameters: int
    group_bytes: tuple[int, ...]
    table_bytes: int
    statistics: str


class Run:
    """One of the two trainings: a DDP module with its optimizer."""

    def __init__(self, hidden: int) -> None:
        torch.manual_seed(SEED)
        self.module = workload.MultiTaskModel(hidden)
        self.ddp = DistributedDataParallel(self.module, find_unused_parameters=True)
        self.optimizer = torch.optim.SGD(
            self.module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
        )

    def train_step(self, *arguments: Any) -> tuple[float, int | None]:
        """Train one step; return its seconds and what the loopback interface sent meanwhile.

        Args:
            *arguments: what :func:`workload.compute_loss` takes after the model.
        """
        dist.barrier()
        before, start = read_loopback_bytes(), time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        workload.compute_loss(self.ddp, *arguments).backward()
        self.optimizer.step()
        seconds = time.perf_counter() - start
        # Another rank may still be sending.
        dist.barrier()
        after = read_loopback_bytes()
        return seconds, None if before is None or after is None else after - before


def read_loopback_bytes() -> int | None:
    """Return how many bytes the kernel has sent over its loopback interface, by all programs; None where unknown."""
    try:
        return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())
    except (OSError, ValueError):
        return None


def compare_weights(first: nn.Module, second: nn.Module) -> float:
    """Return the largest absolute difference between two modules' parameters over all ranks; inf if one is a NaN."""
    largest = torch.zeros(())
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        largest = torch.maximum(largest, (a.detach() - b.detach()).abs().max())
    largest = torch.nan_to_num(largest, nan=float("inf"))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def check_ranks_alike(module: nn.Module) -> bool:
    """Say whether every rank holds bitwise the same parameters; every rank calls this."""
    # The sum of the bit patterns wraps around, which is fine for a checksum; the second one sees a swap of elements.
    sums = []
    for parameter in module.parameters():
        bits = parameter.detach().view(torch.int32).reshape(-1)
        sums += [bits.sum(), (bits[::2] ^ bits.numel()).sum()]
    checksum = torch.stack(sums)
    lowest, highest = checksum.clone(), checksum.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return torch.equal(lowest, highest)


def read_usage(
    usage: dict[str, ParameterUsage],
) -> tuple[tuple[bool, ...], tuple[bool, ...], tuple[bool, ...], tuple[int, ...]]:
    """Return by parameter group whether this rank used it, whether anybody did, whether it is frozen, and used bytes.

    Used bytes are those of what anybody used: parameters, or of a parameter that was sent by rows, its rows.
    """
    columns: list[tuple[bool, bool, bool, int]] = []
    for group in workload.GROUPS:
        members = [each for name, each in usage.items() if name.removeprefix("module.").startswith(group.prefix)]
        columns.append(
            (
                any(each.used_here for each in members),
                any(each.used_anywhere for each in members),
                bool(members) and all(each.frozen for each in members),
                sum(count_used_bytes(each) for each in members),
            )
        )
    used_here, used_anywhere, frozen, used_bytes = zip(*columns, strict=True)
    return used_here, used_anywhere, frozen, used_bytes


def count_used_bytes(parameter: ParameterUsage) -> int:
    """Return the bytes of the part of a parameter that some rank used."""
    if not parameter.used_anywhere:
        return 0
    size = BYTES_PER_ELEMENT * parameter.numel
    return size if parameter.units is None else size * parameter.units.used_anywhere // parameter.units.units


def train(rank: int, report_progress: Callable[[str], None], settings: Settings) -> RankRecord:
    """Train both runs through all phases on this rank; every rank calls this within a process group.

    The two runs take each step in turn, and change places after every step, so that whatever slows the machine down
    slows both.
    """
    import ddp_hooks

    data = workload.load_digits(SEED)
    plain, hooked = Run(settings.hidden), Run(settings.hidden)
    state = ddp_hooks.register(hooked.ddp)
    dense_bytes = sum(p.numel() * p.element_size() for p in plain.module.parameters())
    phases = []
    for phase_index, phase in enumerate(workload.PHASES):
        for run in (plain, hooked):
            run.module.lower.requires_grad_(not phase.lower_frozen)
        steps = []
        for step in range(settings.steps):
            pixels, digits = data.batch(
                rank, settings.world_size, phase_index * settings.steps + step, settings.batch_size
            )
            arguments = (
                pixels,
                digits,
                phase.tasks(rank, settings.world_size, step),
                phase.takes_branch(rank, settings.world_size, step),
                phase.words_penalised,
            )
            before = state.stats()
            if step % 2 == 0:
                plain_step, hooked_step = plain.train_step(*arguments), hooked.train_step(*arguments)
            else:
                hooked_step, plain_step = hooked.train_step(*arguments), plain.train_step(*arguments)
            after = state.stats()
            usage = state.usage()
            used_here, used_anywhere, frozen, used_bytes = read_usage(usage)
            units = usage[workload.WORD_TABLE].units
            steps.append(
                StepRecord(
                    plain_seconds=plain_step[0],
                    plain_bytes=dense_bytes,
                    plain_loopback_bytes=plain_step[1],
                    hooks_seconds=hooked_step[0],
                    hooks_dense_bytes=after.dense_bytes - before.dense_bytes,
                    hooks_payload_bytes=after.payload_bytes - before.payload_bytes,
                    hooks_mask_bytes=after.mask_bytes - before.mask_bytes,
                    hooks_loopback_bytes=hooked_step[1],
                    used_here=used_here,
                    used_anywhere=used_anywhere,
                    frozen=frozen,
                    used_bytes=used_bytes,
                    rows=None if units is None else units.used_anywhere,
                )
            )
            report_progress(phase.title)
        phases.append(
            PhaseRecord(
                steps=tuple(steps),
                plain_accuracy=tuple(workload.measure_accuracy(plain.module, data)),
                hooks_accuracy=tuple(workload.measure_accuracy(hooked.module, data)),
                weights_difference=compare_weights(plain.module, hooked.module),
                ranks_alike=all([check_ranks_alike(plain.module), check_ranks_alike(hooked.module)]),
            )
        )
    parameters = dict(plain.module.named_parameters())
    return RankRecord(
        phases=tuple(phases),
        parameters=sum(p.numel() for p in parameters.values()),
        group_bytes=tuple(
            sum(p.numel() * p.element_size() for name, p in parameters.items() if name.startswith(group.prefix))
            for group in workload.GROUPS
        ),
        table_bytes=BYTES_PER_ELEMENT * parameters[workload.WORD_TABLE].numel(),
        statistics=str(state.stats()),
    )
