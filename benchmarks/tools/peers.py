"""The ways to exchange gradients that are compared: DDP's own, torch's hooks, ours, and the best that is possible.

A peer makes a `Variant` of a workload. Each variant has its own model, but all of them share the storage of their
parameters, so that a round compares equal steps and memory holds the weights once.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tools import row_hook
from tools.usage import Usage
from tools.workload import Workload

BASELINE = "plain"
ORACLE = "oracle"
COMPUTE = "compute"
ORACLE_COMPUTE = "oracle_compute"
NOTHING = "nothing"
SILENT = (COMPUTE, ORACLE_COMPUTE, NOTHING)  # exchange nothing, so that their gradients are one rank's
PART = "part:"  # a share of the bytes follows


class NotApplicable(Exception):
    """The peer cannot run this workload; the message says why."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a peer needs to make a variant."""

    workload: Workload
    master: nn.Module
    rank: int
    usage: list[Usage]  # by pattern

    def copy_model(self) -> nn.Module:
        model = copy.deepcopy(self.master)
        for mine, shared in zip(model.parameters(), self.master.parameters(), strict=True):
            mine.data = shared.data
        return model

    def bytes_of(self, names: frozenset[str]) -> int:
        return sum(p.numel() * p.element_size() for name, p in self.master.named_parameters() if name in names)

    @property
    def dense_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.master.parameters())


class Variant:
    """One workload under one peer: steps, gradients and what it says it sent."""

    def __init__(self, context: Context, module: nn.Module, model: nn.Module) -> None:
        self.context = context
        self.module = module  # what is called
        self.model = model  # what holds the parameters

    def clear(self, pattern: int) -> None:
        self.model.zero_grad(set_to_none=True)

    def step(self, pattern: int) -> None:
        self.context.workload.backward(self.module, pattern, self.context.rank)

    def gradients(self, pattern: int) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def payload_bytes(self, pattern: int) -> int | None:
        """What is handed to all-reduces of gradients in a step, where that is known without counting."""
        return None

    def reset_statistics(self) -> None:
        pass

    def statistics(self) -> dict[str, Any] | None:
        return None


class _Dense(Variant):
    factor = 1.0

    def payload_bytes(self, pattern: int) -> int | None:
        return int(self.context.dense_bytes * self.factor)


class _Half(_Dense):
    factor = 0.5


class _Part(_Dense):
    """The beginning of each bucket, and nothing of the rest: what a hook that sends so many bytes takes at least."""

    def __init__(self, context: Context, share: float) -> None:
        ddp = DistributedDataParallel(context.copy_model(), find_unused_parameters=context.workload.needs_find_unused)
        super().__init__(context, ddp, ddp.module)
        context.workload.after_wrapping(ddp.module)
        self.factor = share
        group, ranks = ddp.process_group, ddp.process_group.size()

        def send_part(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
            buffer = bucket.buffer()
            part = buffer[: round(share * buffer.numel())].div_(ranks)
            future = dist.all_reduce(part, group=group, async_op=True).get_future()
            return future.then(lambda _: buffer)

        ddp.register_comm_hook(None, send_part)


class _Rows(Variant):
    """Rows that some rank uses, and whole vectors whether used or not."""

    def payload_bytes(self, pattern: int) -> int | None:
        vectors = frozenset(name for name, p in self.context.master.named_parameters() if p.dim() < 2)
        sent = self.context.usage[pattern].row_bytes
        return self.context.bytes_of(vectors) + sum(size for name, size in sent.items() if name not in vectors)


class _Silent(Variant):
    def payload_bytes(self, pattern: int) -> int | None:
        return 0


class _Ours(Variant):
    state: Any = None

    def reset_statistics(self) -> None:
        self.state.reset_stats()

    def statistics(self) -> dict[str, Any] | None:
        return dataclasses.asdict(self.state.stats())


class _Oracle(Variant):
    """For each pattern a DDP built anew, in which only the parameters used in it require gradients."""

    def __init__(self, context: Context) -> None:
        self._models = []
        self._modules = []
        for usage in context.usage:
            model = context.copy_model()
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name in usage.used)
            self._models.append(model)
            self._modules.append(self._wrap(model, usage.is_alike))
        super().__init__(context, self._modules[0], self._models[0])

    def _wrap(self, model: nn.Module, alike: bool) -> nn.Module:
        return DistributedDataParallel(model, find_unused_parameters=not alike)

    def clear(self, pattern: int) -> None:
        self._models[pattern].zero_grad(set_to_none=True)

    def step(self, pattern: int) -> None:
        self.context.workload.backward(self._modules[pattern], pattern, self.context.rank)

    def gradients(self, pattern: int) -> dict[str, Tensor]:
        return {n: p.grad for n, p in self._models[pattern].named_parameters() if p.grad is not None}

    def payload_bytes(self, pattern: int) -> int | None:
        return self.context.bytes_of(self.context.usage[pattern].used)


