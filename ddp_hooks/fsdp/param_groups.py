"""The only file that looks into FSDP2: parameter groups, what lies where in a reduce-scatter's input, and who calls it.

What it reads is private to torch. `find` asks for each attribute, and refuses a torch that has others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..wrappers import uncompiled

try:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

    _MISSING = ""
except ImportError as _error:  # another torch
    _MISSING = str(_error)

# Of a parameter group, and of its parameters.
_ATTRIBUTES = (
    "fsdp_params",
    "mesh_info",
    "device",
    "post_backward",
    "reduce_grads",
    "all_reduce_grads",
    "gradient_divide_factor",
    "_reduce_scatter_comm",
    "_all_reduce_hook",
    "_training_state",
)
_PARAMETER_ATTRIBUTES = (
    "sharded_param",
    "padded_sharded_param_size",
    "unsharded_accumulated_grad",
    "fsdp_placement",
    "_module_info",
)
# Reduce-scatters that are torch's own, with memory as usual.
_PLAIN = ("DefaultReduceScatter", "ProcessGroupAllocReduceScatter")


@dataclass(frozen=True, slots=True)
class Participants:
    """Which parameters a reduction has.

    Attributes:
        included: those that lie in the reduce-scatter's input, in this order.
        used: those of them that have a gradient here; the others are zeros.
    """

    included: tuple[int, ...]
    used: frozenset[int]


@dataclass(frozen=True, slots=True)
class Column:
    """What a parameter takes of each rank's part of the input, in elements.

    Attributes:
        length: all of it, padding included.
        row_length: what shares an index of the first dimension.
    """

    length: int
    row_length: int


Reduce = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup, Any], bool]


class ParamGroup:
    """A group of parameters that FSDP2 reduces together.

    Args:
        inner: torch's ``FSDPParamGroup``.
        names: of its parameters, as the registered module calls them.
    """

    def __init__(self, inner: Any, names: Sequence[str]) -> None:
        self._inner = inner
        self.names = tuple(names)
        self._previous: Any = None
        self._previous_hook: Any = None
        self._participants: Participants | None = None

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self._inner.device  # type: ignore[no-any-return]

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Over which gradients are reduce-scattered; None where they are not sharded."""
        mesh_info = self._inner.mesh_info
        separate = getattr(mesh_info, "reduce_scatter_process_group", None)
        return separate or getattr(mesh_info, "shard_process_group", None)

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """Over which FSDP2 all-reduces by itself, with a mesh of two dimensions or ``replicate``."""
        return getattr(self._inner.mesh_info, "replicate_process_group", None)

    @property
    def reduces_everywhere(self) -> bool:
        """Whether the all-reduce is due, too: not under ``set_requires_all_reduce(False)``."""
        return bool(self._inner.all_reduce_grads)

    @property
    def divides_by_itself(self) -> bool:
        """Whether ``set_gradient_divide_factor`` says what all ranks' sum is divided by."""
        return self._inner.gradient_divide_factor is not None

    @property
    def has_hook(self) -> bool:
        """Whether reduced gradients pass through a hook."""
        return self._inner._all_reduce_hook is not None

    def columns(self) -> list[Column]:
        """Return what each parameter takes of a part, in their order."""
        columns = []
        for parameter in self._inner.fsdp_params:
            shape = parameter.padded_sharded_param_size
            # Of what is sharded along another dimension the parts are put together along the first.
            columns.append(Column(shape.numel(), shape[1:].numel()))
        return columns

    def is_frozen(self, index: int) -> bool:
        """Say whether a parameter does not require a gradient now."""
        return not self._inner.fsdp_params[index].sharded_param.requires_grad

    def numel(self, index: int) -> int:
        """Return the elements of the whole parameter."""
        return self._inner.fsdp_params[index].sharded_param.numel()  # type: ignore[no-any-return]

    @property
    def participants(self) -> Participants | None:
        """What the reduction has that is under way; None if none is."""
        return self._participants

    def _look_at_gradients(self) -> Participants:
        sends_unused = getattr(self._inner, "reduce_scatter_unused_params", False)
        included, used = [], []
        for i, parameter in enumerate(self._inner.fsdp_params):
            if not hasattr(parameter, "_unsharded_param"):
                continue
            if parameter.unsharded_accumulated_grad is not None or parameter._unsharded_param.grad is not None:
                used.append(i)
                included.append(i)
            elif sends_unused and parameter._unsharded_param.requires_grad:
                included.append(i)
        return Participants(tuple(included), frozenset(used))

    def install(self, reduce: Reduce, owner: object, finish: Callable[[Participants], None]) -> None:
        """Have reduce-scatters call ``reduce``, and torch's own where it returns False.

        Args:
            reduce: called with output, input, process group and operation.
            owner: what :attr:`owner` returns.
            finish: called after each reduction of this group, also one that has no gradient.
        """
        previous = self._previous = self._inner._reduce_scatter_comm
        self._inner._reduce_scatter_comm = _comm(reduce, previous, owner)
        original = self._inner.post_backward

        def post_backward(*unused: Any) -> None:
            if not self._inner.reduce_grads:
                original(*unused)
                return
            participants = self._participants = self._look_at_gradients()
            try:
                original(*unused)
            finally:
                self._participants = None
            finish(participants)

        self._inner.post_backward = post_backward

    def install_hook(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Have each reduced gradient pass through a hook before it is divided and copied."""
        self._previous_hook = self._inner._all_reduce_hook = hook

    def remove(self) -> None:
        """Take back what was installed, as far as it is still there."""
        if self.owner is not None:
            self._inner._reduce_scatter_comm = self._previous
        self._inner.__dict__.pop("post_backward", None)
        if self._previous_hook is not None and self._inner._all_reduce_hook is self._previous_hook:
            self._inner._all_reduce_hook = None

    @property
    def owner(self) -> object:
        """What was installed with the reduce-scatter that it has now; None if that is not ours."""
        return getattr(self._inner._reduce_scatter_comm, "ddp_hooks_owner", None)

    def why_unsupported(self) -> str | None:
        """Say what cannot be served, and the way out; None if all is well."""
        missing = [name for name in _ATTRIBUTES if not hasattr(self._inner, name)]
        for parameter in self._inner.fsdp_params[:1] if not missing else ():
            missing += [f"{name} of a parameter" for name in _PARAMETER_ATTRIBUTES if not hasattr(parameter, name)]
        if missing:
            return f"FSDP2 of torch {torch.__version__} has no {', '.join(missing)}, which ddp_hooks reads; use another"
        if self.device.type != "cpu":
            return f"expected parameters on the CPU, received some on {self.device.type}, which is not served yet"
        if "post_backward" in vars(self._inner):
            return "something else has replaced FSDPParamGroup.post_backward; register before it does"
        comm = type(self._inner._reduce_scatter_comm).__name__
        if comm not in _PLAIN:
            return f"a custom reduce-scatter is set already ({comm}), and FSDP2 takes one; do not set it"
        if self._inner._training_state.name != "IDLE":
            return "a forward or backward pass is under way; register between steps"
        return None


def _comm(reduce: Reduce, previous: Any, owner: object) -> Any:
    class SkippingReduceScatter(ReduceScatter):
        ddp_hooks_owner = owner

        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return previous.allocate(size, dtype=dtype, device=device)  # type: ignore[no-any-return]

        def __call__(
            self,
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            group: dist.ProcessGroup,
            op: Any,
            async_op: bool = False,
        ) -> Any:
            if not async_op and reduce(output_tensor, input_tensor, group, op):
                return None
            return previous(
                output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op
            )

    return SkippingReduceScatter()


def find(module: nn.Module) -> list[ParamGroup]:
    """Return the parameter groups of a module that FSDP2 or ``replicate`` manages, in the order of its modules.

    Raises:
        TypeError: it is no such module; says what it is.
        RuntimeError: this torch has another FSDP2.
    """
    if _MISSING:
        raise RuntimeError(f"ddp_hooks.fsdp: this torch has no FSDP2 that ddp_hooks knows: {_MISSING}")
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
        one = getattr(state, "_fsdp_param_group", None) if not hasattr(state, "_fsdp_param_groups") else None
        for group in [one] if one is not None else getattr(state, "_fsdp_param_groups", ()):
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
            f"expected a module with fully_shard applied, received {type(inner).__name__} without; call "
            "torch.distributed.fsdp.fully_shard first"
        )
    return groups
