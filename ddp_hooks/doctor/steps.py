"""The record of a step on one rank, and the units in which it counts zeros."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import _extension
from ..policies import PRESETS
from ..serving.engine_settings import unit_settings

_C = _extension.load()

# What a gradient holds: nothing, or it was not looked at; a non-zero in every unit; or in some.
NOTHING, EVERYTHING, SOMETHING = 0, 1, 2


@dataclass(slots=True)
class Step:
    """One synchronised step on one rank; a byte for each parameter where it says so.

    Attributes:
        received: 1 if a gradient was accumulated here.
        frozen: 1 if it requires no gradient now.
        values: NOTHING, EVERYTHING or SOMETHING.
        masks: of what holds SOMETHING, the mask of its units, in words of 64 bits.
        order: the parameters in the order in which gradients came, as 32-bit integers.
        begun_seconds: when the first gradient was there, since the step before ended.
        gradients_seconds: when all gradients were there, since the step before ended.
        seconds: when DDP had finalised, since the step before ended: what the step took.
        search_seconds: how long DDP took after the model's forward pass; it is then that it searches the graph.
        looked: whether the values were looked at; not any more when the memory for it is full.
    """

    received: bytes
    frozen: bytes
    values: bytes
    masks: dict[int, bytes]
    order: bytes
    begun_seconds: float
    gradients_seconds: float
    seconds: float
    search_seconds: float
    looked: bool


@dataclass(frozen=True, slots=True)
class Units:
    """How a gradient is divided into units, under every preset; lengths count real elements."""

    gradient_length: int
    length: int
    count: int


def divide_into_units(parameter: torch.Tensor) -> Units:
    """Return the units of a parameter's gradient."""
    parts = 2 if parameter.is_complex() else 1
    length = parameter.numel() * parts
    row_length = length // parameter.shape[0] if length and parameter.dim() else 0
    piece = _C.ParameterSlice(0, 0, length, row_length)
    units = _C.units_of(piece, parameter.element_size() // parts, unit_settings(PRESETS["skip_zeros"]))
    return Units(length, units.length, len(units))
