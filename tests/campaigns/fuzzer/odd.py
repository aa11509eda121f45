"""Gradients that are odd: numbers that fit into fewer bits, all but a few, and those that arithmetic treats apart.

An odd gradient is a dictionary: `on` names the parameter and `kinds` says by rank what its gradient is exchanged for
(see `KINDS`; None leaves it alone). `where` is "all" or "used": elements that were zero stay so. `via` is "hook", a
hook on the tensor, or "function", an autograd function between the parameter and its use, where the layer has one.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import torch

Odd = dict[str, Any]
# The names of dtypes: numbers that are exactly of it, whatever dtype the gradient has. "mixed": each element one of
# `_PATTERNS`. "signed zeros": zeros of either sign.
KINDS = ("bfloat16", "float16", "24 bits", "float32", "mixed", "signed zeros")
# What makes weights NaN or infinite, so that the optimizer may not step.
SPOIL_WEIGHTS = ("mixed",)


def _bits(number: float) -> int:
    return struct.unpack("<I", struct.pack("<f", number))[0]


_PATTERNS = (
    # NaN: as arithmetic makes it, the other sign, a payload that bfloat16 keeps, one that it loses, signalling ones.
    *(0x7FC00000, 0xFFC00000, 0x7FD50000, 0x7FC00001, 0xFFC12345, 0x7F810000, 0x7F800001),
    *map(_bits, (float("inf"), float("-inf"), 0.0, -0.0, 1.0, -1.0, 0.5)),
    # Denormal: of float32 alone, of bfloat16, too; the largest one, and the number after it.
    *(0x00000001, 0x80000001, 0x000FFFFF, 0x00010000, 0x80400000, 0x007FFFFF, 0x00800000),
    # Float16: the largest, the first too large, the smallest, the first too small, denormal ones.
    *map(_bits, (65504.0, -65504.0, 65520.0, 65536.0, 2.0**-24, 2.0**-25, 3 * 2.0**-24, 2.0**-14, -(2.0**-15))),
    # The last digit of bfloat16, of float16, of 24 bits and of float32, and the ones after those.
    *map(_bits, (1 + 2.0**-7, 1 + 2.0**-8, 1 + 2.0**-10, 1 + 2.0**-11, 1 + 2.0**-15, 1 + 2.0**-16, 1 + 2.0**-23)),
    # Large, but three of them add up to a number: whether a sum overflows must not depend on its order.
    *map(_bits, (1e38, -1e38)),
)


def odd_gradient(gradient: torch.Tensor, odd: Odd, kind: str, seed: int) -> torch.Tensor:
    """Return what a dense gradient is exchanged for; the same for the same seed and parameter."""
    generator = torch.Generator().manual_seed(seed * 7919 + zlib.crc32(odd["on"].encode()) % 10**6)
    numbers = _numbers(kind, gradient.numel(), gradient.dtype, generator).view(gradient.shape).to(gradient.device)
    return numbers if odd.get("where") != "used" else torch.where(gradient != 0, numbers, gradient)


def _numbers(kind: str, count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if kind == "mixed":
        patterns = torch.tensor([_signed(bits) for bits in _PATTERNS], dtype=torch.int32)
        return patterns[torch.randint(len(patterns), (count,), generator=generator)].view(torch.float32).to(dtype)
    if kind == "signed zeros":
        return torch.where(torch.rand(count, generator=generator) < 0.5, 0.0, -0.0).to(dtype)
    numbers = torch.randn(count, generator=generator, dtype=torch.float64) * 0.01
    if kind == "24 bits":
        exact = (numbers.float().view(torch.int32) & -256).view(torch.float32)
    else:
        exact = numbers.to(getattr(torch, kind)).float()
    # None has all bits, or one, or one in a hundred.
    chosen = torch.rand(count, generator=generator)
    how = int(torch.randint(3, (1,), generator=generator))
    is_full = chosen < 0.01 if how == 2 else (chosen == chosen.min()) & (how == 1) if count else chosen < 0
    return torch.where(is_full, numbers, exact.double()).to(dtype)


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits >> 31 else bits


class Exchange(torch.autograd.Function):
    """The identity, whose gradient a function exchanges."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Any) -> torch.Tensor:
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.exchange(gradients[0]), None
