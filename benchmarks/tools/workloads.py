"""What is trained in the benchmarks: real architectures in plain torch, and which of their parameters a step uses.

Every workload, those of `tools.row_workloads` and `tools.autocast_workloads` included, is made by its name here.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools import autocast_workloads, row_workloads
from tools.workload import SIZES, Size, Workload


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = self._make_mlp(width)

    def _make_mlp(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder-only language model; `dropped` names the blocks that a step leaves out."""

    def __init__(self, size: Size, block: type[Block] = Block) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Parameter(0.02 * torch.randn(size.sequence, size.width))
        self.blocks = nn.ModuleList(block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, dropped: frozenset[int] = frozenset()) -> Tensor:
        x = self.token(tokens) + self.position
        for i, block in enumerate(self.blocks):
            if i not in dropped:
                x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class TopOneExperts(nn.Module):
    """A layer of experts; each token goes to the one that its router prefers (Switch Transformer)."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        gate, choice = self.router(tokens).softmax(-1).max(-1)
        result = torch.zeros_like(tokens)
        for expert in choice.unique().tolist():
            mine = (choice == expert).nonzero().squeeze(1)
            result = result.index_add(0, mine, gate[mine, None] * self.experts[expert](tokens[mine]))
        return result.view_as(x)


class MixtureBlock(Block):
    """A transformer block whose MLP is a layer of experts."""

    experts = 8

    def _make_mlp(self, width: int) -> nn.Module:
        return TopOneExperts(width, self.experts)


class MultiTask(nn.Module):
    """A shared trunk with one head per task; a step trains one task on each rank."""

    def __init__(self, size: Size, touch_all: bool) -> None:
        super().__init__()
        self.touch_all = touch_all
        width = 2 * size.width
        self.trunk = nn.Sequential(
            nn.Linear(size.width, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, size.width)
        )
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width))
            for _ in range(size.task_heads)
        )

    def forward(self, x: Tensor, task: int | None) -> Tensor:
        features = self.trunk(x)
        loss = (features if task is None else self.heads[task](features)).square().mean()
        if self.touch_all:  # what people write so that DDP does not complain about unused parameters
            loss = loss + 0.0 * sum(p.sum() for head in self.heads for p in head.parameters())
        return loss


class Frozen(Workload):
    """(a) A GPT whose lower layers are frozen after wrapping, as when fine-tuning from the top."""

    name = "frozen"
    question = "What is freezing after wrapping worth?"
    is_static = True
    patterns = 1

    def __init__(self, size: Size, fraction: float) -> None:
        super().__init__(size)
        self.fraction = fraction

    @property
    def label(self) -> str:
        return f"frozen {self.fraction:.0%}"

    def build(self) -> nn.Module:
        return GPT(self.size)

    def after_wrapping(self, model: nn.Module) -> None:
        """Freeze whole parameters from the input upwards until the fraction is reached."""
        total = sum(p.numel() for p in model.parameters())
        frozen = 0
        for parameter in _from_the_input(model):
            if frozen + parameter.numel() / 2 > self.fraction * total:
                break
            parameter.requires_grad_(False)
            frozen += parameter.numel()

    def loss(self, model: nn.Module, pattern: int, rank: int) -> Tensor:
        return model(self._tokens(pattern, rank))


def _from_the_input(model: nn.Module) -> Iterable[nn.Parameter]:
    # GPT registers `position` before its submodules; otherwise registration order is the order of the forward pass.
    return model.parameters()


class LayerDrop(Workload):
    """(b) Each rank leaves out each block with probability one half, independently (stochastic depth)."""

    name = "layerdrop"
    question = "What is dropping layers independently on each rank worth?"
    drop_probability = 0.5

    def build(self) -> nn.Module:
        return GPT(self.size)

    def loss(self, model: nn.Module, pattern: int, rank: int) -> Tensor:
        choice = random.Random(97 * pattern + rank)
        dropped = frozenset(i for i in range(self.size.layers) if choice.random() < self.drop_probability)
        return model(self._tokens(pattern, rank), dropped)


class OneTaskPerRank(Workload):
    """(c) A shared trunk and a head per task; each rank trains one task in each step."""

    name = "multitask"
    question = "What is one task per rank and step worth?"
    touch_all = False

    @property
    def width(self) -> int:
        return self.size.width

    def build(self) -> nn.Module:
        return MultiTask(self.size, self.touch_all)

    def loss(self, model: nn.Module, pattern: int, rank: int) -> Tensor:
        x = torch.randn(self.size.batch * self.size.sequence, self.width, generator=self._generator(pattern, rank))
        return model(x, (3 * pattern + rank) % self.size.task_heads)


class ZeroTimesSum(OneTaskPerRank):
    """(e) The same with ``0 * p.sum()`` added to the loss: every parameter has a gradient, most are zero."""

    name = "zero_times_sum"
    question = "What is saved when unused parameters hide behind 0 * p.sum()?"
    needs_find_unused = False
    is_static = False
    touch_all = True


class Mixture(Workload):
    """(d) A mixture of experts with top-1 routing; an expert without tokens has no gradient."""

    name = "mixture"
    question = "What are experts without tokens worth?"

    def build(self) -> nn.Module:
        size = replace(self.size, width=self.size.width // 2, layers=2)
        block = type("MixtureBlock", (MixtureBlock,), {"experts": self.size.experts})
        return GPT(size, block)

    def loss(self, model: nn.Module, pattern: int, rank: int) -> Tensor:
        return model(self._tokens(pattern, rank))


class AllUsed(Workload):
    """(f) Every parameter is used in every step: nothing to gain, and the overhead shows."""

    name = "all_used"
    question = "What does it cost when there is nothing to skip?"
    needs_find_unused = False
    is_static = True
    patterns = 1

    def build(self) -> nn.Module:
        return GPT(self.size)

    def loss(self, model: nn.Module, pattern: int, rank: int) -> Tensor:
        return model(self._tokens(pattern, rank))


class Linears(Workload):
    """Twelve linear layers that every step uses: the exponents of their gradients are all there is to save."""

    name = "linears"
    question = "What is coding worth when there is nothing to skip, in float32?"
    needs_find_unused = False
    is_static = True

    def build(self) -> nn.Module:
        return nn.Sequential(*[nn.Linear(2 * self.size.width, 2 * self.size.width) for _ in range(12)])

    def loss(self, model: nn.Module, pattern: int, rank: int) -> Tensor:
        return model(torch.randn(4, 2 * self.size.width, generator=self._generator(pattern, rank))).square().mean()


class PartOfLayers(Workload):
    """Linear layers of equal size; a step uses the given fraction of them, the same on every rank."""

    name = "layers"
    question = "What does the hook cost on the host?"
    is_static = True
    patterns = 1
    layers = 40

    def __init__(self, size: Size, unused: float) -> None:
        super().__init__(size)
        self.unused = unused
        self.needs_find_unused = unused > 0

    @property
    def label(self) -> str:
        return f"layers {self.unused:.0%} unused"

    def build(self) -> nn.Module:
        return _Layers(self.size.width, self.layers)

    def loss(self, model: nn.Module, pattern: int, rank: int) -> Tensor:
        x = torch.randn(4, self.size.width, generator=self._generator(pattern, rank))
        return model(x, self.layers - round(self.unused * self.layers))


class _Layers(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, use: int) -> Tensor:
        step = len(self.layers) / use
        for i in range(use):
            x = x + self.layers[int(i * step)](x).tanh()
        return x.square().mean()


class Alternating(Workload):
    """Vectors of equal size. Every other one is used, so that every run of used gradients is one of them."""

    name = "alternate"
    question = "From what size should a run of used gradients travel in place?"
    is_static = True
    patterns = 1
    total_bytes = 32 << 20

    def __init__(self, size: Size, run_bytes: int) -> None:
        super().__init__(size)
        self.run_bytes = run_bytes

    @property
    def label(self) -> str:
        return f"runs of {self.run_bytes >> 10} KiB"

    def build(self) -> nn.Module:
        return _Alternating(self.run_bytes // 4, self.total_bytes // self.run_bytes)

    def loss(self, model: nn.Module, pattern: int, rank: int) -> Tensor:
        return model(torch.tensor(1.0 + rank))


class _Alternating(nn.Module):
    def __init__(self, length: int, count: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.randn(length) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.stack([vector.sum() for vector in self.vectors[::2]]).sum()


FRACTIONS = (0.0, 0.25, 0.5, 0.75, 0.9)
_SIMPLE = {w.name: w for w in (LayerDrop, OneTaskPerRank, Mixture, ZeroTimesSum, AllUsed)}
NAMES = (*(f"frozen:{fraction:g}" for fraction in FRACTIONS), *_SIMPLE)
ALL_NAMES = (*NAMES, Linears.name, *row_workloads.NAMES, *autocast_workloads.NAMES)


def make(name: str, size: str) -> Workload:
    """Make a workload by name: one of `ALL_NAMES`, or a kind with an argument.

    These are `frozen:<fraction>`, `layers:<fraction>`, `alternate:<bytes>`, `omnireduce:<density>` and
    `<model>_autocast:<dtype>:<passes>`.

    Raises:
        ValueError: there is no such workload, or not in that size.
        ModuleNotFoundError: it needs a package that is not installed; the message says how to get it.
    """
    kind, _, argument = name.partition(":")
    if kind == "frozen":
        return Frozen(SIZES[size], float(argument))
    if kind == "layers":
        return PartOfLayers(SIZES[size], float(argument))
    if kind == "alternate":
        return Alternating(SIZES[size], int(argument))
    if kind in _SIMPLE:
        return _SIMPLE[kind](SIZES[size])
    if kind == Linears.name:
        return Linears(SIZES[size])
    found = row_workloads.make(kind, argument, size) or autocast_workloads.make(kind, argument, size)
    if found is None:
        raise ValueError(f"expected a workload among {', '.join(ALL_NAMES)}, received {name!r}")
    return found
