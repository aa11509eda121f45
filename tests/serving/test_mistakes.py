"""Plausible mistakes, function by function: each error says what was expected, what was received, and what to do.

The first table needs no processes. The others run on two ranks, all in one process group: each mistake is made on both
ranks, and then on one rank only, where the other has to be told; after each the ranks still work together and no
parameter has changed.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from spawn import on_ranks, run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks
from ddp_hooks import FreezeSchedule, Policy, Tuning, sync
from ddp_hooks.errors import RanksDisagreeError, RefusedError
from ddp_hooks.policies import resolve
from ddp_hooks.serving.parameters import select
from ddp_hooks.statistics import Statistics
from ddp_hooks.wording import short

# Longer than any of ours is, shorter than a checkpoint.
LONGEST_MESSAGE = 700


@dataclass
class Mistake:
    """A call that has to fail, the error, and what the message has to hold."""

    call: Callable[[], Any]
    kind: type[Exception]
    texts: Sequence[str]
    # Whether the other ranks learn of it when one rank alone makes it.
    told: bool = True


def make_model() -> nn.Sequential:
    """Return a model with an encoder, a head, and a decoder that shares the head's weight."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("encoder", nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4)))
    model.add_module("head", nn.Linear(4, 4))
    model.add_module("decoder", nn.Linear(4, 4))
    model.decoder.weight = model.head.weight
    return model


def used_up(model: nn.Module) -> Iterator[nn.Parameter]:
    generator = model.parameters()
    for _ in generator:
        pass
    return generator


MODEL = make_model()
WITH_INTEGERS = nn.Linear(2, 2)
WITH_INTEGERS.scale = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
POLICY = Policy("auto").to_dict()
COUNTERS = Statistics().to_dict()
CHECKPOINT = nn.Linear(1000, 1000).state_dict()
SCHEDULE = FreezeSchedule(MODEL, {1: "head"})


def without(dictionary: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in dictionary.items() if key != name}


def tuned(**settings: Any) -> dict[str, Any]:
    return POLICY | {"tuning": POLICY["tuning"] | settings}


A_DICTIONARY = "expected a dictionary with the fields "
NAMES = "expected something that names parameters of the wrapped module, received "
SELECTORS = "expected patterns, modules or parameters, received "

