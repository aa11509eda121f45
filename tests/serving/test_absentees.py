"""What a rank says that has waited in vain: who did not come, where they wait instead, and what to do."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from spawn import RankFailure, run_ranks
from torch import nn

import ddp_hooks
from ddp_hooks.errors import RanksAbsentError
from ddp_hooks.hangs import watcher
from ddp_hooks.hangs.activity import activity
from ddp_hooks.hangs.report import Report
from ddp_hooks.hangs.status import Wait
from ddp_hooks.serving.absentees import describe, naming_absent_ranks

TIMEOUT = timedelta(seconds=2)
TIMED_OUT = "Timed out waiting 2000ms for recv operation to complete"


# --- without processes


def test_ranks_that_did_not_come_are_named_with_what_they_do() -> None:
    report = Report((1, 2), {}, ("rank 1 is elsewhere", "  called from train.py:3", "rank 2 waits in verify_replicas"))
    assert describe("average_parameters", 3.0, (0, 1, 2, 3), 0, report, TIMED_OUT) == (
        "average_parameters: timed out after 3.0 s of waiting for ranks 1, 2, which did not call it. Every rank of the "
        "group (0, 1, 2, 3) must call it, in the same order.\n"
        "  rank 1 is elsewhere\n"
        "    called from train.py:3\n"
        "  rank 2 waits in verify_replicas\n"
        f"The process group's error was: {TIMED_OUT}"
    )


def test_a_rank_that_comes_too_late_is_told_from_one_that_never_does() -> None:
    message = describe("register", 0.0, (0, 1), 1, Report((), {0: 3.0}, ()), "pair closure")
    assert message.startswith("register: lost a connection after 0.0 s. Every rank called it, but rank 1 called it ")
    assert "at least 3.0 s after rank 0, which had timed out by then" in message
    assert "longer timeout" in message


def test_a_connection_that_failed_with_all_there_is_nobodys_fault() -> None:
    message = describe("register", 3.0, (0, 1), 1, Report((), {0: 3.1}, ()), "broken pipe")
    assert "Every rank of the group called it, so a connection between them has failed" in message


def test_without_a_store_only_what_is_known_is_said() -> None:
    message = describe("register", 3.0, (0, 1), 1, None, "broken pipe")
    assert "cannot be named" in message
    assert "Every rank of the group (0, 1) must call it" in message


@pytest.fixture
def explained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let every wait that fails be for rank 1, and note for what was asked."""
    asked: list[str] = []

    def explain(place: str, ranks: Any, seconds: float, said: str, step: int = 0) -> Report:
        asked.append(place)
        return Report((1,), {}, ("rank 1 is elsewhere",))

    monkeypatch.setattr(watcher, "explain", explain)
    monkeypatch.setattr(watcher, "begin", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    return asked


def wait_in_vain(error: Exception) -> None:
    with naming_absent_ranks(None, "register"):  # type: ignore[arg-type]
        raise error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(TIMED_OUT),
        RuntimeError("Wait timeout"),
        RuntimeError("Application timeout caused pair closure"),
        RuntimeError("Read error [127.0.0.1]:10972: Connection reset by peer."),
        dist.DistStoreError("wait timeout after 3000ms, keys: /default_pg/0//cpu//0/rank_1"),
        dist.DistNetworkError("whatever a network says"),
    ],
)
def test_what_timeouts_and_lost_connections_are_called(explained: list[str], error: Exception) -> None:
    with pytest.raises(
        RanksAbsentError, match=r"register: .* s of waiting for rank 1, which did not call it"
    ) as caught:
        wait_in_vain(error)
    assert caught.value.__cause__ is error
    assert str(error) in str(caught.value)
    assert explained == ["register"]


@pytest.mark.parametrize(
    "error", [RuntimeError("expected a float"), ValueError("Timed out"), RanksAbsentError("Timed out")]
)
def test_other_errors_pass_as_they_are(explained: list[str], error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        wait_in_vain(error)
    assert caught.value is error
    assert explained == []


def test_while_this_rank_waits_it_says_so(explained: list[str]) -> None:
    with naming_absent_ranks(None, "register"):  # type: ignore[arg-type]
        wait = activity.known_wait()
    assert wait is not None
    assert (wait.place, wait.ranks) == ("register", (0, 1))
    assert activity.known_wait() is None
    assert explained == []


def test_what_failed_is_forgotten_with_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "failed", Wait("register", (0, 1), 3.0))
    with naming_absent_ranks(None, "register"):  # type: ignore[arg-type]
        assert activity.failed is None


# --- on ranks: groups of their own fail, so that the default one serves the next test


