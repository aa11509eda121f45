"""Watches the steps of a DDP module, and puts together what the ranks saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch.nn.parallel import DistributedDataParallel

from .. import _extension
from ..fsdp.param_groups import is_sharded
from ..hangs import watcher
from ..serving.modules import find_ddp
from ..serving.service import registered_service
from ..wording import describe_ranks, fill
from .block import Block, require_entered
from .findings import Findings, find
from .gradient_watch import why_not_watched
from .naming import class_name, find_names
from .optimizers import Outsiders
from .other_hooks import read_other_hook
from .recorder import Recorder
from .records import RankRecord, pack, unpack
from .replicas import read_replica
from .shards import ShardDiagnosis
from .side_channel import SideChannel
from .standing import End, read_end
from .trials import LEAST_STEPS, Trials

_C = _extension.load()


class Diagnosis(Block):
    """Watches a DDP module while its block is open; :func:`ddp_hooks.diagnose` makes it.

    Entering and leaving the block are collective: every rank of the module's group has to do so, between two steps. If
    the block raises on a rank, KeyboardInterrupt and SystemExit included, its report covers only that rank.

    Args:
        ddp: the module.
        trial_steps: as for :func:`ddp_hooks.diagnose`.

    Attributes:
        recorder: the record of this rank.
    """

    def __init__(self, ddp: DistributedDataParallel, trial_steps: int = 0) -> None:
        self._ddp: DistributedDataParallel | None = ddp
        self._trial_steps = trial_steps
        self._trials: Trials | None = None
        self.recorder: Recorder | None = None
        self._ends: list[Callable[[], None]] = []

    def __enter__(self) -> Diagnosis:
        """Begin to watch.

        Raises:
            RuntimeError: on every rank, if a rank's module cannot be watched, or is already being watched.
        """
        ddp = self._ddp
        if ddp is None or self.recorder is not None:
            raise RuntimeError("diagnose: expected a diagnosis that is new, received one that was used; make another")
        problem = why_not_watched(ddp, "open the block between two steps")
        self._channel = SideChannel(ddp, "diagnose", problem)
        asked = [steps.decode() for steps in self._channel.collect(str(self._trial_steps).encode())]
        if len(set(asked)) > 1:
            self._channel.close()
            raise RuntimeError(f"diagnose: expected the same trial_steps on every rank, received {', '.join(asked)}")
        self.recorder = Recorder(ddp)
        self._trials = Trials(ddp, self.recorder, self._channel, self._trial_steps)
        self.recorder.on_finished = self._trials.step_ended
        if registered_service(ddp) is None:
            self._ends.append(watcher.watch_module(ddp))
        return self

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters of the model, and those that DDP has of it, while it is watched."""
        if self._ddp is not None and self.recorder is not None:
            yield from self._ddp.module.parameters()
            yield from self.recorder.watch.parameters

    def when_stopped(self, end: Callable[[], None]) -> None:
        """Call a function when watching ends."""
        self._ends.append(end)

    def conclude(self, end: End | None = None, outsiders: Outsiders | None = None) -> Findings:
        """Stop watching, and put together what the ranks saw; every rank calls it.

        Raises:
            RuntimeError: the block was not entered, or the ranks watched different modules.
        """
        if self._findings is None:
            if self._trials is not None:
                self._trials.close()
            recorder, channel = self._stop()
            own = self.describe(end or End())
            replica = read_replica(recorder.watch.parameters, recorder.samples)
            own = replace(own, replica=replica, outsiders=outsiders or Outsiders())
            records: list[RankRecord] = [unpack(each) for each in channel.collect(pack(own))]
            channel.close()
            _check(records)
            self._findings = find(records, _limits(recorder))
            self._ddp = None
        return self._findings

    def abandon(self, error: BaseException, *, ends_process: bool = False) -> Findings:
        """Stop watching without asking the others: only what this rank saw counts.

        Args:
            error: why; what is wrong is added to it.
            ends_process: nothing follows but the end, where others may be told which step this rank was in.
        """
        if self._findings is None:
            if ends_process:
                self._ends.clear()
            elif self._trials is not None:
                # In a pass that has raised, the hook stays.
                with suppress(RuntimeError):
                    self._trials.close()
            _, channel = self._stop()
            channel.close()
            self._findings = self.find_with((), self.describe(read_end(error)))
            problems = [one for one in self._findings.problems if one.kind.breaks_run]
            if problems and hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(fill(f"ddp_hooks doctor: {problems[0]}"))
            self._ddp = None
        return self._findings

    def find_with(self, others: Sequence[RankRecord], own: RankRecord) -> Findings:
        """Return the findings from what some ranks have seen."""
        recorder = require_entered(self.recorder)
        alike = [one for one in others if one.names == own.names]
        records = sorted([own, *alike], key=lambda one: one.rank)
        notes = _limits(recorder)
        if len(records) < own.ranks:
            known = describe_ranks([one.rank for one in records])
            notes.insert(0, f"an error has ended what was watched, so only what {known} saw is known")
        return find(records, notes)

    def _stop(self) -> tuple[Recorder, SideChannel]:
        recorder, channel = require_entered(self.recorder), require_entered(self._channel)
        recorder.close()
        for end in self._ends:
            end()
        return recorder, channel

    def describe(self, end: End) -> RankRecord:
        """Return what this rank has seen so far; any thread may call this."""
        ddp, recorder, trials = (
            require_entered(self._ddp),
            require_entered(self.recorder),
            require_entered(self._trials),
        )
        channel = require_entered(self._channel)
        standing = recorder.stand()
        watch = recorder.watch
        held = {id(parameter): name for name, parameter in zip(watch.names, watch.parameters, strict=False)}
        named = [name for name, _ in ddp.module.named_parameters()]
        return RankRecord(
            tuple(watch.names),
            recorder.sizes,
            tuple(name for name in named if name in ddp.parameters_to_ignore),
            tuple(named),
            tuple(recorder.steps),
            recorder.units,
            recorder.find_unused_parameters,
            bool(ddp.static_graph),
            registered_service(ddp) is not None and not trials.serves(),
            channel.ranks,
            tuple(recorder.missed),
            channel.rank,
            standing,
            end,
            strangers=recorder.strangers.read(ddp, held),
            other_hook=read_other_hook(ddp),
            model=class_name(ddp.module),
            called=tuple(dict.fromkeys([*(recorder.called or ()), *find_names(ddp)])),
            moved=tuple(watch.find_moved()),
            wrapped_parts=tuple(
                name
                for name, part in ddp.module.named_modules()
                if isinstance(part, DistributedDataParallel) and any(id(one) in held for one in part.parameters())
            ),
            trials=tuple(trials.done),
            plain_steps=trials.plain_steps,
            why_not_tried=trials.why_not_all(),
        )


