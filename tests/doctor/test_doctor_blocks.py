"""How blocks end that the doctor watches, when they do not end on all ranks alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from spawn import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks
from ddp_hooks.doctor.diagnosis import Diagnosis


def run_block(rank: int, diagnosis: Diagnosis, ddp: DistributedDataParallel, ending: BaseException) -> None:
    with diagnosis:
        ddp(torch.ones(2, 4)).sum().backward()
        if rank == 0:
            dist.barrier()  # rank 1 comes there only if leaving the block waits for nobody
        raise ending


@on_ranks(2, collective_timeout=8)
def test_who_leaves_a_block_by_an_interrupt_waits_for_nobody(rank: int) -> None:
    for ending in (KeyboardInterrupt(), SystemExit(0), GeneratorExit()):
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        diagnosis = ddp_hooks.diagnose(ddp)
        with pytest.raises(type(ending)) as caught:
            run_block(rank, diagnosis, ddp, ending)
        assert caught.value is ending
        if rank == 1:
            dist.barrier()
        assert diagnosis.findings.steps == 1
        assert (diagnosis.findings.ranks, diagnosis.findings.heard) == (2, (rank,))
        assert f"on rank {rank} of 2" in str(diagnosis)
        assert "nobody to send to" not in str(diagnosis)
        assert f"only what rank {rank} saw is known" in " ".join(str(diagnosis).split())