def message_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except RanksAbsentError as error:
        return f"{error}" if isinstance(error.__cause__, RuntimeError) else "an error without its cause"
    return "fine"


def _in_turn(rank: int, calls: list[str]) -> str:
    """Let each rank do what its entry says, on groups that time out soon."""
    watcher.begin()
    world = dist.new_group(timeout=TIMEOUT)
    last_two = dist.new_group([dist.get_world_size() - 2, dist.get_world_size() - 1], timeout=TIMEOUT)
    module = nn.Linear(2, 2)
    before = [parameter.clone() for parameter in module.parameters()]
    actions: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "average": lambda: ddp_hooks.sync.average_parameters(module, process_group=world),
        "verify": lambda: ddp_hooks.sync.verify_replicas(module, process_group=last_two),
        "late": lambda: (time.sleep(3), ddp_hooks.sync.average_parameters(module, process_group=world)),
    }
    message = message_of(actions[calls[rank]])
    assert all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
    dist.barrier()
    # The ranks go on together, and what they left behind misleads nobody.
    assert ddp_hooks.sync.average_parameters(module).tensors == 2
    assert ddp_hooks.sync.verify_replicas(module).in_step
    return message


@pytest.mark.thorough
def test_a_rank_that_does_not_call() -> None:
    alone, silent = run_ranks(2, _in_turn, ["average", "nothing"])
    assert silent == "fine"
    assert alone.startswith("average_parameters: timed out after ")
    assert (
        " s of waiting for rank 1, which did not call it. Every rank of the group (0, 1) must call it, in the same "
        "order.\n  rank 1 (process "
    ) in alone
    assert re.search(r"waiting in (new_group|barrier) at \S*test_absentees\.py:\d+ in _in_turn", alone)


def test_ranks_that_wait_in_different_functions() -> None:
    average, verify = run_ranks(2, _in_turn, ["average", "verify"])
    assert "for rank 1, which did not call it. Every rank" in average
    assert re.search(
        r"\n  rank 1 \(process \d+ on .*\) (has been waiting|timed out|lost a connection) in verify_replicas", average
    )
    assert "for rank 0, which did not call it. Every rank" in verify
    assert re.search(
        r"\n  rank 0 \(process \d+ on .*\) (has been waiting|timed out|lost a connection) in average_parameters", verify
    )


@pytest.mark.thorough
def test_three_ranks_in_three_places() -> None:
    average, verify, silent = run_ranks(3, _in_turn, ["average", "verify", "nothing"])
    assert "for ranks 1, 2, which did not call it" in average
    assert re.search(r"\n  rank 1 .* (has been waiting|timed out|lost a connection) in verify_replicas", average)
    assert "for rank 2, which did not call it" in verify
    assert re.search(r"\n  rank 2 .* waiting in (new_group|barrier)", verify)
    assert "Every rank of the group (1, 2) must call it" in verify
    assert silent == "fine"


@pytest.mark.thorough
def test_two_of_three_wait_for_the_same_rank() -> None:
    first, second, silent = run_ranks(3, _in_turn, ["average", "average", "nothing"])
    assert silent == "fine"
    for message in (first, second):
        assert "for rank 2, which did not call it" in message
        assert "Every rank of the group (0, 1, 2) must call it" in message


@pytest.mark.thorough
def test_a_rank_that_comes_late() -> None:
    alone, late = run_ranks(2, _in_turn, ["average", "late"])
    assert re.search(r"for rank 1, which did not call it.*\n  rank 1 .* at \S*test_absentees\.py:\d+", alone)
    assert "Every rank called it, but rank 1 called it at least" in late
    assert "give the process group a longer timeout" in late


def _forward_alone(rank: int) -> str:
    group = dist.new_group(timeout=TIMEOUT)
    ddp = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(2), process_group=group)
    ddp_hooks.sync.BufferSync(ddp, "average")
    message = "fine" if rank else message_of(lambda: ddp(torch.randn(4, 2)))
    dist.barrier()
    return message


@pytest.mark.thorough
def test_a_forward_that_the_others_do_not_come_to() -> None:
    alone, silent = run_ranks(2, _forward_alone)
    assert silent == "fine"
    assert alone.startswith("a forward with a BufferSync: timed out after ")
    assert "for rank 1, which did not call it" in alone


def _rank_one_dies(rank: int) -> None:
    if rank == 1:
        os._exit(9)
    ddp_hooks.sync.average_parameters(nn.Linear(2, 2))


def test_a_rank_that_died_is_named() -> None:
    with pytest.raises(RankFailure, match=r"average_parameters: .* of waiting for rank 1, which did not call it"):
        run_ranks(2, _rank_one_dies, collective_timeout=5.0)