MISTAKES_ALONE: dict[str, list[Mistake]] = {
    "Policy": [
        Mistake(lambda: Policy(3), TypeError, ["Policy.name: expected a str, received 3"]),
        Mistake(
            lambda: Policy("x", skip_unused="off"), TypeError, ["Policy.skip_unused: expected a bool, received 'off'"]
        ),
        Mistake(lambda: Policy("x", skip_unused=1), TypeError, ["Policy.skip_unused: expected a bool, received 1"]),
        Mistake(lambda: Policy("x", skip_zeros=True), ValueError, ["('off', 'on', 'adaptive'), received True"]),
        Mistake(lambda: Policy("x", skip_zeros="ON"), ValueError, ["('off', 'on', 'adaptive'), received 'ON'"]),
        Mistake(lambda: Policy("x", skip_zeros=torch.ones(2)), ValueError, ["received a Tensor of float32 [2]"]),
        Mistake(lambda: Tuning(pack_bytes=4e6), TypeError, ["pack_bytes: expected a 64-bit int", "received 4000000.0"]),
        Mistake(lambda: Tuning(pack_bytes=-1), ValueError, ["pack_bytes: expected at least 0, received -1"]),
        Mistake(lambda: Tuning(in_place_bytes=2**63), TypeError, ["in_place_bytes: expected a 64-bit int"]),
        Mistake(lambda: Tuning(min_zero_fraction="1%"), TypeError, ["fraction: expected a number, received '1%'"]),
        Mistake(lambda: Tuning(min_zero_fraction=5), ValueError, ["expected a number from 0 to 1, received 5"]),
        Mistake(lambda: Tuning(pack_bytes=None), TypeError, ["pack_bytes: expected a 64-bit", "received None"]),
        Mistake(
            lambda: Policy("x", rebuild_after=True), TypeError, ["rebuild_after: expected a 64-bit", "received True"]
        ),
        Mistake(lambda: Policy("x", tuning={}), TypeError, ["Policy.tuning: expected a ddp_hooks.Tuning, received {}"]),
    ],
    "Policy.from_dict": [
        Mistake(lambda: Policy.from_dict(None), TypeError, [A_DICTIONARY, "received None", "a checkpoint has"]),
        Mistake(lambda: Policy.from_dict("auto"), TypeError, [A_DICTIONARY, "received 'auto'"]),
        Mistake(lambda: Policy.from_dict(Policy("x")), TypeError, [A_DICTIONARY, "received Policy(name='x')"]),
        Mistake(lambda: Policy.from_dict({}), ValueError, [A_DICTIONARY, "received one without name, skip_unused"]),
        Mistake(lambda: Policy.from_dict(CHECKPOINT), ValueError, [A_DICTIONARY, "with unknown weight, bias"]),
        Mistake(lambda: Policy.from_dict(COUNTERS), ValueError, [A_DICTIONARY, "unknown steps, skip_zeros_steps"]),
        Mistake(lambda: Policy.from_dict(POLICY | {"rows": 1}), ValueError, ["with unknown rows; pass"]),
        Mistake(
            lambda: Policy.from_dict(without(POLICY, "skip_unused")),
            ValueError,
            ["received one without skip_unused; pass"],
        ),
        Mistake(lambda: Policy.from_dict(POLICY | {3: 1}), ValueError, ["with unknown 3; pass"]),
        Mistake(lambda: Policy.from_dict(tuned(pack_bytes="3")), TypeError, ["Tuning.pack_bytes", "'3'"]),
        Mistake(lambda: Policy.from_dict(tuned(min_zero_fraction=float("nan"))), ValueError, ["received nan"]),
        Mistake(lambda: Policy.from_dict(tuned(rows=1)), ValueError, ["Tuning: ", "with unknown rows; pass"]),
        Mistake(lambda: Policy.from_dict(POLICY | {"tuning": 3}), TypeError, ["Tuning: ", A_DICTIONARY, "received 3"]),
    ],
    "resolve": [
        Mistake(
            lambda: resolve(None), TypeError, ["expected a ddp_hooks.Policy or the name of a preset, received None"]
        ),
        Mistake(lambda: resolve("Auto"), ValueError, ["expected one of allreduce, skip_unused", "received 'Auto'"]),
        Mistake(lambda: resolve(""), ValueError, ["expected one of allreduce", "received ''"]),
        Mistake(lambda: resolve("a" * 9999), ValueError, ["expected one of allreduce", "received 'aaa"]),
        Mistake(lambda: resolve(POLICY), TypeError, ["expected a ddp_hooks.Policy or the name", "received {"]),
        Mistake(lambda: resolve(CHECKPOINT), TypeError, ["'weight': a Tensor of float32 [1000, 1000]"]),
        Mistake(lambda: resolve(MODEL), TypeError, ["received a Sequential"]),
        Mistake(lambda: resolve(["auto"]), TypeError, ["received ['auto']"]),
        Mistake(lambda: resolve(True), TypeError, ["received True"]),
        Mistake(lambda: resolve(b"auto"), TypeError, ["received b'auto'"]),
    ],
    "Statistics.from_dict": [
        Mistake(lambda: Statistics.from_dict(None), TypeError, [A_DICTIONARY, "received None"]),
        Mistake(lambda: Statistics.from_dict(Statistics()), TypeError, [A_DICTIONARY, "received Statistics(steps=0"]),
        Mistake(lambda: Statistics.from_dict({}), ValueError, ["received one without steps, skip_zeros_steps"]),
        Mistake(lambda: Statistics.from_dict(CHECKPOINT), ValueError, ["with unknown weight, bias; pass"]),
        Mistake(lambda: Statistics.from_dict(POLICY), ValueError, ["with unknown name, skip_unused"]),
        Mistake(lambda: Statistics.from_dict(without(COUNTERS, "steps")), ValueError, ["one without steps; pass"]),
        Mistake(lambda: Statistics.from_dict(COUNTERS | {"rows": 1}), ValueError, ["with unknown rows; pass"]),
        Mistake(lambda: Statistics.from_dict(COUNTERS | {"steps": "3"}), TypeError, ["steps: expected an int", "'3'"]),
        Mistake(lambda: Statistics.from_dict(COUNTERS | {"steps": 3.0}), TypeError, ["expected an int, received 3.0"]),
        Mistake(
            lambda: Statistics.from_dict(COUNTERS | {"steps": True}), TypeError, ["expected an int, received True"]
        ),
        Mistake(lambda: Statistics.from_dict(COUNTERS | {"messages": -1}), ValueError, ["0 or more", "received -1"]),
        Mistake(
            lambda: Statistics.from_dict(COUNTERS | {"hook_seconds": float("nan")}),
            ValueError,
            ["hook_seconds: expected a finite number, 0 or more, received nan"],
        ),
        Mistake(lambda: Statistics.from_dict(COUNTERS | {"hook_seconds": float("inf")}), ValueError, ["received inf"]),
        Mistake(lambda: Statistics.from_dict(COUNTERS | {"hook_seconds": None}), TypeError, ["received None"]),
        Mistake(
            lambda: Statistics.from_dict(COUNTERS | {"steps": 10**400}),
            ValueError,
            ["0 or more, received 10"],
        ),
        Mistake(lambda: Statistics() + 3, TypeError, ["unsupported operand", "'Statistics' and 'int'"]),
    ],
    "freeze": [
        Mistake(lambda: ddp_hooks.freeze(MODEL), ValueError, [SELECTORS, "none; '*' means all"]),
        Mistake(lambda: ddp_hooks.freeze(None, "head"), TypeError, ["expected a DDP module or the model", "None"]),
        Mistake(lambda: ddp_hooks.freeze(nn.Linear, "*"), TypeError, ["expected a DDP module", "received <class"]),
        Mistake(
            lambda: ddp_hooks.freeze(list(MODEL.parameters()), "*"), TypeError, ["received [a Parameter of float32"]
        ),
        Mistake(
            lambda: ddp_hooks.freeze(MODEL, ["encoder", "head"]),
            TypeError,
            [SELECTORS, "as separate arguments"],
        ),
        Mistake(
            lambda: ddp_hooks.freeze(MODEL, MODEL.parameters()),
            TypeError,
            [SELECTORS, "as separate arguments"],
        ),
        Mistake(lambda: ddp_hooks.freeze(MODEL, "head", None), TypeError, [SELECTORS + "None"]),
        Mistake(lambda: ddp_hooks.freeze(MODEL, "head", "encodr"), ValueError, [NAMES, "did you mean 'encoder'?"]),
        Mistake(lambda: ddp_hooks.freeze(MODEL, "module.head"), ValueError, ["start with 'module.': pass 'head'"]),
        Mistake(lambda: ddp_hooks.freeze(MODEL, ""), ValueError, [NAMES + "''", "its parameters are encoder.0.weight"]),
        Mistake(
            lambda: ddp_hooks.freeze(MODEL, nn.Linear(2, 2)), ValueError, ["received a Linear", "within the wrapped"]
        ),
        Mistake(lambda: ddp_hooks.freeze(MODEL, MODEL.encoder[1]), ValueError, ["received a ReLU", "has parameters"]),
        Mistake(lambda: ddp_hooks.freeze(nn.ReLU(), "*"), ValueError, [NAMES, "the module has no parameters"]),
        Mistake(lambda: ddp_hooks.freeze(MODEL, MODEL.head.weight[0]), ValueError, ["float32 [4]", "not a copy or"]),
        Mistake(lambda: ddp_hooks.freeze(MODEL, "encoder.2.running_mean"), ValueError, ["is a buffer, which has no"]),
        Mistake(
            lambda: ddp_hooks.freeze(MODEL, "head", eval_norms="no"), TypeError, ["eval_norms to be True or False"]
        ),
        Mistake(lambda: ddp_hooks.freeze(MODEL, "head", keep_gradients=0), TypeError, ["keep_gradients to be True or"]),
    ],
    "unfreeze": [
        Mistake(lambda: ddp_hooks.unfreeze(MODEL), ValueError, [SELECTORS, "none; '*' means all"]),
        Mistake(lambda: ddp_hooks.unfreeze("model", "head"), TypeError, ["expected a DDP module", "'model'"]),
        Mistake(lambda: ddp_hooks.unfreeze(MODEL, 3), TypeError, [SELECTORS + "3"]),
        Mistake(lambda: ddp_hooks.unfreeze(MODEL, {"head": 1}), TypeError, [SELECTORS + "{'head': 1}"]),
        Mistake(lambda: ddp_hooks.unfreeze(MODEL, "hed"), ValueError, [NAMES, "did you mean 'head'?"]),
        Mistake(lambda: ddp_hooks.unfreeze(MODEL, "Head"), ValueError, [NAMES, "did you mean 'head'?"]),
        Mistake(lambda: ddp_hooks.unfreeze(MODEL, torch.ones(3)), ValueError, ["received a Tensor of float32 [3]"]),
        Mistake(
            lambda: ddp_hooks.unfreeze(MODEL, nn.Module()), ValueError, ["received a Module", "within the wrapped"]
        ),
        Mistake(lambda: ddp_hooks.unfreeze(WITH_INTEGERS, "*"), ValueError, ["has dtype torch.int8; leave it out"]),
        Mistake(lambda: ddp_hooks.unfreeze(MODEL, "head", train_norms="x"), TypeError, ["train_norms to be True or"]),
    ],
    "FreezeSchedule": [
        Mistake(lambda: FreezeSchedule(MODEL), ValueError, ["expected something to freeze or unfreeze", "{1000:"]),
        Mistake(lambda: FreezeSchedule(MODEL, {}, {}), ValueError, ["received no steps"]),
        Mistake(
            lambda: FreezeSchedule({1: "head"}, MODEL), TypeError, ["expected a DDP module", "received {1: 'head'}"]
        ),
        Mistake(lambda: FreezeSchedule(MODEL, "head"), TypeError, ["freeze to be a dictionary that maps", "'head'"]),
        Mistake(lambda: FreezeSchedule(MODEL, [(1, "head")]), TypeError, ["as in {1000: 'encoder'}", "[(1, 'head')]"]),
        Mistake(lambda: FreezeSchedule(MODEL, {"head": 1}), TypeError, ["each step in", "int of at least 0", "'head'"]),
        Mistake(lambda: FreezeSchedule(MODEL, {"1": "head"}), TypeError, ["int of at least 0, received '1'"]),
        Mistake(lambda: FreezeSchedule(MODEL, {1.0: "head"}), TypeError, ["int of at least 0, received 1.0"]),
        Mistake(lambda: FreezeSchedule(MODEL, {-1: "head"}), ValueError, ["at least 0, received -1"]),
        Mistake(lambda: FreezeSchedule(MODEL, {1: 2}), TypeError, [SELECTORS + "2"]),
        Mistake(lambda: FreezeSchedule(MODEL, {1: []}), ValueError, [SELECTORS, "'*' means all of them"]),
        Mistake(lambda: FreezeSchedule(MODEL, {1: ["head", "hea"]}), ValueError, [NAMES + "'hea'", "did you mean"]),
        Mistake(lambda: FreezeSchedule(MODEL, unfreeze={1: "hea"}), ValueError, [NAMES + "'hea'", "did you mean"]),
        Mistake(lambda: FreezeSchedule(WITH_INTEGERS, unfreeze={1: "*"}), ValueError, ["scale has dtype torch.int8"]),
        Mistake(
            lambda: FreezeSchedule(MODEL, {1: "head"}, eval_norms=1), TypeError, ["eval_norms to be True or False"]
        ),
    ],
    "FreezeSchedule.load_state_dict": [
        Mistake(lambda: SCHEDULE.load_state_dict(None), TypeError, [A_DICTIONARY + "next_step", "received None"]),
        Mistake(lambda: SCHEDULE.load_state_dict(3), TypeError, [A_DICTIONARY + "next_step", "received 3"]),
        Mistake(lambda: SCHEDULE.load_state_dict([3]), TypeError, [A_DICTIONARY + "next_step", "received [3]"]),
        Mistake(lambda: SCHEDULE.load_state_dict({}), ValueError, ["received one without next_step; pass what"]),
        Mistake(lambda: SCHEDULE.load_state_dict({"step": 3}), ValueError, ["without next_step and with unknown step"]),
        Mistake(lambda: SCHEDULE.load_state_dict(CHECKPOINT), ValueError, ["with unknown weight, bias"]),
        Mistake(lambda: SCHEDULE.load_state_dict({"next_step": "3"}), TypeError, ["int of at least 0, received '3'"]),
        Mistake(lambda: SCHEDULE.load_state_dict({"next_step": 3.0}), TypeError, ["int of at least 0, received 3.0"]),
        Mistake(lambda: SCHEDULE.load_state_dict({"next_step": None}), TypeError, ["int of at least 0, received None"]),
        Mistake(lambda: SCHEDULE.load_state_dict({"next_step": -3}), ValueError, ["at least 0, received -3"]),
    ],
    "without a process group": [
        Mistake(
            function, RuntimeError, ["expected an initialized process group, found none; call torch.distributed.init"]
        )
        for function in (
            lambda: ddp_hooks.sync.broadcast_parameters(MODEL),
            lambda: ddp_hooks.sync.average_parameters(MODEL),
            lambda: ddp_hooks.sync.verify_replicas(MODEL),
            lambda: ddp_hooks.sync.share_parameters(MODEL),
            lambda: ddp_hooks.sync.PeriodicModelAverager(2),
        )
    ],
    "skip_unused_hook": [
        Mistake(
            lambda: ddp_hooks.skip_unused_hook(None, torch.ones(3)),
            TypeError,
            ["expected a GradBucket, received Tensor"],
        ),
        Mistake(
            lambda: ddp_hooks.skip_unused_hook(None, None), TypeError, ["expected a GradBucket, received NoneType"]
        ),
    ],
    "not a DDP module": [
        Mistake(
            lambda function=function, wrong=wrong: function(wrong),
            TypeError,
            ["expected a DistributedDataParallel module, received "],
        )
        for function in (ddp_hooks.register, ddp_hooks.SkipUnusedState, ddp_hooks.sync.BufferSync, ddp_hooks.rebuild)
        for wrong in (MODEL, None, "ddp", nn.Linear, DistributedDataParallel, [MODEL], 3)
    ],
}


