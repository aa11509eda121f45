"""Where a parameter's units lie, and which of them a gradient uses. test_units.py checks how long a unit is."""

from __future__ import annotations

import torch

import ddp_hooks
from ddp_hooks import _C
from ddp_hooks.serving.engine_settings import unit_settings


def parts_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor's real view: what travels are real numbers."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def unit_length(elements: int, rows: int, element_bytes: int, policy: ddp_hooks.Policy) -> int:
    """Return how many (real) elements make a unit of a parameter; 0 if it is not divided under that policy."""
    if policy.skip_zero_rows == "off" or rows == 0 or elements == 0:
        return 0
    place = _C.ParameterSlice(0, 0, elements, elements // rows)
    units = _C.units_of(place, element_bytes, unit_settings(policy))
    return units.length if len(units) > 1 else 0


def rows_of(parameter: torch.Tensor) -> int:
    return parameter.shape[0] if parameter.dim() > 0 else 0


def unit_numbers(parameter: torch.Tensor, policy: ddp_hooks.Policy) -> torch.Tensor | None:
    """Return for each (real) element of a parameter to which unit it belongs; None if it is not divided. On the CPU."""
    parts = parts_of(parameter).cpu()
    length = unit_length(parts.numel(), rows_of(parameter), parts.element_size(), policy)
    if length == 0:
        return None
    # A unit is a stretch of memory.
    numbers = torch.empty_like(parts, dtype=torch.int64)
    numbers.as_strided((parts.numel(),), (1,)).copy_(torch.arange(parts.numel()) // length)
    return numbers


def nonzero_in_memory(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return which (real) elements of a dense gradient are not zero, in the order of the parameter's memory.

    On the CPU, wherever the parameter is.
    """
    parts, gradient = parts_of(parameter).cpu(), gradient.cpu()
    nonzero = torch.empty_like(parts, dtype=torch.bool)
    nonzero.copy_(parts_of(gradient) != 0)
    return nonzero.as_strided((parts.numel(),), (1,)).clone()


def zero_units(numbers: torch.Tensor, *gradients: torch.Tensor) -> torch.Tensor:
    """Return the elements of units that are zero in all gradients."""
    used = torch.zeros(int(numbers.max()) + 1, dtype=torch.bool)
    for gradient in gradients:
        used[numbers[gradient != 0]] = True
    return ~used[numbers]