class _SilentOracle(_Oracle):
    """What the oracle computes: neither the gradients that nobody uses nor the zeros that others make of them."""

    def _wrap(self, model: nn.Module, alike: bool) -> nn.Module:
        return model

    def payload_bytes(self, pattern: int) -> int | None:
        return 0


def _wrap(context: Context, kind: type[Variant] = _Dense, **settings: Any) -> Variant:
    settings.setdefault("find_unused_parameters", context.workload.needs_find_unused)
    ddp = DistributedDataParallel(context.copy_model(), **settings)
    variant = kind(context, ddp, ddp.module)
    context.workload.after_wrapping(ddp.module)
    return variant


def _compute(context: Context) -> Variant:
    model = context.copy_model()
    context.workload.after_wrapping(model)
    return _Silent(context, model, model)


def _find_unused(context: Context) -> Variant:
    if context.workload.needs_find_unused:
        raise NotApplicable("this is plain DDP already")
    return _wrap(context, find_unused_parameters=True)


def _static_graph(context: Context) -> Variant:
    if not context.workload.is_static:
        raise NotApplicable("static_graph needs the same graph in every step and on every rank")
    return _wrap(context, static_graph=True)


def _skip_all_reduce(context: Context) -> Variant:
    if not context.workload.is_static or not context.workload.needs_find_unused:
        raise NotApplicable("skip_all_reduce_unused_params needs the same unused parameters on every rank, for good")
    return _wrap(context, Variant, skip_all_reduce_unused_params=True)


def _with_hook(kind: type[Variant], attach: Callable[[DistributedDataParallel], None]) -> Any:
    def build(context: Context) -> Variant:
        variant = _wrap(context, kind)
        assert isinstance(variant.module, DistributedDataParallel)
        attach(variant.module)
        return variant

    return build


def _attach_allreduce(ddp: DistributedDataParallel) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    ddp.register_comm_hook(None, allreduce_hook)


def _attach_fp16(ddp: DistributedDataParallel) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    ddp.register_comm_hook(None, fp16_compress_hook)


def _attach_powersgd(ddp: DistributedDataParallel) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    # One bucket at a time. PowerSGD starts its second and third all-reduce of a bucket from callbacks; with several
    # buckets under way these start in another order on another rank, and gloo, which pairs them by order, aborts.
    def one_by_one(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        future = powerSGD_hook(state, bucket)
        future.wait()
        return future

    # The epsilon keeps the all-zero gradients of unused parameters from becoming NaN.
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8)
    ddp.register_comm_hook(state, one_by_one)


def _attach_nothing(ddp: DistributedDataParallel) -> None:
    def send_nothing(state, bucket):  # type: ignore[no-untyped-def]
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, send_nothing)


def _with_settings(policy: str, settings: dict[str, Any]) -> Callable[[Context], Variant]:
    def build(context: Context) -> Variant:
        from ddp_hooks.policies import resolve

        return _ours(resolve(policy, settings), True)(context)

    return build


