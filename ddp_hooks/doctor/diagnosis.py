"""Watches the steps of a DDP module, and puts together what the ranks saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .. import _extension
from ..fsdp.param_groups import is_sharded
from ..hangs import watcher
from ..serving.engine_settings import may_send_directly
from ..serving.modules import find_ddp
from ..serving.service import registered_service
from ..wording import describe_ranks, fill
from . import timing
from .findings import Findings, find
from .naming import class_name, find_names
from .optimizers import Outsiders
from .other_hooks import read_other_hook
from .recorder import Recorder
from .records import RankRecord, pack, unpack
from .replicas import read_replica
from .shards import ShardDiagnosis
from .side_channel import SideChannel
from .standing import End, read_end
from .text import describe
from .traffic import World

_C = _extension.load()


class Diagnosis:
    """Watches a DDP module while its block is open; :func:`ddp_hooks.diagnose` makes it.

    Entering and leaving the block are collective: every rank of the module's group has to do so, between two steps. If
    the block raises on a rank, KeyboardInterrupt and SystemExit included, its report covers only that rank.

    Attributes:
        recorder: the record of this rank.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp: DistributedDataParallel | None = ddp
        self._findings: Findings | None = None
        self._channel: SideChannel | None = None
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
        self.recorder = Recorder(ddp)
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove all hooks, and put together what the ranks saw."""
        if error is None:
            self.conclude()
        # Whatever it is, Ctrl-C and sys.exit() too: nobody knows whether the others leave the block.
        else:
            self.abandon(error)

    def conclude(self, end: End | None = None, outsiders: Outsiders | None = None) -> Findings:
        """Stop watching, and put together what the ranks saw; every rank calls it.

        Args:
            end: how what was watched has ended.
            outsiders: what optimizers step beside DDP modules.

        Raises:
            RuntimeError: the block was not entered, or the ranks watched different modules.
        """
        if self._findings is None:
            recorder, channel = self._stop()
            own = self.describe(end or End())
            replica = read_replica(recorder.watch.parameters, recorder.samples)
            own = replace(own, replica=replica, outsiders=outsiders or Outsiders())
            records: list[RankRecord] = [unpack(each) for each in channel.collect(pack(own))]
            channel.close()
            _check(records)
            self._findings = find(records, recorder.layouts, _limits(recorder))
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
        recorder = self.recorder
        assert recorder is not None  # it was entered
        alike = [one for one in others if _is_alike(one, own)]
        records = sorted([own, *alike], key=lambda one: one.rank)
        notes = _limits(recorder)
        if len(records) < own.world.ranks:
            known = describe_ranks([one.rank for one in records])
            notes.insert(0, f"an error has ended what was watched, so only what {known} saw is known")
        # A Reducer makes its buckets anew after the first step; some rank may not have come to it.
        return find(records, recorder.layouts, notes)

    @property
    def findings(self) -> Findings:
        """The findings.

        Raises:
            RuntimeError: the block has not ended yet.
        """
        if self._findings is None:
            raise RuntimeError("diagnose: expected the block to have ended; read the findings after it")
        return self._findings

    def __str__(self) -> str:
        """Return the report as text for a terminal."""
        return "a diagnosis that has not ended" if self._findings is None else describe(self._findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the findings as plain values, for JSON.

        Raises:
            RuntimeError: the block has not ended yet.
        """
        return self.findings.to_dict()

    def _stop(self) -> tuple[Recorder, SideChannel]:
        if self.recorder is None or self._channel is None:
            raise RuntimeError("diagnose: expected a block, as in `with ddp_hooks.diagnose(ddp) as diagnosis:`")
        self.recorder.close()
        for end in self._ends:
            end()
        return self.recorder, self._channel

    def describe(self, end: End) -> RankRecord:
        """Return what this rank has seen so far; any thread may call this."""
        ddp, recorder = self._ddp, self.recorder
        assert ddp is not None  # it was entered, and has not ended
        assert recorder is not None
        assert self._channel is not None
        standing = recorder.stand()
        watch = recorder.watch
        held = {id(parameter): name for name, parameter in zip(watch.names, watch.parameters, strict=False)}
        named = [name for name, _ in ddp.module.named_parameters()]
        return RankRecord(
            tuple(watch.names),
            recorder.sizes,
            watch.reduced_count,
            tuple(name for name in named if name in ddp.parameters_to_ignore),
            tuple(named),
            tuple(recorder.steps),
            tuple(layout.hash() for layout in recorder.layouts),
            recorder.find_unused_parameters,
            bool(ddp.static_graph),
            registered_service(ddp) is not None,
            self._describe_world(ddp),
            # A device copies beside the host.
            timing.measure_copying(recorder.largest_bucket_bytes if ddp.device_type == "cpu" else 0),
            tuple(recorder.missed),
            recorder.before_accumulating,
            self._channel.rank,
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
        )

    def _describe_world(self, ddp: DistributedDataParallel) -> World:
        assert self._channel is not None  # what the callers have made sure of
        device = torch.device(ddp.device_type)
        return World(
            self._channel.ranks,
            _C.can_send_directly(ddp.process_group, device) and may_send_directly(self._channel.hosts),
            device.type != "cpu",
        )


