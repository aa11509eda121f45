"""Workloads whose gradients are zero in whole rows: embeddings, stacked experts, blocks; and one where none is.

A row is a slice of a parameter along its first dimension. Every parameter has a gradient in every step, so nothing here
needs `find_unused_parameters`. Identifiers (tokens, users, items) are drawn by Zipf's law and are in no order, so that
used rows do not lie side by side. Dropout is off: all variants of a round have to compute the same.

Some are built from configurations of the package `transformers`, with random weights; it is imported when such a model
is built, and asked for when such a workload is made. The routers of untrained experts are not balanced: deeper layers
choose fewer experts than trained ones would.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tools.workload import Workload


@cache
def _zipf(count: int) -> tuple[Tensor, Tensor]:
    """The cumulated probabilities of the first to the last rank, and which identifier has that rank."""
    weights = 1.0 / torch.arange(1, count + 1, dtype=torch.float64)
    return (weights / weights.sum()).cumsum(0), torch.randperm(count, generator=torch.Generator().manual_seed(0))


def draw_by_zipf(count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw identifiers below `count`: the k-th most frequent one with a probability proportional to 1/k."""
    cumulated, identifiers = _zipf(count)
    ranks = torch.searchsorted(cumulated, torch.rand(shape, generator=generator, dtype=torch.float64))
    return identifiers[ranks.clamp_(max=count - 1)]


class RowWorkload(Workload):
    """A workload with settings of its own for each size; `batch` and `sequence` are those of one rank."""

    needs_find_unused = False
    is_static = True
    sizes: dict[str, dict[str, Any]]

    def __init__(self, size: str) -> None:
        if size not in self.sizes:
            raise ValueError(f"expected a size among {', '.join(self.sizes)} for {self.name}, received {size!r}")
        super().__init__(self.sizes[size])


class FromConfiguration(RowWorkload):
    """A model that `transformers` builds of a configuration, fed with tokens."""

    batch: int
    sequence: int

    def __init__(self, size: str) -> None:
        _require_transformers(self.name)
        super().__init__(size)

    def build(self) -> nn.Module:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        return self._build(transformers).train()

    def _build(self, transformers: Any) -> nn.Module:
        raise NotImplementedError

    def loss(self, model: nn.Module, pattern: int, rank: int) -> Tensor:
        generator = self._generator(pattern, rank)
        tokens = draw_by_zipf(self.size["vocab_size"], (self.batch, self.sequence), generator)
        return model(input_ids=tokens, labels=self._labels(tokens, generator)).loss

    def _labels(self, tokens: Tensor, generator: torch.Generator) -> Tensor:
        return tokens  # a language model predicts the next one


def _require_transformers(workload: str) -> None:
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if version == "none" or int(version.partition(".")[0]) < 5:  # before 5 each expert had parameters of its own
        raise ModuleNotFoundError(
            f"the workload {workload} needs transformers 5 or later, found {version}: pip install 'transformers>=5'"
        )


class E5(FromConfiguration):
    """A classifier of the shape of multilingual-e5-small: four fifths of its gradients are the word embeddings'."""

    name = "e5"
    question = "What are the unused words of a large vocabulary worth?"
    batch, sequence = 8, 32
    sizes = {
        "tiny": {"vocab_size": 2000, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64},
        "default": {"vocab_size": 250_037, "hidden_size": 384, "num_hidden_layers": 12, "intermediate_size": 1536},
    }

    def _build(self, transformers: Any) -> nn.Module:
        rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
        heads = 12 if self.size["hidden_size"] % 12 == 0 else 4
        configuration = transformers.BertConfig(num_attention_heads=heads, num_labels=2, **rates, **self.size)
        return transformers.BertForSequenceClassification(configuration)

    def _labels(self, tokens: Tensor, generator: torch.Generator) -> Tensor:
        return torch.randint(2, (self.batch,), generator=generator)


class _Experts(FromConfiguration):
    batch = 1
    # The one that neither loops over experts nor copies one for each token. It leaves exact zeros where no token went.
    implementation = "grouped_mm"


