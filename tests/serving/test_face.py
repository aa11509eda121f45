"""The package's face: few names that are all there, and nothing loaded that training does not need."""

from __future__ import annotations

import subprocess
import sys

import pytest
from quick import thorough

import ddp_hooks

OF_THE_DOCTOR = ("doctor", "diagnose", "expect_used", "expect_unused")


def in_a_fresh_process(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_there_are_few_names() -> None:
    assert len(ddp_hooks.__all__) == len(set(ddp_hooks.__all__)) <= 16
    assert set(ddp_hooks.__all__) <= set(dir(ddp_hooks))
    assert {"doctor", "errors", "sync"} <= set(dir(ddp_hooks))


def test_every_name_is_there() -> None:
    imported: dict[str, object] = {}
    exec("from ddp_hooks import *", imported)
    assert all(imported[name] is getattr(ddp_hooks, name) for name in ddp_hooks.__all__)


@pytest.mark.parametrize("name", [OF_THE_DOCTOR[0], *thorough(*OF_THE_DOCTOR[1:])])
def test_the_doctor_is_loaded_when_it_is_asked_for(name: str) -> None:
    loaded = "[name for name in sys.modules if name.startswith('ddp_hooks.doctor')]"
    printed = in_a_fresh_process(
        "import sys\n"
        "import ddp_hooks\n"
        f"assert not {loaded}, {loaded}\n"
        "assert ddp_hooks.errors.RefusedError and ddp_hooks.sync.average_parameters\n"
        f"dir(ddp_hooks)\nassert not {loaded}, {loaded}\n"
        f"ddp_hooks.{name}\n"
        "print(ddp_hooks.doctor.Diagnosis.__name__)"
    )
    assert printed.split() == ["Diagnosis"]


def test_another_name_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'ddp_hooks' has no attribute 'average_parameters'"):
        _ = ddp_hooks.average_parameters  # type: ignore[attr-defined]


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ddp_hooks
from ddp_hooks import sync

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
with ddp_hooks.diagnose(ddp) as diagnosis:
    ddp(torch.ones(1, 2)).sum().backward()
state = ddp_hooks.register(ddp, "skip_zeros")
ddp(torch.ones(1, 2)).sum().backward()
sync.BufferSync(ddp, "average")
sync.average_parameters(ddp)
shared = sync.share_parameters(torch.nn.Linear(2, 2))
shared.release()
print(diagnosis.findings.steps, state.stats().steps, sync.verify_replicas(ddp).in_step)
"""


@pytest.mark.thorough
def test_nothing_needs_numpy() -> None:
    assert in_a_fresh_process(WITHOUT_NUMPY).split() == ["1", "1", "True"]
