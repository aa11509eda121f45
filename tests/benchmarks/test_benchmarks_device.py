"""Steps on the pretended device in virtual time: what is played, and that the script runs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_pretend import pytestmark as pytestmark

from tools import harness, virtual_time


@dataclass
class Moment:
    what: str
    stream: int = 0
    seconds: float = 0.0
    host_seconds: float = 0.0
    number: int = 0
    after: int = 0
    collective: str = ""


def test_the_last_host_and_what_is_waited_for_decide() -> None:
    trace = [
        Moment("work", 0, 5.0, 1.0, number=1),  # until 6 and 8
        Moment("masks start"),  # at 1 and 3
        Moment("wait", 100, after=1, number=2),
        Moment("work", 100, 10.0, 1.0, number=3, collective="ALLREDUCE"),  # from 8 to 18
        Moment("work", 0, 2.0, 1.0, number=4),  # until 8 and 10
        Moment("masks wait"),  # from 3 and 5 until 7
        Moment("wait", 0, after=3, number=5),
        Moment("work", 0, 1.0, 1.0, number=6),  # until 19
        Moment("host waits", after=4),  # until 8 and 10
    ]
    played = virtual_time.play(trace, (0.0, 2.0), exchange_seconds=4.0)
    assert played == virtual_time.Played(step=19.0, host_waits=4.0, device_idles=11.0, links={"link": 10.0})
    slower = virtual_time.play(trace, (0.0, 2.0), 4.0, lambda one: (2 if one.collective else 1) * one.seconds)
    assert (slower.step, slower.links) == (29.0, {"link": 20.0})
    longer = virtual_time.play(trace, (0.0, 2.0), 40.0)
    assert (longer.step, longer.host_waits) == (45.0, 40.0)


def test_collectives_on_a_link_take_turns() -> None:
    trace = [Moment("work", stream, 10.0, 1.0, number, collective="ALLREDUCE") for number, stream in enumerate((1, 2))]
    for links, step in ((("a", "a"), 21.0), (("a", "b"), 12.0)):
        played = virtual_time.play(trace, (0.0,), 0.0, link_of=lambda one, links=links: links[one.number])  # type: ignore[misc]
        assert played.step == step
        assert sum(played.links.values()) == 20.0


@pytest.mark.thorough
def test_a_step_of_fsdp2_is_the_same_again(tmp_path: Path) -> None:
    variants = ["hsdp", "hsdp+register"]
    command = [sys.executable, str(harness.BENCHMARKS / "shard_link.py"), "--out", str(tmp_path)]
    command += ["--dtypes", "bfloat16", "--variants", *variants]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "shard_link.json").read_text())
    committed = json.loads((harness.RESULTS / "shard_link.json").read_text())
    expected = [row for row in committed["rows"] if row["dtype"] == "bfloat16" and row["variant"] in variants]
    for ours, before in zip(found["rows"], expected, strict=True):
        for name, value in before.items():
            assert ours[name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-3)), name


@pytest.mark.thorough
def test_the_script_gives_the_same_again(tmp_path: Path) -> None:
    script = harness.BENCHMARKS / "device_link.py"
    command = [sys.executable, str(script), "--shapes", "resnet50", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "device_link.json").read_text())
    assert found["sentence"].startswith("With nothing to skip")
    committed = json.loads((harness.RESULTS / "device_link.json").read_text())
    expected = [row for row in committed["rows"] if row["shape"] == "resnet50"]
    for ours, before in zip(found["rows"], expected, strict=True):
        for name, value in before.items():
            # Plain DDP fills in zeros in any order.
            assert ours[name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-3)), name


@pytest.mark.thorough
def test_emulated_ranks(tmp_path: Path) -> None:
    """What a real GPU does with links that are emulated runs on the pretended device too, where times mean nothing."""
    script = harness.BENCHMARKS / "emulated_link.py"
    command = [sys.executable, str(script), "--device", "pretend", "--shapes", "resnet50", "--rounds", "1"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads((tmp_path / "emulated_link_pretend.json").read_text())["rows"]
    assert len({(row["link"], row["bound by"], row["variant"]) for row in rows}) == len(rows) == 4 * 2 * 10
    # Exchanges of masks take half a millisecond, and the host waits for what backward has left of that.
    waits = {row["variant"]: row["mask_wait_ms"] for row in rows}
    assert waits["plain"] == 0
    assert all(0 <= wait < 1e3 for wait in waits.values())
