"""A few random programs with FSDP2. More of them: `fuzz_shards.py`."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from shard_programs import HOSTS, LAYERS, PASSES, PRECISIONS, SETTINGS, generate, run_seeds
from test_pretend import pytestmark as pytestmark


@pytest.mark.parametrize(
    ("device", "ranks", "seeds"),
    [
        ("cpu", 2, range(4)),
        ("pretend", 2, range(3)),
        pytest.param("cpu", 2, range(4, 20), marks=pytest.mark.thorough),
        pytest.param("cpu", 4, range(6), marks=pytest.mark.thorough),
        pytest.param("pretend", 2, range(3, 12), marks=pytest.mark.thorough),
        pytest.param("pretend", 4, range(4), marks=pytest.mark.thorough),
    ],
)
def test_same_as_plain_fsdp2(device: str, ranks: int, seeds: range) -> None:
    done = run_seeds(seeds, ranks, device)
    assert done["programs"] == len(seeds)
    assert done["that_find_zeros"] > 0


@pytest.mark.parametrize("ranks", list(HOSTS))
def test_everything_is_generated(ranks: int) -> None:
    programs = [generate(seed, ranks, "cpu") for seed in range(300)]
    assert programs[7] == generate(7, ranks, "cpu")
    steps = [step for program in programs for step in program.steps]
    assert {layer for program in programs for layer in program.layers} == set(LAYERS)
    assert {step.passes for step in steps} == set(PASSES)
    assert any(step.frozen and step.clips and not step.keeps for step in steps)
    assert {step.policy for step in steps} == {None, *SETTINGS}
    assert {step.breaks_at for step in steps} == {None, 0, 1, 2, 3}
    drawn = {name: {asdict(program)[name] for program in programs} for name in ("precision", "policy", "over_hosts")}
    assert drawn == {"precision": set(PRECISIONS), "policy": set(SETTINGS), "over_hosts": {None, "mesh", "hsdp"}}
    assert {program.hosts for program in programs} == set(HOSTS[ranks])
    for name in ("narrow_parameters", "differs", "by_columns", "reshards", "prefetches", "sums_alone", "is_exact"):
        assert {getattr(program, name) for program in programs} >= {True}, name