def fingerprint(model: nn.Module) -> list[Any]:
    """Return all that a mistake could have changed."""
    state = [(p.requires_grad, p.grad is None, p.detach().clone()) for p in model.parameters()]
    return [*state, [module.training for module in model.modules()], [b.clone() for b in model.buffers()]]


def assert_unchanged(before: list[Any], after: list[Any]) -> None:
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def assert_fails(mistake: Mistake) -> None:
    error = error_of(mistake.call)
    message = str(error)
    # What all ranks refuse together is a kind of its own, for those that go on without.
    kind = RuntimeError if type(error) is RefusedError else type(error)
    assert kind is mistake.kind, f"expected {mistake.kind.__name__}, got {type(error).__name__}: {message}"
    missing = [text for text in mistake.texts if text not in message]
    assert not missing, f"{message!r} does not say {missing}"
    assert len(message) < LONGEST_MESSAGE, message


def error_of(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(mistake, id=f"{function}-{number}")
        for function, mistakes in MISTAKES_ALONE.items()
        for number, mistake in enumerate(mistakes)
    ],
)
def test_a_mistake_says_so_and_changes_nothing(mistake: Mistake) -> None:
    before = fingerprint(MODEL), fingerprint(WITH_INTEGERS), SCHEDULE.state_dict()
    assert_fails(mistake)
    assert_unchanged(before[0], fingerprint(MODEL))
    assert_unchanged(before[1], fingerprint(WITH_INTEGERS))
    assert SCHEDULE.state_dict() == before[2]