def _ours(policy: Any, native: bool, find_unused: bool | None = None) -> Any:
    def build(context: Context) -> Variant:
        try:
            import ddp_hooks
        except ImportError as error:
            raise NotApplicable(f"ddp_hooks is not installed: {error}") from error
        if not hasattr(ddp_hooks, "register"):
            raise NotApplicable("the ddp_hooks found here has no extension: build or install it first")
        settings = {} if find_unused is None else {"find_unused_parameters": find_unused}
        if find_unused is not None and find_unused == context.workload.needs_find_unused:
            raise NotApplicable("the same as without setting find_unused_parameters")
        variant = _wrap(context, _Ours, **settings)
        assert isinstance(variant, _Ours)
        ddp = variant.module
        if native:
            variant.state = ddp_hooks.register(ddp, policy=policy)
        else:
            variant.state = ddp_hooks.SkipUnusedState(ddp, policy=policy)
            ddp.register_comm_hook(variant.state, ddp_hooks.skip_unused_hook)
        return variant

    return build


def _scans_all(context: Context) -> Variant:
    """What it would take if the rows that a forward pass has looked up were not known."""
    variant = _ours("auto", True)(context)
    for parameter in variant.model.parameters():
        if parameter.dim() > 1:
            parameter.register_hook(lambda gradient: None)  # might do anything, for all that the engine can see
    return variant


def _rebuilt(context: Context) -> Variant:
    if not context.workload.is_static or not context.workload.needs_find_unused:
        raise NotApplicable("rebuilding is for what is frozen for good")
    import ddp_hooks

    variant = _ours("skip_unused", True)(context)
    ddp_hooks.rebuild(variant.module, find_unused_parameters=False)
    return variant


class _Declared(_Ours):
    """find_unused_parameters=False, and the parameters that a step does not use declared in advance."""

    def __init__(self, context: Context, module: nn.Module, model: nn.Module) -> None:
        super().__init__(context, module, model)
        twin = context.copy_model()
        context.workload.after_wrapping(twin)
        self._unused: list[list[nn.Parameter]] = []
        for pattern in range(context.workload.patterns):
            twin.zero_grad(set_to_none=True)
            context.workload.backward(twin, pattern, context.rank)
            pairs = zip(model.parameters(), twin.parameters(), strict=True)
            self._unused.append([mine for mine, other in pairs if other.grad is None])

    def step(self, pattern: int) -> None:
        with self.state.unused(*self._unused[pattern]):
            super().step(pattern)


def _declared(context: Context) -> Variant:
    import ddp_hooks

    variant = _wrap(context, _Declared, find_unused_parameters=False)
    assert isinstance(variant, _Declared)
    variant.state = ddp_hooks.register(variant.module, policy="skip_unused")
    return variant


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    title: str
    build: Callable[[Context], Variant]
    is_lossy: bool = False
    is_ours: bool = False


