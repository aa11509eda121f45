"""What every rank measures for the model: collectives alone, steps that send nothing, and the hook."""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

from micro.ranks import exchange_rank, fastest_tenth
from scaling.constants import LARGE_BYTES, MIDDLE_BYTES, SMALL_BYTES
from tools import harness, testbed

MASK_PARAMETERS = (100, 10_000)
HOOK_FRACTIONS = (0.25, 0.9)
UNUSED_FRACTION = 0.9  # at which the price of an unused byte is measured


def fit_rank(plan: dict[str, Any]) -> None:
    """On every rank: what the model needs to know about this many ranks; rank 0 reports it in parts."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    exchange_rank(plan["exchange_rounds"], MASK_PARAMETERS)
    _time_all_reduces(plan["rounds"])
    _time_alone(plan["size"], plan["rounds"])
    _time_hook(plan["size"], max(plan["rounds"] // 2, 2))
    dist.barrier()
    dist.destroy_process_group()


def _slowest(samples: Any) -> list[float] | None:
    """The largest over ranks of each sample, on rank 0."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, samples)
    return [max(times) for times in zip(*everyone, strict=True)] if dist.get_rank() == 0 else None


def _time_all_reduces(rounds: int) -> None:
    import torch
    import torch.distributed as dist

    for message_bytes in (*SMALL_BYTES, *MIDDLE_BYTES, *LARGE_BYTES):
        message = torch.zeros(message_bytes // 4)
        seconds = []
        few = rounds if message_bytes in LARGE_BYTES else 3 * rounds if message_bytes in MIDDLE_BYTES else 100
        for turn in range(-1, few):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(message)
            if turn >= 0:
                seconds.append(time.perf_counter() - start)
        slowest = _slowest(seconds)
        if slowest:
            testbed.report(
                {
                    "part": "all_reduce",
                    "bytes": message_bytes,
                    "seconds": harness.quartiles(slowest),
                    "fastest_tenth_seconds": fastest_tenth(slowest),
                    "rounds": few,
                }
            )


def _time_alone(size: str, rounds: int) -> None:
    """DDP on a group of this rank alone: computing, copying into buckets and back, and nothing sent."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from ddp_hooks import _C
    from tools import workloads

    rank = dist.get_rank()
    alone = [dist.new_group([other], backend="gloo") for other in range(dist.get_world_size())][rank]
    for fraction in (0.0, UNUSED_FRACTION):
        workload = workloads.make(f"frozen:{fraction:g}", size)
        torch.manual_seed(1234)
        ddp = DistributedDataParallel(workload.build(), process_group=alone, find_unused_parameters=True)
        workload.after_wrapping(ddp.module)
        marks: list[float] = []

        def mark(state, bucket, marks=marks):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
            marks.append(time.perf_counter())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        ddp.register_comm_hook(None, mark)
        steps = []
        gc.collect()
        gc.disable()
        for turn in range(-2, rounds):
            ddp.zero_grad(set_to_none=True)
            marks.clear()
            dist.barrier()
            start = time.perf_counter()
            loss = workload.loss(ddp, 0, rank)
            middle = time.perf_counter()
            loss.backward()
            end = time.perf_counter()
            if turn >= 0:
                steps.append([middle - start, *(at - middle for at in marks), end - middle])
        gc.enable()
        # Of the moments of a step the median over rounds; of ranks the slowest.
        medians = _slowest([statistics.median(times) for times in zip(*steps, strict=True)])
        buckets = _C.reducer_layout(ddp.reducer).buckets
        unused = sum(p.numel() for p in ddp.module.parameters() if not p.requires_grad)
        if medians:
            testbed.report(
                {
                    "part": "alone",
                    "fraction_unused": unused / sum(p.numel() for p in ddp.module.parameters()),
                    "bucket_bytes": [bucket.numel * bucket.element_bytes for bucket in buckets],
                    "forward_seconds": medians[0],
                    "ready_seconds": medians[1:-1],
                    "backward_seconds": medians[-1],
                    "rounds": rounds,
                }
            )


def _time_hook(size: str, rounds: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import ddp_hooks
    from tools import workloads

    for fraction in HOOK_FRACTIONS:
        workload = workloads.make(f"frozen:{fraction:g}", size)
        torch.manual_seed(1234)
        ddp = DistributedDataParallel(workload.build(), find_unused_parameters=True)
        workload.after_wrapping(ddp.module)
        state = ddp_hooks.register(ddp, policy="skip_unused")
        for turn in range(-2, rounds):
            if turn == 0:
                state.reset_stats()
            ddp.zero_grad(set_to_none=True)
            dist.barrier()
            workload.backward(ddp, 0, dist.get_rank())
        counters = state.stats()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, counters.hook_seconds / rounds)
        if dist.get_rank() == 0:
            payload = counters.payload_bytes / rounds
            row = {"part": "hook", "payload_bytes": payload, "seconds": statistics.fmean(everyone), "rounds": rounds}
            testbed.report(row)
