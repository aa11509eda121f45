"""Local SGD with torch's schedule and this package's averaging."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging import averagers

from ..serving.agreement import agree, refuse
from ..serving.groups import gather_tensor, resolve_group
from ..wording import check_int, short
from .parameters import average_named
from .tensors import check_not_empty, describe_layout, named_tensors, on_their_device, read_tensors

Parameters = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]


class PeriodicModelAverager(averagers.PeriodicModelAverager):
    """Averages a model over all ranks every ``period`` steps, after a warm-up.

    It replaces ``torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager``, with the same
    arguments, schedule and ``step`` counter, also inside ``PostLocalSGDOptimizer``. Unlike torch's, it averages in a
    few messages without a flat copy of the model. Parameters keep their memory, strides and dtypes, half precision is
    summed in float32, and all ranks end with the same bits. A parameter that lacks a gradient on some ranks is averaged
    on all of them, where torch would mix up the ranks' parameters.

    Args:
        period: the number of steps between two averagings, at least 1.
        warmup_steps: steps before the first averaging.
        process_group: the ranks to average over; the default group if ``None``.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or out of range.
        RuntimeError: torch.distributed is not initialized.

    Source:
        Lin, Stich, Patel, Jaggi: "Don't use large mini-batches, use local SGD", ICLR 2020.
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: dist.ProcessGroup | None = None) -> None:
        check_int("period", period, 1)
        check_int("warmup_steps", warmup_steps, 0)
        resolve_group(process_group)
        super().__init__(period, warmup_steps, process_group)

    def average_parameters(self, params: Parameters) -> None:
        """Count a step, and average the parameters that have a gradient on any rank if the schedule says so.

        Args:
            params: the parameters of a model, or the parameter groups of an optimizer; at least one.

        Raises:
            TypeError, ValueError, RanksAbsentError: as for :func:`ddp_hooks.sync.average_parameters`.
            RanksDisagreeError: as there, or if ranks are at different steps of their schedules.
        """
        due = self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0
        if due:
            schedule = {"period": self.period, "warmup_steps": self.warmup_steps, "step": self.step}
            _average_those_with_gradients(params, schedule, resolve_group(self.process_group))
        self.step += 1


def _average_those_with_gradients(params: Parameters, schedule: dict[str, int], group: dist.ProcessGroup) -> None:
    name = "PeriodicModelAverager.average_parameters"
    try:
        flat = list(_flatten(params))
        check_not_empty(flat, params)
        parameters = read_tensors(flat)
        named = named_tensors(parameters)
    except Exception as error:  # any error must reach the other ranks, which wait
        refuse(group, name, error)
    has_gradient = [parameter.grad is not None for parameter in parameters]
    with_gradient = torch.tensor(has_gradient, dtype=torch.uint8, device="cpu")
    with on_their_device(named):
        agree(group, name, schedule, describe_layout(named))
        on_any_rank = gather_tensor(group, with_gradient).any(dim=0).tolist()
    used_anywhere = [each for each, used in zip(named, on_any_rank, strict=True) if used]
    average_named(name, lambda: used_anywhere, group)


def _flatten(params: Parameters) -> Iterator[torch.Tensor]:
    if not isinstance(params, Iterable) or isinstance(params, (str, dict, torch.Tensor)):
        raise TypeError(
            f"expected the parameters of a model or the parameter groups of an optimizer, received {short(params)}; "
            "pass model.parameters() or optimizer.param_groups"
        )
    for element in params:
        if not isinstance(element, dict):
            yield element
        elif "params" in element:
            yield from element["params"]
        else:
            raise ValueError(
                f"expected parameter groups with a key 'params', received one with {short(list(element))}; pass "
                "model.parameters() or optimizer.param_groups"
            )
