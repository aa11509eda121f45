"""A model with the layers of GPT-2 or ResNet-50, whose kernels take as long as their operations and compute nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tools import shapes

# Operations per second, and samples of a rank's batch: tokens or images.
OPERATIONS = {"gpt2": 400e12, "resnet50": 130e12}
# With as many samples, kernels take longer than launches (gpu), or not (launch).
SAMPLES = {"gpt2": {"gpu": 32768, "launch": 1024}, "resnet50": {"gpu": 256, "launch": 8}}

RunKernels = Callable[[int, float], None]


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, model: Model, layer: shapes.Layer, samples: int, *weights: Any) -> Any:
        seconds = layer.operations * samples / OPERATIONS[model.shape]
        ctx.model, ctx.layer, ctx.seconds, ctx.weights = model, layer, seconds, weights
        model.run_kernels(layer.launches, seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        # Of a frozen layer only what leads to its input.
        needed = ctx.needs_input_grad[4:]
        parts = 1 if needed and not any(needed) else 2
        ctx.model.run_kernels(parts * ctx.layer.launches, parts * ctx.seconds)
        gradients = [
            ctx.model.make_gradient(weight) if need else None for weight, need in zip(ctx.weights, needed, strict=True)
        ]
        return gradient, None, None, None, *gradients


class Model(nn.Module):
    """The layers of a shape.

    Args:
        shape: one of ``shapes.LAYERS``.
        run_kernels: puts so many kernels on the current stream, which take so many seconds together.
        rows: how many rows of the first parameter's gradient are not zero; None for all of them. Other gradients hold
            whatever lies in their memory.
    """

    def __init__(self, shape: str, run_kernels: RunKernels, rows: int | None = None) -> None:
        super().__init__()
        self.shape, self.run_kernels, self.rows = shape, run_kernels, rows
        self.kinds = list(shapes.LAYERS[shape]())
        self.layers = nn.ModuleList(
            nn.ParameterList(torch.empty(size) for size in layer.parameters) for layer in self.kinds
        )

    def freeze(self) -> None:
        """Freeze every other layer."""
        for layer, is_frozen in zip(self.layers, shapes.half_frozen(self.kinds), strict=True):
            layer.requires_grad_(not is_frozen)

    def make_gradient(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a gradient of a parameter."""
        if self.rows is None or weight is not self.layers[0][0]:
            return torch.empty_like(weight)
        gradient = torch.zeros_like(weight)
        gradient[: self.rows] = 1
        return gradient

    def forward(self, x: torch.Tensor, samples: int) -> torch.Tensor:
        """Return ``x``, after the kernels of all layers."""
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            x = _Run.apply(x, self, kind, samples, *layer)
        return x