def _all_peers() -> list[Peer]:
    peers = [
        Peer(BASELINE, "DDP", _wrap),
        Peer(ORACLE, "oracle: DDP with only the used parameters", _Oracle),
        Peer(COMPUTE, "compute only, nothing exchanged", _compute),
        Peer(ORACLE_COMPUTE, "the oracle's compute only, nothing exchanged", _SilentOracle),
        Peer("find_unused", "DDP, find_unused_parameters=True", _find_unused),
        Peer("static_graph", "DDP, static_graph=True", _static_graph),
        Peer("skip_all_reduce", "DDP, skip_all_reduce_unused_params=True", _skip_all_reduce),
        Peer("allreduce_hook", "torch's allreduce_hook", _with_hook(_Dense, _attach_allreduce)),
        Peer("fp16_compress", "torch's fp16_compress_hook", _with_hook(_Half, _attach_fp16), is_lossy=True),
        Peer("powersgd", "torch's PowerSGD, bucket by bucket", _with_hook(Variant, _attach_powersgd), is_lossy=True),
    ]
    peers.append(Peer(NOTHING, "DDP with a hook that sends nothing", _with_hook(_Silent, _attach_nothing)))
    title = "used rows only, a prototype in Python"
    peers.append(Peer("rows_prototype", title, _with_hook(_Rows, row_hook.attach)))
    gathered = _with_hook(Variant, row_hook.attach_all_gather)
    peers.append(Peer("rows_all_gather", "every rank's rows to all, in Python (SparCML)", gathered))
    sparse = _with_hook(Variant, row_hook.attach_sparse)
    peers.append(Peer("rows_sparse", "rows as sparse tensors, gloo's all-reduce", sparse))
    for policy in ("skip_unused", "skip_zeros", "auto", "allreduce"):
        for native in (True, False):
            how = "native" if native else "python"
            title = f"ddp_hooks {policy}, {how}"
            peers.append(Peer(f"ours:{policy}:{how}", title, _ours(policy, native), is_ours=True))
    title = "ddp_hooks skip_unused, native, find_unused_parameters=False"
    peers.append(Peer("ours:skip_unused:native:no_fu", title, _ours("skip_unused", True, False), is_ours=True))
    gather_all = _with_settings("skip_unused", {"in_place_bytes": 1 << 40})
    peers.append(Peer("ours:gather", "ddp_hooks, everything gathered", gather_all, is_ours=True))
    in_place = _with_settings("skip_unused", {"in_place_bytes": 0})
    peers.append(Peer("ours:in_place", "ddp_hooks, every run in place", in_place, is_ours=True))
    title = "ddp_hooks auto, native, every row looked at"
    peers.append(Peer("ours:auto:native:every_row", title, _scans_all, is_ours=True))
    peers.append(Peer("ours:rebuilt", "ddp_hooks after rebuild()", _rebuilt, is_ours=True))
    peers.append(Peer("ours:declared", "ddp_hooks, unused parameters declared", _declared, is_ours=True))
    title = "ddp_hooks skip_unused, native, find_unused_parameters=True"
    peers.append(Peer("ours:skip_unused:native:fu", title, _ours("skip_unused", True, True), is_ours=True))
    return peers


PEERS = {peer.name: peer for peer in _all_peers()}


def find(name: str) -> Peer:
    """Return the peer of that name, a policy of ours with other settings, or one that sends a share of the bytes.

    Args:
        name: a key of `PEERS`, or that of a policy registered natively and settings behind it, numbers or words:
            ``ours:auto:native:owners=True,segment_bytes=65536,skip_zeros=off``; or ``part:0.75``.

    Raises:
        ValueError: there is none of that name.
    """
    if name in PEERS:
        return PEERS[name]
    if name.startswith(PART):
        share = float(name.removeprefix(PART))
        title = f"an all-reduce of {share:.0%} of each bucket, and nothing else"
        return Peer(name, title, lambda context: _Part(context, share), is_lossy=True)
    known, _, settings = name.rpartition(":")
    if known not in PEERS or not known.endswith(":native") or "=" not in settings:
        raise ValueError(f"expected one of {', '.join(PEERS)}, or ours:POLICY:native:SETTING=VALUE, received {name}")
    values = {key: _value(text) for key, _, text in (pair.partition("=") for pair in settings.split(","))}
    build = _with_settings(known.split(":")[1], values)
    return Peer(name, f"{PEERS[known].title}, {settings}", build, is_ours=True)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # a word


def max_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest absolute difference of two sets of gradients; a missing gradient counts as zero."""
    largest = 0.0
    for name in ours.keys() | theirs.keys():
        mine, other = ours.get(name), theirs.get(name)
        if mine is None or other is None:
            gap = (mine if mine is not None else other).abs().max()  # type: ignore[union-attr]
        else:
            gap = (mine - other).abs().max()
        value = float(gap)
        if value != value:  # NaN compares as no difference, and must not pass for one
            return float("inf")
        largest = max(largest, value)
    return largest