# --- on two ranks

TENSORS = "expected a module, a DDP module or tensors, received "
ELEMENTS = "expected every element to be a tensor, received "


def mistakes_with_sources(call: Callable[[Any], Any], model: nn.Module) -> list[Mistake]:
    """Return what can be wrong with the tensors that a function takes; ``call`` passes them to it."""
    empty = "expected at least one tensor, received an empty "
    return [
        Mistake(lambda: call(used_up(model)), ValueError, [empty + "generator, which may have been consumed"]),
        Mistake(lambda: call([]), ValueError, [empty + "list; pass the model itself, or a fresh model.parameters()"]),
        Mistake(lambda: call(None), TypeError, [TENSORS + "NoneType (None); pass the model itself"]),
        Mistake(lambda: call("model"), TypeError, [TENSORS + "str ('model'); pass the model itself"]),
        Mistake(lambda: call(nn.Linear), TypeError, [TENSORS + "type (<class"]),
        Mistake(lambda: call(torch.optim.SGD(model.parameters(), lr=0.1)), TypeError, [TENSORS + "SGD (a SGD)"]),
        Mistake(
            lambda: call(model.state_dict()),
            TypeError,
            [TENSORS + "OrderedDict", "for a dictionary, pass its .values()"],
        ),
        Mistake(lambda: call(model.named_parameters()), TypeError, [ELEMENTS + "tuple at position 0", "parameters()"]),
        Mistake(lambda: call([model]), TypeError, [ELEMENTS + "Sequential at position 0", "pass the model itself"]),
        Mistake(lambda: call([torch.ones(2), 3.5]), TypeError, [ELEMENTS + "float at position 1 (3.5)"]),
        Mistake(
            lambda: call([torch.eye(2).to_sparse()]), ValueError, ["'0' has layout torch.sparse_coo: make it dense"]
        ),
        Mistake(lambda: call([torch.ones(2, device="meta")]), ValueError, ["is on the meta device", "materialise it"]),
        Mistake(lambda: call(nn.LazyLinear(3)), ValueError, ["uninitialized parameter"]),
        Mistake(lambda: call(1 / 0 for _ in range(3)), ZeroDivisionError, ["division by zero"]),
    ]


def mistakes_with_groups(call: Callable[[Any], Any]) -> list[Mistake]:
    """Return what can be wrong with a process group; nobody can be told, because it is not known who."""
    gone = dist.new_group([0, 1])
    dist.destroy_process_group(gone)
    outside = dist.GroupMember.NON_GROUP_MEMBER
    kind = "expected process_group to be a process group or None, received "
    return [
        Mistake(lambda: call([0, 1]), TypeError, [kind + "[0, 1]; for ranks, pass torch.dist"], told=False),
        Mistake(lambda: call("gloo"), TypeError, [kind + "'gloo'"], told=False),
        Mistake(lambda: call(0), TypeError, [kind + "0"], told=False),
        Mistake(lambda: call(gone), ValueError, ["received one that was destroyed; make a new one"], told=False),
        Mistake(lambda: call(outside), ValueError, ["that this rank is in; call it only on members"], told=False),
    ]


def broadcast_mistakes(model: nn.Module, ddp: DistributedDataParallel) -> list[Mistake]:
    call = ddp_hooks.sync.broadcast_parameters
    of_group = "expected src to be a rank of the process group, "
    return [
        *mistakes_with_sources(call, model),
        *mistakes_with_groups(lambda group: call(model, process_group=group)),
        Mistake(
            lambda: call(model, 2),
            ValueError,
            [of_group + "0 to 1, received 2; ranks are counted within"],
        ),
        Mistake(lambda: call(model, -1), ValueError, [of_group + "0 to 1, received -1"]),
        Mistake(lambda: call(model, "0"), TypeError, [of_group + "an int from 0 to 1, received '0'"]),
        Mistake(lambda: call(model, None), TypeError, ["an int from 0 to 1, received None"]),
        Mistake(lambda: call(model, 0.0), TypeError, ["an int from 0 to 1, received 0.0"]),
        Mistake(lambda: call(model, False), TypeError, ["an int from 0 to 1, received False"]),
        Mistake(lambda: call(model, dist.group.WORLD), TypeError, ["an int from 0 to 1, received "]),
        Mistake(lambda: call(model, buffers="ignore"), TypeError, ["buffers to be True or False, received 'ignore'"]),
        Mistake(lambda: call(model, async_op=None), TypeError, ["async_op to be True or False, received None"]),
        Mistake(
            lambda: call([torch.ones(1).expand(3)]), ValueError, ["is expanded (strides [0]): make it .contiguous()"]
        ),
    ]


