"""ddp_hooks.fsdp on a pretended device, on hosts with several ranks: plain gradients, and fewer bytes between hosts."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from quick import thorough
from test_fsdp import MIXED, Case, Given, average_large_numbers, blocks, local
from test_fsdp_devices import ALL, make, memory_that_ends_late, optimizer_of, train
from test_fsdp_hosts import LAYOUTS, on_hosts
from test_fsdp_narrow import WITHOUT_LOOKS, counts, train_both, without_sign_of_zeros
from test_pretend import on_pretended, run_pretended
from test_pretend import pytestmark as pytestmark
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ddp_hooks
from ddp_hooks import fsdp
from ddp_hooks.fsdp import routes
from ddp_hooks.fsdp.link_bytes import count_link_bytes
from ddp_hooks.serving.control_groups import open_small_group

# --- sharded over all ranks


def compare_on_hosts(rank: int, layout: str, names: list[str], policy: ddp_hooks.Policy | None = None) -> None:
    """Compare with plain FSDP2, without looking for zeros, or with a policy that does."""
    on_hosts(rank, layout)
    with memory_that_ends_late():
        for name in names:
            state, (plain, ours) = train_both(ALL[name], rank, 2, **({"policy": policy} if policy else WITHOUT_LOOKS))
            stats = state.stats()
            assert ours["host_waits"] - plain["host_waits"] == stats.exchanges, name
            if policy is None:
                assert stats.payload_bytes == stats.dense_bytes > 0, name
                assert stats.why_uncoded == "only gradients on the CPU are coded, over gloo"
                assert ours["collectives"] - plain["collectives"] == stats.messages, name
                # To order parts by position, and to add up what is narrow.
                assert ours["launches"] - plain["launches"] <= 2 * stats.messages, name
            elif layout in ("uneven", "one host"):
                assert stats.exchanges == 0, name
            elif policy.skip_zeros == "on":
                assert stats.payload_bytes < stats.dense_bytes, name
            state.close()


FEW = ["dense", "several passes"]
MANY = ["float32", "float16", "bfloat16 sums", "unused here and there", "by columns", "sums alone"]


@pytest.mark.parametrize(
    ("layout", "names"),
    [("2 x 2", ["dense"]), pytest.param("interleaved", [*FEW, *MANY, "prefetched"], marks=pytest.mark.thorough)],
)
def test_gradients_are_those_of_plain_fsdp2(layout: str, names: list[str]) -> None:
    run_pretended(len(LAYOUTS[layout]), 10, compare_on_hosts, layout, names)


def reduce_integers(rank: int, layout: str) -> None:
    """Reduce gradients that any order adds up exactly, and count what collectives are given."""
    from ddp_hooks_testing import _pretend

    on_hosts(rank, layout)
    ranks, hosts = len(LAYOUTS[layout]), len(set(LAYOUTS[layout]))
    numbers = torch.randint(-99, 99, (ranks, 501), generator=torch.Generator().manual_seed(1)).float()
    expected = numbers.mean(0).chunk(ranks)[rank]
    part_bytes = 4 * -(-501 // ranks)
    for mixed, operation, part in ((MIXED, "ALLTOALL_BASE", 0.5), (MixedPrecisionPolicy(), "_REDUCE_SCATTER_BASE", 1)):
        model: Any = fully_shard(Given(501).to("pretend"), mesh=init_device_mesh("pretend", (ranks,)), mp_policy=mixed)
        state = fsdp.register(model)
        before = Counter(_pretend.bytes_by_group())
        model(numbers[rank].to("pretend", mixed.param_dtype)).backward()
        assert torch.allclose(local(model.weight.grad).cpu(), expected, 0, 1e-5)
        sent = Counter(_pretend.bytes_by_group()) - before
        within = Counter({(operation, ranks // hosts): part * ranks * part_bytes})
        assert {key: sent[key] for key in sent if key[0] != "_ALLGATHER_BASE"} == within + Counter(
            {("_REDUCE_SCATTER_BASE", hosts): hosts * part_bytes}
        )
        assert state.stats().payload_bytes == (hosts - 1) * part_bytes
        of_hosts = [[r for r, host in enumerate(LAYOUTS[layout]) if host == each] for each in range(hosts)]
        link = count_link_bytes([served.group for served in state._served], of_hosts)
        assert (link.plain, link.served) == ((ranks - 1) * part_bytes, (ranks - ranks // hosts) * part_bytes)
        assert (link.rounded, link.served_rounded) == (link.plain // 2, link.served // 2)
        state.close()


@pytest.mark.parametrize("layout", ["interleaved", *thorough("3 x 2", "2 x 3")])
def test_sums_and_bytes(layout: str) -> None:
    run_pretended(len(LAYOUTS[layout]), 11, reduce_integers, layout)


def diagnose(rank: int, layout: str) -> str:
    on_hosts(rank, layout)
    mesh = init_device_mesh("pretend", (len(LAYOUTS[layout]),))
    with memory_that_ends_late():
        model = make(ALL["dense"], mesh)
        with ddp_hooks.diagnose(model) as diagnosis:
            train(ALL["dense"], model, optimizer_of(model), rank, range(1))
    return " ".join(str(diagnosis).split())


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("2 x 2", "of gradients in a step. ddp_hooks.fsdp.register(model) would make that 17.2 kB; "),
        pytest.param(
            "a rank each",
            "make that 11.3 kB; reduce_dtype=torch.bfloat16 would not send less, and rounds every sum.",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "uneven",
            "ddp_hooks.fsdp.register(model) would change nothing; reduce_dtype=torch.bfloat16, which",
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["2 x 2", "a rank each", "uneven"],
)
def test_the_doctor_says_what_crosses_between_hosts(layout: str, expected: str) -> None:
    for text in run_pretended(len(LAYOUTS[layout]), 16, diagnose, layout):
        assert expected in text


@on_pretended(3, 12)
def test_hosts_with_different_numbers_of_ranks(rank: int) -> None:
    """Torch reduces, because messages would cross between hosts more often than the sums of a ring."""
    on_hosts(rank, "uneven")
    with memory_that_ends_late():
        state, (plain, ours) = train_both(ALL["dense"], rank, 2)
        assert plain == ours
        assert state.stats().payload_bytes == state.stats().dense_bytes > 0


# --- sharded over the ranks of a host


def train_over_hosts(case: Case, rank: int, mesh: DeviceMesh, steps: int) -> fsdp.ShardState:
    """Train with HSDP and with a registered mesh of hosts; compare."""
    found, asked = [], []
    for is_ours in (False, True):
        model = make(case, mesh["local"] if is_ours else mesh)
        if is_ours:
            state = fsdp.register(model, mesh=mesh, **WITHOUT_LOOKS)
        optimizer = optimizer_of(model, 0.0)
        before = counts()
        found.append(train(case, model, optimizer, rank, range(steps)))
        asked.append({name: after - before[name] for name, after in counts().items()})
    for step, (plain, ours) in enumerate(zip(*found, strict=True)):
        assert plain.keys() == ours.keys()
        for name, expected in plain.items():
            same = torch.equal(without_sign_of_zeros(ours[name]), without_sign_of_zeros(expected))
            assert same, f"step {step}: {name}"
    plain, ours = asked
    assert ours["host_waits"] == plain["host_waits"]
    assert ours["collectives"] == plain["collectives"]
    return state


def compare_over_hosts(rank: int, shape: tuple[int, int], names: list[str]) -> None:
    ranks = shape[1]
    os.environ["DDP_HOOKS_HOST"] = f"host {rank // ranks}"
    mesh = init_device_mesh("pretend", shape, mesh_dim_names=("hosts", "local"))
    with memory_that_ends_late():
        for name in names:
            state = train_over_hosts(ALL[name], rank, mesh, 2)
            stats, host_stats = state.stats(), state.host_stats()
            assert host_stats.payload_bytes == host_stats.dense_bytes > 0
            if name == "dense" and ranks > 1:
                assert 2 * stats.payload_bytes == stats.dense_bytes
            state.close()


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((2, 1), ["dense"]),
        ((2, 2), ["several passes"]),
        pytest.param((2, 2), ["dense", *MANY], marks=pytest.mark.thorough),
    ],
    ids=["a rank each", "few", "many"],
)
def test_gradients_are_those_of_hsdp(shape: tuple[int, int], names: list[str]) -> None:
    run_pretended(shape[0] * shape[1], 13, compare_over_hosts, shape, names)


@on_pretended(2, 14)
def test_shards_are_kept_until_hosts_have_averaged_them(rank: int) -> None:
    """FSDP2 lets go of a sum at once if parameters have another type, while our hook's stream still uses it."""
    mesh = init_device_mesh("pretend", (2, 1), mesh_dim_names=("hosts", "local"))
    case = Case(blocks, MixedPrecisionPolicy(reduce_dtype=torch.float32), prepare=lambda model: model.bfloat16())
    with memory_that_ends_late():
        train_over_hosts(case, rank, mesh, 3)


@pytest.mark.thorough
@on_pretended(4, 15)
def test_float16_holds_what_hsdp_holds(rank: int) -> None:
    with memory_that_ends_late():
        average_large_numbers(rank, (2, 2), "pretend")


# --- ends


def open_and_fail(*args: Any, **options: Any) -> None:
    open_small_group(*args, **options)
    raise RuntimeError("on purpose")


@on_pretended(4, 15)
def test_groups_of_hosts_go_with_the_state(rank: int) -> None:
    """Groups of hosts go with the state, before or after torch's own, and come again."""
    on_hosts(rank, "2 x 2")
    groups = len(dist.distributed_c10d._world.pg_map)
    mesh = init_device_mesh("pretend", (4,))
    for _ in range(2):
        model = make(ALL["dense"], mesh)
        routes.open_small_group = open_and_fail if rank == 3 else open_small_group  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="on purpose"):
            fsdp.register(model)
        routes.open_small_group = open_small_group
        assert len(dist.distributed_c10d._world.pg_map) == groups
        state = fsdp.register(model)
        assert len(dist.distributed_c10d._world.pg_map) == groups + 2
        assert fsdp.register(model) is state
        state.close()
        assert len(dist.distributed_c10d._world.pg_map) == groups