def diagnose(ddp: torch.nn.Module, *, trial_steps: int = 0) -> Diagnosis | ShardDiagnosis:
    """Watch the steps of a DDP module, find unused parameters, and measure what ``ddp_hooks`` saves.

    By default, it does not change gradients, hooks or what DDP sends. Every rank has to enter the block.

    Args:
        ddp: the module, or the result of ``torch.compile`` for it. For a root module with ``fully_shard``, the report
            shows which parameters are unused, and no policy is tried.
        trial_steps: the number of steps in which to try policies, at least 8: plain DDP runs for a quarter of them, the
            policy ``"skip_unused"`` for another, and ``"auto"`` for the rest. Gradients stay those of plain DDP, and
            the hook is removed after these steps or at the end of the block. By default, no policy is tried.

    Returns:
        A context manager. After its block, ``print`` it, or read ``findings``.

    Raises:
        TypeError: ``ddp`` is not such a module.
        ValueError: ``trial_steps`` is out of range.

    Example::

        with ddp_hooks.diagnose(ddp, trial_steps=48) as diagnosis:
            for batch in itertools.islice(loader, 48):
                step(batch)
        print(diagnosis)
    """
    if not isinstance(trial_steps, int) or 0 != trial_steps < LEAST_STEPS:
        raise ValueError(f"diagnose: expected trial_steps to be 0 or at least {LEAST_STEPS}, received {trial_steps!r}")
    if is_sharded(ddp):
        return ShardDiagnosis(ddp)
    return Diagnosis(find_ddp(ddp, "diagnose"), trial_steps)


def _check(records: Sequence[RankRecord]) -> None:
    first = records[0]
    for rank, other in enumerate(records):
        if (other.names, other.sizes) != (first.names, first.sizes):
            raise RuntimeError(
                f"diagnose: expected the same parameters on every rank, received others on rank {rank} than on rank 0; "
                "wrap the same model on every rank"
            )


def _limits(recorder: Recorder) -> list[str]:
    if not recorder.is_cut_short:
        return []
    return [
        "DDP's Reducer was made anew (ddp_hooks.rebuild, or a policy's rebuild_after): what is said is of the steps "
        f"before that, {len(recorder.steps)} of {recorder.finished}; diagnose again for those after it"
    ]