def average_mistakes(model: nn.Module, ddp: DistributedDataParallel) -> list[Mistake]:
    call = ddp_hooks.sync.average_parameters
    numbers = "expected weights to be a number, a list with one number per rank, or None, received "
    return [
        *mistakes_with_sources(call, model),
        *mistakes_with_groups(lambda group: call(model, process_group=group)),
        Mistake(lambda: call(model, weights="0.5"), TypeError, [numbers + "'0.5'"]),
        Mistake(lambda: call(model, weights="11"), TypeError, [numbers + "'11'"]),
        Mistake(lambda: call(model, weights=True), TypeError, [numbers + "True"]),
        Mistake(lambda: call(model, weights={0: 1.0}), TypeError, [numbers + "{0: 1.0}"]),
        Mistake(lambda: call(model, weights=torch.ones(2)), TypeError, [numbers + "a Tensor of float32 [2]"]),
        Mistake(lambda: call(model, weights=[1, None]), TypeError, [numbers + "None"]),
        Mistake(lambda: call(model, weights=[1, 2, 3]), ValueError, ["each of the 2 ranks, received 3: [1, 2, 3]"]),
        Mistake(lambda: call(model, weights=[1, -2]), ValueError, ["weight that is not negative, received -2.0"]),
        Mistake(lambda: call(model, weights=float("nan")), ValueError, ["weight that is not negative, received nan"]),
        Mistake(lambda: call(model, buffers=True), ValueError, ["one of average, broadcast, ignore, received True"]),
        Mistake(
            lambda: call(model, buffers=["average"]), ValueError, ["average, broadcast, ignore, received ['average']"]
        ),
        Mistake(lambda: call(model, async_op="yes"), TypeError, ["async_op to be True or False, received 'yes'"]),
        Mistake(lambda: call([torch.ones(2).to(torch.uint64)]), ValueError, ["is uint64; broadcast it instead"]),
        Mistake(
            lambda: call([torch.ones(2, dtype=torch.cfloat).conj()]), ValueError, ["conjugate: make it .resolve_conj()"]
        ),
    ]


def verify_mistakes(model: nn.Module, ddp: DistributedDataParallel) -> list[Mistake]:
    call = ddp_hooks.sync.verify_replicas
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = "expected optimizer to be a torch.optim.Optimizer or None, received "
    return [
        *mistakes_with_sources(call, model),
        *mistakes_with_groups(lambda group: call(model, process_group=group)),
        Mistake(lambda: call(model, optimizer=[optimizer]), TypeError, [expected + "[a SGD]"]),
        Mistake(lambda: call(model, optimizer=torch.optim.SGD), TypeError, [expected + "<class"]),
        Mistake(lambda: call(model, optimizer=optimizer.state_dict()), TypeError, [expected + "{'param_groups'"]),
        Mistake(lambda: call(model, optimizer=model), TypeError, [expected + "a Sequential"]),
        Mistake(lambda: call(model, gradients="none"), TypeError, ["gradients to be True or False, received 'none'"]),
        Mistake(lambda: call(model, raise_on_difference=2), TypeError, ["raise_on_difference to be True or False"]),
    ]


def averager_mistakes(model: nn.Module, ddp: DistributedDataParallel) -> list[Mistake]:
    make = ddp_hooks.sync.PeriodicModelAverager

    def call(params: Any) -> None:
        make(2).average_parameters(params)

    expected = "expected the parameters of a model or the parameter groups of an optimizer, received "
    return [
        Mistake(lambda: make(0), ValueError, ["expected period to be at least 1, received 0"], told=False),
        Mistake(lambda: make(2.5), TypeError, ["period to be an int of at least 1"], told=False),
        Mistake(lambda: make("4"), TypeError, ["period to be an int of at least 1, received '4'"], told=False),
        Mistake(lambda: make(None), TypeError, ["period to be an int of at least 1, received None"], told=False),
        Mistake(lambda: make(2, -1), ValueError, ["warmup_steps to be at least 0, received -1"], told=False),
        Mistake(lambda: make(2, "8"), TypeError, ["to be an int of at least 0, received '8'"], told=False),
        Mistake(lambda: make(2, 0, [0, 1]), TypeError, ["process_group to be a process group or None"], told=False),
        Mistake(
            lambda: call(used_up(model)), ValueError, ["expected at least one tensor, received an empty generator"]
        ),
        Mistake(lambda: call([]), ValueError, ["expected at least one tensor, received an empty"]),
        Mistake(lambda: call([{"params": []}]), ValueError, ["expected at least one tensor, received an empty"]),
        Mistake(
            lambda: call([{"parameters": []}]), ValueError, ["with a key 'params', received one with ['parameters']"]
        ),
        Mistake(lambda: call(None), TypeError, [expected + "None; pass model.parameters()"]),
        Mistake(lambda: call(torch.optim.SGD(model.parameters(), lr=0.1)), TypeError, [expected + "a SGD"]),
        Mistake(lambda: call(model.state_dict()), TypeError, [expected + "{'decoder.bias': a Tensor"]),
        Mistake(lambda: call(model.named_parameters()), TypeError, [ELEMENTS + "tuple at position 0"]),
        Mistake(lambda: call([torch.ones(2), 3]), TypeError, [ELEMENTS + "int at position 1"]),
    ]


def sharing_mistakes(model: nn.Module, ddp: DistributedDataParallel) -> list[Mistake]:
    call = ddp_hooks.sync.share_parameters
    view = nn.Linear(2, 2)
    view.register_buffer("view", view.weight.detach()[0])
    expanded = nn.Linear(2, 2)
    expanded.weight = nn.Parameter(torch.ones(1).expand(2, 2), requires_grad=False)
    expected = "expected a module or a DDP module, received "
    return [
        *mistakes_with_groups(lambda group: call(model, process_group=group)),
        Mistake(lambda: call(None), TypeError, [expected + "NoneType (None); pass the model itself"]),
        Mistake(lambda: call(model.parameters()), TypeError, [expected + "generator", "pass the model itself"]),
        Mistake(lambda: call(list(model.parameters())), TypeError, [expected + "list ([a Parameter of float32"]),
        Mistake(lambda: call(nn.Linear), TypeError, [expected + "type (<class"]),
        Mistake(lambda: call(nn.Linear(2, 2, device="meta")), ValueError, ["is on the meta device", "materialise it"]),
        Mistake(lambda: call(nn.LazyLinear(3)), ValueError, ["uninitialized parameter"]),
        Mistake(lambda: call(view), ValueError, ["buffer 'view' is a view of a parameter: replace it with a .clone()"]),
        Mistake(lambda: call(expanded), ValueError, ["parameter 'weight' is expanded"]),
    ]


