"""A program ends well although a group's worker has not let go of the last collective's tensors yet.

A worker that comes for the GIL when the interpreter is on its way out is unwound, and that ends the process. It takes a
machine on which a worker is not run for a millisecond at the wrong time; late_workers.cpp makes one of any.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("late_workers.cpp")
PROGRAM = """
import sys

import torch
import torch.distributed as dist
from torch import nn

import ddp_hooks

rank, store, destroyed, registration = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "destroyed", sys.argv[4]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), find_unused_parameters=True)
if registration == "native":
    ddp_hooks.register(ddp)
elif registration == "python":
    ddp.register_comm_hook(ddp_hooks.SkipUnusedState(ddp), ddp_hooks.skip_unused_hook)
else:
    with ddp_hooks.diagnose(ddp):
        pass
ddp(torch.ones(2, 4)).sum().backward()
total = torch.full((4,), float(rank))
dist.all_reduce(total)
assert total.eq(1).all()
if destroyed:
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def late_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("late") / "late_workers.so"
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(library), "-ldl"], check=True)
    return library


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("registration", "end"),
    [("native", "alive"), ("native", "destroyed"), ("python", "alive"), ("diagnosed", "destroyed")],
)
def test_programs_end_with_late_workers(registration: str, end: str, late_workers: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "LATE_WORKERS_MS": "4",
        # Behind what is preloaded already, as a sanitizer is.
        "LD_PRELOAD": " ".join(filter(None, [os.environ.get("LD_PRELOAD"), str(late_workers)])),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store"), end, registration],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=90)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
