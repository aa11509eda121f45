"""The module that a program describes: layers that may be used in any number, any order, or not at all.

Every layer maps a batch of `WIDTH` float32 numbers to the same and is added to what goes past it, so that leaving one
out, or cutting the graph in front of one, never cuts others off from the loss. The head is always used, on every rank:
a rank that reaches no parameter does not reduce, and plain DDP waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .odd import Exchange
from .program import Layer

WIDTH = 8
ROWS = 3
# A layer takes its remainder. A row has two tokens of this rank's, and two that are the same everywhere.
TOKENS = 1 << 20
_COLUMNS = {"own": slice(0, 2), "shared": slice(2, 4), "both": slice(0, 4)}

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "complex64": torch.complex64,
}


class _Factor(torch.autograd.Function):
    """The identity, whose gradient is multiplied with a factor: NaN, say, where nothing else becomes one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


class Linear(nn.Module):
    """Two matrices with any width between them."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.dtype = DTYPES[layer["dtype"]]
        # With relu(), units of both matrices are zero where no row of the batch is positive.
        self.relu = layer.get("relu", False)
        self.inside = nn.Linear(WIDTH, layer["width"], bias=layer.get("bias", True), dtype=self.dtype)
        self.outside = nn.Linear(layer["width"], WIDTH, bias=False, dtype=self.dtype)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        inside = self.inside(x.to(self.dtype))
        out = self.outside(torch.relu(inside) if self.relu and not inside.is_complex() else inside)
        return (out.real if out.is_complex() else out).float()


class Square(nn.Module):
    """One square matrix, perhaps that of another layer."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.dtype = DTYPES[layer["dtype"]]
        self.matrix = nn.Linear(WIDTH, WIDTH, bias=layer.get("bias", True), dtype=self.dtype)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.matrix(x.to(self.dtype)).float()


def _look_up(table: nn.Module, rows: torch.Tensor, checkpointed: bool) -> torch.Tensor:
    """Backward may have to ask the forward pass once more for the rows, so that nobody knows them before."""
    return checkpoint(table, rows, use_reentrant=False) if checkpointed else table(rows)


class Embedding(nn.Module):
    """A table with few rows in use: once, twice, or as a head, too, which uses all of them."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.columns = _COLUMNS[layer.get("tokens", "own")]
        self.use = layer.get("use", "once")
        self.checkpointed = layer.get("checkpointed", False)
        self.table = nn.Embedding(
            layer.get("rows", 11),
            WIDTH,
            sparse=layer.get("sparse", False),
            padding_idx=0 if layer.get("padding") else None,
            scale_grad_by_freq=layer.get("by_frequency", False),
            dtype=DTYPES[layer["dtype"]],
        )

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        rows = tokens[:, self.columns] % self.table.num_embeddings
        out = _look_up(self.table, rows, self.checkpointed).float().mean(1)
        if self.use == "twice":
            out = out * self.table(rows.flip(0)[:, :1]).float().mean(1)
        if self.use == "head":
            out = out + 0.01 * nn.functional.linear(x.to(self.table.weight.dtype), self.table.weight).float().sum(
                1, True
            )
        return out


class Bag(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.columns = _COLUMNS[layer["tokens"]]
        self.checkpointed = layer.get("checkpointed", False)
        self.table = nn.EmbeddingBag(layer["rows"], WIDTH, mode=layer["mode"], dtype=DTYPES[layer["dtype"]])

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return _look_up(self.table, tokens[:, self.columns] % self.table.num_embeddings, self.checkpointed).float()


class Experts(nn.Module):
    """Two stacks of matrices; tokens say which are used, one by one or gathered."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.columns = _COLUMNS[layer["tokens"]]
        self.used, self.gathers = layer["used"], layer.get("gathers", False)
        dtype, experts, width = DTYPES[layer["dtype"]], layer["experts"], layer["width"]
        self.up = nn.Parameter((torch.randn(experts, width, WIDTH) * 0.3).to(dtype))
        self.down = nn.Parameter((torch.randn(experts, WIDTH, width) * 0.3).to(dtype))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        chosen = (tokens[:, self.columns].flatten() % len(self.up))[: self.used]
        x = x.to(self.up.dtype)
        if self.gathers:
            inside = torch.einsum("bi,eoi->ebo", x, self.up[chosen])
            out = torch.einsum("ebo,eio->bi", inside, self.down[chosen])
        else:
            out = sum((x @ self.up[e].T @ self.down[e].T for e in chosen.tolist()), torch.zeros_like(x))
        return (out.real if out.is_complex() else out).float()


