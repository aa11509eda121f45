"""Watches a module with fully_shard: which parameters get a gradient, by name, rank and step.

It predicts no bytes, because what FSDP2 sends depends on how the module is sharded.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _current_graph_task_id

from ..fsdp.link_bytes import LinkBytes, count_link_bytes
from ..fsdp.param_groups import ParamGroup, Participants, find
from ..hangs.activity import ModuleActivity, activity
from ..hangs.stack import BACKWARD, read_position
from ..hangs.watcher import watch_forward
from ..serving.agreement import exchange_proposals, settle
from ..serving.modules import uncompiled
from ..wording import describe_bytes, describe_ranks, short_list
from .block import Block, require_entered
from .breakdowns import count_steps, find_broken_backward, find_error, find_standstill, find_uneven
from .findings import Findings
from .naming import class_name
from .problem import Kind, Problem, choose_problems
from .questions import is_something_forgotten
from .records import ShardFacts, ShardRecord, pack, unpack
from .side_channel import SideChannel
from .standing import End, Standing, Unfinished, read_end
from .verdicts import (
    NEVER,
    SOME_RANKS,
    SOMETIMES,
    ParameterVerdict,
    group_by_module,
    judge_patterns,
    mark,
    short_names,
)

_FUNCTION = "diagnose"


class ShardDiagnosis(Block):
    """Watches a module with ``fully_shard`` while its block is open; :func:`ddp_hooks.diagnose` makes it.

    Entering and leaving the block are collective over the default process group. If the block raises on a rank, its
    report covers only that rank.

    Attributes:
        on_step: called with the number of steps when one has ended, or None; what it raises, ``backward()`` raises.
    """

    def __init__(self, module: nn.Module, on_step: Callable[[int], None] | None = None) -> None:
        self._module: nn.Module | None = module
        self.on_step = on_step
        self._watch: _Watch | None = None

    def __enter__(self) -> ShardDiagnosis:
        """Begin to watch.

        Raises:
            RuntimeError: on every rank, when a rank's module cannot be watched, or ranks watch different ones.
        """
        if self._module is None or self._watch is not None:
            raise RuntimeError("diagnose: expected a diagnosis that is new, received one that was used; make another")
        groups = find(self._module)
        names = "\n".join(name for group in groups for name in group.names)
        parameters = (
            f"{names.count(chr(10)) + 1} of digest {hashlib.blake2b(names.encode(), digest_size=4).hexdigest()}"
        )
        problem = next((found for group in groups if (found := group.why_unwatched())), None)
        device = groups[0].device
        world = SimpleNamespace(process_group=dist.group.WORLD, device=device, device_type=device.type)
        settle(_FUNCTION, exchange_proposals(world.process_group, _FUNCTION, {"parameters": parameters}, problem))
        self._channel = SideChannel(world, _FUNCTION)
        # On the CPU, values decide, and `state.stats()` counts.
        link = count_link_bytes(groups, self._channel.hosts) if device.type != "cpu" else LinkBytes()
        # FSDP2 has given it a class of its own.
        self._watch = _Watch(groups, uncompiled(self._module), class_name(self._module).removeprefix("FSDP"), link)
        self._watch.on_step = self.on_step
        return self

    def conclude(self, end: End | None = None) -> Findings:
        """Stop watching, and put together what the ranks saw; every rank calls it."""
        if self._findings is None:
            watch, channel = self._stop()
            records = [unpack(each) for each in channel.collect(pack(self.describe(end or End())))]
            channel.close()
            self._findings = _conclude(watch, records)
            self._module = None
        return self._findings

    def abandon(self, error: BaseException, *, ends_process: bool = False) -> Findings:
        """Stop watching without asking the others: only what this rank saw counts."""
        if self._findings is None:
            _, channel = self._stop()
            channel.close()
            self._findings = self.find_with((), self.describe(read_end(error)))
            self._module = None
        return self._findings

    def describe(self, end: End) -> ShardRecord:
        """Return what this rank has seen until now; by any thread."""
        return require_entered(self._watch).describe(end)

    def find_with(self, others: Sequence[Any], own: ShardRecord) -> Findings:
        """Return what follows from what some ranks have seen."""
        alike = [one for one in others if isinstance(one, ShardRecord) and one.order == own.order]
        return _conclude(require_entered(self._watch), sorted([own, *alike], key=lambda one: one.rank))

    def is_unfinished(self) -> bool:
        """Return whether this rank is within a step."""
        return self._watch is not None and self._watch.is_in_step()

    @property
    def last_progress(self) -> float:
        """When the last step ended, or watching began, by the monotonic clock. Seconds."""
        return 0.0 if self._watch is None else self._watch.last_progress

    def _stop(self) -> tuple[_Watch, SideChannel]:
        watch, channel = require_entered(self._watch), require_entered(self._channel)
        watch.close()
        return watch, channel


class _Watch:
    """Records which parameters got a gradient on this rank, pass by pass.

    Attributes:
        groups: of parameters.
        model: the class of the module.
        rank: this one, in the default process group.
        ranks: how many there are.
        link: the bytes between hosts.
        steps: as in :class:`ShardRecord`.
        is_served: ``ddp_hooks.fsdp.register`` serves the module.
        sends_unused: zeros are reduced for what is unused.
        on_step: called with the number of steps when one has ended, or None; what it raises, ``backward()`` raises.
        last_progress: when the last step ended, or watching began, by the monotonic clock. Seconds.
    """

    def __init__(self, groups: list[ParamGroup], module: nn.Module, model: str, link: LinkBytes) -> None:
        self.groups = groups
        self.model, self.link = model, link
        self.steps: list[str] = []
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.on_step: Callable[[int], None] | None = None
        self.last_progress = time.monotonic()
        self.is_served = all(group.owner is not None for group in groups)
        self.sends_unused = all(group.sends_unused for group in groups)
        self._names = tuple(name for group in groups for name in group.names)
        self._task: int | None = None  # the pass that is under way
        self._used: dict[int, frozenset[int]] = {}  # in it, by group
        self._counts = ModuleActivity(model, dist.get_process_group_ranks(dist.group.WORLD))
        self._forwards = 0  # when the last step ended
        self._counts.steps = int(self._read_place().startswith("forward"))  # begun before anybody counted
        self._end = watch_forward(module, self._counts)
        for number, group in enumerate(groups):
            group.listen(self._listener(number))

    def close(self) -> None:
        """Stop listening."""
        for group in self.groups:
            group.stop_listening()
        self._end()

    def is_in_step(self) -> bool:
        """Say whether the thread that trains is within a forward or backward pass; by any thread."""
        return bool(self._read_place())

    def describe(self, end: End) -> ShardRecord:
        """Return what was seen so far; any thread may call this."""
        place = self._read_place()
        unfinished = Unfinished.NONE
        if place == BACKWARD:
            unfinished = Unfinished.RUNS
        elif self._task is not None or end.left == BACKWARD:
            unfinished = Unfinished.RAISED
        reached = dict(self._used)
        for number, group in enumerate(self.groups):
            if (under_way := group.participants) is not None:
                reached.setdefault(number, under_way.used)
        return ShardRecord(
            self.rank,
            self._names,
            tuple(self.steps),
            Standing(
                len(self.steps),
                unfinished,
                forwards=self._counts.steps - self._forwards,
                in_forward=place.startswith("forward"),
            ),
            end,
            place,
            self.groups[0].forward_order(),
            tuple(
                (number, tuple(self.groups[number].names[i] for i in sorted(used)))
                for number, used in sorted(reached.items())
            ),
        )

    def _read_place(self) -> str:
        position = read_position(activity.thread)
        return "" if position is None else position.phase

    def _listener(self, number: int) -> Any:
        def reduced(participants: Participants) -> None:
            task = _current_graph_task_id()
            if task != self._task:  # also where the one before failed
                self._task, self._used = task, {}
                # After what FSDP2 does at the end of the pass, where groups without a gradient come.
                torch.autograd.Variable._execution_engine.queue_callback(self._pass_done)
            self._used[number] = self._used.get(number, frozenset()) | participants.used

        return reduced

    def _pass_done(self) -> None:
        used, self._used, self._task = self._used, {}, None
        self.steps.append(
            "".join(
                mark(index in used.get(number, ()), group.is_frozen(index))
                for number, group in enumerate(self.groups)
                for index in range(len(group.names))
            )
        )
        self.last_progress = time.monotonic()
        self._forwards = self._counts.steps
        if self.on_step is not None:
            self.on_step(len(self.steps))


def _conclude(watch: _Watch, records: Sequence[ShardRecord]) -> Findings:
    notes: list[str] = []
    heard = tuple(record.rank for record in records)
    if len(records) < watch.ranks:
        notes.append(f"an error has ended what was watched, so only what {describe_ranks(heard)} saw is known")
    steps = [record.steps for record in records]
    count = min(map(len, steps))
    if any(len(each) != count for each in steps):
        notes.append(f"the ranks ran different numbers of steps; the first {count} of each are compared")
    verdicts: list[ParameterVerdict] = []
    if count:
        named = [(name, group.nbytes(i)) for group in watch.groups for i, name in enumerate(group.names)]
        for place, (name, nbytes) in enumerate(named):
            pattern = tuple("".join(step[place] for step in each[:count]) for each in steps)
            verdicts.append(judge_patterns(name, nbytes, pattern))
    modules = tuple(group_by_module(verdicts))
    absent = tuple(rank for rank in range(watch.ranks) if rank not in heard)
    facts = ShardFacts(tuple(records), absent, modules, watch.sends_unused)
    problems = [problem for find_some in _FINDERS for problem in find_some(facts)]
    if not any(one.kind.breaks_run for one in problems):
        problems += find_standstill(facts)
    forbids_advice = bool(absent) or any(one.kind.forbids_advice for one in problems)
    return Findings(
        ranks=watch.ranks,
        steps=count,
        dense_bytes=count * sum(one.dense_bytes for one in verdicts),
        parameters=tuple(verdicts),
        modules=modules,
        policies=(),
        division=None,
        answers=() if forbids_advice or not count else (is_something_forgotten(modules),),
        advice="" if forbids_advice else _advise(watch, verdicts),
        notes=tuple(notes),
        problems=tuple(choose_problems(problems)),
        heard=heard,
        model=watch.model,
    )


def _advise(watch: _Watch, verdicts: list[ParameterVerdict]) -> str:
    kinds = {one.verdict for one in verdicts}
    if watch.is_served:
        return "ddp_hooks.fsdp serves the module already; print(state.stats()) says what it saves."
    if watch.link.plain and verdicts:
        return _describe_link(watch.link)
    if kinds & {SOME_RANKS, SOMETIMES}:
        return "Add, after the last fully_shard: state = ddp_hooks.fsdp.register(model). What is unused is not sent."
    if not verdicts:
        return "Nothing can be said before a step was watched."
    return (
        "Whether ddp_hooks.fsdp.register(model) would save anything, state.stats() says: between hosts, it also sends "
        "gradients in fewer bits."
    )


def _describe_link(link: LinkBytes) -> str:
    """Say what each setting would put on the link between hosts."""
    if link.served < link.plain:
        ours = f"ddp_hooks.fsdp.register(model) would make that {describe_bytes(link.served)}"
    else:
        ours = "ddp_hooks.fsdp.register(model) would change nothing"
    if link.rounded >= link.served:
        rounded = "reduce_dtype=torch.bfloat16 would not send less, and rounds every sum"
    else:
        rounded = f"reduce_dtype=torch.bfloat16, which rounds every sum, {describe_bytes(link.rounded)}"
        if link.served_rounded < link.rounded:
            rounded += f", and both {describe_bytes(link.served_rounded)}"
    return f"Each host sends the others {describe_bytes(link.plain)} of gradients in a step. {ours}; {rounded}."


def _find_differing(facts: ShardFacts) -> Iterator[Problem]:
    """Find parameters that only some ranks used, in steps that have ended or in the one in which the ranks stand."""
    differ = [one for one in facts.modules if one.verdict == SOME_RANKS]
    names = short_names(differ) if differ else short_list(_differing_now(facts.records))
    if not names or facts.sends_unused:
        return
    yield Problem(
        Kind.GRADIENTS_MISSING,
        f"Only some ranks used {names} in some steps, and FSDP2 mixes gradients up or hangs then.",
        "Call set_reduce_scatter_unused_params(True) on the module.",
        "With ddp_hooks.fsdp.register(model) the zeros that this adds are not sent.",
    )


def _differing_now(records: Sequence[ShardRecord]) -> list[str]:
    reached = [dict(record.reached) for record in records if record.standing.unfinished is Unfinished.RUNS]
    names: set[str] = set()
    for number in set().union(*reached) if reached else ():
        some = [frozenset(one[number]) for one in reached if number in one]
        names |= frozenset().union(*some) - some[0].intersection(*some)
    return sorted(names)


def _find_different_places(facts: ShardFacts) -> Iterator[Problem]:
    """Find ranks that stand in different layers: FSDP2 gathers a layer's parameters from all ranks at once."""
    if facts.absent or not all(record.place for record in facts.records) or _differing_now(facts.records):
        return
    first = facts.records[0]
    ahead = [one for one in facts.records if _passes(one) > min(map(_passes, facts.records))]
    if ahead:
        behind = [one for one in facts.records if one not in ahead]
        yield Problem(
            Kind.UNEVEN,
            f"After {count_steps(first.standing.finished)}, {describe_ranks([one.rank for one in ahead])} began "
            "another forward pass with no finished backward pass for the one before, as after an error in backward() "
            f"that the script caught, and {describe_ranks([one.rank for one in behind])} waits for it.",
            "Skip a batch on every rank or on none, and do not go on with a module after an error in backward().",
            details=tuple(f"rank {one.rank}: in {one.place}" for one in facts.records),
        )
        return
    missing = {one.rank: _missing_layers(one, facts.records) for one in facts.records}
    if not any(missing.values()):
        return
    where = "; ".join(f"rank {rank} left out {short_list(names)}" for rank, names in missing.items() if names)
    yield Problem(
        Kind.STOOD_STILL,
        f"The ranks run different layers, and FSDP2 needs all of them for each layer: after "
        f"{count_steps(first.standing.finished)}, {where}.",
        "Call every layer with fully_shard on every rank in each step, in the same order, or apply fully_shard to what "
        "contains the layers that only some ranks call.",
    )


def _missing_layers(record: ShardRecord, records: Sequence[ShardRecord]) -> list[str]:
    """Name what other ranks ran before a layer that this rank has run, or before its backward pass."""
    is_done = record.standing.unfinished is Unfinished.RUNS
    names = []
    for other in records:
        passed = [i for i, name in enumerate(other.layers) if name in record.layers]
        end = len(other.layers) if is_done else max(passed, default=0)
        names += [name for name in other.layers[:end] if name not in record.layers]
    return list(dict.fromkeys(names))


def _passes(record: ShardRecord) -> int:
    return record.standing.finished + record.standing.forwards


def _find_never_used(facts: ShardFacts) -> Iterator[Problem]:
    never = [one for one in facts.modules if one.verdict == NEVER and one.is_module]
    if never:
        yield Problem(
            Kind.FORGOTTEN,
            f"No parameter of {short_names(never)} got a gradient in any step, although all of them require one.",
            "Use it in the loss if that is what you mean; otherwise freeze or remove it.",
        )


_FINDERS: tuple[Callable[[ShardFacts], Iterator[Problem]], ...] = (
    _find_differing,
    find_broken_backward,
    find_uneven,
    _find_different_places,
    find_error,
    _find_never_used,
)
