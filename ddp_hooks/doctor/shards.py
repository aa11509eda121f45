"""The same for a module with fully_shard: which parameters get a gradient, by name, rank and step.

Nothing is predicted here: what FSDP2 sends depends on how it is sharded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _current_graph_task_id

from ..agreement import exchange_proposals, settle
from ..fsdp.param_groups import ParamGroup, Participants, find
from .findings import Findings
from .naming import class_name
from .problem import Kind, Problem
from .questions import is_something_forgotten, short_names
from .standing import read_end
from .text import describe
from .verdicts import (
    NEVER,
    SOME_RANKS,
    SOMETIMES,
    ModuleVerdict,
    ParameterVerdict,
    group_by_module,
    judge_patterns,
    mark,
)

_FUNCTION = "diagnose"


class ShardDiagnosis:
    """Watches a module with ``fully_shard`` while its block is open; :func:`ddp_hooks.diagnose` makes it.

    Entering and leaving the block are collective over the default process group. A block that an exception leaves is
    not: each rank then knows of itself only.

    Attributes:
        on_step: called with the number of steps when one has ended, or None; what it raises, ``backward()`` raises.
    """

    def __init__(self, module: nn.Module, on_step: Callable[[int], None] | None = None) -> None:
        self._module: nn.Module | None = module
        self.on_step = on_step
        self._findings: Findings | None = None
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
        settle(_FUNCTION, exchange_proposals(_world(), _FUNCTION, {"parameters": parameters}, problem))
        # FSDP2 has given it a class of its own.
        self._watch = _Watch(groups, class_name(self._module).removeprefix("FSDP"))
        self._watch.on_step = self.on_step
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop watching, and put together what the ranks saw."""
        watch = self._stop()
        if error is None:
            steps = settle(_FUNCTION, exchange_proposals(_world(), _FUNCTION, {}, own=watch.steps))
            self._findings = _conclude(watch, steps, [])
        else:
            ended = read_end(error).error
            notes = [f"an error has ended what was watched ({ended}), so only this rank's steps are known"]
            found = _conclude(watch, [watch.steps], notes)
            self._findings = replace(found, ranks=watch.ranks, heard=(watch.rank,))

    @property
    def findings(self) -> Findings:
        """What was found: as for DDP, without what would be sent.

        Raises:
            RuntimeError: the block has not ended yet.
        """
        if self._findings is None:
            raise RuntimeError("diagnose: expected the block to have ended; read the findings after it")
        return self._findings

    def __str__(self) -> str:
        """Return what was found as a text for a terminal."""
        return "a diagnosis that has not ended" if self._findings is None else describe(self._findings)

    def to_dict(self) -> dict[str, Any]:
        """Return what was found as plain values, for JSON.

        Raises:
            RuntimeError: the block has not ended yet.
        """
        return self.findings.to_dict()

    def _stop(self) -> _Watch:
        if self._watch is None:
            raise RuntimeError("diagnose: expected a block, as in `with ddp_hooks.diagnose(model) as diagnosis:`")
        self._watch.close()
        self._module = None
        return self._watch


class _Watch:
    """Writes down which parameters got a gradient here, pass by pass.

    Attributes:
        groups: of parameters.
        model: the class of the module.
        rank: this one, in the default process group.
        ranks: how many there are.
        steps: of each synchronised backward pass a text with a character for each parameter, as in a pattern.
        is_served: ``ddp_hooks.fsdp.register`` serves the module.
        sends_unused: zeros are reduced for what is unused.
        on_step: called with the number of steps when one has ended, or None; what it raises, ``backward()`` raises.
    """

    def __init__(self, groups: list[ParamGroup], model: str) -> None:
        self.groups = groups
        self.model = model
        self.steps: list[str] = []
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.on_step: Callable[[int], None] | None = None
        self.is_served = all(group.owner is not None for group in groups)
        self.sends_unused = all(group.sends_unused for group in groups)
        self._task: int | None = None  # the pass that is under way
        self._used: set[tuple[int, int]] = set()  # in it
        for number, group in enumerate(groups):
            group.listen(self._listener(number))

    def close(self) -> None:
        """Stop listening."""
        for group in self.groups:
            group.stop_listening()

    def _listener(self, number: int) -> Any:
        def reduced(participants: Participants) -> None:
            task = _current_graph_task_id()
            if task != self._task:  # also where the one before failed
                self._task, self._used = task, set()
                # After what FSDP2 does at the end of the pass, where groups without a gradient come.
                torch.autograd.Variable._execution_engine.queue_callback(self._pass_done)
            self._used |= {(number, index) for index in participants.used}

        return reduced

    def _pass_done(self) -> None:
        used, self._used, self._task = self._used, set(), None
        self.steps.append(
            "".join(
                mark((number, index) in used, group.is_frozen(index))
                for number, group in enumerate(self.groups)
                for index in range(len(group.names))
            )
        )
        if self.on_step is not None:
            self.on_step(len(self.steps))


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None  # fully_shard made a mesh
    return world


def _conclude(watch: _Watch, steps: list[list[str]], notes: list[str]) -> Findings:
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
    return Findings(
        ranks=len(steps),
        steps=count,
        dense_bytes=count * sum(one.dense_bytes for one in verdicts),
        parameters=tuple(verdicts),
        modules=modules,
        policies=(),
        narrow_fraction=None,
        division=None,
        answers=(is_something_forgotten(modules),) if count else (),
        advice=_advise(watch, verdicts),
        notes=tuple(notes),
        problems=tuple(_find_problems(watch, modules)),
        model=watch.model,
    )


def _advise(watch: _Watch, verdicts: list[ParameterVerdict]) -> str:
    kinds = {one.verdict for one in verdicts}
    if watch.is_served:
        return "ddp_hooks.fsdp serves the module already; print(state.stats()) says what it saves."
    if kinds & {SOME_RANKS, SOMETIMES}:
        return "Add, after the last fully_shard: state = ddp_hooks.fsdp.register(model). What is unused is not sent."
    if not verdicts:
        return "Nothing can be said before a step was watched."
    return (
        "What ddp_hooks.fsdp.register(model) would save, state.stats() says: it also sends 16 bits instead of 32 where "
        "that is lossless."
    )


def _find_problems(watch: _Watch, modules: Sequence[ModuleVerdict]) -> Iterator[Problem]:
    differ = [one for one in modules if one.verdict == SOME_RANKS]
    if differ and not watch.sends_unused:
        yield Problem(
            Kind.GRADIENTS_MISSING,
            f"Only some ranks used {short_names(differ)} in some steps, and FSDP2 mixes gradients up or hangs then.",
            "Call set_reduce_scatter_unused_params(True) on the module.",
            "With ddp_hooks.fsdp.register(model) the zeros that this adds are not sent.",
        )
    never = [one for one in modules if one.verdict == NEVER and one.is_module]
    if never:
        yield Problem(
            Kind.FORGOTTEN,
            f"No parameter of {short_names(never)} got a gradient in any step, although all of them require one.",
            "Use it in the loss if that is what you mean; otherwise freeze or remove it.",
        )
