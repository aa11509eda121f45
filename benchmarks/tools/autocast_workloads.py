"""Workloads whose gradients hold fewer bits than their dtype: dense models of `transformers` under autocast.

Under autocast a parameter is float32, and so is its gradient; but most are computed in a 16-bit type and cast, so that
their other bits are zero. All parameters are used in every step. Weights are random, dropout is off, images are noise.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from tools.row_workloads import E5, FromConfiguration, GPT2Dense
from tools.workload import Workload

_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Llama(FromConfiguration):
    """The shape of Llama 3.2: grouped queries, a gated MLP, no biases, the head tied to the embedding."""

    name = "llama"
    question = "What is coding worth under autocast in Llama's shape?"
    batch, sequence = 1, 64
    sizes = {
        "tiny": {"vocab_size": 500, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2},
        "default": {"vocab_size": 10_000, "hidden_size": 384, "intermediate_size": 1280, "num_hidden_layers": 7},
    }

    def _build(self, transformers: Any) -> nn.Module:
        configuration = transformers.LlamaConfig(
            num_attention_heads=6 if self.size["hidden_size"] % 6 == 0 else 4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            use_cache=False,
            **self.size,
        )
        return transformers.LlamaForCausalLM(configuration)


class Bert(FromConfiguration):
    """A BERT that predicts words, its head tied to its embedding."""

    name = "bert"
    question = "What is coding worth under autocast in BERT?"
    batch, sequence = 1, 64
    sizes = {
        "tiny": {"vocab_size": 500, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64},
        "default": {"vocab_size": 10_000, "hidden_size": 384, "num_hidden_layers": 7, "intermediate_size": 1536},
    }

    def _build(self, transformers: Any) -> nn.Module:
        configuration = transformers.BertConfig(
            num_attention_heads=6 if self.size["hidden_size"] % 6 == 0 else 4,
            # As many positions as a sequence has, or the rest of them would be zero rows.
            max_position_embeddings=self.sequence,
            **_NO_DROPOUT,
            **self.size,
        )
        return transformers.BertForMaskedLM(configuration)


class _OfImages(FromConfiguration):
    """A classifier of noise into 1,000 classes."""

    classes = 1000

    def loss(self, model: nn.Module, pattern: int, rank: int) -> Tensor:
        generator = self._generator(pattern, rank)
        side = self.size["image_size"]
        images = torch.randn(self.batch, 3, side, side, generator=generator)
        labels = torch.randint(self.classes, (self.batch,), generator=generator)
        return model(pixel_values=images, labels=labels).loss


class ViT(_OfImages):
    """A vision transformer of DeiT-small's width, with patches of 16 x 16."""

    name = "vit"
    question = "What is coding worth under autocast in a vision transformer?"
    batch = 1
    sizes = {
        "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "image_size": 32},
        "default": {"hidden_size": 384, "num_hidden_layers": 9, "intermediate_size": 1536, "image_size": 112},
    }

    def _build(self, transformers: Any) -> nn.Module:
        configuration = transformers.ViTConfig(
            num_attention_heads=6 if self.size["hidden_size"] % 6 == 0 else 4,
            num_labels=self.classes,
            **_NO_DROPOUT,
            **self.size,
        )
        return transformers.ViTForImageClassification(configuration)


class ResNet(_OfImages):
    """ResNet-50: convolutions, and batch norms whose statistics DDP broadcasts."""

    name = "resnet"
    question = "What is coding worth under autocast in a convolutional network?"
    batch = 4
    sizes = {
        "tiny": {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 8, "image_size": 32},
        "default": {
            "hidden_sizes": [256, 512, 1024, 2048],
            "depths": [3, 4, 6, 3],
            "embedding_size": 64,
            "image_size": 64,
        },
    }

    def _build(self, transformers: Any) -> nn.Module:
        shape = {name: value for name, value in self.size.items() if name != "image_size"}
        configuration = transformers.ResNetConfig(num_labels=self.classes, **shape)
        return transformers.ResNetForImageClassification(configuration)


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": None}
# Without a loss scale many of float16's gradients would be zero. GradScaler begins with 2^16 and halves that where a
# gradient overflows; these are constant, and nothing overflows. A power of two leaves a gradient's digits alone, and it
# is still in them when DDP averages, as it is with GradScaler.
LOSS_SCALES = {"vit": 2.0**13, "resnet": 2.0**8}
DEFAULT_LOSS_SCALE = 2.0**16
ENDING = "_autocast"


class UnderAutocast(Workload):
    """Another workload with its forward passes under autocast, and gradients accumulated over several of them."""

    needs_find_unused = False

    def __init__(self, model: str, inner: Workload, dtype: str, passes: int) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"expected a dtype among {', '.join(DTYPES)}, received {dtype!r}")
        if passes < 1:
            raise ValueError(f"expected at least 1 pass, received {passes}")
        super().__init__(inner.size)
        self._inner = inner
        self.dtype = dtype
        self.passes = passes
        self.name = model + ENDING
        self.question = inner.question
        self.loss_scale = LOSS_SCALES.get(model, DEFAULT_LOSS_SCALE) if dtype == "float16" else 1.0
        # static_graph wants its first pass to be a synchronised one.
        self.is_static = inner.is_static and passes == 1
        self.patterns = inner.patterns

    @property
    def label(self) -> str:
        how = "without autocast" if DTYPES[self.dtype] is None else f"under {self.dtype}"
        return f"{self.name.removesuffix(ENDING)} {how}" + (f", {self.passes} passes" if self.passes > 1 else "")

    def build(self) -> nn.Module:
        return self._inner.build()

    def after_wrapping(self, model: nn.Module) -> None:
        self._inner.after_wrapping(model)

    def loss(self, model: nn.Module, pattern: int, rank: int) -> Tensor:
        dtype = DTYPES[self.dtype]
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = self._inner.loss(model, pattern, rank)
        return loss if self.loss_scale == 1.0 else loss * self.loss_scale

    def backward(self, model: nn.Module, pattern: int, rank: int) -> None:
        """All passes, each with inputs of its own; DDP exchanges the sum with the last one."""
        no_sync = getattr(model, "no_sync", contextlib.nullcontext)
        for i in range(self.passes):
            with no_sync() if i + 1 < self.passes else contextlib.nullcontext():
                self.loss(model, pattern + i * self.patterns, rank).backward()


_MODELS = {"gpt2": GPT2Dense, "llama": Llama, "vit": ViT, "bert": Bert, "resnet": ResNet, "e5": E5}
NAMES = tuple(name + ENDING for name in _MODELS)


def make(kind: str, argument: str, size: str) -> Workload | None:
    """Make a workload of `NAMES`, or with a dtype and a number of passes; None if there is none of that kind.

    `gpt2_autocast` is `gpt2_autocast:bfloat16:1`; `:float32` is without autocast, `:float16` with a loss scale.
    """
    model = kind.removesuffix(ENDING)
    if kind == model or model not in _MODELS:
        return None
    dtype, _, passes = argument.partition(":")
    return UnderAutocast(model, _MODELS[model](size), dtype or "bfloat16", int(passes or 1))
