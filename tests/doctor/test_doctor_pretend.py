"""The doctor on the pretended device, whose virtual time tells what it has to measure."""

from __future__ import annotations

import time

import torch
from test_doctor_trials import STEPS, Model, is_plain
from test_pretend import on_pretended
from test_pretend import pytestmark as pytestmark
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks
from ddp_hooks.doctor.clock import now, seconds_between
from ddp_hooks.doctor.recorder import Recorder


@on_pretended(2, 1)
def test_steps_are_timed_on_the_device(rank: int) -> None:
    """The host sleeps where the device does not wait for it, and the link is slow only for the device."""
    from ddp_hooks_testing import _pretend

    sides, link = 512, 100e9 / 8
    ddp = DistributedDataParallel(nn.Linear(sides, sides, bias=False).to("pretend"))
    recorder = Recorder(ddp)
    ddp.module.weight.register_post_accumulate_grad_hook(lambda _: time.sleep(0.02))
    for _ in range(3):
        before = _pretend.counts()["collective_bytes"]
        ddp(torch.ones(2, sides, device="pretend")).sum().backward()
    assert _pretend.counts()["collective_bytes"] - before == sides * sides * 4
    for step in recorder.steps[1:]:
        assert 0 < step.begun_seconds <= step.gradients_seconds < step.seconds < 0.02
        # On two ranks a ring carries as many bytes as the gradient has.
        sent = step.seconds - step.gradients_seconds
        assert sides * sides * 4 / link < sent < sides * sides * 4 / link + 1e-3
    recorder.close()


@on_pretended(2, 1)
def test_recording_does_not_wait_for_its_own_step(rank: int) -> None:
    """Recording waits for no more than the step before, whose end the host asks for and finds."""
    from ddp_hooks_testing import _pretend

    ddp = DistributedDataParallel(nn.Linear(8, 8).to("pretend"))
    recorder = Recorder(ddp, most_mask_bytes=-1)  # looks at no values
    waits = []
    for _ in range(5):
        before = _pretend.counts()["host_waits"]
        ddp(torch.ones(2, 8, device="pretend")).sum().backward()
        waits.append(_pretend.counts()["host_waits"] - before)
    assert waits[2:] == [0, 0, 0], waits  # DDP makes its buckets anew before
    assert all(step.seconds > 0 for step in recorder.steps)
    recorder.close()


@on_pretended(1, 1)
def test_the_doctor_does_not_wait_for_a_device_that_hangs(rank: int) -> None:
    """A moment that the device does not come to, and one on a device that has failed: the times are unknown."""
    device = torch.device("pretend", 0)
    start, end = now(device), torch.Event(device, enable_timing=True)
    end.record()
    assert seconds_between(start, end) >= 0

    class Hangs(torch.Event):
        def query(self) -> bool:
            return False

    class Fails(torch.Event):
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for kind in (Hangs, Fails):
        began = time.monotonic()
        assert seconds_between(start, kind(device, enable_timing=True)) == 0
        assert time.monotonic() - began < 5


@on_pretended(2, 1)
def test_diagnosis(rank: int) -> None:
    """All of it, with trials: the findings are those of the CPU, in every count."""
    found = []
    for device in ("cpu", "pretend"):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Model().to(device), bucket_cap_mb=0.5, find_unused_parameters=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp_hooks.diagnose(ddp, trial_steps=STEPS) as diagnosis:
            for step in range(STEPS):
                optimizer.zero_grad()
                rows = torch.arange(40).add(100 * step + rank).to(device)
                ddp(rows, (step + rank) % 2 if step % 3 else 0).backward()
                optimizer.step()
            assert is_plain(ddp)
        found.append(diagnosis.findings)
    on_cpu, on_device = found
    assert on_device.steps == on_cpu.steps == STEPS
    assert [one.verdict for one in on_device.parameters] == [one.verdict for one in on_cpu.parameters]
    assert [(one.policy, one.steps) for one in on_device.policies] == [("skip_unused", 2), ("auto", 2)]
    assert on_device.problems == on_cpu.problems