class Convolution(nn.Module):
    """Perhaps with filters whose output counts for nothing, as after pruning."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.filters, self.prunes = layer.get("filters", 2), layer.get("prunes", False)
        self.convolution = nn.Conv2d(2, self.filters, 3, padding=1, dtype=DTYPES[layer["dtype"]])
        if layer.get("channels_last"):
            self.convolution.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        picture = x.view(-1, 2, 2, 2).to(self.convolution.weight.dtype)
        out = self.convolution(picture).float()
        if self.prunes:
            kept = torch.zeros(self.filters)
            kept[tokens[0] % self.filters] = 1
            out = out * kept[:, None, None]
        return out.reshape(len(x), -1, WIDTH).sum(1)


class Norm(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        affine = layer.get("affine", True)
        self.norm: nn.Module = (
            nn.BatchNorm1d(WIDTH, affine=affine) if layer["batch"] else nn.LayerNorm(WIDTH, elementwise_affine=affine)
        )

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Loose(nn.Module):
    """One parameter of any length: a scalar, none at all, a long one with perhaps a few rows in use."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        shape = layer["shape"]
        # Only so many rows are used, from one on that the tokens say.
        self.rows = layer.get("rows")
        self.value = nn.Parameter(torch.randn(shape, dtype=DTYPES[layer["dtype"]]) * 0.1 + 0.01)
        # What the gradient is exchanged for, without a hook.
        self.exchange: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        value = self.value if self.exchange is None else Exchange.apply(self.value, self.exchange)
        if self.rows is not None and value.dim() > 0 and len(value) > 0:
            first = int(tokens[0, 0]) % len(value)
            value = value[first : first + self.rows]
        return x * value.sin().sum().float() * (1.0 / max(1, self.value.numel()))


class Checkpointed(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.block = Linear(layer)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, tokens, use_reentrant=False)


KINDS: dict[str, type[nn.Module]] = {
    "linear": Linear,
    "square": Square,
    "embedding": Embedding,
    "bag": Bag,
    "experts": Experts,
    "convolution": Convolution,
    "norm": Norm,
    "loose": Loose,
    "checkpointed": Checkpointed,
}


class Model(nn.Module):
    def __init__(self, layers: list[Layer], output: str) -> None:
        super().__init__()
        self.output = output
        # By name, so that a layer's parameters keep their names when other layers are taken away.
        self.layers = nn.ModuleDict({name_of(layer): KINDS[layer["kind"]](layer) for layer in layers})
        self.names = {layer["id"]: name_of(layer) for layer in layers}
        self.head = nn.Linear(WIDTH, 3)
        # By the layer's number, for those that have one of their own.
        self.streams: dict[int, torch.Stream] = {}
        for layer in layers:
            other = next((other for other in layers if other["id"] == layer.get("tied_to")), None)
            if other is not None and (other["kind"], other["dtype"]) == ("square", layer["dtype"]):
                self.layers[name_of(layer)].matrix.weight = self.layers[name_of(other)].matrix.weight

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, used: list[int], factors: dict[int, float]) -> Any:
        for index in used:
            if index not in self.names:
                continue
            layer = self.layers[self.names[index]]
            # A factor must not spoil what comes before.
            out = self._run(layer, index, x.detach() if index in factors else x, tokens)
            x = torch.tanh(x + (_Factor.apply(out, factors[index]) if index in factors else out))
        x = self.head(x)
        if self.output == "tuple":
            return (x[:1], x[1:])
        return {"a": x[:1], "rest": [x[1:]]} if self.output == "dict" else x

    def _run(self, layer: nn.Module, index: int, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        own = self.streams.get(index)
        if own is None:
            return layer(x, tokens)
        callers = torch.accelerator.current_stream()
        own.wait_stream(callers)
        with own:
            out = layer(x, tokens)
        callers.wait_stream(own)
        # As whoever uses a tensor on two streams has to.
        for tensor in (x, tokens):
            tensor.record_stream(own)
        out.record_stream(callers)
        return out


def name_of(layer: Layer) -> str:
    return f"{layer['kind']}{layer['id']}"


def loss_of(output: Any) -> torch.Tensor:
    """Return a number that depends on all of a module's output."""
    if isinstance(output, dict):
        output = (output["a"], *output["rest"])
    if isinstance(output, tuple):
        return sum((part.square().sum() for part in output), torch.zeros((), device=output[0].device))
    return output.square().sum()
