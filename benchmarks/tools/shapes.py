"""The parameters of GPT-2, ResNet-50 and Llama, in the order and shapes of these models, and the work of layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

_WIDTH, _VOCABULARY, _POSITIONS, _BLOCKS = 768, 50257, 1024, 12
_STAGES = (3, 4, 6, 3)


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer asks of a device in its forward pass. Backward takes twice as much.

    Args:
        parameters: shapes.
        operations: multiplications and additions for each sample, a token or an image.
        launches: kernels.
    """

    parameters: tuple[tuple[int, ...], ...]
    operations: float
    launches: int


def layers_of_gpt2() -> Iterator[Layer]:
    """GPT-2's, with 12 layers (Radford et al. 2019); its head is its embedding."""

    def linear(inputs: int, outputs: int, launches: int) -> Layer:
        return Layer(((inputs, outputs), (outputs,)), 2 * inputs * outputs, launches)

    norm = Layer(((_WIDTH,), (_WIDTH,)), 0, 1)
    yield Layer(((_VOCABULARY, _WIDTH), (_POSITIONS, _WIDTH)), 0, 3)
    for _ in range(_BLOCKS):
        yield from (norm, linear(_WIDTH, 3 * _WIDTH, 6), linear(_WIDTH, _WIDTH, 2))  # attention is one of the six
        yield from (norm, linear(_WIDTH, 4 * _WIDTH, 3), linear(4 * _WIDTH, _WIDTH, 2))
    yield norm
    yield Layer((), 2 * _VOCABULARY * _WIDTH, 4)


def layers_of_resnet50() -> Iterator[Layer]:
    """ResNet-50's (He et al. 2016), on images of 224 pixels: each convolution with its batch norm."""

    def convolution(outputs: int, inputs: int, kernel: int, pixels: int) -> Layer:
        weight = (outputs, inputs, kernel, kernel)
        return Layer((weight, (outputs,), (outputs,)), 2 * math.prod(weight) * pixels**2, 3)

    yield convolution(64, 3, 7, 112)
    inputs = 64
    for stage, blocks in enumerate(_STAGES):
        width, pixels = 64 << stage, 56 >> stage
        for block in range(blocks):
            yield convolution(width, inputs, 1, pixels)
            yield convolution(width, width, 3, pixels)
            yield convolution(4 * width, width, 1, pixels)
            if block == 0:
                yield convolution(4 * width, inputs, 1, pixels)
            inputs = 4 * width
    yield Layer(((1000, 2048), (1000,)), 2 * 1000 * 2048, 3)


LAYERS = {"gpt2": layers_of_gpt2, "resnet50": layers_of_resnet50}


def blocks_of_llama(width: int, words: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Return what is sharded together of a model like Llama 3 (8B has a width of 4096): embedding, blocks, and head."""
    yield ((words, width),)
    inner, keys = 7 * width // 2, width // 4
    attention = ((width,), (width, width), (keys, width), (keys, width), (width, width))
    for _ in range(32):
        yield (*attention, (width,), (inner, width), (inner, width), (width, inner))
    yield (width,), (words, width)


def half_frozen(layers: list[Layer]) -> list[bool]:
    """Say of each layer whether it is frozen: every other one of those that have parameters."""
    places = [index for index, layer in enumerate(layers) if layer.parameters]
    return [index in places[::2] for index in range(len(layers))]