def diagnose(ddp: torch.nn.Module) -> Diagnosis | ShardDiagnosis:
    """Watch the steps of a DDP module, and find unused parameters and what ``ddp_hooks`` would save.

    It does not change gradients, hooks or what DDP sends. Every rank has to enter the block.

    Args:
        ddp: the module, or the result of ``torch.compile`` for it. For a root module with ``fully_shard``, the report
            shows which parameters are unused, but not what would be saved.

    Returns:
        A context manager. After its block, ``print`` it, or read ``findings``.

    Raises:
        TypeError: ``ddp`` is not such a module.

    Example::

        with ddp_hooks.diagnose(ddp) as diagnosis:
            for batch in itertools.islice(loader, 20):
                step(batch)
        print(diagnosis)
    """
    if is_sharded(ddp):
        return ShardDiagnosis(ddp)
    return Diagnosis(find_ddp(ddp, "diagnose"))


def why_not_watched(ddp: DistributedDataParallel, way_out: str) -> str | None:
    """Return why a module cannot be watched; None if it can.

    Args:
        ddp: the module.
        way_out: what to do if a backward pass is running.
    """
    if getattr(ddp, "_delay_all_reduce_all_params", False):
        return "delay_all_reduce_named_params delays every parameter, so DDP has no buckets; do not set it"
    if getattr(ddp, "_use_python_reducer", False):
        return "DDP's Python reducer (compiled autograd) has no buckets; set torch._dynamo.config.optimize_ddp = True"
    if _C.reducer_is_in_backward(ddp.reducer):
        return f"a backward pass is under way; {way_out}"
    return None


def _check(records: Sequence[RankRecord]) -> None:
    first = records[0]
    for rank, other in enumerate(records):
        if (other.names, other.layouts) != (first.names, first.layouts):
            raise RuntimeError(
                f"diagnose: expected the same parameters in the same buckets on every rank, received others on rank "
                f"{rank} than on rank 0; wrap the same model on every rank"
            )


def _is_alike(one: RankRecord, other: RankRecord) -> bool:
    """Return whether two ranks have the same parameters, in the same buckets as far as both have got."""
    layouts = zip(one.layouts, other.layouts, strict=False)
    return one.names == other.names and all(first == second for first, second in layouts)


def _limits(recorder: Recorder) -> list[str]:
    if not recorder.is_cut_short:
        return []
    return [
        "DDP's Reducer was made anew (ddp_hooks.rebuild, or a policy's rebuild_after): what is said is of the steps "
        f"before that, {len(recorder.steps)} of {recorder.finished}; diagnose again for those after it"
    ]