def buffer_sync_mistakes(model: nn.Module, ddp: DistributedDataParallel) -> list[Mistake]:
    call = ddp_hooks.sync.BufferSync
    modes = "expected mode to be one of broadcast, average, changed, before_eval, never, received "
    without_buffers = DistributedDataParallel(make_model(), broadcast_buffers=False)
    synced = DistributedDataParallel(make_model())
    ddp_hooks.sync.BufferSync(synced)
    return [
        Mistake(lambda: call(model), TypeError, ["expected a DistributedDataParallel module", "wrap the"], told=False),
        Mistake(lambda: call(ddp, "mean"), ValueError, [modes + "'mean'"]),
        Mistake(lambda: call(ddp, "Average"), ValueError, [modes + "'Average'"]),
        Mistake(lambda: call(ddp, None), ValueError, [modes + "None"]),
        Mistake(lambda: call(ddp, True), ValueError, [modes + "True"]),
        Mistake(lambda: call(ddp, ["never"]), ValueError, [modes + "['never']"]),
        Mistake(lambda: call(ddp, 3), ValueError, [modes + "3"]),
        Mistake(lambda: call(without_buffers, "changed"), ValueError, ["broadcast_buffers=False; pass True"]),
        Mistake(lambda: call(without_buffers), ValueError, ["broadcast_buffers=False; pass True"]),
        Mistake(lambda: call(synced, "never"), ValueError, ["without a buffer hook; remove() the BufferSync it has"]),
    ]


def assert_works(model: nn.Module) -> None:
    """Check that the ranks still understand each other, and that the model is what it was."""
    assert ddp_hooks.sync.verify_replicas(model).in_step
    assert ddp_hooks.sync.average_parameters(model).tensors > 0


def make_mistakes(rank: int, make: Callable[[nn.Module, DistributedDataParallel], list[Mistake]]) -> int:
    """Make each mistake on both ranks, and then on either one alone."""
    model = make_model()
    ddp = DistributedDataParallel(make_model())
    mistakes = make(model, ddp)
    before = fingerprint(model)
    for number, mistake in enumerate(mistakes):
        for makes_it in ({0, 1}, {0}, {1}) if mistake.told else ({0, 1},):
            what = f"mistake {number} on {makes_it}"
            try:
                if rank in makes_it:
                    assert_fails(mistake)
                else:
                    other = Mistake(
                        lambda: ddp_hooks.sync.verify_replicas(model),
                        RanksDisagreeError,
                        [f"rank {1 - rank} refused: {mistake.kind.__name__}: ", *mistake.texts, "no tensor changed"],
                    )
                    assert_fails(other)
            except AssertionError as error:
                raise AssertionError(f"{what}: {error}") from error
        assert_works(model)
        assert_unchanged(before, fingerprint(model))
        assert not hasattr(ddp, "buffer_hook")
    return len(mistakes)


@pytest.mark.parametrize(
    "make",
    [
        broadcast_mistakes,
        average_mistakes,
        verify_mistakes,
        averager_mistakes,
        sharing_mistakes,
        buffer_sync_mistakes,
    ],
)
def test_a_mistake_on_any_rank_is_told_to_all(make: Callable[..., list[Mistake]]) -> None:
    made = run_ranks(2, make_mistakes, make)
    assert made[0] == made[1] >= 10


