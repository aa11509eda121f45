"""Trains the same model twice, step by step in turn: once with plain DDP and once with ddp_hooks."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks
from ddp_hooks.statistics import ParameterUsage

from . import workload

SEED = 20
Numbers = dict[str, Any]


class Run:
    """One of the two trainings: a DDP module with its optimizer."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(SEED)
        self.module = workload.MultiTaskModel(width)
        self.ddp = DistributedDataParallel(self.module, find_unused_parameters=True)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)

    def train_step(self, *arguments: Any) -> tuple[float, int]:
        """Train one step; return its milliseconds and the bytes that the loopback interface sent meanwhile.

        Args:
            *arguments: what :func:`workload.compute_loss` takes after the model.
        """
        dist.barrier()
        bytes_before, start = read_loopback_bytes(), time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        workload.compute_loss(self.ddp, *arguments).backward()
        self.optimizer.step()
        milliseconds = 1e3 * (time.perf_counter() - start)
        dist.barrier()  # another rank may still be sending
        return milliseconds, read_loopback_bytes() - bytes_before


def read_loopback_bytes() -> int:
    """Return how many bytes the kernel has sent over its loopback interface for all programs; 0 if it does not say."""
    counter = Path("/sys/class/net/lo/statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else 0


def train(steps: int, width: int, batch_size: int) -> Numbers:
    """Train both runs through all phases; every rank calls this within a process group.

    The two runs take each step in turn, and swap places after every step, so that whatever slows the machine down slows
    both.

    Returns:
        Everything that the table, the picture and the JSON file show, the same on every rank. Sizes are in bytes, for
        one rank; times are in milliseconds, of the slowest rank in each step.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = workload.Digits(SEED)
    plain, hooked = Run(width), Run(width)
    state = ddp_hooks.register(hooked.ddp)
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in plain.module.named_parameters()}
    phases = []
    total = len(workload.PHASES) * steps
    for index, phase in enumerate(workload.PHASES):
        for run in (plain, hooked):
            run.module.lower.requires_grad_(not phase.lower_frozen)
        records = []
        for step in range(steps):
            done = index * steps + step
            show_progress(done, total, phase.title)
            arguments = (
                *data.batch(rank, ranks, done, batch_size),
                phase.tasks(rank, ranks, step),
                phase.takes_branch(rank, ranks, step),
                phase.words_penalised,
            )
            before = state.stats()
            order = (plain, hooked) if step % 2 == 0 else (hooked, plain)
            measured = {run: run.train_step(*arguments) for run in order}
            after = state.stats()
            mine = {
                "plain_bytes": sum(sizes.values()),
                "plain_milliseconds": measured[plain][0],
                "plain_loopback_bytes": measured[plain][1],
                "hook_milliseconds": measured[hooked][0],
                "hook_loopback_bytes": measured[hooked][1],
                "payload_bytes": after.payload_bytes - before.payload_bytes,
                "mask_bytes": after.mask_bytes - before.mask_bytes,
                **read_usage(state.usage()),
            }
            records.append(combine(mine))
        phases.append(
            {
                "title": phase.title,
                "steps": records,
                "plain_accuracy": data.measure_accuracy(plain.module),
                "hook_accuracy": data.measure_accuracy(hooked.module),
                "weights_difference": compare_weights(plain.module, hooked.module),
            }
        )
    show_progress(total, total, "done")
    return {
        "ddp_hooks": ddp_hooks.__version__,
        "torch": torch.__version__,
        "ranks": ranks,
        "threads_per_rank": torch.get_num_threads(),
        "width": width,
        "batch_size_per_rank": batch_size,
        "parameters": sum(parameter.numel() for parameter in plain.module.parameters()),
        "groups": [
            {"label": label, "bytes": sum(size for name, size in sizes.items() if name.startswith(prefix))}
            for label, prefix in workload.GROUPS.items()
        ],
        "table_rows": workload.VOCABULARY,
        "table_bytes": sizes[workload.WORD_TABLE],
        "phases": phases,
        "weights_difference": max(phase["weights_difference"] for phase in phases),
        "statistics": str(state.stats()),
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
    if not parameter.used_anywhere:
        return 0
    units = parameter.units
    return 4 * parameter.numel if units is None else 4 * parameter.numel * units.used_anywhere // units.units


def combine(mine: Numbers) -> Numbers:
    """Make one record of all ranks' records of a step; every rank calls this."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    record = {
        key: max(one[key] for one in everyone) if key.endswith(("_bytes", "_milliseconds")) else value
        for key, value in everyone[0].items()
    }
    used_here = zip(*(one["used_here"] for one in everyone), strict=True)
    record["used_by"] = [[rank for rank, used in enumerate(ranks) if used] for ranks in used_here]
    record["hook_bytes"] = record["payload_bytes"] + record["mask_bytes"]
    del record["used_here"]
    return record


def compare_weights(first: nn.Module, second: nn.Module) -> float:
    """Return the largest absolute difference between two modules' parameters over all ranks; inf if one is a NaN."""
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    largest = torch.stack([(a.detach() - b.detach()).abs().max() for a, b in pairs]).max()
    largest = torch.nan_to_num(largest, nan=float("inf"))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def show_progress(done: int, total: int, title: str) -> None:
    """Rank 0 shows how far training is: in place on a terminal, otherwise in a few lines."""
    if dist.get_rank() != 0:
        return
    text = f"{done} of {total} steps  {title}"
    if sys.stderr.isatty():
        print(f"\r{text:<79}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done * 10 // total > (done - 1) * 10 // total:
        print(text, file=sys.stderr, flush=True)
