"""Local SGD: torch's schedule of model averaging, with this package's averaging inside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging import averagers

from .agreement import agree, gather_tensor, refuse, resolve_group
from .sync import average_parameters
from .tensors import describe_layout, named_tensors

Parameters = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]


class PeriodicModelAverager(averagers.PeriodicModelAverager):
    """Averages a model over all ranks every ``period`` steps, after a warm-up.

    A drop-in for ``torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager``: the same arguments,
    schedule and ``step`` counter, usable inside ``PostLocalSGDOptimizer``. What differs: parameters are averaged in few
    messages without a flat copy of the model, keep their memory and strides, half precision is summed in float32, mixed
    dtypes stay what they are, and all ranks end bitwise alike. A parameter without a gradient on one rank only is
    averaged on all ranks, where torch would mix up the ranks' parameters.

    Args:
        period: steps from one averaging to the next, at least 1.
        warmup_steps: steps before the first averaging.
        process_group: the ranks to average over; the default group if ``None``.

    Source:
        Lin, Stich, Patel, Jaggi: "Don't use large mini-batches, use local SGD", ICLR 2020.
    """

    def average_parameters(self, params: Parameters) -> None:
        """Count a step, and average the parameters that have a gradient on any rank if the schedule says so.

        Args:
            params: the parameters of a model, or the parameter groups of an optimizer.

        Raises:
            TypeError, ValueError, RanksDisagreeError: as :func:`ddp_hooks.average_parameters`.
        """
        due = self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0
        if due:
            _average_those_with_gradients(params, resolve_group(self.process_group))
        self.step += 1


def _average_those_with_gradients(params: Parameters, group: dist.ProcessGroup) -> None:
    name = "PeriodicModelAverager.average_parameters"
    try:
        parameters = list(_flatten(params))
        named = named_tensors(parameters)
    except (TypeError, KeyError) as error:
        refuse(group, name, error)
    agree(group, name, {}, describe_layout(named))
    with_gradient = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    on_any_rank = gather_tensor(group, with_gradient).any(dim=0).tolist()
    average_parameters(
        [parameter for parameter, used in zip(parameters, on_any_rank, strict=True) if used], process_group=group
    )


def _flatten(params: Parameters) -> Iterable[torch.Tensor]:
    for element in params:
        if isinstance(element, dict):
            yield from element["params"]
        else:
            yield element
