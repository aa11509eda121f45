"""Describes a communication hook of the script: its name, what it does to gradients, and what it sends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .. import _extension
from ..serving.service import registered_service

_C = _extension.load()

_TORCHS = "torch.distributed.algorithms.ddp_comm_hooks"
_WRAPPERS = {"fp16_compress_wrapper": "float16", "bf16_compress_wrapper": "bfloat16"}


@dataclass(frozen=True, slots=True)
class OtherHook:
    """Plain values.

    Attributes:
        name: of the hook.
        effect: what it does, to follow "which"; empty where that is not known.
        step_bytes: what it hands to collectives in a step in which it compresses; None where that is not known. Bytes.
        averages: every rank gets the average of all; False of what leaves ranks apart.
        sends: it sends anything at all.
    """

    name: str
    effect: str
    step_bytes: int | None
    averages: bool = True
    sends: bool = True


def read_other_hook(ddp: DistributedDataParallel) -> OtherHook | None:
    """Return the hook that is registered with a module, if it is not this package's; by any thread."""
    if registered_service(ddp) is not None:
        return None
    registered = getattr(ddp, "_comm_hooks", ())
    if registered:
        hook, state = registered[-1]
        return _read(hook, state, ddp)
    # Of built-in ones DDP keeps a name only, and whoever asks for it waits for a backward pass under way to end.
    if not _C.reducer_has_hook(ddp.reducer) or _C.reducer_is_in_backward(ddp.reducer):
        return None
    with suppress(Exception):
        name = ddp._get_ddp_logging_data().get("comm_hook", "")  # type: ignore[no-untyped-call]
        if name.endswith("FP16_COMPRESS"):
            return _round("FP16_COMPRESS", "float16", ddp)
        if name.endswith("ALLREDUCE"):
            return _send_all("ALLREDUCE", ddp)
    return None


def _read(hook: Callable[..., Any], state: Any, ddp: DistributedDataParallel) -> OtherHook:
    name = getattr(hook, "__qualname__", type(hook).__qualname__).rsplit("<locals>.", 1)[-1]
    if not str(getattr(hook, "__module__", "")).startswith(_TORCHS):
        return OtherHook(name, "", None)
    wrapper = hook.__qualname__.split(".")[0]
    if wrapper in _WRAPPERS:
        return _unwrap(hook, wrapper, state, ddp)
    if name in ("fp16_compress_hook", "bf16_compress_hook"):
        return _round(name, "float16" if name.startswith("fp16") else "bfloat16", ddp)
    if name == "allreduce_hook":
        return _send_all(name, ddp)
    if name == "noop_hook":
        return OtherHook(name, "sends nothing", 0, averages=False, sends=False)
    if name in ("quantization_pertensor_hook", "quantization_perchannel_hook"):
        size = sum(parameter.numel() for parameter in _C.reducer_parameters(ddp.reducer))
        return OtherHook(name, "rounds gradients to 8 bits and gathers those of all ranks", size)
    if name == "powerSGD_hook":
        return _approximate(name, "gradients by matrices", state, sum(_matrix_sizes(ddp, state)))
    if name == "batched_powerSGD_hook":
        # Whatever the buckets' shapes, each is taken for a square.
        squares = [(math.ceil(math.sqrt(one.numel)), one) for one in _C.reducer_layout(ddp.reducer).buckets]
        size = sum(2 * side * state.matrix_approximation_rank * one.element_bytes for side, one in squares)
        return _approximate(name, "each bucket by a square matrix", state, size)
    if name == "post_localSGD_hook":
        start = getattr(state, "start_localSGD_iter", 0)
        return OtherHook(name, f"averages over all ranks only up to step {start}", None, averages=False)
    return OtherHook(name, "", None)


def _unwrap(hook: Callable[..., Any], wrapper: str, state: object, ddp: DistributedDataParallel) -> OtherHook:
    width = _WRAPPERS[wrapper]
    inner = next((cell.cell_contents for cell in hook.__closure__ or () if callable(cell.cell_contents)), None)
    found = OtherHook("", "", None) if inner is None else _read(inner, state, ddp)
    effect = f"rounds gradients to {width}" + (f" and {found.effect}" if found.effect else "")
    narrow = None if found.step_bytes is None else found.step_bytes * 2 // _widest(ddp)
    return OtherHook(f"{found.name} within {wrapper}", effect, narrow, found.averages, found.sends)


def _round(name: str, width: str, ddp: DistributedDataParallel) -> OtherHook:
    size = sum(2 * parameter.numel() for parameter in _C.reducer_parameters(ddp.reducer))
    return OtherHook(name, f"rounds every gradient to {width}", size)


def _send_all(name: str, ddp: DistributedDataParallel) -> OtherHook:
    size = sum(one.numel() * one.element_size() for one in _C.reducer_parameters(ddp.reducer))
    return OtherHook(name, "sends every gradient in full, as DDP does by itself", size)


def _approximate(name: str, what: str, state: Any, step_bytes: int) -> OtherHook:
    effect = f"approximates {what} of rank {state.matrix_approximation_rank}"
    if state.start_powerSGD_iter:
        effect += f" from step {state.start_powerSGD_iter + 1} on"
    return OtherHook(name, effect, step_bytes)


def _matrix_sizes(ddp: DistributedDataParallel, state: Any) -> Iterator[int]:
    for parameter in _C.reducer_parameters(ddp.reducer):
        rows = parameter.shape[0] if parameter.dim() else 1
        columns = parameter.numel() // max(rows, 1)
        low = (rows + columns) * min(rows, columns, state.matrix_approximation_rank)
        is_compressed = low * state.min_compression_rate < parameter.numel()
        yield (low if is_compressed else parameter.numel()) * parameter.element_size()


def _widest(ddp: DistributedDataParallel) -> int:
    sizes: list[torch.Tensor] = _C.reducer_parameters(ddp.reducer)
    return max((parameter.element_size() for parameter in sizes), default=4)
