"""What the doctor takes ``auto`` to come to rest at, where no hook is at hand to compare it with: on a device."""

from __future__ import annotations

import random

import pytest

from ddp_hooks import _C
from ddp_hooks.doctor.recorder import EVERYTHING, SOMETHING, Step, slots_of
from ddp_hooks.doctor.settling import settle
from ddp_hooks.doctor.traffic import UnionStep, World, unite

ROWS, ROW = 512, 64
TABLE_BYTES = ROWS * ROW * 4
CPU, DEVICE = World(2, is_direct=False), World(2, is_direct=False, is_on_device=True)


def steps_of(world: World, *density: float) -> list[UnionStep]:
    """Steps in which so much of the rows of one table is not zero, on both ranks."""
    kind = 6 << 32 | world.is_on_device << 16  # float32 on the CPU or the first kind of device
    layout = _C.LayoutOfBuckets([_C.BucketLayout([_C.ParameterSlice(0, 0, ROWS * ROW, ROW)], 4, kind)], 1)
    slots = slots_of(layout)
    assert slots[0].units == ROWS

    def step(part: float) -> Step:
        # Not evenly spread, as the sample is.
        rows = sum(1 << row for row in random.Random(0).sample(range(ROWS), int(part * ROWS)))
        masks = {0: rows.to_bytes(ROWS // 8, "little")} if part < 1 else {}
        values = bytes([EVERYTHING if part == 1 else SOMETHING])
        return Step(b"\1", b"\1", b"\0", values, masks, {}, 0, b"", [0.0], [0.0], 0.0, 0.0, 0.0, True, False)

    return [unite([step(part)] * 2, layout, slots) for part in density]


def sent_bytes(world: World, *density: float) -> list[int]:
    return [sum(one.payload_bytes for one in step) for step in settle(steps_of(world, *density), world)]


@pytest.mark.parametrize("world", [CPU, DEVICE])
def test_what_stays_as_it_is_is_found_everywhere(world: World) -> None:
    assert sent_bytes(world, 0.125) == [TABLE_BYTES // 8]
    assert sent_bytes(world, 1.0) == [TABLE_BYTES]
    assert sent_bytes(world, 0.125, 0.25) == [TABLE_BYTES // 8, TABLE_BYTES // 4]


def test_a_device_is_asked_more_seldom_whether_something_has_become_sparse() -> None:
    # For a while dense, then sparse: the CPU notices at once, a device when it looks again.
    density = [1.0] * 60 + [0.125] * 60
    on_cpu, on_device = sent_bytes(CPU, *density), sent_bytes(DEVICE, *density)
    assert sum(on_cpu) < sum(on_device) <= 120 * TABLE_BYTES
    assert on_cpu[61:] == [TABLE_BYTES // 8] * 59
    assert TABLE_BYTES // 8 in on_device
    assert on_device[61] == TABLE_BYTES
