"""Eight tasks on scikit-learn's digits, a shared trunk with a head for each, and which rank trains which head when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from sklearn import datasets
from torch import Tensor, nn

CLASSES = {
    "digit": 10,
    "parity": 2,
    "remainder by three": 3,
    "five or more": 2,
    "prime": 2,
    "has a loop": 2,
    "quartile of ink": 4,
    "heavier above": 2,
}
TRAIN, VALIDATION = 1000, 398  # of 1797 samples; what is left is the test
SPLIT_SEED = 0
WIDTH, HEAD_WIDTH = 64, 32


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the samples: pixels (n x 64, 0 to 1), and the answers (n x tasks)."""

    pixels: Tensor
    answers: Tensor


def load_parts() -> dict[str, Part]:
    """The same split for every seed: seeds change weights, batches and the order of the tasks."""
    raw_pixels, raw_digits = datasets.load_digits(return_X_y=True)
    pixels = torch.from_numpy(raw_pixels).float() / 16.0
    digits = torch.from_numpy(raw_digits).long()
    ink = pixels.sum(1)
    primes, loops = torch.tensor([2, 3, 5, 7]), torch.tensor([0, 6, 8, 9])
    answers = torch.stack(
        (
            digits,
            digits % 2,
            digits % 3,
            (digits >= 5).long(),
            torch.isin(digits, primes).long(),
            torch.isin(digits, loops).long(),
            torch.bucketize(ink, ink.quantile(torch.tensor([0.25, 0.5, 0.75]))),
            (pixels[:, :32].sum(1) > pixels[:, 32:].sum(1)).long(),
        ),
        dim=1,
    )
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(SPLIT_SEED))
    ends = {"train": (0, TRAIN), "validation": (TRAIN, TRAIN + VALIDATION), "test": (TRAIN + VALIDATION, len(order))}
    return {name: Part(pixels[order[a:b]], answers[order[a:b]]) for name, (a, b) in ends.items()}


# Layers of the trunk and of each head: numbers of inputs and outputs.
TRUNK = ((64, WIDTH), (WIDTH, WIDTH))
HEADS = [((WIDTH, HEAD_WIDTH), (HEAD_WIDTH, classes)) for classes in CLASSES.values()]


class SideBySide(nn.Module):
    """A model for each learning rate, from the same weights: one exchange a step serves the whole sweep.

    Each part, the trunk and then the heads, is one parameter with a model in each row.
    """

    def __init__(self, models: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.parts = nn.ParameterList()
        for shapes in (TRUNK, *HEADS):
            layers = nn.Sequential(*(nn.Linear(*shape) for shape in shapes))
            row = nn.utils.parameters_to_vector(layers.parameters()).detach()
            self.parts.append(row.repeat(models, 1))

    def forward(self, pixels: Tensor, answers: Tensor, task: int) -> Tensor:
        """The sum of the models' losses, so that each row has the gradient of its own."""
        return self.losses(task, self.features(pixels), answers).sum()

    def features(self, pixels: Tensor) -> Tensor:
        return run_layers(self.parts[0], TRUNK, pixels.expand(len(self.parts[0]), -1, -1)).relu()

    def losses(self, task: int, features: Tensor, answers: Tensor) -> Tensor:
        """Each model's cross entropy on one task, in nats."""
        logits = run_layers(self.parts[1 + task], HEADS[task], features)
        expected = answers[:, task].repeat(len(logits))
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), expected, reduction="none")
        return losses.view(len(logits), -1).mean(1)

    @torch.no_grad()
    def all_losses(self, part: Part) -> list[list[float]]:
        """Each model's losses, by task."""
        features = self.features(part.pixels)
        return torch.stack([self.losses(i, features, part.answers) for i in range(len(HEADS))], dim=1).tolist()

    def weights(self) -> Tensor:
        return torch.cat([part.detach() for part in self.parts], dim=1)


def run_layers(rows: Tensor, shapes: Sequence[tuple[int, int]], x: Tensor) -> Tensor:
    """Linear layers with a rectifier in between; `x` is models x samples x inputs."""
    sizes = [size for inputs, outputs in shapes for size in (inputs * outputs, outputs)]
    pieces = rows.split(sizes, dim=1)
    for i, (inputs, outputs) in enumerate(shapes):
        weight = pieces[2 * i].view(-1, outputs, inputs)
        x = torch.baddbmm(pieces[2 * i + 1].unsqueeze(1), x.relu() if i else x, weight.transpose(1, 2))
    return x


# How often a task is drawn: all alike, or the first far more often than the last.
SHARES = {
    "uniform": [1 / len(CLASSES)] * len(CLASSES),
    "zipf": [1 / (i + 1) / sum(1 / (j + 1) for j in range(len(CLASSES))) for i in range(len(CLASSES))],
}


def draw_tasks(draw: str, steps: int, ranks: int, seed: int) -> Tensor:
    """Which task each rank trains in each step (steps x ranks), known to all of them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(torch.tensor(SHARES[draw]), steps * ranks, True, generator=generator).view(steps, ranks)


def mean_contributors(drawn: Tensor) -> float:
    """How many ranks train a head, mean over all steps and heads in which somebody does."""
    found = sum(len(step.unique()) for step in drawn)
    return drawn.numel() / found
