"""DDP's Reducer, seen from Python: what it reduces, and making it anew for something else."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import _extension

_C = _extension.load()


def reducible_parameters(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return the parameters that a Reducer of this module may have, by name, frozen or not."""
    return {n: p for n, p in ddp.module.named_parameters() if n not in ddp.parameters_to_ignore}


def parameters_of(ddp: DistributedDataParallel) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return what the module's Reducer reduces, and what it does not know."""
    reduced = _C.reducer_parameters(ddp.reducer)
    known = {id(parameter) for parameter in reduced}
    return reduced, [parameter for parameter in reducible_parameters(ddp).values() if id(parameter) not in known]


def finalizes_manually(ddp: DistributedDataParallel) -> bool:
    """Return DDP's ``require_manual_backward_finalization``; False where torch does not have it."""
    return bool(getattr(ddp, "require_manual_backward_finalization", False))


# What is made under torch.inference_mode() could not be written to by a training step.
@torch.inference_mode(False)
def rebuild_reducer(ddp: DistributedDataParallel, trainable: Set[str], find_unused_parameters: bool) -> bool:
    """Make the module's Reducer anew, in place, for some of its parameters, if that changes anything.

    Args:
        ddp: the module.
        trainable: the names of the parameters; the same on every rank.
        find_unused_parameters: DDP's setting from now on.

    Returns:
        Whether there is a new Reducer. It has no hook.

    Source:
        DDP makes its Reducer in the same way when it is unpickled (``DistributedDataParallel.__setstate__``).
    """
    named = reducible_parameters(ddp)
    reduced = {id(parameter) for parameter in _C.reducer_parameters(ddp.reducer)}
    if reduced == {id(named[name]) for name in trainable} and find_unused_parameters == ddp.find_unused_parameters:
        return False
    trainable_here = {name for name, parameter in named.items() if parameter.requires_grad}
    for name, parameter in named.items():
        if name not in trainable and parameter.grad is not None:
            # It may be a view of a bucket, and would keep the bucket alive.
            parameter.grad = parameter.grad.clone()
        # DDP takes what requires a gradient here; what is trainable elsewhere belongs to it on every rank.
        parameter.requires_grad_(name in trainable)
    ddp.find_unused_parameters = find_unused_parameters
    _make_reducer(ddp)
    for name, parameter in named.items():
        parameter.requires_grad_(name in trainable_here)
    return True


def initialize_used_map(ddp: DistributedDataParallel) -> None:
    """See to it that a rank that joins before its first step says that it has used nothing.

    The Reducer leaves the map that such a rank sends as it finds that memory, until it has finished a pass.
    """
    _C.initialize_reducer_used_map(ddp.reducer)


def _make_reducer(ddp: DistributedDataParallel) -> None:
    last_used = _last_used(ddp)
    # The old one goes first, so that its buckets are gone before the new ones come.
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
        # Memory that nobody has written to. A rank that joins sends it as what it has used in its last step.
        counts = [last_used.get(id(parameter), 0) for parameter in _C.reducer_parameters(ddp.reducer)]
        used.copy_(used.new_tensor(counts))


def _last_used(ddp: DistributedDataParallel) -> dict[int, int]:
    """Return how many ranks used each parameter in the last step, by identity; empty where DDP does not search."""
    used = _used_map(ddp)
    if used is None:
        return {}
    return {id(p): count for p, count in zip(_C.reducer_parameters(ddp.reducer), used.tolist(), strict=True)}


def _used_map(ddp: DistributedDataParallel) -> torch.Tensor | None:
    # Undefined, which is None in Python, where the Reducer does not search the graph.
    return ddp.reducer._get_local_used_map()
