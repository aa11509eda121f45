"""What a module has to fulfil before a hook may be registered, and what its ranks compare then."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import _extension
from .._version import __version__
from ..policies import Policy
from ..wording import short_list
from .agreement import Proposal, exchange_proposals
from .reducer import finalizes_manually, parameters_of
from .wrappers import uncompiled

_C = _extension.load()

# In which the engine scans, scales and packs gradients.
_REAL_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def why_unsupported(ddp: DistributedDataParallel) -> str | None:
    """Say what about the module cannot be supported, and the way out; None if all is well."""
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
            # It may have come with ddp_hooks.enable, so that its state is in nobody's hands; or with a detached state.
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


def _why_reduced_twice(ddp: DistributedDataParallel) -> str | None:
    """Say which DDP module within the module all-reduces some of its gradients, too."""
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
            continue  # left to the inner one
        within = f"its submodule {place!r}" if place else "the model in it"
        return (
            f"expected a model that was wrapped once, but {within} is also a DistributedDataParallel module, which "
            f"all-reduces the full gradients of {short_list(names)} regardless of the hook; wrap the model only once, "
            "or leave these parameters to the inner module by passing their names to "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model before wrapping"
        )
    return None


def _why_no_gradients(ddp: DistributedDataParallel) -> str | None:
    """Say which parameters have gradients that cannot be reduced."""
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


def find_ddp(module: nn.Module, function: str) -> DistributedDataParallel:
    """Return the DDP module, also out of the wrapper that ``torch.compile(ddp)`` returns.

    Raises:
        TypeError: there is none; says what ``function`` received.
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
    """Say what else of torch synchronises the module or a part of it, and how; None if nothing is known to."""
    parts = module.modules() if isinstance(module, nn.Module) else ()
    # These packages put classes of their own among the base classes of what they are called with.
    owners = {kind.__module__ for part in parts for kind in type(part).__mro__}
    if any(name.startswith("torch.distributed._composable.replicate") for name in owners):
        return "replicate(), which averages gradients itself"
    if any(name.startswith(("torch.distributed.fsdp", "torch.distributed._composable.fsdp")) for name in owners):
        return "FSDP, which shards gradients"
    return None


def describe(
    policy: Policy, ddp: DistributedDataParallel, reduced: list[torch.Tensor], unmanaged: list[torch.Tensor]
) -> dict[str, str]:
    """Describe what all ranks must have in common: `reduced` are the Reducer's parameters, `unmanaged` the others."""
    return {
        "ddp_hooks": __version__,
        "torch": torch.__version__,
        "policy": repr(policy),
        "world size": str(dist.get_world_size(ddp.process_group)),
        "parameters": f"{_summary(reduced)} (digest of shapes and dtypes: {_digest(reduced)})",
        # DDP does not compare these, and does not send them while they are frozen.
        "parameters frozen when wrapped": _summary(unmanaged),
        "find_unused_parameters": str(ddp.find_unused_parameters),
        "static_graph": str(ddp.static_graph),
        # Some policies are refused with it, in the first forward pass: on every rank, if all have it.
        "require_manual_backward_finalization": str(finalizes_manually(ddp)),
        "device": ddp.device_type,
        "devices": describe_devices([*reduced, *unmanaged]),
    }


def describe_devices(parameters: Sequence[torch.Tensor]) -> str:
    """Say how parameters lie on devices, whatever numbers these have: what shares one may share a message."""
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
    # Tells modules of as many elements apart, where ranks register several in different orders.
    shapes = hashlib.blake2b(digest_size=4)
    for parameter in parameters:
        shapes.update(f"{tuple(parameter.shape)} {parameter.dtype}\n".encode())
    return shapes.hexdigest()


class Distributed(Protocol):
    """What runs on the ranks of a process group: a DDP module, or anything else that has these."""

    @property
    def process_group(self) -> Any:
        """The group."""

    @property
    def device(self) -> torch.device:
        """Where its gradients lie."""

    @property
    def device_type(self) -> str:
        """The type of that."""


def propose(
    ddp: Distributed,
    function: str,
    description: Mapping[str, str],
    problem: str | None = None,
    own: object = None,
) -> list[Proposal]:
    """Exchange proposals with every rank of a module; as :func:`agreement.exchange_proposals` otherwise."""
    # Objects travel through the current device, which need not be the module's; two ranks may share it.
    with torch.accelerator.device_index(ddp.device.index) if ddp.device_type != "cpu" else nullcontext():
        return exchange_proposals(ddp.process_group, function, description, problem, own)
