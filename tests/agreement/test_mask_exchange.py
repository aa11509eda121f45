"""The mask exchange when a group refuses a gather; how masks travel otherwise, the tests of hooks and scaling show."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from spawn import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup

import ddp_hooks
from ddp_hooks.serving import control_groups


@pytest.mark.parametrize("axis", [0, 1])
@on_ranks(1)
def test_refused_gathers(rank: int, axis: int) -> None:
    """One of four ranks, two times two, whose groups give every rank what this one sends."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
    options = {}

    def open_group(ddp: object, name: str, rank: int, ranks: int, devices: object) -> FakeProcessGroup:
        options[name.split("/")[3]] = chosen = FakeProcessGroup.Options()
        return FakeProcessGroup._create_internal(rank, ranks, chosen)

    with mock.patch.multiple(control_groups, LARGEST_AXIS=2, _open_group=open_group):
        ddp = DistributedDataParallel(nn.Linear(4, 4), find_unused_parameters=True)
        state = ddp_hooks.register(ddp, "skip_unused")
    assert set(options) == {"all", "axis0", "axis1"}

    def step() -> None:
        ddp.zero_grad()
        ddp(torch.ones(1, 4)).sum().backward()
        # The fake all-reduce leaves what this rank alone has sent.
        assert ddp.module.weight.grad.eq(1 / 4).all()
        assert state.usage()["weight"].used_anywhere

    step()
    for refusals in (1, 2):
        options[f"axis{axis}"].error_on_collective = True
        for _ in range(refusals):
            with pytest.raises(RuntimeError, match="FakeProcessGroup collective operation error"):
                step()
        options[f"axis{axis}"].error_on_collective = False
        for _ in range(2):
            step()
