"""Trains the same model twice, step by step in turn: once with plain DDP and once with ddp_hooks."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks
from ddp_hooks.statistics import ParameterUsage

from . import workload
from .report import Numbers

SEED = 20


class Run:
    """One of the two trainings: a DDP module with its optimizer."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(SEED)
        self.module = workload.MultiTaskModel(width)
        self.ddp = DistributedDataParallel(self.module, find_unused_parameters=True)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)

    def train_step(self, *arguments: Any) -> float:
        """Train one step on the arguments of :func:`workload.compute_loss`, and return its milliseconds."""
        dist.barrier()
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        workload.compute_loss(self.ddp, *arguments).backward()
        self.optimizer.step()
        return 1e3 * (time.perf_counter() - start)


def train(steps: int, width: int, batch_size: int) -> Numbers:
    """Train both runs through all phases, and return all that the table, the picture and the JSON file show.

    Every rank calls this. The runs take each step in turn and swap places after it, so that whatever slows the machine
    slows both. Sizes are in bytes on one rank; times are the slowest rank's.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = workload.Digits(SEED)
    plain, hooked = Run(width), Run(width)
    state = ddp_hooks.register(hooked.ddp)
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in plain.module.named_parameters()}
    phases = []
    for index, phase in enumerate(workload.PHASES):
        plain.module.lower.requires_grad_(not phase.lower_frozen)
        hooked.module.lower.requires_grad_(not phase.lower_frozen)
        records = []
        if rank == 0:
            print(f"phase {index + 1} of {len(workload.PHASES)}: {phase.title}", file=sys.stderr, flush=True)
        for step in range(steps):
            arguments = (
                *data.batch(rank, ranks, index * steps + step, batch_size),
                phase.tasks(rank, ranks, step),
                phase.takes_branch(rank, ranks, step),
                phase.words_penalised,
            )
            state.reset_stats()
            order = (plain, hooked) if step % 2 == 0 else (hooked, plain)
            milliseconds = {run: run.train_step(*arguments) for run in order}
            mine = {
                "plain_bytes": sum(sizes.values()),
                "plain_milliseconds": milliseconds[plain],
                "hook_milliseconds": milliseconds[hooked],
                "payload_bytes": state.stats().payload_bytes,
                "mask_bytes": state.stats().mask_bytes,
                **read_usage(state.usage()),
            }
            records.append(combine(mine))
        results = {
            "title": phase.title,
            "steps": records,
            "plain_accuracy": data.measure_accuracy(plain.module),
            "hook_accuracy": data.measure_accuracy(hooked.module),
            "weights_difference": compare_weights(plain.module, hooked.module),
        }
        phases.append(results)
    return {
        "ddp_hooks": ddp_hooks.__version__,
        "torch": torch.__version__,
        "ranks": ranks,
        "threads_per_rank": torch.get_num_threads(),
        "parameters": sum(parameter.numel() for parameter in plain.module.parameters()),
        "groups": [
            {"label": label, "bytes": sum(size for name, size in sizes.items() if name.startswith(prefix))}
            for label, prefix in workload.GROUPS.items()
        ],
        "table_rows": workload.VOCABULARY,
        "table_bytes": sizes[workload.WORD_TABLE],
        "phases": phases,
        "weights_difference": max(phase["weights_difference"] for phase in phases),
    }


def read_usage(usage: dict[str, ParameterUsage]) -> Numbers:
    """Return, for each group of parameters, who used it and how many of its bytes; and the rows that were sent."""
    groups = [
        [parameter for name, parameter in usage.items() if name.removeprefix("module.").startswith(prefix)]
        for prefix in workload.GROUPS.values()
    ]
    units = usage[workload.WORD_TABLE].units
    return {
        "used_here": [any(parameter.used_here for parameter in group) for group in groups],
        "frozen": [all(parameter.frozen for parameter in group) for group in groups],
        "used_bytes": [sum(map(count_used_bytes, group)) for group in groups],
        "rows": None if units is None else units.used_anywhere,  # None: the table was sent whole
    }


def count_used_bytes(parameter: ParameterUsage) -> int:
    """Return the bytes of the part of a float32 parameter that some rank used."""
    size, units = 4 * parameter.numel * parameter.used_anywhere, parameter.units
    return size if units is None else size * units.used_anywhere // units.units


def combine(mine: Numbers) -> Numbers:
    """Make one record of all ranks' records of a step; every rank calls this."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    used_here = zip(*(one.pop("used_here") for one in everyone), strict=True)
    record = {
        key: max(one[key] for one in everyone) if key.endswith(("_bytes", "_milliseconds")) else value
        for key, value in everyone[0].items()
    }
    record["used_by"] = [[rank for rank, used in enumerate(ranks) if used] for ranks in used_here]
    record["hook_bytes"] = record["payload_bytes"] + record["mask_bytes"]
    return record


def compare_weights(first: nn.Module, second: nn.Module) -> float:
    """Return the largest absolute difference between two modules' parameters over all ranks; inf if one is a NaN."""
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    largest = torch.stack([(a.detach() - b.detach()).abs().max() for a, b in pairs]).max().nan_to_num(torch.inf)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)
