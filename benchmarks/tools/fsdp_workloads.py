"""Models in blocks for FSDP2: the shapes of Llama and of Mixtral, small enough for two cores, made of torch alone.

Weights and tokens are random. Of Mixtral's experts each layer uses some for a whole sequence, and a rank has one
sequence, so ranks use different ones: what routers make of short sequences about one subject.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu


@dataclass(frozen=True, slots=True)
class Shape:
    words: int
    width: int
    inner: int
    layers: int
    heads: int
    experts: int = 0
    sequence: int = 64


class GatedMlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.inner, bias=False)
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """As many MLPs, and a router that chooses two of them for a sequence."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.experts = nn.ModuleList(GatedMlp(shape) for _ in range(shape.experts))
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.chosen: list[int] = [0, 1]

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x)[..., self.chosen].softmax(-1)
        outputs = torch.stack([self.experts[i](x) for i in self.chosen], -1)
        return (outputs * shares.unsqueeze(-2)).sum(-1)


class Layer(nn.Module):
    """Attention with grouped queries, and a gated MLP or several of them; norms before both."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        head = shape.width // shape.heads
        self.attention_norm = nn.RMSNorm(shape.width)
        self.queries = nn.Linear(shape.width, shape.width, bias=False)
        self.keys_and_values = nn.Linear(shape.width, 2 * 2 * head, bias=False)
        self.output = nn.Linear(shape.width, shape.width, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.width)
        self.mlp = Experts(shape) if shape.experts else GatedMlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.attention_norm(x)
        queries = self.queries(y).view(batch, length, self.heads, -1).transpose(1, 2)
        keys, values = self.keys_and_values(y).view(batch, length, 2, 2, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        x = x + self.output(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class FsdpWorkload:
    """A model, how it is sharded, and the loss of a step.

    Attributes:
        label: what tables call it.
        sizes: shapes by name.
        is_mixed: parameters are bfloat16 in forward and backward, sums are float32; otherwise all is float32.
        sends_unused: plain FSDP2 needs zeros for what a rank does not use.
    """

    label: str
    sizes: dict[str, Shape]
    is_mixed: bool = True
    sends_unused: bool = False

    def build(self, size: str, shard: Callable[..., Any]) -> nn.Module:
        """Make the model, the same on every rank, and shard each layer and the rest with ``shard(module)``."""
        torch.manual_seed(1234)
        model = Decoder(self.sizes[size])
        for layer in model.layers:
            shard(layer)
        shard(model)
        return model

    def draw(self, size: str, step: int, rank: int) -> tuple[list[list[int]], Tensor]:
        """Return the experts that each layer uses, where there are any, and the tokens."""
        shape = self.sizes[size]
        draw = torch.Generator().manual_seed(1000 * step + rank)
        chosen = []
        if shape.experts:
            chosen = [torch.randperm(shape.experts, generator=draw)[:2].tolist() for _ in range(shape.layers)]
        return chosen, torch.randint(shape.words, (1, shape.sequence + 1), generator=draw)

    def loss(self, model: nn.Module, size: str, step: int, rank: int) -> Tensor:
        chosen, tokens = self.draw(size, step, rank)
        for layer, experts in zip(model.layers if chosen else (), chosen, strict=True):  # type: ignore[arg-type]
            layer.mlp.chosen = experts
        return cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


_LLAMA = {
    "tiny": Shape(words=500, width=32, inner=96, layers=2, heads=4, sequence=16),
    "default": Shape(words=8_000, width=384, inner=1280, layers=6, heads=6),
}
_MIXTRAL = {
    "tiny": Shape(words=500, width=32, inner=64, layers=2, heads=4, experts=4, sequence=16),
    "default": Shape(words=4_000, width=256, inner=640, layers=4, heads=4, experts=8),
}
_FEW_WORDS = {size: replace(shape, words=16) for size, shape in _LLAMA.items()}
WORKLOADS = {
    "llama": FsdpWorkload("Llama's shape", _LLAMA),
    "llama_float32": FsdpWorkload("Llama's shape, float32", _LLAMA, is_mixed=False),
    # Every word is looked up in every step, so there is nothing to leave out.
    "llama_all_used": FsdpWorkload("Llama's shape, float32, all used", _FEW_WORDS, is_mixed=False),
    "mixtral": FsdpWorkload("Mixtral's shape", _MIXTRAL, sends_unused=True),
}