@on_ranks(2)
def test_ranks_that_disagree_are_told_how(rank: int) -> None:
    model = make_model()
    other = nn.Linear(4, 4, bias=rank == 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = ddp_hooks.sync.PeriodicModelAverager(2 + rank)
    cases: list[tuple[Callable[[], Any], list[str]]] = [
        (
            lambda: ddp_hooks.sync.broadcast_parameters(model, rank),
            ["rank 0 called broadcast_parameters(src=0", "(src=1"],
        ),
        (lambda: ddp_hooks.sync.broadcast_parameters(model, buffers=rank == 0), ["buffers=True", "buffers=False"]),
        (lambda: ddp_hooks.sync.broadcast_parameters(model, async_op=rank == 0), ["async_op=True", "async_op=False"]),
        (
            lambda: ddp_hooks.sync.broadcast_parameters(other),
            ["parameter 'bias' is float32 [4] on cpu on rank 0, missing on"],
        ),
        (
            lambda: ddp_hooks.sync.average_parameters(model, weights=[1, 1 + rank]),
            ["weights=[1.0, 1.0]", "weights=[1.0, 2.0]"],
        ),
        (
            lambda: ddp_hooks.sync.average_parameters(model, weights=1 if rank else None),
            ["weights=None", "one number per rank"],
        ),
        (
            lambda: ddp_hooks.sync.average_parameters(model, buffers="ignore" if rank else "average"),
            ["buffers='ignore'"],
        ),
        (lambda: ddp_hooks.sync.verify_replicas(model, gradients=rank == 0), ["gradients=False"]),
        (lambda: ddp_hooks.sync.verify_replicas(model, optimizer=optimizer if rank else None), ["optimizer=True"]),
        (lambda: averager.average_parameters(model.parameters()), ["(period=2, warmup_steps=0, step=0)", "(period=3,"]),
        (lambda: ddp_hooks.sync.share_parameters(other), ["parameter 'bias' is "]),
        (
            lambda: (ddp_hooks.sync.average_parameters if rank else ddp_hooks.sync.broadcast_parameters)(model),
            ["rank 0 called broadcast_parameters(", "rank 1 called average_parameters("],
        ),
        (
            lambda: (ddp_hooks.sync.share_parameters if rank else ddp_hooks.sync.verify_replicas)(model),
            ["rank 0 called verify_replicas(", "rank 1 called share_parameters("],
        ),
        (lambda: ddp_hooks.sync.average_parameters(used_up(model) if rank else model.parameters()), []),
    ]
    before = fingerprint(model)
    for call, texts in cases[:-1]:
        assert_fails(Mistake(call, RanksDisagreeError, [*texts, "Make the same call with the same tensors on"]))
        assert_works(model)
    kind, text = (
        (ValueError, "empty generator") if rank else (RanksDisagreeError, "rank 1 refused: ValueError: expected at")
    )
    assert_fails(Mistake(cases[-1][0], kind, [text]))
    # Known to all ranks, which raise it together.
    assert_fails(
        Mistake(lambda: ddp_hooks.sync.average_parameters(model, weights=0), ValueError, ["rank a weight above 0"])
    )
    assert_works(model)
    assert_unchanged(before, fingerprint(model))


@on_ranks(2)
def test_a_module_may_be_without_tensors(rank: int) -> None:
    # What a script that goes through the parts of a model meets; an empty iterable is another matter.
    for module in (nn.ReLU(), nn.Sequential()):
        assert ddp_hooks.sync.broadcast_parameters(module).tensors == 0
        assert ddp_hooks.sync.average_parameters(module).tensors == 0
        assert ddp_hooks.sync.verify_replicas(module).in_step
        ddp_hooks.sync.share_parameters(module).release()
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    buffer_sync = ddp_hooks.sync.BufferSync(ddp, "before_eval")
    ddp.eval()
    assert buffer_sync.stats().payload_bytes < 100
    buffer_sync.remove()
    other = ddp_hooks.sync.BufferSync(ddp, "changed")
    buffer_sync.remove()  # does nothing, and leaves the other one alone
    ddp(torch.ones(2, 2)).sum().backward()
    other.remove()
    # No gradient on any rank: nothing to average, which is no mistake.
    ddp_hooks.sync.PeriodicModelAverager(2).average_parameters(nn.Linear(2, 2).parameters())


# --- the hook


def assert_names(call: Callable[[], Any], kind: type[Exception], beginning: str, end: str) -> None:
    """Assert that a typo's error begins with the function that was called, and shows few frames of this package."""
    error = error_of(call)
    assert type(error) is kind, error
    assert str(error).startswith(beginning), error
    assert str(error).endswith(end), error
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/ddp_hooks/" in frame.filename]
    assert len(frames) <= 3, frames
    shown = traceback.format_exception(error)
    assert not any("During handling" in line for line in shown), shown


@on_ranks(2)
def test_typos(rank: int) -> None:
    names = "expected one of allreduce, skip_unused, skip_zeros, auto, or a ddp_hooks.Policy, received 'skip_unsued'"
    name, field = "; did you mean 'skip_unused'?", "received 'rebuild_afer'; did you mean 'rebuild_after'?"
    ddp = DistributedDataParallel(make_model(), find_unused_parameters=True)
    for function, call in (("register", ddp_hooks.register), ("SkipUnusedState", ddp_hooks.SkipUnusedState)):
        assert_names(lambda call=call: call(ddp, "skip_unsued"), ValueError, f"{function}: {names}", name)
        assert_names(lambda call=call: call(ddp, rebuild_afer=10), TypeError, f"{function}: expected fields", field)
        # The other ranks are told who has made it.
        if rank == 0:
            assert_names(lambda call=call: call(ddp, "skip_unsued"), ValueError, f"{function}: {names}", name)
        else:
            told = f"{function}: refused on every rank. rank 0: {names}"
            assert_names(lambda call=call: call(ddp), RefusedError, told, name)
    state = ddp_hooks.register(ddp)
    assert_names(lambda: state.set_policy("skip_unsued"), ValueError, f"set_policy: {names}", name)
    assert_names(lambda: state.set_policy("auto", rebuild_afer=1), TypeError, "set_policy: expected fields", field)
    assert_names(lambda: ddp_hooks.register(ddp, "skip_unsued"), ValueError, f"register: {names}", name)
    assert_names(lambda: ddp_hooks.enable("skip_unsued"), ValueError, f"enable: {names}", name)
    by_pattern = {
        "unused": lambda: state.unused("hed").__enter__(),
        "declare_unused": lambda: state.declare_unused("hed"),
        "freeze": lambda: ddp_hooks.freeze(ddp, "hed"),
        "unfreeze": lambda: ddp_hooks.unfreeze(ddp, "hed"),
        "FreezeSchedule": lambda: ddp_hooks.FreezeSchedule(ddp, {1: "hed"}),
        "expect_used": lambda: ddp_hooks.expect_used(ddp, "hed"),
    }
    for function, call in by_pattern.items():
        error = error_of(call)
        assert str(error).startswith(f"{function}: expected something that names parameters"), error
        assert "did you mean 'head'?" in str(error)
    module = fully_shard(nn.Linear(8, 8))
    function = "ddp_hooks.fsdp.register"
    error = error_of(lambda: ddp_hooks.fsdp.register(module, "skip_unsued"))
    assert str(error) == f"{function}: {names}{name}"
    assert_names(lambda: ddp_hooks.Policy("mine", rebuild_afer=1), TypeError, "Policy: expected fields of", field)
    assert_names(
        lambda: ddp_hooks.Tuning(pack_byte=1), TypeError, "Tuning: ", "'pack_byte'; did you mean 'pack_bytes'?"
    )
    assert_names(
        lambda: ddp_hooks.Policy("mine", coded="aut"), ValueError, "Policy.coded: expected", "did you mean 'auto'?"
    )
    assert "did you mean 'broadcast'?" in str(error_of(lambda: sync.average_parameters(ddp, buffers="brodcast")))
    assert "did you mean 'before_eval'?" in str(error_of(lambda: sync.BufferSync(ddp, "before-eval")))


@on_ranks(2)
def test_mistakes_with_the_hook(rank: int) -> None:
    ddp = DistributedDataParallel(make_model(), find_unused_parameters=True)
    policies = [("Auto", ValueError, "received 'Auto'"), (None, TypeError, "or the name of a preset, received None")]
    for policy, kind, text in policies:
        assert_fails(Mistake(lambda policy=policy: ddp_hooks.register(ddp, policy), kind, [text]))
    policy, kind, text = policies[0]
    if rank == 0:
        assert_fails(Mistake(lambda: ddp_hooks.register(ddp, policy), kind, [text]))
    else:
        assert_fails(Mistake(lambda: ddp_hooks.register(ddp), RuntimeError, ["rank 0: expected one of", text]))
    mine = "auto" if rank else Policy("mine", skip_zeros="on")
    both = [
        "expected Policy(name='mine', skip_zeros='on') as on rank 0, received Policy(name='auto', skip_zeros='adaptive'"
    ]
    assert_fails(Mistake(lambda: ddp_hooks.register(ddp, mine), RuntimeError, both))
    assert_fails(
        Mistake(
            lambda: ddp_hooks.rebuild(ddp),
            RuntimeError,
            ["with a hook of this package", "ddp_hooks.register(ddp) first"],
        )
    )

    state = ddp_hooks.register(ddp)
    assert ddp_hooks.register(ddp) is state
    assert ddp_hooks.register(torch.compile(ddp, backend="eager")) is state
    again = [
        "policy that the module's hook already has ('auto')",
        "received 'skip_zeros'",
        "set_policy",
        "state.close()",
    ]
    assert_fails(Mistake(lambda: ddp_hooks.register(ddp, "skip_zeros"), RuntimeError, again))
    one_of_two = Mistake(lambda: ddp_hooks.register(ddp, "skip_zeros" if rank else "auto"), RuntimeError, again[:2])
    assert_fails(one_of_two)
    twice = ["hook is already registered", "DDP takes only one"]
    assert_fails(Mistake(lambda: ddp_hooks.SkipUnusedState(ddp), RuntimeError, twice))
    flag = Mistake(lambda: ddp_hooks.rebuild(ddp, find_unused_parameters="no"), TypeError, ["received 'no'"])
    assert_fails(flag)
    output = ddp(torch.randn(4, 4))
    waits = ["a forward pass still awaits its backward pass", "torch.no_grad()"]
    assert_fails(Mistake(lambda: ddp_hooks.rebuild(ddp), RuntimeError, waits))
    del output
    assert not ddp_hooks.rebuild(ddp)
    good = state.state_dict()
    checkpoints = [
        (None, TypeError, ["expected a dictionary with the fields", "received None"]),
        (CHECKPOINT, ValueError, ["expected a dictionary with the fields", "without version"]),
        ({**good, "version": 3}, ValueError, ["of version 2", "received version 3"]),
        ({**good, "statistics": {**good["statistics"], "steps": -5}}, ValueError, ["received -5"]),
    ]
    for checkpoint, kind, texts in checkpoints:
        assert_fails(Mistake(lambda bad=checkpoint: state.load_state_dict(bad), kind, texts))
        assert state.state_dict() == good
    assert_fails(Mistake(lambda: state.set_policy("Auto"), ValueError, ["expected one of", "received 'Auto'"]))
    assert_fails(Mistake(lambda: state.set_policy(3), TypeError, ["the name of a preset, received 3"]))
    assert_fails(Mistake(lambda: state.set_policy(mine), RuntimeError, both))
    for declare in (state.declare_unused, lambda *what: state.unused(*what).__enter__()):
        assert_fails(Mistake(lambda declare=declare: declare("hed"), ValueError, [NAMES, "did you mean 'head'?"]))
        assert_fails(
            Mistake(lambda declare=declare: declare(["head"]), TypeError, [SELECTORS, "as separate arguments"])
        )
        assert_fails(Mistake(lambda declare=declare: declare(None), TypeError, [SELECTORS + "None"]))
        assert_fails(Mistake(lambda declare=declare: declare(nn.Linear(2, 2)), ValueError, [NAMES + "a Linear"]))
    assert state.policy.name == "auto"

    detached = pickle.loads(pickle.dumps(state))
    make = ["ddp_hooks.register(ddp) on every rank", "load_state_dict(saved)"]
    serves = ["expected a state that serves a module, received one", *make]
    for call in (
        detached.usage,
        lambda: detached.set_policy("auto"),
        lambda: detached.declare_unused("head"),
        lambda: detached.unused("head").__enter__(),
    ):
        assert_fails(Mistake(call, RuntimeError, serves))
    future = ddp_hooks.skip_unused_hook
    other = DistributedDataParallel(make_model(), find_unused_parameters=True)
    other.register_comm_hook(detached, future)
    assert_fails(
        Mistake(
            lambda: other(torch.randn(4, 4)).sum().backward(),
            RuntimeError,
            ["serves this module, received one that was unpickled or copied; wrap the model", *make],
        )
    )

    for _ in range(2):
        ddp(torch.randn(4, 4)).sum().backward()
    assert state.stats().steps == 2
    assert not ddp_hooks.rebuild(ddp)
    gradients = [p.grad for p in ddp.parameters() if p.grad is not None]
    assert ddp_hooks.sync.verify_replicas(gradients).in_step


# --- what is shown of what was received


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no repr")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "None"),
        ("auto", "'auto'"),
        (torch.zeros(3, 4, dtype=torch.int8), "a Tensor of int8 [3, 4]"),
        (nn.Parameter(torch.zeros(2)), "a Parameter of float32 [2]"),
        ({"w": torch.zeros(2), "n": 1}, "{'n': 1, 'w': a Tensor of float32 [2]}"),
        (list(range(100)), "[0, 1, 2, 3, ...]"),
        (nn.Linear(2, 2), "a Linear"),
        (Unprintable(), "Unprintable"),
        ("two\nlines", r"'two\nlines'"),
    ],
)
def test_what_was_received_is_shown_short(value: Any, shown: str) -> None:
    assert shown in short(value)


