"""Looks at a DDP module from Python: finds it, checks whether it can be served, and rebuilds its Reducer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import _extension
from .._version import __version__
from ..policies import Policy
from ..wording import short_list

_C = _extension.load()

T = TypeVar("T")

# The real dtypes of gradients that the engine can scan, scale and pack.
_REAL_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


# --- finding the module


def uncompiled(module: T) -> T | nn.Module:
    """Return the module inside a result of ``torch.compile(module)``; anything else is returned unchanged."""
    inner = getattr(module, "_orig_mod", None) if isinstance(module, nn.Module) else None
    return inner if isinstance(inner, nn.Module) else module


def find_ddp(module: nn.Module, function: str) -> DistributedDataParallel:
    """Return a DDP module, which may be inside a result of ``torch.compile(ddp)``.

    Raises:
        TypeError: it is something else. The message begins with ``function``.
    """
    inner = uncompiled(module)
    if isinstance(inner, DistributedDataParallel):
        return inner
    expected = f"{function}: expected a DistributedDataParallel module, received"
    other = _other_wrapper(inner)
    if other is not None:
        raise TypeError(
            f"{expected} a module of {other}. ddp_hooks is a hook for DistributedDataParallel and does nothing here: "
            "wrap the model in DistributedDataParallel instead, if it fits on every device, or train without "
            "ddp_hooks. For fully_shard on the CPU, call ddp_hooks.fsdp.register"
        )
    way_out = "wrap the model first"
    if not dist.is_initialized():
        way_out = "call torch.distributed.init_process_group() on every rank first, and then wrap the model"
    raise TypeError(f"{expected} {type(module).__name__}; {way_out}")


def _other_wrapper(module: object) -> str | None:
    """Say which other wrapper of torch synchronises the module or a part of it; None if none is known."""
    parts = module.modules() if isinstance(module, nn.Module) else ()
    # These packages add a base class to the modules that they wrap.
    owners = {kind.__module__ for part in parts for kind in type(part).__mro__}
    if any(name.startswith("torch.distributed._composable.replicate") for name in owners):
        return "replicate(), which averages gradients itself"
    if any(name.startswith(("torch.distributed.fsdp", "torch.distributed._composable.fsdp")) for name in owners):
        return "FSDP, which shards gradients"
    return None


# --- checks before it is served, and what ranks compare


def why_unsupported(ddp: DistributedDataParallel) -> str | None:
    """Say why the module cannot be supported, and what to do; None if it can."""
    if getattr(ddp, "_delay_all_reduce_all_params", False):
        return "delay_all_reduce_named_params delays every parameter, which leaves nothing for a hook; do not set it"
    if getattr(ddp, "_use_python_reducer", False):
        return (
            "DDP's Python reducer (compiled autograd) has no buckets for a hook; set "
            "torch._dynamo.config.optimize_ddp = True before wrapping the module"
        )
    if ddp.mixed_precision is not None:
        return "DDP(mixed_precision=...) registers a hook of its own; use torch.autocast instead"
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.module.parameters()):
        return (
            "an optimizer applied in backward makes DDP register a hook of its own; step the optimizer after backward"
        )
    if _C.reducer_has_hook(ddp.reducer):
        registered = ddp._get_ddp_logging_data().get("comm_hook")  # type: ignore[no-untyped-call]
        way_out = ""
        if registered == "skip_unused_hook":
            # Nobody may hold its state: ddp_hooks.enable may have registered it, or the state was detached.
            way_out = "; close() its state, which ddp_hooks.states() returns; if it is not there, wrap the model again"
        return f"a communication hook is already registered ({registered}), and DDP takes only one{way_out}"
    device = next((parameter.device for parameter in ddp.module.parameters()), torch.device(ddp.device_type))
    if why := _C.why_unserved(device):
        return f"parameters on {device.type} cannot be served: {why}"
    if _C.reducer_skips_unused_by_local_list(ddp.reducer):
        return (
            "DDP(skip_all_reduce_unused_params=True) lets each rank decide alone, keeps buckets from the hook "
            "and hangs when ranks differ; remove it, because this hook skips them by agreement"
        )
    if _C.reducer_is_in_backward(ddp.reducer):
        return "a backward pass is under way; make the state before backward() begins"
    return _why_reduced_twice(ddp) or _why_no_gradients(ddp)


def why_not_coded(policy: Policy, ddp: DistributedDataParallel) -> str | None:
    """Say why a policy that always codes gradients cannot serve the module; None if it can."""
    if policy.coded == "on" and ddp.device_type != "cpu":
        return (
            f"coded='on' was set for gradients on {ddp.device_type}, and only gradients on the CPU are coded; set "
            "coded='auto' or 'off'"
        )
    return None


def _why_reduced_twice(ddp: DistributedDataParallel) -> str | None:
    """Say which DDP module inside the module also all-reduces some of its gradients."""
    reduced, unmanaged = parameters_of(ddp)
    own = {id(parameter) for parameter in (*reduced, *unmanaged)}
    for place, inner in ddp.module.named_modules():
        if not isinstance(inner, DistributedDataParallel) or not inner.require_backward_grad_sync:
            continue
        if dist.get_rank(inner.process_group) < 0 or dist.get_world_size(inner.process_group) == 1:
            continue  # it sends nothing
        shared = {id(parameter) for parameter in _C.reducer_parameters(inner.reducer)} & own
        names = [name for name, parameter in ddp.module.named_parameters() if id(parameter) in shared]
        if not names:
            continue  # the inner module alone reduces its parameters
        within = f"its submodule {place!r}" if place else "the model in it"
        return (
            f"expected a model that was wrapped once, but {within} is also a DistributedDataParallel module, which "
            f"all-reduces the full gradients of {short_list(names)} regardless of the hook; wrap the model only once, "
            "or leave these parameters to the inner module by passing their names to "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model before wrapping"
        )
    return None


def _why_no_gradients(ddp: DistributedDataParallel) -> str | None:
    """Say which parameters have gradients of unsupported dtypes."""
    trained = {id(parameter) for parameter in _C.reducer_parameters(ddp.reducer)}
    odd = {
        name: parameter.dtype
        for name, parameter in ddp.module.named_parameters()
        if id(parameter) in trained and parameter.dtype.to_real() not in _REAL_DTYPES
    }
    if not odd:
        return None
    return (
        f"expected trained parameters of {', '.join(map(str, _REAL_DTYPES))}, or their complex dtypes, received "
        f"{short_list([f'{name} of {dtype}' for name, dtype in odd.items()])}; freeze them before wrapping, or train "
        "them in another dtype"
    )


def describe(
    policy: Policy, ddp: DistributedDataParallel, reduced: list[torch.Tensor], unmanaged: list[torch.Tensor]
) -> dict[str, str]:
    """Describe everything that must be equal on all ranks, given the Reducer's parameters and the unmanaged ones."""
    return {
        "ddp_hooks": __version__,
        "torch": torch.__version__,
        "policy": repr(policy),
        "world size": str(dist.get_world_size(ddp.process_group)),
        "parameters": f"{_summary(reduced)} (digest of shapes and dtypes: {_digest(reduced)})",
        # DDP neither compares nor sends them while they are frozen.
        "parameters frozen when wrapped": _summary(unmanaged),
        "find_unused_parameters": str(ddp.find_unused_parameters),
        "static_graph": str(ddp.static_graph),
        # Some policies are refused with it in the first forward pass, and every rank must refuse.
        "require_manual_backward_finalization": str(finalizes_manually(ddp)),
        "device": ddp.device_type,
        "devices": describe_devices([*reduced, *unmanaged]),
    }


