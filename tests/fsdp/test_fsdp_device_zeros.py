"""ddp_hooks.fsdp looks for zeros on a pretended device: plain gradients, fewer bytes, and a host wait for each look."""

from __future__ import annotations

import pytest
import torch
from test_fsdp import ON, POLICIES, bits, reduce_with_and_without
from test_fsdp_device_hosts import compare_on_hosts
from test_fsdp_devices import ALL, make, memory_that_ends_late, optimizer_of, train
from test_fsdp_hosts import LAYOUTS
from test_fsdp_narrow import counts, train_both
from test_pretend import on_pretended, run_pretended
from test_pretend import pytestmark as pytestmark
from test_shard_units import Round
from torch.distributed.device_mesh import init_device_mesh

from ddp_hooks import fsdp

# --- units


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)])
@on_pretended(1, 20)
def test_units_are_those_of_the_cpu(rank: int, dtype: torch.dtype) -> None:
    """Choose, write and add up on the device and on the CPU."""
    for seed in range(12):
        case = Round(seed, dtype)
        ranks, units = case.ranks, case.units
        rows, sums = [], []
        for device in ("cpu", "pretend"):
            flat = case.inputs[0].to(device)
            masks = torch.zeros(ranks, units.mask_bytes, dtype=torch.uint8)
            before = counts()
            chosen = units.choose(masks, flat, 0, True, [])
            if device == "pretend":
                asked = {name: after - before[name] for name, after in counts().items()}
                assert (asked["launches"], asked["host_waits"]) == (2, 1)  # a scan, and the copy of its answer
            message = torch.empty(sum(units.sent_elements(masks)), dtype=dtype, device=device)
            sizes = units.write(message.view(torch.uint8), flat, masks, 0, False)
            rows.append((chosen, masks.tolist(), sizes, bits(message.cpu()).tolist()))
            # As if every other rank had sent the same.
            received = masks[1].repeat(ranks, 1)
            received[0] = 0
            begin = units.sent_elements(masks)[0]
            part = message[begin : begin + units.sent_elements(masks)[1]]
            total = torch.empty(units.numel, dtype=dtype, device=device)
            before = counts()
            units.sum(total, flat, torch.cat([part] * (ranks - 1)), received, 0, list(range(ranks)))
            asked = {name: after - before[name] for name, after in counts().items()}
            # Both with and without a zero that is not sent, after a copy of the own part.
            assert device == "cpu" or (asked["launches"] <= 4 and asked["host_waits"] == 0)
            sums.append(total.cpu())
        assert rows[0] == rows[1]
        assert bool(((bits(sums[0]) == bits(sums[1])) | (sums[0].isnan() & sums[1].isnan())).all())


# --- training

# What is left of the bytes, at most.
WITH_ZEROS = {"stacked experts": 0.3, "unused here and there": 0.35, "unused in float32": 0.7, "several passes": 1.0}


@pytest.mark.parametrize("policy", ["on", pytest.param("restless", marks=pytest.mark.thorough)])
@on_pretended(2, 21)
def test_gradients_are_those_of_plain_fsdp2(rank: int, policy: str) -> None:
    with memory_that_ends_late():
        for name, most in WITH_ZEROS.items():
            state, (plain, ours) = train_both(ALL[name], rank, 2, policy=POLICIES[policy])
            stats = state.stats()
            assert stats.buckets_packed + stats.buckets_skipped > 0, name
            assert stats.coded_bytes == 0
            assert ours["host_waits"] - plain["host_waits"] == stats.exchanges, name
            if policy == "on":
                assert stats.payload_bytes <= most * stats.dense_bytes, (name, stats.payload_bytes / stats.dense_bytes)
            state.close()


MANY = ["unused here and there", "stacked experts", "float32"]


@pytest.mark.parametrize(
    ("layout", "policy", "names"),
    [
        ("interleaved", "on", ["unused here and there"]),
        *(
            pytest.param(layout, policy, MANY, marks=pytest.mark.thorough)
            for layout, policy in (("2 x 2", "restless"), ("one host", "on"), ("uneven", "on"))
        ),
    ],
)
def test_on_hosts(layout: str, policy: str, names: list[str]) -> None:
    run_pretended(len(LAYOUTS[layout]), 22, compare_on_hosts, layout, names, POLICIES[policy])


def ask_in_each_step(rank: int) -> tuple[list[int], list[int]]:
    """Return the host waits of each step beyond plain FSDP2's, of dense gradients, and of those with many zeros."""
    mesh = init_device_mesh("pretend", (2,))
    found = []
    with memory_that_ends_late():
        for name in ("dense", "unused here and there"):
            waits = []
            for is_ours in (False, True):
                model = make(ALL[name], mesh)
                if is_ours:
                    fsdp.register(model)
                optimizer = optimizer_of(model)
                of_steps = []
                for step in range(4):
                    before = counts()["host_waits"]
                    train(ALL[name], model, optimizer, rank, range(step, step + 1))
                    of_steps.append(counts()["host_waits"] - before)
                waits.append(of_steps)
            found.append([ours - plain for plain, ours in zip(*waits, strict=True)])
    return found[0], found[1]


def test_the_host_waits_once_for_each_group_that_is_looked_at() -> None:
    for dense, with_zeros in run_pretended(2, 23, ask_in_each_step):
        # Three layers, and what they are in. Then there is a pause.
        assert dense == [4, 0, 0, 0]
        # Two of them go on, with experts.
        assert with_zeros == [4, 2, 2, 2]


@on_pretended(2, 24)
def test_ranks_with_gradients_of_different_parameters(rank: int) -> None:
    case = ALL["unused here and there"]
    model = make(case, init_device_mesh("pretend", (2,)))
    model.set_reduce_scatter_unused_params(False)
    fsdp.register(model, ON)
    with pytest.raises(RuntimeError, match=r"rank . has no gradient of layers\.2\.experts\.\d\.weight, "):
        train(case, model, optimizer_of(model), rank, range(1))


@on_pretended(2, 25)
def test_special_numbers(rank: int) -> None:
    specials = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1.5, 1 / 3])
    mesh = init_device_mesh("pretend", (2,))
    for seed in range(3):
        draw = torch.Generator().manual_seed(100 * seed + rank)
        gradient = specials[torch.randint(len(specials), (60,), generator=draw)].repeat_interleave(16)
        plain, ours = reduce_with_and_without(gradient.to("pretend"), mesh)
        assert bool(((bits(plain) == bits(ours)) | (plain.isnan() & ours.isnan())).all())