@pytest.mark.parametrize(
    "value", ["x" * 10**6, CHECKPOINT, [CHECKPOINT] * 9, {i: "y" * 99 for i in range(999)}, 10**4000]
)
def test_what_was_received_is_never_long(value: Any) -> None:
    assert len(short(value)) <= 160


def test_select_names_each_parameter_once() -> None:
    assert list(select("freeze", MODEL, "head", MODEL.head, MODEL.head.bias, "*.bias")) == [
        "encoder.0.bias",
        "encoder.2.bias",
        "head.weight",
        "head.bias",
        "decoder.bias",
    ]


# --- schedules


def test_a_schedule_may_only_unfreeze() -> None:
    model = make_model().requires_grad_(False)
    schedule = FreezeSchedule(model, unfreeze={1: model.head.bias, 2: [model.encoder, "head"]})
    assert schedule.step() == ()
    assert schedule.step() == ("head.bias",)
    assert schedule.step()[-2:] == ("head.weight", "head.bias")


def test_a_step_that_cannot_be_done_changes_nothing() -> None:
    model = make_model()
    plan = {"freeze": {0: "head", 1: "decoder"}, "unfreeze": {1: "head"}}
    schedule = FreezeSchedule(model, **plan)
    schedule.step()
    del model.decoder  # what is due next unfreezes the head first
    before = fingerprint(model)
    gone = Mistake(schedule.step, ValueError, [NAMES + "'decoder'"])
    assert_fails(gone)
    assert_fails(Mistake(lambda: schedule.load_state_dict({"next_step": 2}), ValueError, gone.texts))
    assert_unchanged(before, fingerprint(model))
    assert schedule.state_dict() == {"next_step": 1}


def test_a_schedule_far_ahead_is_resumed_at_once() -> None:
    model = make_model()
    schedule = FreezeSchedule(model, {1: "head", 10**12: "encoder"})
    schedule.load_state_dict({"next_step": 10**12})
    assert not model.head.weight.requires_grad
    assert model.encoder[0].weight.requires_grad
    assert "encoder.0.weight" in schedule.step()
