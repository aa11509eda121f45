"""The doctor of a module with fully_shard: which parameters are used, by name, rank and step."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from spawn import on_ranks, run_ranks
from test_doctor_page import doctors_part, run
from test_fsdp import CASES, ON, Case, by_rank_and_step, experts, train
from test_fsdp_registration import served
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ddp_hooks
from ddp_hooks import fsdp
from ddp_hooks.errors import RefusedError

pytestmark = served

STEPS = 4


def watch(rank: int, serves: bool, ranks: int) -> None:
    case = CASES["unused here and there"]
    plain = list(train(case, case.make(), rank, range(STEPS)))
    model = case.make()
    model.layers[0].norm.requires_grad_(False)  # type: ignore[index, union-attr]
    if serves:
        fsdp.register(model, ON)
    diagnosis = ddp_hooks.diagnose(model)
    assert str(diagnosis) == "a diagnosis that has not ended"
    with diagnosis:
        ours = list(train(case, model, rank, range(STEPS)))
        with torch.no_grad():
            model(torch.zeros(2, 3, dtype=torch.int64))
    assert ours[0].keys() == plain[0].keys()
    found = diagnosis.findings
    assert (found.ranks, found.steps) == (ranks, STEPS)
    for layer in (1, 2):
        for expert in range(4):
            one = found.verdict(f"layers.{layer}.experts.{expert}.weight")
            expected = tuple(
                "".join("#" if expert in by_rank_and_step(other, step, layer) else "." for step in range(STEPS))
                for other in range(ranks)
            )
            assert one.pattern == expected
            assert one.ranks_used == tuple(other for other in range(ranks) if "#" in expected[other])
            assert one.verdict == ("not used by every rank" if "#" in "".join(expected) else "never used")
            assert one.dense_bytes == 4 * 24 * 24
    assert found.verdict("layers.1.never.weight").verdict == "never used"
    assert found.verdict("layers.0.up.weight").verdict == "used"
    assert found.verdict("layers.0.norm.weight").verdict == "frozen"
    assert found.verdict("layers.0.norm.weight").pattern == ("-" * STEPS,) * ranks
    text = str(diagnosis)
    assert "layers.{1-2}.never" in text
    assert "probably" in text.lower()
    assert ("serves the module already" if serves else "ddp_hooks.fsdp.register(model)") in text
    assert "DDP" not in text
    json.dumps(diagnosis.to_dict())
    # Nothing is left behind, and what is registered goes on.
    group = model._get_fsdp_state()._fsdp_param_groups[0]  # type: ignore[operator]
    assert ("post_backward" in vars(group)) == serves
    list(train(case, model, rank, range(1)))
    with pytest.raises(RuntimeError, match="make another"):
        diagnosis.__enter__()


@pytest.mark.parametrize(("serves", "ranks"), [(False, 2), pytest.param(True, 3, marks=pytest.mark.thorough)])
def test_who_uses_what_in_which_step(serves: bool, ranks: int) -> None:
    run_ranks(ranks, watch, serves, ranks)


@on_ranks(2)
def test_what_is_watched_ends_well(rank: int) -> None:
    # Several passes a step, the last one reduced; a state that is closed meanwhile.
    case = Case(experts, MixedPrecisionPolicy(), sends_unused=True, chosen=by_rank_and_step, passes=2)
    model = case.make()
    state = fsdp.register(model, ON)
    with ddp_hooks.diagnose(model) as diagnosis:
        list(train(case, model, rank, range(2)))
        state.close()
        list(train(case, model, rank, range(2, 3)))
    (pattern, _) = diagnosis.findings.verdict("layers.1.experts.0.weight").pattern
    used = [0 in by_rank_and_step(0, step, 1) + by_rank_and_step(0, step + 7, 1) for step in range(3)]
    assert pattern == "".join("#" if each else "." for each in used)
    assert "post_backward" not in vars(model._get_fsdp_state()._fsdp_param_groups[0])  # type: ignore[operator]

    def fail(step: int) -> None:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"), ddp_hooks.diagnose(model) as diagnosis:
        [fail(step) for step, _ in enumerate(train(case, model, rank, range(2))) if step == 1]
    assert diagnosis.findings.ranks == 2
    assert diagnosis.findings.heard == (rank,)
    assert f" on rank {rank} of 2" in " ".join(str(diagnosis).split())
    assert f"only what rank {rank} saw is known" in " ".join(str(diagnosis).split())

    with ddp_hooks.diagnose(model) as diagnosis:
        for _ in range(2 + rank):
            model.eval()
    assert diagnosis.findings.steps == 0

    other = fully_shard(nn.Linear(8, 8 if rank == 0 else 4, bias=rank == 0))
    with pytest.raises(RefusedError, match="the ranks disagree: parameters"):
        ddp_hooks.diagnose(other).__enter__()


def differ(rank: int) -> Any:
    case = Case(experts, chosen=lambda rank, step, layer: (rank % 2,))
    model = case.make()
    fsdp.register(model, "auto")
    with pytest.raises(RuntimeError, match="has no gradient of"), ddp_hooks.diagnose(model) as diagnosis:
        list(train(case, model, rank, range(1)))
    return diagnosis.findings.steps


def test_an_error_of_ranks_that_differ() -> None:
    assert run_ranks(2, differ) == [0, 0]


# What becomes of the run, and what the report opens with.
BROKEN = {
    "uneven": "different numbers of backward passes: rank 0 waits in the step after 3 finished steps for rank 1, which "
    "has come to the end of its script. Give every rank the same number of batches; skip",
    "raises": "Rank 1 ended with an error (ValueError: a bad batch) while rank 0 waited for it in the step after 3",
    "layers": "for each layer: after 3 finished steps, rank 1 left out blocks.1. Call every layer with fully_shard on",
    "caught": "After 3 finished steps, rank 1 began another forward pass with no finished backward pass for the one "
    "before, as after an error in backward() that the script caught, and rank 0 waits for it.",
}


@pytest.mark.thorough
@pytest.mark.parametrize("how", BROKEN)
def test_a_run_that_breaks_down_is_explained(how: str) -> None:
    arguments = ["--nproc-per-node", "2", "-m", "ddp_hooks", "doctor", "--patience", "3"]
    everything = run([*arguments, "tests/doctored/sharded.py", how], 1)
    printed = " ".join(doctors_part(everything).split())
    assert BROKEN[how] in printed
    assert "3 steps on 2 ranks" in printed
    assert "Also:" not in printed
    if how == "raises":
        assert "ended after 3 steps with ValueError" in everything


@pytest.mark.thorough
def test_what_only_some_ranks_use_is_named() -> None:
    arguments = ["--nproc-per-node", "2", "-m", "ddp_hooks", "doctor"]
    printed = " ".join(doctors_part(run([*arguments, "tests/doctored/sharded.py", "experts"], 0)).split())
    assert "Only some ranks used blocks in some steps" in printed
    assert "set_reduce_scatter_unused_params(True)" in printed
