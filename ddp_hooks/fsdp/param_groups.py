"""Reads FSDP2's parameter groups and the layout of their reduce-scatters; no other file looks into FSDP2.

The attributes that it reads are private to torch. `find` checks each of them, and refuses a torch that lacks one.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import _extension
from ..serving.modules import uncompiled

_C = _extension.load()

try:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    _MISSING = ""
except ImportError as _error:  # another torch
    _MISSING = str(_error)
    ReduceScatter = object  # type: ignore[misc, assignment]

# The attributes that are read of a parameter group, of its parameters, and of the parameters' class, because instances
# have some of them only after the first forward pass.
_ATTRIBUTES = (
    "fsdp_params",
    "mesh_info",
    "device",
    "post_backward",
    "reduce_grads",
    "all_reduce_grads",
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
    "reduce_scatter_unused_params",
    "_reduce_scatter_comm",
    "_all_reduce_hook",
    "_training_state",
)
_PARAMETER_ATTRIBUTES = (
    "sharded_param",
    "padded_sharded_param_size",
    "unsharded_accumulated_grad",
    "_module_info",
)
_DECLARED_ATTRIBUTES = ("_unsharded_param",)
# Attributes of a mesh: its dimensions that shard and replicate.
_SHARDING, _REPLICATING = ("shard_process_group", "reduce_scatter_process_group"), ("replicate_process_group",)
# The arguments of a reduce-scatter.
_ARGUMENTS = ("output_tensor", "input_tensor", "group", "op", "async_op")
OLDEST_TORCH = "2.13"
# The reduce-scatters of torch that allocate ordinary memory.
_PLAIN = ("DefaultReduceScatter", "ProcessGroupAllocReduceScatter")


@dataclass(frozen=True, slots=True)
class Participants:
    """The parameters of a reduction.

    Attributes:
        included: the parameters in the reduce-scatter's input, in order.
        used: those of them with a gradient on this rank; the others are zeros.
        wide: whether some gradient of this rank is not in bfloat16, for example as the sum of several passes.
    """

    included: tuple[int, ...]
    used: frozenset[int]
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """The space of a parameter in each rank's part of the input, in elements.

    Attributes:
        length: its length, including padding.
        row_length: the number of elements that share an index of the first dimension.
    """

    length: int
    row_length: int


Reduce = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup, Any], bool]
Listener = Callable[[Participants], None]
# Of the memory that FSDP2 asks for, when it asks for another.
DtypeOfMemory = Callable[[torch.dtype], torch.dtype]


class ParamGroup:
    """A group of parameters that FSDP2 reduces together.

    Args:
        inner: torch's ``FSDPParamGroup``.
        names: the names of its parameters in the registered module.
    """

    def __init__(self, inner: Any, names: Sequence[str]) -> None:
        # A weak reference: the module owns it, and frees its memory when it goes.
        self._reference = weakref.ref(inner)
        self.names = tuple(names)
        self._previous: Any = None
        self._hook: weakref.WeakMethod[Any] | None = None
        self._participants: Participants | None = None
        shards = [getattr(parameter, "sharded_param", None) for parameter in getattr(inner, "fsdp_params", ())]
        self._sizes = [(0, 0) if shard is None else (shard.numel(), shard.element_size()) for shard in shards]

    @property
    def _inner(self) -> Any:
        inner = self._reference()
        if inner is None:
            raise RuntimeError("ddp_hooks.fsdp: expected a module that exists, but it was deleted")
        return inner

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        return self._inner.device  # type: ignore[no-any-return]

    @property
    def device_type(self) -> str:
        """The type of that device."""
        return self.device.type

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group of its reduce-scatters; None if its parameters are not sharded."""
        mesh_info = self._inner.mesh_info
        separate = getattr(mesh_info, "reduce_scatter_process_group", None)  # not if it only replicates
        return separate or getattr(mesh_info, "shard_process_group", None)

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The process group of FSDP2's own all-reduces, with a two-dimensional mesh or ``replicate``; or None."""
        return getattr(self._inner.mesh_info, "replicate_process_group", None)

    @property
    def reduces_everywhere(self) -> bool:
        """Whether FSDP2 all-reduces now; it does not under ``set_requires_all_reduce(False)``."""
        return bool(self._inner.all_reduce_grads)

    @property
    def divides_by_itself(self) -> bool:
        """Whether ``set_gradient_divide_factor`` sets the divisor of the sum."""
        return self._inner.gradient_divide_factor is not None

    @property
    def sums_alone(self) -> bool:
        """Whether collectives have to add up, by ``set_force_sum_reduction_for_comms``, and FSDP2 divides."""
        return bool(self._inner.force_sum_reduction_for_comms)

    @property
    def widens(self) -> bool:
        """Whether FSDP2 widens the gradients of a pass from bfloat16 to float32, to reduce them."""
        inner = self._inner
        mixed = getattr(inner, "mp_policy", None)  # without it, nothing is known, and torch reduces
        if mixed is None or mixed.reduce_dtype != torch.float32:
            return False
        return {mixed.param_dtype or each.sharded_param.dtype for each in inner.fsdp_params} == {torch.bfloat16}

    @property
    def reduced_dtype(self) -> torch.dtype:
        """The dtype in which FSDP2 reduces gradients."""
        inner = self._inner
        mixed = getattr(inner, "mp_policy", None)
        chosen = None if mixed is None else mixed.reduce_dtype or mixed.param_dtype
        return chosen or inner.fsdp_params[0].sharded_param.dtype  # type: ignore[no-any-return]

    @property
    def has_wide(self) -> bool:
        """Whether this rank has or is going to have gradients that are not in bfloat16; False without a module."""
        inner = self._reference()
        return inner is not None and _has_wide(inner)

    @property
    def sends_unused(self) -> bool:
        """Whether FSDP2 reduces zeros for parameters without a gradient, so that ranks may differ."""
        return bool(self._inner.reduce_scatter_unused_params)

    @property
    def has_hook(self) -> bool:
        """Whether the group has a hook for reduced gradients."""
        return self._inner._all_reduce_hook is not None

    def forward_order(self) -> tuple[str, ...]:
        """Return the modules whose forward pass has ended since the last backward pass, in order.

        Empty if this torch does not record it.
        """
        groups = getattr(getattr(self._reference(), "comm_ctx", None), "post_forward_order", ())
        return tuple(getattr(group, "_module_fqn", "") or "the root module" for group in tuple(groups))

    def columns(self) -> list[Column]:
        """Return the space of each parameter in a part, in order."""
        columns = []
        for parameter in self._inner.fsdp_params:
            shape = parameter.padded_sharded_param_size
            # Parts of a parameter that is sharded along another dimension are concatenated along the first.
            columns.append(Column(shape.numel(), shape[1:].numel()))
        return columns

    def is_frozen(self, index: int) -> bool:
        """Say whether a parameter does not require a gradient now; False if the module is gone."""
        inner = self._reference()
        return inner is not None and not inner.fsdp_params[index].sharded_param.requires_grad

    def numel(self, index: int) -> int:
        """Return the number of elements of the whole parameter."""
        return self._sizes[index][0]

    def nbytes(self, index: int) -> int:
        """Return the size of the whole parameter. Bytes."""
        numel, element_bytes = self._sizes[index]
        return numel * element_bytes

    @property
    def participants(self) -> Participants | None:
        """The parameters of the reduction that is under way; None if there is none."""
        return self._participants

    def install(
        self, reduce: Reduce, owner: object, finish: Listener, dtype_of_memory: DtypeOfMemory = lambda dtype: dtype
    ) -> None:
        """Let reduce-scatters call ``reduce``, and torch's own function if it returns False.

        Args:
            reduce: called with output, input, process group and operation.
            owner: the value of :attr:`owner`.
            finish: see :meth:`listen`.
            dtype_of_memory: returns the dtype of a reduce-scatter's memory, given the one that FSDP2 asks for.
        """
        inner = self._inner
        previous = self._previous = inner._reduce_scatter_comm
        inner._reduce_scatter_comm = SkippingReduceScatter(reduce, previous, owner, dtype_of_memory)
        self.listen(finish)

    def listen(self, finish: Listener) -> None:
        """Let each reduction of this group call ``finish`` at its end, even if it has no gradient."""
        inner = self._inner
        post_backward = vars(inner).get("post_backward")
        if post_backward is None:
            post_backward = inner.post_backward = _PostBackward(self._reference)
        post_backward.listeners.append((self, finish))

    def stop_listening(self) -> None:
        """Undo :meth:`listen`."""
        inner = self._reference()
        post_backward = None if inner is None else vars(inner).get("post_backward")
        if isinstance(post_backward, _PostBackward):
            post_backward.listeners = [each for each in post_backward.listeners if each[0] is not self]
            if not post_backward.listeners:
                del inner.post_backward  # type: ignore[union-attr]

    def take(self, participants: Participants | None) -> None:
        """Note the parameters of the reduction that begins, or None when it ends."""
        self._participants = participants

    def install_hook(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Let each reduced gradient pass through a hook before it is divided and copied."""
        self._inner._all_reduce_hook = hook
        self._hook = weakref.WeakMethod(hook)

    def remove(self) -> None:
        """Remove everything that was installed and is still in place."""
        inner = self._reference()
        if inner is None:
            return
        if self.owner is not None:
            inner._reduce_scatter_comm = self._previous
        self.stop_listening()
        if self._hook is not None and inner._all_reduce_hook == self._hook():
            inner._all_reduce_hook = None
        self._previous = self._hook = None

    @property
    def owner(self) -> object:
        """The owner that was installed with the current reduce-scatter; None if that is not ours."""
        comm = getattr(self._inner, "_reduce_scatter_comm", None)
        return comm.owner if isinstance(comm, SkippingReduceScatter) else None

    def why_unwatched(self) -> str | None:
        """Say why :meth:`listen` is impossible; None if it is possible."""
        inner = self._inner
        if missing := _missing(inner):
            return _another_fsdp2(f"it has no {', '.join(missing)}")
        if not isinstance(vars(inner).get("post_backward"), _PostBackward | None):
            return "something else has replaced FSDPParamGroup.post_backward; begin before it does"
        if inner._training_state.name != "IDLE":
            return "a forward or backward pass is under way; begin between steps"
        return None

    def why_unsupported(self) -> str | None:
        """Say why the group cannot be served, and what to do; None if it can."""
        if problem := self.why_unwatched():
            return problem
        if problem := _C.why_unserved(self.device):
            return problem  # type: ignore[no-any-return]
        if self.owner is not None:
            return "a part of the module is already registered on its own; close() that state first"
        comm = type(self._inner._reduce_scatter_comm).__name__
        if comm not in _PLAIN:
            return f"a custom reduce-scatter is already set ({comm}), and FSDP2 takes only one; do not set it"
        return None


def _another_fsdp2(what: str) -> str:
    return (
        f"FSDP2 of torch {torch.__version__} has other internals than ddp_hooks.fsdp expects: {what}. Use torch "
        f"{OLDEST_TORCH} or a later version that ddp_hooks is tested with"
    )


def _missing(inner: Any) -> list[str]:
    """Describe the attributes that are read and missing."""
    missing = [name for name in _ATTRIBUTES if not hasattr(inner, name)]
    for parameter in getattr(inner, "fsdp_params", ())[:1]:
        missing += [f"{name} of a parameter" for name in _PARAMETER_ATTRIBUTES if not hasattr(parameter, name)]
        kinds = type(parameter).__mro__
        missing += [
            f"{name} of a parameter"
            for name in _DECLARED_ATTRIBUTES
            if not any(name in getattr(kind, "__annotations__", ()) for kind in kinds)
        ]
    if mesh_info := getattr(inner, "mesh_info", None):
        found = [names for names in (_SHARDING, _REPLICATING) if hasattr(mesh_info, names[0])]
        expected = [name for names in found or (_SHARDING,) for name in names]
        missing += [f"{name} of a mesh" for name in expected if not hasattr(mesh_info, name)]
    taken = inspect.signature(ReduceScatter.__call__).parameters
    missing += [f"{name} of a reduce-scatter" for name in _ARGUMENTS if name not in taken]
    return missing


class _PostBackward:
    """Replaces a group's ``post_backward``, to see gradients before FSDP2 takes them.

    Attributes:
        listeners: the callbacks, by owner.
    """

    def __init__(self, reference: weakref.ref[Any]) -> None:
        # The group holds this object, and not the other way round.
        self._reference = reference
        self.listeners: list[tuple[ParamGroup, Listener]] = []

    def __call__(self, *unused: Any) -> None:
        inner: Any = self._reference()
        original = type(inner).post_backward
        if not inner.reduce_grads:
            original(inner, *unused)
            return
        participants = _look_at_gradients(inner)
        listeners = list(self.listeners)
        for group, _ in listeners:
            group.take(participants)
        try:
            original(inner, *unused)
        finally:
            for group, _ in listeners:
                group.take(None)
        for _, finish in listeners:
            finish(participants)


def _look_at_gradients(inner: Any) -> Participants:
    included, used = [], []
    wide = _has_wide(inner)
    for i, parameter in enumerate(inner.fsdp_params):
        if not hasattr(parameter, "_unsharded_param"):
            continue
        if parameter.unsharded_accumulated_grad is not None or parameter._unsharded_param.grad is not None:
            used.append(i)
            included.append(i)
        elif inner.reduce_scatter_unused_params and parameter._unsharded_param.requires_grad:
            included.append(i)
    return Participants(tuple(included), frozenset(used), wide)


def _has_wide(inner: Any) -> bool:
    unsharded = [getattr(parameter, "_unsharded_param", None) for parameter in inner.fsdp_params]
    found = [each for one in unsharded if one is not None for each in (one, one.grad) if each is not None]
    return any(each.dtype != torch.bfloat16 for each in found) or any(
        parameter.unsharded_accumulated_grad is not None for parameter in inner.fsdp_params
    )


class SkippingReduceScatter(ReduceScatter):
    """Replaces FSDP2's reduce-scatter.

    Attributes:
        owner: the object that installed it.
    """

    def __init__(self, reduce: Reduce, previous: Any, owner: object, dtype_of_memory: DtypeOfMemory) -> None:
        self._reduce, self._previous, self.owner = reduce, previous, owner
        self._dtype_of_memory = dtype_of_memory

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for an input or output, allocated by the replaced reduce-scatter."""
        dtype = self._dtype_of_memory(dtype)
        return self._previous.allocate(size, dtype=dtype, device=device)  # type: ignore[no-any-return]

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce, or let the replaced reduce-scatter do it."""
        if not async_op and self._reduce(output_tensor, input_tensor, group, op):
            return None
        return self._previous(
            output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op
        )


@contextmanager
def watch_first_forward(callback: Callable[[nn.Module], object]) -> Iterator[None]:
    """Call ``callback(module)`` at the beginning of the first forward pass of each root module with fully_shard.

    The root module is unknown before that. Does nothing if this torch has another FSDP2.

    Args:
        callback: the callback. The forward pass raises its exceptions.
    """
    original = None if _MISSING else getattr(FSDPState, "_lazy_init", None)
    if original is None:
        yield
        return

    def begin(self: Any) -> None:
        is_first = getattr(self, "_is_root", True) is None
        original(self)
        if is_first:
            callback(self._modules[0])

    FSDPState._lazy_init = begin  # type: ignore[method-assign]
    try:
        yield
    finally:
        FSDPState._lazy_init = original  # type: ignore[method-assign]


def is_sharded(module: object) -> bool:
    """Say whether FSDP2 or ``replicate`` manages a module, or a part of it."""
    inner = uncompiled(module)
    return not _MISSING and isinstance(inner, nn.Module) and any(isinstance(m, FSDPModule) for m in inner.modules())


def find(module: nn.Module) -> list[ParamGroup]:
    """Return the parameter groups of a module that FSDP2 or ``replicate`` manages, in the order of its modules.

    Raises:
        TypeError: it is another module; the message says which kind.
        RuntimeError: this torch has another FSDP2.
    """
    if _MISSING:
        raise RuntimeError(_another_fsdp2(_MISSING))
    inner = uncompiled(module)
    if not isinstance(inner, nn.Module):
        raise TypeError(f"expected a module with fully_shard applied, received a {type(module).__name__}")
    parts = list(inner.named_modules())
    if any(isinstance(part, FullyShardedDataParallel) for _, part in parts):
        raise TypeError("expected FSDP2, received FullyShardedDataParallel (FSDP1); apply fully_shard instead")
    if isinstance(inner, DistributedDataParallel):
        raise TypeError("expected FSDP2, received DistributedDataParallel; use ddp_hooks.register")
    names: dict[tuple[int, str], str] = {}
    for prefix, part in parts:
        for name, _ in part.named_parameters(recurse=False):
            names.setdefault((id(part), name), f"{prefix}.{name}" if prefix else name)
    groups: list[ParamGroup] = []
    seen = set()
    for _, part in parts:
        if not isinstance(part, FSDPModule):
            continue
        state = part._get_fsdp_state()
        if not hasattr(state, "_fsdp_param_groups"):
            raise RuntimeError(_another_fsdp2("its modules have no _fsdp_param_groups"))
        for group in state._fsdp_param_groups:
            if id(group) in seen:
                continue
            seen.add(id(group))
            infos = [getattr(parameter, "_module_info", None) for parameter in getattr(group, "fsdp_params", ())]
            groups.append(
                ParamGroup(
                    group,
                    [
                        "?" if info is None else names.get((id(info.module), info.param_name), info.param_name)
                        for info in infos
                    ],
                )
            )
    if not groups:
        raise TypeError(
            f"expected a module with fully_shard applied, received {type(inner).__name__} without it; call "
            "torch.distributed.fsdp.fully_shard first"
        )
    return groups