class Mixtral(_Experts):
    """Mixtral with 32 experts; each token takes 2."""

    name = "mixtral"
    question = "What are the experts without a token in stacked experts worth?"
    sequence = 16
    sizes = {
        "tiny": {"vocab_size": 500, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        # The proportions of Mixtral 8x7B; as many words as make 213 MB of gradients.
        "default": {"vocab_size": 17_312, "hidden_size": 256, "intermediate_size": 896, "num_hidden_layers": 2},
    }

    def _build(self, transformers: Any) -> nn.Module:
        configuration = transformers.MixtralConfig(
            num_attention_heads=8,
            num_key_value_heads=2,
            num_local_experts=32,
            num_experts_per_tok=2,
            use_cache=False,
            experts_implementation=self.implementation,
            **self.size,
        )
        return transformers.MixtralForCausalLM(configuration)


class Qwen3Moe(_Experts):
    """Qwen3-MoE with 128 experts; each token takes 8."""

    name = "qwen3_moe"
    question = "What are experts without a token worth when there are many small ones?"
    sequence = 32
    sizes = {
        "tiny": {"vocab_size": 500, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2},
        # The proportions of Qwen3-30B-A3B; as many words as make 213 MB of gradients.
        "default": {"vocab_size": 10_080, "hidden_size": 256, "moe_intermediate_size": 96, "num_hidden_layers": 5},
    }

    def _build(self, transformers: Any) -> nn.Module:
        configuration = transformers.Qwen3MoeConfig(
            num_attention_heads=8,
            num_key_value_heads=1,
            head_dim=32,
            num_experts=128,
            num_experts_per_tok=8,
            use_cache=False,
            experts_implementation=self.implementation,
            **self.size,
        )
        return transformers.Qwen3MoeForCausalLM(configuration)


class GPT2Dense(FromConfiguration):
    """A GPT-2 whose head is tied to its embedding: no zero row but the last position's, which predicts nothing."""

    name = "gpt2_dense"
    question = "What does looking for zero rows cost when there are none?"
    batch, sequence = 1, 64
    sizes = {
        "tiny": {"vocab_size": 500, "n_embd": 32, "n_layer": 2, "n_head": 4},
        "default": {"vocab_size": 10_000, "n_embd": 384, "n_layer": 7, "n_head": 6},
    }

    def _build(self, transformers: Any) -> nn.Module:
        rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        # As many positions as a sequence has, or the rest of them would be zero rows.
        configuration = transformers.GPT2Config(n_positions=self.sequence, use_cache=False, **rates, **self.size)
        return transformers.GPT2LMHeadModel(configuration)


class NeuMF(nn.Module):
    """Neural matrix factorisation (He et al. 2017): a product of two embeddings beside an MLP on two others."""

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.product_users = nn.Embedding(users, width)
        self.product_items = nn.Embedding(items, width)
        self.mlp_users = nn.Embedding(users, width)
        self.mlp_items = nn.Embedding(items, width)
        self.mlp = nn.Sequential(
            nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width // 2), nn.ReLU(), nn.Linear(width // 2, 16)
        )
        self.head = nn.Linear(width + 16, 1)

    def forward(self, users: Tensor, items: Tensor, labels: Tensor) -> Tensor:
        product = self.product_users(users) * self.product_items(items)
        deep = self.mlp(torch.cat([self.mlp_users(users), self.mlp_items(items)], -1))
        return F.binary_cross_entropy_with_logits(self.head(torch.cat([product, deep], -1)).squeeze(-1), labels)


class NCF(RowWorkload):
    """Neural collaborative filtering with the tables of MovieLens-20M; four drawn items to each that was rated."""

    name = "ncf"
    question = "What are the unused rows of a recommender's tables worth?"
    sizes = {
        "tiny": {"users": 2000, "items": 500, "width": 8, "batch": 32},
        "default": {"users": 138_493, "items": 26_744, "width": 64, "batch": 2048},
    }

    def build(self) -> nn.Module:
        return NeuMF(self.size["users"], self.size["items"], self.size["width"])

    def loss(self, model: nn.Module, pattern: int, rank: int) -> Tensor:
        generator, batch = self._generator(pattern, rank), (self.size["batch"],)
        users = draw_by_zipf(self.size["users"], batch, generator)
        rated = draw_by_zipf(self.size["items"], batch, generator)
        drawn = torch.randint(self.size["items"], batch, generator=generator)
        labels = (torch.rand(batch, generator=generator) < 0.2).float()
        return model(users, torch.where(labels > 0, rated, drawn), labels)


class OmniReduce(RowWorkload):
    """OmniReduce's microbenchmark (Fei et al. 2021): each rank fills a fraction of a tensor's blocks.

    A block of 256 numbers is a row here. Each rank draws its own blocks, in every pattern others. As there, the
    gradient lies in the same memory in every step: fresh zeros would take longer to make than to send.
    """

    name = "omnireduce"
    question = "What are zero blocks worth, by how many there are?"
    block = 256
    sizes = {"tiny": {"blocks": 512}, "small": {"blocks": 25_600}, "default": {"blocks": 102_400}}

    def __init__(self, size: str, density: float) -> None:
        super().__init__(size)
        if not 0.0 < density <= 1.0:
            raise ValueError(f"expected a density above 0 and up to 1, received {density:g}")
        self.density = density
        self._drawn: dict[tuple[int, int], Tensor] = {}

    @property
    def label(self) -> str:
        return f"omnireduce, {self.density:.0%} of blocks"

    def build(self) -> nn.Module:
        return _Given(self.size["blocks"], self.block)

    def loss(self, model: nn.Module, pattern: int, rank: int) -> Tensor:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        # What any rank fills is in everybody's gradient when the step is over.
        filled = [self._rows(pattern, other) for other in {*range(ranks), rank}]
        values = torch.randn(self.block, generator=self._generator(pattern, rank))
        return model(self._rows(pattern, rank), values, filled)

    def _rows(self, pattern: int, rank: int) -> Tensor:
        if (pattern, rank) not in self._drawn:
            blocks = self.size["blocks"]
            order = torch.randperm(blocks, generator=self._generator(pattern, rank))
            self._drawn[pattern, rank] = order[: max(1, round(self.density * blocks))].sort().values
        return self._drawn[pattern, rank]


class _Given(nn.Module):
    """One parameter, whose gradient is what the step says."""

    def __init__(self, blocks: int, block: int) -> None:
        super().__init__()
        self.tensor = nn.Parameter(torch.zeros(blocks, block))
        self._memory = np.zeros((blocks, block), dtype=np.float32)
        self._filled: list[Tensor] = []

    def forward(self, rows: Tensor, values: Tensor, filled: list[Tensor]) -> Tensor:
        return _WriteGradient.apply(self.tensor, self, rows, values, filled)

    def gradient(self, rows: Tensor, values: Tensor, filled: list[Tensor]) -> Tensor:
        # A new tensor over the old memory, so that autograd takes it as it is.
        gradient = torch.from_numpy(self._memory)
        for former in self._filled:
            gradient[former] = 0.0
        gradient[rows] = values
        self._filled = filled
        return gradient


class _WriteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, given: _Given, rows: Tensor, values: Tensor, filled: list[Tensor]) -> Tensor:
        ctx.given, ctx.filled = given, filled
        ctx.save_for_backward(rows, values)
        return tensor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows, values = ctx.saved_tensors
        return ctx.given.gradient(rows, values, ctx.filled), None, None, None, None


DENSITIES = (1.0, 0.4, 0.1, 0.01)
_SIMPLE: dict[str, Callable[[str], Workload]] = {w.name: w for w in (E5, Mixtral, Qwen3Moe, NCF, GPT2Dense)}
NAMES = (*_SIMPLE, *(f"{OmniReduce.name}:{density:g}" for density in DENSITIES))


def make(kind: str, argument: str, size: str) -> Workload | None:
    """Make a workload of `NAMES` or `omnireduce:<density>`; None if there is none of that kind."""
    if kind == OmniReduce.name:
        return OmniReduce(size, float(argument))
    return _SIMPLE[kind](size) if kind in _SIMPLE else None
