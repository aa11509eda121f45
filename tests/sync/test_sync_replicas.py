"""verify_replicas: drift made on purpose, found, named, measured and repaired."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from spawn import on_ranks, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks
from ddp_hooks import _C
from ddp_hooks.sync import replicas

WORLD_SIZES = [2, 3]


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    model.register_buffer("table", torch.arange(10))
    return model


def train_a_step(model, optimizer):
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(5)
    model(torch.randn(4, 3, 8, 8, generator=generator)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_replicas_in_step_cost_one_record(rank):
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    ddp = DistributedDataParallel(model)
    for _ in range(2):
        train_a_step(ddp, optimizer)
    report = ddp_hooks.sync.verify_replicas(ddp, optimizer=optimizer, raise_on_difference=True)
    assert report.in_step
    assert not report.differences
    assert not report.layout_differences
    # One record, whatever the size of the model.
    assert report.exchanged_bytes == 64
    parameters, buffers = len(list(model.parameters())), len(list(model.buffers()))
    # Adam's state is step, exp_avg and exp_avg_sq a parameter; its group has numbers and flags.
    settings = sum(
        len(value) if isinstance(value, tuple) else isinstance(value, (bool, int, float))
        for key, value in optimizer.param_groups[0].items()
        if key != "params"
    )
    assert report.tensors == parameters + buffers + parameters + 3 * parameters + settings
    assert report.hashed_bytes > sum(p.nbytes for p in model.parameters())
    assert "all ranks hold the same" in str(report)
    # Without what is not asked for.
    assert ddp_hooks.sync.verify_replicas(ddp, gradients=False).tensors == parameters + buffers
    assert ddp_hooks.sync.verify_replicas(model.parameters()).tensors == 2 * parameters
    assert ddp_hooks.sync.verify_replicas(nn.ReLU()).in_step
    # Memory layout is no difference.
    if rank == 0:
        model.to(memory_format=torch.channels_last)
    assert ddp_hooks.sync.verify_replicas(model, gradients=False).in_step


def find_slowly(tensors):
    """The obvious way: gather everything, compare bits, subtract."""
    found = {}
    for name, tensor in tensors.items():
        versions = [None] * dist.get_world_size()
        dist.all_gather_object(versions, tensor.detach().contiguous())
        bits = [bytes(version.view(-1).view(torch.uint8).tolist()) for version in versions]
        if len(set(bits)) == 1:
            continue
        holders = {}
        for rank, key in enumerate(bits):
            holders.setdefault(key, []).append(rank)
        ordered = sorted(map(tuple, holders.values()), key=lambda ranks: (-len(ranks), ranks[0]))
        reference = versions[ordered[0][0]]
        amounts = [float((v.double() - reference.double()).abs().max()) for v in versions]
        found[name] = (tuple(ordered), tuple(amounts))
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_drift_is_found_as_the_slow_way_finds_it_and_repaired(rank, seed):
    model = make_model()
    last = dist.get_world_size() - 1
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            # Every rank draws alike, one of them acts on it.
            who = int(torch.randint(0, 2 * last + 2, (), generator=generator))
            where = int(torch.randint(0, tensor.numel(), (), generator=generator))
            if who == rank:
                tensor.view(-1)[where] += 1 + rank
            elif who == last + 1:
                tensor.view(-1)[where] += rank  # every rank its own version
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    expected = find_slowly(named)
    report = ddp_hooks.sync.verify_replicas(model)
    assert report.in_step == (not expected)
    assert {d.name: (d.versions, d.max_abs_differences) for d in report.differences} == expected
    # Less than 1 KiB a hundred tensors, also when they differ.
    assert report.exchanged_bytes <= 64 + 8 * report.tensors
    ddp_hooks.sync.broadcast_parameters(model)
    assert ddp_hooks.sync.verify_replicas(model, raise_on_difference=True).in_step


def _report(rank):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if rank < 2 else 0.2, momentum=0.9)
    train_a_step(model, optimizer)
    model[0].weight.grad[0, 0, 0, 0] += 1
    if rank == 1:
        model[0].weight.grad[0, 0, 0, 0] += 0.25
        model.table[3] = 100
    with pytest.raises(ddp_hooks.errors.ReplicasDifferError) as caught:
        ddp_hooks.sync.verify_replicas(model, optimizer=optimizer, raise_on_difference=True)
    report = caught.value.report
    found = {(d.kind, d.name): d for d in report.differences}
    assert found["buffer", "table"].majority == (0, 2)
    assert found["buffer", "table"].versions == ((0, 2), (1,))
    assert found["buffer", "table"].max_abs_differences == (0.0, 97.0, 0.0)
    assert found["gradient", "0.weight"].max_abs_differences == (0.0, 0.25, 0.0)
    assert found["optimizer state", "group 0: lr"].versions == ((0, 1), (2,))
    assert found["optimizer state", "group 0: lr"].max_abs_differences[2] == pytest.approx(0.1)
    text = str(caught.value)
    assert "buffer 'table': ranks 0, 2 | 1; they differ by at most 97 on rank 1" in text
    assert "broadcast_parameters" in text
    return text


def test_the_report_names_kinds_versions_majorities_and_amounts():
    texts = run_ranks(3, _report)
    assert texts[0] == texts[1] == texts[2]


@on_ranks(2)
def test_bits_are_compared_and_special_values_measured(rank):
    tensors = {
        "signed zero": torch.tensor([-0.0 if rank else 0.0]),
        "nan": torch.tensor([math.nan if rank else 1.0]),
        "infinity": torch.tensor([math.inf if rank else 1.0]),
        "bool": torch.tensor([True, bool(rank)]),
        "complex": torch.tensor([3 + 4j if rank else 0j]),
        "half": torch.tensor([1.5 if rank else 1.0], dtype=torch.float16),
        "alike": torch.tensor([math.nan]),
        # Lazily, which is no difference in itself.
        "conjugate": torch.tensor([3 + 4j]).conj() if rank else torch.tensor([3 - 4j]),
        "negated": torch.tensor([1j + rank * 1j]).conj().imag,
        "empty": torch.empty(0),
    }
    report = ddp_hooks.sync.verify_replicas(tensors.values())
    amounts = {list(tensors)[int(d.name)]: d.max_abs_differences[1] for d in report.differences}
    assert math.isnan(amounts.pop("nan"))
    others = {"bool": 1.0, "complex": 5.0, "half": 0.5, "negated": 1.0}
    assert amounts == {"signed zero": 0.0, "infinity": math.inf} | others
    assert all(d.majority is None for d in report.differences)
    assert "no majority" in str(report)


@on_ranks(2)
def test_comparing_changes_nothing(rank):
    # Longer than a piece of the comparison, with the difference in the last element.
    tensor = torch.zeros((1 << 20) + 3)
    tensor[-1] = rank
    report = ddp_hooks.sync.verify_replicas([tensor])
    assert report.differences[0].max_abs_differences == (0.0, 1.0)
    assert tensor[-1] == rank


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_other_names_and_shapes_are_reported_not_hung(rank):
    last = dist.get_world_size() - 1
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=rank != last), nn.Linear(3, 4 if rank else 5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
        model[0].weight += rank
    if rank == 0:
        model(torch.ones(1, 3)).sum().backward()
    report = ddp_hooks.sync.verify_replicas(model)
    text = "\n".join(report.layout_differences)
    assert not report.in_step
    assert f"parameter '1.bias' is float32 [3] on cpu on rank{'s 0, 1' if last == 2 else ' 0'}, missing on rank" in text
    assert "parameter '2.weight' is float32 [5, 3] on cpu on rank 0, float32 [4, 3] on cpu on rank" in text
    assert "gradient '0.weight' is float32 [3, 3] on cpu on rank 0, missing on rank" in text
    # What all ranks have is compared all the same.
    assert [d.name for d in report.differences] == ["0.weight"]
    assert report.differences[0].max_abs_differences == tuple(float(r) for r in range(last + 1))
    with pytest.raises(ddp_hooks.errors.ReplicasDifferError, match="missing on rank"):
        ddp_hooks.sync.verify_replicas(model, raise_on_difference=True)
    # Alike where they can be compared, and nothing in common at all.
    assert not ddp_hooks.sync.verify_replicas([torch.ones(2)] * (1 + rank)).differences
    report = ddp_hooks.sync.verify_replicas([torch.ones(2 + rank)])
    assert not report.in_step
    assert not report.differences


@on_ranks(2)
def test_a_collision_in_half_of_the_digest_is_resolved_by_the_other(rank):
    """Digests that agree in the half that is sent first: the other half decides."""
    original = _C.hash_tensors

    def half_blind(tensors):
        digests = original(tensors)
        digests[:, 0] = 0
        return digests

    replicas._C.hash_tensors = half_blind
    try:
        report = ddp_hooks.sync.verify_replicas([torch.ones(2), torch.full((2,), float(rank))])
    finally:
        replicas._C.hash_tensors = original
    assert [d.name for d in report.differences] == ["1"]
    assert report.exchanged_bytes == 64 + 2 * 2 * 8


@on_ranks(2)
def test_a_compiled_module_is_looked_through(rank):
    model = make_model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    ddp = DistributedDataParallel(model)
    with torch.no_grad():
        model[0].weight.fill_(rank)
    compiled = torch.compile(ddp, backend="eager")
    assert ddp_hooks.sync.verify_replicas(compiled, raise_on_difference=True).in_step
    ddp_hooks.sync.broadcast_parameters(compiled)
    ddp_hooks.sync.average_parameters(compiled)
    assert model[0].weight.eq(rank).all()
    with ddp_hooks.sync.share_parameters(compiled):
        assert model[0].weight.eq(rank).all()
    # Names are the same with and without the wrappers, so they need not be alike on the ranks.
    inner = compiled if rank else ddp
    assert not ddp_hooks.sync.verify_replicas(inner, raise_on_difference=True).layout_differences
    plain = torch.compile(model, backend="eager") if rank else model
    assert {d.name for d in ddp_hooks.sync.verify_replicas(plain).differences} == {"0.weight"}


@on_ranks(2)
def test_what_ddp_ignores_is_meant_to_differ(rank):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight", "1.bias"])
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    ddp(torch.randn(2, 3, generator=torch.Generator().manual_seed(0)) + rank).sum().backward()
    with torch.no_grad():
        model[1].weight += rank
        model[1].weight.grad += rank
    optimizer.step()
    # The gradient of the first layer went through the second, so it differs too; DDP averages it.
    assert ddp_hooks.sync.verify_replicas(ddp, optimizer=optimizer, raise_on_difference=True).in_step
    assert {d.name for d in ddp_hooks.sync.verify_replicas(model).differences} >= {"1.weight"}


@on_ranks(2)
def test_numbers_that_torch_cannot_convert_differ_by_nan(rank):
    for name in ("int1", "uint7", "bits8", "float4_e2m1fn_x2"):
        tensor = torch.full((8,), rank, dtype=torch.uint8).view(getattr(torch, name))
        (difference,) = ddp_hooks.sync.verify_replicas([tensor]).differences
        assert difference.max_abs_differences[0] == 0
        assert math.isnan(difference.max_abs_differences[1])


@on_ranks(2)
def test_refusals_reach_every_rank(rank):
    if rank == 0:
        with pytest.raises(TypeError, match="pass the model itself"):
            ddp_hooks.sync.verify_replicas(3)
    else:
        with pytest.raises(ddp_hooks.errors.RanksDisagreeError, match="rank 0 refused: TypeError"):
            ddp_hooks.sync.verify_replicas(nn.Linear(2, 2))
    with pytest.raises(ddp_hooks.errors.RanksDisagreeError, match="gradients=False"):
        ddp_hooks.sync.verify_replicas(nn.Linear(2, 2), gradients=rank == 0)
    model = nn.EmbeddingBag(4, 3, sparse=True)
    model(torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
    with pytest.raises(ValueError, match=r"gradient 'weight' has layout torch.sparse_coo: make it dense"):
        ddp_hooks.sync.verify_replicas(model)
    assert not ddp_hooks.sync.verify_replicas(model, gradients=False).layout_differences
    # As FSDP leaves a parameter that is not needed now.
    linear = nn.Linear(2, 2)
    linear.weight.grad = torch.ones(2, 2)
    linear.weight.grad.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="gradient 'weight' needs 16 bytes, but its storage has 0: restore"):
        ddp_hooks.sync.verify_replicas(linear)