def describe_devices(parameters: Sequence[torch.Tensor]) -> str:
    """Describe which parameters share a device, and so may share a message, whatever the devices' numbers."""
    places: dict[torch.device, int] = {}
    place_of = [places.setdefault(parameter.device, len(places)) for parameter in parameters]
    if len(places) <= 1:
        return "one"
    counts = " and ".join(str(place_of.count(place)) for place in places.values())
    digest = hashlib.blake2b(repr(place_of).encode(), digest_size=4).hexdigest()
    return f"{len(places)}, with {counts} parameters (digest of their devices: {digest})"


def _summary(parameters: list[torch.Tensor]) -> str:
    return f"{len(parameters)} with {sum(parameter.numel() for parameter in parameters)} elements"


def _digest(parameters: list[torch.Tensor]) -> str:
    # Tells modules of equal size apart if ranks register several modules in different orders.
    shapes = hashlib.blake2b(digest_size=4)
    for parameter in parameters:
        shapes.update(f"{tuple(parameter.shape)} {parameter.dtype}\n".encode())
    return shapes.hexdigest()


# --- the Reducer


def reducible_parameters(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return the parameters that a Reducer of this module may have, by name, including frozen ones."""
    return {n: p for n, p in ddp.module.named_parameters() if n not in ddp.parameters_to_ignore}


def parameters_of(ddp: DistributedDataParallel) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters that the module's Reducer reduces, and those that it does not know."""
    reduced = _C.reducer_parameters(ddp.reducer)
    known = {id(parameter) for parameter in reduced}
    return reduced, [parameter for parameter in reducible_parameters(ddp).values() if id(parameter) not in known]


def finalizes_manually(ddp: DistributedDataParallel) -> bool:
    """Return DDP's ``require_manual_backward_finalization``; False if this torch does not have it."""
    return bool(getattr(ddp, "require_manual_backward_finalization", False))


# A training step cannot write to tensors that are made under torch.inference_mode().
@torch.inference_mode(False)
def rebuild_reducer(ddp: DistributedDataParallel, trainable: Set[str], find_unused_parameters: bool) -> bool:
    """Rebuild the module's Reducer in place for some of its parameters, if that changes anything.

    Args:
        ddp: the module.
        trainable: the names of the parameters; the same on every rank.
        find_unused_parameters: the new value of DDP's setting.

    Returns:
        Whether there is a new Reducer, which has no hook yet.

    Source:
        ``DistributedDataParallel.__setstate__`` builds a Reducer in the same way after unpickling.
    """
    named = reducible_parameters(ddp)
    reduced = {id(parameter) for parameter in _C.reducer_parameters(ddp.reducer)}
    if reduced == {id(named[name]) for name in trainable} and find_unused_parameters == ddp.find_unused_parameters:
        return False
    trainable_here = {name for name, parameter in named.items() if parameter.requires_grad}
    for name, parameter in named.items():
        if name not in trainable and parameter.grad is not None:
            # A view of a bucket would keep the bucket alive.
            parameter.grad = parameter.grad.clone()
        # DDP takes the parameters that require a gradient; those of other ranks must be among them.
        parameter.requires_grad_(name in trainable)
    ddp.find_unused_parameters = find_unused_parameters
    _make_reducer(ddp)
    for name, parameter in named.items():
        parameter.requires_grad_(name in trainable_here)
    return True


def initialize_used_map(ddp: DistributedDataParallel) -> None:
    """Make sure that a rank that joins before its first step reports that it has used nothing.

    Until its first pass is finished, the Reducer sends a used map of uninitialised memory.
    """
    _C.initialize_reducer_used_map(ddp.reducer)


def _make_reducer(ddp: DistributedDataParallel) -> None:
    last_used = _last_used(ddp)
    # The old Reducer goes first, so that its buckets are freed before new ones are allocated.
    del ddp.reducer, ddp.logger
    parameters, expect_sparse_gradient = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    names = ddp._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
    ddp._ddp_init_helper(parameters, expect_sparse_gradient, names, ddp.static_graph)  # type: ignore[no-untyped-call]
    ddp._has_rebuilt_buckets = False
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()  # type: ignore[union-attr]
    if finalizes_manually(ddp):
        ddp.require_manual_backward_finalization = True  # type: ignore[assignment]  # torch before 2.15 has none
    used = _used_map(ddp)
    if used is not None:
        # It is uninitialised, and a rank that joins sends it as the used map of its last step.
        counts = [last_used.get(id(parameter), 0) for parameter in _C.reducer_parameters(ddp.reducer)]
        used.copy_(used.new_tensor(counts))


def _last_used(ddp: DistributedDataParallel) -> dict[int, int]:
    """Return how many ranks used each parameter in the last step, by identity; empty if DDP does not search."""
    used = _used_map(ddp)
    if used is None:
        return {}
    return {id(p): count for p, count in zip(_C.reducer_parameters(ddp.reducer), used.tolist(), strict=True)}


def _used_map(ddp: DistributedDataParallel) -> torch.Tensor | None:
    # Undefined, which is None in Python, if the Reducer does not search the graph.
    return ddp.reducer._get_local_used_map()
